"""Attention and encoder layers of torch's that need no gradient take a fast path, which they leave where something
overrides functions: a frozen part of a step takes eager's path while it is recorded, too, with eager's bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode

import takeback as tb
from harness import Case, train_both
from takeback.compiler.capture import modes
from takeback.compiler.capture.modes import unnoticed

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


@pytest.fixture(autouse=True)
def _eagers_own() -> Iterator[None]:
    before = overrides.has_torch_function
    yield
    assert overrides.has_torch_function is before


class Distilled(nn.Module):
    """A student beside a frozen teacher in eval mode."""

    def __init__(self, teacher: Callable[[], nn.Module], *, in_grad_mode: bool = False) -> None:
        super().__init__()
        self.teacher = teacher().eval().requires_grad_(False)
        self.student = nn.Linear(16, 16)
        self.in_grad_mode = in_grad_mode

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.in_grad_mode):
            target = self.teacher(x)
        return F.mse_loss(self.student(x), target)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Encodes(nn.Module):
    def __init__(self, *, padded: bool = False, nested: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.padded = padded

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]).expand(x.shape[:2]) >= 3 if self.padded else None
        return self.encoder(x, src_key_padding_mask=padding)  # type: ignore[no-any-return]


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


def draw(i: int) -> tuple[Tensor]:
    return (torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(i)),)


@pytest.mark.parametrize("in_grad_mode", [False, True], ids=["no_grad", "grad mode"])
@pytest.mark.parametrize(
    "teacher", [Attends, Encodes, lambda: Encodes(padded=True)], ids=["attention", "encoder", "padded encoder"]
)
@pytest.mark.parametrize("memory", ["auto", "min"])
def test_frozen_teacher_takes_eagers_path(teacher: Callable[[], nn.Module], in_grad_mode: bool, memory: str) -> None:
    train_both(Case(lambda: Distilled(teacher, in_grad_mode=in_grad_mode), loss_fn, draw), memory=memory)


def test_fast_path_is_the_one_that_is_recorded() -> None:
    """Else the bits above could be equal by chance."""
    model = Distilled(Attends)
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    step(*draw(0))
    assert step._last is not None
    assert "_native_multi_head_attention" in {op.name for op in step._last.executor.program.ops}


def test_step_is_recorded_anew_when_the_fast_path_is_switched_off() -> None:
    fast = torch.backends.mha.get_fastpath_enabled()

    def between(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.backends.mha.set_fastpath_enabled(i < 4)

    try:
        train_both(Case(lambda: Distilled(Encodes), loss_fn, draw, between=between), steps=8, plans=2)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def test_nested_tensor_that_an_encoder_makes_is_refused_with_the_way_out() -> None:
    model = Distilled(lambda: Encodes(padded=True, nested=True))
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(tb.CaptureError, match=r"nested tensor.*takes part in the step.*enable_nested_tensor=False"):
        step(*draw(0))


class Theirs(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_only_modes_of_takebacks_are_overlooked() -> None:
    class Overriding(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return super().__torch_function__(func, types, args, kwargs)

    ours = type("Ours", (Theirs,), {"__module__": "takeback.compiler.capture.reads"})
    plain, special = torch.ones(1), torch.ones(1).as_subclass(Overriding)
    with unnoticed():
        with ours():
            assert not overrides.has_torch_function((plain, nn.Parameter(plain)))
            assert overrides.has_torch_function((plain, special))
            with Theirs():
                assert overrides.has_torch_function((plain,))
        assert not overrides.has_torch_function((plain,))
        assert overrides.has_torch_function((special,))


def test_recordings_on_two_threads_leave_torchs_own_behind() -> None:
    before, inside, leave = overrides.has_torch_function, threading.Event(), threading.Event()

    def record() -> None:
        with unnoticed():
            inside.set()
            assert leave.wait(30)

    other = threading.Thread(target=record)
    with unnoticed():
        other.start()
        assert inside.wait(30)
    assert overrides.has_torch_function is modes._is_overridden, "the other one goes on"
    leave.set()
    other.join()
    assert overrides.has_torch_function is before

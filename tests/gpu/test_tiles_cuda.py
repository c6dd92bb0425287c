"""Kernels with tiles of takeback's own, at sizes that no tile divides: each is compared with double precision where
it is first used, and must be the one that runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.run import inductor, tile_forms

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("short_search")


def _perceptron() -> nn.Module:
    """The gradient of an activation, and its sum over all rows."""
    return nn.Sequential(nn.Linear(72, 1000), nn.GELU(), nn.Linear(1000, 72)).to(torch.bfloat16)


def _convolutions() -> nn.Module:
    """Batch norms whose channels lie together."""
    parts = [m for _ in range(2) for m in (nn.Conv2d(24, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU())]
    return nn.Sequential(*parts).to(torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("build", "shape"), [(_perceptron, (37, 197, 72)), (_convolutions, (37, 24, 57, 55))], ids=["rows", "channels"]
)
def test_kernels_with_other_tiles_are_right_and_run(
    build: Callable[[], nn.Module], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    original = tile_forms.choices

    def watched(**settings: bool) -> object:
        made = original(**settings)
        ask = made.triton_kernel_kwargs
        made.triton_kernel_kwargs = lambda *args: given.append(found := ask(*args)) or found  # type: ignore[func-returns-value]
        return made

    monkeypatch.setattr(inductor, "choices", watched)
    monkeypatch.setattr(inductor.kernel_file, "key_of", lambda *args: None)  # nothing of an earlier process
    torch.manual_seed(0)
    model = build().cuda()
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x

    def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(m(x).float(), x.float())

    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.01), mode="fast", memory="keep")
    for _ in range(4):
        step(x)
    assert any("fixed_config" in kernel for kernel in given if isinstance(kernel, dict))
    assert [k.note for k in step._maker.kernels.in_program(step._last.executor.program) if k.note] == []  # type: ignore[union-attr]

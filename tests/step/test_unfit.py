"""A step whose recording runs out of memory is planned from a few rows of its batch, and has eager's bits; or it is
refused with the reason, and nothing has changed.

Here memory is short by decree: a recording is told so once its results add up to more than an excerpt's. In a process
that really has too little, tests/step/limited.py trains.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import takeback as tb
from harness import Case, adamw, assert_same, sgd, state_of, train_both
from takeback import zoo
from takeback.compiler.planning import sums_up
from takeback.compiler.run import foreseen_step, recorded_step, verify
from takeback.compiler.run.room import OutOfRoom, Vigil, what_it_said
from takeback.errors import NoRoomError

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")

LIMIT_BYTES = 64 << 10


class Scarce(Vigil):
    """There is room for a few rows only."""

    taken = 0

    def took_(self, size_bytes: int) -> None:
        self.taken += size_bytes
        if self.taken > LIMIT_BYTES:
            raise OutOfRoom("no room, for a test")


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_step, "Vigil", Scarce)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def draw(i: int, rows: int = 256) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(rows, 8, generator=generator), torch.randint(4, (rows,), generator=generator)


def with_aux(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
    out = model(x)
    return F.cross_entropy(out, y), {"out": out, "rows": torch.tensor(float(len(x)))}


def checkpointed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = checkpoint(model, x, use_reentrant=False)
    return F.cross_entropy(out, y)


def reads(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A value that is the same for the excerpt and for the whole batch."""
    scale = 2.0 if bool((y >= 0).all()) else 1.0
    return F.cross_entropy(model(x), y) * scale


def counts(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Numbers and constants of the batch's size."""
    total = torch.tensor(0.0)
    total += F.cross_entropy(model(x), y, reduction="sum")
    return total / len(x) + model(x).square().sum() / torch.tensor([float(x.numel())]).sum()


def second(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Rows are counted by dimension 1 of the one, and 0 of the other."""
    return F.cross_entropy(model(x.mean(0)), y)


def draw_second(i: int) -> tuple[Tensor, Tensor]:
    x, y = draw(i)
    return torch.stack([x, x + 1, x * 2]), y


def masked(model: nn.Module, x: Tensor, *, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


CASES = {
    "batch norm, dropout and Adam": Case(net, mean_loss, draw),
    "momentum, whose first step is another": Case(net, mean_loss, draw, sgd),
    "accumulate": Case(net, mean_loss, draw, settings={"accumulate": 4}),
    "clip": Case(net, mean_loss, draw, settings={"clip_norm": 0.1}),
    "early": Case(net, mean_loss, draw, settings={"update": "early", "keep_grads": False}),
    "aux and a constant": Case(net, with_aux, draw),
    "checkpoint with dropout": Case(net, checkpointed, draw),
    "a value read into Python": Case(net, reads, draw),
    "numbers of the batch's size": Case(net, counts, draw),
    "rows in another dimension": Case(net, second, draw_second),
    "kwargs": Case(net, masked, lambda i: ((draw(i)[0],), {"y": draw(i)[1]}), has_kwargs=True),
    "an optimizer of its own": Case(net, mean_loss, draw, lambda m: torch.optim.RMSprop(m.parameters())),
    "least memory": Case(net, mean_loss, draw, settings={"memory": "min"}),
    "a target": Case(net, mean_loss, draw, settings={"memory": "0.9x"}),
    "poison": Case(net, mean_loss, draw),
}


@pytest.mark.usefixtures("scarce")
@pytest.mark.parametrize("name", CASES)
def test_step_that_cannot_be_recorded_has_eagers_bits(name: str) -> None:
    step = train_both(CASES[name], steps=4, memory="auto", poison=name == "poison")
    [note] = [note for note in step.report().notes if "eager has no room for this step" in note]
    assert "no room, for a test" in note
    assert "nothing has other bits" in note
    [plan] = step._plans
    assert plan.foreseen is not None
    assert bool(plan.finished.own_steps) == (name == "an optimizer of its own")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "resnet", "dit", "ssm"])
def test_foreseen_program_is_the_recorded_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = zoo.case(name)
    step = tb.compile_step(case.model, case.loss_fn, case.optimizer, memory="keep")
    step(*case.batch)
    recorded = step._last.recorded
    assert step._last.foreseen is None
    monkeypatch.setattr(recorded_step, "Vigil", Scarce)
    monkeypatch.setattr(Scarce, "took_", _after(sums_up(recorded) * 9 // 10))
    case = zoo.case(name)
    step = tb.compile_step(case.model, case.loss_fn, case.optimizer, memory="keep")
    step(*case.batch)
    assert step._last.foreseen is not None
    foreseen = step._last.recorded
    assert [(op.target, op.args, op.results) for op in foreseen.ops] == [
        (op.target, op.args, op.results) for op in recorded.ops
    ]


def _after(limit_bytes: int) -> Callable[[Scarce, int], None]:
    def took_(self: Scarce, size_bytes: int) -> None:
        self.taken += size_bytes
        if self.taken > limit_bytes:
            raise OutOfRoom("no room, for a test")

    return took_


# -- refusals ----------------------------------------------------------------------------------------------------------


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return sum((model(part).square().mean() for part in x.split(64)), start=torch.zeros(()))


def by_value(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) * x.sum().item()


class Caching(nn.Module):
    """Keeps a tensor of the batch's size from the first run on."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.kept = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        if self.kept is None:
            self.kept = torch.ones(len(x), 1)
        return out * self.kept


class Traced(nn.Module):
    """Does something else on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out if type(x) is Tensor else out * 2


REFUSALS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], dict[str, Any], str]] = {
    "other ops": (net, one_by_one, {}, "for the whole batch the step does something else than for an excerpt"),
    "other values": (net, by_value, {}, "have other values than the whole batch where the step reads them"),
    "a cache": (Caching, mean_loss, {}, "outlives it|keeps state in Python"),
    "asks": (Traced, mean_loss, {}, "on fake tensors the step does something else than on real ones: mul"),
    "a scaler": (net, mean_loss, {"scaler": torch.amp.GradScaler("cpu")}, "does not go together with scaler="),
}


@pytest.mark.usefixtures("scarce")
@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_says_why_and_leaves_everything_as_it_was(name: str) -> None:
    build, loss_fn, settings, reason = REFUSALS[name]
    torch.manual_seed(0)
    model = build()
    optimizer = adamw(model)
    before = {key: value.clone() for key, value in state_of(model, optimizer).items()}
    random = torch.get_rng_state()
    step = tb.compile_step(model, loss_fn, optimizer, **settings)
    with pytest.raises(NoRoomError, match=f"(?s)no room, for a test.*({reason})"):
        step(*draw(0))
    assert_same(state_of(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert getattr(model, "kept", None) is None


@pytest.mark.usefixtures("scarce")
def test_foreseen_plan_is_proved_on_the_excerpt(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one product of the plan off by a bit, the step is refused and taken back."""
    compared: list[int] = []

    class Spoilt(foreseen_step.BesideEager):
        def _compare(self, expected: Any) -> None:
            compared.append(len(expected))
            self.executor.tensor(self.executor.program.loss, self.leaves).add_(1e-3)
            super()._compare(expected)

    monkeypatch.setattr(foreseen_step, "BesideEager", Spoilt)
    torch.manual_seed(0)
    model = net()
    optimizer = adamw(model)
    before = {key: value.clone() for key, value in state_of(model, optimizer).items()}
    step = tb.compile_step(model, mean_loss, optimizer)
    with pytest.raises(tb.errors.VerifyError, match="loss has other bits"):
        step(*draw(0))
    assert compared == [1 + 6 + 3]
    assert_same(state_of(model, optimizer), before)


def test_plan_that_eager_has_no_room_beside_is_proved_on_an_excerpt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording fits, and eager beside the first replay does not."""
    own = verify.BesideEager._eager_gradients

    def only_few(self: verify.BesideEager) -> Any:
        if len(self.leaves[0]) > 16:
            raise OutOfRoom("no room, for a test")
        return own(self)

    monkeypatch.setattr(verify.BesideEager, "_eager_gradients", only_few)
    step = train_both(Case(net, mean_loss, draw), steps=4, memory="auto")
    assert any("eager has no room for this step" in note for note in step.report().notes)


@pytest.mark.usefixtures("scarce")
def test_replay_that_is_refused_memory_says_what_is_short_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = net()
    optimizer = adamw(model)
    step = tb.compile_step(model, mean_loss, optimizer, memory="min")
    step(*draw(0))
    before = {key: value.clone() for key, value in state_of(model, optimizer).items()}
    random = torch.get_rng_state()
    executor = step._last.executor

    def refuse(batch: list[Tensor]) -> None:
        type(executor)._compute_(executor, batch)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory, for a test")

    monkeypatch.setattr(executor, "_compute_", refuse)
    with pytest.raises(
        NoRoomError, match=r"can't allocate memory, for a test\): it needs [0-9.]+ MiB.*Nothing has been"
    ):
        step(*draw(1))
    assert_same(state_of(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), random)
    step.options = replace(step.options, memory="auto")  # which goes lower
    step._maker.options = step.options
    assert step(*draw(1)).isfinite()
    assert step._last.executor is not executor


def test_step_whose_update_runs_out_of_memory_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = net()
    optimizer = adamw(model)
    step = tb.compile_step(model, mean_loss, optimizer)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory, for a test")

    monkeypatch.setattr(optimizer, "step", refuse)
    with pytest.raises(RuntimeError, match="for a test"):
        step(*draw(0))
    assert step.counts.planned == 0


@pytest.mark.usefixtures("scarce")
def test_nothing_changes_where_eager_fits() -> None:
    torch.manual_seed(0)
    model = net()
    step = tb.compile_step(model, mean_loss, adamw(model))
    step(*draw(0, rows=8))
    assert step._last.foreseen is None
    step(*draw(0))
    assert step._last.foreseen is not None


# -- a process with too little memory ----------------------------------------------------------------------------------


def limited(factor: float, memory: str, mode: str, **environment: str) -> str:
    program = Path(__file__).with_name("limited.py")
    given = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, str(program), str(factor), memory, mode],
        env=given,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
def test_process_with_two_thirds_of_eagers_memory_trains_with_auto() -> None:
    assert "eager has no room for this step" in limited(1.5, "auto", "exact")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
@pytest.mark.parametrize(("factor", "memory", "mode"), [(3, "min", "exact"), (1.5, "auto", "fast")])
def test_process_with_less_memory_than_eager_needs_trains(factor: float, memory: str, mode: str) -> None:
    assert "eager has no room for this step" in limited(factor, memory, mode)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
def test_process_with_far_too_little_memory_is_told_what_is_short() -> None:
    said = limited(12, "auto", "exact", EXPECT="NoRoomError")
    assert "short. No memory= goes below" in said
    assert "Nothing has been changed" in said


def test_what_a_gpu_says_when_it_has_no_memory_is_cut_short() -> None:
    told = (
        "CUDA out of memory. Tried to allocate 6.14 GiB. GPU 0 has a total capacity of 139.80 GiB of which 99 is free."
    )
    assert what_it_said(torch.OutOfMemoryError(told)) == "CUDA out of memory. Tried to allocate 6.14 GiB"
    assert what_it_said(RuntimeError("not enough memory: you tried to\nmore")) == "not enough memory: you tried to"

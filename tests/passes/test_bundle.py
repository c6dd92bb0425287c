"""bundle: casts and counters that may run at one place are one op there, with eager's bits and no higher peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.form import check_form
from takeback.compiler.ownership.lists import list_form_of
from takeback.compiler.ownership.meaning import check_meaning
from takeback.compiler.passes import PIPELINE, Draft, Home
from takeback.compiler.passes.bundle import bundle
from takeback.compiler.passes.overwrite import planned_curve
from takeback.compiler.program import Buffer, BufferId, Cluster, Op, Phase, Program, Region, Role
from takeback.compiler.run.allocator_executor import AllocatorExecutor
from takeback.compiler.run.eager import eager_step
from takeback.compiler.run.kernels import FOR_LISTS, Kernels

aten = torch.ops.aten
HALF, SINGLE = torch.bfloat16, torch.float32
WITHOUT = [stage for stage in PIPELINE if stage.name != "bundle"]


class Writer:
    """Writes a program op by op."""

    def __init__(self) -> None:
        self.buffers: dict[BufferId, Buffer] = {}
        self.given: dict[BufferId, Tensor] = {}
        self.ops: list[Op] = []

    def value(self, elements: int, dtype: torch.dtype, role: Role = Role.INTERNAL) -> Region:
        ident = BufferId(len(self.buffers))
        self.buffers[ident] = Buffer(ident, elements * dtype.itemsize, role)
        if role.borrowed:
            self.given[ident] = torch.zeros(elements, dtype=dtype)
        return Region(ident, dtype, (elements,), (1,), 0)

    def weight(self, elements: int = 64, dtype: torch.dtype = SINGLE) -> Region:
        return self.value(elements, dtype, Role.PARAMETER)

    def op(self, target: Any, *args: Any, dtype: torch.dtype = HALF, phase: Phase = Phase.FORWARD) -> Region:
        elements = next(a for a in args if isinstance(a, Region)).numel
        made = self.value(elements, dtype)
        self.ops.append(Op(target, args, {}, (made,), phase=phase))
        return made

    def cast(self, given: Region, dtype: torch.dtype = HALF, phase: Phase = Phase.FORWARD) -> Region:
        made = self.value(given.numel, dtype)
        self.ops.append(Op(aten._to_copy.default, (given,), {"dtype": dtype}, (made,), phase=phase))
        return made

    def write(self, target: Any, given: Region, other: Any, phase: Phase = Phase.FORWARD) -> None:
        self.ops.append(Op(target, (given, other), {}, (given,), (given.buffer,), phase))

    def draft(self, loss: Region, **more: Any) -> Draft:
        return Draft(Program(tuple(self.ops), self.buffers, self.given, {}, loss), frozenset(), Home.ALLOCATOR, **more)


def checked(before: Draft) -> Draft:
    """What the pass makes, which is right and has no higher peak."""
    after = bundle(before)
    check_form(after.program, after.kept)
    check_meaning(before.program, after.program)
    assert max(planned_curve(after)) <= max(planned_curve(before))
    return after


def bundles(program: Program) -> list[Op]:
    return [op for op in program.ops if isinstance(op.target, Cluster) and list_form_of(op.target) is not None]


def lengths(program: Program) -> list[int]:
    return [len(op.target.ops) for op in bundles(program) if isinstance(op.target, Cluster)]


def reasons(draft: Draft) -> set[str]:
    return {r.reason for r in draft.refusals if r.decision == "bundle"}


class Chain(nn.Module):
    """Products, whose weights autocast casts, and norms, which count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(torch.relu(layer(x)))
        return x


def autocast_loss(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", HALF):
        return model(x).float().square().mean()


def streamed(model: nn.Module, **settings: Any) -> tb.CompiledStep:
    """A step of mode fast, planned as for a GPU, that runs here: torch's allocator places."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = tb.compile_step(model, autocast_loss, optimizer, mode="fast", **settings)
    step._maker.home, step._maker.native = Home.ALLOCATOR, None
    return step


@pytest.fixture
def _nothing_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters run with eager's kernels: what differs then is the bundles' doing."""
    monkeypatch.setattr(Kernels, "compile_", lambda self, program, tell: None)


@pytest.mark.usefixtures("_nothing_is_generated")
@pytest.mark.parametrize("settings", [{}, {"poison": True, "keep_grads": True}, {"accumulate": 2}, {"update": "early"}])
def test_a_step_with_bundles_has_eagers_bits(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours, theirs = Chain(), Chain()
    theirs.load_state_dict(ours.state_dict())
    step = streamed(ours, memory="keep", **settings)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    recipe = {name: value for name, value in settings.items() if name == "accumulate"}
    for _ in range(4):
        x = torch.randn(32, 16)
        assert torch.equal(step(x), eager_step(theirs, autocast_loss, optimizer, (x,), **recipe))
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    assert step._last is not None
    assert isinstance(step._last.executor, AllocatorExecutor)
    assert len(bundles(step._last.executor.program)) >= 2
    for kernel in step._last.executor.kernels.in_program(step._last.executor.program):
        if list_form_of(kernel.cluster) is not None:
            assert (kernel.note, kernel.tried, kernel.waits) == (FOR_LISTS, True, False)

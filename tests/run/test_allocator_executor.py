"""The executor for devices whose own allocator places, on CPU tensors: eager's bits, planned bytes, faults undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import takeback as tb
from pairwise import pairwise
from takeback import zoo
from takeback.compiler.ownership.kinds import Kind
from takeback.compiler.passes import Home
from takeback.compiler.program import Phase
from takeback.compiler.run.allocator_executor import AllocatorExecutor
from takeback.compiler.run.eager import eager_step
from takeback.compiler.run.meter import NoMeter
from takeback.compiler.run.microbatch import replay_microbatch
from takeback.compiler.run.pending import Microbatch
from takeback.compiler.run.transaction import Transaction


def streamed(case: zoo.Case, **settings: Any) -> tb.CompiledStep:
    """A compiled step that lets torch's allocator place, though it runs on the CPU."""
    step = tb.compile_step(case.model, case.loss_fn, case.optimizer, **settings)
    step._maker.home = Home.ALLOCATOR
    step._maker.native = None  # and sees no scratch inside ops, as nobody measures it here
    return step


def executor_of(step: tb.CompiledStep) -> AllocatorExecutor:
    assert step._last is not None
    assert isinstance(step._last.executor, AllocatorExecutor)
    return step._last.executor


def state(case: zoo.Case) -> list[Tensor]:
    found = [*case.model.parameters(), *case.model.buffers()]
    return [*found, *(v for t in case.optimizer.state.values() for v in t.values() if isinstance(v, Tensor))]


SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "all": {"clip_norm": 0.1, "accumulate": 2, "memory": "keep"}}


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(("name", "poison", "which"), pairwise(["mlp", "resnet", "gpt"], [False, True], list(SETTINGS)))
def test_streamed_step_has_eagers_bits(name: str, poison: bool, which: str) -> None:
    ours, eager, settings = zoo.case(name), zoo.case(name), SETTINGS[which]
    step = streamed(ours, poison=poison, keep_grads=True, **settings)
    recipe = {k: v for k, v in settings.items() if k != "memory"}
    for i in range(5):
        torch.manual_seed(i)
        loss = step(*ours.batch)
        torch.manual_seed(i)
        expected = eager_step(eager.model, eager.loss_fn, eager.optimizer, eager.batch, **recipe)
        assert torch.equal(loss, expected)
        for a, b in zip(ours.model.parameters(), eager.model.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(a.grad, b.grad)
    assert all(torch.equal(a, b) for a, b in zip(state(ours), state(eager), strict=True))
    assert not executor_of(step)._landed


class Scatters(nn.Module):
    """Ops that look at the storage of what they read, and not at the tensor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0, 1, 36).view(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.diagonal_scatter((x * self.w)[:, 1:], x[:5, 0])
        y = torch.select_scatter(y, x[:, 1], 1, 2)
        y = torch.slice_scatter(y, self.w[:2, :5], 0, 1, 3)
        return torch.as_strided_scatter(y.contiguous(), (x[0, :4] * self.w[1, :4]).view(2, 2), (2, 2), (2, 1), 3)


def test_ops_that_look_at_storages_have_eagers_bits() -> None:
    def case() -> zoo.Case:
        model = Scatters()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return zoo.Case("scatters", model, lambda m, x: m(x).square().mean(), optimizer, (batch,))

    batch = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    ours, eager = case(), case()
    step = streamed(ours, memory="keep", poison=True)
    for _ in range(4):
        loss = step(*ours.batch)
        assert torch.equal(loss, eager_step(eager.model, eager.loss_fn, eager.optimizer, eager.batch))
    assert torch.equal(ours.model.w, eager.model.w)


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that were made under it and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in _tensors((args, kwargs or {})):
            if t.untyped_storage()._cdata not in self._made:
                self._known.add(t.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        self._made = {k: v for k, v in self._made.items() if not v[0].expired()}
        for t in _tensors(out):
            storage = t.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._known:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._made.values()))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor)]


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(
    ("name", "optimizer", "memory"),
    [
        ("mlp", "adamw", "auto"),
        ("mlp", "adamw", "keep"),
        ("resnet", "momentum", "auto"),
        ("gpt", "adamw_fused", "auto"),
    ],
)
def test_bytes_alive_are_those_of_the_plan(name: str, optimizer: str, memory: str) -> None:
    case = zoo.case(name, optimizer=optimizer)
    step = streamed(case, memory=memory)
    for _ in range(3):
        step(*case.batch)
    alive = Alive()
    with alive:  # inside of which a step refuses to be called
        step._replayer.replay(step._plans[0], case.batch)
    planned = step.report().arena_bytes
    assert planned * 0.99 <= alive.peak_bytes <= planned
    assert not executor_of(step)._held, "the executor still holds what the caller has taken"


def test_bytes_alive_of_a_microbatch_are_those_of_the_plan_and_the_gradients_that_begin_there() -> None:
    case = zoo.case("gpt")
    step = streamed(case, memory="keep")
    for _ in range(4):
        step(*case.batch, update=False)
    parameters = list(case.model.parameters())
    planned = step.report().arena_bytes
    for waiting in (True, False):
        before = {i: p.grad for i, p in enumerate(parameters) if waiting}
        alive = Alive()
        with alive:
            micro = Microbatch(parameters, before, Transaction())
            replay_microbatch(step._plans[0], case.batch, micro, inspect=None, log=False)
        begun = 0 if waiting else sum(p.untyped_storage().nbytes() for p in parameters)
        assert (planned + begun) * 0.99 <= alive.peak_bytes <= planned + begun


class Trap(NoMeter):
    """A meter that fails before the op at a given count."""

    def __init__(self, count: int, error: Exception) -> None:
        self.left, self.error = count, error

    def begin(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error


@pytest.mark.parametrize("every", [29, pytest.param(7, marks=pytest.mark.slow)])
def test_failure_before_any_op_of_forward_or_backward_takes_the_step_back(every: int) -> None:
    case = zoo.case("resnet")
    step = streamed(case)
    for _ in range(3):
        step(*case.batch)
    executor, plan = executor_of(step), step._last
    assert plan is not None
    before = [t.clone() for t in state(case)]
    kinds = zip(executor.program.ops, executor.layout.kinds, strict=True)
    computing = sum(op.phase is not Phase.UPDATE and kind is not Kind.NOTHING for op, kind in kinds)
    assert computing > 100
    for count in range(0, computing, every):
        # Not one about memory: what would fit takes a search (tests/step/test_unfit.py).
        executor._meter, executor._bound, plan.rehearsals = Trap(count, ArithmeticError("this op fails")), None, 0
        with pytest.raises(ArithmeticError):
            step(*case.batch)
        assert all(torch.equal(a, b) for a, b in zip(state(case), before, strict=True)), count
        assert torch.is_grad_enabled()
        assert not executor._held


def test_result_in_another_geometry_is_copied_into_the_recorded_one() -> None:
    case = zoo.case("mlp")
    step = streamed(case)
    for _ in range(3):
        step(*case.batch)
    executor = executor_of(step)
    result = torch.arange(6.0).reshape(2, 3)
    same = executor._fit(result, 0, 24, torch.float32, (2, 3), (3, 1), 0)
    assert same is result
    landed = executor._fit(result, 5, 32, torch.float32, (2, 3), (1, 2), 1)
    assert torch.equal(landed, result)
    assert (landed.stride(), landed.storage_offset(), landed.untyped_storage().nbytes()) == ((1, 2), 1, 32)
    assert 5 in executor._landed
    assert executor.counters.landed == 1


def test_returned_tensors_are_handed_on_and_never_written_again() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)

    def loss_fn(m: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        out = m(x)
        return out.square().mean(), [out, out[1:], out]

    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    step._maker.home = Home.ALLOCATOR
    seen: list[tuple[Tensor, Tensor]] = []
    for i in range(5):
        loss, aux = step(torch.full((4, 6), float(i)))
        assert torch.equal(aux[0][1:], aux[1])
        assert torch.equal(aux[0], aux[2])
        seen += [(t, t.clone()) for t in (loss, *aux)]
    assert all(torch.equal(t, then) for t, then in seen)


@pytest.mark.parametrize("streams", [False, True], ids=["arena", "streamed"])
def test_parameter_that_the_optimizer_does_not_hold_trains_as_in_eager(streams: bool) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        return model, torch.optim.SGD(model[0].parameters(), lr=0.1)

    def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    (ours, optimizer), eager = make(), make()
    step = tb.compile_step(ours, loss_fn, optimizer)
    step._maker.home = Home.ALLOCATOR if streams else Home.ARENA
    for i in range(4):
        x = torch.full((32, 64), float(i + 1))
        assert torch.equal(step(x), eager_step(eager[0], loss_fn, eager[1], (x,)))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), eager[0].parameters(), strict=True))

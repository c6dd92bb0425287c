"""A call that adds up gradients is done or it is not; what cannot be meant or planned is refused with nothing lost."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accumulation_twins import Twins, Words, adamw, momentum, words, words_loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import takeback as tb
from harness import assert_same, gradients_of, state_of
from takeback.compiler.program import Phase
from takeback.errors import CaptureError, OptionError, VerifyError

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise MemoryError("no room in this kernel")


class Trap:
    """Stands in for the allocator's cell, which generated code sets before every op: acts before the k-th."""

    def __init__(self, executor: Any, position: int, action: Callable[[], None]) -> None:
        self.executor, self.view, self.position, self.action = executor, executor._cell.view, position, action
        executor._cell.view, executor._generation = self, -1  # the code is bound anew

    def __setitem__(self, index: int, position: int) -> None:
        self.view[index] = position
        if position == self.position:
            self.position = -2
            self.action()

    def remove(self) -> None:
        self.executor._cell.view, self.executor._generation = self.view, -1


def positions(executor: Any) -> tuple[list[int], list[int]]:
    """Of the ops that run before the first addition, and from there on."""
    ops = executor.program.ops
    first = next(i for i, op in enumerate(ops) if op.phase is Phase.UPDATE)
    run = [i for i in range(len(ops)) if f"cell[0] = {i}\n" in executor.code.source]
    return [i for i in run if i < first], [i for i in run if i >= first]


def everything(twins: Twins) -> dict[str, Tensor]:
    found = state_of(twins.models[0], twins.optimizers[0]) | gradients_of(twins.models[0])
    return {name: t.detach().clone() for name, t in found.items()} | {"random": torch.get_rng_state()}


def steady() -> Twins:
    twins = Twins()
    for n in range(4):
        twins.accumulate(words([5, 5], first=10 * n))
    twins.add(words([5])[0])
    return twins


@pytest.mark.parametrize("action", [press_ctrl_c, fail], ids=lambda f: f.__name__)
@pytest.mark.parametrize("update", [False, True])
@pytest.mark.usefixtures("ctrl_c_raises")
def test_a_call_that_fails_before_the_first_addition_changes_nothing(action: Callable[[], None], update: bool) -> None:
    twins = steady()
    executor = twins.step._last.executor
    before_adding, _ = positions(executor)
    assert len(before_adding) > 20
    for position in before_adding[::4]:
        torch.manual_seed(3)
        before = everything(twins)
        trap = Trap(executor, position, action)
        with pytest.raises((KeyboardInterrupt, MemoryError)) as error:
            twins.step(*words([5], first=77)[0], update=update)
        trap.remove()
        assert_same(everything(twins), before, f"after op {position}")
        assert not getattr(error.value, "__notes__", ())
    twins.accumulate(words([5, 5], first=5))


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_after_the_first_addition_waits_for_the_end_of_the_call() -> None:
    twins = steady()
    executor = twins.step._last.executor
    _, adding = positions(executor)
    for n, position in enumerate([*adding[:: len(adding) // 6], adding[-1]]):
        [batch] = words([5], first=100 + n)
        trap = Trap(executor, position, press_ctrl_c)
        torch.manual_seed(n)
        with pytest.raises(KeyboardInterrupt):
            twins.step(*batch, update=False)
        trap.remove()
        twins.backward(batch, seed=n)
        twins.compare(f"after Ctrl-C before op {position}")
    trap = Trap(executor, adding[0], press_ctrl_c)
    [batch] = words([5], first=99)
    torch.manual_seed(9)
    with pytest.raises(KeyboardInterrupt):
        twins.step(*batch)  # the update is made too
    trap.remove()
    twins.backward(batch, seed=9)
    twins.eager_update()
    twins.models[1].zero_grad()
    twins.compare("after Ctrl-C in a call with the update")
    update = twins.step._update.plans[0].executor
    twins.add(words([5])[0])
    trap = Trap(update, len(update.program.ops) // 2, press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        twins.step.update()
    trap.remove()
    twins.eager_update()
    twins.models[1].zero_grad()
    twins.compare("after Ctrl-C in the update")


def test_a_failure_after_the_first_addition_drops_the_gradients_and_says_so() -> None:
    twins = steady()
    executor = twins.step._last.executor
    _, adding = positions(executor)
    state = {k: v for k, v in everything(twins).items() if not k.endswith(".grad")}
    trap = Trap(executor, adding[1], fail)
    torch.set_rng_state(state["random"])
    with pytest.raises(MemoryError) as error:
        twins.step(*words([5], first=77)[0], update=False)
    trap.remove()
    assert "all of them were dropped" in "".join(error.value.__notes__)
    assert_same(everything(twins), state, "parameters, statistics and random state are as before the call")
    twins.models[1].zero_grad()
    for ours, theirs in zip(twins.models[0].buffers(), twins.models[1].buffers(), strict=True):
        assert torch.equal(ours, theirs)
    twins.accumulate(words([5, 5], first=5))


def test_an_optimizer_that_raises_leaves_no_gradients() -> None:
    twins = Twins(make=lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1))

    def refuse(*_: object) -> None:
        raise ValueError("not today")

    for n in range(3):
        twins.accumulate(words([5, 5], first=10 * n))
    for batch in words([5, 5]):
        twins.add(batch)
    handle = twins.optimizers[0].register_step_pre_hook(refuse)
    with pytest.raises(ValueError, match="not today"):
        twins.step.update()
    handle.remove()
    twins.models[1].zero_grad()
    twins.compare("after a failed update")
    twins.accumulate(words([5, 5]))


@pytest.mark.parametrize("recorded", [True, False])
def test_an_exception_in_the_users_code_leaves_what_waits(recorded: bool) -> None:
    """Of a batch that is recorded, and where a value that the step read is another one: recorded anew."""
    calls: list[bool] = []

    def loss_fn(model: nn.Module, tokens: Tensor, extra: bool = False) -> Tensor:
        if calls:
            raise ValueError("no batch")
        if float(tokens.sum()) < 0:  # held: the next batch is another plan
            raise AssertionError
        return words_loss(model, tokens, extra)

    twins = Twins(loss_fn=loss_fn)
    twins.add(words([5])[0])
    if not recorded:
        twins.add(words([5])[0])
        twins.add(words([5])[0])
    before = everything(twins)
    torch.set_rng_state(before["random"])
    calls.append(True)
    with pytest.raises(ValueError, match="no batch"):
        twins.step(*words([6], first=3)[0], update=False)
    calls.clear()
    assert_same(everything(twins), before)
    twins.last(words([5])[0])


def test_a_wrong_plan_is_found_by_its_first_replay_and_the_call_is_taken_back() -> None:
    twins = Twins(options={"verify_every": 1})
    for n in range(2):
        twins.accumulate(words([5, 5], first=10 * n))
    twins.add(words([5])[0])
    executor = twins.step._last.executor
    before = everything(twins)

    def spoil() -> None:
        executor.tensor(executor.program.grads[1], ()).mul_(1.0001)

    _, adding = positions(executor)
    spoiled = next(
        i for i in adding if any(r.buffer == executor.program.grads[1].buffer for r in executor.program.ops[i].inputs)
    )
    trap = Trap(executor, spoiled, spoil)
    torch.set_rng_state(before["random"])
    with pytest.raises(VerifyError, match=r"compared with eager, and the gradient of mix\.weight has other bits"):
        twins.step(*words([5], first=3)[0], update=False)
    trap.remove()
    assert_same(everything(twins), before, "taken back")
    twins.last(words([5])[0])


class _Late(torch.autograd.Function):
    """Raises in the backward, when it is told to."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if _Late.fails:
            raise ValueError("late")
        return grads[0]


@pytest.mark.parametrize("late", [False, True])
def test_a_plain_microbatch_that_fails(late: bool) -> None:
    """Its forward changes no gradient. Its backward has added some: all are dropped."""

    def loss_fn(model: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
        if _Late.fails and not late:
            raise ValueError("early")
        keep = torch.from_numpy(keep.numpy())  # where no replay can follow
        return model[1](_Late.apply(model[0](x)))[keep].sum()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    step = tb.compile_step(model, loss_fn, momentum(model), unplanned="eager", memory="keep")
    x = torch.randn(6, 4)
    with pytest.warns(RuntimeWarning, match="runs plainly"):
        step(x, x[:, :3] > 0, update=False)
    before = {n: g.clone() for n, g in gradients_of(model).items()}
    assert len(before) == 4
    _Late.fails = True
    try:
        with pytest.raises(ValueError, match="late" if late else "early") as error:
            step(x, x[:, :3] > 0, update=False)
    finally:
        _Late.fails = False
    assert_same(gradients_of(model), {} if late else before)
    assert bool(getattr(error.value, "__notes__", ())) is late


def test_a_plan_out_of_reach_and_a_stale_one_leave_what_waits() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    cell = (ctypes.c_double * 1)(1.0)
    read = ctypes.CFUNCTYPE(ctypes.c_double)(lambda: cell[0])

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * read()

    x = torch.randn(8, 4)
    step = tb.compile_step(model, loss_fn, momentum(model), memory="200B")
    with pytest.raises(tb.MemoryTargetError):
        step(x, update=False)
    assert gradients_of(model) == {}
    step = tb.compile_step(model, loss_fn, momentum(model), memory="keep")
    for _ in range(10):
        step(x, update=False)
    cell[0] = 3.0
    before = {n: g.clone() for n, g in gradients_of(model).items()}
    with pytest.raises(tb.StalePlanError, match=r"is given 3\.0 where it was 1\.0"):
        step(x, update=False)  # the tenth replay is compared with eager's forward
    assert_same(gradients_of(model), before)
    step(x, update=False)
    step.update()


def test_a_wrong_update_is_found_where_every_step_is_compared() -> None:
    twins = Twins(options={"verify_every": 1, "clip_norm": 0.5})
    for n in range(3):
        twins.accumulate(words([5, 5], first=10 * n))
    for batch in words([5, 5]):
        twins.add(batch)
    executor = twins.step._update.plans[0].executor
    trap = Trap(executor, len(executor.program.ops) - 1, lambda: twins.models[0].mix.weight.data.mul_(1.0001))
    with pytest.raises(VerifyError, match=r"the update of a plan .* mix\.weight has other bits.*hold eager's result"):
        twins.step.update()
    trap.remove()
    twins.eager_update()
    twins.models[1].zero_grad()
    twins.compare("eager's result is what stays")
    twins.accumulate(words([5, 5]))


# -- refused -------------------------------------------------------------------------------------------------------


def compiled(loss_fn: Callable[..., Any] = words_loss, **options: Any) -> tuple[nn.Module, tb.CompiledStep]:
    torch.manual_seed(0)
    model = Words()
    return model, tb.compile_step(model, loss_fn, momentum(model), **{"memory": "keep", **options})


@pytest.mark.parametrize(
    ("options", "asks", "message"),
    [
        ({"update": "early"}, {"update": False}, r"update='early' .* need their sum first.*update='end'"),
        ({"update": "early"}, {"divide": 2}, r"update='early' .* need their sum first"),
        ({"accumulate": 3}, {"update": False}, r"accumulate=3 splits the batch of one call.*accumulate=1"),
        ({}, {"update": 1}, "update must be True or False, got 1"),
        ({}, {"update": False, "divide": 2}, "update=False leaves it out"),
        ({}, {"divide": 0}, "divide must be a positive number"),
        ({}, {"divide": True}, "divide must be a positive number"),
        ({}, {"divide": torch.ones(2)}, "a real tensor without dimensions"),
        ({}, {"divide": torch.tensor(1j)}, "a real tensor without dimensions"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], asks: dict[str, Any], message: str) -> None:
    model, step = compiled(**options)
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(OptionError, match=message):
        step(*words([5])[0], **asks)
    assert_same(dict(model.named_parameters()), before)


def test_an_update_without_gradients_is_refused() -> None:
    _, step = compiled()
    with pytest.raises(CaptureError, match="no gradients to update by"):
        step.update()
    step(*words([5])[0])
    with pytest.raises(CaptureError, match="no gradients to update by"):
        step.update()


def test_a_keyword_that_loss_fn_has_too_is_refused() -> None:
    def loss_fn(model: nn.Module, tokens: Tensor, update: bool = True) -> Tensor:
        return words_loss(model, tokens, update)

    model, step = compiled(loss_fn)
    [(tokens, _)] = words([5])
    step(tokens, True)
    step(tokens)
    with pytest.raises(OptionError, match=r"update= is an argument of the step's own.*by position"):
        step(tokens, update=False)
    step(tokens, True, divide=2)
    assert all(p.grad is None for p in model.parameters())


def test_a_batch_that_is_a_gradient_and_a_gradient_with_gaps_are_refused() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum()

    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    step = tb.compile_step(model, loss_fn, momentum(model), memory="keep")
    for _ in range(3):
        step(torch.ones(3, 3), update=False)
    before = model.weight.grad.clone()
    with pytest.raises(CaptureError, match="tensor 0 of the batch is a gradient that waits"):
        step(model.weight.grad.view(3, 3), update=False)
    assert torch.equal(model.weight.grad, before)
    model.weight.grad = torch.zeros(3).expand(3, 3)
    with pytest.raises(CaptureError, match=r"strides \(0, 1\), which leave gaps or overlap"):
        step(torch.ones(3, 3), update=False)
    model.zero_grad()
    step(torch.ones(3, 3))


class Checkpointed(nn.Module):
    """One weight in two checkpoints: each of their backwards adds to its gradient."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda t: self.layer(t).tanh(), x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_that_adds_twice_to_a_gradient_is_refused(reentrant: bool) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.clone().requires_grad_() if reentrant else x).square().sum()

    twins = Twins(build=lambda: Checkpointed(reentrant), loss_fn=loss_fn, make=adamw)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    if not reentrant:
        for _ in range(3):
            twins.accumulate([(x,), (x,)])
        return
    with pytest.raises(CaptureError, match=r"adds to the gradient of a parameter more than once.*use_reentrant=False"):
        twins.step(x, update=False)
    assert all(p.grad is None for p in twins.models[0].parameters())
    twins.last((x,))  # one step by itself is right


def test_a_wrapper_that_leaves_out_updates_accumulates_by_the_argument() -> None:
    """As Accelerate's: inside of accumulate() the optimizer says whether this microbatch is the last one."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    twins = Twins(make=lambda m: accelerator.prepare(momentum(m)))
    for n, batch in enumerate(words([5] * 8)):
        with accelerator.accumulate(twins.models[0]):
            if accelerator.sync_gradients:
                twins.last(batch, divide=2)
            else:
                twins.add(batch)
            assert accelerator.sync_gradients is (n % 2 == 1)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()

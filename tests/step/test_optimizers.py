"""Optimizers as people have them: wrapped by Accelerate or by hand, with a step() put in the place of torch's, and
several for one model. A step has eager's bits, or is refused with the cause and the way out."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_twins import assert_same, mlp, snapshot
from torch import Tensor, nn
from train_twice import Training, assert_equal_trainings, batch, simple

import takeback as tb
from takeback.errors import CaptureError, OptionError

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# -- wrappers ------------------------------------------------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """What Accelerate's is: an Optimizer that holds another and is one to it. No `super().__init__()`, as there."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.gradient_state = SimpleNamespace(sync_gradients=True)

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:
        if self.gradient_state.sync_gradients:
            self.optimizer.step(closure)


#: The name by which Accelerate's own is known to do no more than this.
Accelerated = type("AcceleratedOptimizer", (Wrapper,), {"__module__": "accelerate.optimizer"})


class EveryOther(Wrapper):
    """Says nothing beforehand of the updates that it leaves out."""

    calls, of = 0, 2

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls % self.of == 0:
            self.optimizer.step(closure)


@pytest.mark.parametrize("kind", [Accelerated, Wrapper])
def test_wrapped_optimizer_trains_to_eagers_bits(kind: Any) -> None:
    def make(compiled: bool) -> Training:
        model = mlp()
        return simple(model, cross_entropy, kind(sgd(model)), compiled)

    done = assert_equal_trainings(make)
    report = done.compiled[0].report()
    if kind is Accelerated:
        assert not [n for n in report.notes if "not part of the plan" in n]
    else:
        [note] = [n for n in report.notes if "not part of the plan" in n]
        assert "Wrapper's own step() is called" in note
        assert "wraps SGD and may do more than call its step(); pass the optimizer inside it" in note


@pytest.mark.parametrize("kind", [Accelerated, Wrapper])
@pytest.mark.parametrize("when", ["at once", "later"])
def test_accumulation_of_a_wrapper_is_refused_before_anything_runs(kind: Any, when: str) -> None:
    model = mlp()
    optimizer = kind(sgd(model))
    step = tb.compile_step(model, cross_entropy, optimizer, memory="keep")
    for i in range(0 if when == "at once" else 4):
        step(*batch(i))
    before = snapshot(model, optimizer)
    optimizer.gradient_state.sync_gradients = False
    with pytest.raises(CaptureError, match=r"accumulation is in force.*lost in silence.*update=False.*accumulate=n"):
        step(*batch(5))
    assert_same(snapshot(model, optimizer), before)
    optimizer.gradient_state.sync_gradients = True
    step(*batch(6))


@pytest.mark.parametrize("skipped", [1, 4])
def test_wrapper_that_leaves_out_an_update_is_refused_and_nothing_is_lost(skipped: int) -> None:
    """The first call, which records, and one that replays."""
    model = mlp()
    optimizer = EveryOther(sgd(model))
    step = tb.compile_step(model, cross_entropy, optimizer, memory="keep")
    optimizer.of = 1
    for i in range(skipped - 1):
        step(*batch(i))
    optimizer.calls, optimizer.of = 0, 2
    before = snapshot(model, optimizer)
    with pytest.raises(CaptureError, match=r"EveryOther, which wraps SGD, left out the update.*accumulate=n"):
        step(*batch(9))
    assert_same(snapshot(model, optimizer), before)
    assert all(p.grad is None for p in model.parameters())


def test_scaler_of_a_wrapper_is_honoured_or_refused() -> None:
    model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=2.0)
    with pytest.raises(CaptureError, match=r"has a scaler.*scaler=accelerator\.scaler"):
        tb.compile_step(model, cross_entropy, Accelerated(sgd(model), scaler))
    with pytest.raises(CaptureError, match=r"has a scaler.*Pass the optimizer inside"):
        tb.compile_step(model, cross_entropy, Wrapper(sgd(model), scaler), scaler=scaler)

    plain, wrapped = mlp(), mlp()
    first = tb.compile_step(plain, cross_entropy, sgd(plain), scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
    second = tb.compile_step(wrapped, cross_entropy, Accelerated(sgd(wrapped), scaler), scaler=scaler)
    for i in range(4):
        first(*batch(i))
        second(*batch(i))
    assert_same(dict(plain.named_parameters()), dict(wrapped.named_parameters()))


def test_accelerates_own_optimizer_is_planned_and_its_accumulation_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)

    def make(compiled: bool) -> Training:
        model, optimizer = accelerator.prepare(*(lambda m: (m, sgd(m)))(mlp()))
        return simple(model, cross_entropy, optimizer, compiled)

    done = assert_equal_trainings(make)
    assert not [n for n in done.compiled[0].report().notes if "not part of the plan" in n]
    [model] = done.modules
    before = snapshot(model, done.optimizers[0])
    with accelerator.accumulate(model), pytest.raises(CaptureError, match="accumulation is in force"):
        done.step(7)
    assert_same(snapshot(model, done.optimizers[0]), before)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


# -- a step() of somebody's own ------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 3])
@pytest.mark.parametrize("wraps", [True, False])
def test_step_replaced_on_the_instance_is_called_and_said(when: int, wraps: bool) -> None:
    calls: list[int] = []

    def replace(optimizer: Any, calls: list[int]) -> None:
        inner = optimizer.step

        def halving(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            return inner(*args, **kwargs)

        optimizer.step = functools.wraps(inner)(halving) if wraps else halving

    def make(compiled: bool) -> Training:
        model = mlp()
        optimizer = sgd(model)
        training = simple(model, cross_entropy, optimizer, compiled)
        usual = training.step

        def step(i: int) -> Any:
            if i == when:
                replace(optimizer, calls if compiled else [])
            return usual(i)

        training.step = step
        return training

    done = assert_equal_trainings(make, steps=8)
    assert len(calls) == 8 - when
    [note] = [n for n in done.compiled[0].report().notes if "not part of the plan" in n]
    assert "halving" in note
    assert "test_optimizers.py:" in note


@pytest.mark.parametrize("when", [0, 3])
def test_step_as_a_scheduler_leaves_it_stays_in_the_plan(when: int) -> None:
    def make(compiled: bool) -> Training:
        model = mlp()
        optimizer = sgd(model)
        training = simple(model, cross_entropy, optimizer, compiled)
        usual, schedulers = training.step, []

        def step(i: int) -> Any:
            if i == when:
                schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
            loss = usual(i)
            for scheduler in schedulers:
                scheduler.step()
            return loss

        training.step = step
        return training

    done = assert_equal_trainings(make)
    assert done.compiled[0]._replays == 5, "a scheduler made later does not need a new plan"
    assert not [n for n in done.compiled[0].report().notes if "not part of the plan" in n]


def test_unknown_optimizer_is_said_with_the_reason() -> None:
    model = mlp()
    step = tb.compile_step(model, cross_entropy, torch.optim.RMSprop(model.parameters()))
    step(*batch(0))
    [note] = [n for n in step.report().notes if "not part of the plan" in n]
    assert "RMSprop is not one whose update takeback writes out" in note


def plain(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.1, weight_decay=1e-3)


def momentum_for_some(p: Any) -> torch.optim.Optimizer:
    first, *others = p
    return torch.optim.SGD([{"params": [first]}, {"params": others, "momentum": 0.9, "nesterov": True}], lr=0.1)


STATES = {
    "SGD": plain,
    "SGD, momentum for some": momentum_for_some,
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "AdamW": torch.optim.AdamW,
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("update", ["end", "early", "called"])
@pytest.mark.parametrize("name", STATES)
@pytest.mark.usefixtures("eagers_kernels", "whole_head")
def test_state_dict_has_eagers_keys_and_values_after_each_step(name: str, update: str, mode: str) -> None:
    """Also of an optimizer that keeps no state, and for a parameter that gets no gradient."""
    if update == "early" and not name.startswith(("SGD", "AdamW")):
        pytest.skip("its own step() is called")
    model, eager = mlp(), mlp()
    for each in (model, eager):
        each.unused = nn.Parameter(torch.ones(2))
    optimizer, theirs = (STATES[name](each.parameters()) for each in (model, eager))
    step = tb.compile_step(model, cross_entropy, optimizer, update="end" if update == "called" else update, mode=mode)
    for i in range(4):
        step(*batch(i), update=update != "called")
        if update == "called":
            step.update()
        theirs.zero_grad()
        cross_entropy(eager, *batch(i)).backward()
        theirs.step()
        mine, expected = optimizer.state_dict(), theirs.state_dict()
        assert repr(mine) == repr(expected), i
        assert len(optimizer.state) == len(theirs.state)
    assert_same(snapshot(model, optimizer), snapshot(eager, theirs))


# -- several -------------------------------------------------------------------------------------------------------


def two(model: Any, first: Any = torch.optim.SGD, second: Any = torch.optim.AdamW) -> list[torch.optim.Optimizer]:
    return [first(model[0].parameters(), lr=0.05), second(model[3].parameters(), lr=0.01)]


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        ((torch.optim.Adam, torch.optim.AdamW), {"clip_norm": 0.1}),
        ((torch.optim.AdamW, torch.optim.SGD), {"update": "early"}),
        pytest.param((torch.optim.RMSprop, torch.optim.AdamW), {}, marks=pytest.mark.slow),
        ((torch.optim.AdamW, torch.optim.RMSprop), {"clip_norm": 0.1, "verify_every": 1}),
        ((torch.optim.SGD, torch.optim.AdamW), {"verify_every": 1}),
        pytest.param((torch.optim.Adagrad, torch.optim.RMSprop), {}, marks=pytest.mark.slow),
    ],
    ids=lambda v: "-".join(k.__name__ for k in v) if isinstance(v, tuple) else "-".join(v) or "plain",
)
def test_several_optimizers_train_to_eagers_bits(kinds: Any, options: Any) -> None:
    def make(compiled: bool) -> Training:
        model = mlp(dropout=0.2)
        return simple(model, cross_entropy, two(model, *kinds), compiled, **options)

    done = assert_equal_trainings(make)
    notes = [n for n in done.compiled[0].report().notes if "not part of the plan" in n]
    assert [n.split(": ")[1].split("'")[0] for n in notes] == [
        k.__name__ for k in kinds if k not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    ]


def test_learning_rates_of_several_optimizers_are_read_afresh() -> None:
    def make(compiled: bool) -> Training:
        model = mlp()
        optimizers = two(model)
        training = simple(model, cross_entropy, optimizers, compiled)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers[1:]]
        usual = training.step

        def step(i: int) -> Any:
            loss = usual(i)
            for scheduler in schedulers:
                scheduler.step()
            return loss

        training.step = step
        return training

    assert assert_equal_trainings(make).compiled[0]._replays == 5


def test_several_optimizers_with_a_memory_target_out_of_reach_are_put_back() -> None:
    model = mlp()
    optimizers = two(model)
    step = tb.compile_step(model, cross_entropy, optimizers, memory="1KiB")
    before = [snapshot(model, o) for o in optimizers]
    with pytest.raises(tb.MemoryTargetError):
        step(*batch(0))
    for optimizer, was in zip(optimizers, before, strict=True):
        assert_same(snapshot(model, optimizer), was)
    assert not any(optimizer.state for optimizer in optimizers)


def test_prediction_for_several_optimizers_has_both_updates() -> None:
    model = mlp()
    one = tb.predict(model, cross_entropy, [two(model)[0]], *batch(0))
    both = tb.predict(model, cross_entropy, two(model), *batch(0))
    assert both.ops > one.ops
    assert not both.notes


def test_optimizers_that_share_a_parameter_are_refused_by_position_and_shape() -> None:
    model = mlp()
    both = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam([model[0].bias])]
    match = r"optimizers 0 \(SGD\) and 1 \(Adam\) both have a parameter of shape \(16,\)"
    with pytest.raises(CaptureError, match=match):
        tb.compile_step(model, cross_entropy, both)
    apart = two(model)
    step = tb.compile_step(model, cross_entropy, apart)
    step(*batch(0))
    apart[1].add_param_group({"params": [model[0].bias]})
    with pytest.raises(CaptureError, match="both have a parameter of shape"):
        step(*batch(1))


def test_several_optimizers_are_refused_where_they_cannot_be_right() -> None:
    model = mlp()
    with pytest.raises(OptionError, match=r"scaler= and several optimizers.*one optimizer with a parameter group"):
        tb.compile_step(model, cross_entropy, two(model), scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(CaptureError, match="list of optimizers is empty"):
        tb.compile_step(model, cross_entropy, [])
    with pytest.raises(CaptureError, match=r"must be a torch\.optim\.Optimizer, got str, or a list"):
        tb.compile_step(model, cross_entropy, ["adam"])  # type: ignore[list-item]
    with pytest.raises(CaptureError, match=r"Wrapper.*is one of several optimizers"):
        tb.compile_step(model, cross_entropy, [two(model)[0], Wrapper(two(model)[1])])
    with pytest.raises(OptionError, match="update='early' needs an update that is part of the plan"):
        tb.compile_step(model, cross_entropy, two(model, torch.optim.RMSprop), update="early")

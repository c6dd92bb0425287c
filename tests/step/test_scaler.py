"""With `scaler=` a step has eager's bits: losses, gradients, parameters, optimizer state, the scale and its growth.

Steps with infs are among them: they leave parameters and optimizer state alone, whichever way the optimizer skips.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

import takeback as tb
from harness import assert_same, gradients_of, same, state_of
from pairwise import in_turns
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.passes import Home
from takeback.compiler.run.allocator_executor import AllocatorExecutor
from takeback.compiler.run.eager import Recipe, eager_step
from takeback.compiler.run.proof import Bits, differing, keep
from takeback.errors import CaptureError, MemoryTargetError, OptionError, VerifyError

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
Around = Callable[[], contextlib.AbstractContextManager[Any]]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def rows(i: int, *, inf: bool = False) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 + i)
    x, y = torch.randn(8, 6, generator=g), torch.randint(0, 4, (8,), generator=g)
    if inf:
        x[0, 0] = torch.inf
    return x, y


def odd_scaler() -> GradScaler:
    """No scale of it is a power of two; it grows every third step."""
    return GradScaler("cpu", init_scale=30000 / 7, growth_factor=1.7, backoff_factor=0.37, growth_interval=3)


def fp16() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.float16)


@dataclass
class Pair:
    """A compiled step and its eager twin: `advance` takes one step of each and compares everything."""

    optimizers: Optimizers
    settings: Mapping[str, Any] = field(default_factory=dict)
    build: Callable[[], nn.Module] = normed
    loss_fn: Callable[..., Any] = cross_entropy
    scalers: Callable[[], GradScaler] = odd_scaler
    draw: Callable[..., tuple[Tensor, ...]] = rows
    around: Around = contextlib.nullcontext
    streams: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.build()
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.twin_optimizer = self.optimizers(self.model), self.optimizers(self.twin)
        self.scaler, self.twin_scaler = self.scalers(), self.scalers()
        self.taken = 0
        self.scales: list[float] = []
        self.compile()

    def compile(self) -> None:
        settings = {"keep_grads": True, "memory": "keep", **self.settings}
        self.step = tb.compile_step(self.model, self.loss_fn, self.optimizer, scaler=self.scaler, **settings)
        if self.streams:
            self.step._maker.home, self.step._maker.native = Home.ALLOCATOR, None

    def state(self) -> dict[str, Tensor]:
        found = {k: v.detach().clone() for k, v in state_of(self.model, self.optimizer).items()}
        return found | {f"scaler.{k}": torch.tensor(v) for k, v in self.scaler.state_dict().items()}

    def assert_taken_back(self, before: Mapping[str, Tensor], when: str) -> None:
        assert_same(self.state(), before, when)
        assert not self.scaler._per_optimizer_states, f"{when}: the scaler is in the middle of a step"

    def eager(self, *, inf: bool = False) -> Tensor:
        recipe = {k: v for k, v in self.settings.items() if k in ("accumulate", "clip_norm")}
        torch.manual_seed(self.taken)
        with self.around():
            batch = self.draw(self.taken, inf=inf)
            return eager_step(
                self.twin, self.loss_fn, self.twin_optimizer, batch, **recipe, scaler=self.twin_scaler
            ).clone()

    def attempt(self, *, inf: bool = False) -> Tensor:
        torch.manual_seed(self.taken)
        with self.around():
            loss = self.step(*self.draw(self.taken, inf=inf))
        assert isinstance(loss, Tensor)
        return loss

    def advance(self, steps: int = 1, *, infs: Collection[int] = ()) -> None:
        for _ in range(steps):
            inf, when = self.taken in infs, f"step {self.taken}"
            loss, expected = self.attempt(inf=inf), self.eager(inf=inf)
            assert same(loss, expected), f"{when}: loss {loss.item()!r}, eager's {expected.item()!r}"
            if self.settings.get("keep_grads", True):
                assert_same(gradients_of(self.model), gradients_of(self.twin), when)
            assert_same(state_of(self.model, self.optimizer), state_of(self.twin, self.twin_optimizer), f"after {when}")
            assert self.scaler.state_dict() == self.twin_scaler.state_dict(), when
            assert not getattr(self.scaler, "_per_optimizer_states", {}), (
                f"{when}: the scaler is still in the middle of a step"
            )
            self.scales.append(self.scaler.get_scale())
            self.taken += 1

    @property
    def planned(self) -> bool:
        """Whether the update is part of the plan used last."""
        return self.step._last is not None and self.step._last.update is not None


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def fused_in_one_group(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer's constructor was not told of fused=True, so the scaler unscales for it."""
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first], "fused": True}, {"params": rest}], lr=0.01)


OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd momentum": sgd,
    "sgd foreach": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "adam fused": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1, fused=True),
    "adamw": adamw,
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "adamw fused": fused_adamw,
    "adamw fused in one group": fused_in_one_group,
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    "adagrad fused": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, fused=True),
    "adam amsgrad fused": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True, fused=True),
}
OWN_STEP = ("rmsprop", "adagrad fused", "adam amsgrad fused")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate and clip": {"accumulate": 2, "clip_norm": 0.5},
    "clip": {"clip_norm": 0.5, "keep_grads": False},
    "verified": {"verify_every": 1},
    "verified and clipped": {"verify_every": 1, "accumulate": 2, "clip_norm": 0.5},
    "poisoned": {"poison": True, "memory": "min"},
    "poisoned and clipped": {"poison": True, "memory": "min", "accumulate": 2, "clip_norm": 0.5},
}


@pytest.mark.parametrize(("name", "settings"), in_turns(OPTIMIZERS, SETTINGS))
def test_twenty_steps_with_growth_and_infs_have_eagers_bits(name: str, settings: str) -> None:
    pair = Pair(OPTIMIZERS[name], SETTINGS[settings])
    pair.advance(20, infs=(4, 5, 13))
    assert pair.planned == (name not in OWN_STEP)
    assert len(pair.step._plans) == 1
    assert pair.scales[4] < pair.scales[3], "the scale never backed off: this test shows nothing"
    assert pair.scales[8] > pair.scales[7], "the scale never grew: this test shows nothing"


@pytest.mark.parametrize(
    ("name", "settings"),
    in_turns(
        ["sgd momentum", "sgd fused", "adamw", "adamw foreach", "adamw fused", "rmsprop"],
        ["plain", "accumulate and clip", "poisoned", "verified"],
    ),
)
def test_executor_for_devices_has_eagers_bits(name: str, settings: str) -> None:
    pair = Pair(OPTIMIZERS[name], SETTINGS[settings], streams=True)
    pair.advance(14, infs=(4, 5, 11))
    assert pair.step._last is not None
    assert isinstance(pair.step._last.executor, AllocatorExecutor)


def images(i: int, *, inf: bool = False) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2000 + i)
    x, y = torch.randn(6, 3, 8, 8, generator=g), torch.randint(0, 4, (6,), generator=g)
    if inf:
        x[0, 0, 0, 0] = torch.inf
    return x, y


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


def large_scaler() -> GradScaler:
    """So large that gradients in half precision overflow at first, and again whenever it has grown."""
    return GradScaler("cpu", init_scale=2.0**24, growth_interval=4)


@pytest.mark.parametrize(
    ("name", "settings"),
    in_turns(
        ["sgd momentum", "adamw", "adamw fused", "rmsprop"],
        ["plain", "accumulate and clip", "verified", "poisoned"],
    ),
)
def test_half_precision_that_overflows_has_eagers_bits(name: str, settings: str) -> None:
    pair = Pair(OPTIMIZERS[name], SETTINGS[settings], convnet, draw=images, scalers=large_scaler, around=fp16)
    pair.advance(16)
    steps = list(pairwise(pair.scales))
    assert any(a > b for a, b in steps), "no gradient overflowed: this test shows nothing"
    assert any(a < b for a, b in steps), "the scale never grew: this test shows nothing"


@pytest.mark.parametrize("name", ["sgd momentum", "adamw", "adamw foreach", "adam"])
def test_skipped_first_steps_leave_no_state_and_the_update_is_planned_once_there_is_some(name: str) -> None:
    pair = Pair(OPTIMIZERS[name])
    pair.advance(3, infs=range(3))
    assert not pair.optimizer.state
    assert not pair.planned
    reasons = [r.reason for r in pair.step.report().refusals if r.decision == "plan the update"]
    assert reasons == ["the scaler skipped the optimizer's first step, so there is no state yet; planned once there is"]
    pair.advance(10, infs=(8,))
    assert pair.planned
    assert len(pair.step._plans) == 1


@pytest.mark.parametrize("optimizers", [sgd, adamw, fused_adamw], ids=lambda f: f.__name__)
def test_inf_skips_the_update_but_not_the_statistics(optimizers: Optimizers) -> None:
    pair = Pair(optimizers)
    pair.advance(5)
    before = pair.state()
    pair.advance(infs=(5,))
    after = pair.state()
    changed = {name for name in before if not same(before[name], after[name])}
    assert changed == {
        *("1.running_mean", "1.running_var", "1.num_batches_tracked"),
        *("scaler.scale", "scaler._growth_tracker"),
    }
    assert after["scaler.scale"] == before["scaler.scale"] * pair.scaler.get_backoff_factor()


def test_inf_in_one_gradient_of_many_skips_every_update() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + (model[4].bias * w).sum()  # type: ignore[index,operator]

    def draw(i: int, *, inf: bool = False) -> tuple[Tensor, ...]:
        weight = torch.zeros(4)
        weight[2] = torch.inf if inf else 1.0
        return *rows(i), weight

    pair = Pair(adamw, loss_fn=loss_fn, draw=draw)
    pair.advance(4)
    before = pair.state()
    pair.advance(infs=(4,))
    after = pair.state()
    assert all(same(before[n], after[n]) for n, _ in pair.model.named_parameters())
    pair.advance(3)


@pytest.mark.parametrize("name", ["adamw", "adamw fused"])
def test_norm_and_loss_are_of_unscaled_values(name: str) -> None:
    def norm(pair: Pair) -> Tensor:
        """Of a plain step, whose gradients nobody scales."""
        torch.manual_seed(pair.taken)
        model = copy.deepcopy(pair.model)
        cross_entropy(model, *rows(pair.taken)).backward()
        return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    pair = Pair(OPTIMIZERS[name], {"clip_norm": 0.5})
    for i in range(6):
        expected = norm(pair)
        pair.advance()
        assert pair.step.grad_norm is not None
        torch.testing.assert_close(pair.step.grad_norm, expected, rtol=1e-5, atol=0)
        assert pair.scaler.get_scale() > 1000, i
    pair.advance(infs=(6,))
    assert not pair.step.grad_norm.isfinite()


# -- the user's scaler is the truth ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizers", [sgd, adamw, fused_adamw], ids=lambda f: f.__name__)
def test_scale_that_the_user_sets_holds_for_the_next_step_without_a_recording(optimizers: Optimizers) -> None:
    pair = Pair(optimizers)
    pair.advance(5)
    plan = pair.step._last
    for scaler in (pair.scaler, pair.twin_scaler):
        scaler.update(123.4)
    assert pair.scaler.get_scale() == pytest.approx(123.4)
    pair.advance(2)
    for scaler in (pair.scaler, pair.twin_scaler):
        scaler.update(torch.tensor(2e9 / 3))
        scaler.set_backoff_factor(0.01)
        scaler.set_growth_interval(1)
        scaler.set_growth_factor(3.0)
    pair.advance(4, infs=(7,))
    assert pair.scales[-4:] == pytest.approx([2e7 / 3, 2e7, 6e7, 18e7])
    assert pair.step._last is plan
    assert len(pair.step._plans) == 1


@pytest.mark.parametrize("optimizers", [sgd, adamw, fused_adamw], ids=lambda f: f.__name__)
def test_training_goes_on_from_state_dicts(optimizers: Optimizers) -> None:
    pair = Pair(optimizers)
    pair.advance(7, infs=(5,))
    saved = copy.deepcopy([x.state_dict() for x in (pair.model, pair.optimizer, pair.scaler)])
    pair.model = pair.build()
    pair.optimizer, pair.scaler = pair.optimizers(pair.model), GradScaler("cpu")
    for target, state in zip((pair.model, pair.optimizer, pair.scaler), saved, strict=True):
        target.load_state_dict(state)
    pair.compile()
    pair.advance(6, infs=(9,))


def test_scaler_goes_back_to_a_saved_state_without_a_recording() -> None:
    pair = Pair(adamw)
    pair.advance(4)
    saved = pair.scaler.state_dict()
    pair.advance(5, infs=(5,))
    assert pair.scaler.state_dict() != saved
    plan = pair.step._last
    pair.scaler.load_state_dict(saved)
    pair.twin_scaler.load_state_dict(saved)
    pair.advance(5)
    assert pair.step._last is plan


def test_two_steps_may_share_a_scaler() -> None:
    first = Pair(adamw)
    second = Pair(sgd)
    second.scaler, second.twin_scaler = first.scaler, first.twin_scaler
    second.compile()
    for _ in range(12):
        first.advance(infs=(4,))
        second.advance(infs=(7,))


def test_scale_tensor_that_is_replaced_is_read_where_it_is() -> None:
    pair = Pair(adamw)
    pair.advance(4)
    for scaler in (pair.scaler, pair.twin_scaler):
        scaler._scale = torch.tensor(77.7)
    pair.advance(4)


def test_loss_fn_of_a_trainer_that_holds_the_scaler_is_not_recorded_anew() -> None:
    class Trainer:
        def __init__(self, scaler: GradScaler) -> None:
            self.scaler = scaler

        def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(x), y)

    pair = Pair(adamw)
    pair.loss_fn = Trainer(pair.scaler).loss
    pair.compile()
    pair.advance(12, infs=(4,))
    assert len(pair.step._plans) == 1


def test_parameters_that_the_optimizer_does_not_have_are_not_unscaled() -> None:
    """As in eager: their scaled gradients are counted by clip_norm."""
    pair = Pair(lambda m: torch.optim.AdamW(list(m.parameters())[2:], lr=0.01), {"clip_norm": 0.5})
    pair.advance(8, infs=(4,))


# -- what is refused ---------------------------------------------------------------------------------------------


def test_disabled_scaler_is_none() -> None:
    pair = Pair(adamw, scalers=lambda: GradScaler("cpu", enabled=False))
    pair.advance(5)
    assert pair.step._last is not None
    assert pair.step._last.executor.program.found_inf is None
    model = normed()
    off = GradScaler("cpu", enabled=False)
    step = tb.compile_step(model, cross_entropy, adamw(model), scaler=off, update="early")
    step(*rows(0))


def test_scaler_in_the_middle_of_a_step_raises_and_changes_nothing() -> None:
    pair = Pair(adamw)
    for _ in range(3):  # before the recording, before the first replay, and later
        before = pair.state()
        pair.scaler.scale(cross_entropy(pair.model.eval(), *rows(0))).backward()
        pair.scaler.unscale_(pair.optimizer)
        pair.model.train()
        with pytest.raises(CaptureError, match=r"in the middle of a step: scaler.unscale_\(\) or scaler.step\(\) was"):
            pair.attempt()
        assert_same(pair.state(), before, "after the refusal")
        pair.scaler._per_optimizer_states.clear()
        pair.advance()


class Recounting(GradScaler):
    """A scaler with a method of its own."""

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)


class Named(GradScaler):
    """A scaler with nothing of its own but a name."""

    name = "mine"


def test_scaler_that_overrides_a_method_is_refused() -> None:
    model = normed()
    with pytest.raises(OptionError, match=r"scaler is a Recounting, which has a update\(\) of its own"):
        tb.compile_step(model, cross_entropy, adamw(model), scaler=Recounting("cpu"))
    tb.compile_step(model, cross_entropy, adamw(model), scaler=Named("cpu"))


def test_optimizer_none_of_whose_parameters_gets_a_gradient_is_refused() -> None:
    pair = Pair(lambda m: torch.optim.SGD([*m[4].parameters()]), loss_fn=lambda m, x, y: m[0](x).square().mean())
    before = pair.state()
    with pytest.raises(CaptureError, match="no parameter of the optimizer got a gradient"):
        pair.attempt()
    pair.assert_taken_back(before, "after the refusal")


# -- a step is done or it is not ---------------------------------------------------------------------------------


class Trap:
    """Stands in for the allocator's cell, which the generated code sets before every op: raises before the k-th."""

    def __init__(self, view: Any, position: int) -> None:
        self.view, self.position = view, position

    def __setitem__(self, index: int, position: int) -> None:
        self.view[index] = position
        if position == self.position:
            raise MemoryError("no room in this kernel")


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizers", [adamw, fused_adamw], ids=lambda f: f.__name__)
def test_exception_before_any_op_of_the_backward_takes_the_step_back(optimizers: Optimizers, every: int) -> None:
    pair = Pair(optimizers, {"accumulate": 2})
    pair.advance(4)
    executor = pair.step._plans[0].executor
    plain, source = executor._cell.view, executor.code.source  # type: ignore[attr-defined]
    compute = source[: source.index("def update")]
    positions = [i for i in range(len(executor.program.ops)) if f"cell[0] = {i}\n" in compute]
    unscaling = [i for i in positions if "_amp_foreach" in executor.program.ops[i].name]
    assert unscaling
    for position in sorted({*positions[::every], *unscaling, positions[-1]}):
        before = pair.state()
        executor._cell.view, executor._generation = Trap(plain, position), -1  # type: ignore[attr-defined]
        with pytest.raises(MemoryError):
            pair.attempt()
        pair.assert_taken_back(before, f"after an exception before op {position}")
        executor._cell.view, executor._generation = plain, -1  # type: ignore[attr-defined]
    pair.advance(3)


def test_exception_while_recording_takes_the_step_back() -> None:
    pair = Pair(adamw)
    before = pair.state()
    x, y = rows(0)
    y[3] = 99
    with pytest.raises(IndexError, match="Target 99 is out of bounds"):
        pair.step(x, y)
    pair.assert_taken_back(before, "after the exception")
    pair.advance(4)


class Moody(torch.optim.Optimizer):
    """An optimizer whose step() raises, before it has touched anything, when told to. It counts its steps."""

    def __init__(self, params: Any, *, in_kernel: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.broken, self.taken = False, 0
        self._step_supports_amp_scaling = in_kernel

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.broken:
            raise ZeroDivisionError("the optimizer is broken")
        self.taken += 1
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            for p in group["params"]:
                if found_inf is None or not found_inf.item():
                    p.add_(p.grad if scale is None else p.grad / scale, alpha=-group["lr"])


@pytest.mark.parametrize("in_kernel", [False, True])
def test_optimizer_of_the_users_goes_through_the_scaler(in_kernel: bool) -> None:
    pair = Pair(lambda m: Moody(m.parameters(), in_kernel=in_kernel))
    pair.advance(8, infs=(0, 4))
    assert not pair.planned
    assert pair.optimizer.taken == pair.twin_optimizer.taken == (8 if in_kernel else 6)  # type: ignore[attr-defined]


@pytest.mark.parametrize("in_kernel", [False, True])
@pytest.mark.parametrize("taken", [0, 3])
def test_optimizer_whose_own_step_raises_leaves_the_scaler_as_before(taken: int, in_kernel: bool) -> None:
    pair = Pair(lambda m: Moody(m.parameters(), in_kernel=in_kernel))
    pair.advance(taken)
    before = pair.state()
    pair.optimizer.broken = True  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="broken"):
            pair.attempt()
        pair.assert_taken_back(before, "after the exception")
        assert not hasattr(pair.optimizer, "grad_scale")
    pair.optimizer.broken = False  # type: ignore[attr-defined]
    pair.advance(4, infs=(taken + 2,))


@pytest.mark.parametrize("taken", [0, 3])
def test_target_out_of_reach_leaves_the_scaler_as_before(taken: int) -> None:
    pair = Pair(adamw)
    pair.advance(taken)
    pair.settings = {"memory": "100B"}
    pair.compile()
    before = pair.state()
    with pytest.raises(MemoryTargetError):
        pair.attempt()
    pair.assert_taken_back(before, "after the refusal")


@pytest.mark.parametrize("memory", ["0.95x", "min"])
@pytest.mark.parametrize("optimizers", [adamw, fused_adamw], ids=lambda f: f.__name__)
def test_memory_targets_hold_with_a_scaler(memory: str, optimizers: Optimizers) -> None:
    def deep() -> nn.Module:
        layers = [m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
        return nn.Sequential(*layers, nn.Linear(64, 4))

    def draw(i: int, *, inf: bool = False) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(i)
        x = torch.randn(512, 64, generator=g)
        if inf:
            x[0] = torch.nan
        return x, torch.randint(0, 4, (512,), generator=g)

    pair = Pair(optimizers, {"memory": memory, "keep_grads": False}, deep, draw=draw)
    pair.advance(8, infs=(0, 4))
    report = pair.step.report()
    assert report.peak_bytes < report.eager_peak_bytes
    assert report.rebuilt_ops or memory != "min"


# -- comparing with eager ----------------------------------------------------------------------------------------


def test_verification_finds_a_scale_that_is_not_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(adamw, {"verify_every": 1})
    pair.advance(4)
    monkeypatch.setattr(Scaling, "update_", lambda self, found_inf: self.scaler._scale.mul_(2))
    pair.eager()
    with pytest.raises(VerifyError, match=r"after the step scaler\.scale differs from eager's"):
        pair.attempt()
    assert_same(state_of(pair.model, pair.optimizer), state_of(pair.twin, pair.twin_optimizer), "eager's result stays")
    assert pair.scaler.state_dict() == pair.twin_scaler.state_dict()


def test_first_replay_is_compared_with_unscaled_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(adamw)
    pair.advance()
    before = pair.state()

    def not_unscaled(self: Scaling) -> None:
        self._attempt._check_inf_per_device(self._optimizer)

    monkeypatch.setattr(Scaling, "unscale_", not_unscaled)
    with pytest.raises(VerifyError, match=r"the gradient of .* has other bits"):
        pair.attempt()
    pair.assert_taken_back(before, "the step was taken back")


def test_exception_while_eager_is_compared_leaves_the_scaler_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(recipe: Recipe) -> None:
        update(recipe)
        pair.scaler.unscale_(pair.optimizer)
        raise KeyboardInterrupt

    update = Recipe.update_

    pair = Pair(adamw, {"verify_every": 1})
    pair.advance(4)
    monkeypatch.setattr(Recipe, "update_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.attempt()
    assert not pair.scaler._per_optimizer_states


def test_any_nan_equals_any_other_when_a_new_plan_is_compared() -> None:
    pair = Pair(adamw)
    pair.advance(2)
    made, given = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])
    made.view(torch.int32)[1], given.view(torch.int32)[1] = -4194304, 0x7FC00000  # of 0 * inf, and of float("nan")
    measure = pair.step._proof.measure
    assert differing(Bits(), keep(Bits(), {"x": made}), {"x": given}) == ("x",)
    assert differing(measure, keep(measure, {"x": made}), {"x": given}) == ()
    assert differing(measure, keep(measure, {"x": made}), {"x": torch.tensor([1.0, 2.0])}) == ("x",)


@pytest.mark.parametrize("optimizers", [sgd, adamw, fused_adamw], ids=lambda f: f.__name__)
def test_steady_step_asks_malloc_for_the_loss_alone(optimizers: Optimizers) -> None:
    pair = Pair(optimizers, {"keep_grads": False})
    pair.advance(5, infs=(1, 2))  # the replays that would have been rehearsals are skipped
    pair.advance(3)
    report = pair.step.report()
    assert report.measured is not None
    assert report.allocations_per_step == 1
    assert "_amp_foreach_non_finite_check_and_unscale_" in str(pair.step._plans[0].original)
    assert any(e.op.startswith("reciprocal") for e in report.ledger) == (optimizers is not fused_adamw)


def test_scale_that_ctrl_c_left_without_its_tracker_is_made_again() -> None:
    model, scaler = normed(), odd_scaler()
    step = tb.compile_step(model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scaler._growth_tracker = None  # as if it had struck between the two
    for i in range(3):
        step(*rows(i))
    assert scaler._get_growth_tracker() == 0
    assert scaler.get_scale() == pytest.approx(30000 / 7 * 1.7)

"""Valid plans of real recorded steps, to be broken: each with the program it was recorded as, and a way to run any
layout of it for real, in poison mode, beside eager.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

import takeback as tb
from harness import eager_step, gradients_of, same, state_of
from takeback import flat, zoo
from takeback.compiler.layout import Layout
from takeback.compiler.passes import Home, pipeline
from takeback.compiler.passes.draft import Draft
from takeback.compiler.passes.recompute import recompute
from takeback.compiler.program import BufferId, Cluster, Program
from takeback.compiler.run import kernels, plan_maker
from takeback.compiler.run.allocator_executor import AllocatorExecutor
from takeback.compiler.run.arena_executor import ArenaExecutor
from takeback.compiler.run.executor import Executor
from takeback.compiler.run.inductor import Compiled, NotCompiled
from takeback.compiler.run.plans import Plan


class Tied(nn.Module):
    """A weight that is used twice, views, slices, and ops in place."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(12, 12) / 4)
        self.inner = nn.Linear(12, 12)
        self.out = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = (x @ self.w).relu_()
        b = self.inner(a.view(2, -1, 12)).reshape(-1, 12)
        b = b * 2 + x
        b.add_(a)
        c = torch.cat([b[:, :6], b[:, 6:].tanh(), (b @ self.w.t()).mul_(0.5)], 1)
        return self.out(c[:, :24]) + a.sum(1, keepdim=True)


class Dropped(nn.Module):
    """Dropout between activations that are worth rebuilding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = F.gelu(self.norm(layer(x)))
            x = F.dropout(x, 0.2) if i else x * (torch.rand_like(x) > 0.2)
        return x


class Pictures(nn.Module):
    """Convolutions with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Pooled(nn.Module):
    """A pool, whose indices mode fast keeps in another form, norms, and dropout, in clusters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GELU(), nn.MaxPool2d(2))
        self.second = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.SiLU(), nn.Dropout(0.2))
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x)).mean((2, 3)))


class Headed(nn.Module):
    """A block with norms and gates, and a head that is large beside it. Asks something of which the answer is known."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(12, 16), nn.Linear(12, 16)
        self.down, self.norm, self.head = nn.Linear(16, 12), nn.LayerNorm(12), nn.Linear(12, 41)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) if bool((torch.arange(3).diff() == 1).all()) else x
        x = x + F.dropout(self.down(F.silu(self.gate(y)) * self.up(y)), 0.1)
        return self.head(self.norm(x).tanh())


class Counted(nn.Module):
    """Products and norms, enough of each that casts of weights and gradients, and counters, are bundles."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=i == 4) for i in range(5)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(16) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers[:4], self.norms, strict=True):
            x = x + F.relu(norm(layer(x)))
        return self.layers[4](x)


def entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(x), y)


def square(model: nn.Module, x: Tensor, *rest: Tensor) -> Tensor:
    return model(x).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


@dataclass(frozen=True)
class Recipe:
    """How a plan is made. `other` is a batch of another shape, for which a sibling is planned."""

    name: str
    build: Callable[[], tuple[nn.Module, Callable[..., Tensor], torch.optim.Optimizer]]
    draw: Callable[[], tuple[Tensor, ...]]
    other: Callable[[], tuple[Tensor, ...]] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False
    near: float = 1e-3  #: to eager, in mode fast


def _own(model: Callable[[], nn.Module], loss: Any, optimizer: Any) -> Callable[[], Any]:
    def build() -> Any:
        torch.manual_seed(0)
        made = model()
        return made, loss, optimizer(made)

    return build


def _zoo(name: str, batch: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    def build() -> Any:
        case = zoo.case(name, batch=batch)
        return case.model, case.loss_fn, case.optimizer

    return build, lambda: zoo.case(name, batch=batch).batch


def _rows(rows: int, width: int, classes: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(rows, width), torch.randint(classes, (rows,)))


def _small_gpt(optimizer: Any = adamw) -> Any:
    torch.manual_seed(0)
    model = zoo.GPT(zoo.GPTConfig(vocabulary=40, context=8, layers=1, heads=2, width=16))
    return model, lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()), optimizer(model)


def _gpt_with_momentum() -> Any:
    """AdamW makes a whole step of what rounding leaves of a gradient that is zero."""
    return _small_gpt(momentum)


def _tokens(rows: int, length: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(40, (rows, length)), torch.randint(40, (rows, length)))


def _pictures(rows: int, size: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(rows, 3, size, size), torch.randint(4, (rows,)))


RECIPES: tuple[Recipe, ...] = (
    Recipe("tied", _own(Tied, entropy, adamw), _rows(8, 12, 5), _rows(10, 12, 5), {"memory": "keep"}, quick=True),
    Recipe("tied, min", _own(Tied, entropy, momentum), _rows(8, 12, 5), _rows(6, 12, 5), {"memory": "min"}),
    Recipe("tied, early", _own(Tied, entropy, adamw), _rows(8, 12, 5), None, {"update": "early", "keep_grads": False}),
    Recipe("tied, accumulated", _own(Tied, entropy, adamw), _rows(8, 12, 5), None, {"accumulate": 2}),
    Recipe(
        "dropped, min", _own(Dropped, square, adamw), _rows(12, 16, 3), _rows(9, 16, 3), {"memory": "min"}, quick=True
    ),
    Recipe("dropped, clipped", _own(Dropped, square, momentum), _rows(12, 16, 3), None, {"clip_norm": 0.1}),
    Recipe("pictures, min", _own(Pictures, entropy, momentum), _pictures(3, 6), _pictures(2, 6), {"memory": "min"}),
    Recipe("pictures, auto", _own(Pictures, entropy, adamw), _pictures(3, 6), _pictures(3, 8), {"keep_grads": False}),
    Recipe("grouped", _own(Dropped, square, adamw), _rows(12, 16, 3), None, {"group": True}, quick=True),
    Recipe(
        "grouped, tied, min", _own(Tied, entropy, momentum), _rows(8, 12, 5), None, {"group": True, "memory": "min"}
    ),
    Recipe("grouped, gpt", _small_gpt, _tokens(2, 8), None, {"group": True}),
    Recipe("gpt, min", _small_gpt, _tokens(2, 8), _tokens(2, 6), {"memory": "min"}),
    Recipe("gpt, early", _small_gpt, _tokens(2, 8), _tokens(3, 8), {"update": "early", "keep_grads": False}),
    Recipe("headed", _own(Headed, entropy, momentum), _rows(24, 12, 40), None, {"memory": "keep"}),
    Recipe("zoo mlp", *_zoo("mlp", 4), None, {"memory": "keep"}),
    Recipe("zoo gpt", *_zoo("gpt", 1), None, {"memory": "auto"}),
    Recipe("zoo resnet", *_zoo("resnet", 2), None, {"memory": "min"}),
    Recipe("zoo dit", *_zoo("dit", 1), None, {"memory": "auto"}),
    Recipe("zoo ssm", *_zoo("ssm", 1), None, {"memory": "keep"}),
    Recipe(
        "fast, dropped, min",
        _own(Dropped, square, adamw),
        _rows(12, 16, 3),
        _rows(9, 16, 3),
        {"mode": "fast", "memory": "min"},
        quick=True,
    ),
    Recipe(
        "fast, pooled, min",
        _own(Pooled, entropy, momentum),
        _pictures(3, 8),
        _pictures(2, 8),
        {"mode": "fast", "memory": "min"},
    ),
    Recipe(
        "fast, pooled, keep", _own(Pooled, entropy, adamw), _pictures(3, 8), None, {"mode": "fast", "memory": "keep"}
    ),
    Recipe(
        "fast, headed, min", _own(Headed, entropy, adamw), _rows(24, 12, 40), None, {"mode": "fast", "memory": "min"}
    ),
    Recipe("fast, gpt, auto", _gpt_with_momentum, _tokens(2, 8), _tokens(2, 6), {"mode": "fast"}),
    Recipe("fast, grouped", _own(Dropped, square, adamw), _rows(12, 16, 3), None, {"mode": "fast", "group": True}),
    Recipe("fast, zoo dit", *_zoo("dit", 1), None, {"mode": "fast", "memory": "min"}),
    Recipe("streamed, tied", _own(Tied, entropy, adamw), _rows(8, 12, 5), None, {"streamed": True}, quick=True),
    Recipe(
        "streamed, grouped",
        _own(Dropped, square, adamw),
        _rows(12, 16, 3),
        None,
        {"streamed": True, "group": True},
        quick=True,
    ),
    Recipe(
        "streamed, grouped, gpt",
        _small_gpt,
        _tokens(2, 8),
        None,
        {"streamed": True, "group": True, "keep_grads": False},
    ),
    Recipe(
        "streamed, dropped, min",
        _own(Dropped, square, momentum),
        _rows(12, 16, 3),
        None,
        {"streamed": True, "memory": "min"},
    ),
    Recipe(
        "streamed, pooled, fast",
        _own(Pooled, entropy, adamw),
        _pictures(3, 8),
        None,
        {"streamed": True, "mode": "fast"},
    ),
    Recipe(
        "streamed, headed, fast, half",
        _own(Headed, half, momentum),
        _rows(24, 12, 37),
        None,
        {"streamed": True, "mode": "fast", "memory": "keep"},
        near=3e-2,
    ),
    Recipe(
        "streamed, counted, fast, half",
        _own(Counted, half, momentum),
        _rows(48, 16, 16),
        None,
        {"streamed": True, "mode": "fast", "memory": "keep"},
        near=3e-2,
    ),
    Recipe(
        "streamed, gpt, fast",
        _gpt_with_momentum,
        _tokens(2, 8),
        None,
        {"streamed": True, "mode": "fast", "memory": "min"},
    ),
)
"""Those that are `streamed` run as on a GPU, where torch's allocator places; their generated code is what is broken."""


@dataclass
class Subject:
    """A step with its plan, and what eager makes of the same state and batch."""

    name: str
    step: tb.CompiledStep
    plan: Plan
    batch: tuple[Tensor, ...]
    layout: Layout
    sibling: Layout | None
    eagers: dict[str, Tensor]
    state: dict[str, Tensor]
    recorded: Program  #: what the plan must mean: in mode fast, after the passes that compute in another way
    kept: frozenset[BufferId]
    acted: frozenset[str]  #: passes that changed something

    @property
    def is_large(self) -> bool:
        """Whether to judge a mutant of it takes long."""
        return self.layout.alive_bytes > 100_000

    @property
    def is_streamed(self) -> bool:
        """Whether torch's allocator places, so that its code is what can be broken."""
        return self.layout.arena is None

    def run(self, layout: Layout) -> str | None:
        """Runs a layout for real, in poison mode. What is not as in eager, in words; None if all of it is."""
        maker = self.step._maker
        reducer = maker.group.reducer if maker.group is not None else None
        if self.is_streamed:
            return self.run_by(lambda: AllocatorExecutor(layout, poison=True, reducer=reducer, kernels=maker.kernels))
        return self.run_by(
            lambda: ArenaExecutor(
                layout, maker.arena, maker.native, poison=True, reducer=reducer, kernels=maker.kernels
            )
        )

    def run_by(self, executor: Callable[[], Executor]) -> str | None:
        """The same with an executor of one's own."""
        maker = self.step._maker
        reducer = maker.group.reducer if maker.group is not None else None
        try:
            found = self.left_by(executor)
        except Exception as error:
            if reducer is not None:
                reducer.failure, reducer._works = None, []
            return f"{type(error).__name__}: {error}"[:200]
        wrong = [name for name, value in self.eagers.items() if name not in found or not same(found[name], value)]
        return f"{wrong[0]} is not eager's" if wrong else None

    def left_by(self, executor: Callable[[], Executor]) -> dict[str, Tensor]:
        """What a step by this executor leaves behind."""
        self._put_back_()
        before = self.plan.executor
        try:
            self.plan.executor = executor()
            torch.manual_seed(99)
            loss = self.step(*self.batch)
        finally:
            self.plan.executor = before
        return seen(self.step._model, self.step._optimizers.only, loss, self.step.options.keep_grads)

    def _put_back_(self) -> None:
        with torch.no_grad():
            for name, value in state_of(self.step._model, self.step._optimizers.only).items():
                value.copy_(self.state[name])
        self.step._model.zero_grad(set_to_none=True)


def seen(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, grads: bool) -> dict[str, Tensor]:
    """All that a user could see of a step."""
    found = {name: value.detach().clone() for name, value in state_of(model, optimizer).items()}
    found["loss"], found["random state"] = loss.detach().clone(), torch.get_rng_state()
    if grads:
        found |= {name: value.clone() for name, value in gradients_of(model).items()}
    return found


@contextlib.contextmanager
def group_of_one(folder: Path) -> Iterator[Any]:
    """A process group that has this process alone, and small buckets."""
    before, flat.BUCKET_BYTES = flat.BUCKET_BYTES, 1200
    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()
        flat.BUCKET_BYTES = before


def not_compiled(cluster: Cluster, device: torch.device) -> Compiled:
    raise NotCompiled("clusters run with eager's kernels here")


def made(recipe: Recipe, group: Any) -> Subject:
    """Records, plans and rehearses a step, and makes the same step in eager."""
    with (
        mock.patch.object(kernels, "compile_cluster", not_compiled),
        mock.patch.object(plan_maker, "in_one_kernel", return_value=False),
        mock.patch.object(pipeline, "check_meaning", wraps=pipeline.check_meaning) as checked,
        # So that they act on what is small.
        mock.patch.object(sys.modules["takeback.compiler.passes.chunk_loss"], "CHUNK_BYTES", 1 << 10),
        mock.patch.object(sys.modules["takeback.compiler.passes.align"], "_LEAST_OPERATIONS", 1.0),
        _acting() as acted,
    ):
        return _made(recipe, group, checked, acted)


@contextlib.contextmanager
def _acting() -> Iterator[set[str]]:
    """Filled with the passes that change something."""
    acted: set[str] = set()

    def watched(stage: pipeline.Stage) -> pipeline.Stage:
        run = stage.run

        @functools.wraps(run)
        def watching(draft: Draft, **told: Any) -> Draft:
            after = run(draft, **told)
            if after.program is not draft.program or after.placements != draft.placements:
                acted.add(run.__name__)
            return after

        # Some callers ask for what comes before `recompute`, by the function.
        return stage if run is recompute else replace(stage, run=watching)

    stages = tuple(map(watched, pipeline.PIPELINE))
    with mock.patch.dict(pipeline.run_passes.__kwdefaults__, {"stages": stages}):
        yield acted


def _made(recipe: Recipe, group: Any, checked: mock.Mock, acted: set[str]) -> Subject:
    settings = {"keep_grads": True, "verify_every": 0, "solve_s": 5.0, **recipe.settings}
    if settings.get("group"):
        settings["group"] = group
    streamed = settings.pop("streamed", False)
    model, loss_fn, optimizer = recipe.build()
    torch.manual_seed(1)
    batch = recipe.draw()
    step = tb.compile_step(model, loss_fn, optimizer, max_plans=8, **settings)
    if streamed:
        step._maker.home, step._maker.native = Home.ALLOCATOR, None
    for _ in range(4):
        step(*batch)
    assert step._last is not None
    plan, sibling = step._last, None
    meant, kept = _meant(checked, plan.executor.layout)
    if recipe.other is not None:
        for _ in range(3):
            step(*recipe.other())
        assert step._last is not plan
        sibling = step._last.executor.layout
        step(*batch)
        assert step._last is plan
    plan.proved, plan.rehearsals = True, 2
    state = {name: value.detach().clone() for name, value in state_of(model, optimizer).items()}
    torch.manual_seed(99)
    recipe_names = ("accumulate", "clip_norm")
    loss = eager_step(model, loss_fn, optimizer, batch, **{k: v for k, v in settings.items() if k in recipe_names})
    eagers = seen(model, optimizer, loss, bool(settings["keep_grads"]))
    layout = plan.executor.layout
    if layout.draft.rebuilt:
        acted.add(recompute.__name__)
    subject = Subject(recipe.name, step, plan, batch, layout, sibling, eagers, state, meant, kept, frozenset(acted))
    if settings.get("mode") == "fast":  # what is to be had again is what the valid plan gives, which is near eager's
        subject.eagers = subject.left_by(lambda: plan.executor)
        for name, value in eagers.items():
            _check_near(subject.eagers[name], value, recipe.near, f"{recipe.name}: {name}")
    return subject


def _check_near(ours: Tensor, eagers: Tensor, share: float, what: str) -> None:
    off = (ours.double() - eagers.double()).norm()
    assert off <= share * eagers.double().norm() + 1e-6, f"{what} is {off:g} from eager's"


def _meant(checked: mock.Mock, layout: Layout) -> tuple[Program, frozenset[BufferId]]:
    """What the plan was last compared with, and what of it was kept."""
    targets = [str(op.target) for op in layout.program.ops]
    for call in reversed(checked.call_args_list):
        recorded, planned, kept = call.args[:3]
        if [str(op.target) for op in planned.ops] == targets:
            return recorded, frozenset(kept)
    raise AssertionError("the plan was compared with nothing")

"""Whole steps in mode "fast" on the CPU, with eager's kernels in every cluster: eager's bits where no sum is made in
another order, eager's random numbers always, and everything a step can be asked for besides."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from harness import Case, adamw, eager_step, sgd, train_both
from takeback import zoo
from takeback.compiler.passes import Home
from takeback.compiler.planning import settings_for
from takeback.compiler.program import Cluster, Program
from takeback.compiler.run import kernels
from takeback.compiler.run.arena_executor import ArenaExecutor
from takeback.compiler.run.cluster_ops import eagerly
from takeback.compiler.run.eager import Recipe
from takeback.compiler.run.proof import Thinning
from takeback.compiler.run.replayer import Replayer
from takeback.errors import StalePlanError, VerifyError
from takeback.options import Options

pytestmark = pytest.mark.usefixtures("one_thread", "short_search", "eagers_kernels")


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in ((3, 8), (8, 8)))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)), inplace=True)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """A transformer with dropout in all places."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.words(ids)))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.3), nn.Linear(32, 16), nn.SiLU(), nn.Linear(16, 4)
    )


def entropy(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), y)


def entropy_of_words(m: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(m(ids).flatten(0, 1), ids.flatten())


def rows(i: int, count: int = 16) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(count, 8, generator=g), torch.randint(4, (count,), generator=g)


def images(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(4, 3, 6, 6, generator=g), torch.randint(4, (4,), generator=g)


def words(i: int, length: int = 12) -> tuple[Tensor]:
    return (torch.randint(50, (4, length), generator=torch.Generator().manual_seed(i)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[int], tuple[Tensor, ...]]]] = {
    "mlp": (mlp, entropy, rows),
    "convnet": (ConvNet, entropy, images),
    "transformer": (Block, entropy_of_words, words),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "keep": {"memory": "keep"},
    "auto": {"memory": "auto"},
    "min": {"memory": "min"},
    "accumulate": {"accumulate": 2, "clip_norm": 0.1},
    "early": {"update": "early", "keep_grads": False, "memory": "min"},
    "verified": {"verify_every": 2, "keep_grads": False},
}
QUICK = {
    *(("mlp", which) for which in SETTINGS),
    *(("convnet", which) for which in ("min", "early")),
    ("transformer", "auto"),
}


def clusters_of(step: tb.CompiledStep) -> list[Cluster]:
    assert step._last is not None
    return [op.target for op in step._last.executor.program.ops if isinstance(op.target, Cluster)]


@pytest.mark.usefixtures("whole_head")
@pytest.mark.parametrize(
    ("name", "which"),
    [
        pytest.param(name, which, marks=() if (name, which) in QUICK else pytest.mark.slow)
        for name in MODELS
        for which in SETTINGS
    ],
)
def test_step_on_eagers_kernels_has_eagers_bits(name: str, which: str) -> None:
    build, loss_fn, draw = MODELS[name]
    case = Case(build, loss_fn, draw, sgd if which == "min" else adamw, settings={"mode": "fast", **SETTINGS[which]})
    step = train_both(case, steps=4, poison=which in ("auto", "early"))
    assert sum(len(cluster.ops) for cluster in clusters_of(step)) > 2 * len(clusters_of(step)) > 0
    [note] = [n for n in step.report().notes if "not generated ones" in n]
    assert "it could not be compiled (there is no compiler here)" in note


@pytest.mark.usefixtures("whole_head")
@pytest.mark.parametrize("name", ["mlp", "convnet", pytest.param("transformer", marks=pytest.mark.slow)])
def test_step_whose_allocator_places_has_eagers_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    from takeback.compiler.run.plan_maker import PlanMaker

    honest = PlanMaker.__init__

    def streams(self: Any, *args: Any) -> None:
        honest(self, *args)
        self.home, self.native = Home.ALLOCATOR, None

    monkeypatch.setattr(PlanMaker, "__init__", streams)
    build, loss_fn, draw = MODELS[name]
    train_both(Case(build, loss_fn, draw, settings={"mode": "fast"}), steps=4, memory="min", poison=True)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("mlp", "min"),
        ("gpt", "auto"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("mlp", "auto"), ("gpt", "min"))),
    ],
)
def test_step_with_a_head_in_parts_is_near_eager(name: str, memory: str) -> None:
    """All passes: rows are added up in another order."""
    ours, eager = zoo.case(name), zoo.case(name)
    step = tb.compile_step(ours.model, ours.loss_fn, ours.optimizer, mode="fast", memory=memory)
    for i in range(3):
        torch.manual_seed(i)
        loss = step(*ours.batch)
        torch.manual_seed(i)
        torch.testing.assert_close(loss, eager_step(eager.model, eager.loss_fn, eager.optimizer, eager.batch, {}))
        eager.model.zero_grad()
    for p, q in zip(ours.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-3 * ours.optimizer.param_groups[0]["lr"] / 1e-3 + 1e-5)


class Pair:
    """A compiled step and eager, from the same bits."""

    def __init__(
        self, build: Callable[[], nn.Module] = mlp, loss_fn: Callable[..., Any] = entropy, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = build()
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.eager = sgd(self.model), sgd(self.twin)
        self.loss_fn = loss_fn
        self.step = tb.compile_step(
            self.model, loss_fn, self.optimizer, **{"mode": "fast", "memory": "keep", **options}
        )

    def advance(self, batch: tuple[Tensor, ...], seed: int, **how: Any) -> None:
        torch.manual_seed(seed)
        loss = self.step(*batch, **how)
        torch.manual_seed(seed)
        eager = self.loss_fn(self.twin, *batch)
        eager.backward()
        if how.get("update", True):
            self.eager.step()
            self.eager.zero_grad()
        torch.testing.assert_close(loss, eager.detach())
        torch.testing.assert_close(self.model.state_dict(), self.twin.state_dict(), rtol=1e-4, atol=1e-5)


def test_gradients_wait_over_calls() -> None:
    pair = Pair()
    for i in range(6):
        pair.advance(rows(i), i, update=i % 3 == 2)


def test_scaler_skips_the_step_that_overflows() -> None:
    pair = Pair(scaler=torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
    for i in range(4):
        pair.advance(rows(i), i)
    before = {k: v.clone() for k, v in pair.model.state_dict().items()}
    x, y = rows(9)
    pair.step(x.fill_(torch.inf), y)
    after = pair.model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert all(bool(p.isfinite().all()) for p in pair.model.parameters())


def test_autocast_is_the_programs_own() -> None:
    pair = Pair(loss_fn=lambda m, x, y: F.cross_entropy(m(x).float(), y))
    with torch.autocast("cpu", torch.bfloat16):
        for i in range(3):
            torch.manual_seed(i)
            loss = pair.step(*rows(i))
            torch.manual_seed(i)
            expected = pair.loss_fn(pair.twin, *rows(i)).detach()
            torch.testing.assert_close(loss, expected, rtol=0.02, atol=0.02)
            assert torch.is_autocast_enabled("cpu")


def test_other_shapes_are_planned_as_siblings_on_eagers_kernels() -> None:
    pair = Pair(Block, entropy_of_words, max_plans=8)
    for i, length in enumerate((12, 12, 7, 7, 12, 9, 7, 9)):
        pair.advance(words(i, length), i)
    assert len(pair.step._plans) == 3


def test_dropout_draws_eagers_numbers() -> None:
    """What a dropout leaves of ones is returned."""

    def masked(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mask = F.dropout(torch.ones(16, 8), 0.5)
        return F.cross_entropy(m(x * mask + 1), y), (mask * 2).tanh()

    torch.manual_seed(0)
    model = mlp()
    step = tb.compile_step(model, masked, sgd(model), mode="fast")
    for i in range(4):
        torch.manual_seed(i)
        _, ours = step(*rows(i))
        after = torch.get_rng_state()
        torch.manual_seed(i)
        with torch.no_grad():
            _, eager = masked(model, *rows(i))
        assert torch.equal(ours, eager)
        assert torch.equal(after, torch.get_rng_state())


def test_steps_on_two_threads_do_not_disturb_one_another() -> None:
    pairs = [Pair(lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))) for _ in "ab"]
    faults: list[BaseException] = []

    def work(pair: Pair, first: int) -> None:
        try:
            for i in range(first, first + 5):
                pair.advance(rows(i), i)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(pair, 10 * i)) for i, pair in enumerate(pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_kernel_that_is_interrupted_leaves_the_step_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    presses = [False]

    def compile_cluster(cluster: Cluster, device: torch.device) -> Any:
        right = eagerly(cluster)

        def run(operands: list[Tensor]) -> Any:
            if presses[0]:
                presses[0] = False
                raise KeyboardInterrupt
            return right(operands)

        return run

    monkeypatch.setattr(kernels, "compile_cluster", compile_cluster)
    pair = Pair(ConvNet)
    interrupted = 0
    for i in range(
        6
    ):  # a new plan's first replays are on eager's kernels; then kernels are compared, and then they run
        presses[0] = True
        before = {k: v.clone() for k, v in pair.model.state_dict().items()}
        try:
            pair.step(*images(i))
        except KeyboardInterrupt:
            interrupted += 1
            assert all(torch.equal(v, before[k]) for k, v in pair.model.state_dict().items())
        else:
            pair.model.load_state_dict(before)
        presses[0] = False
        pair.step(*images(i))
    assert interrupted >= 2


def _turning_wrong(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Kernels that are right until the flag is set."""
    wrong = [False]

    def compile_cluster(cluster: Cluster, device: torch.device) -> Any:
        right = eagerly(cluster)
        return lambda operands: [r.mul(3) if wrong[0] and r.is_floating_point() else r for r in right(operands)]

    monkeypatch.setattr(kernels, "compile_cluster", compile_cluster)
    return wrong


@pytest.mark.usefixtures("eagers_kernels")
def test_kernels_go_with_the_last_plan_that_uses_them() -> None:
    pair = Pair()
    for count in (8, 12):
        for i in range(3):
            pair.step(*rows(i, count))
    _, first = pair.step._plans
    pair.step._plans.drop_(first)
    del first
    gc.collect()
    known, used = pair.step._maker.kernels._known, pair.step._maker.kernels.in_program(_program(pair))
    assert used
    assert {k.cluster.key for k in used} == set(known)


def test_what_comparing_kernels_took_is_given_back_after_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no later one waits for it."""
    _turning_wrong(monkeypatch)
    given_back: list[int] = []
    monkeypatch.setattr(ArenaExecutor, "settle_", lambda self: given_back.append(i))
    monkeypatch.setattr(Thinning, "samples", lambda *_: False)
    pair = Pair()
    compared: list[int] = []
    for i in range(7):
        pair.step(*rows(i))
        compared += [i] * pair.step._maker.kernels.compared
    assert compared  # not the step that records, and not the one beside eager
    assert min(compared) > 1
    assert set(compared) <= set(given_back)
    assert max(given_back) == max(compared)


def test_eagers_forward_and_the_replay_beside_it_find_nothing_of_each_other_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their blocks have other sizes: a GPU would hold both. Steps that are not compared wait for nothing."""
    course: list[str] = []

    def noting(name: str, what: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            course.append(name)
            return what(*args, **kwargs)

        return noted

    monkeypatch.setattr(ArenaExecutor, "make_room_", noting("room", ArenaExecutor.make_room_))
    monkeypatch.setattr(Recipe, "forward", noting("forward", Recipe.forward))
    monkeypatch.setattr(Replayer, "replay", noting("replay", Replayer.replay))
    pair = Pair()
    for i in range(2):
        pair.step(*rows(i))
    monkeypatch.setattr(Thinning, "samples", lambda self, replays: replays == 4)
    course.clear()
    for i in range(2, 6):
        pair.step(*rows(i))
    assert " ".join(course) == "replay replay room forward room replay replay"


def test_kernel_that_becomes_wrong_is_found_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = _turning_wrong(monkeypatch)
    pair = Pair()
    for i in range(5):
        pair.advance(rows(i), i)
    wrong[0] = True
    with pytest.raises((VerifyError, StalePlanError)):
        [pair.step(*rows(i)) for i in range(5, 12)]


def test_kernel_that_becomes_wrong_is_found_and_left_where_steps_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = _turning_wrong(monkeypatch)
    pair = Pair(verify_every=4)
    for i in range(6):
        pair.advance(rows(i), i)
    assert all(kernel.note is None for kernel in pair.step._maker.kernels.in_program(_program(pair)))
    wrong[0] = True
    for i in range(6, 11):  # one of these is compared, and after it each kernel
        pair.step(*rows(i))
    notes = [kernel.note for kernel in pair.step._maker.kernels.in_program(_program(pair))]
    assert all(note is not None and "from double precision" in note for note in notes)


def _program(pair: Pair) -> Program:
    plan = pair.step._last
    assert plan is not None
    return plan.executor.program


def test_kernel_that_asks_for_its_results_in_another_order_writes_them_into_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Results of one size cannot be told apart by what is asked for: where they are is looked at."""

    def backwards(cluster: Cluster, device: torch.device) -> Callable[[list[Tensor]], Any]:
        right = eagerly(cluster)

        def call(operands: list[Tensor]) -> list[Tensor]:
            with torch.no_grad():
                return [result.clone() for result in reversed(right(operands))][::-1]

        return call

    monkeypatch.setattr(kernels, "compile_cluster", backwards)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(3)))
    twin = copy.deepcopy(model)
    step = tb.compile_step(model, lambda m, x: m(x).square().mean(), sgd(model), mode="fast", memory="keep")
    eager = sgd(twin)
    for i in range(8):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(i))
        step(x)
        eager_step(twin, lambda m, x: m(x).square().mean(), eager, (x,))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    [plan] = step._plans
    assert any(isinstance(op.target, Cluster) and len(op.results) > 1 for op in plan.executor.program.ops)
    counters = plan.executor.counters
    assert (counters.landed, counters.misses) == (0, 0)


def test_step_that_is_over_leaves_its_executor_to_nobody() -> None:
    """The kernels outlive the executors that call them, and hold none."""
    pair = Pair()
    for i in range(3):
        pair.advance(rows(i), i)
    assert pair.step._maker.kernels.aside is contextlib.nullcontext


def test_reading_running_statistics_and_dead_ends() -> None:
    """What a product reads of a norm's statistics is written before; what nobody reads is not computed."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.inner(x))
            assert self.norm.running_mean is not None
            scale = self.norm.running_mean[None] @ self.inner.weight.detach()
            (y.detach().exp() + 1).relu()
            return y.relu() * scale

    case = Case(Watched, lambda m, x, y: m(x).square().mean(), rows, settings={"mode": "fast"})
    train_both(case, steps=4)


def test_auto_is_exact_on_the_cpu() -> None:
    torch.manual_seed(0)
    model = mlp()
    step = tb.compile_step(model, entropy, sgd(model))
    step(*rows(0))
    assert not clusters_of(step)
    assert step._last is not None
    assert "fuse" not in step._last.executor.layout.draft.passes


def test_every_plan_is_of_the_mode_that_is_asked_for() -> None:
    """Predictions and frontiers are told by the same function."""
    torch.manual_seed(0)
    model = mlp()
    step = tb.compile_step(model, entropy, sgd(model))
    step(*rows(0))
    assert step._last is not None
    for mode, fast in (("fast", True), ("exact", False), ("auto", False)):
        assert settings_for(step._last.original, Options(mode=mode), lambda op: 0.0).fast is fast

"""`step(*batch, update=False)` adds gradients up over calls, with the bits of eager's own loop of backwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accumulation_twins import Optimizer, Twins, adagrad, adamw, momentum, words
from torch import Tensor, nn
from torch.nn import functional as F

import takeback as tb
from harness import assert_same, gradients_of, state_of
from takeback.compiler.passes import Home
from takeback.compiler.run import allocator
from takeback.compiler.run.allocator import ALLOC, Cell

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


@pytest.mark.parametrize("make", [adamw, momentum, adagrad])
def test_microbatches_of_other_lengths_add_up_as_in_eager(make: Callable[[nn.Module], Optimizer]) -> None:
    twins = Twins(make=make)
    for n in range(4):
        twins.accumulate(words([5, 7, 5], first=10 * n))
    assert len(twins.step._plans) == 2, "one plan for each length, for the first microbatch and the others alike"
    assert "microbatch" in str(twins.step.report())


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.5},
        {"clip_norm": 0.5, "scales": True},
        {"scales": True},
        {"keep_grads": True, "verify_every": 1},
        {"memory": "min"},
        {"memory": "auto", "poison": True},
    ],
    ids=str,
)
def test_options_hold_for_the_sum(options: dict[str, Any]) -> None:
    twins = Twins(options=options, make=momentum)
    for n in range(3):
        twins.accumulate(words([5, 6], first=10 * n), divide=torch.tensor(17 + n))


def test_divides_by_a_number_or_a_tensor() -> None:
    twins = Twins(options={"clip_norm": 1.0})
    for n, divide in enumerate((3, 2.5, torch.tensor(7), torch.tensor(3.0), None)):
        twins.accumulate(words([5, 5], first=10 * n), divide)
        twins.accumulate(words([5], first=90 + n), divide)  # an accumulation of one call


def test_parameters_without_a_gradient_in_some_microbatches() -> None:
    twins = Twins()
    for n in range(3):
        twins.accumulate(words([5, 5, 5], extra=lambda n: n == 1, first=10 * n))
        assert all(p in twins.optimizers[0].state for p in twins.models[0].extra.parameters())
    twins.accumulate(words([5, 5]))  # and in none


def test_steps_without_accumulation_between() -> None:
    twins = Twins()
    for n in range(3):
        twins.last(*words([5], first=50 + n))
        twins.accumulate(words([5, 5], first=10 * n))


# -- what waits is in .grad ----------------------------------------------------------------------------------------


def test_gradients_that_were_there_before_are_not_added_and_those_that_wait_are() -> None:
    twins = Twins()
    for p in twins.models[0].parameters():
        p.grad = torch.full_like(p, 100.0)  # left by something else
    twins.accumulate(words([5, 5]))
    for p in twins.models[0].parameters():
        p.grad = torch.full_like(p, 100.0)
    twins.last(*words([5], first=7))


def test_zero_grad_by_the_user_begins_anew() -> None:
    twins = Twins()
    for n in range(3):
        twins.add(words([5], first=n)[0])
        for model in twins.models:
            model.zero_grad()
        twins.accumulate(words([5, 5], first=10 * n))
        twins.add(words([5], first=40 + n)[0])
        for model in twins.models:
            model.zero_grad()
        twins.last(*words([5], first=50 + n))  # a plain step: nothing waits


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_what_the_user_does_to_the_gradients_counts() -> None:
    twins = Twins()
    for n in range(4):
        twins.add(words([5], first=n)[0])
        for model in twins.models:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)  # in place
        twins.add(words([5], first=10 + n)[0])
        for model in twins.models:
            model.mix.weight.grad = model.mix.weight.grad.t().contiguous().t() * 2  # another tensor, other strides
            model.mix.bias.grad = None
        twins.last(words([5], first=20 + n)[0])
    twins.add(words([5])[0])
    kept = twins.models[0].mix.weight.grad
    twins.last(words([5])[0])
    after = kept.clone()
    twins.accumulate(words([5, 5]))
    assert torch.equal(kept, after), "what the user keeps is used again"


def test_update_without_a_batch() -> None:
    twins = Twins(options={"clip_norm": 0.5})
    for n in range(4):
        for batch in words([5, 6], first=10 * n):
            twins.add(batch)
        twins.step.update(divide=3)
        norm = twins.eager_update(3)
        assert torch.equal(twins.step.grad_norm, norm)
        assert gradients_of(twins.models[0]) == {}
        twins.compare("after the update", grads=False)
        twins.models[1].zero_grad()


# -- the same on other ways ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [adamw, lambda m: torch.optim.AdamW(m.parameters(), fused=True)], ids=["loop", "fused"]
)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_scaler_skips_the_update_by_the_sum(make: Callable[[nn.Module], Optimizer], clip_norm: float | None) -> None:
    def loss_fn(model: nn.Module, x: Tensor, factor: Tensor) -> Tensor:
        return model(x).square().sum() * factor

    twins = Twins(
        build=lambda: nn.Linear(4, 3), loss_fn=loss_fn, make=make, options={"scales": True, "clip_norm": clip_norm}
    )
    for n in range(6):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(n))
        inf = torch.tensor(float("inf") if n in (0, 3) else 1.0)
        twins.accumulate([(x, inf), (x + 1, torch.tensor(0.5)), (x, torch.tensor(2.0))])
    assert twins.scalers[0].get_scale() == 2.0**8
    assert not twins.step._update.plans[0].executor.written_leaves, "the gradients are copied, to be put back"


def test_a_plain_microbatch_and_a_planned_one_add_up() -> None:
    def loss_fn(model: nn.Module, x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        out = model(x).square()
        return (out if keep is None else out[torch.from_numpy(keep.numpy())]).sum(), out  # no replay can follow

    twins = Twins(
        build=lambda: nn.Linear(4, 3),
        loss_fn=loss_fn,
        options={"unplanned": "eager", "clip_norm": 0.5},
    )
    twins.loss_fn = lambda model, *batch: loss_fn(model, *batch)[0]
    real = twins.step
    twins.step = lambda *batch, **asks: real(*batch, **asks)[0]  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(4):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(n))
            keep = x[:, :3] > 0
            real.grad_norm = None
            for batch in ((x, None), (x, keep), (x + 1, None)):
                twins.add(batch)
            real.update()
            twins.eager_update()
            twins.compare(f"after update {n}", grads=False)
            twins.models[1].zero_grad()
    assert real.counts.plain == 4


def test_sparse_gradients_run_plainly() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum()

    def build() -> nn.Module:
        return nn.Embedding(12, 3, sparse=True)

    twins = Twins(
        build=build,
        loss_fn=loss_fn,
        make=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        options={"unplanned": "eager"},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(3):
            for k in range(2):
                torch.manual_seed(0)
                batch = (torch.arange(n, n + 4 + k),)
                assert torch.equal(twins.step(*batch, update=False), twins.backward(batch, seed=0))
            twins.step.update()
            twins.eager_update()
            twins.compare("after the update", grads=False)
            twins.models[1].zero_grad()


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}], ids=str)
def test_the_executor_for_a_gpu_adds_up_alike(options: dict[str, Any]) -> None:
    twins = Twins(options={"poison": True, **options})
    twins.step._maker.home, twins.step._maker.native = Home.ALLOCATOR, None
    for n in range(3):
        twins.accumulate(words([5, 7, 5], extra=lambda n: n == 2, first=10 * n), divide=torch.tensor(11))


def test_half_precision_and_channels_last() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
        return model.to(torch.bfloat16, memory_format=torch.channels_last)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    twins = Twins(build=build, loss_fn=loss_fn, make=momentum)
    for n in range(3):
        draw = torch.Generator().manual_seed(n)
        batches = [(torch.randn(2, 3, 7, 7, generator=draw).bfloat16(),) for _ in range(3)]
        twins.accumulate(batches, divide=(3, torch.tensor(7), torch.tensor(1.5))[n])
    assert len(twins.step._plans) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_a_first_gradient_keeps_its_zeros_nans_and_infinities(dtype: torch.dtype) -> None:
    """Where nothing waits yet, a gradient is what eager's is, to the sign of its zeros."""

    def build() -> nn.Module:
        model = nn.Module()
        model.weight = nn.Parameter(torch.tensor([1.0, -1.0, 2.0, 3.0, 4.0], dtype=dtype))
        return model

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        product = -(model.weight * x)
        return (torch.view_as_real(product) if product.is_complex() else product).sum()

    twins = Twins(build=build, loss_fn=loss_fn, make=lambda m: torch.optim.SGD(m.parameters(), lr=0.0))
    x = torch.tensor([0.0, -0.0, torch.inf, torch.nan, 1e-40], dtype=dtype)
    for _ in range(4):
        twins.add((x,))
        signs = [torch.signbit(g.weight.grad.real[:2]).tolist() for g in twins.models]
        assert signs[0] == signs[1]
        assert True in signs[0]
        twins.add((x,))
        for model in twins.models:
            model.zero_grad()


def test_what_is_added_counts_as_written() -> None:
    twins = Twins()
    for batch in words([5] * 4):
        twins.add(batch)
    grad = twins.models[0].mix.weight.grad
    before = grad._version
    twins.add(words([5])[0])
    assert grad._version > before
    counted = twins.models[0].mix.weight._version
    twins.add(words([5])[0])
    assert twins.models[0].mix.weight._version == counted, "a microbatch does not write parameters"


def test_parameters_that_were_given_other_memory() -> None:
    twins = Twins()
    for n in range(6):
        twins.accumulate(words([5, 5], first=10 * n))
        if n % 2:
            for model in twins.models:
                for p in model.parameters():
                    p.data = p.data.clone()


def test_the_update_is_a_plan_and_is_replayed() -> None:
    twins = Twins(options={"clip_norm": 0.5})
    plans = []
    for n in range(4):
        twins.accumulate(words([5, 5], first=10 * n), divide=2 + n)
        plans.append(twins.step._update.plans[0])
    assert plans[3] is plans[0]
    assert plans[3].executor.counters.misses == 0
    assert "the update is a plan of its own" in str(twins.step.report())
    twins.optimizers[0].param_groups[0]["lr"] = twins.optimizers[1].param_groups[0]["lr"] = 0.5
    twins.accumulate(words([5, 5]), divide=2)
    for optimizer in twins.optimizers:
        optimizer.param_groups[0]["weight_decay"] = 0.0  # another update
    twins.accumulate(words([5, 5]), divide=2)
    assert twins.step._update.plans[0] is not plans[0]
    for optimizer in twins.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())  # other tensors
    twins.accumulate(words([5, 5]), divide=2)


# -- memory --------------------------------------------------------------------------------------------------------


def eager_peak_of(model: nn.Module, loss_fn: Callable[..., Tensor], x: Tensor) -> int:
    """The most bytes that an eager microbatch takes above what is resident, by the allocator's own events."""
    native = allocator.load()
    assert native is not None
    level = most = 0
    sizes: dict[int, int] = {}
    with native.record(Cell()) as recording:
        loss_fn(model, x).backward()
    for e in recording.events:
        if e["kind"] == ALLOC:
            sizes[int(e["id"])] = int(e["size_bytes"])
            level += int(e["size_bytes"])
        else:
            level -= sizes.pop(int(e["id"]), 0)
        most = max(most, level)
    return most


def test_gradients_are_there_once_and_the_plan_serves_everything_else() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    step = tb.compile_step(model, loss_fn, adamw(model), memory="keep")
    if step._maker.native is None:
        pytest.skip("no compiler: nothing sees what is asked of malloc")
    x = torch.randn(4, 64)
    for _ in range(4):
        step(x, update=False)
        step(x, update=False)
        step(x)
    for executor in (step._last.executor, step._update.plans[0].executor):
        assert (executor.counters.misses, executor.counters.passed, executor.counters.landed) == (0, 0, 0)
    report = step.report()
    gradients = sum(p.numel() * 4 for p in model.parameters())
    assert report.resident["pending gradients"] == gradients
    assert report.resident["optimizer state"] >= 2 * gradients
    assert report.allocations_per_step == 1
    assert report.peak_bytes - report.resident_bytes < gradients, "the gradients are there a second time"
    assert report.peak_bytes <= report.eager_peak_bytes
    step(x, update=False)
    measured = eager_peak_of(model, loss_fn, x)
    assert report.eager_peak_bytes - report.resident_bytes == pytest.approx(measured, rel=0.02)


# -- accumulate=n --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 7, 3])
def test_a_last_batch_that_accumulate_does_not_divide_is_cut_as_torch_chunk_cuts(rows: int) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 4)))
    optimizers = [momentum(m) for m in models]
    step = tb.compile_step(models[0], lambda m, x, y: (F.cross_entropy(m(x), y), y), optimizers[0], accumulate=4)
    for n in range(4):
        draw = torch.Generator().manual_seed(n)
        x, y = torch.randn(rows, 6, generator=draw), torch.randint(4, (rows,), generator=draw)
        torch.manual_seed(n)
        loss, aux = step(x, y)
        torch.manual_seed(n)
        total = torch.zeros(())
        xs, ys = x.chunk(4), y.chunk(4)
        even = len({len(part) for part in xs}) == 1
        for a, b in zip(xs, ys, strict=True):
            part = F.cross_entropy(models[1](a), b)
            part = part / len(xs) if even else part * (len(a) / rows)
            part.backward()
            total = total + part.detach()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(loss, total)
        assert [part.tolist() for part in aux] == [part.tolist() for part in ys]
        assert_same(state_of(models[0], optimizers[0]), state_of(models[1], optimizers[1]), f"step {n}")

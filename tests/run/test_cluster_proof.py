"""A generated kernel is compared where it is used first: a wrong one is refused and named, and eager's run instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.program import Cluster
from takeback.compiler.run import kernels
from takeback.compiler.run.cluster_ops import eagerly
from takeback.compiler.run.cluster_proof import shaped, what_is_wrong
from takeback.compiler.run.kernels import Kernels

Kernel = Callable[[list[Tensor]], Any]
Change = Callable[[list[Tensor], list[Tensor]], Any]
CPU = torch.device("cpu")
STEPS = 8  #: by then a plan is settled


def step_of(model: nn.Module, loss_fn: Callable[..., Tensor], **options: Any) -> tb.CompiledStep:
    return tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), mode="fast", **options)


def clusters_of(step: tb.CompiledStep) -> list[Cluster]:
    assert step._last is not None
    return [op.target for op in step._last.executor.program.ops if isinstance(op.target, Cluster)]


def operands_of(cluster: Cluster, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    found = []
    for r in cluster.inputs:
        flat = torch.rand(r.span_bytes[1] // r.dtype.itemsize) + 0.5
        found.append(flat.to(r.dtype).as_strided(r.shape, r.stride, r.offset))
    return found


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """Of a batch norm, which writes two operands, and what comes after it: several results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_cluster", lambda cluster, device: eagerly(cluster))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        step = step_of(model, lambda m, x: m[0].weight.mul(F.gelu(m(x)) @ m[0].weight).tanh().mean(), memory="keep")
        step(torch.randn(16, 8))
    [found] = [c for c in clusters_of(step) if c.writes]
    return found


def broken(cluster: Cluster, change: Change) -> Kernel:
    right = eagerly(cluster)

    def run(operands: list[Tensor]) -> Sequence[Tensor]:
        mine = list(operands)
        results = list(right(mine))
        changed = change(results, mine)
        return changed if isinstance(changed, list) else results

    return run


def largest(results: list[Tensor]) -> Tensor:
    return max(results, key=lambda t: t.numel())


def only_one_place(results: list[Tensor], operands: list[Tensor]) -> None:
    largest(results).view(-1)[-1] += 1e-3


def other_strides(results: list[Tensor], operands: list[Tensor]) -> list[Tensor]:
    return [r.t().contiguous().t() if r.dim() == 2 else r for r in results]


def same_bytes(results: list[Tensor], operands: list[Tensor]) -> list[Tensor]:
    """The last result is a part of the first one."""
    return [*results[:-1], results[0].view(-1)[: results[-1].numel()].view(results[-1].shape)]


WRONG: dict[str, tuple[Change, str]] = {
    "off by 1 %": (lambda results, operands: largest(results).mul_(1.01), "from double precision"),
    "off in one place": (only_one_place, "from double precision"),
    "NaN": (lambda results, operands: largest(results).view(-1)[0].fill_(torch.nan), "is not finite"),
    "infinite": (lambda results, operands: largest(results).view(-1)[0].fill_(torch.inf), "is not finite"),
    "another shape": (lambda results, operands: [r[None] for r in results], r"result 0 is torch.float32\[1,"),
    "another dtype": (lambda results, operands: [r.double() for r in results], "result 0 is torch.float64"),
    "other strides": (other_strides, "has the strides"),
    "shared bytes": (same_bytes, "shares its bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernel_is_refused(cluster: Cluster, name: str) -> None:
    change, reason = WRONG[name]
    said = what_is_wrong(cluster, broken(cluster, change), operands_of(cluster))
    assert said is not None
    assert re.search(reason, said), said


def test_kernel_that_forgets_to_write_is_refused(cluster: Cluster) -> None:
    def forgets(operands: list[Tensor]) -> Sequence[Tensor]:
        return eagerly(cluster)([t.clone() if i in cluster.writes else t for i, t in enumerate(operands)])

    said = what_is_wrong(cluster, forgets, operands_of(cluster))
    assert said is not None
    assert "which it writes in place" in said


def test_kernel_that_writes_twice_is_refused(cluster: Cluster) -> None:
    def twice(operands: list[Tensor]) -> Sequence[Tensor]:
        eagerly(cluster)(list(operands))
        return eagerly(cluster)(operands)

    said = what_is_wrong(cluster, twice, operands_of(cluster))
    assert said is not None
    assert "which it writes in place" in said


def test_kernel_that_overwrites_an_operand_is_refused_and_the_operand_is_as_it_was(cluster: Cluster) -> None:
    operands = operands_of(cluster)
    other = next(i for i in range(len(operands)) if i not in cluster.writes)
    before = [t.clone() for t in operands]
    said = what_is_wrong(cluster, broken(cluster, lambda results, mine: mine[other].zero_()), operands)
    assert said == f"it overwrites operand {other}"
    assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True))


def test_right_kernel_is_accepted_and_operands_stay_as_they_are(cluster: Cluster) -> None:
    operands = operands_of(cluster)
    before = [t.clone() for t in operands]
    assert what_is_wrong(cluster, eagerly(cluster), operands) is None
    assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True))
    slightly = broken(cluster, lambda results, operands: largest(results).mul_(1 + 1e-7))
    assert what_is_wrong(cluster, slightly, operands) is None, "another order of sums is no fault"


def pointwise(loss_fn: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> Cluster:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_cluster", lambda cluster, device: eagerly(cluster))
        torch.manual_seed(0)
        step = step_of(nn.Linear(64, 64).to(dtype), loss_fn, memory="keep")
        step(torch.randn(64, 64).to(dtype))
    return clusters_of(step)[0]


def test_infinity_that_eager_gives_is_asked_for() -> None:
    """Scores that a mask fills with -inf leave the cluster."""
    cluster = pointwise(lambda m, x: (m(x).mul(2).masked_fill(x > 0, -torch.inf) @ x).mean())
    operands = operands_of(cluster)
    assert any(bool(t.isinf().any()) for t in eagerly(cluster)(list(operands)))
    assert what_is_wrong(cluster, eagerly(cluster), operands) is None

    def finite(results: list[Tensor], operands: list[Tensor]) -> list[Tensor]:
        return [r.clamp(min=-1e30) if r.is_floating_point() else r for r in results]

    said = what_is_wrong(cluster, broken(cluster, finite), operands)
    assert said is not None
    assert "infinity" in said


def test_one_wrong_place_is_found_in_bfloat16_too() -> None:
    """Of the norm of many numbers it is less than the rounding: a kernel that forgets its last element."""
    cluster = pointwise(lambda m, x: (F.gelu(m(x) * 2) @ x).mean(), torch.bfloat16)
    operands = operands_of(cluster)
    assert what_is_wrong(cluster, eagerly(cluster), operands) is None

    def forgets(results: list[Tensor], operands: list[Tensor]) -> None:
        largest(results).view(-1)[-1] = 0

    assert what_is_wrong(cluster, broken(cluster, forgets), operands) is not None


def test_whole_numbers_may_stray_rarely() -> None:
    cluster = pointwise(lambda m, x: (m(x).mul(2).masked_fill(m(x).tanh() > 0.5, 0.0) @ x).mean())
    flags = [i for i, r in enumerate(cluster.results) if r.dtype is torch.bool]
    assert flags, "the mask is read by the backward"

    def flipped(count: int) -> Change:
        def change(results: list[Tensor], operands: list[Tensor]) -> None:
            mask = results[flags[0]].view(-1)
            mask[:count] = ~mask[:count]

        return change

    operands = operands_of(cluster)
    assert what_is_wrong(cluster, broken(cluster, flipped(2)), operands) is None
    said = what_is_wrong(cluster, broken(cluster, flipped(64)), operands)
    assert said is not None
    assert "in 64 of 4,096 places" in said


def test_dimensions_of_extent_1_that_are_left_out_come_back(cluster: Cluster) -> None:
    operands = operands_of(cluster)
    squeezed = broken(cluster, lambda results, operands: [r.squeeze() for r in results])
    found = shaped(cluster, squeezed, operands)(operands_of(cluster))
    assert [tuple(r.shape) for r in found] == [r.shape for r in cluster.results]


# -- in a step ---------------------------------------------------------------------------------------------------------


def norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))


def trained(
    compile_cluster: Callable[[Cluster, torch.device], Kernel], **options: Any
) -> tuple[nn.Module, tb.CompiledStep, list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_cluster", compile_cluster)
        model = norm_net()
        step = step_of(model, lambda m, x: m(x).square().mean(), **{"memory": "keep", **options})
        torch.manual_seed(1)
        losses = [float(step(torch.randn(32, 8))) for _ in range(STEPS)]
    return model, step, losses


def in_eager() -> tuple[nn.Module, list[float]]:
    model = norm_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


def assert_eagers(model: nn.Module, losses: list[float]) -> None:
    eager, expected = in_eager()
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


def test_wrong_kernel_never_touches_a_step_and_is_named_in_the_report() -> None:
    model, step, losses = trained(lambda cluster, device: broken(cluster, lambda r, o: largest(r).mul_(1.5)))
    assert_eagers(model, losses)
    [note] = [n for n in step.report().notes if "not generated ones" in n]
    assert "cluster[" in note
    assert "from double precision" in note


def test_right_kernels_run_from_the_second_replay_on_and_statistics_are_written_once() -> None:
    calls: list[str] = []

    def counted(cluster: Cluster, device: torch.device) -> Kernel:
        right = eagerly(cluster)

        def run(operands: list[Tensor]) -> Sequence[Tensor]:
            calls.append(str(cluster))
            return right(operands)

        return run

    model, step, losses = trained(counted)
    assert_eagers(model, losses)
    assert calls
    assert not [n for n in step.report().notes if "not generated ones" in n]
    assert int(model.get_buffer("1.num_batches_tracked")) == STEPS


def test_kernel_that_raises_where_it_is_compared_is_replaced() -> None:
    def fails(cluster: Cluster, device: torch.device) -> Kernel:
        def run(operands: list[Tensor]) -> Sequence[Tensor]:
            raise RuntimeError("out of resource: shared memory\nand more")

        return run

    model, step, losses = trained(fails)
    assert_eagers(model, losses)
    [note] = [n for n in step.report().notes if "not generated ones" in n]
    assert "RuntimeError: out of resource: shared memory)" in note


def test_comparison_is_no_part_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each op is expected to ask for is what it asks for where nobody compares."""
    _, compared, _ = trained(lambda cluster, device: eagerly(cluster))
    monkeypatch.setattr(kernels, "what_is_wrong", lambda cluster, kernel, operands: None)
    monkeypatch.setattr(kernels, "shaped", lambda cluster, kernel, operands: kernel)
    _, plain, _ = trained(lambda cluster, device: eagerly(cluster))
    assert compared._last is not None
    assert plain._last is not None
    ours, theirs = compared._last.executor.program.ops, plain._last.executor.program.ops
    assert any(op.scratch for op in ours if isinstance(op.target, Cluster))
    for one, other in zip(ours, theirs, strict=True):
        assert sorted(s.size_bytes for s in one.scratch) == sorted(s.size_bytes for s in other.scratch), one.name


def test_equal_clusters_are_compiled_once() -> None:
    keys: list[str] = []

    def noted(cluster: Cluster, device: torch.device) -> Kernel:
        keys.append(cluster.key)
        return eagerly(cluster)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_cluster", noted)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
        step = step_of(model, lambda m, x: m(x).square().mean(), memory="keep")
        step(torch.randn(16, 8))
    assert len(keys) == len(set(keys)) < len(clusters_of(step))
    known = Kernels(CPU)
    first = clusters_of(step)[0]
    assert known.of(first) is known.of(first)


def test_tracing_is_not_under_the_users_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    from takeback.compiler.run import inductor

    seen: list[bool] = []

    def look(cluster: Cluster, device: torch.device) -> Kernel:
        seen.append(torch.is_autocast_enabled("cpu"))
        return eagerly(cluster)

    monkeypatch.setattr(inductor, "_compile", look)
    torch.manual_seed(0)
    step = step_of(nn.Sequential(nn.Linear(8, 8), nn.GELU()), lambda m, x: m(x).float().square().mean(), memory="keep")
    with torch.autocast("cpu", torch.bfloat16):
        step(torch.randn(16, 8))
        assert torch.is_autocast_enabled("cpu")
    assert seen
    assert not any(seen)

"""Mode fast on programs that a hunt for wrong numbers went through: with eager's kernels in its clusters it has eager's
bits, as long as no sum is cut into parts.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from step_twins import Setup, assert_right, sgd
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.passes import pipeline
from takeback.compiler.passes.chunk_head import chunk_head
from takeback.compiler.program import Buffer, BufferId, Cluster, Op, Region, Role
from takeback.compiler.run import kernels, plan_file, plan_maker
from takeback.compiler.run.cluster_ops import eagerly
from takeback.compiler.run.inductor import Compiled, NotCompiled

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("one_thread", "short_search", "eagers_kernels")


@pytest.fixture
def eagers_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_compiled(cluster: Cluster, device: torch.device) -> Compiled:
        raise NotCompiled("eager's kernels were asked for")

    monkeypatch.setattr(kernels, "compile_cluster", not_compiled)
    monkeypatch.setattr(plan_maker, "in_one_kernel", lambda optimizers: False)
    whole = [replace(s, idle=lambda _: "off") if s.run is chunk_head else s for s in pipeline.PIPELINE]
    monkeypatch.setitem(pipeline.run_passes.__kwdefaults__, "stages", tuple(whole))


def rows(step: int) -> tuple[Tensor]:
    return (torch.randn(8, 6, generator=torch.Generator().manual_seed(100 + step)),)


def right(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Tensor], Tensor],
    memory: str = "min",
    mode: str = "fast",
) -> None:
    def make() -> Setup:
        model = build()
        return Setup(model, loss, sgd(model), rows)

    assert_right(make, steps=4, mode=mode, memory=memory, poison=True)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).tanh()


def test_product_of_statistics_reads_what_the_norm_before_it_wrote() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Normed)
        h = model(x)
        off = torch.mv(model.last.weight, model.norm.running_mean)
        return (h * 2 + off).square().sum() * 1e-2

    right(Normed, loss, "keep")


def test_sum_with_statistics_reads_what_a_later_norm_has_not_written() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Normed)
        h = model.first(x)
        before = (h * model.norm.running_mean).sum()
        return model.last(model.norm(h)).square().sum() * 1e-2 + before

    right(Normed, loss, "keep")


def test_norm_that_writes_statistics_of_the_steps_own() -> None:
    """An instance norm repeats its statistics for each item, and a batch norm writes these."""
    right(
        lambda: nn.Sequential(
            nn.Linear(6, 12), nn.Unflatten(1, (3, 4)), nn.InstanceNorm1d(3, track_running_stats=True)
        ),
        lambda m, x: m(x).square().mean() + m(x).exp().mean(),
    )


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_copy_of_another_look_at_a_value_is_that_value(mode: str) -> None:
    """A buffer is seen in one shape, that is copied, and the copy is seen in a third: once the copy is left out, the
    third is a look at the first."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x)
        first = torch.empty_strided((2, 1, 4, 6), (24, 24, 6, 1)).copy_(h.view(2, 1, 4, 6))
        return (first.squeeze(1).clone().view(8, 6) @ h.detach().t()).square().sum() * 1e-2

    right(lambda: nn.Linear(6, 6), loss, "keep", mode)


def test_power_in_place_is_not_taken_for_its_namesake() -> None:
    """`pow_.Scalar` raises a tensor to a number, `pow.Scalar` a number to a tensor."""
    right(lambda: nn.Linear(6, 6), lambda m, x: torch.linalg.vector_norm(m(x), 3.0))


def scribbling(cluster: Cluster) -> Compiled:
    """A kernel that asks for room for all values at once, and leaves NaN in what is no result."""

    def run(operands: list[Tensor]) -> list[Tensor]:
        regions = [r for op in cluster.ops for r in op.outputs]
        rooms = [torch.empty_strided(r.shape, r.stride, dtype=r.dtype) for r in regions]
        found = eagerly(cluster)(operands)
        wanted = [r.buffer for r in cluster.results]
        for region, room in zip(regions, rooms, strict=True):
            if region.buffer in wanted:
                room.copy_(found[wanted.index(region.buffer)])
        for region, room in zip(regions, rooms, strict=True):
            if region.buffer not in wanted and room.is_floating_point():
                room.fill_(torch.nan)
        return [rooms[[r.buffer for r in regions].index(b)] for b in wanted]

    return run


def test_kernel_that_comes_later_is_not_given_what_another_one_asked_for() -> None:
    """Where eager's kernels gave room back, a later result of theirs may lie; another kernel still has it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def loss(m: nn.Sequential, x: Tensor) -> Tensor:
        return m[1](m[0](x).exp().sin().cos().tanh()).square().mean()

    step = tb.compile_step(model, loss, sgd(model), mode="fast", memory="min", verify_every=0)
    for i in range(4):
        step(*rows(i))
    for kernel in step._maker.kernels.in_program(step._plans[0].executor.program):
        kernel.use_(scribbling(kernel.cluster))
    for i in range(4):
        expected = loss(model, *rows(i)).item()
        assert step(*rows(i)).item() == pytest.approx(expected, rel=1e-5)


def test_cluster_lets_go_of_its_values_without_the_garbage_collector() -> None:
    """What a cycle kept was freed in a later replay, and taken there for a result that is released inside its op: the
    next plan put other values onto it."""
    a = Region(BufferId(0), torch.float32, (4,), (1,), 0)
    b, c = replace(a, buffer=BufferId(1)), replace(a, buffer=BufferId(2))
    ops = (Op(aten.exp.default, (a,), {}, (b,)), Op(aten.cat.default, ((b, b),), {}, (replace(c, shape=(8,)),)))
    buffers = {r.buffer: Buffer(r.buffer, 4 * n, Role.INTERNAL) for r, n in ((a, 4), (b, 4), (c, 8))}
    cluster = Cluster(ops, buffers, (a,), (b, ops[1].outputs[0]))
    gc.disable()
    try:
        given = torch.ones(4)
        results = eagerly(cluster)([given])
        gone = [weakref.ref(t) for t in (given, *results)]
        del given, results
        assert [ref() for ref in gone] == [None, None, None]
    finally:
        gc.enable()


def test_plan_of_another_process_says_nothing_of_what_kernels_ask_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TAKEBACK_CACHE", str(tmp_path))
    monkeypatch.setenv("TAKEBACK_PLANS", "1")
    monkeypatch.setattr(plan_file, "FEWEST_OPS", 1)

    def loss(m: nn.Sequential, x: Tensor) -> Tensor:
        return m[1](m[0](x).exp().sin().cos().tanh()).square().mean()

    for process in ("first", "second"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        step = tb.compile_step(model, loss, sgd(model), mode="fast", memory="min")
        for i in range(4):
            expected = loss(model, *rows(i)).item()
            assert step(*rows(i)).item() == pytest.approx(expected, rel=1e-5)
        assert step._plans[0].planned.from_earlier == (process == "second")
        monkeypatch.setattr(kernels, "compile_cluster", lambda cluster, _: scribbling(cluster))

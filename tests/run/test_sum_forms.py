"""Sums over rows in two stages, and norms in the order of their rows: the same numbers, in fewer loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import takeback as tb
from takeback.compiler.program import Buffer, BufferId, Cluster, Op, Region, Role
from takeback.compiler.run import sum_forms
from takeback.compiler.run.cluster_forms import forms, traced, without_repeats
from takeback.compiler.run.cluster_ops import plainly, run_ops
from takeback.compiler.run.norm_forms import lies_turned
from takeback.compiler.run.sum_forms import adds_up_columns, adds_up_rows, common_shapes

pytestmark = pytest.mark.usefixtures("one_thread", "eagers_kernels")
aten = torch.ops.aten


def clusters_of(model: nn.Module, loss_fn: Callable[..., Tensor], x: Tensor) -> list[Cluster]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tb.compile_step(model, loss_fn, optimizer, mode="fast", memory="keep")
    for _ in range(3):
        step(x)
    assert step._last is not None
    found = {op.target.key: op.target for op in step._last.executor.program.ops if isinstance(op.target, Cluster)}
    return list(found.values())


def with_names(clusters: list[Cluster], *names: str) -> Cluster:
    [found] = [c for c in clusters if set(names) <= {op.name for op in c.ops}]
    return found


def operands_of(cluster: Cluster) -> list[Tensor]:
    torch.manual_seed(0)
    made = []
    for r in cluster.inputs:
        reach = 1 + sum((n - 1) * step for n, step in zip(r.shape, r.stride, strict=True))
        values = torch.rand(reach, dtype=torch.float64).to(r.dtype) + (0.1 if r.dtype.is_floating_point else 0)
        made.append(values.as_strided(r.shape, r.stride))
    return made


def graph_of(cluster: Cluster, table: Any = None) -> Any:
    return make_fx(lambda *given: traced(cluster, given), decomposition_table=table)(*operands_of(cluster))


def same_numbers(cluster: Cluster) -> None:
    """What Inductor is given, and eager's kernels."""
    operands = operands_of(cluster)
    expected = run_ops(cluster, [t.clone() for t in operands], plainly)
    for ours, theirs in zip(graph_of(cluster, select_decomp_table())(*operands), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def sums_in(cluster: Cluster) -> list[Any]:
    """The sums of the traced cluster: over which dimensions of which shape."""
    nodes = [n for n in graph_of(cluster).graph.nodes if str(n.target) == "aten.sum.dim_IntList"]
    return [(tuple(n.args[0].meta["tensor_meta"].shape), tuple(n.args[1])) for n in nodes]


class Gelu(nn.Module):
    """A bias between an activation and a product: its gradient is a sum over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


def gelu_cluster() -> Cluster:
    found = clusters_of(Gelu().double(), lambda m, x: m(x).square().mean(), torch.randn(4, 6, 8, dtype=torch.float64))
    return with_names(found, "gelu_backward", "sum.dim_IntList")


def test_bias_gradient_is_summed_in_the_dimensions_of_what_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_forms, "_LEAST", 1)
    cluster = gelu_cluster()
    assert adds_up_columns(cluster)
    [sums] = [op for op in cluster.ops if op.name == "sum.dim_IntList"]
    assert sums.inputs[0].shape == (24, 16), "eager's own is over the rows of a matrix"
    assert sums_in(cluster) == [((4, 6, 16), (1,)), ((4, 16), (0,))]
    same_numbers(cluster)


def test_few_sums_side_by_side_are_left_to_inductor() -> None:
    cluster = gelu_cluster()
    assert [dims for _, dims in sums_in(cluster)] == [(0,)]
    same_numbers(cluster)


def test_op_on_a_flattened_value_is_traced_in_the_shape_of_the_others() -> None:
    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).tanh() * 2
            return self.second(y.view(24, 16).exp())

    model = Flattened().double()
    found = clusters_of(model, lambda m, x: m(x).square().mean(), torch.randn(4, 6, 8, dtype=torch.float64))
    cluster = with_names(found, "tanh", "exp")
    assert common_shapes(cluster)[4 * 6 * 16] == (4, 6, 16)
    [node] = [n for n in graph_of(cluster).graph.nodes if str(n.target) == "aten.exp.default"]
    assert node.meta["tensor_meta"].shape == (4, 6, 16)
    same_numbers(cluster)


class Block(nn.Module):
    """The gradient that the batch norm's backward is given goes around the block, too."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(3))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs[0](x)
        return self.convs[2](F.relu(self.norm(self.convs[1](x)) + x))


@pytest.mark.parametrize("channels_last", [True, False])
def test_batch_norms_backward_is_summed_in_two_stages_where_its_channels_lie_together(
    channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sum_forms, "_LEAST", 1)
    form = torch.channels_last if channels_last else torch.contiguous_format
    model = Block().double().to(memory_format=form)  # type: ignore[call-overload]
    x = torch.randn(3, 4, 5, 7, dtype=torch.float64).to(memory_format=form)
    cluster = with_names(clusters_of(model, lambda m, x: m(x).square().mean(), x), "native_batch_norm_backward")
    assert adds_up_columns(cluster) == channels_last
    named = [str(n.target) for n in graph_of(cluster).graph.nodes]
    assert ("aten.native_batch_norm_backward.default" in named) == (not channels_last)
    if channels_last:
        assert sums_in(cluster) == [*(2 * [((3, 4, 5, 7), (2, 3))]), ((2, 3, 4), (1,))]
    same_numbers(cluster)


def test_batch_norms_backward_whose_gradient_stays_inside_keeps_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_forms, "_LEAST", 1)
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(3, 4, 9, 9).to(memory_format=torch.channels_last)
    cluster = with_names(clusters_of(model, lambda m, x: m(x).square().mean(), x), "native_batch_norm_backward")
    assert sums_in(cluster) == []


@pytest.mark.parametrize("masked", [(True, True, True), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_batch_norms_backward_has_torchs_numbers(
    masked: tuple[bool, ...], affine: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from takeback.compiler.run.norm_forms import batch_norm_backward

    monkeypatch.setattr(sum_forms, "_LEAST", 1)
    torch.manual_seed(1)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    x, grad = (torch.randn(6, 3, 4, 5).to(dtype).to(memory_format=torch.channels_last) for _ in range(2))
    weight = torch.rand(3, dtype=wide) if affine else None
    _, mean, invstd = aten.native_batch_norm(x.to(wide), weight, None, None, None, True, 0.1, 1e-5)
    args = (grad, x, weight, None, None, mean, invstd, True, 1e-5, list(masked))
    region = Region(BufferId(0), dtype, tuple(x.shape), x.stride(), 0)
    op = Op(aten.native_batch_norm_backward.default, (region, region), {}, ())
    found = batch_norm_backward(op, args)
    assert found is not None
    given = (grad.to(wide), x.to(wide), *args[2:])
    for ours, theirs in zip(found, aten.native_batch_norm_backward(*given), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            tolerance = 1e-9 if dtype is torch.float64 else 1e-2
            torch.testing.assert_close(ours.to(wide), theirs, rtol=tolerance, atol=tolerance)
    assert found[0] is None or found[0].is_contiguous(memory_format=torch.channels_last)


class Turned(nn.Module):
    """As nn.MultiheadAttention with batch_first leaves its result: rows of the batch side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.last(x.transpose(0, 1)).transpose(0, 1) * 2))


def test_layer_norm_of_rows_in_another_order_is_known() -> None:
    model, x = Turned().double(), torch.randn(3, 5, 8, dtype=torch.float64)
    clusters = clusters_of(model, lambda m, x: m(x).square().mean(), x)
    for name in ("native_layer_norm", "native_layer_norm_backward"):
        cluster = with_names(clusters, name)
        assert adds_up_rows(cluster)
        assert lies_turned(cluster)
        same_numbers(cluster)
    plain = clusters_of(
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), lambda m, x: m(x * 2).square().mean(), torch.randn(3, 5, 8)
    )
    assert not any(map(lies_turned, plain))


def test_padding_of_a_losss_gradient_is_put_beside_it() -> None:
    region = Region(BufferId(0), torch.float64, (4, 5), (5, 1), 0)
    wide = Region(BufferId(2), torch.float64, (4, 8), (8, 1), 0)
    inner = replace(region, buffer=BufferId(1))
    ops = (
        Op(aten._log_softmax.default, (region, 1, False), {}, (inner,)),
        Op(aten.constant_pad_nd.default, (inner, (0, 3), 2.0), {}, (wide,)),
    )
    buffers = {BufferId(i): Buffer(BufferId(i), n, Role.INTERNAL) for i, n in enumerate((160, 160, 256))}
    cluster = Cluster(ops, buffers, (region,), (wide,))
    assert "aten.cat.default" in {str(n.target) for n in graph_of(cluster).graph.nodes}
    same_numbers(cluster)
    before = replace(ops[1], args=(inner, (3, 0), 2.0))
    same_numbers(replace(cluster, ops=(ops[0], before)))


def repeated(*, leaves: bool = False, written: bool = False) -> Cluster:
    """exp(x) twice, once for each of two readers."""
    x = Region(BufferId(0), torch.float64, (4,), (1,), 0)
    a, b, c, d = (replace(x, buffer=BufferId(i)) for i in range(1, 5))
    write = [Op(aten.add_.Tensor, (x, 1.0), {}, (x,), (BufferId(0),))] if written else []
    ops = (
        Op(aten.exp.default, (x,), {}, (a,)),
        Op(aten.sin.default, (a,), {}, (b,)),
        *write,
        Op(aten.exp.default, (x,), {}, (c,)),
        Op(aten.cos.default, (c,), {}, (d,)),
    )
    buffers = {BufferId(i): Buffer(BufferId(i), 32, Role.INTERNAL) for i in range(5)}
    results = (b, d, c) if leaves else (b, d)
    return Cluster(ops, buffers, (x,), results, (0,) if written else ())


def test_op_that_does_the_same_is_traced_once_unless_its_result_leaves_or_its_operand_was_written() -> None:
    assert [op.name for op in without_repeats(repeated()).ops] == ["exp", "sin", "cos"]
    for cluster in (repeated(leaves=True), repeated(written=True)):
        assert [op.name for op in without_repeats(cluster).ops] == [op.name for op in cluster.ops]
    for cluster in (repeated(), repeated(leaves=True), repeated(written=True)):
        given, theirs = torch.rand(4, dtype=torch.float64), torch.rand(0)
        theirs = given.clone()
        for mine, plain in zip(traced(cluster, [given]), run_ops(cluster, [theirs], plainly), strict=True):
            assert torch.equal(mine, plain)


def test_random_op_is_not_taken_for_its_like() -> None:
    x = Region(BufferId(0), torch.float32, (64,), (1,), 0)
    a, b = (replace(x, buffer=BufferId(i)) for i in (1, 2))
    c = replace(x, buffer=BufferId(3))
    draw = Op(aten.rand_like.default, (x,), {}, (a,))
    ops = (draw, replace(draw, results=(b,)), Op(aten.sub.Tensor, (a, b), {}, (c,)))
    buffers = {BufferId(i): Buffer(BufferId(i), 256, Role.INTERNAL) for i in range(4)}
    cluster = Cluster(ops, buffers, (x,), (c,))
    assert len(without_repeats(cluster).ops) == 3
    assert forms(cluster)  # and it can be traced

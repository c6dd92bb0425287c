"""fuse: what becomes a cluster, what never does, and that a group ends where its ops could not run together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn_programs import recorded
from torch import Tensor, nn

from takeback.compiler.cluster import unclustered
from takeback.compiler.form import check_form
from takeback.compiler.layout import lay_out
from takeback.compiler.ownership.meaning import MeaningError, check_meaning
from takeback.compiler.passes import PIPELINE, Draft, PassSettings, run_passes
from takeback.compiler.passes.fuse import MOST_OPS, fuse
from takeback.compiler.passes.fusible import why_not
from takeback.compiler.passes.recompute import Chooser, Within
from takeback.compiler.program import Cluster, Op, Program, Region

aten = torch.ops.aten
FAST = PassSettings(fast=True)
WHOLE_HEAD = [stage for stage in PIPELINE if stage.name != "chunk_head"]


def fused(program: Program) -> Draft:
    before = run_passes(program, settings=FAST, stages=WHOLE_HEAD, before=fuse)
    after = fuse(before)
    check_form(after.program, after.kept)
    check_meaning(program, after.program)
    return after


def step_of(loss_fn: Callable[..., Tensor], model: nn.Module | None = None, *batch: Tensor) -> Program:
    torch.manual_seed(0)
    return recorded(model or nn.Linear(8, 8), loss_fn, *(batch or (torch.randn(32, 8),)))


def clusters(draft: Draft) -> list[Op]:
    return [op for op in draft.program.ops if isinstance(op.target, Cluster)]


def names(op: Op) -> list[str]:
    return [inner.name for inner in op.target.ops] if isinstance(op.target, Cluster) else [op.name]


def position(program: Program, name: str) -> int:
    [at] = [i for i, op in enumerate(program.ops) if name in names(op)]
    return at


def test_chain_of_pointwise_ops_is_one_cluster_and_its_inner_values_have_no_bytes() -> None:
    program = step_of(lambda m, x: (F.gelu(m(x)).tanh() * 2).square().mean())
    draft = fused(program)
    assert sum(map(len, map(names, clusters(draft)))) >= 8
    made = {r.buffer for op in draft.program.ops for r in op.outputs}
    inner = {r.buffer for op in program.ops for r in op.outputs} - made
    assert len(inner) >= 4
    layout = lay_out(run_passes(program, settings=FAST, stages=WHOLE_HEAD))
    assert not inner & layout.alive.keys()
    without = lay_out(run_passes(program, stages=WHOLE_HEAD))
    assert layout.alive_bytes <= without.alive_bytes


def test_products_random_ops_and_updates_stay_out_and_the_report_says_why() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU())
    draft = fused(step_of(lambda m, x: m(x).square().mean(), model))
    inside = {name for op in clusters(draft) for name in names(op)}
    assert not {n for n in inside if "mm" in n or "bernoulli" in n or n.startswith("add_")}
    reasons = {r.op: r.reason for r in draft.refusals if r.decision == "fuse"}
    assert reasons["addmm"] == "it computes more than it moves, or is not known"
    drawn = next(reason for name, reason in reasons.items() if "bernoulli" in name)
    assert drawn == "it draws random numbers, which stay eager's"


def with_statistics(model: Any, x: Tensor) -> Tensor:
    """A product reads what the batch norm has just written."""
    y = model[1](model[0](x))
    kept = model[1].running_mean[None] @ model[0].weight.detach()
    return (y.relu() * kept).square().mean()


def test_running_statistics_are_written_before_a_product_reads_them() -> None:
    """The norm's group would be open until relu, which runs after the product."""
    draft = fused(step_of(with_statistics, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))))
    program = draft.program
    [read] = [i for i, op in enumerate(program.ops) if op.name == "mm" and op.inputs[0].shape == (1, 8)]
    assert position(program, "native_batch_norm") < read


def test_cluster_writes_running_statistics_and_declares_it() -> None:
    draft = fused(step_of(lambda m, x: m(x).relu().mean(), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))))
    [op] = [op for op in clusters(draft) if "native_batch_norm" in names(op)]
    buffers = draft.program.buffers
    assert {buffers[b].name for b in op.mutates} == {"1.running_mean", "1.running_var"}
    assert isinstance(op.target, Cluster)
    assert {op.inputs[i].buffer for i in op.target.writes} == set(op.mutates)


def test_statistics_that_the_step_made_itself_stay_out() -> None:
    def loss_fn(m: Any, x: Tensor) -> Tensor:
        mean, var = m.bias.detach().clone(), torch.ones(8)
        return F.batch_norm(m(x), mean, var, training=True).relu().mean() + (m(x) * mean).mean()

    draft = fused(step_of(loss_fn))
    assert not any("native_batch_norm" in names(op) for op in clusters(draft))


def test_op_is_not_moved_past_a_write_of_what_it_reads() -> None:
    """a is open when x is written in the model's own buffer; the loss reads a afterwards."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("seen", torch.ones(8))
            self.seen: Tensor

        def forward(self, x: Tensor) -> Tensor:
            a = self.seen * 2
            self.seen[:4].add_(1)  # a part: functionalize leaves it in place
            return (self.inner(x) * (a + 1)).mean()

    draft = fused(step_of(lambda m, x: m(x), Counts()))
    program = draft.program
    [written] = [i for i, op in enumerate(program.ops) if op.name == "add_.Tensor" and op.outputs[0].shape == (4,)]
    [read] = [
        i
        for i, op in enumerate(program.ops)
        if any(program.buffers[r.buffer].name == "seen" for r in op.inputs) and i != written
    ]
    assert read < written


def test_what_nobody_asks_for_is_left_out() -> None:
    def loss_fn(m: Any, x: Tensor) -> Tensor:
        y = m(x)
        (y.detach().exp() + 1).relu()
        return y.square().mean()

    draft = fused(step_of(loss_fn))
    assert all(op.outputs or op.mutates for op in clusters(draft))
    assert not any("exp" in names(op) for op in draft.program.ops)


def test_look_through_windows_needs_bytes() -> None:
    def loss_fn(m: Any, x: Tensor) -> Tensor:
        y = m(x).tanh()
        return (y.unfold(1, 3, 1) * 2).square().mean()

    program = step_of(loss_fn)
    draft = fused(program)
    [tanh] = [op.outputs[0].buffer for op in program.ops if op.name == "tanh"]
    assert any(r.buffer == tanh for op in draft.program.ops for r in op.outputs)


def test_long_chains_are_cut() -> None:
    def loss_fn(m: Any, x: Tensor) -> Tensor:
        y = m(x)
        for i in range(MOST_OPS):
            y = (y + i).tanh()
        return y.mean()

    assert max(len(names(op)) for op in clusters(fused(step_of(loss_fn)))) <= 2 * MOST_OPS


def test_small_sum_joins_the_cluster_that_made_its_operand() -> None:
    """The bias' gradient is read by the update alone, after the product that closed the group."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    draft = fused(step_of(lambda m, x: m(x).square().mean(), model, torch.randn(256, 8)))
    [group] = [names(op) for op in clusters(draft) if "gelu_backward" in names(op)]
    assert "sum.dim_IntList" in group


def test_activation_that_stands_alone_comes_out_of_its_backward() -> None:
    """Between two products; a lone op of eager's would be kept, or run a second time."""

    def loss_fn(m: Any, x: Tensor) -> Tensor:
        return m(x).square().mean()

    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.GELU())]
    program = step_of(loss_fn, nn.Sequential(*layers, nn.Linear(8, 8)), torch.randn(64, 8))
    draft = run_passes(
        program, settings=PassSettings(fast=True, goal=Within(0.5), chooser=Chooser(lambda op: 1e-6, 60.0))
    )
    both = [names(op) for op in draft.program.ops if "gelu_backward" in names(op)]
    assert len(both) == 3
    assert any("gelu" in inner for inner in both)


def test_activation_whose_backward_reads_its_result_stays_eagers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    draft = fused(step_of(lambda m, x: m(x).square().mean(), model, torch.randn(64, 8)))
    assert ["relu"] in [names(op) for op in draft.program.ops if not isinstance(op.target, Cluster)]


@pytest.mark.parametrize("frozen", [False, True], ids=["without weights", "with frozen ones"])
def test_backward_of_a_norm_that_gives_no_gradient_for_weights_is_in_a_cluster(frozen: bool) -> None:
    norm = nn.LayerNorm(8, elementwise_affine=frozen).requires_grad_(False)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8))
    draft = fused(step_of(lambda m, x: m[2](m[1](m[0](x)) * 3).square().mean(), model, torch.randn(64, 8)))
    [backward] = [op for op in draft.program.ops if "native_layer_norm_backward" in names(op)]
    assert isinstance(backward.target, Cluster)


def test_unclustered_is_the_program_again() -> None:
    program = step_of(lambda m, x: F.layer_norm(F.gelu(m(x)), (8,)).square().mean())
    draft = fused(program)
    again = unclustered(draft.program)
    assert not any(isinstance(op.target, Cluster) for op in again.ops)
    assert len(again.ops) >= len(program.ops)
    assert unclustered(again) is again


# -- what the check of meaning finds -----------------------------------------------------------------------------------


def sabotaged(draft: Draft, change: Callable[[Cluster], Cluster | None]) -> Program:
    for i, op in enumerate(draft.program.ops):
        if isinstance(op.target, Cluster):
            broken = change(op.target)
            if broken is not None:
                ops = draft.program.ops
                return replace(draft.program, ops=(*ops[:i], replace(op, target=broken), *ops[i + 1 :]))
    raise AssertionError("nothing to break")


def another_op(cluster: Cluster) -> Cluster | None:
    for i, op in enumerate(cluster.ops):
        if op.name == "gelu":
            ops = cluster.ops
            return replace(cluster, ops=(*ops[:i], replace(op, target=aten.silu.default), *ops[i + 1 :]))
    return None


def another_operand(cluster: Cluster) -> Cluster | None:
    """Two operands of one geometry change places."""
    for i, j in itertools.combinations(range(len(cluster.inputs)), 2):
        if cluster.inputs[i].same_place(cluster.inputs[j]):
            a, b = cluster.inputs[i].buffer, cluster.inputs[j].buffer
            table = {a: b, b: a}

            def look(r: Region, table: Any = table) -> Region:
                return replace(r, buffer=table.get(r.buffer, r.buffer))

            return replace(cluster, ops=tuple(op.map(reads=look) for op in cluster.ops))
    return None


def another_order(cluster: Cluster) -> Cluster | None:
    return replace(cluster, results=cluster.results[::-1]) if len(cluster.results) > 1 else None


def another_number(cluster: Cluster) -> Cluster | None:
    for i, op in enumerate(cluster.ops):
        if op.name == "mul.Tensor" and 2 in op.args:
            ops = cluster.ops
            return replace(cluster, ops=(*ops[:i], replace(op, args=(op.args[0], 3)), *ops[i + 1 :]))
    return None


@pytest.mark.parametrize("change", [another_op, another_operand, another_order, another_number])
def test_cluster_that_computes_something_else_is_found(change: Callable[[Cluster], Cluster | None]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    program = step_of(lambda m, x: (F.gelu(m[0](x)) * 2 - m[1](x).tanh()).square().mean(), model)
    draft = fused(program)
    broken = sabotaged(draft, change)
    with pytest.raises(MeaningError):
        check_meaning(program, broken)


def test_group_that_is_not_closed_by_a_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from takeback.compiler.passes import fuse as module

    program = step_of(with_statistics, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    monkeypatch.setattr(module._Grouping, "_after_writes", lambda self, op: None)
    with pytest.raises(MeaningError):
        fused(program)


# -- keys --------------------------------------------------------------------------------------------------------------


def test_equal_clusters_have_one_key_and_others_have_others() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.inner:
                x = x + F.gelu(block(x))
            return x.square().mean()

    keys = [
        op.target.key for op in clusters(fused(step_of(lambda m, x: m(x), Blocks()))) if isinstance(op.target, Cluster)
    ]
    assert len(set(keys)) < len(keys)
    wider = [
        op.target.key
        for op in clusters(fused(step_of(lambda m, x: m(x), Blocks(), torch.randn(64, 8))))
        if isinstance(op.target, Cluster)
    ]
    assert not set(keys) & set(wider)


def one_cluster(loss_fn: Callable[..., Tensor], x: Tensor) -> str:
    found = [op for op in clusters(fused(step_of(loss_fn, nn.Linear(4, 4), x))) if "tanh" in names(op)]
    assert isinstance(found[0].target, Cluster)
    return found[0].target.key


def test_key_knows_numbers_and_how_well_operands_are_aligned() -> None:
    def scaled(factor: float, first: int) -> str:
        return one_cluster(
            lambda m, x: (m(x[:, :4]) + (x.flatten()[first : first + 4] * factor).tanh()).mean(), torch.randn(8, 12)
        )

    assert scaled(2.0, 4) == scaled(2.0, 8), "16 bytes further is as well aligned"
    assert scaled(2.0, 4) != scaled(3.0, 4)
    assert scaled(2.0, 4) != scaled(2.0, 5), "4 bytes further is not"


def test_every_op_that_is_left_out_has_a_reason() -> None:
    program = step_of(lambda m, x: F.cross_entropy(m(x), x.argmax(1)))
    for op in program.ops:
        reason = why_not(op, program)
        assert reason is None or reason.split()[0] in ("it", "a", "an", "its")


def test_each_part_of_a_loss_is_one_cluster_from_its_logits_to_their_gradient() -> None:
    """Neither the sum over the parts nor the turn from forward to backward stands between its ops."""
    torch.manual_seed(0)
    batch = torch.randn(64, 8), torch.randint(96, (64,))
    program = recorded(nn.Linear(8, 96), lambda m, x, y: F.cross_entropy(m(x), y), *batch)
    draft = run_passes(program, settings=FAST)
    parts = [names(op) for op in draft.program.ops if "_log_softmax" in names(op)]
    assert len(parts) > 1
    assert all("_log_softmax_backward_data" in part for part in parts)

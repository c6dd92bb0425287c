"""thin and partial: what clusters of the backward make again, what they read instead, and what is never run twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn_programs import recorded
from test_fuse import WHOLE_HEAD, clusters, fused, names, step_of
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.ownership.meaning import MeaningError, check_meaning
from takeback.compiler.passes import Draft, PassSettings, run_passes
from takeback.compiler.passes.partial import partial
from takeback.compiler.passes.recompute import Chooser, Lowest
from takeback.compiler.program import Cluster, Op, Phase, Program, Role
from takeback.compiler.run.cluster_ops import eagerly


def of_backward(draft: Draft) -> list[Op]:
    return [op for op in clusters(draft) if op.phase is Phase.BACKWARD]


def held_for_backward(program: Program) -> int:
    """Bytes that the forward makes and the backward reads."""
    made = {
        r.buffer for op in program.ops if op.phase is Phase.FORWARD for r in op.outputs if r.buffer not in op.mutates
    }
    read = {r.buffer for op in program.ops if op.phase is Phase.BACKWARD for r in op.inputs}
    return sum(program.buffers[b].size_bytes for b in made & read)


def blocks(m: Any, x: Tensor) -> Tensor:
    for layer in m:
        x = F.silu(layer(x).tanh() + 1)
    return x.square().mean()


def test_backward_makes_pointwise_values_again_and_less_is_kept() -> None:
    program = step_of(blocks, nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    draft = fused(program)
    assert any("silu" in names(op) or "tanh" in names(op) for op in of_backward(draft))
    assert held_for_backward(draft.program) < held_for_backward(program)


def test_random_numbers_are_never_drawn_again() -> None:
    def loss_fn(m: Any, x: Tensor) -> Tensor:
        return F.silu(F.dropout(m(x), 0.5) * torch.rand_like(x)).tanh().square().mean()

    program = step_of(loss_fn)
    draft = fused(program)

    def draws(p: Program) -> int:
        return sum("bernoulli" in n or "rand" in n for op in p.ops for n in names(op))

    assert draws(draft.program) == draws(program) == 2
    assert not any("bernoulli" in n or "rand" in n for op in clusters(draft) for n in names(op))


def test_reductions_are_not_made_again() -> None:
    def loss_fn(m: Any, x: Tensor) -> Tensor:
        y = m(x)
        return (
            ((y - y.mean(1, keepdim=True)) * y.softmax(1) / (y.logsumexp(1, keepdim=True) + 9)).tanh().square().mean()
        )

    program = step_of(loss_fn, None, torch.randn(4096, 8))
    draft = fused(program)
    for name in ("mean.dim", "_softmax", "logsumexp", "amax"):
        before = sum(name in names(op) for op in program.ops)
        assert sum(n == name for op in draft.program.ops for n in names(op)) == before, name


def test_long_sum_is_read_and_not_its_terms() -> None:
    """A residual stream: each block would read all blocks before it."""

    def loss_fn(m: Any, x: Tensor) -> Tensor:
        for layer in m:
            x = x + layer(F.silu(x))
        return x.square().mean()

    program = step_of(loss_fn, nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), torch.randn(64, 8))
    for op in of_backward(fused(program)):
        assert len({r.buffer for r in op.inputs if r.shape == (64, 8)}) <= 5


def test_long_sum_is_read_also_where_its_terms_are_kept_anyway() -> None:
    """A gate's gradient reads its branch, so that all terms of the residual stream are there for the backward."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
            self.gates = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(8))

    def loss_fn(m: Any, x: Tensor) -> Tensor:
        for branch, gate in zip(m.branches, m.gates, strict=True):
            x = x + gate * branch(F.layer_norm(x, (8,)))
        return x.square().mean()

    program = step_of(loss_fn, Gated(), torch.randn(64, 8))
    norms = [op for op in of_backward(fused(program)) if "native_layer_norm_backward" in names(op)]
    assert norms
    for op in norms:
        assert len({r.buffer for r in op.inputs if r.shape == (64, 8)}) <= 5


@pytest.mark.parametrize("written", [False, True])
def test_operand_that_is_overwritten_in_between_is_not_read_again(written: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(8))
            self.scale: Tensor

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            y = F.silu(h + self.scale)
            if written:
                self.scale[:4].add_(1)
            return (y * F.silu(h)).mean()

    draft = fused(step_of(lambda m, x: m(x), Scaled()))
    [scale] = [b.id for b in draft.program.buffers.values() if b.name == "scale"]
    read = [op for op in of_backward(draft) if any(r.buffer == scale for r in op.inputs)]
    assert bool(read) is not written, "h is kept for its own sake, and h + scale is made of it while the scale is there"


def early(loss_fn: Any, model: nn.Module, *batch: Tensor) -> Program:
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), memory="keep", update="early")
    step(*batch)
    return step._plans[0].original


def test_early_update_comes_after_whoever_makes_a_value_of_the_parameter_again() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.gate = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.inner(F.silu(self.inner(x) * self.gate)) * self.gate.exp()).square().mean()

    torch.manual_seed(0)
    program = early(lambda m, x: m(x), Gated(), torch.randn(32, 8))
    draft = run_passes(program, settings=PassSettings(fast=True, early=True), stages=WHOLE_HEAD)  # checks the meaning
    seen: set[int] = set()
    for op in draft.program.ops:
        parameters = {r.buffer for r in op.inputs if draft.program.buffers[r.buffer].role is Role.PARAMETER}
        if isinstance(op.target, Cluster):
            assert not parameters & seen, "a cluster reads a parameter after its update"
        seen |= {b for b in op.mutates if draft.program.buffers[b].role is Role.PARAMETER}
    assert seen


def test_maker_that_reads_what_an_early_update_wrote_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sabotaged thin, which does not look at writes, makes another step of it."""
    from takeback.compiler.passes import thin

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(8))
            self.scale: Tensor

        def forward(self, x: Tensor) -> Tensor:
            gate = (self.scale * 2).expand(32, 8) * x
            self.scale[:4].add_(1)
            return F.silu(self.inner(x) * gate.tanh()).square().mean()

    torch.manual_seed(0)
    program = recorded(Twice(), lambda m, x: m(x), torch.randn(32, 8))
    fused(program)
    honest = thin._LeastKept._find_makers
    monkeypatch.setattr(thin._LeastKept, "_find_makers", lambda self, last: honest(self, -1))
    with pytest.raises(MeaningError):
        fused(program)


# -- partial -----------------------------------------------------------------------------------------------------------


def norm_cluster() -> tuple[Draft, Op]:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    draft = fused(step_of(lambda m, x: m[0](F.gelu(m(x))).square().mean(), model, torch.randn(512, 8)))
    [op] = [op for op in clusters(draft) if "native_batch_norm" in names(op)]
    return draft, op


def test_batch_norm_is_made_again_in_its_form_for_evaluation_and_writes_nothing() -> None:
    draft, op = norm_cluster()
    again = partial(op)
    assert again is not None
    assert isinstance(again.target, Cluster)
    assert again.mutates == ()
    assert again.target.writes == ()
    [norm] = [inner for inner in again.target.ops if inner.name == "native_batch_norm"]
    assert norm.args[5] is False
    statistics = {b.id for b in draft.program.buffers.values() if "running" in b.name}
    assert statistics
    assert not statistics & {r.buffer for r in again.inputs}
    assert {r.buffer for r in again.outputs} < {r.buffer for r in op.outputs}, "small results are read, not made"


def test_what_is_made_again_has_the_same_bits() -> None:
    draft, op = norm_cluster()
    again = partial(op)
    assert again is not None
    torch.manual_seed(0)
    values: dict[int, Tensor] = {}
    for r in op.inputs:
        values[r.buffer] = torch.rand(r.shape).as_strided(r.shape, r.stride)
    assert isinstance(op.target, Cluster)
    assert isinstance(again.target, Cluster)
    before = {r.buffer: values[r.buffer].clone() for r in op.inputs}
    for r, made in zip(op.outputs, eagerly(op.target)([before[r.buffer] for r in op.inputs]), strict=True):
        values[r.buffer] = made
    found = eagerly(again.target)([values[r.buffer] for r in again.inputs])
    for r, made in zip(again.outputs, found, strict=True):
        assert torch.equal(made, values[r.buffer])
    assert draft.program.buffers


def test_rebuilding_of_clusters_means_the_same_and_random_clusters_stay() -> None:
    model = nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
    )
    program = step_of(lambda m, x: m(x).square().mean(), model, torch.randn(256, 8))
    chooser = Chooser(lambda op: 1e-9 * sum(r.numel for r in (*op.inputs, *op.outputs)), 60.0)
    draft = run_passes(program, settings=PassSettings(fast=True, goal=Lowest(), chooser=chooser), stages=WHOLE_HEAD)
    check_meaning(program, draft.program)
    drawn = [op.name for op in draft.program.ops if "bernoulli" in op.name]
    assert len(drawn) == 1

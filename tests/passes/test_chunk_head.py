"""chunk_head: heads of many forms run row by row, as near to float64 as with whole logits; what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import (
    CHUNKS,
    HEADS,
    LOGIT_BYTES,
    STAGES,
    VOCABULARY,
    ChunkedRun,
    SmallModel,
    compiled,
    distance,
    eager_gradients,
    flat,
    in_bfloat16,
    plain,
    run_chunked,
    shifted,
    words,
)
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.layout import lay_out
from takeback.compiler.ownership.meaning import MeaningError
from takeback.compiler.passes import PIPELINE, Draft, Home, PassSettings, Stage, run_passes
from takeback.compiler.passes.chunk_head import chunk_head
from takeback.compiler.program import Phase, Program
from takeback.compiler.run.allocator_code import generate_for_allocator
from takeback.compiler.run.audit import audit

#: A few roundings of float32: where both are that near, which one is nearer is chance.
FLOOR = 3e-7


def largest_bytes(program: Program) -> int:
    """Of the values that the ops make."""
    made = {r.buffer for op in program.ops for r in op.outputs}
    return max(program.buffers[b].size_bytes for b in made if not program.buffers[b].role.borrowed)


def check_gradients(model: nn.Module, loss_fn: Callable[..., Any], batch: tuple[Tensor, ...], run: ChunkedRun) -> None:
    whole, exact = eager_gradients(model, loss_fn, batch), eager_gradients(model, loss_fn, batch, double=True)
    assert run.grads.keys() == exact.keys()
    for name, value in exact.items():
        ours, eagers = distance(run.grads[name], value), distance(whole[name], value)
        assert ours <= 2 * eagers + FLOOR, f"{name}: {ours:.1e}, with whole logits {eagers:.1e}"


@pytest.mark.parametrize("name", HEADS)
def test_head_runs_in_chunks_and_its_gradients_are_as_near_to_float64s(name: str) -> None:
    torch.manual_seed(0)
    model, batch = SmallModel(bias=name in ("plain", "one_hot")), words()
    run = run_chunked(model, HEADS[name], batch)
    assert run.reasons == []
    assert len(run.draft.replaced) == (2 if name == "two_heads" else 1)
    assert largest_bytes(run.draft.program) <= LOGIT_BYTES / 2  # one-hot targets are int64
    assert run.layout.placed.size_bytes < 0.8 * run.whole.placed.size_bytes
    check_gradients(model, HEADS[name], batch, run)
    near = 2e-3 if name == "with_narrow_mean" else 1e-5
    assert abs(run.loss.item() - HEADS[name](model, *batch).item()) < near * abs(run.loss.item())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_heads_of_transformers_run_in_chunks(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        sizes = {"n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, **sizes, **quiet))
    else:
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **sizes, tie_word_embeddings=True))
    x, y = words()

    def loss_fn(m: Any, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = m(input_ids=x, labels=y).loss
        return loss

    run = run_chunked(model, loss_fn, (x, y))
    assert run.reasons == []
    assert len(run.draft.replaced) == 1
    assert largest_bytes(run.draft.program) < x.numel() * 256 * 4 / 2
    assert run.layout.placed.size_bytes < run.whole.placed.size_bytes
    check_gradients(model, loss_fn, (x, y), run)


def test_what_is_asked_of_the_logits_besides_is_computed_chunk_by_chunk() -> None:
    """An accuracy, and a loss for each token: both small, so the logits need not be whole for them."""

    def loss_fn(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        logits, targets = flat(m(x), y)
        each = F.cross_entropy(logits, targets, reduction="none")
        return each.mean(), ((logits.argmax(-1) == targets).float().mean(), each.detach())

    torch.manual_seed(0)
    model, batch = SmallModel(), words()
    run = run_chunked(model, loss_fn, batch)
    assert len(run.draft.replaced) == 1
    torch.testing.assert_close(run.rest, loss_fn(model, *batch)[1])
    check_gradients(model, loss_fn, batch, run)


def test_weight_gradient_of_bfloat16_products_is_added_up_in_float32_and_never_rounded() -> None:
    """autocast casts the gradient to float32 in the end: it is added up there, and the narrow one does not exist."""
    draft = run_chunked(SmallModel(), in_bfloat16, words()).draft
    backward = [op for op in draft.program.ops if op.phase is Phase.BACKWARD]
    adds = [op for op in backward if op.name == "add_.Tensor" and len(op.outputs[0].shape) == 2]
    assert len(adds) == CHUNKS - 1
    assert {op.outputs[0].dtype for op in adds} == {torch.float32}
    grads = {r.buffer for r in draft.program.grads.values()}
    assert adds[0].outputs[0].buffer in grads


def test_code_for_the_devices_own_allocator_passes_its_audit() -> None:
    plan = compiled(SmallModel(bias=True), shifted, words())._plans[0]
    settings = PassSettings(home=Home.ALLOCATOR)
    layout = lay_out(run_passes(plan.original, plan.finished.kept, settings, stages=STAGES))
    code = generate_for_allocator(layout)
    audit(code.lines, code.meant, layout)


# -- refusals ----------------------------------------------------------------------------------------------------------


def logits_returned(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = m(x)
    return F.cross_entropy(*flat(logits, y)), logits


def squared(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return plain(m, x, y) ** 2


def centred(m: Any, x: Tensor, y: Tensor) -> Tensor:
    logits, targets = flat(m(x), y)
    return F.cross_entropy(logits - logits.mean(0), targets)


def dropped(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(*flat(F.dropout(m(x), 0.1), y))


def hardest(m: Any, x: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(*flat(m(x), y), reduction="none")
    return each.topk(10).values.mean()


REFUSED = {
    "logits_returned": (logits_returned, r"bytes of rows are needed as a whole: it is returned \(aux\)"),
    "squared": (squared, "pow.Tensor_Scalar: the backward needs what it makes of the loss"),
    "centred": (centred, "sub.Tensor: it needs what all rows together give"),
    "dropped": (dropped, "the loop needs its random numbers"),
    "hardest": (hardest, "no op that takes rows one by one adds them up"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_rows_at_once_is_refused(name: str) -> None:
    loss_fn, reason = REFUSED[name]
    plan = compiled(SmallModel(), loss_fn, words())._plans[0]
    draft = run_passes(plan.original, plan.finished.kept, stages=STAGES)
    assert not draft.replaced
    [refusal] = [r for r in draft.refusals if r.decision == "chunk_head"]
    assert refusal.size_bytes == LOGIT_BYTES
    assert refusal.site is not None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refusal.reason)


def test_products_inside_of_a_model_and_small_heads_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))
    batch = (torch.randn(40, 8), torch.randint(2, (40,)))
    plan = compiled(model, lambda m, x, y: F.cross_entropy(m(x), y), batch)._plans[0]
    draft = run_passes(plan.original, stages=STAGES)
    assert not draft.replaced
    assert not [r for r in draft.refusals if r.decision == "chunk_head"]


# -- the check of meaning ----------------------------------------------------------------------------------------------


def other_operand(draft: Draft) -> Draft:
    """The first chunk multiplies other rows than were recorded."""
    [replaced] = draft.replaced
    ops = list(replaced.after.ops)
    at = next(i for i in sorted(replaced.new) if ops[i].name == "mm")
    rows = ops[at].args[0]
    other = next(r for op in ops[:at] for r in op.outputs if r.buffer != rows.buffer and r.numel >= rows.numel)
    ops[at] = replace(ops[at], args=(replace(rows, buffer=other.buffer), *ops[at].args[1:]))
    after = replace(replaced.after, ops=tuple(ops))
    return replace(draft, program=after, replaced=(replace(replaced, after=after),))


def other_reader(draft: Draft) -> Draft:
    """What follows the chunks is not what was recorded."""
    [replaced] = draft.replaced
    ops = list(replaced.after.ops)
    at = next(i for i in range(max(replaced.new) + 1, len(ops)) if ops[i].name == "tanh_backward")
    ops[at] = replace(ops[at], args=(ops[at].args[1], ops[at].args[0]))
    after = replace(replaced.after, ops=tuple(ops))
    return replace(draft, program=after, replaced=(replace(replaced, after=after),))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(other_operand, "reads what the replaced ops did not read"), (other_reader, "leaves something")],
)
def test_change_beyond_the_chunks_is_found_by_the_check_of_meaning(
    spoil: Callable[[Draft], Draft], message: str
) -> None:
    program = compiled(SmallModel(), plain, words())._plans[0].original
    stages = [s for s in PIPELINE if s.name in ("functionalize", "move")]
    run_passes(program, stages=[*stages, Stage(chunk_head)])
    with pytest.raises(MeaningError, match=message):
        run_passes(program, stages=[*stages, Stage(chunk_head), Stage(spoil)])


def test_number_of_chunks_follows_from_the_rows() -> None:
    program = compiled(SmallModel(), plain, words())._plans[0].original
    stages = [s for s in PIPELINE if s.name in ("functionalize", "move")]
    for chunks in (2, 7, 1000):
        draft = run_passes(program, stages=[*stages, Stage(chunk_head, lambda s, n=chunks: {"chunks": n})])
        products = [op for op in draft.program.ops if op.name == "mm" and op.outputs[0].shape[1:] == (VOCABULARY,)]
        size = -(-120 // chunks)
        assert len(products) == -(-120 // size)
        assert sum(op.outputs[0].shape[0] for op in products) == 120


class Relabeled(nn.Module):
    """Makes its targets in the step, of as many bytes as a few classes have logits."""

    def __init__(self, *, of_logits: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.of_logits = nn.Linear(6, 6), nn.Linear(6, 11), of_logits

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(self.body(x).tanh())
        targets = logits.detach().argmax(1) if self.of_logits else (y.abs().sum(1) * 9).long() % 11
        return F.cross_entropy(logits, targets.masked_fill(y[:, 1] > 0.8, -100))


@pytest.mark.parametrize("of_logits", [False, True])
@pytest.mark.usefixtures("eagers_kernels")
def test_targets_that_a_step_makes_are_there_when_they_are_weighed(of_logits: bool) -> None:
    """Found by run_fuzz.py: they were made part by part, and counted before the first part."""
    torch.manual_seed(0)
    model, batch = Relabeled(of_logits=of_logits), (torch.randn(24, 6), torch.randn(24, 6))
    step = tb.compile_step(model, lambda m, x, y: m(x, y), torch.optim.SGD(model.parameters(), 0.1), mode="fast")
    expected = model(*batch).detach()
    torch.testing.assert_close(step(*batch), expected)
    expected = model(*batch).detach()
    torch.testing.assert_close(step(*batch), expected)
    assert step._last is not None
    draft = step._last.executor.layout.draft
    refused = [r.reason for r in draft.refusals if r.decision == "chunk_head"]
    assert bool(draft.replaced) is not of_logits
    assert any("targets" in reason for reason in refused) is of_logits, refused

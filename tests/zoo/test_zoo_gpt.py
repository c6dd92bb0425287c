"""The GPT has GPT-2's parameter count and computes what a plain, loop-by-loop reference computes."""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt

import pytest
import torch
from torch import Tensor

from takeback.zoo import GPT, GPTConfig, byte_batches, case
from takeback.zoo.gpt import BENCH, GPT2, SMALL, Attention, loss_fn


def reference_attention(attention: Attention, hidden: Tensor) -> Tensor:
    """Softmax over an explicit lower triangular mask, one row and one head at a time."""
    _, length, width = hidden.shape
    size = width // attention.heads
    future = torch.ones(length, length).triu(1).bool()
    rows = []
    for row in hidden:
        query, key, value = (row @ attention.qkv.weight.T + attention.qkv.bias).chunk(3, dim=1)
        heads = []
        for head in range(attention.heads):
            columns = slice(head * size, (head + 1) * size)
            scores = query[:, columns] @ key[:, columns].T / sqrt(size)
            heads.append(scores.masked_fill(future, -torch.inf).softmax(1) @ value[:, columns])
        rows.append(torch.cat(heads, 1) @ attention.output.weight.T + attention.output.bias)
    return torch.stack(rows)


def reference_norm(norm: torch.nn.LayerNorm, hidden: Tensor) -> Tensor:
    centred = hidden - hidden.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def reference_logits(model: GPT, tokens: Tensor) -> Tensor:
    hidden = model.token.weight[tokens] + model.position.weight[: tokens.shape[1]]
    for block in model.blocks:
        hidden = hidden + reference_attention(block.attention, reference_norm(block.attention_norm, hidden))
        inner = reference_norm(block.mlp_norm, hidden) @ block.mlp[0].weight.T + block.mlp[0].bias
        gelu = 0.5 * inner * (1 + torch.tanh(sqrt(2 / torch.pi) * (inner + 0.044715 * inner**3)))
        hidden = hidden + gelu @ block.mlp[2].weight.T + block.mlp[2].bias
    return reference_norm(model.norm, hidden) @ model.head.weight.T


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (GPT2, 124_439_808),
        (replace(GPT2, tied=False), 124_439_808 + 50257 * 768),
        (BENCH, 10_342_656),
    ],
)
def test_parameter_count_is_the_published_one(config: GPTConfig, count: int) -> None:
    with torch.device("meta"):
        model = GPT(config)
    assert sum(p.numel() for p in model.parameters()) == count


def enlarged(config: GPTConfig) -> GPT:
    """Weights large enough that a wrong mask, scale or norm changes the result by far more than rounding."""
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_attention_matches_explicit_masked_softmax() -> None:
    attention = enlarged(SMALL).blocks[0].attention
    hidden = torch.randn(3, 17, SMALL.width)
    torch.testing.assert_close(attention(hidden), reference_attention(attention, hidden), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_loss_match_the_plain_reference(tied: bool) -> None:
    model = enlarged(replace(SMALL, tied=tied))
    tokens, targets = next(byte_batches(2, 24, seed=0))
    logits = reference_logits(model, tokens)
    torch.testing.assert_close(model(tokens), logits, atol=1e-5, rtol=1e-5)
    picked = logits.log_softmax(2).gather(2, targets[:, :, None])
    torch.testing.assert_close(loss_fn(model, tokens, targets), -picked.mean(), atol=1e-5, rtol=0)


def test_no_logit_depends_on_a_later_token() -> None:
    model = enlarged(SMALL)
    tokens = torch.randint(256, (1, 20))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 256
    difference = (model(tokens) - model(changed)).abs().amax(2)[0]
    assert difference[:12].max() < 1e-5
    assert difference[12:].min() > 1e-3


def test_tied_head_is_the_token_embedding() -> None:
    tied, untied = GPT(SMALL), GPT(replace(SMALL, tied=False))
    assert tied.head.weight is tied.token.weight
    assert untied.head.weight is not untied.token.weight


def test_dropout_acts_in_training_only() -> None:
    model = GPT(replace(SMALL, dropout=0.5))
    tokens = torch.randint(256, (1, 16))
    assert not torch.equal(model(tokens), model(tokens))
    attention, hidden = model.blocks[0].attention, torch.randn(1, 9, 64)
    assert not torch.equal(attention(hidden), attention(hidden))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"width=64 is not a multiple of heads=5"):
        replace(SMALL, heads=5)
    with pytest.raises(ValueError, match=r"got 65 tokens per row, but the context is 64"):
        GPT(SMALL)(torch.zeros(1, 65, dtype=torch.long))


def test_small_gpt_learns_the_text() -> None:
    built = case("gpt")
    losses = []
    for _, batch in zip(range(30), byte_batches(8, 64, seed=1), strict=False):
        built.optimizer.zero_grad()
        loss = built.loss_fn(built.model, *batch)
        loss.backward()
        built.optimizer.step()
        losses.append(float(loss.detach()))
    assert abs(losses[0] - log(256)) < 0.2
    assert sum(losses[-5:]) / 5 < log(256) - 1.5

"""The attention context is its formulas, loop by loop; it costs nothing at strength 0 and stays finite."""

from __future__ import annotations

import copy
from dataclasses import replace
from math import isfinite, sqrt, tanh
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from takeback.zoo import GPT, AttentionContext, byte_batches
from takeback.zoo.attention_context import sampled_rows
from takeback.zoo.gpt import SMALL, loss_fn

TINY = replace(SMALL, width=16, layers=3, context_strength=0.7, context_rate=0.3)


def naive_update(context: list[list[float]], x_in: Tensor, x_out: Tensor, rate: float) -> list[list[float]]:
    """One entry at a time, in Python's own numbers."""
    first, second = (x.reshape(-1, x.shape[-1]).tolist() for x in (x_in, x_out))
    step = -(-len(first) // 32)
    first, second = first[::step], second[::step]
    assert len(first) <= 32
    rows, width = len(first), len(first[0])

    def centred(table: list[list[float]], column: int) -> list[float]:
        values = [row[column] for row in table]
        return [v - sum(values) / rows for v in values]

    after = []
    for i in range(width):
        line = []
        for j in range(width):
            a, b = centred(first, i), centred(second, j)
            below = sqrt(sum(v * v for v in a)) * sqrt(sum(v * v for v in b))
            value = sum(v * w for v, w in zip(a, b, strict=True)) / below if below else 0.0
            line.append((1 - rate) * context[i][j] + rate * tanh(value if isfinite(value) else 0.0))
        after.append(line)
    return after


@pytest.mark.parametrize("rows", [1, 2, 20, 32, 33, 100, 1024])
def test_context_matches_the_formula_entry_by_entry(rows: int) -> None:
    torch.manual_seed(rows)
    module = AttentionContext(1.0, rate=0.3).double()
    context = torch.randn(5, 5, dtype=torch.float64)
    x_in, noise = torch.randn(2, rows, 5, dtype=torch.float64)
    x_out = 0.5 * x_in + noise
    expected = torch.tensor(naive_update(context.tolist(), x_in, x_out, 0.3), dtype=torch.float64)
    torch.testing.assert_close(module.updated(context, x_in, x_out), expected, atol=1e-12, rtol=0)
    single = module.float().updated(context.float(), x_in.float(), x_out.float())
    torch.testing.assert_close(single.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("shape", "rows"), [((20, 3), 20), ((32, 3), 32), ((33, 3), 17), ((4, 256, 3), 32), ((2, 50, 3), 25)]
)
def test_at_most_32_rows_are_sampled_evenly_and_without_a_copy(shape: tuple[int, ...], rows: int) -> None:
    x = torch.randn(shape)
    sampled = sampled_rows(x)
    assert sampled.shape == (rows, 3)
    assert sampled.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert sampled.stride(0) * (rows - 1) >= x.numel() - 3 - sampled.stride(0), "the end of the batch is not sampled"


@pytest.mark.parametrize("constant", [0.0, 0.5, 0.1, -1234.567])
def test_constant_columns_have_no_correlation_though_their_mean_is_rounded(constant: float) -> None:
    x_in, x_out = torch.randn(2, 40, 4)
    x_in[:, 1], x_out[:, 2] = constant, constant / 3
    module = AttentionContext(1.0, rate=0.5)
    after = module.updated(torch.ones(4, 4), x_in, x_out)
    assert torch.equal(after[1], torch.full((4,), 0.5))
    assert torch.equal(after[:, 2], torch.full((4,), 0.5))
    assert (after[[0, 0, 0], [0, 1, 3]] != 0.5).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_value_that_is_not_finite_reaches_its_own_column_alone_and_as_nothing(bad: float) -> None:
    torch.manual_seed(0)
    x_in, x_out = torch.randn(2, 40, 4)
    module = AttentionContext(1.0, rate=0.5)
    usual = module.updated(torch.zeros(4, 4), x_in, x_out)
    x_in[6, 1], x_out[8, 2] = bad, bad  # rows that are sampled: every second one is
    after = module.updated(torch.zeros(4, 4), x_in, x_out)
    assert torch.equal(after[1], torch.zeros(4))
    assert torch.equal(after[:, 2], torch.zeros(4))
    others = torch.tensor([0, 2, 3])[:, None], torch.tensor([0, 1, 3])
    assert torch.equal(after[others], usual[others])


def test_model_that_blows_up_leaves_a_finite_context() -> None:
    model = GPT(TINY)
    tokens = torch.randint(256, (2, 20))
    model(tokens)
    with torch.no_grad():
        model.blocks[1].mlp[2].bias.fill_(torch.nan)
    assert model(tokens).isnan().all()
    assert model.attention_context.context.isfinite().all()


def naive_blocks(model: GPT, hidden: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
    """The layers, with the formulas between them written out."""
    module = model.attention_context
    for index, block in enumerate(model.blocks):
        if index:
            hidden = hidden + module.strength / 16 * torch.einsum("bld,de->ble", hidden, context)
        out = block(hidden)
        after = naive_update(context.tolist(), hidden.detach(), out.detach(), module.rate)
        context = torch.tensor(after, dtype=torch.float64)
        hidden = out
    return hidden, context


def test_layers_with_context_match_the_formulas_over_two_forwards_with_gradients() -> None:
    torch.manual_seed(0)
    model = GPT(TINY).double()
    twin = copy.deepcopy(model)
    context = torch.zeros(16, 16, dtype=torch.float64)
    for seed in range(2):
        x = torch.randn(2, 30, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        y = x.detach().clone().requires_grad_()
        model.zero_grad()
        twin.zero_grad()
        found = model.attention_context(model.blocks, x)
        expected, context = naive_blocks(twin, y, context)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
        torch.testing.assert_close(model.attention_context.context, context, atol=1e-10, rtol=0)
        found.sin().sum().backward()
        expected.sin().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, atol=1e-9, rtol=0)
        strengths = (m.attention_context.strength.grad for m in (model, twin))
        torch.testing.assert_close(*strengths, atol=1e-9, rtol=0)
        assert model.attention_context.strength.grad.abs() > 1e-6
        for name, p in twin.blocks.named_parameters():
            torch.testing.assert_close(model.blocks.get_parameter(name).grad, p.grad, atol=1e-9, rtol=0)
    assert not model.attention_context.context.requires_grad


class Ops(TorchDispatchMode):
    """The names of all ops, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def ops_of(loss: Any) -> list[str]:
    with Ops() as ops:
        loss().backward()
    return ops.names


def test_strength_zero_is_free() -> None:
    """The plain GPT's parameters, ops and bits."""
    tokens, targets = next(byte_batches(2, 24, seed=0))
    torch.manual_seed(0)
    without = GPT(replace(TINY, context_strength=0.0))
    torch.manual_seed(0)
    plain = GPT(replace(TINY, context_strength=0.0))
    plain.attention_context.forward = lambda layers, x: nn.Sequential.forward(layers, x)  # the GPT without any context
    assert ops_of(lambda: loss_fn(without, tokens, targets)) == ops_of(lambda: loss_fn(plain, tokens, targets))
    for a, b in zip(without.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert not [name for name in without.state_dict() if "context" in name]
    assert len(ops_of(lambda: loss_fn(GPT(TINY), tokens, targets))) > len(
        ops_of(lambda: loss_fn(plain, tokens, targets))
    )


def test_strength_that_has_become_zero_gives_the_plain_output() -> None:
    model = GPT(TINY)
    tokens = torch.randint(256, (2, 20))
    model(tokens)
    plain = GPT(replace(TINY, context_strength=0.0))
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "attention_context" not in k})
    assert not torch.equal(model(tokens), plain(tokens))
    with torch.no_grad():
        model.attention_context.strength.zero_()
    assert torch.equal(model(tokens), plain(tokens))


def test_context_is_allocated_at_the_first_forward_and_reused_while_its_shape_holds() -> None:
    module = AttentionContext(1.0)
    assert module.context is None
    layers = [nn.Identity(), nn.Tanh()]
    module(layers, torch.randn(3, 10, 4))
    first = module.context
    before = first.clone()
    module(layers, torch.randn(5, 7, 4))  # another batch, the same width
    assert module.context is first
    assert not torch.equal(first, before)
    module(layers, torch.randn(3, 10, 6))
    assert module.context.shape == (6, 6)
    fresh = AttentionContext(1.0)
    x = torch.randn(3, 10, 6)
    assert torch.equal(AttentionContext(1.0)(layers, x), fresh(layers, x))


def test_evaluation_reads_the_context_and_does_not_write_it() -> None:
    model = GPT(TINY)
    model(torch.randint(256, (2, 20)))
    model.eval()
    before = model.attention_context.context.clone()
    tokens = torch.randint(256, (1, 20))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 256
    difference = (model(tokens) - model(changed)).abs().amax(2)[0]
    assert torch.equal(model.attention_context.context, before)
    assert difference[:12].max() == 0, "a later token reached an earlier one"
    assert difference[12:].max() > 0
    plain = GPT(replace(TINY, context_strength=0.0)).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "attention_context" not in k})
    assert not torch.equal(model(tokens), plain(tokens)), "the context is not read"


def test_context_is_saved_and_loaded_into_a_model_that_has_none_yet() -> None:
    model, other = GPT(TINY), GPT(TINY)
    model(torch.randint(256, (2, 20)))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.attention_context.context, model.attention_context.context)
    assert other.attention_context.context is not model.attention_context.context
    tokens = torch.randint(256, (1, 20))
    assert torch.equal(model.eval()(tokens), other.eval()(tokens))


def test_rate_outside_of_its_range_is_refused() -> None:
    for rate in (0.0, -0.1, 1.5):
        with pytest.raises(ValueError, match=rf"must be in \(0, 1\], got rate={rate}"):
            AttentionContext(1.0, rate)

"""Cases that a reader of the code found: each was wrong once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from takeback.nn import InPlaceABN, InPlaceLayerNorm, inplace_abn
from takeback.zoo.attention_context import AttentionContext


def test_a_bias_without_a_weight_can_drown_the_output_too() -> None:
    torch.manual_seed(0)
    bias = torch.full((4,), 1e4)
    x, dy = torch.randn(64, 4).bfloat16(), torch.randn(64, 4).bfloat16()
    leaf = x.clone().requires_grad_()
    inplace_abn(leaf * 1, None, bias, None, None).clone().backward(dy)
    exact = x.double().requires_grad_()
    F.leaky_relu(F.batch_norm(exact, None, None, None, bias.double(), training=True), 0.01).backward(dy.double())
    assert leaf.grad is not None
    assert exact.grad is not None
    assert float((leaf.grad.double() - exact.grad).norm() / exact.grad.norm()) < 2**-6


def test_the_output_of_an_lstm_is_not_overwritten_for_the_lstm_reads_it() -> None:
    lstm, norm = nn.LSTM(4, 4), InPlaceABN(4)
    out, _ = lstm(torch.randn(5, 4, 4, requires_grad=True))
    norm(out).sum().backward()
    assert any("may have saved it" in reason for reason in norm.copies)
    assert lstm.weight_ih_l0.grad is not None


def test_a_norm_whose_input_needs_no_gradient_counts_no_copy() -> None:
    norm = InPlaceLayerNorm(8)
    y = norm(torch.randn(3, 8))
    y.sum().backward()
    assert norm.copies == {}
    assert norm.weight.grad is not None


def test_a_replica_of_data_parallel_watches_its_own_weights() -> None:
    for norm in (InPlaceABN(4), InPlaceLayerNorm(4)):
        assert norm._replicate_for_data_parallel()._weights is not norm._weights


def test_a_context_saved_before_its_first_use_loads_into_one_that_was_used() -> None:
    fresh, used = AttentionContext(1), AttentionContext(0.5)
    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    used(layers, torch.randn(2, 3, 6))
    used.load_state_dict(fresh.state_dict())
    assert used.context is None
    assert torch.equal(used(layers, torch.ones(2, 3, 6)), AttentionContext(1)(layers, torch.ones(2, 3, 6)))

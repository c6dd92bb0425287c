"""The MLP has the widths, activation and dropout it was asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from takeback.zoo import MLP
from takeback.zoo.mlp import loss_fn


def test_layers_follow_the_widths_with_nothing_after_the_last() -> None:
    model = MLP((5, 7, 6, 3), activation=nn.Tanh, dropout=0.2)
    kinds = [type(layer) for layer in model.layers]
    assert kinds == [nn.Linear, nn.Tanh, nn.Dropout, nn.Linear, nn.Tanh, nn.Dropout, nn.Linear]
    assert sum(p.numel() for p in model.parameters()) == (5 * 7 + 7) + (7 * 6 + 6) + (6 * 3 + 3)
    assert model(torch.zeros(4, 5)).shape == (4, 3)


def test_no_dropout_layer_without_dropout() -> None:
    assert not any(isinstance(layer, nn.Dropout) for layer in MLP((5, 7, 3)).modules())


def test_output_matches_the_plain_formula() -> None:
    model = MLP((5, 7, 3))
    first, last = model.layers[0], model.layers[2]
    features, labels = torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    logits = (features @ first.weight.T + first.bias).clamp(min=0) @ last.weight.T + last.bias
    torch.testing.assert_close(model(features), logits)
    picked = logits.log_softmax(1)[torch.arange(4), labels]
    torch.testing.assert_close(loss_fn(model, features, labels), -picked.mean())


def test_one_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"input and an output width, got widths=\(5,\)"):
        MLP((5,))

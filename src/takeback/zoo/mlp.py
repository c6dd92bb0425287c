"""A multilayer perceptron of any widths, activation and dropout: rows of features in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers of the given widths, with activation and dropout between them and none after the last."""

    def __init__(
        self,
        widths: Sequence[int],
        *,
        activation: Callable[[], nn.Module] = nn.ReLU,
        dropout: float = 0.0,
    ) -> None:
        if len(widths) < 2:
            raise ValueError(f"an MLP needs an input and an output width, got widths={tuple(widths)}")
        super().__init__()
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            if layers:
                layers.append(activation())
            if layers and dropout > 0:
                layers.append(nn.Dropout(dropout))
            layers.append(nn.Linear(width_in, width_out))
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


def loss_fn(model: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the model's logits against class labels."""
    return F.cross_entropy(model(features), labels)

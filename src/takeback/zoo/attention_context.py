"""The attention context (after RustGPT): what one layer did to the features, handed to the next layer as a matrix.

With width D, rows of a layer's input `x_in` and of its output `x_out`:

    context <- (1 - rate) * context + rate * tanh(corr(x_in, x_out))     D x D, without a gradient
    x       <- x + (strength / D) * (x @ context)                        before the next layer, with one

The context runs through the layers of one forward and on into the next forward, through a buffer that is made when it
is first needed. A value that is not finite counts as no correlation: it never reaches the context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

MOST_ROWS = 32


def sampled_rows(x: Tensor) -> Tensor:
    """At most `MOST_ROWS` rows of x, evenly spaced over all but the last dimension: [rows, width], without copying."""
    flat = x.reshape(-1, x.shape[-1])
    return flat[:: -(-flat.shape[0] // MOST_ROWS)]


def correlation(x_in: Tensor, x_out: Tensor) -> Tensor:
    """The correlation of every column of x_in with every column of x_out: 0 where it has no finite value."""
    (first, above), (second, below) = _centred(x_in), _centred(x_out)
    return (first.T @ second / torch.outer(above, below)).nan_to_num(0.0, 0.0, 0.0)


def _centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """The columns less their means, and their norms: 0 where there is nothing but the rounding of the mean."""
    centred = x - x.mean(0)
    norms = centred.norm(dim=0)
    rounding = 8 * torch.finfo(x.dtype).eps * x.norm(dim=0)
    return centred, norms.masked_fill_(norms <= rounding, 0.0)


class AttentionContext(nn.Module):
    """Runs layers with the context between them. With `strength=0` it runs the layers, and that is all.

    In training every layer updates the context, from rows of the whole batch: a later token may reach an earlier one
    that way. In evaluation the context is read and not written, so a causal model stays causal.
    """

    context: Tensor | None

    def __init__(self, strength: float, rate: float = 0.1) -> None:
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"rate is a part of the context that is replaced: it must be in (0, 1], got {rate=}")
        super().__init__()
        self.rate = rate
        self.strength = nn.Parameter(torch.tensor(float(strength))) if strength else None
        self.register_buffer("context", None)

    def forward(self, layers: Iterable[nn.Module], x: Tensor) -> Tensor:
        if self.strength is None:
            for layer in layers:
                x = layer(x)
            return x
        kept = self._kept_for_(x)
        context = kept
        for index, layer in enumerate(layers):
            x_in = self.applied(context, x) if index else x
            x = layer(x_in)
            if self.training:
                context = self.updated(context, x_in, x)
        if self.training:
            kept.copy_(context)  # at the end alone: a layer's backward reads the context that it was given
        return x

    def applied(self, context: Tensor, x: Tensor) -> Tensor:
        """x with the context added, for the next layer: gradients for x and for the strength."""
        assert self.strength is not None
        return x + (self.strength / x.shape[-1]) * (x @ context)

    def updated(self, context: Tensor, x_in: Tensor, x_out: Tensor) -> Tensor:
        """The context after a layer that made x_out of x_in, without a gradient."""
        rows = (sampled_rows(x.detach()).to(context.dtype) for x in (x_in, x_out))
        return context.lerp(correlation(*rows).tanh_(), self.rate)

    def _kept_for_(self, x: Tensor) -> Tensor:
        """The buffer: made at its first use, and made anew if x has another width."""
        assert self.strength is not None
        width = x.shape[-1]
        if self.context is None or self.context.shape[0] != width:
            self.context = torch.zeros(width, width, dtype=self.strength.dtype, device=self.strength.device)
        return self.context

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "context")
        if saved is None:
            self.context = None  # saved before its first use
        elif self.strength is not None:
            self.context = torch.zeros_like(saved, dtype=self.strength.dtype, device=self.strength.device)
        super()._load_from_state_dict(state_dict, prefix, *args)

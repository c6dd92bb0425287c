"""Texts of many lengths in one row, under torch's attention for these, `varlen_attn`; and a kernel of it for the CPU,
which torch does not have: the loop over texts, written down in products and a softmax."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

varlen = pytest.importorskip("torch.nn.attention.varlen")

LENGTHS = ((5, 7, 4), (8, 4, 4), (4, 7, 5), (8, 2, 6))
LONGEST = 8
CAUSAL: dict[str, Any] = (
    {"window_size": (-1, 0)}
    if "window_size" in inspect.signature(varlen.varlen_attn).parameters
    else {"is_causal": True}
)


def _weights(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = torch.einsum("ahd,bhd->hab", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1)


def _texts(ends: Tensor, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    bounds = ends.tolist()
    for begin, end in itertools.pairwise(bounds):
        yield tuple(each[begin:end] for each in rows)


def _forward(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """aten::_flash_attention_forward. args: the keys' ends, the longest of both, dropout, whether it is causal, ..."""
    out = torch.cat([torch.einsum("hab,bhd->ahd", _weights(q, k, args[4]), v) for q, k, v in _texts(ends, q, k, v)])
    logsumexp = torch.zeros(q.shape[1], q.shape[0])
    return out, logsumexp, torch.zeros(2, dtype=torch.uint64), torch.zeros(0, dtype=torch.uint64), torch.zeros(0)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    ends: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    parts = []
    for g, q1, k1, v1 in _texts(ends, grad, q, k, v):
        weights, of_weights = _weights(q1, k1, args[4]), torch.einsum("ahd,bhd->hab", g, v1)
        scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        of_q, of_k = torch.einsum("hab,bhd->ahd", scores, k1), torch.einsum("hab,ahd->bhd", scores, q1)
        parts.append((of_q, of_k, torch.einsum("hab,ahd->bhd", weights, g)))
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


@contextlib.contextmanager
def kernels_for_the_cpu() -> Iterator[None]:
    """Under varlen_attn's operator, which stays torch's own."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    yield
    del library  # and its kernels


class Reader(nn.Module):
    """One layer of attention over a row of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(16, 50)

    def forward(self, tokens: Tensor, places: Tensor, ends: Tensor, longest: int) -> Tensor:
        x = self.embed(tokens)
        x = x + places[:, None].float().sin().to(x.dtype)
        q, k, v = (each.unflatten(-1, (2, 8)) for each in self.qkv(x).chunk(3, -1))
        result: Tensor = self.out(varlen.varlen_attn(q, k, v, ends, ends, longest, longest, **CAUSAL).flatten(1))
        return result


def loss_of(model: nn.Module, tokens: Tensor, *where: Any) -> Tensor:
    return F.cross_entropy(model(tokens, *where)[:-1].float(), tokens[1:])


def row(i: int, lengths: tuple[tuple[int, ...], ...] = LENGTHS, longest: int | None = None) -> tuple[Any, ...]:
    """Tokens, places, cumulative lengths, and the length of the longest text or a bound for all."""
    g = torch.Generator().manual_seed(i)
    each = lengths[i % len(lengths)]
    places = torch.cat([torch.arange(n) for n in each])
    ends = torch.tensor((0, *each)).cumsum(0).int()
    return torch.randint(50, (sum(each),), generator=g), places, ends, longest or max(each)

"""A step that decides by a value goes another way than the plan that is tried first: what eager, which runs beside a
plan's first replays to be compared, has written on that way is put back, whatever the plan itself writes.

Found by models of transformers that skip layers at random: running statistics were counted twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from harness import eager_step, same, state_of

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search", "eagers_kernels", "whole_head"),
    pytest.mark.filterwarnings("ignore"),
]


class Normed(nn.Module):
    """A layer with running statistics that is left out now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
        self.extra = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: Tensor, way: Tensor) -> Tensor:
        h = self.first(x)
        if way.item() > 0:
            h = h + self.extra(h)
        return self.last(h)


class Dropped(Normed):
    """Random numbers on one of the ways only."""

    def forward(self, x: Tensor, way: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(F.dropout(h, 0.5) if way.item() > 0 else h)


class Counting(Normed):
    """A plain attribute is written."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(6)

    def forward(self, x: Tensor, way: Tensor) -> Tensor:
        h = self.first(x)
        if way.item() > 0:
            with torch.no_grad():
                self.seen += h.mean(0)
            h = h - self.seen
        return self.last(h)


class Renormed(Normed):
    """A lookup that shortens its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 6, max_norm=0.1)

    def forward(self, x: Tensor, way: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + self.words(x.argmax(1) % 4) if way.item() > 0 else h)


def entropy(model: Any, x: Tensor, way: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x, way), y)


@pytest.mark.parametrize("kind", [Normed, Dropped, Counting, Renormed])
@pytest.mark.parametrize("settings", [{}, {"mode": "fast"}, {"verify_every": 1}, {"memory": "min", "poison": True}])
def test_what_eager_writes_on_another_way_is_put_back(kind: Callable[[], nn.Module], settings: dict[str, Any]) -> None:
    """The first plan knows the one way, and is tried on a batch that goes the other, and so on in turns."""
    torch.manual_seed(0)
    ours = kind()
    theirs = copy.deepcopy(ours)
    optimizer, twin = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    step = tb.compile_step(ours, entropy, optimizer, **settings)
    g = torch.Generator().manual_seed(0)
    for i, way in enumerate((0, 1, 1, 0, 0, 1, 0, 1)):
        batch = torch.randn(8, 6, generator=g), torch.tensor(way), torch.randint(4, (8,), generator=g)
        torch.manual_seed(i)
        expected = eager_step(theirs, entropy, twin, batch)
        torch.manual_seed(i)
        loss = step(*batch)
        assert same(loss, expected), f"the loss of step {i}"
        now, right = state_of(ours, optimizer), state_of(theirs, twin)
        assert [name for name in right if not same(now[name], right[name])] == [], f"after step {i}"
        if isinstance(ours, Counting) and isinstance(theirs, Counting):
            assert same(ours.seen, theirs.seen), f"after step {i}"
    assert step._replays > 3


@pytest.mark.parametrize("kind", [Normed, Dropped])
def test_the_same_of_microbatches(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    ours = kind()
    theirs = copy.deepcopy(ours)
    optimizer, twin = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    step = tb.compile_step(ours, entropy, optimizer)
    g = torch.Generator().manual_seed(0)
    for i, way in enumerate((0, 1, 1, 0, 0, 1, 0, 1)):
        batch = torch.randn(8, 6, generator=g), torch.tensor(way), torch.randint(4, (8,), generator=g)
        torch.manual_seed(i)
        entropy(theirs, *batch).backward()
        torch.manual_seed(i)
        step(*batch, update=i % 2 == 1)
        if i % 2:
            twin.step()
            twin.zero_grad()
        now, right = state_of(ours, optimizer), state_of(theirs, twin)
        assert [name for name in right if not same(now[name], right[name])] == [], f"after step {i}"

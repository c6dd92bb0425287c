"""Random graphs with a saboteur: the guard raises exactly where a gradient, or a tensor still held, would be wrong.

The truth is found without the guard: the same program is run with and without the sabotage.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from overwriters import by_pointer

import takeback as tb
from takeback.guard import graph as guard_graph
from takeback.guard.judge import Judge
from takeback.guard.readers import Readers

UNARY = ("sin", "exp", "view", "neg", "sine", "sabotage gradient", "sabotage saved", "checkpointed")
BINARY = ("add", "mul", "sub")


@dataclass(frozen=True)
class Program:
    """Ops on earlier values; the loss is a sum over the values that no op reads, so that every node runs."""

    ops: tuple[tuple[str, int, int], ...]
    kept: frozenset[int]  #: values that the user holds on to
    backwards: int


class Sine(torch.autograd.Function):
    """y = sin(x); the backward then overwrites what `what` says."""

    armed = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, what: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.what = what
        return x.sin()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        dx = dy * x.cos()
        if Sine.armed and ctx.what == "sabotage gradient":
            by_pointer(dy)
        elif Sine.armed and ctx.what == "sabotage saved":
            by_pointer(x)
        return dx, None


def apply(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if op == "sub":
        return a - 0.5 * b  # never zero, which would hide what is wrong
    if op in BINARY:
        return getattr(torch, op)(a, b)  # type: ignore[no-any-return]
    if op == "exp":
        return (a * 0.1).exp()
    if op == "view":
        return a.view(3, 2).view(2, 3)
    if op in ("sin", "neg"):
        return getattr(a, op)()  # type: ignore[no-any-return]
    if op == "checkpointed":
        return torch.utils.checkpoint.checkpoint(lambda t: t.sin().exp(), a, use_reentrant=False)  # type: ignore[no-any-return]
    return Sine.apply(a, op)  # type: ignore[no-any-return]


def run(program: Program, armed: bool) -> list[torch.Tensor]:
    """Gradients of the leaves and the values that are held, after all backwards."""
    Sine.armed = armed
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(2, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
    values = list(leaves)
    unread: dict[int, None] = {}
    for op, i, j in program.ops:
        i, j = i % len(values), j % len(values)
        unread.pop(i, None)
        if op in BINARY:
            unread.pop(j, None)
        unread[len(values)] = None
        values.append(apply(op, values[i], values[j]))
    weights = torch.randn(len(values), generator=generator, dtype=torch.float64).tolist()
    loss = sum(((values[i] * weights[i]).square().mean() for i in unread), torch.zeros(()))
    kept = [v for i, v in enumerate(values) if i in program.kept]
    del values
    for i in range(program.backwards):
        loss.backward(retain_graph=i + 1 < program.backwards)
    return [*(x.grad for x in leaves if x.grad is not None), *leaves, *(v.detach() for v in kept)]


programs = st.builds(
    Program,
    st.lists(
        st.tuples(st.sampled_from(UNARY + BINARY), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7
    ).map(tuple),
    st.frozensets(st.integers(2, 8), max_size=2),
    st.sampled_from([1, 1, 2]),
)


def verdict(program: Program) -> tuple[bool, bool]:
    """(something is wrong, the guard says so)."""
    clean, ruined = run(program, False), run(program, True)
    wrong = any(not torch.equal(a, b) for a, b in zip(clean, ruined, strict=True))
    with tb.guard(on_error="collect") as g:
        run(program, True)
    assert not [reason for reason in g.skipped if "cannot be read" in reason]
    return wrong, bool(g.errors)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs)
def test_the_guard_raises_exactly_where_something_would_be_wrong(program: Program) -> None:
    wrong, said = verdict(program)
    assert wrong == said


EXAMPLES = [
    Program((("sin", 0, 0), ("sabotage saved", 0, 0)), frozenset(), 1),
    Program((("exp", 0, 0), ("sabotage saved", 2, 0)), frozenset(), 1),
    Program((("neg", 0, 0), ("sin", 2, 0), ("sabotage gradient", 2, 0), ("add", 3, 4)), frozenset(), 1),
    Program((("neg", 0, 0), ("sabotage saved", 2, 0)), frozenset({2}), 1),
    Program((("neg", 0, 0), ("sabotage saved", 2, 0)), frozenset(), 2),
]


@pytest.mark.parametrize("blind", ["saved", "pending", "held", "kept graph", None])
def test_a_guard_that_is_blind_to_one_kind_of_reader_is_found_out(
    blind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of reader is needed: without it, an example above goes unnoticed."""
    if blind == "saved":
        monkeypatch.setattr(guard_graph.Graph, "_saved", lambda self, node: iter(()))
    elif blind == "pending":
        monkeypatch.setattr(Readers, "ran", lambda self, known, results: setattr(known, "ran", True))
    elif blind == "held":
        monkeypatch.setattr(sys.modules[Judge.__module__], "holders_of", lambda tensors, ignored: {})
    elif blind == "kept graph":
        monkeypatch.setattr(Readers, "reads", lambda self, reader, writer: reader is not writer and not reader.ran)
    verdicts = [verdict(program) for program in EXAMPLES]
    assert all(wrong for wrong, _ in verdicts)
    assert all(said for _, said in verdicts) == (blind is None)

"""Choice as data, and `apply`: what is chosen is run again just there, later readers read it, nothing else changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from drawn_programs import Writer, chosen, draft_of, recorded, rows_of
from torch import nn

from takeback.compiler.layout import lay_out
from takeback.compiler.passes import Draft
from takeback.compiler.passes.choice import apply, fixed_buffers
from takeback.compiler.passes.draft import Choice, Rebuild
from takeback.compiler.passes.overwrite import overwrite
from takeback.compiler.program import Phase

aten = torch.ops.aten


def test_rebuilds_are_sorted_by_where_then_by_what() -> None:
    assert sorted([Rebuild(9, 2), Rebuild(3, 7), Rebuild(9, 1), Rebuild(3, 0)]) == [
        Rebuild(3, 0),
        Rebuild(3, 7),
        Rebuild(9, 1),
        Rebuild(9, 2),
    ]


def test_choices_are_frozen_and_equal_choices_are_one_key() -> None:
    one, other = Choice((Rebuild(3, 1),)), Choice((Rebuild(3, 1),))
    assert one == other
    assert len({one, other, Choice()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.rebuilds = ()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.rebuilds[0].op = 2  # type: ignore[misc]
    assert Choice().rebuilds == ()


def test_choice_of_an_answer_is_sorted_and_without_doubles() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))))
    rows = rows_of(draft_of(recorded(model, lambda m, x: m(x).square().mean(), torch.randn(64, 16))))
    everything = chosen(rows, frozenset(range(rows.unknowns)))
    assert len(everything.rebuilds) > 5
    assert everything.rebuilds == tuple(sorted(set(everything.rebuilds)))
    assert chosen(rows, frozenset()) == Choice()
    assert all(r.op < r.before for r in everything.rebuilds)


def example() -> tuple[Draft, list[int]]:
    """%1 = mm, %2 = sin(%1), then a backward that reads %2 and then %2 and %1."""
    w = Writer()
    v = w.op(aten.mm.default, w.batch, w.batch, elements=64)
    u = w.op(aten.sin.default, v)
    h = w.op(aten.mm.default, u, u, elements=8)
    grad = w.op(aten.mm.default, h, u, elements=8, phase=Phase.BACKWARD)
    grad = w.op(aten.mm.default, grad, u, v, elements=8, phase=Phase.BACKWARD)
    return Draft(w.program(grad)), [v.buffer, u.buffer]


def test_nothing_chosen_changes_nothing() -> None:
    draft, _ = example()
    assert apply(draft, Choice()) == draft


def test_later_readers_read_the_newest_copy_and_earlier_ones_the_first() -> None:
    draft, (v, u) = example()
    changed = apply(draft, Choice((Rebuild(3, 1), Rebuild(4, 1))))
    ops = changed.program.ops
    assert [op.name for op in ops] == ["mm", "sin", "mm", "sin", "mm", "sin", "mm"]
    first, second = ops[3].outputs[0].buffer, ops[5].outputs[0].buffer
    assert len({u, first, second}) == 3
    assert [r.buffer for r in ops[2].inputs] == [u, u]
    assert ops[4].inputs[1].buffer == first
    assert [r.buffer for r in ops[6].inputs[1:]] == [second, v]
    assert changed.rebuilt == {first, second}
    assert draft.program.ops == example()[0].program.ops, "the given draft was changed"
    lay_out(overwrite(changed))


def test_chain_is_rebuilt_in_the_order_of_the_program_and_reads_its_own_copies() -> None:
    draft, (v, u) = example()
    ops = apply(draft, Choice((Rebuild(4, 1), Rebuild(4, 0)))).program.ops
    assert [op.name for op in ops] == ["mm", "sin", "mm", "mm", "mm", "sin", "mm"]
    made, again = ops[4].outputs[0].buffer, ops[5].outputs[0].buffer
    assert ops[5].inputs[0].buffer == made != v
    assert [r.buffer for r in ops[6].inputs[1:]] == [again, made]
    assert again != u


def test_what_the_caller_gets_is_never_replaced_by_a_copy() -> None:
    draft, (v, u) = example()
    returned = dataclasses.replace(draft.program, aux=(draft.program.ops[1].outputs[0],))
    draft = dataclasses.replace(draft, program=returned)
    assert {u, draft.program.loss.buffer} <= fixed_buffers(draft)
    changed = apply(draft, Choice((Rebuild(4, 1),)))
    assert changed.program.aux[0].buffer == u
    assert [r.buffer for r in changed.program.ops[-1].inputs[1:]] == [u, v]
    assert v not in fixed_buffers(draft)


def test_kept_gradients_and_written_buffers_are_fixed() -> None:
    draft, (v, u) = example()
    assert v in fixed_buffers(dataclasses.replace(draft, kept=frozenset({v})))
    writes = dataclasses.replace(draft.program.ops[1], target=aten.sin_.default, mutates=(u,))
    spoiled = dataclasses.replace(draft.program, ops=(draft.program.ops[0], writes, *draft.program.ops[2:]))
    assert u in fixed_buffers(dataclasses.replace(draft, program=spoiled))
    graded = dataclasses.replace(draft.program, grads={0: draft.program.ops[1].outputs[0]})
    assert u in fixed_buffers(dataclasses.replace(draft, program=graded))


def test_fusing_apply_twice_numbers_new_buffers_without_clashes() -> None:
    draft, _ = example()
    once = apply(draft, Choice((Rebuild(3, 1),)))
    twice = apply(once, Choice((Rebuild(5, 3),)))
    assert len(twice.program.buffers) == len(draft.program.buffers) + 2
    assert all(i == b.id for i, b in twice.program.buffers.items())
    assert len(twice.rebuilt) == 2

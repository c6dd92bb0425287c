"""What an op takes inside counts above its results, not with them."""

from __future__ import annotations

from takeback.compiler.ownership.curve import inside_bytes
from takeback.compiler.program import BufferId, Op, Scratch, Special

RESULT = BufferId(7)


def op(*scratch: Scratch) -> Op:
    """Without an `out=` form: it asks for its results itself."""
    return Op(Special.SAVE_RANDOM, (), {}, (), scratch=scratch)


def test_results_that_an_op_asks_for_itself_are_no_scratch() -> None:
    result = Scratch(100, 2, None, RESULT)
    assert inside_bytes(op(result), {}) == 0
    assert inside_bytes(op(Scratch(64, 0, 1), result), {}) == 0, "released before the result is asked for"
    assert inside_bytes(op(Scratch(64, 0, 3), result), {}) == 64
    assert inside_bytes(op(Scratch(300, 0, 1), result), {}) == 200


def test_result_that_takes_anothers_bytes_is_not_asked_for() -> None:
    assert inside_bytes(op(Scratch(64, 0, 1), Scratch(100, 2, None, RESULT)), {RESULT: BufferId(3)}) == 64

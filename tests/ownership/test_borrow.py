"""The borrow check accepts planned programs, catches every injected fault, and says who owns the bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from takeback.compiler.ownership.borrow import Access, Effect, Span, check
from takeback.compiler.plan import Item, ItemId, Problem, solve
from takeback.errors import BorrowError


def access(value: int, start_bytes: int, end_bytes: int) -> Access:
    return Access(value, Span(start_bytes, end_bytes), f"v{value}")


X, Y, Z = access(1, 0, 64), access(2, 64, 128), access(3, 128, 192)
MAKE_Y = Effect(10, "relu", reads=(X,), writes=(Y,))
USE_BOTH = Effect(11, "mul", reads=(X, Y), writes=(Z,))


def test_reads_of_what_was_written_last_pass() -> None:
    check([MAKE_Y, USE_BOTH], initial=[X])


def test_bytes_may_be_reused_once_nobody_reads_the_old_value() -> None:
    reuse = Effect(12, "neg", reads=(Z,), writes=(access(4, 0, 128),))
    check([MAKE_Y, USE_BOTH, reuse, Effect(13, "sum", (access(4, 0, 128),), ())], initial=[X])


def test_read_after_another_value_was_written_names_both_and_the_writer() -> None:
    clobber = Effect(12, "fill", reads=(), writes=(access(9, 32, 96),))
    message = (
        r"op 11 'mul' reads value 1 'v1' at bytes \[0, 64\), but of bytes \[32, 64\): "
        r"they belong to value 9 'v9', which was written by op 12 'fill'"
    )
    with pytest.raises(BorrowError, match=message):
        check([MAKE_Y, clobber, USE_BOTH], initial=[X])


def test_read_of_bytes_never_written_is_an_error() -> None:
    with pytest.raises(BorrowError, match=r"op 10 'relu' reads value 1 .* \[0, 64\): nothing was ever written"):
        check([MAKE_Y])


def test_read_reaching_beyond_what_was_written_names_only_the_missing_bytes() -> None:
    with pytest.raises(BorrowError, match=r"of bytes \[64, 80\): nothing was ever written"):
        check([Effect(1, "sum", (access(1, 0, 80),), ())], initial=[X])


def test_read_of_the_wrong_initial_value_says_it_lives_there_from_the_start() -> None:
    with pytest.raises(BorrowError, match=r"belong to value 1 'v1', which lives there from the start"):
        check([Effect(1, "sum", (access(7, 0, 64),), ())], initial=[X])


def test_value_written_in_two_pieces_can_be_read_as_one() -> None:
    halves = [Effect(n, "pack", (), (access(1, 32 * n, 32 * n + 32),)) for n in range(2)]
    check([*halves, Effect(2, "sum", (X,), ())])


def test_write_onto_own_operand_needs_permission() -> None:
    onto = Effect(5, "relu_", reads=(X,), writes=(access(2, 0, 64),))
    message = r"op 5 'relu_' writes value 2 'v2' .* onto its operand value 1 'v1' .* not declared safe"
    with pytest.raises(BorrowError, match=message):
        check([onto], initial=[X])
    check([replace(onto, may_overwrite=frozenset({(2, 1)}))], initial=[X])


def test_permission_to_overwrite_one_operand_does_not_cover_another() -> None:
    onto = Effect(5, "add_", (X, Y), (access(3, 0, 128),), may_overwrite=frozenset({(3, 1), (1, 2)}))
    with pytest.raises(BorrowError, match="onto its operand value 2 'v2'"):
        check([onto], initial=[X, Y])


def test_overwritten_operand_cannot_be_read_again() -> None:
    onto = Effect(5, "relu_", (X,), (access(2, 0, 64),), may_overwrite=frozenset({(2, 1)}))
    with pytest.raises(BorrowError, match=r"op 6 'sum' reads value 1 .* value 2 'v2', which was written by op 5"):
        check([onto, Effect(6, "sum", (X,), ())], initial=[X])


def test_two_writes_of_one_op_must_not_overlap() -> None:
    both = Effect(5, "split", (), (access(1, 0, 64), access(3, 100, 120), access(2, 48, 100)))
    with pytest.raises(BorrowError, match=r"op 5 'split' writes value 1 'v1' .* and value 2 'v2' .* overlap"):
        check([both])


def test_scratch_leaves_bytes_that_nobody_may_read() -> None:
    noisy = Effect(5, "conv", (Y,), (Z,), scratch=(Span(60, 64),))
    message = r"reads value 1 .* of bytes \[60, 64\): they are scratch that op 5 'conv' left behind"
    with pytest.raises(BorrowError, match=message):
        check([noisy, Effect(6, "sum", (X,), ())], initial=[X, Y])


@pytest.mark.parametrize(
    ("scratch", "message"),
    [
        (Span(0, 1), r"op 10 'relu' has scratch at bytes \[0, 1\) on top of what it reads: value 1 'v1'"),
        (Span(127, 200), r"op 10 'relu' has scratch at bytes \[127, 200\) on top of what it writes: value 2"),
    ],
)
def test_scratch_must_not_touch_what_its_own_op_reads_or_writes(scratch: Span, message: str) -> None:
    with pytest.raises(BorrowError, match=message):
        check([replace(MAKE_Y, scratch=(scratch,))], initial=[X])


def test_empty_spans_touch_nothing() -> None:
    empty = Effect(5, "nop", (access(7, 16, 16),), (access(8, 32, 32), access(9, 0, 64)), scratch=(Span(8, 8),))
    check([empty, Effect(6, "sum", (access(9, 0, 64), access(1, 5, 5)), ())])


@pytest.mark.parametrize(("start", "end"), [(-1, 4), (5, 4)])
def test_span_refuses_nonsense_and_quotes_it(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=rf"got \[{start}, {end}\)"):
        Span(start, end)


# Random programs, placed by the planner, then broken on purpose.


def random_program(draw: Random, ops: int) -> tuple[list[Effect], list[Access]]:
    """A valid program placed by lifetimes: some values overwrite a dying operand, some ops use scratch."""
    inputs = 2
    reads = [draw.sample(range(n + inputs), min(draw.randint(1, 3), n + inputs)) for n in range(ops)]
    # Some reads are of the newest values, so that many values die young.
    for n in range(ops):
        reads[n] = sorted({*reads[n], n + inputs - 1} if draw.random() < 0.7 else reads[n])
    # A value lives from its writer to its last reader: op n runs at time n + 1, inputs are born at 0.
    born = [0] * inputs + [n + 1 for n in range(ops)]
    dies = [b + 1 for b in born]
    for n, values in enumerate(reads):
        for value in values:
            dies[value] = max(dies[value], n + 2)
    sizes = [draw.randint(1, 40) for _ in born]
    buffer = list(range(len(born)))
    may_overwrite: list[frozenset[tuple[int, int]]] = [frozenset()] * ops
    for n in range(ops):
        dying = [value for value in reads[n] if dies[value] == n + 2]
        if dying and draw.random() < 0.4:
            buffer[n + inputs] = buffer[dying[0]]
            sizes[n + inputs] = sizes[dying[0]]
            may_overwrite[n] = frozenset({(n + inputs, dying[0])})
    items = {
        root: Item(
            ItemId(root),
            sizes[root],
            born[root],
            max(d for d, b in zip(dies, buffer, strict=True) if b == root),
        )
        for root in set(buffer)
    }
    scratch = {n: Item(ItemId(10_000 + n), 24, n + 1, n + 2) for n in range(ops) if draw.random() < 0.3}
    offsets = solve(Problem((*items.values(), *scratch.values()), alignment_bytes=8)).offsets

    def placed(value: int) -> Access:
        offset = offsets[ItemId(buffer[value])]
        return access(value, offset, offset + sizes[value])

    effects = []
    for n in range(ops):
        spans = (Span(offsets[scratch[n].id], offsets[scratch[n].id] + 24),) if n in scratch else ()
        effects.append(
            Effect(n, f"op{n}", tuple(map(placed, reads[n])), (placed(n + inputs),), may_overwrite[n], spans)
        )
    return effects, [placed(value) for value in range(inputs)]


def bytes_of(span: Span) -> set[int]:
    return set(range(span.start_bytes, span.end_bytes))


def is_broken(effects: list[Effect], initial: list[Access]) -> bool:
    """The rules again, byte by byte: a dictionary from each byte to the value that was written there last."""
    memory: dict[int, int | None] = {byte: a.value for a in initial for byte in bytes_of(a.span)}
    for effect in effects:
        if any(memory.get(byte) != read.value for read in effect.reads for byte in bytes_of(read.span)):
            return True
        for position, write in enumerate(effect.writes):
            written = bytes_of(write.span)
            for read in effect.reads:
                if written & bytes_of(read.span) and (write.value, read.value) not in effect.may_overwrite:
                    return True
            if any(written & bytes_of(other.span) for other in effect.writes[:position]):
                return True
        for span in effect.scratch:
            if any(bytes_of(span) & bytes_of(a.span) for a in (*effect.reads, *effect.writes)):
                return True
            memory.update(dict.fromkeys(bytes_of(span)))
        for write in effect.writes:
            memory.update(dict.fromkeys(bytes_of(write.span), write.value))
    return False


def is_caught(effects: list[Effect], initial: list[Access]) -> bool:
    try:
        check(effects, initial)
    except BorrowError:
        return True
    return False


def move_an_op(effects: list[Effect], draw: Random) -> list[Effect]:
    moved = list(effects)
    moved.insert(draw.randrange(len(moved)), moved.pop(draw.randrange(len(moved))))
    return moved


def move_a_value_everywhere(effects: list[Effect], draw: Random) -> list[Effect]:
    """The offset of one value is changed wherever it is written or read, as a faulty planner would."""
    value = draw.choice(effects).writes[0].value
    start = draw.choice(draw.choice(effects).writes).span.start_bytes

    def move(a: Access) -> Access:
        length = a.span.end_bytes - a.span.start_bytes
        return replace(a, span=Span(start, start + length)) if a.value == value else a

    return [replace(e, reads=tuple(map(move, e.reads)), writes=tuple(map(move, e.writes))) for e in effects]


def change_one(effects: list[Effect], at: int, effect: Effect) -> list[Effect]:
    return [*effects[:at], effect, *effects[at + 1 :]]


def drop_permissions(effects: list[Effect], draw: Random) -> list[Effect]:
    at = draw.choice([n for n, effect in enumerate(effects) if effect.may_overwrite])
    return change_one(effects, at, replace(effects[at], may_overwrite=frozenset()))


def remove_a_write(effects: list[Effect], draw: Random) -> list[Effect]:
    at = draw.randrange(len(effects))
    return change_one(effects, at, replace(effects[at], writes=()))


def shorten_a_write(effects: list[Effect], draw: Random) -> list[Effect]:
    at = draw.randrange(len(effects))
    write = effects[at].writes[0]
    shorter = replace(write, span=Span(write.span.start_bytes, write.span.end_bytes - 1))
    return change_one(effects, at, replace(effects[at], writes=(shorter,)))


def widen_a_write(effects: list[Effect], draw: Random) -> list[Effect]:
    at = draw.randrange(len(effects))
    write = effects[at].writes[0]
    wider = replace(write, span=Span(max(0, write.span.start_bytes - 9), write.span.end_bytes + 9))
    return change_one(effects, at, replace(effects[at], writes=(wider,)))


def write_twice(effects: list[Effect], draw: Random) -> list[Effect]:
    at = draw.randrange(len(effects))
    write = effects[at].writes[0]
    start = draw.randint(0, 120)
    return change_one(effects, at, replace(effects[at], writes=(write, access(900, start, start + 30))))


def add_scratch(effects: list[Effect], draw: Random) -> list[Effect]:
    at, start = draw.randrange(len(effects)), draw.randint(0, 150)
    return change_one(effects, at, replace(effects[at], scratch=(Span(start, start + draw.randint(1, 30)),)))


def read_another_value(effects: list[Effect], draw: Random) -> list[Effect]:
    at = draw.randrange(len(effects))
    reads = effects[at].reads
    other = replace(reads[0], value=draw.choice(effects).writes[0].value)
    return change_one(effects, at, replace(effects[at], reads=(other, *reads[1:])))


Fault = Callable[[list[Effect], Random], list[Effect]]
FAULTS: list[Fault] = [
    move_an_op,
    move_a_value_everywhere,
    drop_permissions,
    remove_a_write,
    shorten_a_write,
    widen_a_write,
    write_twice,
    add_scratch,
    read_another_value,
]


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), ops=st.integers(1, 30))
def test_programs_placed_by_the_planner_pass(seed: int, ops: int) -> None:
    effects, initial = random_program(Random(seed), ops)
    assert not is_broken(effects, initial)
    check(effects, initial)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_if_and_only_if_it_breaks_a_borrow(fault: Fault) -> None:
    draw = Random(11)
    harmful = 0
    for _ in range(75):
        effects, initial = random_program(draw, ops=20)
        if fault is drop_permissions and not any(effect.may_overwrite for effect in effects):
            continue
        faulty = fault(effects, draw)
        harm = is_broken(faulty, initial)
        assert is_caught(faulty, initial) == harm
        harmful += harm
    assert harmful >= 15

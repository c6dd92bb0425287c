"""Reads the code that was generated for a device whose own allocator places, and proves what it does with bytes.

In: the lines, each with the op it belongs to, and what each name is said to stand for. A line that reads a name
whose bytes are gone, or hold another value than the program means, raises `BorrowError`; so does a call that is not the
op's, or has its operands in other places (read_back.py), a result on bytes that it was not allowed to take, and a name
that keeps bytes which the plan has let go of. Shares nothing with the writer of
the code: Python's own parser reads it, and names are followed as Python would follow them.

    v7 = f3(v5, t2)      v7 gets new bytes, which hold the op's result
    v8 = as_strided(v7)  v8 is another name of the same bytes
    v5 = None            the last name of some bytes: they go back to the allocator
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from takeback.compiler.layout import Layout
from takeback.compiler.ownership.facts import may_write_onto
from takeback.compiler.ownership.kinds import Kind
from takeback.compiler.passes.draft import Overwrites
from takeback.compiler.program import BufferId, Op, Region, show_op
from takeback.compiler.run.read_back import WHAT_TO_DO, Meant, check_batch, check_call, check_look
from takeback.errors import BorrowError

#: Calls that give the first argument's bytes under another name, or (fit) a copy that takes their place.
_SAME_BYTES = frozenset(("as_strided", "over", "fit"))
#: Calls that prepare names for an op, and are not the op.
_HELPERS = _SAME_BYTES | {"empty_strided", "raw", "poison"}
#: Statements around an op that are none: what it is watched by, and what decides about the plan.
_AROUND = frozenset(("begin", "seen", "poison", "grad_mode", "commits", "raise"))
#: Ops that no line is written for, or none that touches bytes of the step's own.
_NO_BYTES = frozenset((Kind.NOTHING, Kind.WAIT, Kind.RANDOM))

Storage = int
Value = tuple[BufferId, int]  #: a buffer, and how often it has been written


@dataclass
class _Holdings:
    """Which name stands for which bytes now, and which value those bytes hold."""

    storage_of: dict[str, Storage] = field(default_factory=dict)
    value_in: dict[Storage, Value | None] = field(default_factory=dict)
    fresh: Iterator[Storage] = field(default_factory=itertools.count)

    def take_(self, name: str) -> None:
        storage = next(self.fresh)
        self.storage_of[name] = storage
        self.value_in[storage] = None


def audit(lines: Iterable[tuple[int, str]], meant: Meant, layout: Layout) -> None:
    """Raises `BorrowError` at the first line that does not do what the plan says."""
    program, claims = layout.program, meant.claims
    check_batch(meant, layout)
    last = len(program.ops)
    ends: dict[BufferId, int] = {}  # of each owner's bytes: the position after the last op that needs them
    for b, life in layout.alive.items():
        ends[layout.owners[b]] = max(ends.get(layout.owners[b], 0), life.end)
    names = _Holdings()
    written: dict[BufferId, int] = {}
    returned: list[Storage] = []
    lines = list(lines)
    _check_order([position for position, _ in lines], layout)
    for position, group in itertools.groupby(lines, key=lambda line: line[0]):
        used: set[str] = set()
        effects, drops = _split([text for _, text in group])
        for text in effects:
            if text.startswith("return "):  # locals go, and what is returned stays
                given = [n.id for n in ast.walk(ast.parse(text.removeprefix("return "))) if isinstance(n, ast.Name)]
                returned = [_bytes_of(name, names, position, text) for name in given]
                names.storage_of = {}
            else:
                _follow_(text, names, used, returned, position, meant, layout)
        if position == last:
            continue
        _check_calls(effects, position, meant, layout)
        if layout.kinds[position] not in _NO_BYTES:
            _check_op_(program.ops[position], position, used, names, claims, layout, written)
        for text in drops:
            _follow_(text, names, set(), returned, position, meant, layout)
        dead = [name for name in names.storage_of if ends[claims[name].buffer] <= position + 1 < last]
        if dead:
            gone = claims[dead[0]].buffer
            raise BorrowError(f"after op {position} {dead[0]} keeps %{gone}, which is dead. {WHAT_TO_DO}")
    _check_survivors(returned, names, layout, written)


def _split(lines: list[str]) -> tuple[list[str], list[str]]:
    """What an op does, and what is dropped (and poisoned) after it."""
    end = len(lines)
    while end and (lines[end - 1].endswith("= None") or lines[end - 1].startswith("poison(")):
        end -= 1
    return lines[:end], lines[end:]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _local_names(tree: ast.AST) -> list[str]:
    """Names that stand for bytes of the step's own (v1, v2, ...), in order."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id[0] == "v" and n.id[1:].isdigit()]
    return [n.id for n in sorted(found, key=lambda n: (n.lineno, n.col_offset))]


def _check_order(positions: list[int], layout: Layout) -> None:
    """Ops run in the order of the program, and none is left out."""
    idle = (Kind.NOTHING, Kind.WAIT)
    missing = {i for i, kind in enumerate(layout.kinds) if kind not in idle} - set(positions)
    if missing or positions != sorted(positions):
        which = f"op {min(missing)} is left out" if missing else "ops are not in the program's order"
        raise BorrowError(f"{which}. {WHAT_TO_DO}")


def _check_calls(lines: list[str], position: int, meant: Meant, layout: Layout) -> None:
    """Of what is written for an op, one statement is the op."""
    kind = layout.kinds[position]
    calls = [s for text in lines for s in ast.parse(text).body if not _is_around(s, kind)]
    wanted = 0 if kind in (Kind.NOTHING, Kind.WAIT) else 1
    if len(calls) != wanted:
        raise BorrowError(f"op {position} is written in {len(calls)} calls, and not in {wanted}. {WHAT_TO_DO}")
    for statement in calls:
        check_call(statement, layout.program.ops[position], kind, position, meant, layout)


def _is_around(statement: ast.stmt, kind: Kind) -> bool:
    if isinstance(statement, ast.If):
        return kind is not Kind.HOLD or not isinstance(statement.test, ast.UnaryOp)
    if isinstance(statement, ast.Return):
        return True
    value = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
    if isinstance(statement, ast.Assign) and (isinstance(value, ast.Name) or _is_none(statement.value)):
        return True  # H, and what is dropped at once
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Attribute):
        return ast.unparse(value.func) == "H.clear"
    return isinstance(value.func, ast.Name) and value.func.id in _AROUND | _HELPERS


def _follow_(
    text: str,
    names: _Holdings,
    used: set[str],
    returned: list[Storage],
    position: int,
    meant: Meant,
    layout: Layout,
) -> None:
    """What a statement does to the names."""
    [statement] = ast.parse(text).body
    if not isinstance(statement, ast.Assign):
        there = [_bytes_of(name, names, position, text) for name in _local_names(statement)]
        if text.startswith("poison("):
            names.value_in.update(dict.fromkeys(there))  # they hold nothing any more
        else:
            used.update(_local_names(statement))
        return
    value = statement.value
    targets = [name for target in statement.targets for name in _local_names(target)]
    read = _local_names(value)
    for name in targets if _is_none(value) else read:
        _bytes_of(name, names, position, text)
    if _is_none(value):
        for name in targets:
            del names.storage_of[name]
    elif isinstance(value, ast.Name) and value.id == "H":  # the update begins with what compute returned
        names.storage_of.update(zip(targets, returned, strict=True))
    else:
        called = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
        if called not in _HELPERS:
            used.update(read, targets)
        for name in targets:
            if called in _HELPERS and isinstance(value, ast.Call):
                check_look(name, value, meant, layout)
            if called in _SAME_BYTES:
                names.storage_of[name] = names.storage_of[read[0]]
            else:
                names.take_(name)


def _bytes_of(name: str, names: _Holdings, position: int, text: str) -> Storage:
    storage = names.storage_of.get(name)
    if storage is None:
        raise BorrowError(f"op {position}: `{text}` uses {name}, whose bytes are gone. {WHAT_TO_DO}")
    return storage


def _check_op_(
    op: Op,
    position: int,
    used: set[str],
    names: _Holdings,
    claims: Mapping[str, Region],
    layout: Layout,
    written: dict[BufferId, int],
) -> None:
    """Every operand's name has the bytes of the value that is meant; every result's gets the new value."""
    label = f"op {position} '{show_op(op, layout.program.buffers)[:200]}'"
    standing: dict[Region, Storage] = {}
    for name in sorted(used & names.storage_of.keys()):
        storage = names.storage_of[name]
        if standing.setdefault(claims[name], storage) != storage:
            raise BorrowError(f"{label} has two places for the bytes of %{claims[name].buffer}. {WHAT_TO_DO}")
    mine = {replace(r, buffer=layout.owners[r.buffer]) for r in (*op.inputs, *op.outputs) if r.buffer in layout.owners}
    for claim in standing:
        if claim not in mine:
            raise BorrowError(f"{label} is given bytes of %{claim.buffer}, and it has no such operand. {WHAT_TO_DO}")
    reads: dict[BufferId, Storage] = {}
    for region in op.inputs:
        if region.buffer not in layout.owners:
            continue
        key = replace(region, buffer=layout.owners[region.buffer])
        if key not in standing:
            raise BorrowError(f"{label} is not given its operand %{region.buffer}. {WHAT_TO_DO}")
        storage = reads[region.buffer] = standing[key]
        if region.buffer not in written:
            continue  # what torch.empty gave holds anything, and a first write may be in place
        meant, there = (region.buffer, written[region.buffer]), names.value_in[storage]
        if there != meant:
            who = "nothing" if there is None else f"%{there[0]}"
            raise BorrowError(f"{label} reads %{region.buffer}, but its bytes hold {who} by then. {WHAT_TO_DO}")
    for region in op.outputs:
        b = region.buffer
        if b not in layout.owners:
            continue
        storage = _find(region, standing, layout, label)
        there = names.value_in[storage]
        placement = layout.draft.placements.get(b)
        takes = isinstance(placement, Overwrites) and placement.op == position
        onto = placement.buffer if isinstance(placement, Overwrites) and takes else None
        if onto is not None and not may_write_onto(op, b, onto, layout.program.buffers):
            raise BorrowError(f"{label} would write %{b} onto %{onto} as it reads it. {WHAT_TO_DO}")
        if there is not None and there[0] != b:
            if not (isinstance(placement, Overwrites) and takes and there[0] == placement.buffer):
                raise BorrowError(f"{label} writes %{b} onto %{there[0]}, which the plan does not say. {WHAT_TO_DO}")
        elif isinstance(placement, Overwrites) and takes and storage != reads.get(placement.buffer):
            raise BorrowError(f"{label} was to write %{b} onto an operand, and takes new bytes. {WHAT_TO_DO}")
    for b in dict.fromkeys([*(r.buffer for r in op.outputs), *op.mutates]):
        if b in layout.owners:
            written[b] = written.get(b, 0) + 1
            for region in (*op.outputs, *op.inputs):
                if region.buffer == b:
                    names.value_in[_find(region, standing, layout, label)] = (b, written[b])


def _find(region: Region, standing: Mapping[Region, Storage], layout: Layout, label: str) -> Storage:
    owner = layout.owners[region.buffer]
    found = {storage for claim, storage in standing.items() if claim.buffer == owner}
    if len(found) != 1:
        raise BorrowError(f"{label} has {len(found)} places for the bytes of %{region.buffer}. {WHAT_TO_DO}")
    return found.pop()


def _check_survivors(
    surviving: list[Storage], names: _Holdings, layout: Layout, written: Mapping[BufferId, int]
) -> None:
    """What the caller gets is what the program means."""
    there = {names.value_in[s] for s in surviving}
    program = layout.program
    for region in (*program.returned, *(r for r in program.grads.values() if r.buffer in layout.draft.kept)):
        if region.buffer in layout.owners and (region.buffer, written.get(region.buffer, 0)) not in there:
            raise BorrowError(f"the step was to end with %{region.buffer}, and its bytes are gone. {WHAT_TO_DO}")

"""Makes one op of many small casts: of parameters to half precision in front of each product, of gradients back to
single behind it; and of the counters of batch norms. Each is a launch that moves little, and torch takes lists of them.

      w1' = cast(w1)                     w1', w2', ... = bundle(w1, w2, ...)
      y1  = mm(x, w1')                   y1 = mm(x, w1')
      w2' = cast(w2)                     y2 = mm(y1, w2')
      y2  = mm(y1, w2')

A cast may run anywhere after its operand was written and before its result is read, so a bundle runs where the first of
its results is read: gradients wait in half of the bytes. Results that are read later live longer, which is done nowhere
where the planned peak would grow: there a bundle is cut in half, until it fits or is none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from takeback.compiler.cluster import clustered
from takeback.compiler.ownership.lifetimes import lifetimes
from takeback.compiler.ownership.lists import ListForm, list_form
from takeback.compiler.passes.draft import Draft, Refusal
from takeback.compiler.passes.overwrite import planned_curve
from takeback.compiler.program import BufferId, Op, Phase, Program

LEAST = 4  #: ops of one bundle
MOST_ELEMENTS = 320 * 65536  #: of one tensor; more fill a launch of torch's kernels for lists by themselves

LARGE = "it is large: as one of a list it would take a launch of its own, too"
ALONE = f"there are fewer than {LEAST} of its kind that may run at the same place"
HIGHER = "as one of a list it would lift the peak: all results are alive from the first one's reader on"


@dataclass(frozen=True)
class Bundled:
    """An op that may be in a bundle, by its position, and between which ops it may run: just before any of them."""

    position: int
    earliest: int
    latest: int


_Bundle = tuple[Bundled, ...]  #: in the order in which they are needed; it runs at the first one's latest place


def bundle(draft: Draft) -> Draft:
    """The draft with bundles in place of what may run together. Refusals say what stayed alone."""
    program = draft.program
    forms = {i: form for i, op in enumerate(program.ops) if (form := _form(op, program)) is not None}
    reasons = {i: ALONE if _is_small(program.ops[i]) else LARGE for i in forms}
    found = _bundles(draft, {i: form for i, form in forms.items() if reasons[i] is ALONE})
    enough = [group for group in found if len(group) >= LEAST]
    reasons |= {each.position: HIGHER for group in enough for each in group}
    after, groups = _no_higher(draft, enough)
    inside = {each.position for group in groups for each in group}
    made = {r.buffer for i in inside for r in program.ops[i].outputs}
    others = tuple(r for r in draft.refusals if r.decision != "fuse" or r.buffer not in made)
    mine = tuple(_refusal(program, i, why) for i, why in reasons.items() if i not in inside)
    return replace(after, refusals=others + mine)


def _no_higher(draft: Draft, groups: Sequence[_Bundle]) -> tuple[Draft, Sequence[_Bundle]]:
    """The draft with as many of these bundles, or halves of them, as there is room for, and which these are."""
    peak = max(planned_curve(draft), default=0)
    while groups:
        after = _with(draft, groups)
        guilty = _guilty(draft, groups, after, peak)
        if not guilty:
            return after, groups
        cut = [half for i, group in enumerate(groups) for half in (_halves(group) if i in guilty else (group,))]
        groups = [group for group in cut if len(group) >= LEAST]
    return draft, ()


def _form(op: Op, program: Program) -> ListForm | None:
    """What an op does that can be done to a list; None if it cannot."""
    form = None if op.phase is Phase.UPDATE or op.may_send_back else list_form(op)
    if form is None or any(program.buffers[r.buffer].device for r in (*op.inputs, *op.outputs)):
        return None
    buffer = program.buffers[op.outputs[0].buffer]
    if form.added is not None:
        return form if buffer.role.borrowed else None
    return None if buffer.role.borrowed or op.outputs[0].span_bytes != (0, buffer.size_bytes) else form


def _is_small(op: Op) -> bool:
    return all(r.numel <= MOST_ELEMENTS for r in op.inputs)


def _is_rebuilt(op: Op, draft: Draft) -> bool:
    return any(r.buffer in draft.rebuilt for r in op.outputs)


def _bundles(draft: Draft, forms: Mapping[int, ListForm]) -> list[_Bundle]:
    """What may run together, as few bundles as there can be: what must have run first decides where."""
    ops = draft.program.ops
    alike: dict[tuple[ListForm, Phase, bool], list[Bundled]] = {}
    for each in _intervals(draft, forms.keys()):
        op = ops[each.position]
        alike.setdefault((forms[each.position], op.phase, _is_rebuilt(op, draft)), []).append(each)
    found: list[_Bundle] = []
    for members in alike.values():
        left = sorted(members, key=lambda each: (each.latest, each.position))
        while left:
            at = left[0].latest
            found.append(tuple(each for each in left if each.earliest <= at))
            left = [each for each in left if each.earliest > at]
    return found


def _intervals(draft: Draft, positions: Collection[int]) -> Iterator[Bundled]:
    """After the last op that writes what it reads; before the first that names what it makes, or writes what it reads,
    and before the first of another phase. What is rebuilt is of the backward."""
    ops = draft.program.ops
    phases = [Phase.BACKWARD if _is_rebuilt(op, draft) else op.phase for op in ops]
    ends = [len(ops)] * len(ops)  #: of the run of ops of one phase
    for i in range(len(ops) - 2, -1, -1):
        ends[i] = ends[i + 1] if phases[i] is phases[i + 1] else i + 1
    writes: dict[BufferId, list[int]] = {}
    names: dict[BufferId, list[int]] = {}
    for i, op in enumerate(ops):
        written = dict.fromkeys((*(r.buffer for r in op.outputs), *op.mutates))
        for b in written:
            writes.setdefault(b, []).append(i)
        for b in {**written, **dict.fromkeys(r.buffer for r in op.inputs)}:
            names.setdefault(b, []).append(i)
    for i in positions:
        made = {r.buffer for r in ops[i].outputs}
        touching = [at for b in made for at in names[b]]
        touching += [at for r in ops[i].inputs for at in writes.get(r.buffer, ())]
        before = max((at for at in touching if at < i), default=-1)
        # What comes before it may be in a bundle itself, which may run as late as just before this one.
        earliest = i + 1 if before in positions else before + 1
        yield Bundled(i, earliest, min([ends[i], *(at for at in touching if at > i)]))


def _with(draft: Draft, groups: Sequence[_Bundle]) -> Draft:
    """The draft with these bundles."""
    program = draft.program
    at: dict[int, list[Op]] = {}
    for group in groups:
        members = tuple(program.ops[i] for i in sorted(each.position for each in group))
        at.setdefault(group[0].latest, []).append(clustered(members, program.buffers, lambda _: True))
    inside = {each.position for group in groups for each in group}
    ops: list[Op] = []
    for i, op in enumerate(program.ops):
        ops += at.get(i, ())
        if i not in inside:
            ops.append(op)
    ops += at.get(len(program.ops), ())
    return replace(draft, program=replace(program, ops=tuple(ops)))


def _halves(group: _Bundle) -> tuple[_Bundle, _Bundle]:
    middle = len(group) // 2
    return group[:middle], group[middle:]


def _guilty(draft: Draft, groups: Sequence[_Bundle], after: Draft, peak: int) -> Collection[int]:
    """The bundles, by number, that have more bytes alive than their members had, at ops where there are more than the
    peak; all of them where it is nobody's alone."""
    program = draft.program
    high = [op for op, level in zip(after.program.ops, planned_curve(after), strict=True) if level > peak]
    if not high:
        return ()
    positions = {id(op): i for i, op in enumerate(program.ops)}
    above = [positions[id(op)] for op in high if id(op) in positions]
    made = {r.buffer for op in high if id(op) not in positions for r in op.outputs}
    ends = {b: life.end for b, life in lifetimes(program, draft.kept).items()}
    found: list[int] = []
    for number, group in enumerate(groups):
        is_high = any(r.buffer in made for each in group for r in program.ops[each.position].outputs)
        if is_high or any(_more_bytes(program, group, at, ends) > 0 for at in above):
            found.append(number)
    return found or range(len(groups))


def _more_bytes(program: Program, group: _Bundle, at: int, ends: Mapping[BufferId, int]) -> int:
    """How many bytes more are alive at an op, since these run together: results from there on, operands up to there."""
    runs, more = group[0].latest, 0
    for each in group:
        op = program.ops[each.position]
        size = sum(program.buffers[r.buffer].size_bytes for r in op.outputs if r.buffer not in op.mutates)
        if runs <= at < each.position:
            more += size
        elif each.position <= at < runs:
            waits = [r.buffer for r in op.inputs if ends.get(r.buffer, at + 1) <= at]
            more += sum(program.buffers[b].size_bytes for b in waits) - size
    return more


def _refusal(program: Program, position: int, why: str) -> Refusal:
    op = program.ops[position]
    made = op.outputs[0].buffer
    return Refusal("bundle", op.name, made, program.buffers[made].size_bytes, why, op.site)

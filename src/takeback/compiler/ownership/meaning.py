"""A recorded program and a planned one come in; a `MeaningError` if the planned one gives anything else than that.

The borrow check proves that a plan does what its program says. That the program still says what was recorded is proved
here: both are walked op by op with symbols in place of values (contents.py), and what they leave behind must have the
same ones: every tensor of the user's, the random state, what is returned, what is read into Python. An op
that reads another operand, or comes before a write that it must come after, makes another symbol.

Of the passes it knows what each may change without changing a value, and shares no code with them:

    unread                      what follows from numbers alone is the same in every step, whoever reads it
    functionalize, chunk_loss   an op has one name, whether it returns its result or writes it into bytes that are given
    move                        a copy is the value it is a copy of
    chunk_loss                  the backward of a loss treats each row by itself, so rows of the result are all of it
    reduce                      from REDUCE to WAIT a slice is on its way; after it, the average of what it was
    advance                     order matters only where one op reads or writes what the other writes
    align                       zeros that nobody reads, which numbers must prove: what it made is what counts
    pool                        which place of a window, where it was which of the image: numbers must prove it, too
    chunk_head                  nothing but rounding, so numbers must prove it: here, all but what it does to the ops
                                that it replaced (replaced.py)
    fuse, gather, join, bundle  a cluster is the ops it is made of
    shadow, postpone            each gradient of a convolution is the same, whether others are asked for or not
    recompute                   the same op on the same values is the same value, unless it draws random numbers; a
                                batch norm in its form for evaluation is that for training, on the statistics of that
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from takeback.compiler.cluster import unclustered
from takeback.compiler.ownership.contents import SymbolTable
from takeback.compiler.ownership.replaced import Replaced, walk_around
from takeback.compiler.ownership.symbol_walk import MeaningError, SymbolWalk
from takeback.compiler.program import BufferId, Program, show_op

__all__ = ["MeaningError", "check_meaning"]


def check_meaning(
    recorded: Program,
    planned: Program,
    kept: Collection[BufferId] = (),
    still_kept: Collection[BufferId] = (),
    replaced: Sequence[Replaced] = (),
) -> None:
    """Raises `MeaningError` unless both programs give the same. `kept` are buffers that must last to the end of the
    recorded program, `still_kept` those of the planned one. `replaced`: what was done in between, in that order, that
    has to be shown by numbers."""
    for each in replaced:
        check_meaning(recorded, each.before, kept, each.kept)
        then, now = walk_around(each)
        if (wrong := _difference(then, now)) is not None:
            raise MeaningError(f"{wrong}{_first_new(then, now)}")
        recorded, kept = each.after, each.kept
    table = SymbolTable()
    then, now = SymbolWalk(table, unclustered(recorded)), SymbolWalk(table, unclustered(planned))
    then.walk(averaged=planned.slices.keys())
    now.walk()
    wrong = _difference(then, now) or _lost(recorded, planned, kept, still_kept)
    if wrong is not None:
        raise MeaningError(f"{wrong}{_first_new(then, now)}")


def _difference(then: SymbolWalk, now: SymbolWalk) -> str | None:
    """The first thing that is not the same in the end, in words."""
    for b, buffer in then.program.buffers.items():
        if buffer.role.borrowed and then.contents.final(b) != now.contents.final(b):
            return f"the planned step leaves something else in {buffer.role.value} {buffer.name or f'%{b}'}"
    if then.random != now.random:
        return "the planned step draws other random numbers"
    if sorted(then.held) != sorted(now.held):  # in any order: a replay goes on only where all of them hold
        return "the planned step reads other values into Python"
    theirs = then.program
    ours = now.program
    fields = {
        "loss": ([theirs.loss], [ours.loss]),
        "aux": (theirs.aux, ours.aux),
        "grad_norm": ([theirs.grad_norm], [ours.grad_norm]),
        "found_inf": ([theirs.found_inf], [ours.found_inf]),
        "grads": ([theirs.grads[i] for i in sorted(theirs.grads)], [ours.grads[i] for i in sorted(ours.grads)]),
    }
    for name, (before, after) in fields.items():
        if [r and then.contents.read(r) for r in before] != [r and now.contents.read(r) for r in after]:
            return f"the planned step gives another {name}"
    return None


def _lost(
    recorded: Program, planned: Program, kept: Collection[BufferId], still_kept: Collection[BufferId]
) -> str | None:
    """A gradient, or the scaler's flag, that was to be kept and is not."""
    for i, region in recorded.grads.items():
        if region.buffer in kept and planned.grads[i].buffer not in still_kept:
            return f"the gradient of parameter {i} is not kept any more"
    flag, here = recorded.found_inf, planned.found_inf
    if flag is not None and here is not None and flag.buffer in kept and here.buffer not in still_kept:
        return "what the scaler found is not kept any more"
    return None


def _first_new(then: SymbolWalk, now: SymbolWalk) -> str:
    """The first op that makes something which the recorded step never made."""
    known = {made for made, _ in then.made}
    for made, op in now.made:
        if made not in known:
            return f"; {show_op(op, now.program.buffers)[:200]} is the first op that was not recorded like this"
    return ""

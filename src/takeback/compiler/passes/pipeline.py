"""The table of contents of the compiler: which passes run, in which order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from takeback.compiler.passes.advance import advance
from takeback.compiler.passes.chunk_loss import chunk_loss
from takeback.compiler.passes.draft import Draft
from takeback.compiler.passes.functionalize import functionalize
from takeback.compiler.passes.move import move
from takeback.compiler.passes.overwrite import overwrite
from takeback.compiler.passes.pack import pack
from takeback.compiler.passes.recompute import Chooser, Goal, Progress, recompute
from takeback.compiler.passes.reduce import Sharing, reduce
from takeback.compiler.program import Op

Pass = Callable[[Draft], Draft]

PASSES: tuple[Callable[..., Draft], ...] = (
    functionalize,
    move,
    chunk_loss,
    reduce,
    advance,
    recompute,
    overwrite,
    pack,
)


def passes_for(
    goal: Goal | None = None,
    *,
    early: bool = False,
    sharing: Sharing | None = None,
    places: bool = True,
    seconds: Callable[[Op], float] = lambda op: 1.0,
    limit_s: float = 10.0,
    progress: Progress | None = None,
) -> tuple[Pass, ...]:
    """The passes with their settings bound. Without a goal nothing is rebuilt; `early` moves the updates up, and then
    there is no moment at which all gradients are alive and could be one flat buffer. `sharing` averages the gradients
    over a group. `places`: False for what comes before the placement table is filled."""
    bound: dict[Callable[..., Draft], Pass | None] = {recompute: None}
    bound[reduce] = None if sharing is None else functools.partial(reduce, sharing=sharing)
    if not early:
        bound[advance] = None
    if early or not places:
        bound[pack] = None
    if not places:
        bound[overwrite] = None
    if goal is not None:
        bound[recompute] = functools.partial(recompute, goal=goal, chooser=Chooser(seconds, limit_s, progress))
    chosen = (bound.get(p, p) for p in PASSES)
    return tuple(p for p in chosen if p is not None)


def run_passes(draft: Draft, passes: Sequence[Pass]) -> Draft:
    for each in passes:
        draft = each(draft)
    return draft

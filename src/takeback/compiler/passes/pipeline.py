"""The table of contents of the compiler: which passes there are, in which order they run, and what each is told.

`PIPELINE` is the list that runs, for every device and every `memory=`. A stage that has nothing to do in a plan says
why. After each one the form of the program is checked, so that a broken pass is found at its own door; after the last
one, that the program still gives what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from takeback.compiler.form import check_form
from takeback.compiler.ownership.meaning import check_meaning
from takeback.compiler.passes.advance import advance
from takeback.compiler.passes.align import align
from takeback.compiler.passes.bundle import bundle
from takeback.compiler.passes.chunk_head import chunk_head
from takeback.compiler.passes.chunk_loss import chunk_loss
from takeback.compiler.passes.draft import Draft, Home
from takeback.compiler.passes.functionalize import functionalize
from takeback.compiler.passes.fuse import fuse
from takeback.compiler.passes.gather import gather
from takeback.compiler.passes.join import join
from takeback.compiler.passes.move import move
from takeback.compiler.passes.overwrite import overwrite
from takeback.compiler.passes.pack import pack
from takeback.compiler.passes.pool import pool
from takeback.compiler.passes.postpone import postpone
from takeback.compiler.passes.recompute import (
    Again,
    Below,
    Chooser,
    Goal,
    Keep,
    Remembered,
    Search,
    Within,
    recompute,
)
from takeback.compiler.passes.reduce import Sharing, reduce
from takeback.compiler.passes.shadow import shadow
from takeback.compiler.passes.unread import unread
from takeback.compiler.program import BufferId, Program

_KEEP = Keep()


@dataclass(frozen=True)
class PassSettings:
    """What a plan is made for. Each pass is told the part that concerns it."""

    home: Home = Home.ARENA
    fast: bool = False  #: memory-bound ops run in generated kernels; results may differ in their last bits
    early: bool = False  #: each parameter is updated as soon as its gradient is complete
    sharing: Sharing | None = None  #: gradients are averaged over a group
    goal: Goal = _KEEP
    waits: bool = True  #: ops of the backward may wait for clusters; some lowest peaks are without
    chooser: Chooser | None = None  #: finds what to rebuild; any goal but Keep needs one
    notes: tuple[str, ...] = ()  #: what the user should know of these settings
    known: bool = False  #: a sibling of the program has gone the same way: its form is looked at in the end only


def _nothing(settings: PassSettings) -> dict[str, object]:
    return {}


def _never(settings: PassSettings) -> str | None:
    return None


@dataclass(frozen=True)
class Stage:
    """A pass in the list: `binds` picks what it is told, `idle` says why it has nothing to do, or None. `rewrites`: it
    computes the same in another way, which symbols do not show; what it made is what later passes must not change, and
    that it is the same is shown by the first replay (run/replayer.py)."""

    run: Callable[..., Draft]
    binds: Callable[[PassSettings], Mapping[str, object]] = _nothing
    idle: Callable[[PassSettings], str | None] = _never
    rewrites: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__


def _idle_reduce(settings: PassSettings) -> str | None:
    return "there is no group to average over" if settings.sharing is None else None


def _idle_chunk_loss(settings: PassSettings) -> str | None:
    return "mode='fast': chunk_head cuts all of the loss into parts, not its backward alone" if settings.fast else None


def _idle_chunk_head(settings: PassSettings) -> str | None:
    return None if settings.fast else "mode='exact': sums are added up in eager's order"


def _idle_align(settings: PassSettings) -> str | None:
    if not settings.fast:
        return "mode='exact': every op runs as eager runs it"
    return "a CPU's products are indifferent to it" if settings.home is Home.ARENA else None


def _idle_fuse(settings: PassSettings) -> str | None:
    return None if settings.fast else "mode='exact': every op runs with eager's kernel"


def _idle_join(settings: PassSettings) -> str | None:
    return _idle_fuse(settings) or _idle_recompute(settings)


def _idle_bundle(settings: PassSettings) -> str | None:
    return _idle_fuse(settings) or ("a CPU launches nothing" if settings.home is Home.ARENA else None)


def _idle_postpone(settings: PassSettings) -> str | None:
    waits = None if settings.waits else "the lowest peak is without: what waits keeps its operands for longer"
    return _idle_join(settings) or waits


def _idle_advance(settings: PassSettings) -> str | None:
    return None if settings.early else "update='end': the optimizer runs after the backward"


def _idle_recompute(settings: PassSettings) -> str | None:
    return "memory='keep': nothing is computed twice" if isinstance(settings.goal, Keep) else None


def _idle_pack(settings: PassSettings) -> str | None:
    if settings.home is not Home.ARENA:
        return "the device's own allocator places, so gradients cannot lie side by side"
    return "update='early': there is no moment at which all gradients are alive" if settings.early else None


def _binds_shadow(settings: PassSettings) -> dict[str, object]:
    match settings.goal:
        case Again(chosen):
            return {"only": chosen.choice.shadows}
        case Remembered(choice):
            return {"only": choice.shadows}
        case Within(share, worth):
            assert settings.chooser is not None
            return {"seconds": settings.chooser.seconds, "share": share, "worth": worth}
        case Below(room_bytes):
            return {"room_bytes": room_bytes}
    return {}


PIPELINE: tuple[Stage, ...] = (
    Stage(unread),
    Stage(functionalize),
    Stage(move),
    Stage(align, idle=_idle_align, rewrites=True),
    Stage(pool, idle=_idle_fuse, rewrites=True),
    Stage(chunk_loss, idle=_idle_chunk_loss),
    Stage(chunk_head, idle=_idle_chunk_head),
    Stage(reduce, lambda s: {"sharing": s.sharing}, _idle_reduce),
    Stage(advance, idle=_idle_advance),
    Stage(fuse, idle=_idle_fuse),
    Stage(gather, idle=_idle_fuse),
    Stage(shadow, _binds_shadow, _idle_postpone),
    Stage(postpone, idle=_idle_postpone),
    Stage(
        recompute,
        lambda s: {"goal": s.goal, "chooser": s.chooser},
        _idle_recompute,
    ),
    Stage(join, idle=_idle_join),
    Stage(bundle, idle=_idle_bundle),
    Stage(overwrite),
    Stage(pack, idle=_idle_pack),
)

Watcher = Callable[[str, Draft, Draft | str], None]
"""Told of each stage: its name, the draft before it, and the draft after it or why it had nothing to do."""


def run_passes(
    program: Program,
    kept: frozenset[BufferId] = frozenset(),
    settings: PassSettings | None = None,
    *,
    stages: Sequence[Stage] = PIPELINE,
    before: Callable[..., Draft] | None = None,
    watch: Watcher | None = None,
) -> Draft:
    """The program through all passes, or only through those that come before the pass `before`."""
    settings = settings or PassSettings()
    draft = Draft(program, kept, settings.home, notes=settings.notes)
    meant, still = program, kept
    if not settings.known:
        check_form(program, kept)
    for stage in stages:
        if stage.run is before:
            break
        reason = stage.idle(settings)
        if reason is None:
            after = stage.run(draft, **stage.binds(settings))
            if stage.rewrites and after.program is not draft.program:
                check_meaning(meant, draft.program, still, draft.kept)
                meant, still = after.program, after.kept
            if not settings.known:
                check_form(after.program, after.kept)
            after = replace(after, passes=(*draft.passes, stage.name))
        if watch is not None:
            watch(stage.name, draft, after if reason is None else reason)
        if reason is None:
            draft = after
    if settings.known:
        check_form(draft.program, draft.kept)
    check_meaning(meant, draft.program, still, draft.kept, draft.replaced)
    return draft


def search_of(program: Program, kept: frozenset[BufferId], settings: PassSettings) -> Search:
    """What knows the whole frontier of a program: peak against added time, after the passes before `recompute`."""
    assert settings.chooser is not None
    return settings.chooser.search(run_passes(program, kept, settings, before=recompute))

"""`Frontier`: the peak of a step against its predicted time, from no rebuilding to the lowest peak there is.

Built from the points that the pass `recompute` found; shown as a table and a picture of at most 80 columns, as JSON, or
as a page. All byte counts are of tensors, and mean what they mean in a `Report`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from takeback.compiler.explain.text import WIDTH, clean, heading, show_bytes, show_count, show_share, wrapped
from takeback.compiler.ownership.eager_peak import eager_peak
from takeback.compiler.ownership.resident import grad_bytes, resident_bytes
from takeback.compiler.ownership.writes import undo_bytes
from takeback.compiler.passes.cost import again_s
from takeback.compiler.passes.draft import Choice, Home
from takeback.compiler.passes.pipeline import PassSettings, run_passes, search_of
from takeback.compiler.passes.rebuildable import stand_in
from takeback.compiler.passes.recompute import LEVELS, Lowest, Point, planned_peak
from takeback.compiler.passes.shadow import shadow
from takeback.compiler.planning import auto_goal, settings_for
from takeback.compiler.program import BufferId, Cluster, Op, Program
from takeback.options import Options

ROWS, COLUMNS = 11, 60
"""The size of the picture in characters, without its axes."""

_PARTS = 4  #: of what clusters can make on their way, that are shown
_ON_THE_WAY = "made in clusters"

NOTHING = "No way of rebuilding was found that lowers the peak of this step."


@dataclass(frozen=True)
class Tradeoff:
    """One point: what to ask for, and what the step then comes to."""

    memory: str  #: the setting of `memory=` that gives it
    peak_bytes: int  #: as `Report.peak_bytes`, before placement
    share: float  #: of eager's peak, both above resident
    step_s: float  #: predicted, with what is run again
    added_s: float
    added_share: float  #: of the step without rebuilding
    rebuilt_ops: int
    rebuilt: Mapping[str, int]  #: how many of each kind, the most costly kind first


@dataclass(frozen=True)
class Frontier:
    """Peak against predicted time. Each point has a lower peak than the one before it, and takes more time."""

    points: tuple[Tradeoff, ...]  #: the first is memory="keep", the last memory="min"
    auto: Tradeoff  #: what memory="auto" chooses; it need not be one of the points
    eager_peak_bytes: int
    resident_bytes: int
    torch_version: str = torch.__version__

    def __str__(self) -> str:
        return "\n\n".join("\n".join(line.rstrip() for line in part) for part in _parts(self) if part)

    @property
    def rows(self) -> tuple[Tradeoff, ...]:
        """The points and "auto", the highest peak first; "auto" once only where it is one of the points."""
        if self.auto in self.points:
            return self.points
        return tuple(sorted((*self.points, self.auto), key=lambda t: (-t.peak_bytes, t.added_s)))

    def name(self, tradeoff: Tradeoff) -> str:
        """`0.53x`, `auto`, or `keep, auto` where both are the same."""
        same = tradeoff == self.auto and tradeoff.memory != "auto"
        return f"{tradeoff.memory}, auto" if same else tradeoff.memory

    def to_json(self) -> str:
        """Everything as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page and returns its path."""
        from takeback.compiler.explain.frontier_html import as_html

        target = Path(path)
        target.write_text(as_html(self), encoding="utf-8")
        return target


def find_frontier(
    program: Program,
    kept: frozenset[BufferId],
    options: Options,
    seconds: Callable[[Op], float],
    *,
    home: Home = Home.ARENA,
    levels: int = LEVELS,
    progress: Callable[[str], None] | None = None,
) -> Frontier:
    """Of a finished step, for each setting of `memory=`; `levels`: how many peaks are solved for. The guard `solve_s`
    holds for the curve, and once more for what "auto" would choose."""
    say = progress or (lambda text: None)
    say("listing what could be rebuilt")
    goal = auto_goal(program.device_type, options)
    told = settings_for(program, options, seconds, home=home, progress=lambda text: say(f"auto: {text}"))
    auto = search_of(program, kept, replace(told, goal=goal)).point(goal)
    told = settings_for(program, options, seconds, home=home, progress=say)
    told = replace(told, goal=Lowest())
    search = search_of(program, kept, told)
    above = _with_fewer_shadows(program, kept, told, search.draft.shadows)
    found = [(point, search.draft.program) for point in (*above, *search.frontier(levels))]
    if told.fast:  # some lowest peaks are without waiting, as for a plan
        say("looking for a lower peak without waiting")
        other = search_of(program, kept, replace(told, waits=False))
        lower = other.frontier(levels, found[-1][0].peak_bytes)
        found += [(point, other.draft.program) for point in lower]
    return build_frontier(
        _falling(found),
        (auto, search.draft.program),
        step_s=search.step_s,
        seconds=seconds,
        eager_bytes=eager_peak(program).transient_bytes,
        resident_bytes=resident_bytes(program),
        undo_bytes=undo_bytes(program),
        kept_grad_bytes=grad_bytes(program) if options.keep_grads else 0,
    )


def _falling(found: Sequence[tuple[Point, Program]]) -> list[tuple[Point, Program]]:
    """Those that are lower than all before them."""
    peaks = [point.peak_bytes for point, _ in found]
    return [each for i, each in enumerate(found) if all(peaks[i] < peak for peak in peaks[:i])]


def _with_fewer_shadows(
    program: Program, kept: frozenset[BufferId], told: PassSettings, shadows: tuple[int, ...]
) -> Iterator[Point]:
    """What comes before all that clusters can make on their way is made by them: nothing, and some of it. The search
    knows only what is there after it."""
    if not shadows:
        return
    assert told.chooser is not None
    seconds = told.chooser.seconds
    before = run_passes(program, kept, told, before=shadow)
    for part in range(_PARTS):
        some = shadows[: len(shadows) * part // _PARTS]
        draft = shadow(before, only=some)
        spent_s = again_s(draft.program.ops, draft.rebuilt, seconds)
        yield Point(Choice(shadows=some), planned_peak(draft), spent_s)


def build_frontier(
    points: Sequence[tuple[Point, Program]],
    auto: tuple[Point, Program],
    *,
    step_s: float,
    seconds: Callable[[Op], float],
    eager_bytes: int,
    resident_bytes: int,
    undo_bytes: int = 0,
    kept_grad_bytes: int = 0,
) -> Frontier:
    """`points` from the highest peak to the lowest, each with the program that its choices are positions in.
    `eager_bytes` is what eager holds above `resident_bytes`."""
    program = auto[1]
    # As in a report: what is returned is copied out at the end, when little else is alive.
    at_end = 2 * (sum(r.numel * r.dtype.itemsize for r in program.returned) + kept_grad_bytes)

    def tradeoff(memory: str, point: Point, program: Program) -> Tradeoff:
        above = undo_bytes + max(point.peak_bytes, at_end)
        again = [stand_in(program.ops[each.op], program.device_type) for each in point.choice.rebuilds]
        rebuilt = _kinds(again, seconds)
        if point.choice.shadows:
            rebuilt[_ON_THE_WAY] = len(point.choice.shadows)
        return Tradeoff(
            memory,
            resident_bytes + above,
            above / max(eager_bytes, 1),
            step_s + point.added_s,
            point.added_s,
            point.added_s / step_s if step_s else 0.0,
            len(point.choice.rebuilds) + len(point.choice.shadows),
            rebuilt,
        )

    made: list[Tradeoff] = []
    for number, (point, of) in enumerate(points, 1):
        memory = "min" if number == len(points) else ""
        one = tradeoff("keep" if not made else memory, point, of)
        made.append(one if one.memory else replace(one, memory=_asked(one.share, made[-1].share)))
    chosen = tradeoff("auto", *auto)
    same = [t for t in made if (t.peak_bytes, t.added_s) == (chosen.peak_bytes, chosen.added_s)]
    return Frontier(tuple(made), same[0] if same else chosen, resident_bytes + eager_bytes, resident_bytes)


def _asked(share: float, above: float) -> str:
    """The roundest part of eager's peak that is met by a point with this `share`, and not by the one `above` it."""
    for digits in (2, 3):
        rounded = math.ceil(share * 10**digits) / 10**digits
        if rounded < above:
            break
    return f"{rounded:.{digits}f}x"


def _kinds(ops: Sequence[Op], seconds: Callable[[Op], float]) -> dict[str, int]:
    count: dict[str, int] = {}
    cost: dict[str, float] = {}
    for op in ops:
        name = op.name if isinstance(op.target, Cluster) else op.name.partition(".")[0]
        count[name] = count.get(name, 0) + 1
        cost[name] = cost.get(name, 0.0) + seconds(op)
    return {name: count[name] for name in sorted(count, key=lambda n: (-cost[n], n))}


def show_kinds(rebuilt: Mapping[str, int]) -> str:
    """`gelu x4, addmm x2`."""
    return ", ".join(f"{clean(name)} x{count:,}" for name, count in rebuilt.items())


def show_seconds(seconds: float) -> str:
    """`12.3 us`, `4.56 ms`, `1.23 s`."""
    scale, unit = next(((f, u) for f, u in ((1e6, "us"), (1e3, "ms")) if seconds * f < 999.5), (1.0, "s"))
    number = seconds * scale
    return f"{number:,.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {unit}"


def share_ticks(most: float) -> list[float]:
    """0 and a few round shares up to `most`."""
    step = 10.0 ** math.floor(math.log10(max(most, 1e-6)))
    step = next(step * part for part in (0.2, 0.5, 1.0, 2.0) if most / (step * part) <= 6)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


# -- the text ----------------------------------------------------------------------------------------------------


def _parts(frontier: Frontier) -> list[list[str]]:
    if len(frontier.points) == 1:
        return [_table(frontier), [NOTHING]]
    return [_table(frontier), _picture(frontier), _again(frontier)]


def _table(frontier: Frontier) -> list[str]:
    lines = [f"{'memory':<12}{'peak':>12}{'above resident':>17}{'x eager':>9}{'step':>11}{'added':>9}{'run again':>10}"]
    eager, resident = frontier.eager_peak_bytes, frontier.resident_bytes
    lines.append(f"{'eager':<12}{show_bytes(eager):>12}{show_bytes(eager - resident):>17}{'1.000':>9}")
    for t in frontier.rows:
        lines.append(
            f"{frontier.name(t):<12}{show_bytes(t.peak_bytes):>12}{show_bytes(t.peak_bytes - resident):>17}"
            f"{t.share:>9.3f}{show_seconds(t.step_s):>11}{show_share(t.added_share):>9}{t.rebuilt_ops:>10,}"
        )
    lines += wrapped(
        f"Peaks are before placement, {show_bytes(resident)} resident included; times are predicted for this machine.",
        "",
        "",
    )
    return lines


def _picture(frontier: Frontier) -> list[str]:
    """Up: the peak above resident, of eager's. Across: added time. The line is the lowest peak for that much time."""
    rows = frontier.rows
    shares, times = [t.share for t in rows], [t.added_share for t in rows]
    top, bottom, most = max(shares), min(shares), max(max(times), 1e-9)
    cells = [[" "] * COLUMNS for _ in range(ROWS)]

    def x(t: Tradeoff) -> int:
        return round((COLUMNS - 1) * t.added_share / most)

    def y(t: Tradeoff) -> int:
        return round((ROWS - 1) * (top - t.share) / max(top - bottom, 1e-9))

    for here, after in zip(frontier.points, frontier.points[1:], strict=False):
        for column in range(x(here), x(after) + 1):
            cells[y(here)][column] = "."
        for row in range(y(here) + 1, y(after)):
            cells[row][x(after)] = ":"
    for t in rows:
        cells[y(t)][x(t)] = "A" if t == frontier.auto else "o"
    lines = [heading("Peak above resident, x eager, against added time (A: auto)")]
    for row, line in enumerate(cells):
        label = f"{top - (top - bottom) * row / (ROWS - 1):.2f}" if row % 2 == 0 else ""
        lines.append(f"{label:>8} |{''.join(line)}")
    lines.append(f"{'':>8} +{'-' * COLUMNS}")
    axis = [" "] * (WIDTH - 10)
    for tick in share_ticks(most):
        text, at = f"{100 * tick:.3g} %", round((COLUMNS - 1) * tick / most)
        axis[at : at + len(text)] = text
    lines.append(" " * 10 + "".join(axis[: WIDTH - 10]))
    return lines


def _again(frontier: Frontier) -> list[str]:
    lines = [heading("What is run again")]
    for t in frontier.rows:
        # A kind and its count stay on one line.
        text = show_kinds(t.rebuilt).replace(" x", "\0x") or "nothing"
        count = show_count(t.rebuilt_ops, "op") + ": " if t.rebuilt_ops else ""
        lines += [line.replace("\0", " ") for line in wrapped(count + text, f"{frontier.name(t):<12}", " " * 12)]
    return lines

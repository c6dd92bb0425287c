"""A report in, one self-contained page out: a picture of the arena over time, bytes alive, and the tables.

The page loads nothing, every text from the user's code is escaped, and its size stays bounded for any plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from takeback.compiler.explain.frontier_html import curve_of, lead_of
from takeback.compiler.explain.kernels_html import kernels_lead, kernels_of
from takeback.compiler.explain.ledger import Entry
from takeback.compiler.explain.page import (
    CURVE_HEIGHT,
    Axes,
    cards,
    explained,
    page,
    section,
    stretched,
    table,
    text_of,
)
from takeback.compiler.explain.peak_html import bar_of, tips_lead, tips_of
from takeback.compiler.explain.report import Report
from takeback.compiler.explain.text import (
    MEANING,
    ByReason,
    added_time,
    arena_row,
    at_peak,
    copy_groups,
    fates,
    headline,
    once,
    peak_position,
    plan_columns,
    plan_rows,
    refusal_groups,
    short_line,
    show_bytes,
    show_count,
)

ARENA_HEIGHT = 460
MOST_RECTANGLES = 6000
LEAST_HEIGHT = 0.4  # in pixels: what is lower cannot be seen
MOST_POINTS = 2000
MOST_ROWS = 40
MOST_VALUES = 16


def as_html(report: Report) -> str:
    position = peak_position(report)
    owners = at_peak(report)
    frontier = report.advice.frontier
    parts = [
        _cards(report),
        section("What makes the peak", bar_of(report), ""),
        section("What you can do", tips_of(report), tips_lead(report)),
        section("Less memory against more time", curve_of(frontier), lead_of(frontier)) if frontier else "",
        section("Bytes alive above resident", _curves(report), ""),
        section("The arena", _arena(report), _legend(report)),
        section("Plans", _plans(report), f"<p>{text_of(_spent(report))}</p>"),
        section("Kernels", kernels_of(report), kernels_lead(report)),
        section("Fates", _fates(report), ""),
        section(
            "Largest values at the peak",
            _largest(owners[:MOST_VALUES]),
            f"<p>op {position:,} of {report.ops:,}; {len(owners):,} values own bytes there.</p>",
        ),
        section("Copies", _groups(copy_groups(report)), "<p>What the step still copies, and why.</p>"),
        section("Refusals", _groups(refusal_groups(report)), "<p>Decisions not taken, and why.</p>"),
        section("Resident", _resident(report), "<p>Alive between steps anyway; the same in eager.</p>"),
    ]
    notes = "".join(f"<p class=note>{text_of(note)}</p>" for note in report.notes)
    sub = f"{report.title or 'a step'}; {report.ops:,} ops, torch {report.torch_version}"
    return page(f"takeback: {report.title or 'report'}", sub, [*parts, notes])


# -- headline ----------------------------------------------------------------------------------------------------


def _cards(report: Report) -> str:
    (_, peak, eager, ratio), (_, above, eager_above, above_ratio) = headline(report)
    measured = report.measured
    served = f"{measured.served:,} served by the arena" if measured else "predicted"
    if not report.has_arena:
        served = "of the device's own allocator"
    shown = [
        ("peak", peak, f"{ratio} of eager's {eager}"),
        ("above resident", above, f"{above_ratio} of eager's {eager_above}"),
        arena_row(report),
        ("allocations per step", f"{report.allocations_per_step:,}", served),
        ("copied per step", show_bytes(report.copied_bytes), "reasons below"),
    ]
    if report.rebuilt_ops:
        shown.append(("run again per step", show_count(report.rebuilt_ops, "op"), added_time(report)))
    return cards(shown)


# -- pictures ----------------------------------------------------------------------------------------------------


def _arena(report: Report) -> str:
    placed = [
        e
        for e in report.ledger
        if e.offset_bytes is not None and e.start is not None and e.end is not None and e.size_bytes
    ]
    if not placed:
        return ""
    span = max(report.ops, max(e.end or 0 for e in placed))
    axes = Axes(span, report.arena_bytes, ARENA_HEIGHT, report.update_at)
    seen = [e for e in placed if ARENA_HEIGHT * e.size_bytes / axes.top_bytes >= LEAST_HEIGHT]
    largest = sorted(seen, key=lambda e: -e.size_bytes * ((e.end or 0) - (e.start or 0)))[:MOST_RECTANGLES]
    # A value written onto another lies on top of it from where it starts; scratch on top of all.
    drawn = sorted(largest, key=lambda e: (e.start or 0, -(e.end or 0)))
    body = "".join(_rectangle(e, axes) for e in drawn)
    peak = peak_position(report)
    x = f"{axes.x(peak + 0.5):.2f}%"
    body += f'<line class="peak" x1="{x}" x2="{x}" y1="0" y2="100%"/>'
    near_edge = peak < 0.1 * axes.span or peak > 0.9 * axes.span
    body += axes.label(axes.x(0), "op 0", "start")
    body += "" if near_edge else axes.label(axes.x(peak + 0.5), f"peak, op {peak:,}")
    skipped = len(placed) - len(drawn)
    hidden = f" {skipped:,} values too small to see are not drawn." if skipped else ""
    end = "the update" if axes.tail_at is not None else f"op {report.ops:,}"
    body += axes.label(axes.x(axes.span), end, "end")
    idle = text_of(f"Across: the ops of the step. Up: bytes of the arena. Point at a value to see what it is.{hidden}")
    return (
        '<input id="find" type="search" placeholder="find: a module, an op, a line" aria-label="find values">'
        f'<p class="readout" id="readout" aria-live="polite" data-idle="{idle}">{idle}</p>'
        + axes.picture("the arena over the step; left and right go from value to value", body, ident="arena")
    )


def _rectangle(e: Entry, axes: Axes) -> str:
    start, end, offset = e.start or 0, e.end or 0, e.offset_bytes or 0
    x, y = axes.x(start), axes.y(offset + e.size_bytes)
    width, height = axes.x(end) - x, axes.y(offset) - y
    line = short_line(e.line)
    where = f" at {line}" if line else ""
    module = f"{e.module}: " if e.module else ""
    title = f"{module}{e.op}{where}, {show_bytes(e.size_bytes)}, {e.fate.value}, ops {start} to {end} ({e.value})"
    return (
        f'<rect class="{e.fate.value}" x="{x:.2f}%" y="{y:.2f}%" width="{max(width, 0.05):.2f}%" '
        f'height="{height:.2f}%"><title>{text_of(title)}</title></rect>'
    )


def _legend(report: Report) -> str:
    items = "".join(
        f'<span class="key"><svg width="14" height="14"><rect class="{fate.value}" width="14" height="14"/></svg>'
        f"{explained(fate.value)}</span>"
        for fate in dict.fromkeys(e.fate for e in report.ledger if e.offset_bytes is not None)
    )
    return f"<p class=legend>{items}</p>"


def _curves(report: Report) -> str:
    ours, eager = report.peak_curve, report.eager_curve
    if not ours or not eager:
        return ""
    top = max(max(ours), max(eager))
    axes = Axes(1.0, top, CURVE_HEIGHT)
    paths = ""
    for name, levels, tail_at in (("eager", eager, report.eager_update_at), ("ours", ours, report.update_at)):
        points = _steps(levels, Axes(len(levels), top, CURVE_HEIGHT, tail_at))
        paths += f'<path class="area {name}" d="M0,100 L{points} L100,100 Z"/>'
        paths += (
            f'<path class="curve {name}" d="M{points}"><title>{name}: {show_bytes(max(levels))} at most</title></path>'
        )
    body = (
        stretched(paths)
        + axes.label(axes.x(0), "start of the step", "start")
        + axes.label(axes.x(1), "end of the step", "end")
    )
    legend = "".join(
        f'<span class="key"><svg width="22" height="14"><path class="curve {name}" d="M1,7 L21,7"/></svg>{text}</span>'
        for name, text in (
            ("ours", f"takeback, {show_bytes(max(ours))} at most"),
            ("eager", f"eager, {show_bytes(max(eager))} at most"),
        )
    )
    return f"<p class=legend>{legend}</p>" + axes.picture("bytes alive during the step", body)


def _steps(levels: Sequence[int], axes: Axes) -> str:
    """A staircase. Long ones keep the most of each run of ops, so that the peak stays."""
    run = -(-len(levels) // MOST_POINTS)
    kept = [max(levels[i : i + run]) for i in range(0, len(levels), run)]
    points = []
    for i, level in enumerate(kept):
        y = f"{axes.y(level):.2f}"
        points.append(f"{axes.x(i * run):.2f},{y} {axes.x(min((i + 1) * run, len(levels))):.2f},{y}")
    return " ".join(points)


# -- tables ------------------------------------------------------------------------------------------------------


def _plans(report: Report) -> str:
    rows, columns = plan_rows(report)[:MOST_ROWS], plan_columns(report)
    return table(columns, rows, frozenset(range(1, len(columns) - 1))) if rows else ""


def _spent(report: Report) -> str:
    done_once = once(report)
    return f"Seconds that making each took{f'; {done_once}' if done_once else ''}."


def _fates(report: Report) -> str:
    rows = [(fate.value, f"{count:,}", show_bytes(size), MEANING[fate]) for fate, count, size in fates(report)]
    return table(("fate", "values", "bytes", ""), rows, frozenset({1, 2})) if rows else ""


def _largest(entries: Sequence[Entry]) -> str:
    rows = [
        (e.module or "-", e.op, short_line(e.line), e.fate.value, show_bytes(e.size_bytes), e.reason, e.value)
        for e in entries
    ]
    header = ("module", "op", "line", "fate", "bytes", "reason", "value")
    return table(header, rows, frozenset({4})) if rows else ""


def _groups(groups: Sequence[ByReason]) -> str:
    rows = [(f"{g.count:,}", show_bytes(g.size_bytes), g.decision, g.reason, g.example) for g in groups[:MOST_ROWS]]
    return table(("count", "bytes", "decision", "reason", "largest"), rows, frozenset({0, 1})) if rows else ""


def _resident(report: Report) -> str:
    rows = [(role, show_bytes(size)) for role, size in report.resident.items()]
    return table(("role", "bytes"), rows, frozenset({1})) if rows else ""

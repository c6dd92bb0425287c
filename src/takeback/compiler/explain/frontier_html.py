"""A frontier in, one self-contained page out: the curve of peak against added time, and the table behind it."""

from __future__ import annotations

from takeback.compiler.explain.frontier import NOTHING, Frontier, Tradeoff, share_ticks, show_kinds, show_seconds
from takeback.compiler.explain.page import CURVE_HEIGHT, Axes, cards, page, section, stretched, table, text_of
from takeback.compiler.explain.text import show_bytes, show_count, show_share

HEIGHT = CURVE_HEIGHT + 140
ROOM = 1.06
"""The axes go on a little behind the last point."""


def as_html(frontier: Frontier) -> str:
    parts = [
        _cards(frontier),
        section("Peak above resident against added time", curve_of(frontier), lead_of(frontier)),
        section("Points", _points(frontier), "<p>What to ask for, and what the step then comes to, predicted.</p>"),
    ]
    return page("takeback frontier", f"peak against time, torch {frontier.torch_version}", parts)


def _cards(frontier: Frontier) -> str:
    least = frontier.points[-1]
    shown = [("keep", frontier.points[0]), ("auto", frontier.auto), ("min", least)]
    eager = frontier.eager_peak_bytes - frontier.resident_bytes
    return cards(
        [
            ("eager, above resident", show_bytes(eager), f"{show_bytes(frontier.eager_peak_bytes)} in all"),
            *(
                (
                    f'memory="{memory}"',
                    show_bytes(t.peak_bytes - frontier.resident_bytes),
                    f"{t.share:.3f} of eager's, {show_share(t.added_share)} more time",
                )
                for memory, t in shown
            ),
        ]
    )


def lead_of(frontier: Frontier) -> str:
    if len(frontier.points) == 1:
        return f"<p>{text_of(NOTHING)}</p>"
    return (
        "<p>Each dot is a choice of what to run again. A budget between two dots gets the lower one. "
        "Point at a dot to see what it is.</p>"
    )


def curve_of(frontier: Frontier) -> str:
    resident = frontier.resident_bytes
    eager = frontier.eager_peak_bytes - resident
    most = max(max(t.added_share for t in frontier.rows), 1e-3) * ROOM
    top = max(eager, *(t.peak_bytes - resident for t in frontier.rows))
    axes = Axes(most, int(top * ROOM), HEIGHT)
    body = "".join(axes.label(axes.x(tick), f"{100 * tick:.3g} %") for tick in share_ticks(most))
    y = f"{axes.y(eager):.2f}%"
    body += f'<line class="limit" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
    body += f'<text x="100%" y="{y}" dy="-6" text-anchor="end">eager</text>'
    corners: list[str] = []
    for t in frontier.points:
        x = f"{axes.x(t.added_share):.2f}"
        if corners:
            corners.append(f"{x},{corners[-1].partition(',')[2]}")
        corners.append(f"{x},{axes.y(t.peak_bytes - resident):.2f}")
    corners.append(f"100,{corners[-1].partition(',')[2]}")
    path, left = " ".join(corners), corners[0].partition(",")[0]
    body += stretched(
        f'<path class="area ours" d="M{left},100 L{path} L100,100 Z"/><path class="curve ours" d="M{path}"/>'
    )
    body += "".join(_dot(frontier, t, axes) for t in frontier.rows)
    return axes.picture("peak above resident against added time", body)


def _dot(frontier: Frontier, t: Tradeoff, axes: Axes) -> str:
    above = t.peak_bytes - frontier.resident_bytes
    x, y = f"{axes.x(t.added_share):.2f}%", f"{axes.y(above):.2f}%"
    auto = t == frontier.auto
    name = frontier.name(t)
    again = f": {show_kinds(t.rebuilt)}" if t.rebuilt else ""
    title = (
        f"{name}: {show_bytes(above)} above resident, {t.share:.3f} of eager's, {show_share(t.added_share)} more time; "
        f"{show_count(t.rebuilt_ops, 'op')} run again{again}"
    )
    label = ""
    if t.memory == "keep":
        label = f'<text x="{x}" y="{y}" dx="8" dy="-9">{text_of(name)}</text>'
    elif auto or t.memory == "min":  # below the curve and to the left there is nothing else
        label = f'<text x="{x}" y="{y}" dx="-6" dy="18" text-anchor="end">{text_of(name)}</text>'
    return (
        f'<circle class="dot{" auto" if auto else ""}" cx="{x}" cy="{y}" r="{7 if auto else 5}">'
        f"<title>{text_of(title)}</title></circle>{label}"
    )


def _points(frontier: Frontier) -> str:
    resident = frontier.resident_bytes
    rows = [
        (
            frontier.name(t),
            show_bytes(t.peak_bytes),
            show_bytes(t.peak_bytes - resident),
            f"{t.share:.3f}",
            show_seconds(t.step_s),
            show_share(t.added_share),
            f"{t.rebuilt_ops:,}",
            show_kinds(t.rebuilt),
        )
        for t in frontier.rows
    ]
    header = ("memory", "peak", "above resident", "x eager", "step", "added", "run again", "")
    return table(header, rows, frozenset(range(1, 7)))

"""A report in, one self-contained page out: a picture of the arena over time, bytes alive, and the tables.

The page loads nothing, every text from the user's code is escaped, and its size stays bounded for any plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from takeback.compiler.explain.ledger import Entry
from takeback.compiler.explain.report import Report
from takeback.compiler.explain.text import (
    MEANING,
    PLAN_COLUMNS,
    ByReason,
    added_time,
    arena_row,
    at_peak,
    clean,
    copy_groups,
    fates,
    headline,
    once,
    peak_position,
    plan_rows,
    refusal_groups,
    short_line,
    show_bytes,
    show_count,
)

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1100, 84, 12, 12, 30
ARENA_HEIGHT, CURVE_HEIGHT = 460, 240
MOST_RECTANGLES = 6000
LEAST_HEIGHT = 0.4  # in pixels: what is lower cannot be seen
MOST_POINTS = 2000
MOST_ROWS = 40
MOST_VALUES = 16


def as_html(report: Report) -> str:
    position = peak_position(report)
    owners = at_peak(report)
    parts = [
        _cards(report),
        section("The arena", _arena(report), _legend(report)),
        section("Bytes alive above resident", _curves(report), ""),
        section("Plans", _plans(report), f"<p>Seconds that making each took. {text_of(once(report))}</p>"),
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
    return page("takeback report", f"{report.ops:,} ops, torch {report.torch_version}", [notes, *parts])


# -- what the page of a frontier shares --------------------------------------------------------------------------


def page(title: str, sub: str, parts: Sequence[str]) -> str:
    """A whole page around parts that are HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text_of(title)}</title>\n<style>{_STYLE}</style></head>\n<body><main>\n"
        f"<h1>takeback</h1><p class=sub>{text_of(sub)}</p>\n"
        + "\n".join(parts)
        + f"\n</main><script>{_SCRIPT}</script></body></html>\n"
    )


def text_of(text: object) -> str:
    return escape(clean(str(text)))


def section(title: str, body: str, lead: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{lead}{body}</section>" if body else ""


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


def cards(shown: Iterable[tuple[str, str, str]]) -> str:
    """(name, figure, remark) side by side."""
    return (
        "<div class=cards>"
        + "".join(
            f"<div class=card><div class=name>{text_of(name)}</div><div class=figure>{text_of(figure)}</div>"
            f"<div class=sub>{text_of(sub)}</div></div>"
            for name, figure, sub in shown
        )
        + "</div>"
    )


# -- pictures ----------------------------------------------------------------------------------------------------


class Axes:
    """Maps ops and bytes onto the pixels of one picture; y grows upwards."""

    def __init__(self, span: float, top_bytes: int, height: int) -> None:
        self.span, self.top_bytes, self.height = max(span, 1e-9), max(top_bytes, 1), height
        self.width = WIDTH - LEFT - RIGHT
        self.rows = height - TOP - BOTTOM

    def x(self, time: float) -> float:
        return LEFT + self.width * time / self.span

    def y(self, size_bytes: float) -> float:
        return TOP + self.rows * (1 - size_bytes / self.top_bytes)

    def grid(self) -> str:
        lines = []
        for value in _ticks(self.top_bytes):
            y = f"{self.y(value):.1f}"
            lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            lines.append(f'<text class="y" x="{LEFT - 8}" y="{y}">{_tick_label(value)}</text>')
        return "".join(lines)

    def picture(self, name: str, body: str) -> str:
        return (
            f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-label="{escape(name)}">{self.grid()}{body}</svg></div>'
        )

    def label(self, x: float, text: str, anchor: str = "middle") -> str:
        return f'<text class="x" x="{x:.1f}" y="{self.height - 9}" text-anchor="{anchor}">{escape(text)}</text>'


def _tick_label(value: float) -> str:
    return show_bytes(value).replace(".00 ", " ").replace(".0 ", " ")


def _ticks(top_bytes: int) -> list[int]:
    """0 and a few round numbers of bytes up to the top."""
    step = 1
    while top_bytes / step > 6:
        step *= 2
    return list(range(0, top_bytes + 1, step))


def _arena(report: Report) -> str:
    placed = [
        e
        for e in report.ledger
        if e.offset_bytes is not None and e.start is not None and e.end is not None and e.size_bytes
    ]
    if not placed:
        return ""
    axes = Axes(max(report.ops, max(e.end or 0 for e in placed)), report.arena_bytes, ARENA_HEIGHT)
    seen = [e for e in placed if axes.rows * e.size_bytes / axes.top_bytes >= LEAST_HEIGHT]
    largest = sorted(seen, key=lambda e: -e.size_bytes * ((e.end or 0) - (e.start or 0)))[:MOST_RECTANGLES]
    # A value written onto another lies on top of it from where it starts; scratch on top of all.
    drawn = sorted(largest, key=lambda e: (e.start or 0, -(e.end or 0)))
    body = "".join(_rectangle(e, axes) for e in drawn)
    peak = peak_position(report)
    x = f"{axes.x(peak + 0.5):.1f}"
    body += f'<line class="peak" x1="{x}" x2="{x}" y1="{TOP}" y2="{ARENA_HEIGHT - BOTTOM}"/>'
    near_edge = peak < 0.1 * axes.span or peak > 0.9 * axes.span
    body += axes.label(axes.x(0), "op 0", "start") + axes.label(axes.x(axes.span), f"op {report.ops:,}", "end")
    body += "" if near_edge else axes.label(axes.x(peak + 0.5), f"peak, op {peak:,}")
    skipped = len(placed) - len(drawn)
    hidden = f" {skipped:,} values too small to see are not drawn." if skipped else ""
    return (
        f'<p class="readout" id="readout">Across: the ops of the step. Up: bytes of the arena. '
        f"Point at a value to see what it is.{hidden}</p>" + axes.picture("the arena over the step", body)
    )


def _rectangle(e: Entry, axes: Axes) -> str:
    start, end, offset = e.start or 0, e.end or 0, e.offset_bytes or 0
    x, y = axes.x(start), axes.y(offset + e.size_bytes)
    width, height = axes.x(end) - x, axes.y(offset) - y
    line = short_line(e.line)
    where = f" at {line}" if line else ""
    title = f"{e.value}, {show_bytes(e.size_bytes)}, {e.fate.value}: {e.op}{where}, ops {start} to {end}"
    return (
        f'<rect class="{e.fate.value}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" '
        f'height="{height:.1f}"><title>{text_of(title)}</title></rect>'
    )


def _legend(report: Report) -> str:
    items = "".join(
        f'<span class="key"><svg width="14" height="14"><rect class="{fate.value}" width="14" height="14"/></svg>'
        f"{fate.value}</span>"
        for fate in dict.fromkeys(e.fate for e in report.ledger if e.offset_bytes is not None)
    )
    return f"<p class=legend>{items}</p>"


def _curves(report: Report) -> str:
    ours, eager = report.peak_curve, report.eager_curve
    if not ours or not eager:
        return ""
    top = max(max(ours), max(eager))
    axes = Axes(1.0, top, CURVE_HEIGHT)
    body = ""
    for name, levels in (("eager", eager), ("ours", ours)):
        points = _steps(levels, axes)
        floor = f"{axes.y(0):.1f}"
        body += f'<path class="area {name}" d="M{LEFT},{floor} L{points} L{WIDTH - RIGHT},{floor} Z"/>'
        body += (
            f'<path class="curve {name}" d="M{points}"><title>{name}: {show_bytes(max(levels))} at most</title></path>'
        )
    body += axes.label(axes.x(0), "start of the step", "start") + axes.label(axes.x(1), "end of the step", "end")
    legend = "".join(
        f'<span class="key"><svg width="22" height="14"><path class="curve {name}" d="M1,7 L21,7"/></svg>{text}</span>'
        for name, text in (
            ("ours", f"takeback, {show_bytes(max(ours))} at most"),
            ("eager", f"eager, {show_bytes(max(eager))} at most"),
        )
    )
    return f"<p class=legend>{legend}</p>" + axes.picture("bytes alive during the step", body)


def _steps(levels: Sequence[int], axes: Axes) -> str:
    """A staircase over 0 to 1. Long ones keep the most of each run of ops, so that the peak stays."""
    run = -(-len(levels) // MOST_POINTS)
    kept = [max(levels[i : i + run]) for i in range(0, len(levels), run)]
    points = []
    for i, level in enumerate(kept):
        y = f"{axes.y(level):.1f}"
        points.append(f"{axes.x(i / len(kept)):.1f},{y} {axes.x((i + 1) / len(kept)):.1f},{y}")
    return " ".join(points)


# -- tables ------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int]) -> str:
    """Cells are escaped here, and only here."""

    def cell(tag: str, index: int, text: str) -> str:
        return f"<{tag}{' class=right' if index in right else ''}>{text_of(text)}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(header))
    body = "".join("<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _plans(report: Report) -> str:
    rows = plan_rows(report)[:MOST_ROWS]
    return table(PLAN_COLUMNS, rows, frozenset(range(1, len(PLAN_COLUMNS) - 1))) if rows else ""


def _fates(report: Report) -> str:
    rows = [(fate.value, f"{count:,}", show_bytes(size), MEANING[fate]) for fate, count, size in fates(report)]
    return table(("fate", "values", "bytes", ""), rows, frozenset({1, 2})) if rows else ""


def _largest(entries: Sequence[Entry]) -> str:
    rows = [(e.value, e.op, short_line(e.line), e.fate.value, show_bytes(e.size_bytes), e.reason) for e in entries]
    return table(("value", "op", "line", "fate", "bytes", "reason"), rows, frozenset({4})) if rows else ""


def _groups(groups: Sequence[ByReason]) -> str:
    rows = [(f"{g.count:,}", show_bytes(g.size_bytes), g.decision, g.reason, g.example) for g in groups[:MOST_ROWS]]
    return table(("count", "bytes", "decision", "reason", "largest"), rows, frozenset({0, 1})) if rows else ""


def _resident(report: Report) -> str:
    rows = [(role, show_bytes(size)) for role, size in report.resident.items()]
    return table(("role", "bytes"), rows, frozenset({1})) if rows else ""


_STYLE = """
:root{color-scheme:light dark;--page:#f7f7f5;--card:#fff;--ink:#1c1f24;--dim:#666c76;--line:#e2e2dd;--grid:#ecece7;
--moved:#2a9d8f;--overwritten:#e07a3f;--packed:#8367c7;--placed:#4c7fb8;--recomputed:#c2a83e;--copied:#c8384b;
--scratch:#b9bec7;--passed:#7a4a2b;--ours:#2f6db3;--eager:#d0713a}
@media(prefers-color-scheme:dark){:root{--page:#15171a;--card:#1e2125;--ink:#e8e9eb;--dim:#9aa1ab;--line:#33373d;
--grid:#2a2e33;--moved:#3fbfae;--overwritten:#e58a52;--packed:#9c83da;--placed:#5b8fca;--recomputed:#cdb650;
--copied:#e25b6c;--scratch:#596069;--passed:#a8714c;--ours:#6ba6e8;--eager:#e8935e}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:26px;margin:0;letter-spacing:-.01em}h2{font-size:17px;margin:0 0 6px}
.sub,section>p,.readout{color:var(--dim);font-size:13px}section>p,.readout{margin:0 0 10px}h1+.sub{margin:2px 0 18px}
.note{background:var(--card);border-left:3px solid var(--copied);padding:8px 12px;border-radius:4px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:12px;margin-bottom:16px}
.card,section{background:var(--card);border:1px solid var(--line);border-radius:10px}
.card{padding:14px 16px}.card .name{font-size:13px;color:var(--dim)}
.figure{font-size:25px;font-weight:650;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
section{padding:18px 20px;margin-bottom:16px}
.scroll{overflow-x:auto}svg{display:block}.scroll>svg{width:100%;min-width:640px;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px}.key{display:inline-flex;align-items:center;gap:6px}
.readout{min-height:20px;font-variant-numeric:tabular-nums}
rect{stroke:var(--card);stroke-width:.6;stroke-opacity:.7}
.scroll rect:hover{stroke:var(--ink);stroke-width:1.6;stroke-opacity:1}
.moved{fill:var(--moved)}.overwritten{fill:var(--overwritten)}.packed{fill:var(--packed)}.placed{fill:var(--placed)}
.recomputed{fill:var(--recomputed)}.copied{fill:var(--copied)}.scratch{fill:var(--scratch)}.passed{fill:var(--passed)}
.grid{stroke:var(--grid);stroke-width:1}.peak{stroke:var(--ink);stroke-width:1;stroke-dasharray:4 3;pointer-events:none}
text{fill:var(--dim);font-size:12px}.y{text-anchor:end;dominant-baseline:middle}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round}.curve.ours{stroke:var(--ours)}.curve.eager{stroke:var(--eager)}
.limit{stroke:var(--eager);stroke-width:1.4;stroke-dasharray:6 4}.limit+text{fill:var(--eager)}
.dot{fill:var(--ours);stroke:var(--card);stroke-width:1.5}.dot.auto{fill:var(--overwritten)}
.dot:hover{stroke:var(--ink)}.dot+text{font-size:12px}
.area{stroke:none}.area.ours{fill:var(--ours);fill-opacity:.16}.area.eager{fill:var(--eager);fill-opacity:.12}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;padding:5px 16px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
tbody tr:last-child td{border-bottom:0}td:first-child{white-space:nowrap}
th{color:var(--dim);font-weight:500}.right{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
"""

_SCRIPT = """
(() => {
  const out = document.getElementById("readout");
  if (!out) return;
  const svg = out.nextElementSibling, idle = out.textContent;
  svg.addEventListener("pointerover", (e) => {
    const title = e.target.tagName === "rect" ? e.target.querySelector("title") : null;
    out.textContent = title ? title.textContent : idle;
  });
  svg.addEventListener("pointerleave", () => { out.textContent = idle; });
})();
"""

"""The first two answers of a report's page: what makes the peak, as one named bar, and what can be done about it."""

from __future__ import annotations

from takeback.compiler.explain.composition import GAPS, KINDS, RESIDENT, PeakPart, composition
from takeback.compiler.explain.ledger import ACTIVATION, BACKWARD, GRADIENT, LOSS, SCRATCH, UPDATE
from takeback.compiler.explain.page import text_of
from takeback.compiler.explain.report import Report
from takeback.compiler.explain.text import NO_TIP, promise, show_bytes

_COLOURS = {
    RESIDENT["parameter"]: 0,
    "optimizer state": 1,
    KINDS[GRADIENT]: 5,
    KINDS[ACTIVATION]: 3,
    KINDS[LOSS]: 9,
    KINDS[BACKWARD]: 4,
    KINDS[SCRATCH]: 6,
    KINDS[UPDATE]: 8,
    GAPS: 7,
}
_OTHER = 2


def bar_of(report: Report) -> str:
    """One bar with all parts in their proportions, and the table of their names."""
    parts = composition(report)
    if not parts:
        return ""
    spans = "".join(
        f'<span class="{_colour(part)}" style="flex:{part.size_bytes}" title="{_said(part, report)}"></span>'
        for part in parts
    )
    rows = "".join(
        f'<tr><td><span class="swatch {_colour(part)}"></span> {text_of(part.label)}</td>'
        f"<td class=right>{text_of(show_bytes(part.size_bytes))}</td>"
        f"<td class=right>{100 * part.size_bytes / report.peak_bytes:.0f} %</td></tr>"
        for part in parts
    )
    return (
        f'<div class="bar" role="img" aria-label="what makes the peak">{spans}</div><table class=parts>{rows}</table>'
    )


def _colour(part: PeakPart) -> str:
    return f"k{_COLOURS.get(part.kind, _OTHER)}"


def _said(part: PeakPart, report: Report) -> str:
    share = 100 * part.size_bytes / report.peak_bytes
    return text_of(f"{part.label}: {show_bytes(part.size_bytes)}, {share:.0f} % of the peak")


def tips_of(report: Report) -> str:
    """What to paste, what it saves and costs, and why."""
    rows = "".join(
        f"<tr><td><code>{text_of(tip.do)}</code></td><td>{text_of(promise(tip))}</td><td>{text_of(tip.why)}</td></tr>"
        for tip in report.advice.tips
    )
    if rows:
        return f'<div class="scroll"><table class=tips>{rows}</table></div>'
    return f"<p>{text_of(NO_TIP)}</p>" if report.advisor is not None else ""


def tips_lead(report: Report) -> str:
    return "<p>Planned, not tried: each for this batch on this machine.</p>" if report.advice.tips else ""

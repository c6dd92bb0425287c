"""The report as a table of at most 80 columns."""

from __future__ import annotations

from takeback.explain.report import Report


def as_text(report: Report) -> str:
    return f"peak {report.peak_bytes}"

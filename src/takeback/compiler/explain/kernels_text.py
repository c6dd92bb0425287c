"""The kernels of a report's clusters as lines of its text: totals, the largest of them, and which ops keep eager's."""

from __future__ import annotations

from takeback.compiler.explain.kernels import KernelAccount
from takeback.compiler.explain.report import Report
from takeback.compiler.explain.text import (
    LARGEST,
    clean,
    group_lines,
    heading,
    left_out_groups,
    short_line,
    show_bytes,
    show_count,
    wrapped,
)

_START = 42  #: the column in which a kernel's ops begin


def kernel_lines(report: Report) -> list[str]:
    """Nothing for a step without clusters."""
    if not report.kernels:
        return []
    lines = [heading("Kernels"), *wrapped(totals(report), "", "")]
    lines.append(f"{'times':>6}{'in':>12}{'out':>12}  {'kernel':<10}ops (modules)")
    for kernel in report.kernels[:LARGEST]:
        figures = f"{kernel.count:>6,}{show_bytes(kernel.read_bytes):>12}{show_bytes(kernel.written_bytes):>12}"
        said = f"{kernel.op_names}{_where(kernel)}"
        lines += wrapped(clean(said), f"{figures}  {runs(kernel):<10}", " " * _START)
    rest = report.kernels[LARGEST:]
    if rest:
        moved = sum(kernel.moved_bytes for kernel in rest)
        lines.append(f"and {show_count(len(rest), 'smaller one')}, which move {show_bytes(moved)} in a step")
    left = left_out_groups(report)
    if left:
        lines += ["", "Ops that keep eager's kernels, with the bytes that they make:", *group_lines("left out", left)]
    return lines


def totals(report: Report) -> str:
    """One sentence."""
    clusters = sum(kernel.count for kernel in report.kernels)
    generated = sum(kernel.generated for kernel in report.kernels)
    lists = sum(kernel.is_for_lists for kernel in report.kernels)
    others = f", {lists} torch's own for lists of tensors" if lists else ""
    saved = report.launches_saved
    fewer = f": {saved:,} {'launch' if saved == 1 else 'launches'} fewer than one by one" if saved else ""
    whose = f"{generated or 'none'} of them generated{others}{fewer}"
    return (
        f"{show_count(report.ops_in_clusters, 'op')} run in {show_count(clusters, 'cluster')}, by "
        f"{show_count(len(report.kernels), 'distinct kernel')}, {whose}."
    )


def runs(kernel: KernelAccount) -> str:
    """Whose kernel it is, in a word."""
    if kernel.is_for_lists:
        return "for lists"
    return "generated" if kernel.generated else "waits" if kernel.waits else "eager's"


def _where(kernel: KernelAccount) -> str:
    place = kernel.modules[0] if kernel.modules else short_line(kernel.ops[-1].line)
    more = f" and {len(kernel.modules) - 1} more" if len(kernel.modules) > 1 else ""
    return f" ({place}{more})" if place else ""

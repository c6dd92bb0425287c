"""The kernels of a report's clusters as a section of its page: each can be unfolded, by mouse or keyboard, to its ops
with their modules and lines. Every text from the user's code is escaped, and the size stays bounded.
"""

from __future__ import annotations

from takeback.compiler.explain.kernels import KernelAccount
from takeback.compiler.explain.kernels_text import runs, totals
from takeback.compiler.explain.page import table, text_of
from takeback.compiler.explain.report import Report
from takeback.compiler.explain.text import left_out_groups, short_line, show_bytes, show_count

MOST_KERNELS, MOST_OPS, MOST_MODULES, MOST_GROUPS = 40, 48, 6, 40


def kernels_lead(report: Report) -> str:
    return f"<p>{text_of(totals(report))}</p>" if report.kernels else ""


def kernels_of(report: Report) -> str:
    """ "" for a step without clusters."""
    if not report.kernels:
        return ""
    shown = "".join(map(_kernel, report.kernels[:MOST_KERNELS]))
    rest = report.kernels[MOST_KERNELS:]
    if rest:
        moved = show_bytes(sum(kernel.moved_bytes for kernel in rest))
        shown += f"<p>and {show_count(len(rest), 'smaller one')}, which move {text_of(moved)} in a step</p>"
    return shown + _left_out(report)


def _kernel(kernel: KernelAccount) -> str:
    figures = f"{show_bytes(kernel.read_bytes)} in, {show_bytes(kernel.written_bytes)} out, {_whose(kernel)}"
    modules = ", ".join(kernel.modules[:MOST_MODULES]) or short_line(kernel.ops[-1].line)
    if len(kernel.modules) > MOST_MODULES:
        modules += f" and {len(kernel.modules) - MOST_MODULES} more"
    rows = [(op.name, op.module or "-", short_line(op.line)) for op in kernel.ops[:MOST_OPS]]
    hidden = len(kernel.ops) - len(rows)
    more = f"<p class=sub>and {show_count(hidden, 'op')} more</p>" if hidden else ""
    where = f"<span class=sub>{text_of(modules)}</span>" if modules else ""
    return (
        f"<details><summary>{kernel.count:,} × {text_of(kernel.op_names)}"
        f"<span class=sub>{text_of(figures)}</span>{where}</summary>"
        + table(("op", "module", "line"), rows, frozenset())
        + f"{more}</details>"
    )


def _whose(kernel: KernelAccount) -> str:
    if kernel.is_for_lists:
        return "torch's own kernel for lists of tensors"
    return runs(kernel) if kernel.generated else f"eager's kernels: {kernel.why}"


def _left_out(report: Report) -> str:
    groups = left_out_groups(report)[:MOST_GROUPS]
    if not groups:
        return ""
    rows = [(f"{g.count:,}", show_bytes(g.size_bytes), f"{g.reason} (largest: {g.example})") for g in groups]
    shown = table(("ops", "bytes", "why"), rows, frozenset({0, 1}))
    return f"<h3>Ops that keep eager's kernels</h3><div class=left>{shown}</div>"

"""A report in, a plain table of at most 80 columns out: what the user wants to know first comes first.

The same report gives the same text; a line of the user's code is shown as `file.py:66`, whatever its folder.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from takeback.compiler.explain.advice import OF_PEAK, Tip
from takeback.compiler.explain.ledger import Entry, Fate
from takeback.compiler.explain.report import Report
from takeback.compiler.ownership.facts import Refused
from takeback.compiler.passes.draft import Refusal
from takeback.errors import printable

WIDTH = 80
LARGEST = 8
"""How many values at the peak, and how many groups of copies and of refusals, are listed."""

OUT_OF_CLUSTERS = "fuse"
"""The decision that is refused of an op that keeps eager's kernel in mode fast. There are many of these."""

LANDED = "a cluster's kernel allocates its results, and they are copied to where they were planned"

IN_UPDATE = "in the optimizer's update"
"""Where an op of the update is: it has no line of the user's."""

MEANING = {
    Fate.MOVED: "eager copies it; here the bytes are handed on",
    Fate.OVERWRITTEN: "written onto an operand that dies",
    Fate.PACKED: "has a fixed place in a larger buffer",
    Fate.PLACED: "has bytes of its own",
    Fate.RECOMPUTED: "dropped over the peak, and made again here",
    Fate.COPIED: "copied, for the reasons below",
    Fate.SCRATCH: "taken inside an op",
    Fate.PASSED: "taken inside an op, from malloc",
}


@dataclass(frozen=True)
class ByReason:
    """Copies or refusals with one reason. `example` is the largest of them."""

    decision: str
    reason: str
    count: int
    size_bytes: int
    example: str


def as_text(report: Report) -> str:
    sections = [
        wrapped(clean(report.title), "", "") if report.title else [],
        _headline(report),
        _composition(report),
        _advice(report),
        _plans(report),
        _kernels(report),
        _fates(report),
        _at_peak(report),
        _groups("Copies", "copied", copy_groups(report)),
        _groups("Refusals", "refused", refusal_groups(report)),
        [line for note in report.notes for line in wrapped(clean(note), first="note: ", rest="      ")],
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in lines) for lines in sections if lines)


# -- what the page shares with the text --------------------------------------------------------------------------


def show_bytes(size_bytes: float) -> str:
    """`512 B`, `12.3 KiB`, `5.29 MiB`, `1.25 GiB`."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    for unit, digits in (("KiB", 1), ("MiB", 2), ("GiB", 2)):
        size_bytes /= 1024
        if round(size_bytes, digits) < 1024:
            return f"{size_bytes:.{digits}f} {unit}"
    return f"{size_bytes / 1024:.2f} TiB"


def show_ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}x" if theirs else "-"


def show_share(share: float) -> str:
    """`3.1 %`."""
    return f"{100 * share:.1f} %"


def show_count(count: int, what: str) -> str:
    """`1 op`, `24 ops`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def added_time(report: Report) -> str:
    """What rebuilding is predicted to cost, of the step without it."""
    return f"{show_share(report.added_s / report.step_s)} more time, predicted" if report.step_s else "time not known"


def short_line(line: str) -> str:
    """`file.py:66` of `/home/me/file.py:66`."""
    return clean(re.split(r"[/\\]", line)[-1])


def clean(text: str) -> str:
    """One printable line: a name or a path may hold anything."""
    return printable(str(text))


def headline(report: Report) -> list[tuple[str, str, str, str]]:
    """Rows of (figure, takeback, eager, ratio); the first one is what matters most."""
    ours, eager, resident = report.peak_bytes, report.eager_peak_bytes, report.resident_bytes
    return [
        ("peak", show_bytes(ours), show_bytes(eager), show_ratio(ours, eager)),
        (
            "above resident",
            show_bytes(ours - resident),
            show_bytes(eager - resident),
            show_ratio(ours - resident, eager - resident),
        ),
    ]


def peak_position(report: Report) -> int:
    """The first op at which the most bytes are alive."""
    return max(range(len(report.peak_curve)), key=report.peak_curve.__getitem__, default=0)


def at_peak(report: Report) -> list[Entry]:
    """The values that own bytes at the peak, largest first; bytes that change hands there count once."""
    position = peak_position(report)
    alive = [e for e in report.ledger if e.start is not None and e.end is not None and e.start <= position < e.end]
    owners: dict[str, Entry] = {}
    taken: list[tuple[int, int]] = []
    for e in sorted(alive, key=lambda e: (-e.size_bytes, -(e.start or 0))):
        if not e.size_bytes or e.owner in owners:
            continue
        if e.offset_bytes is not None:  # in an arena scratch may lie where its op's result comes later
            start, end = e.offset_bytes, e.offset_bytes + e.size_bytes
            if any(start < b and a < end for a, b in taken):
                continue
            taken.append((start, end))
        owners[e.owner] = e
    return list(owners.values())


def arena_row(report: Report) -> tuple[str, str, str]:
    """(name, size, remark) of the arena, or of what is alive at the peak where the device's own allocator places."""
    if not report.has_arena:
        return "alive at the peak", show_bytes(report.arena_bytes), "placed by the device's own allocator"
    bound = report.lower_bound_bytes
    remark = f"lower bound {show_bytes(bound)}, {show_ratio(report.arena_bytes, bound)}"
    return "arena", show_bytes(report.arena_bytes), remark


def fates(report: Report) -> list[tuple[Fate, int, int]]:
    """Fate, number of values and their bytes, for every fate that occurs."""
    rows = []
    for fate in Fate:
        sizes = [e.size_bytes for e in report.ledger if e.fate is fate]
        if sizes:
            rows.append((fate, len(sizes), sum(sizes)))
    return rows


def plan_columns(report: Report) -> tuple[str, ...]:
    """What `plan_rows` has; "compile" where kernels were generated."""
    generates = ("compile",) if report.kernels else ()
    return ("for", "peak", "record", "choose", "place", *generates, "write", "prove", "replays", "proved")


def plan_rows(report: Report) -> list[tuple[str, ...]]:
    """As `plan_columns`; seconds without their unit."""
    rows = []
    for plan in report.plans:
        spent = plan.spent
        compiling = (spent.kernels_s,) if report.kernels else ()
        stages = (spent.recording_s, spent.choosing_s, spent.placing_s, *compiling, spent.writing_s, spent.proving_s)
        seconds = (show_seconds(s) for s in stages)
        rows.append((plan.made_for, show_bytes(plan.peak_bytes), *seconds, f"{plan.replays:,}", plan.proved))
    return rows


def short_batch(made_for: str, width: int) -> str:
    """`16x59, 16` of `input_ids 16x59, attention_mask 16x59, labels 16`, where that is too long."""
    if len(made_for) <= width:
        return made_for
    return ", ".join(dict.fromkeys(part.rpartition(" ")[2] for part in made_for.split(", ")))


def once(report: Report) -> str:
    """What was done once and not for one plan, in words."""
    measuring = sum(plan.spent.measuring_s for plan in report.plans)
    parts = (("native code", report.loading_s), ("measuring this machine", measuring))
    said = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in parts if seconds >= 0.05)
    return f"once, and then in the cache: {said}" if said else ""


def show_seconds(seconds: float) -> str:
    """`0.4`, `12.3`, `123`."""
    return f"{seconds:.1f}" if seconds < 99.95 else f"{seconds:.0f}"


def copy_groups(report: Report) -> list[ByReason]:
    """The copies of the ledger by reason, most bytes first."""
    copied = [e for e in report.ledger if e.fate is Fate.COPIED]
    found = _grouped(copied, lambda e: ("copy", str(e.reason)), lambda e: _example(e.value, e.op, e.line))
    if not report.kernels or report.measured is None or not report.measured.landed_bytes:
        return found
    # Which ones is not counted; it is the results of clusters that come in bytes of their kernel's own.
    made = [e for e in report.ledger if e.op.startswith("cluster[") and e.fate not in (Fate.SCRATCH, Fate.PASSED)]
    example = max(made, key=lambda e: e.size_bytes, default=None)
    shown = _example(example.value, example.op, example.line) if example is not None else "clusters"
    landed = ByReason("copy", LANDED, report.measured.landed, report.measured.landed_bytes, shown)
    return sorted((*found, landed), key=lambda g: -g.size_bytes)


def refusal_groups(report: Report) -> list[ByReason]:
    """The refusals by decision and reason, most bytes first; those of the update, which nobody can change, last. What
    stayed out of clusters is not among them: see `left_out_groups`."""
    refusals = [r for r in report.refusals if r.decision != OUT_OF_CLUSTERS]
    others = grouped_refusals([r for r in refusals if not _is_of_update(r)])
    return others + grouped_refusals([r for r in refusals if _is_of_update(r)])


def left_out_groups(report: Report) -> list[ByReason]:
    """What stayed out of clusters, by reason, most bytes first."""
    return grouped_refusals([r for r in report.refusals if r.decision == OUT_OF_CLUSTERS])


def grouped_refusals(refusals: Sequence[Refusal]) -> list[ByReason]:
    """By decision and reason, most bytes first."""

    def example(r: Refusal) -> str:
        return _example("", r.op, IN_UPDATE if _is_of_update(r) else str(r.site or ""))

    return _grouped(refusals, lambda r: (r.decision, str(r.reason)), example)


def _is_of_update(refusal: Refusal) -> bool:
    """The update reads the caller's parameters and state, and no line of the user's runs it."""
    return refusal.site is None and refusal.reason == Refused.BORROWED


def _example(value: str, op: str, line: str) -> str:
    where = f" {IN_UPDATE}" if line == IN_UPDATE else f" at {short_line(line)}" if line else ""
    return f"{clean(value)} by {clean(op)}{where}" if value else f"{clean(op)}{where}"


def _grouped(
    rows: Sequence[Entry] | Sequence[Refusal],
    key: Callable[..., tuple[str, str]],
    example: Callable[..., str],
) -> list[ByReason]:
    groups: dict[tuple[str, str], list[Entry | Refusal]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    made = [
        ByReason(
            clean(decision),
            clean(reason),
            len(members),
            sum(m.size_bytes for m in members),
            example(max(members, key=lambda m: m.size_bytes)),
        )
        for (decision, reason), members in groups.items()
    ]
    return sorted(made, key=lambda g: -g.size_bytes)


# -- the sections ------------------------------------------------------------------------------------------------


def _headline(report: Report) -> list[str]:
    def row(name: str, ours: str, eager: str = "", ratio: str = "") -> str:
        return f"{name:<24}{ours:>14}{eager:>14}{ratio:>10}"

    def note(name: str, ours: str, text: str) -> list[str]:
        return wrapped(text, first=f"{name:<24}{ours:>14}    ", rest=" " * 42)

    lines = [row("", "takeback", "eager", "ratio")]
    (peak, *peaks), (above, *aboves) = headline(report)
    lines += [row(peak, *peaks), row(f"  {above}", *aboves), row("  resident", show_bytes(report.resident_bytes))]
    lines += [row(f"    {clean(role)}"[:24], show_bytes(size)) for role, size in report.resident.items()]
    lines += note(*arena_row(report))
    lines += note("allocations per step", f"{report.allocations_per_step:,}", _allocations(report))
    lines += note("copied per step", show_bytes(report.copied_bytes), "")
    if report.rebuilt_ops:
        lines += note("run again per step", show_count(report.rebuilt_ops, "op"), added_time(report))
    if report.eager_peak_at:
        op, _, line = report.eager_peak_at.partition(" ")
        lines += wrapped(f"eager peaks in {_example('', op, line)}; {report.ops:,} ops in the plan", "", "")
    return lines


def _allocations(report: Report) -> str:
    measured = report.measured
    if not report.placed:
        return "and those inside ops, not counted"
    if measured is None:
        return "predicted: " + ("no steady replay yet" if report.kernels else "nothing was replayed yet")
    outside = measured.misses + measured.passed + measured.worker_new
    return f"{report.allocations_per_step - outside:,} returned, {outside:,} inside ops"


def _composition(report: Report) -> list[str]:
    from takeback.compiler.explain.composition import composition

    parts = composition(report)
    if not parts:
        return []
    most = max(part.size_bytes for part in parts)
    lines = [heading("What makes the peak")]
    for part in parts:
        share = 100 * part.size_bytes / report.peak_bytes
        bar = "#" * max(round(20 * part.size_bytes / most), 1)
        lines.append(f"{_cut(part.label, 40):<40}{show_bytes(part.size_bytes):>12}{share:>4.0f} %  {bar}")
    return lines


def _advice(report: Report) -> list[str]:
    if report.advisor is None:
        return []
    lines = [heading("What you can do")]
    if "advice" not in vars(report):
        return [*lines, *wrapped(ASK, "", "")]
    tips = report.advice.tips
    if not tips:
        return [*lines, *wrapped(NO_TIP, "", "")]
    for tip in tips:
        do = clean(tip.do)
        if len(do) < _TIP_WIDTH:
            lines.append(f"{do:<{_TIP_WIDTH}}{promise(tip)}")
        else:  # what is to be pasted is not cut off
            lines += [*wrapped(do, "", "    "), f"{'':<{_TIP_WIDTH}}{promise(tip)}"]
        lines += wrapped(clean(tip.why), "    ", "    ")
    return lines


def promise(tip: Tip) -> str:
    """`-3.10 GiB of the peak, for 4.1 % more time`."""
    if not tip.saves_bytes:
        return "how much is not known here" if tip.saves_bytes is None else "less time; how much is not known here"
    saved = f"-{show_bytes(tip.saves_bytes)} {'of the peak' if tip.of == OF_PEAK else tip.of}"
    if tip.added_share is None:
        return saved
    more = round(100 * tip.added_share, 1)
    cost = "for no more time" if not more else f"for {abs(more):.1f} % {'more' if more > 0 else 'less'} time"
    return f"{saved}, {cost}"


_TIP_WIDTH = 28
ASK = "report.advice, or takeback explain, plans other settings and says what each would save and cost."
NO_TIP = "No other setting was found that would lower the peak by more than a percent."


def _plans(report: Report) -> list[str]:
    if not report.plans:
        return []
    lines = [heading("Plans, and the seconds that making each took")]
    compiling = (7,) if report.kernels else ()
    first = 19 - sum(width + 1 for width in compiling)
    rows = [(short_batch(made_for, first), *rest) for made_for, *rest in plan_rows(report)]
    lines += _table([plan_columns(report), *rows], (first, 10, 6, 6, 6, *compiling, 6, 6, 7, 6))
    return lines + wrapped(once(report), "", "") if once(report) else lines


def _fates(report: Report) -> list[str]:
    rows = fates(report)
    if not rows:
        return []
    lines = [heading("Fates"), f"{'fate':<12}{'values':>8}{'bytes':>12}"]
    for fate, count, size in rows:
        lines.append(f"{fate.value:<12}{count:>8,}{show_bytes(size):>12}   {MEANING[fate]}")
    return lines


def _at_peak(report: Report) -> list[str]:
    owners = at_peak(report)
    if not owners:
        return []
    shown = owners[:LARGEST]
    rows = [
        (e.value, e.op, e.module or short_line(e.line) or "-", e.fate.value, show_bytes(e.size_bytes)) for e in shown
    ]
    header = ("value", "op", "module or line", "fate", "bytes")
    lines = [heading(f"Largest values at the peak (op {peak_position(report)} of {report.ops})")]
    lines += _columns([header, *rows], most=(8, 18, 24, 11, 10))
    if len(owners) > len(shown):
        rest = sum(e.size_bytes for e in owners[len(shown) :])
        lines.append(f"and {len(owners) - len(shown):,} smaller ones: {show_bytes(rest)}")
    return lines


def _kernels(report: Report) -> list[str]:
    from takeback.compiler.explain.kernels_text import kernel_lines

    return kernel_lines(report)


def _groups(title: str, done: str, groups: Sequence[ByReason]) -> list[str]:
    return [heading(title), *group_lines(done, groups)] if groups else []


def group_lines(done: str, groups: Sequence[ByReason]) -> list[str]:
    """`12 x 1.00 MiB  reason (largest: op at line)` for each of the largest."""
    lines = []
    for g in groups[:LARGEST]:
        decision = "" if g.decision in ("copy", OUT_OF_CLUSTERS) else f"{g.decision}: "
        example = f" ({g.example})" if g.count == 1 else f" (largest: {g.example})"
        first = f"{g.count:>6,} x {show_bytes(g.size_bytes):>11}  "
        lines += wrapped(f"{decision}{g.reason}{example}", first, " " * len(first))
    if len(groups) > LARGEST:
        rest = groups[LARGEST:]
        count, size = sum(g.count for g in rest), sum(g.size_bytes for g in rest)
        lines.append(f"and {count:,} more {done} for {len(rest)} other reasons: {show_bytes(size)}")
    return lines


def heading(text: str) -> str:
    return f"-- {text} ".ljust(WIDTH, "-")


def wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False) or [
        first.rstrip()
    ]


def _columns(rows: Sequence[Sequence[str]], most: Sequence[int]) -> list[str]:
    """Left-aligned columns, the last one right-aligned; what is longer than its column's `most` is cut."""
    cut = [[_cut(cell, width) for cell, width in zip(row, most, strict=True)] for row in rows]
    widths = [max(len(row[i]) for row in cut) for i in range(len(most))]
    ends = [f"{row[-1]:>{widths[-1]}}" for row in cut]
    starts = ["  ".join(f"{c:<{w}}" for c, w in zip(row[:-1], widths[:-1], strict=True)) for row in cut]
    return [f"{start}  {end}" for start, end in zip(starts, ends, strict=True)]


def _table(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """The first column is left-aligned, and cut where it is too long; the others are right-aligned."""
    rest = ["".join(f" {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)) for row in rows]
    return [f"{_cut(row[0], widths[0]):<{widths[0]}}{end}" for row, end in zip(rows, rest, strict=True)]


def _cut(text: str, width: int) -> str:
    text = clean(text)
    return text if len(text) <= width else text[: width - 2] + ".."

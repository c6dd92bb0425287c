"""Writes docs/trust.md from the results of the long runs in benchmarks/results.

    python benchmarks/trust.py

tests/test_trust.py demands that the page is what this gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trust_faults
import trust_samples
from revision import told

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "trust.md"

_HEAD = """# What was tried, and what came of it

Long runs that look for wrong numbers, and for anything that is lost or grows. They have short parts in `make test`,
and some more, such as two processes that compile at once, in `make test-all`; all of it is `make trust`, which leaves
out what wants a GPU where there is none, and the large buffers where there is too little memory. This page is written
by `benchmarks/trust.py` from the results of the last runs.
"""

_CHECKS = """## Faults in plans

A plan runs only after it has passed these checks, also if it was read from the cache:

| check | what it proves |
|---|---|
| form | the program is one: every read has a writer, regions lie inside their buffers |
| meaning | the program after the passes gives what was recorded, whatever was moved, chunked, rebuilt or reordered |
| validator | no two items have the same bytes at the same time; packed slices lie where they belong |
| borrow check | every byte that is read, by an op or by the caller, was last written by the value that is meant |
| audit | on a GPU: each line of the generated code calls the op that is meant, on the bytes that are meant |

To see that they catch everything, faults are injected into valid plans of real recorded steps ({plans} plans, of
{least} to {most} ops, {fast} of them of mode fast, with {clusters} clusters; {streamed} are code for torch's
allocator). In some plan each of the {passes} passes has changed something. Whether a fault is harmful is found
without the checks: an oracle runs the broken plan with a tag for every byte, which says how the byte came about, and
compares what the step leaves behind; what the checks accept is also run for real, in poison mode, and every tensor is
compared with eager's, bit by bit (in mode fast, where clusters run with eager's kernels here: with the valid plan's).
Which elements of an operand a cluster reads for which of its results is found by changing them one by one. Broken
code is run in a process of its own, and the bytes that its names hold are counted after each op. A changed plan file
is read as a process would find it, half of them with a digest that fits.

| fault | injected | harmful | caught | harmless, accepted | harmless, rejected |
|---|--:|--:|--:|--:|--:|
{rows}

**Caught: {caught} of {harmful} harmful faults ({share}).** `tests/mutation/run_mutations.py`, seed {seed}, {date},
torch {torch}, Python {python}, {hardware}, {minutes} minutes{commit}.

What takes no part: how long an op needs its scratch is measured in a first replay, and no check could know it better. A
plan from the cache brings it along; the cache is private to the user, and each entry has a digest.
"""

_SOAK = """## A long training{title}

{steps} steps of a small model with dropout, running statistics and a shared weight, in {shapes} shapes that come
and go, of which {kept} have a plan at a time, beside an eager twin. Every loss was compared, and every {every} steps
all parameters, buffers and optimizer state{how}.

| | |
|---|--:|
| losses or tensors that differed{by} | {differences} |
| plans made, and dropped for others | {plans_made:,}, {dropped:,} |
| replays | {replays} |
| steps without a plan, in eager | {plain:,} |
| resident memory, from the second quarter to the last | {mib:+.2f} MiB of {resident:.0f} MiB |
| objects of Python's, from the second quarter to the last | {objects:+,.0f} of {all_objects} |

`benchmarks/soak.py{asked}`, {date}, torch {torch}, Python {python}, {device}, {minutes} minutes{commit}.{note}
"""

_NEAR = (
    ", within 1e-2 of their norm, plus 1e-6; then takeback went on from eager's. {doubled} losses or tensors\n"
    "were not that near, and no further from the same steps in double precision than twice what eager was"
)

_NEW_LENGTHS = """## Lengths that never come again

The same model on batches of 1 to {lengths} rows, {steps} steps of each. Torch keeps something for every shape
itself, so eager stands beside. In the mean over the second half of the lengths each leaves behind:

| | objects of Python's | resident memory |
|---|--:|--:|
{rows}

`benchmarks/new_lengths.py`, {date}, torch {torch}, Python {python}, {device}{commit}.
"""

_FAULTS = """## What may go wrong around a step

Each fault has its tests, which state what comes of it.

{table}
"""


def page() -> str:
    """The text of docs/trust.md."""
    sections: dict[str, Callable[[Any], str]] = {
        "mutations": _mutations,
        "op-samples": trust_samples.samples,
        "transformers-models": _models,
        "fuzz": _fuzz,
        "faults-around": lambda _: _FAULTS.format(table=trust_faults.table()),
        "interrupts": trust_faults.interrupts,
        "soak": _soak,
        "soak-fast": _soak,
        "new-lengths": _new_lengths,
        "soak-gpu": _gpu,
        "big-buffers": trust_samples.big,
    }
    parts = [_HEAD]
    for name, section in sections.items():
        file = RESULTS / f"{name}.json"
        if file.exists():
            parts.append(section(json.loads(file.read_text())))
        elif name == "faults-around":
            parts.append(section(None))
    return "\n".join(parts)


def _models(exact: dict[str, Any]) -> str:
    fast = RESULTS / "transformers-models-fast.json"
    found = {"exact": exact} | ({"fast": json.loads(fast.read_text())} if fast.exists() else {})
    return trust_samples.models(found)


def _gpu(found: dict[str, Any]) -> str:
    gradients = RESULTS / "gradients-fast-h200.json"
    return trust_samples.gpu(found, json.loads(gradients.read_text()) if gradients.exists() else None)


def _fuzz(found: dict[str, Any]) -> str:
    return trust_samples.fuzz(found, json.loads((RESULTS / "fuzz-traced.json").read_text()))


def _mutations(found: dict[str, Any]) -> str:
    columns = ("injected", "harmful", "caught", "harmless, accepted", "harmless, rejected")
    rows = [
        f"| {kind} | " + " | ".join(f"{counts.get(c, 0):,}" for c in columns) + " |"
        for kind, counts in {**found["kinds"], "**all**": found["total"]}.items()
    ]
    total = found["total"]
    ops = [plan["ops"] for plan in found["plans"]]
    return _CHECKS.format(
        plans=len(ops),
        least=min(ops),
        most=max(ops),
        fast=sum(plan["clusters"] > 0 for plan in found["plans"]),
        clusters=sum(plan["clusters"] for plan in found["plans"]),
        streamed=sum(plan["arena_bytes"] is None for plan in found["plans"]),
        passes=len(found["passes"]),
        rows="\n".join(rows),
        caught=f"{total['caught']:,}",
        harmful=f"{total['harmful']:,}",
        commit=told([found]),
        share=f"{total['caught'] / total['harmful']:.2%}",
        **{k: found[k] for k in ("seed", "date", "torch", "python", "hardware", "minutes")},
    )


def _soak(found: dict[str, Any]) -> str:
    growth = found["growth from the second quarter to the last"]
    fast = found.get("mode") == "fast"
    return _SOAK.format(
        commit=told([found["machine"]]),
        title=", in mode fast" if fast else "",
        how=_NEAR.format(**found) if fast else "",
        every=10 if fast else 100,
        note=f"\n{found['note']}" if "note" in found else "",
        by=" by more" if fast else " by a bit",
        asked=" --mode fast" if fast else "",
        steps=f"{found['steps']:,}",
        replays=f"{found['replays']:,}",
        mib=growth["resident_mib"],
        resident=found["resident_mib"][-1],
        objects=growth["objects"],
        all_objects=f"{found['objects'][-1]:,}",
        kept=max(found["plans"]),
        **{k: found[k] for k in ("shapes", "differences", "plans_made", "dropped", "plain", "date", "minutes")},
        **{k: found["machine"][k] for k in ("torch", "python", "device")},
    )


def _new_lengths(found: dict[str, Any]) -> str:
    left = found["left by a length"].items()
    names = {"eager": "eager", "exact": "takeback, mode exact", "fast": "takeback, mode fast"}
    rows = [f"| {names[system]} | {one['objects']:.1f} | {one['mib'] * 1024:.0f} KiB |" for system, one in left]
    return _NEW_LENGTHS.format(
        lengths=found["lengths"],
        steps=" or ".join(map(str, sorted(set(found["steps"].values())))),
        rows="\n".join(rows),
        date=found["date"],
        commit=told([found["machine"]]),
        **{k: found["machine"][k] for k in ("torch", "python", "device")},
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")

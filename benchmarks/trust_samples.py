"""The sections of docs/trust.md on samples, models, fuzzing, large buffers and a GPU: results in, text out."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from revision import told

_KERNELS = {"eager": "eager's kernels", "traced": "what Inductor is given", "generated": "Inductor's kernels"}
OUTCOMES = ("equal", "near", "refused", "wrong", "foreign exception")
LEAST = 0.1  #: of the groupings, or curves count as different

_SAMPLES = """## PyTorch's own samples

Every differentiable operator of `torch.testing`'s `op_db` and every module of its `module_db`, on the CPU in float32:
{steps} steps of SGD on values that change, one recorded and the others replayed, beside eager.{operands} "equal":
losses, parameters and buffers are eager's, bit by bit. "near" (in mode fast): no further from the same steps in
float64 than twice what eager is, plus {near:g} of a loss, of a tensor's change and of a hundredth of the tensor
itself (where a loss is in half precision: four times its rounding, in place of {near:g}). Where the steps do not run
in float64, draw other random numbers there, or have losses more than 1e-2 from eager's, eager is the measure. A
sample of which eager itself makes no step counts as refused.

| samples | memory | clusters run with | subjects | {heads} |
|---|---|---|--:|{lines}
{rows}

"what Inductor is given": the graphs that its kernels are made of, run op by op; each was compared with double
precision, as a kernel is. Inductor made {generated} kernels for the clusters of these steps; {given_up} more were given
up where they were compared, and eager's ran in their place.

Why samples were refused, in mode exact:

| reason | samples |
|---|---|
{refusals}

`benchmarks/op_samples.py`, {date}, torch {torch}, Python {python}, {device}{commit}.
"""

_MODELS = """## Models of transformers

Every architecture of transformers {transformers} that can be built tiny and trained by eager, 4 steps, without
downloads: [the whole table](models.md). "near" (in mode fast): {near}.
"as advised": refused as it comes, and right with the setting that the table names, which was tried. Rows
are of several runs; a model that was late on a busy machine keeps the row it had.

| mode | models | {heads} | refused | refused as they come |
|---|--:|{lines}--:|--:|
{rows}

The last column adds up "as advised" and "refused".
`benchmarks/transformers_models.py`, {date}, torch {torch}, Python {python}; {device}{commit}.{note}
"""

NEAR_MODELS = (
    "every loss within 1e-4 of eager's, plus 1e-6, and every tensor within 1e-4 of its change, plus 1e-5 of the change "
    "of all and 1e-6 of itself"
)

_FUZZ = """## Random programs

Programs drawn by hypothesis: up to 14 of {instructions} instructions (modules whose weights are shared, loops, views,
writes in place, other dtypes on the way, dropout, checkpoints, empty parts, shapes that depend on values, buffers
that are replaced), batches of six layouts whose row counts change from step to step, zero and one among them, three
optimizers or two at once, `memory=` "auto", "min" or "keep", with and without poison, early updates, clipping,
microbatches, `update=False`, a scaler and autocast; some end in a cross-entropy, of one of several forms. Each is
trained beside eager in both modes; mode fast with eager's kernels in its clusters. "near" (in mode fast): every
result, parameter, buffer and state of an optimizer is within 1e-3 of eager's, by norms, plus 1e-6; within 3e-2 where
something is computed in bfloat16{rule}. {traced}

| mode | programs | {heads} |
|---|--:|{lines}
{rows}

`tests/fuzz/run_fuzz.py`, seeds from {seed} on, {date}, torch {torch}, Python {python}, {minutes} minutes{commit}.{note}
"""

_BY_FLOAT64 = """. What is not (the gradient of a bias before a batch norm is zero but for rounding) is near if it
is no further from the same training in float64 than twice what eager's is, plus 1e-3 (or 3e-2) of itself, plus 1e-6;
where the training in float64 is another one (a result is further than 1e-2, or 3e-2, from eager's), it is wrong"""


IN_ITS_PLACE = ": in place of such a one eager's run."

_BIG = """## Large buffers

A step with {elements:,} elements in one buffer (2^31 are {limit:,}) and an arena of {gib:.1f} GiB, beside eager:
{differences} of loss, aux, gradient and parameters differed by a bit. `benchmarks/big_buffers.py`, {date},
torch {torch}, Python {python}, {device}, {threads} threads, {seconds} s{commit}.
"""

_GPU = """## Trainings on a GPU

{steps:,} steps of GPT-2 (124M, {shape} tokens) in mode fast and in eager, on the same batches from the same weights,
each with several seeds for dropout ({seeds} trainings in mode fast, {eagers} in eager). {curves}Most growth of a
training in mode fast, from the second quarter to the last: {growth}. {problems}
`benchmarks/soak_gpu.py`, {date}, torch {torch}, Python {python}, {device}{commit}.
{gradients}"""

_CURVES = """The mean loss curves are {ours:.4f} apart (root of the mean square, in means of a hundredth part of the
way); of all ways to deal the {count} curves into two groups, {chance:.0%} are as far apart or further, and less than
{least:.0%} would count as a difference. The median distance of a curve of mode fast from one of eager's is
{between:.4f}, of two of eager's {among}. Mean loss of the last tenth: takeback {last_ours}, eager {last_eager}.
{pairs}"""

_PAIRS = """With the same seed, takeback ended {low:+.3f} to {high:+.3f} from eager, and above it in {above} of {count}.
Chance {explains} that: {chance:.0%} of the groupings are as far apart, and a coin falls as one-sidedly in {coin:.0%}
of cases.
"""

_GRADIENTS = """
The gradients {show} bias. At {count} moments of a training of the same model the gradient of the same weights and batch
was compared with single precision's: in norm, mode fast was {fast_near:.4f} to {fast_far:.4f} of it off, eager
{eager_near:.4f} to {eager_far:.4f}, and eager further off in {further} of {count}. Along the gradient, where a bias
would show, mode fast was off by {fast:+.4f} in the mean (standard error {fast_error:.4f}), eager by {eager:+.4f}
({eager_error:.4f}). `benchmarks/fast_gradients.py`, {about}, torch {torch}, Python {python}, {device}{commit}.
"""


def samples(found: Mapping[str, Any]) -> str:
    first = next(iter(found.values()))
    rows = [_row(run, run["how"]) for run in found.values()]
    refused: dict[str, set[str]] = {}
    for run in (run for run in found.values() if run["how"]["mode"] == "exact"):
        for row in run["rows"]:
            if row["outcome"] == "refused":
                refused.setdefault(_reason(row["reason"]), set()).add(row["op"])
    ordered = sorted(refused.items(), key=lambda item: (-len(item[1]), item[0]))
    kernels = [run["kernels"] for run in found.values() if run["how"]["kernels"] == "generated"]
    return _SAMPLES.format(
        steps=first["how"]["steps"],
        operands=_operands(found.values()),
        near=1e-4,
        heads=" | ".join(OUTCOMES),
        lines="--:|" * len(OUTCOMES),
        rows="\n".join(rows),
        generated=f"{sum(k['generated'] for k in kernels):,}",
        given_up=f"{sum(k['given up'] for k in kernels):,}",
        refusals="\n".join(f"| {why} | {', '.join(sorted(names))} |" for why, names in ordered),
        date=max(run["date"] for run in found.values()),
        commit=told(run["machine"] for run in found.values()),
        **{k: first["machine"][k] for k in ("torch", "python", "device")},
    )


def _operands(runs: Iterable[Mapping[str, Any]]) -> str:
    """What of the samples varies; nothing of runs of before, in which whole numbers did not."""
    counted: collections.Counter[str] = collections.Counter()
    for run in runs:
        if "operands" not in run:
            return ""
        counted.update(run["operands"])
    whole, turned, floats, with_gradient = (
        f"{counted[name]:,}"
        for name in (
            "tensors of whole numbers",
            "of which other values in each step",
            "floating-point operands",
            "of which with a gradient",
        )
    )
    return (
        f" Of\n{floats} floating-point operands {with_gradient} have a gradient, and of {whole} tensors of whole "
        f"numbers {turned} have others in\neach step; the rest eager does not accept so. At least 2 of the steps are "
        f"replays, or the sample counts as refused."
    )


def _row(run: Mapping[str, Any], how: Mapping[str, Any]) -> str:
    counts = " | ".join(f"{run['counts'][o]:,}" for o in OUTCOMES)
    extra = [word for word, on in (("early", how["update"] == "early"), ("poison", how["poison"])) if on]
    memory = ", ".join((f'"{how["memory"]}"', *extra))
    kernels = {"exact": "", "fast": _KERNELS[how["kernels"]]}
    what = f"{how['of']}, {how['samples of each']} of each, {how['mode']}"
    return f"| {what} | {memory} | {kernels[how['mode']]} | {run['subjects']} | {counts} |"


def _reason(text: str) -> str:
    """Without what is this sample's own."""
    for part, short in (
        ("shape depends on the data", "a shape depends on the data"),
        ("of layout", "sparse tensors"),
        ("has layout", "sparse tensors"),
        ("ZeroTensor", "a ZeroTensor, which has no bytes"),
        ("sets the random state", "the random state is set inside of the step"),
        ("other bits", "other bits than eager's in a plan's first replay, which were found, and the step taken back"),
        ("eager's backward raises", "skipped: eager's backward raises"),
        ("eager raises", "skipped: eager raises"),
    ):
        if part in text:
            return short
    return text.partition(". ")[0].replace("|", "/")[:160]


def models(found: Mapping[str, Mapping[str, Any]]) -> str:
    """`found`: by mode."""
    shown = ("equal", "equal, several plans", "near", "as advised", "differs", "foreign exception", "timeout")
    rows = []
    for mode, run in found.items():
        counts = run["counts"]
        trained = sum(n for outcome, n in counts.items() if outcome != "skipped")
        at_first = counts["refused"] + counts.get("as advised", 0)
        refused = " | ".join(f"{n} ({n / trained:.1%})" for n in (counts["refused"], at_first))
        rows.append(f"| {mode} | {trained} | {' | '.join(str(counts.get(o, 0)) for o in shown)} | {refused} |")
    machine = next(iter(found.values()))["machine"]
    return _MODELS.format(
        date=max(run["date"] for run in found.values()),
        commit=told(run["machine"] for run in found.values()).replace(", commit", "; the last runs: commit"),
        near=NEAR_MODELS,
        note="".join(f"\n{run['note']}" for run in found.values() if "note" in run),
        heads=" | ".join(shown),
        lines="--:|" * len(shown),
        rows="\n".join(rows),
        device="; ".join(f"mode {mode}: {devices(run['models'])}" for mode, run in found.items()),
        **{k: machine[k] for k in ("transformers", "torch", "python")},
    )


def devices(rows: Sequence[Mapping[str, Any]]) -> str:
    """On which machines they were made, and how many on each."""
    found = collections.Counter(row["device"] for row in rows)
    if len(found) == 1:
        return f"all on {next(iter(found))}"
    return ", ".join(f"{count} on {device}" for device, count in found.most_common())


def fuzz(found: Mapping[str, Any], traced: Mapping[str, Any]) -> str:
    """`traced`: with what Inductor is given in its clusters."""
    found, traced = added_up(found), added_up(traced)
    by_float64 = "further off" not in found["counts"]["fast"]  # a file of before told of such programs
    outcomes = ("equal", "near", "refused", "wrong") if by_float64 else ("equal", "near", "further off", "refused")
    rows = [
        f"| {mode} | {sum(counts.values()):,} | {' | '.join(f'{counts.get(o, 0):,}' for o in outcomes)} |"
        + ("" if by_float64 else f" {len(found['wrong'])} |")
        for mode, counts in found["counts"].items()
    ]
    named = ("instructions", "seed", "date", "torch", "python", "minutes")
    note = f"\n{found['note']}" if "note" in found else ""
    given_up = len(traced["given up"])
    also = (
        f"{traced['programs']:,} more ran in mode fast with what Inductor is given in the clusters; there each kernel "
        f"is compared with double precision, and what the training leaves is not compared with eager's. Of these "
        f"kernels {given_up or 'none'} {'were' if given_up > 1 else 'was'} further from double precision than it may "
        f"be (seeds from {traced['seed']} on, {traced['date']}, {traced['minutes']} minutes{told(traced['abouts'])})"
        f"{traced.get('note', IN_ITS_PLACE if given_up else '.')}"
    )
    return _FUZZ.format(
        rule=_BY_FLOAT64 if by_float64 else '. "further off": in mode fast, and told below',
        heads=" | ".join((*outcomes, *(() if by_float64 else ("wrong",)))),
        lines="--:|" * (len(outcomes) + (not by_float64)),
        rows="\n".join(rows),
        note=note,
        traced=also,
        commit=told(found["abouts"]),
        **{k: found[k] for k in named},
    )


def added_up(found: Mapping[str, Any]) -> dict[str, Any]:
    """The runs of run_fuzz.py in a file, as one. A file of before has one, which was put together by hand."""
    if "runs" not in found:
        return {**found, "abouts": [found]}
    runs = found["runs"]
    counts: dict[str, collections.Counter[str]] = {}
    for run in runs:
        for mode, outcomes in run["counts"].items():
            counts.setdefault(mode, collections.Counter()).update(outcomes)
    seeds = [f"{run['seed']:d}" for run in runs]
    return {
        **{k: runs[-1][k] for k in ("torch", "python", "instructions")},
        "seed": " and ".join(filter(None, (", ".join(seeds[:-1]), seeds[-1]))),
        "date": " to ".join(dict.fromkeys((min(r["date"] for r in runs), max(r["date"] for r in runs)))),
        "minutes": round(sum(run["minutes"] for run in runs), 1),
        "programs": sum(run["programs"] for run in runs),
        "counts": {mode: dict(outcomes) for mode, outcomes in counts.items()},
        "given up": [text for run in runs for text in run["given up"]],
        "wrong": [text for run in runs for text in run["wrong"]],
        "abouts": runs,
    }


def big(found: Mapping[str, Any]) -> str:
    return _BIG.format(
        elements=found["elements in one buffer"],
        limit=1 << 31,
        gib=found["arena bytes"] / 2**30,
        differences=len(found["differences"]) or "none",
        date=found["date"],
        seconds=found["seconds in all"],
        commit=told([found["machine"]]),
        **{k: found["machine"][k] for k in ("torch", "python", "device", "threads")},
    )


def gpu(found: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> str:
    """`beside`: gradients beside single precision's, if there are any."""
    ours = [each for each in found["trainings"] if each["system"] == "takeback"]
    names = ours[0]["growth"] if ours else ()
    growth = {name: max(each["growth"][name] for each in ours) for name in names}
    problems = "; ".join(problem.partition("\n")[0] for problem in found["problems"])
    return _GPU.format(
        steps=found["steps"],
        shape=" x ".join(map(str, found["rows and length"])),
        seeds=len(ours),
        eagers=len(found["trainings"]) - len(ours),
        curves=_curves(found) if "distance from eager" in found else "",
        growth=", ".join(f"{value:+g} {name}" for name, value in growth.items()) or "not known",
        problems=f"**What went wrong: {problems}.**" if problems else "All trainings came to their end.",
        date=found["date"],
        commit=told([found["machine"]]),
        gradients="" if beside is None else gradients(beside),
        **{k: found["machine"][k] for k in ("torch", "python", "device")},
    )


def _curves(found: Mapping[str, Any]) -> str:
    last = {system: ", ".join(f"{loss:.3f}" for loss in losses) for system, losses in found["last tenth"].items()}
    pairs = found["distance of two curves"]
    among = pairs["two of eager"]
    return _CURVES.format(
        ours=found["distance from eager"],
        count=len(found["trainings"]),
        chance=found["groupings of the same curves that are as far apart"],
        least=LEAST,
        between=pairs["takeback and eager"],
        among="not known" if among is None else f"{among:.4f}",
        last_ours=last["takeback"],
        last_eager=last["eager"],
        pairs=_pairs(found),
    )


def _pairs(found: Mapping[str, Any]) -> str:
    """How trainings with the same seed ended beside one another; nothing where some are missing."""
    ours, eagers = (
        {each["seed"]: loss for each, loss in zip(of_system, found["last tenth"][system], strict=True)}
        for system in ("takeback", "eager")
        for of_system in [[each for each in found["trainings"] if each["system"] == system]]
    )
    away = [loss - eagers[seed] for seed, loss in ours.items() if seed in eagers]
    if not away:
        return ""
    above, count = sum(d > 0 for d in away), len(away)
    chance = found["groupings of the same curves that are as far apart"]
    one_sided = sum(math.comb(count, k) for k in range(count + 1) if abs(2 * k - count) >= abs(2 * above - count))
    return _PAIRS.format(
        low=min(away),
        high=max(away),
        above=above,
        count=count,
        explains="can explain" if chance >= LEAST else "hardly explains",
        chance=chance,
        coin=one_sided / 2**count,
    )


def gradients(found: Mapping[str, Any]) -> str:
    off, along = (
        {system: [row[system][what] for row in found["rows"]] for system in ("fast", "eager")}
        for what in ("distance", "along")
    )
    mean = {system: statistics.fmean(each) for system, each in along.items()}
    error = {system: statistics.stdev(each) / len(each) ** 0.5 for system, each in along.items()}
    return _GRADIENTS.format(
        show="show no" if abs(mean["fast"]) <= 2 * error["fast"] else "**show a**",
        count=len(found["rows"]),
        further=sum(e > f for e, f in zip(off["eager"], off["fast"], strict=True)),
        **{f"{system}_near": min(each) for system, each in off.items()},
        **{f"{system}_far": max(each) for system, each in off.items()},
        **mean,
        **{f"{system}_error": each for system, each in error.items()},
        about=found.get("date") or found["about"],
        commit=told([found["machine"]]),
        **{k: found["machine"][k] for k in ("torch", "python", "device")},
    )

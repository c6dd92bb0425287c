"""Every architecture of the installed transformers that can be built tiny: trained by takeback beside eager.

    python benchmarks/transformers_models.py [--only NAME ...] [--json FILE] [--markdown FILE]
        [--mode exact|fast] [--memory keep|auto|min] [--kernels eager|generated] [--seconds S]

Four AdamW steps on new batches of the same shapes, `memory="keep"`, from the same state and seeds, in training mode,
with dropout as configured. "equal": losses and parameters are eager's, bit for bit, from one plan. A model that eager
cannot train at this size is skipped. Each model has a process and a minute, or as long as it is given. What is refused
is tried once more as transformers_advice.py says, where it says something: "as advised".

In mode fast, clusters run with eager's kernels unless others are asked for: generating some hundred for each model
takes hours. Then SGD trains, whose updates are as near to one another as the gradients are (AdamW turns what rounding
leaves of a zero into a whole step): what has not eager's bits is "near" if every tensor is within 1e-4 of its change,
plus 1e-5 of the change of all and 1e-6 of itself (`far`).
"""

from __future__ import annotations

import argparse
import collections
import copy
import datetime
import json
import multiprocessing
import os
import random
import re
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

import takeback as tb
from common import machine
from takeback.compiler.program import Cluster
from takeback.compiler.run import kernels, plan_maker
from takeback.compiler.run.inductor import Compiled, NotCompiled
from takeback.errors import TakebackError
from tiny_transformers import MOST_PARAMETERS, Architecture, architectures, batches, configs, fits, loss_of
from transformers_advice import NONE, Advice, advice_for
from trust_samples import NEAR_MODELS, devices

STEPS = 4
RESULTS = Path(__file__).parent / "results" / "transformers-models.json"
FAST = Path(__file__).parent / "results" / "transformers-models-fast.json"
SECONDS = 60.0
OUTCOMES = (
    *("equal", "equal, several plans", "near", "as advised", "refused", "differs"),
    *("foreign exception", "timeout", "skipped"),
)


@dataclass(frozen=True)
class Row:
    """What became of one architecture."""

    name: str
    task: str
    model_type: str
    outcome: str
    reason: str = ""
    plans: int = 0
    replays: int = 0
    places: int = 0  #: that are compared before a replay
    check_ms: float = 0.0  #: comparing them, the least of ten
    parameters: int = 0
    inputs: tuple[str, ...] = field(default=())
    memory: str = "keep"
    advice: str = ""  #: that was followed
    device: str = ""  #: on which this was found; the file's own is that of the last run


@dataclass(frozen=True)
class How:
    """How the models are compiled."""

    mode: str = "exact"
    memory: str = "keep"
    kernels: str = "eager"

    def optimize(self, model: Any) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        if self.mode == "fast":
            return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        return torch.optim.AdamW(trained, lr=1e-3)


Build = Callable[[], Any]
Optimize = Callable[[Any], torch.optim.Optimizer]
Batches = Callable[[int], dict[str, Any]]


def seed(i: int) -> None:
    random.seed(i)
    np.random.seed(i)
    torch.manual_seed(i)


def built(architecture: Architecture, config: Any) -> Any:
    seed(0)
    return architecture.model_class(copy.deepcopy(config)).float().train()  # some models write into it


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


def eager(model: Any, batch: Batches, optimize: Optimize) -> list[torch.Tensor]:
    optimizer = optimize(model)
    losses = []
    for i in range(STEPS):
        given = batch(i)
        seed(100 + i)
        loss = loss_of(model, **given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    return a.dtype is b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def trained(step: Any, batch: Batches) -> list[torch.Tensor]:
    losses = []
    for i in range(STEPS):
        given = batch(i)
        seed(100 + i)
        losses.append(step(**given).detach().clone())
    return losses


def far(
    ours: Any, losses: Sequence[torch.Tensor], theirs: Any, expected: Sequence[torch.Tensor], start: Any
) -> list[str]:
    """What is not near eager's. `start`: the model before the first step."""
    found = [
        f"loss {i}: {a.item():.6g}, eager's {b.item():.6g}"
        for i, (a, b) in enumerate(zip(losses, expected, strict=True))
        if not abs(a.double() - b.double()) <= 1e-4 * b.double().abs() + 1e-6
    ]
    before, reference = tensors_of(start), tensors_of(theirs)
    changes = {
        # A table that the first step makes larger is not something that learns.
        k: (v.detach().double() - before[k].detach().double()).norm() if v.shape == before[k].shape else torch.zeros(())
        for k, v in reference.items()
    }
    everything = torch.stack(list(changes.values())).norm()
    for k, v in tensors_of(ours).items():
        true = reference[k].detach().double()
        off = (v.detach().double() - true).norm()
        if not off <= 1e-4 * changes[k] + 1e-5 * everything + 1e-6 * true.norm():
            found.append(f"{k}: off by {off:.2g}, where its change is {changes[k]:.2g}")
    return found


def trainable(architecture: Architecture, advice: Advice) -> tuple[Build, Batches, tuple[str, ...]] | str:
    """A config and a kind of batch with which eager can train the model; or why there is none."""
    why = ""
    for config in configs(architecture):
        advice.change_(config)
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in architecture.model_class(config).parameters())
            if size > MOST_PARAMETERS:
                why = why or f"{size:,} parameters"
                continue
            model = built(architecture, config)
            advice.change_modules_(model)
        except Exception as error:
            why = why or f"not built: {one_line(error)}"
            continue
        for kind, given in enumerate(batches(architecture, model, 0)):
            if not fits(model, given):
                continue
            try:
                seed(100)
                loss = loss_of(model, **given)
                loss.backward()
                if not torch.isfinite(loss):
                    raise ValueError("the loss is not finite")
            except Exception as error:
                why = why or f"not trained with {', '.join(given)}: {one_line(error)}"
                continue

            def batch(i: int, kind: int = kind, model: Any = model) -> dict[str, Any]:
                return list(batches(architecture, model, i))[kind]

            def build(config: Any = config) -> Any:
                return built(architecture, config)

            return build, batch, tuple(given)
    return why or "no batch that its forward takes"


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def said(error: TakebackError) -> str:
    return shortened(" ".join(str(error).split()))


def shortened(text: str) -> str:
    """Files by their place in a package."""
    return re.sub(r"/\S*/site-packages/", "", text)


def why_several(step: Any, leaves: Sequence[torch.Tensor], sites: Sequence[str]) -> str:
    """What the plans that were not used last do not have in common with the last step."""
    changes = [plan.change(leaves) for plan in list(step._plans)[1:]]
    read = [f"another value is read from a tensor at {site}" for site in sites]
    return shortened("; ".join(dict.fromkeys([*(c for c in changes if c is not None), *read])))


def sites_of_misses(step: Any) -> list[str]:
    """Filled with the lines at which a step reads another value into Python than its plans hold."""
    found: list[str] = []
    tell = step._news.read_

    def read_(site: Any) -> None:
        found.append(site.describe() if site is not None else "an unknown line")
        tell(site)

    step._news.read_ = read_
    return found


def examine(architecture: Architecture, how: How, advice: Advice = NONE) -> Row:
    row: dict[str, Any] = {"name": architecture.name, "task": architecture.task, "model_type": architecture.model_type}
    try:
        found = trainable(architecture, advice)
        if isinstance(found, str):
            return Row(**row, outcome="skipped", reason=found)
        build, batch, inputs = found
        theirs = build()
        expected = eager(theirs, batch, how.optimize)
    except Exception as error:
        return Row(**row, outcome="skipped", reason=one_line(error))
    row |= {"inputs": inputs, "parameters": sum(p.numel() for p in theirs.parameters())}
    ours = build()
    again = tensors_of(build())
    if any(not same(v.detach(), again[k].detach()) for k, v in tensors_of(ours).items()):
        return Row(**row, outcome="skipped", reason="eager builds another model from the same seed")
    try:
        step = tb.compile_step(ours, loss_of, how.optimize(ours), mode=how.mode, memory=how.memory)
        sites = sites_of_misses(step)
        losses = trained(step, batch)
    except TakebackError as error:
        return Row(**row, outcome="refused", reason=f"{type(error).__name__}: {said(error)}")
    except Exception:
        return Row(**row, outcome="foreign exception", reason=traceback.format_exc()[-3000:])
    row |= {"plans": len(step._plans), "replays": step._replays}
    reference = tensors_of(theirs)
    other = [f"loss {i}" for i, (a, b) in enumerate(zip(losses, expected, strict=True)) if not same(a, b)]
    other += [k for k, v in tensors_of(ours).items() if not same(v.detach(), reference[k].detach())]
    if other:
        third = build()
        repeated = all(same(a, b) for a, b in zip(eager(third, batch, how.optimize), expected, strict=True))
        if not repeated:
            return Row(**row, outcome="skipped", reason="eager differs from eager")
        if how.mode == "fast":
            apart = far(ours, losses, theirs, expected, build())
            return Row(**row, outcome="differs" if apart else "near", reason="; ".join(apart[:6]))
        return Row(**row, outcome="differs", reason=f"{len(other)} tensors: {', '.join(other[:6])}")
    leaves = [v for v in batch(STEPS - 1).values() if isinstance(v, torch.Tensor)]
    plan = step._plans[0]
    row |= {"places": len(plan.watch._assumptions.places()), "check_ms": round(1e3 * seconds_of_check(plan, leaves), 3)}
    if len(step._plans) == 1 and step._replays >= 2:
        return Row(**row, outcome="equal")
    return Row(**row, outcome="equal, several plans", reason=why_several(step, leaves, sites))


def seconds_of_check(plan: Any, leaves: Sequence[torch.Tensor]) -> float:
    times = []
    for _ in range(10):
        start = time.perf_counter()
        plan.watch.change(leaves)
        times.append(time.perf_counter() - start)
    return min(times)


def _child(architecture: Architecture, how: How, advice: Advice, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pipe.send(examine(architecture, how, advice))


def tried(architecture: Architecture, how: How, seconds: float = SECONDS) -> Row:
    """As it comes, and if that is refused, as advised."""
    row = alone(architecture, how, seconds=seconds)
    advice = advice_for(row.reason) if row.outcome == "refused" else None
    if advice is None:
        return row
    again = alone(architecture, how, advice, seconds=seconds)
    if again.outcome not in ("equal", "near"):
        return replace(row, reason=f"{row.reason} As advised ({advice.text}): {again.outcome}: {again.reason}")
    return replace(again, outcome="as advised", reason=row.reason, advice=f"{advice.text}: {again.outcome}")


def alone(architecture: Architecture, how: How, advice: Advice = NONE, *, seconds: float = SECONDS) -> Row:
    """In a process of its own, which is forked so that transformers is imported once."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(architecture, how, advice, theirs))
    process.start()
    theirs.close()
    row = Row(architecture.name, architecture.task, architecture.model_type, "timeout", f"{seconds:.0f} s")
    try:
        if ours.poll(seconds):
            row = ours.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        row = Row(row.name, row.task, row.model_type, "foreign exception", f"the process died: {how}")
    if process.is_alive() and row.outcome == "timeout":
        process.kill()
    process.join()
    return row


def not_compiled(cluster: Cluster, device: torch.device) -> Compiled:
    raise NotCompiled("eager's kernels were asked for")


# -- what is told ----------------------------------------------------------------------------------------------


def counts(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    found: dict[str, collections.Counter[str]] = {}
    for row in rows:
        found.setdefault(row.task, collections.Counter())[row.outcome] += 1
    return {task: {o: c[o] for o in OUTCOMES} for task, c in found.items()}


def totals(rows: Sequence[Row]) -> dict[str, int]:
    return {o: sum(r.outcome == o for r in rows) for o in OUTCOMES}


def cause(row: Row) -> str:
    """A reason without what is this model's own: its line, names and numbers."""
    if read := re.search(r"another value is read from a tensor at \S+ in \S+: (.*?)\s*(#.*|; .*)?$", row.reason):
        return f"another value is read from a tensor: `{read[1]}`"
    if row.outcome == "timeout":
        return f"building, eager and takeback did not end within {row.reason}; not looked into"
    text = re.sub(
        r",? (at|before|by) \S+\.py:\d+ in \S+: .*?"
        r"(?=, so no|, and it was|, where|\. [A-Z]|: it | reads | that was| takes|; a |$)",
        "",
        row.reason,
    )
    text = re.split(r"(?<=[^A-Z.])\. (?=[A-Z])", text.removeprefix("CaptureError: "))[0]
    text = re.sub(r"\b(model|loss_fn)\.[\w.\[\]']+", "…", text)
    return re.sub(r"\b\d[\d,.]*\b", "…", text).rstrip(".")


def markdown(rows: Sequence[Row], versions: dict[str, Any]) -> str:
    """What works, and why the rest does not."""
    trained = [r for r in rows if r.outcome != "skipped"]
    equal = [r for r in rows if r.outcome == "equal"]
    shown = [o for o in OUTCOMES if o in ("equal", "refused", "differs") or totals(rows)[o]]
    lines = [
        "# Models of transformers",
        "",
        "Made by `benchmarks/transformers_models.py --markdown docs/models.md` from what it has measured: every "
        "architecture of the package that can be built tiny and that eager can train then, "
        f'{STEPS} steps of AdamW beside eager, `memory="keep"`, training mode, the config\'s own dropout.',
        "",
        f"transformers {versions['transformers']}, torch {versions['torch']}, Python {versions['python']}, one thread; "
        f"{devices([asdict(r) for r in rows])}.",
        "",
        f"**{len(equal)} of {len(trained)}** have eager's losses and parameters, bit for bit, from one plan.",
        "",
        f"| task | {' | '.join(shown)} |",
        f"|---|{'---:|' * len(shown)}",
    ]
    for task, by_outcome in counts(rows).items():
        lines.append(f"| {task} | {' | '.join(str(by_outcome[o] or '') for o in shown)} |")
    lines += [f"| **all** | {' | '.join(str(totals(rows)[o]) for o in shown)} |", ""]
    lines += [
        "skipped: eager does not train it at this size, or it needs a package or inputs that are not here. Models of "
        "images and text are given text alone. Not run: "
        f"{len(architectures()) - len(rows)} base models of {len(architectures())} architectures in all.",
        "",
        "## What is not equal from one plan, and why",
        "",
        "| outcome | reason | architectures | what helps |",
        "|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for r in sorted(trained, key=lambda r: OUTCOMES.index(r.outcome)):
        if r.outcome != "equal":
            groups.setdefault((r.outcome, cause(r), r.advice.partition(":")[0]), []).append(r.name)
    for (outcome, why, advice), names in sorted(
        groups.items(), key=lambda g: (OUTCOMES.index(g[0][0]), -len(g[1]), g[0][1])
    ):
        lines.append(f"| {outcome} | {why.replace('|', '/')} | {', '.join(names)} | {advice} |")
    lines += ["", "## What is equal", ""]
    for task in counts(rows):
        if names := [r.name for r in equal if r.task == task]:
            lines += [f"**{task}**: {', '.join(names)}.", ""]
    if FAST.exists():
        lines += fast_part(read_json(FAST))
    return "\n".join(lines).rstrip() + "\n"


def fast_part(rows: Sequence[Row]) -> list[str]:
    """What mode fast makes of them."""
    shown = OUTCOMES[: OUTCOMES.index("skipped")]
    lines = [
        "## Mode fast",
        "",
        f"{sum(r.outcome != 'skipped' for r in rows)} of the models on the CPU, with eager's kernels in the clusters, "
        f'{STEPS} steps of SGD: "equal" in bits, or "near": {NEAR_MODELS}. Made by '
        f"`benchmarks/transformers_models.py --mode fast`; {devices([asdict(r) for r in rows])}.",
        "",
        f"| memory | {' | '.join(shown)} |",
        f"|---|{'---:|' * len(shown)}",
    ]
    for memory in dict.fromkeys(r.memory for r in rows):
        found = totals([r for r in rows if r.memory == memory])
        lines.append(f"| {memory} | {' | '.join(str(found[o]) for o in shown)} |")
    late = [f"{r.name} ({r.reason})" for r in rows if r.outcome == "timeout"]
    if late:
        lines += ["", f"Not done within its time, on a machine that others used, too: {', '.join(late)}."]
    return [*lines, ""]


def write_json(path: Path, rows: Sequence[Row]) -> None:
    found = {
        "date": datetime.date.today().isoformat(),
        "machine": machine() | {"transformers": transformers.__version__, "steps": STEPS},
        "counts": totals(rows),
        "by_task": counts(rows),
        "models": [asdict(r) for r in rows],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def read_json(path: Path) -> list[Row]:
    found = json.loads(path.read_text())
    return [Row(**{**r, "inputs": tuple(r["inputs"])}) for r in found["models"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="classes or model types")
    parser.add_argument("--outcome", nargs="*", help="those that had this outcome in the JSON file")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tasks", nargs="*", help="of tiny_transformers.TASKS")
    parser.add_argument("--resume", action="store_true", help="leave alone what is in the JSON file and was trained")
    parser.add_argument("--markdown", type=Path, help="written from the JSON file; nothing is run")
    parser.add_argument("--here", action="store_true", help="in this process, to debug one model")
    parser.add_argument("--mode", choices=("exact", "fast"), default="exact")
    parser.add_argument("--memory", choices=("keep", "auto", "min"), default="keep")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each model")
    parser.add_argument("--kernels", choices=("eager", "generated"), default="eager", help="of clusters, in mode fast")
    arguments = parser.parse_args()
    how = How(arguments.mode, arguments.memory, arguments.kernels)
    if how.kernels == "eager":
        kernels.compile_cluster = not_compiled
        plan_maker.in_one_kernel = lambda optimizers: False
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    assert transformers.LlamaForCausalLM is not None  # imports what all share, before the processes are forked
    if arguments.markdown is not None:
        path = arguments.json or RESULTS
        arguments.markdown.write_text(markdown(read_json(path), json.loads(path.read_text())["machine"]))
        return
    before = read_json(arguments.json) if arguments.json is not None and arguments.json.exists() else []
    known = {r.name: r for r in before}
    chosen = architectures()
    if arguments.only:
        chosen = [a for a in chosen if not {a.name, a.model_type}.isdisjoint(arguments.only)]
    if arguments.outcome:
        chosen = [a for a in chosen if a.name in known and known[a.name].outcome in arguments.outcome]
    if arguments.tasks:
        chosen = [a for a in chosen if a.task in arguments.tasks]
    if arguments.resume:
        chosen = [a for a in chosen if a.name not in known or known[a.name].outcome in ("skipped", "timeout")]
    elif len(chosen) == len(architectures()):
        known = {}
    rows: list[Row] = []
    start = time.perf_counter()
    for i, architecture in enumerate(chosen):
        made = examine(architecture, how) if arguments.here else tried(architecture, how, arguments.seconds)
        row = replace(made, memory=how.memory, device=str(machine()["device"]))
        rows.append(row)
        known[row.name] = row
        took = time.perf_counter() - start
        print(f"{i + 1}/{len(chosen)} {took:.0f}s {row.name}: {row.outcome} {row.reason[-160:]!r}", flush=True)
        if arguments.json is not None:
            order = {a.name: n for n, a in enumerate(architectures())}
            write_json(arguments.json, sorted(known.values(), key=lambda r: order.get(r.name, 0)))
    table = Table("task", *OUTCOMES)
    for task, by_outcome in counts(rows).items():
        table.add_row(task, *(str(n or "") for n in by_outcome.values()))
    table.add_row("all", *(str(n) for n in totals(rows).values()))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()

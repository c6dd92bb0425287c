"""Four microbatches, added up over calls, and one update: eager and takeback in turns, with the bytes each takes.

    python benchmarks/accumulation.py [--rounds 6] [--memory auto keep] [--device cpu] [--out FILE.json]

gpt = vocabulary 8192, width 384, 4 layers, microbatches of 2 x 192 and 2 x 256 tokens in turns, AdamW fused, clipped.
After the last round every parameter of takeback's must have eager's bits. Peaks are above what is resident between the
updates: parameters and the optimizer's state. Gradients count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import takeback as tb
from common import in_turn, machine, peak_bytes, ratio
from takeback import zoo

CLIP = 1.0


def microbatches(device: str) -> list[tuple[Tensor, Tensor]]:
    [tokens, targets] = zoo.case("gpt", size="bench", batch=8).batch
    lengths = (192, 256, 192, 256)  # the report is of the plan that was used last: the larger one
    return [
        (tokens[2 * i : 2 * i + 2, :n].contiguous().to(device), targets[2 * i : 2 * i + 2, :n].contiguous().to(device))
        for i, n in enumerate(lengths)
    ]


def built(device: str) -> tuple[zoo.Case, torch.optim.Optimizer]:
    case = zoo.case("gpt", size="bench")
    case.model.to(device)
    return case, torch.optim.AdamW(case.model.parameters(), lr=1e-3, fused=True)


def eager(device: str) -> tuple[torch.nn.Module, Callable[[], object]]:
    case, optimizer = built(device)
    parts = microbatches(device)

    def step() -> None:
        for part in parts:
            case.loss_fn(case.model, *part).backward()
        for p in case.model.parameters():
            if p.grad is not None:
                p.grad /= len(parts)
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return case.model, step


def compiled(memory: str, device: str) -> tuple[torch.nn.Module, Callable[[], object]]:
    case, optimizer = built(device)
    parts = microbatches(device)
    made = tb.compile_step(case.model, case.loss_fn, optimizer, memory=memory, clip_norm=CLIP)

    def step() -> None:
        for part in parts[:-1]:
            made(*part, update=False)
        made(*parts[-1], divide=len(parts))

    step.made = made  # type: ignore[attr-defined]
    return case.model, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--memory", nargs="+", default=["auto", "keep"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = {"eager": eager(args.device), **{m: compiled(m, args.device) for m in args.memory}}
    steps = {name: step for name, (_, step) in runs.items()}
    for step in steps.values():
        for _ in range(4):
            step()
    times = in_turn(steps, args.rounds, 3, args.device)
    reference = list(runs["eager"][0].parameters())
    for name, (model, _) in runs.items():
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), reference, strict=True))
        assert same, f"the parameters of {name} are not eager's"
    peaks = {"eager": peak_bytes(steps["eager"], args.device)}
    rows = []
    for name, (_, step) in runs.items():
        if name != "eager":
            report = step.made.report()  # type: ignore[attr-defined]
            waiting = report.resident["pending gradients"]
            peaks[name] = report.peak_bytes - report.resident_bytes + waiting
            if args.device == "cuda":
                peaks[f"{name}, measured"] = peak_bytes(step, args.device)
        rows.append({"system": name, "time_ratio": round(ratio(times, name, "eager"), 3)})
    ratios = {name: round(value / peaks["eager"], 3) for name, value in peaks.items()}
    found = {"machine": machine(args.device), "rows": rows, "peak_bytes": peaks, "peak_ratios": ratios}
    print(json.dumps(found, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The largest batch that `takeback fit` promises for a GPU fits there, and 5 % more does not.

    python benchmarks/fit_boundary.py predict --json FILE                # anywhere: what `largest_batch` says
    python benchmarks/fit_boundary.py measure --json FILE                # on an H200: in processes that have so much
    python benchmarks/fit_boundary.py predict --models gpt2 --memory 24GiB --gpu H200 --json FILE

`measure` trains a few steps of each promise, and of 5 % more rows (one more at least), in processes of their own, which
`torch.cuda.set_per_process_memory_fraction` limits to that much, with segments that grow (expandable_segments). Where
memory="auto" would not fit, takeback takes a lower plan and says so: that counts as not fitting, since the promise is
about the plan that "auto" gives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import takeback as tb
from fit_where_eager_does_not import eager_step, limit_
from gpu_models import GpuCase, made
from gpu_systems import about
from predict_models import PREDICTED
from revision import COMMIT
from takeback.compiler.run.fitting import lowered
from takeback.options import parse_bytes

WAYS = ("eager", "auto", "min")
STEPS = 4
LIMIT_S = 200
MIB = 1 << 20


def sized(model: str, rows: int, device: str, trains_on: str | None = None) -> GpuCase:
    kind = PREDICTED[model]
    return made(replace(kind, full=replace(kind.full, rows=rows)), device, tiny=False, trains_on=trains_on)


def predicted(model: str, memory: str, gpu: str) -> dict[str, Any]:
    def without_bytes(rows: int) -> GpuCase:
        """Where the model can be made of fakes."""
        with contextlib.suppress(Exception), FakeTensorMode():
            return sized(model, rows, "cpu", trains_on="cuda")
        return sized(model, rows, "cpu", trains_on="cuda")

    rows = {
        way: tb.largest_batch(without_bytes, memory, memory_mode=way, mode="auto", device="cuda", gpu=gpu)
        for way in WAYS
    }
    return {"model": model, "memory": memory, "gpu": gpu, "rows": rows, "code": COMMIT}


def trained(model: str, way: str, rows: int, memory: str) -> dict[str, Any]:
    """In a process of its own."""
    limit_("cuda", parse_bytes(memory), 0)
    case = sized(model, rows, "cuda")
    torch.manual_seed(1)
    step = None
    if way != "eager":
        step = tb.compile_step(case.model, case.loss_fn, case.optimizer, memory=way)
    why = ""
    try:
        for _ in range(STEPS):
            if step is None:
                eager_step(case)
            else:
                step(*case.batch)
    except (RuntimeError, tb.TakebackError) as error:
        why = str(error).splitlines()[0][:200]
        if "memory" not in why:
            raise
    notes = [] if step is None or why else [n for n in step.report().notes if lowered([n])]
    return {
        "fits": not why and not notes,
        "why": why or "; ".join(notes)[:300],
        "peak_mib": round(torch.cuda.max_memory_allocated() / MIB, 1),
        "reserved_mib": round(torch.cuda.max_memory_reserved() / MIB, 1),
    }


def measured(promise: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for way, rows in promise["rows"].items():
        for tried in (rows, max(rows + 1, math.ceil(rows * 1.05))):
            words = [promise["model"], way, str(tried), promise["memory"]]
            start = time.time()
            # Both ask for segments that grow: eager is not to fail for what its allocator wastes.
            environment = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
            command = [sys.executable, __file__, "one", "--words", *words]
            try:
                done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
                said = (
                    json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-500:]}
                )
            except subprocess.TimeoutExpired:
                said = {"error": f"stopped after {LIMIT_S} s"}
            found.append(
                {"way": way, "rows": tried, "promised": tried == rows, **said, "s": round(time.time() - start)}
            )
            print(promise["model"], found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "measure", "one"))
    parser.add_argument("--models", type=lambda text: text.split(","), default=["gpt2", "resnet50"])
    parser.add_argument("--memory", default="24GiB")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--words", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what == "one":
        model, way, rows, memory = arguments.words
        print(json.dumps(trained(model, way, int(rows), memory)))
        return
    if arguments.json is None:
        parser.error("--json: where promises are kept, and what came of them")
    if arguments.what == "predict":
        promises = []
        for model in arguments.models:
            promises.append(predicted(model, arguments.memory, arguments.gpu))
            print(promises[-1], flush=True)
        arguments.json.write_text(json.dumps({"promises": promises}, indent=1) + "\n")
        return
    data = json.loads(arguments.json.read_text())
    for promise in data["promises"]:
        promise["measured"] = measured(promise)
    arguments.json.write_text(json.dumps({**data, "machine": about("cuda"), "measured at": COMMIT}, indent=1) + "\n")


if __name__ == "__main__":
    main()

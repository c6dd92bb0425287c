"""How long the generated kernels of a plan take on this GPU, cluster by cluster, with takeback's tiles and with others.

    python benchmarks/cluster_times.py resnet50 --memory keep --largest 10 --json FILE
    python benchmarks/cluster_times.py vit --tiles ours inductor 64:16:4 256:8:8

A plan is made as `takeback.predict` makes it; each distinct cluster is compiled, run on operands that are drawn, and
timed with CUDA events. `--tiles`: what run/tile_forms.py gives ("ours"), what Inductor takes by itself ("inductor"), or
sums:rows:warps for sums over rows, with all else as Inductor has it. GB/s are of what a cluster must move at least,
each operand and each result once; a batch norm goes over its operands twice. It needs a GPU with Triton.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gpu_systems import about
from predict_gpu import _without_bytes
from takeback.compiler.program import Cluster, Op
from takeback.compiler.run import inductor, kernel_file, tile_forms
from takeback.compiler.run.cluster_proof import drawn
from takeback.compiler.run.gpu_table import gpu_named
from takeback.compiler.run.inductor import compile_cluster, straight
from takeback.options import Options
from takeback.tracing import TracedStep, planned


@dataclass(frozen=True)
class Timed:
    """One distinct cluster of a plan."""

    ops: str
    times: int  #: in a step
    once_gb: float
    us: dict[str, float]  #: by the tiles


def distinct(model: str, memory: str, *, tiny: bool) -> list[list[Op]]:
    case = _without_bytes(model, tiny=tiny)
    gpu, options = gpu_named("H200"), Options(mode="fast", memory=memory)
    traced = TracedStep(case.model, case.loss_fn, case.optimizer, case.batch, {}, options, gpu).traced()
    found: dict[str, list[Op]] = {}
    for op in planned(traced.finished, options, gpu=gpu).layout.program.ops:
        if isinstance(op.target, Cluster):
            found.setdefault(op.target.key, []).append(op)
    return sorted(found.values(), key=lambda ops: -len(ops) * once(ops[0]))


def once(op: Op) -> float:
    return float(sum(r.numel * r.dtype.itemsize for r in dict.fromkeys((*op.inputs, *op.outputs))))


@contextlib.contextmanager
def tiles(which: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(kernel_file, "key_of", return_value=None))  # nothing of earlier runs
        if which != "ours":
            stack.enter_context(mock.patch.object(inductor, "columns_of", return_value=None))
            asked = dict.fromkeys(("XBLOCK", "R0_BLOCK", "num_warps", "num_stages"), 1)
            if which == "inductor":
                stack.enter_context(mock.patch.object(tile_forms, "_LEAST", 1 << 62))
            else:
                asked |= dict(zip(asked, map(int, which.split(":")), strict=False))
                stack.enter_context(mock.patch.object(tile_forms, "_TILE", asked))
        yield


def microseconds(cluster: Cluster, device: torch.device) -> float:
    from triton.testing import do_bench

    compiled, operands = compile_cluster(cluster, device), drawn(cluster, device)
    compiled(list(operands))
    kernel = straight(compiled)
    return float(do_bench(lambda: kernel(list(operands)), warmup=5, rep=25, return_mode="median")) * 1e3


def measured(arguments: argparse.Namespace) -> list[Timed]:
    device, found = torch.device("cuda", 0), list[Timed]()
    for ops in distinct(arguments.model, arguments.memory, tiny=arguments.tiny)[: arguments.largest]:
        cluster = ops[0].target
        assert isinstance(cluster, Cluster)
        us: dict[str, float] = {}
        for which in arguments.tiles:
            with tiles(which):
                us[which] = round(microseconds(cluster, device), 1)
        names = ",".join(op.name for op in cluster.ops)
        found.append(Timed(names, len(ops), round(once(ops[0]) / 1e9, 3), us))
        one = found[-1]
        rates = ", ".join(f"{name} {t:.0f} us ({one.once_gb * 1e6 / t:.0f} GB/s)" for name, t in us.items())
        print(f"{one.times:3} × {one.once_gb:.3f} GB: {rates}: {names[-70:]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--memory", default="auto")
    parser.add_argument("--tiles", nargs="+", default=["ours", "inductor"])
    parser.add_argument("--largest", type=int, default=1000, help="so many clusters, those that move most")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("it times kernels on a GPU, and there is none")
    found = measured(arguments)
    totals = {which: sum(one.times * one.us[which] for one in found) / 1e3 for which in arguments.tiles}
    print("a step:", ", ".join(f"{which} {ms:.2f} ms" for which, ms in totals.items()))
    if arguments.json is not None:
        rows: list[dict[str, Any]] = [vars(one) for one in found]
        data = {"machine": about("cuda"), "model": arguments.model, "memory": arguments.memory, "rows": rows}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

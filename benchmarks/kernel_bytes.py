"""How many bytes the generated kernels of mode "fast" move on an H200, counted without one.

    python benchmarks/kernel_bytes.py --models gpt2,resnet50 --memory keep,auto --json FILE
    python benchmarks/kernel_bytes.py --models gpt2 --memory auto --worst 5          # which clusters move too much
    python benchmarks/kernel_bytes.py --models gpt2 --source "native_layer_norm,"    # what Inductor writes for one

A plan is made for the GPU as `takeback.predict` makes it, each distinct cluster goes to Inductor as in a real step, and
what comes out is read, not run: Inductor notes for every kernel how many bytes it reads and writes. Beside it stands
what the clusters must move at least, each operand and each result once ("once"); a norm over the rows of a batch has to
go over its operands twice. It needs Triton (`pip install triton`), and no GPU: where there is none, Inductor is told
what an H200 is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.graph import GraphLowering

from gpu_systems import about
from predict_gpu import _without_bytes
from predict_models import PREDICTED
from takeback.compiler.capture.no_gpu import as_if_on_gpu
from takeback.compiler.program import Cluster, Op
from takeback.compiler.run.gpu_table import gpu_named
from takeback.compiler.run.inductor import NotCompiled, compile_cluster
from takeback.options import Options
from takeback.tracing import TracedStep, planned

H200 = {
    "name": "NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65536,
    "warp_size": 32,
    "total_memory": 141 << 30,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "L2_cache_size": 60 << 20,
    "gcnArchName": "",
}
_NOTED = re.compile(r"'kernel_name': '(\w+)'.*?'kernel_num_gb': ([\d.e-]+)")


@dataclass(frozen=True)
class Counted:
    """One distinct cluster of a plan."""

    op: Op
    times: int  #: in a step
    kernels: tuple[tuple[str, float], ...]  #: their names, and bytes
    source: str

    @property
    def once(self) -> float:
        return float(sum(r.numel * r.dtype.itemsize for r in dict.fromkeys((*self.op.inputs, *self.op.outputs))))

    @property
    def moved(self) -> float:
        return sum(size for _, size in self.kernels)

    @property
    def ops(self) -> str:
        assert isinstance(self.op.target, Cluster)
        return ",".join(op.name for op in self.op.target.ops)


class _Written(Exception):
    """The source is there; it is not to be loaded."""


def counted(model: str, memory: str, *, tiny: bool = False) -> list[Counted]:
    case = _without_bytes(model, tiny=tiny)
    gpu, options = gpu_named("H200"), Options(mode="fast", memory=memory)
    traced = TracedStep(case.model, case.loss_fn, case.optimizer, case.batch, {}, options, gpu).traced()
    program = planned(traced.finished, options, gpu=gpu).layout.program
    found: dict[str, list[Op]] = {}
    for op in program.ops:
        if isinstance(op.target, Cluster):
            found.setdefault(op.target.key, []).append(op)
    return [_counted(ops) for ops in found.values()]


def _counted(ops: list[Op]) -> Counted:
    cluster = ops[0].target
    assert isinstance(cluster, Cluster)
    sources: list[str] = []

    def write(graph: GraphLowering, *args: Any) -> None:
        made: Any = graph.codegen()[0]
        sources.append(getattr(made, "value", made))
        raise _Written

    with as_if_on_gpu(), mock.patch.object(GraphLowering, "compile_to_module", write):
        try:
            compile_cluster(cluster, torch.device("cuda", 0))
        except NotCompiled as error:
            if not sources:
                raise SystemExit(f"{cluster}: {error}") from error
    kernels = tuple((name, float(size) * 1e9) for name, size in _NOTED.findall(sources[0]))
    return Counted(ops[0], len(ops), kernels, sources[0])


@contextlib.contextmanager
def as_if_on_an_h200() -> Iterator[None]:
    """Inductor asks for a device's properties, for a driver, and for what its compiler can do."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import compile_fx
    from torch.utils import _triton

    properties = types.SimpleNamespace(**H200)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())  # where nothing is found that was made before
        stack.enter_context(mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}))
        stack.enter_context(config.patch({"profile_bandwidth": True, "compile_threads": 1}))
        if not torch.cuda.is_available():
            asked: list[tuple[Any, str, Any]] = [
                (CudaInterface, "get_device_properties", staticmethod(lambda device=None: properties)),
                (CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=None: properties)),
                (CudaInterface, "get_compute_capability", staticmethod(lambda device=None: 90)),
                (CudaInterface, "is_available", staticmethod(lambda: True)),
                (CudaInterface, "current_device", staticmethod(lambda: 0)),
                (torch.cuda, "get_device_properties", lambda device=None: properties),
                (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
                (torch.cuda, "current_device", lambda: 0),
                (torch.version, "cuda", torch.version.cuda or "13.0"),
                (compile_fx, "_check_triton_bf16_support", lambda graph: None),
                (_triton, "has_triton", lambda *args: True),
                (_triton, "has_triton_package", lambda: True),
                (_triton, "triton_hash_with_backend", lambda *args: "none"),
            ]
            for where, name, answer in asked:
                stack.enter_context(mock.patch.object(where, name, answer))
        yield


def row(model: str, memory: str, clusters: list[Counted]) -> dict[str, Any]:
    return {
        "model": model,
        "memory": memory,
        "clusters": len(clusters),
        "kernels": sum(c.times * len(c.kernels) for c in clusters),
        "once_gb": round(sum(c.times * c.once for c in clusters) / 1e9, 2),
        "moved_gb": round(sum(c.times * c.moved for c in clusters) / 1e9, 2),
    }


def in_words(one: Counted) -> str:
    parts = [
        f"{re.sub('_fused.*', '', name)} {size / one.once:.2f}" for name, size in one.kernels if size > 0.02 * one.once
    ]
    return (
        f"  {one.times:3} × {one.once / 1e9:.3f} GB, moved {one.times * one.moved / 1e9:.2f} instead of "
        f"{one.times * one.once / 1e9:.2f} ({', '.join(parts)}): {one.ops[:120]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,llama,resnet50,bert,vit,dit", help=", ".join(PREDICTED))
    parser.add_argument("--memory", default="keep,auto")
    parser.add_argument("--worst", type=int, default=0, help="show so many clusters, those that move most too much")
    parser.add_argument("--source", help="print what is generated for clusters whose ops begin so")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with as_if_on_an_h200():
        for model in arguments.models.split(","):
            for memory in arguments.memory.split(","):
                clusters = counted(model, memory, tiny=arguments.tiny)
                rows.append(row(model, memory, clusters))
                print(rows[-1], flush=True)
                for one in sorted(clusters, key=lambda c: c.times * (c.once - c.moved))[: arguments.worst]:
                    print(in_words(one))
                if arguments.source:
                    print("\n".join(c.source for c in clusters if c.ops.startswith(arguments.source)))
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"machine": about("cpu") | {"code": _commit()}, "rows": rows}, indent=1) + "\n"
        )


def _commit() -> str:
    said = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    return said.stdout.strip()


if __name__ == "__main__":
    main()

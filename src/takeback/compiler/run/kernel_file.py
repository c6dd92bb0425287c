"""Finds again what an earlier process compiled for a cluster, without tracing it: a cluster in, a function out.

Compiled graphs lie in Inductor's own cache, as those of torch.compile do, under a key of takeback's: of the cluster, of
the device, of versions and settings, and of the source of all that has a part in what Inductor is given. To have it
there, Inductor must trace, decompose and pickle the graph first; here the cluster's own text is enough. Each process
compares each kernel when it is first used, wherever it comes from (run/kernels.py).

Private torch throughout: checked on 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from takeback.compiler.program import Cluster

_AN_ADDRESS = " at 0x"  #: in the text of an argument: another process has another one


def key_of(cluster: Cluster, device: torch.device, settings: Iterable[str]) -> str | None:
    """None where nothing is to be kept: Inductor's caches are off, or the cluster has no text of its own."""
    from torch._inductor import config
    from torch._inductor.codecache import torch_key

    if config.force_disable_caches or _AN_ADDRESS in cluster.key:
        return None
    user = config.get_hash()  # of what may be set in there
    parts = (torch_key(), _source(), user, *_machine(device), *settings, cluster.key)
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part if isinstance(part, bytes) else part.encode()) + b"\0")
    return f"takeback{digest.hexdigest()}"


def found(key: str) -> Any | None:
    """The compiled graph, ready to be called, once its kernels are there; None if there is none."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool

    constants = CompiledFxGraphConstants()
    with _inductors_context():
        graph, _ = FxGraphCache._lookup_graph(key, [], True, None, constants)
    if graph is None:
        return None
    graph.post_compile([], constants, {"cudagraphs": BoxedBool(False), "is_backward": False})
    return graph


def keep_(key: str, graph: Any, wait: Callable[[], None]) -> None:
    """A compiled graph, with what its compilers make: `wait` waits for them."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.triton_bundler import TritonBundler

    if not isinstance(graph, CompiledFxGraph):  # there is nothing in it
        wait()
        return
    TritonBundler.begin_compile()  # it notes what is made from here on
    try:
        wait()
        bundle, _ = TritonBundler.collect()
    finally:
        TritonBundler.end_compile()
    graph.set_triton_bundle(bundle)
    with _inductors_context():
        FxGraphCache._save_graph(key, graph, [], True, None)


def _inductors_context() -> Any:
    """Its cache asks for sizes that are not known; here all are."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)))


def _machine(device: torch.device) -> tuple[str, ...]:
    versions = (platform.python_version(), str(torch.__version__), str(torch.are_deterministic_algorithms_enabled()))
    if device.type != "cuda":
        return (*versions, device.type, torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads()))
    gpu = torch.cuda.get_device_properties(device)
    made_for = (gpu.name, gpu.major, gpu.minor, gpu.multi_processor_count, device.index, torch.version.cuda)
    return (*versions, device.type, *map(str, made_for), _triton())


@functools.cache
def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _source() -> bytes:
    """Of what has a part in what Inductor is given for a cluster."""
    here = Path(__file__).parent
    files = [here.parent / f"{name}.py" for name in ("program", "schema", "geometry", "cluster")]
    files += sorted({*here.glob("*_forms.py"), *here.glob("cluster_*.py")})
    files += [here / "inductor.py", Path(__file__)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.digest()

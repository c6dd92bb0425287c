"""Finds again what an earlier process compiled for a cluster, without tracing it: a cluster in, a function out.

Compiled graphs lie in Inductor's own cache, as those of torch.compile do, under a key of takeback's: of the cluster, of
the device, of versions and settings, and of the source of all that has a part in what Inductor is given. To have it
there, Inductor must trace, decompose and pickle the graph first; here the cluster's own text is enough. Each process
compares each kernel when it is first used, wherever it comes from (run/kernels.py).

Private torch throughout: checked on 2.11 and 2.13.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from takeback.compiler.program import Cluster

_AN_ADDRESS = " at 0x"  #: in the text of an argument: another process has another one

#: Settings that are functions, of which nobody knows what they depend on.
_OWN_PASSES = (
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
)

#: What a generated module imports, and the name under which it would use that.
_OFTEN_UNUSED = {
    "from torch._inductor.select_algorithm import extern_kernels": "extern_kernels",
    "from torch._inductor.codegen.memory_planning import _align as align": "align",
}


def key_of(cluster: Cluster, device: torch.device, settings: Iterable[str]) -> str | None:
    """None where nothing is to be kept: Inductor's caches are off, the user has put passes of his own into it, or the
    cluster has no text of its own."""
    from torch._inductor import config
    from torch._inductor.codecache import torch_key

    users = repr(sorted(config.save_config_portable(ignore_private_configs=False).items()))
    own_passes = any(getattr(config, name, None) for name in _OWN_PASSES)
    if config.force_disable_caches or own_passes or _AN_ADDRESS in cluster.key:
        return None
    parts = (torch_key(), _source(), users, *_machine(device), *settings, cluster.key)
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part if isinstance(part, bytes) else part.encode()) + b"\0")
    return f"takeback{digest.hexdigest()}"


def found(key: str) -> Callable[[list[torch.Tensor]], Any] | None:
    """What an earlier process compiled, which may be called once its compilers have been waited for; None if there is
    nothing. As Inductor does where it finds a graph, without what it imports to compile one."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.triton_bundler import TritonBundler
    from torch._inductor.utils import BoxedBool

    graph = next((graph for graph, *_ in FxGraphCache.iterate_over_candidates(True, None, key)), None)
    if graph is None:
        return None
    if graph._triton_bundle:
        TritonBundler.read_and_emit(graph._triton_bundle)
    constants = CompiledFxGraphConstants()
    graph.after_deserialization(constants)
    graph.post_compile([], constants, {"cudagraphs": BoxedBool(False), "is_backward": False})
    call: Callable[[list[torch.Tensor]], Any] = (
        graph.current_callable
    )  # the graph looks into modules that are not there
    return call


def keep_(key: str, graph: Any, wait: Callable[[], None]) -> None:
    """A compiled graph, with what its compilers make: `wait` waits for them."""
    from torch._inductor.codecache import FxGraphCache, code_hash
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
    kept = copy.copy(graph)
    kept.set_triton_bundle(bundle)
    kept.source_code = less_imports(graph.source_code)
    kept.cache_key = code_hash(kept.source_code)
    kept.prepare_for_serialization()
    with _inductors_context():
        FxGraphCache._save_graph(key, kept, [], True, None)


def less_imports(source: str) -> str:
    """A generated module without what it imports and does not use: half a thousand modules, which only those need who
    compile."""
    for line, name in _OFTEN_UNUSED.items():
        if len(re.findall(rf"\b{name}\b", source)) == 1:
            source = source.replace(f"{line}\n", "")
    return source


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

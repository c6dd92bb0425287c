"""Finds again what an earlier process compiled for a cluster, without tracing it: a cluster in, a function out.

Compiled graphs lie in Inductor's own cache, as those of torch.compile do, under a key of takeback's: of the cluster, of
the device, of versions and settings, and of the source of all that has a part in what Inductor is given. To have it
there, Inductor must trace, decompose and pickle the graph first; here the cluster's own text is enough. Each process
compares each kernel when it is first used, wherever it comes from (run/kernels.py).

Private torch throughout: checked on 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib.metadata
import logging
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from takeback.compiler.run.inductor_folder import check_folder_

_LOG = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Generated:
    """What Inductor made of a cluster, or of a family of them."""

    call: Callable[[list[Any]], Any]  #: of the operands; of a family, with the base before them
    guards: str | None = None  #: what it took for granted of the base, as an expression
    symbols: tuple[Any, ...] = ()  #: the base, where it is compiled in this process
    mode: Any = None  #: in which that is a symbol


def key_of(text: str, device: torch.device, settings: Mapping[str, object]) -> str | None:
    """Of a cluster's or a family's text, and what Inductor is asked for. None where nothing is to be kept: Inductor's
    caches are off, the user has put passes of his own into it, or the text is of this process alone."""
    from torch._inductor import config
    from torch._inductor.codecache import torch_key

    users = repr(sorted(config.save_config_portable(ignore_private_configs=False).items()))
    own_passes = any(getattr(config, name, None) for name in _OWN_PASSES)
    if config.force_disable_caches or own_passes or _AN_ADDRESS in text:
        return None
    parts = (torch_key(), _source(), users, *_machine(device), repr(sorted(settings.items())), text)
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part if isinstance(part, bytes) else part.encode()) + b"\0")
    return f"takeback{digest.hexdigest()}"


def hold(guards: str | None, base: int) -> bool:
    """Whether what was taken for granted is so for this base."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return not guards or bool(ShapeEnv().evaluate_guards_expression(guards, [base]))


def is_kept(key: str | None, base: int) -> bool:
    """Whether there is something under the key of a family that holds for this base."""
    return key is not None and _kept(key, base) is not None


def _kept(key: str, base: int | None) -> Any | None:
    """The one place where pickles are loaded: from a folder that only the user can write. What is no graph, or cannot
    be read, is as good as absent."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import OutputCode

    try:
        check_folder_()
        for graph, *_ in FxGraphCache.iterate_over_candidates(True, None, key):
            if isinstance(graph, OutputCode) and _holds(graph, base):
                return graph
    except Exception as error:  # whatever it is, the kernel is compiled anew, and where it cannot be, that is told
        _LOG.debug("nothing is taken from Inductor's cache: %s", error)
    return None


def _holds(graph: Any, base: int | None) -> bool:
    try:
        return base is None or hold(graph.guards_expr, base)
    except Exception as error:  # of another version of torch, or spoilt
        _LOG.debug("a kept graph cannot be read: %s", error)
        return False


def found(key: str, base: int | None = None) -> Generated | None:
    """What an earlier process compiled, which may be called once its compilers have been waited for; None if there is
    nothing. As Inductor does where it finds a graph, without what it imports to compile one. `base`: of a family."""
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.triton_bundler import TritonBundler
    from torch._inductor.utils import BoxedBool

    graph = _kept(key, base)
    if graph is None:
        return None
    if graph._triton_bundle:
        TritonBundler.read_and_emit(graph._triton_bundle)
    constants = CompiledFxGraphConstants()
    graph.after_deserialization(constants)
    graph.post_compile([], constants, {"cudagraphs": BoxedBool(False), "is_backward": False})
    return Generated(graph.current_callable, graph.guards_expr)  # the graph's own call looks into further modules


def keep_(key: str, made: Generated, wait: Callable[[], None]) -> None:
    """A compiled graph, with what its compilers make: `wait` waits for them."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.codecache import FxGraphCache, code_hash
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.triton_bundler import TritonBundler
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if not isinstance(made.call, CompiledFxGraph) or TritonBundler._entries is not None:
        wait()  # there is nothing in it, or torch.compile is at work on another thread, and notes its own
        return
    TritonBundler.begin_compile()  # it notes what is made from here on
    try:
        wait()
        bundle, _ = TritonBundler.collect()
    finally:
        TritonBundler.end_compile()
    mode = made.mode or FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)  # guards are asked of its symbols
    with contextlib.suppress(Exception), tracing(TracingContext(mode)):  # to keep nothing is no error
        check_folder_()
        kept = copy.copy(made.call)
        kept.set_triton_bundle(bundle)
        kept.source_code = less_imports(kept.source_code)
        kept.cache_key = code_hash(kept.source_code)
        kept.prepare_for_serialization()
        FxGraphCache._save_graph(key, kept, list(made.symbols), True, None)


def less_imports(source: str) -> str:
    """A generated module without what it imports and does not use: half a thousand modules, which only those need who
    compile."""
    for line, name in _OFTEN_UNUSED.items():
        if len(re.findall(rf"\b{name}\b", source)) == 1:
            source = source.replace(f"{line}\n", "")
    return source


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
    files += [here / "inductor.py", here / "symbolic.py", Path(__file__)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.digest()

"""The handoff to Inductor, all of it: a cluster in, a function that runs its generated kernels out.

The ops are traced on fake tensors with Inductor's decompositions and compiled by `compile_fx_inner`, in which
`torch.compile` and `standalone_compile` end, too; its cache on disk holds what comes out, for the next process
(run/kernel_file.py).
Operands have the alignment that the plan gives them, and results the strides that were recorded.

Private torch throughout: checked on 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from takeback.compiler.capture.site import level_of_user
from takeback.compiler.program import Cluster, Region
from takeback.compiler.run import kernel_file
from takeback.compiler.run.cluster_forms import INLINED, traced
from takeback.compiler.run.cluster_ops import restrided
from takeback.compiler.run.inductor_folder import check_folder_
from takeback.compiler.run.kernel_file import Generated
from takeback.compiler.run.kernel_workers import at_once, compilers_go_on, put_off
from takeback.compiler.run.norm_forms import lies_turned
from takeback.compiler.run.sum_forms import adds_up_columns, columns_of
from takeback.compiler.run.tile_forms import BESIDE_TWO_DIMENSIONS, choices, two_dimensions

Compiled = Callable[[list[torch.Tensor]], Any]

#: What is asked of Inductor. What it compiles is kept by `kernel_file`, under another key. Results keep their strides;
#: nothing is benchmarked; there is no check of shapes in each call, since the plan gives the same ones; a graph is not
#: captured, since the plan may be, and code is not cut into parts for that.
_SETTINGS = {
    "fx_graph_cache": False,
    "comprehensive_padding": False,
    "keep_output_stride": True,
    "size_asserts": False,
    "nan_asserts": False,
    "max_autotune": False,
    "triton.cudagraphs": False,
    "graph_partition": False,
}


#: Loops in the order of the dimensions, whatever lies how.
_AS_NAMED = {"pick_loop_orders": False}


class NotCompiled(Exception):
    """Inductor, or its compiler, is missing or failed; says how."""


def compile_cluster(cluster: Cluster, device: torch.device) -> Compiled:
    """A function of a list of operands, which it empties, to the results. Raises `NotCompiled`. Inside of `at_once` it
    may be called when it has been waited for."""
    look_at_folder_()
    with by_itself(device):
        key = kernel_file.key_of(cluster.key, device, settings_of(cluster))
        return found_or_compiled(key, lambda: _compile(cluster, device)).call


def look_at_folder_() -> None:
    """Raises `NotCompiled`, and warns, where Inductor would load what others could have written."""
    try:
        check_folder_()
    except PermissionError as error:
        warnings.warn(f"takeback: {error}. Eager's kernels run instead.", RuntimeWarning, stacklevel=level_of_user())
        raise NotCompiled(str(error)) from error


def found_or_compiled(key: str | None, compile_: Callable[[], Generated], base: int | None = None) -> Generated:
    """What an earlier process has kept under this key, for this base, or else what is compiled now, and kept. Of some
    kernels only the source is kept: there are compilers to be waited for in any case."""
    kept: Generated | None = None
    with at_once() as afterwards:
        if key is not None:
            with contextlib.suppress(Exception), compilers_go_on():  # whatever is wrong with it, it is compiled anew
                kept = kernel_file.found(key, base)
        wait = afterwards.taken_()
        made = compile_() if kept is None else kept
        if kept is None:
            wait = afterwards.taken_()
            if key is not None:
                wait = functools.partial(kernel_file.keep_, key, made, wait)
    put_off(wait)
    return made


def wait_for(compilers: Callable[[], None], device: torch.device) -> None:
    """Those of a cluster that was compiled `at_once` with others. Raises `NotCompiled`."""
    with by_itself(device):
        compilers()


def interpret_cluster(cluster: Cluster, device: torch.device) -> Compiled:
    """The same without Inductor: what it would be given, op by op. For who tests that."""
    with by_itself(device):
        graph, _, _ = trace_cluster(cluster, device)

    def run(operands: list[torch.Tensor]) -> list[torch.Tensor]:
        return [t.clone() for t in graph(*operands)]  # kernels give results in bytes of their own, a graph views, too

    return run


@contextlib.contextmanager
def by_itself(device: torch.device) -> Iterator[None]:
    """Around all that calls Inductor: whatever is wrong is `NotCompiled`."""
    try:
        # The step may be called under autocast, whose casts are ops of the cluster: they are not to be made again.
        with torch.autocast(device.type, enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own affairs: where they are errors nothing would compile
            yield
    except Exception as error:  # whatever it is, eager's kernels do the same
        raise NotCompiled(in_a_line(error)) from error


def in_a_line(error: Exception) -> str:
    said = str(error).strip().splitlines() or ["no message"]
    last = f" {said[-1].strip()}" if said[0].endswith(":") and len(said) > 1 else ""  # of a worker: a traceback follows
    return f"{type(error).__name__}: {said[0]}{last}"


def settings_of(cluster: Cluster) -> dict[str, Any]:
    """What Inductor is asked for where it compiles this one."""
    from torch._inductor import config

    wanted = {**_SETTINGS, **INLINED, **(_AS_NAMED if lies_turned(cluster) else {})}
    if columns_of(cluster) is not None:
        wanted |= BESIDE_TWO_DIMENSIONS
    return {name: value for name, value in wanted.items() if _has(config, name)}


def _compile(cluster: Cluster, device: torch.device) -> Generated:
    graph, operands, mode = trace_cluster(cluster, device)
    return Generated(compile_graph(graph, operands, mode, [r.stride for r in cluster.results], cluster))


def compile_graph(
    graph: torch.fx.GraphModule, operands: Sequence[Any], mode: Any, strides: Sequence[Sequence[Any]], cluster: Cluster
) -> Compiled:
    """A graph, traced with these operands in this mode, whose results are to have these strides. `cluster`: what it
    computes, in these sizes or others."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    # Without this Inductor takes the strides of a result for its own affair.
    output = graph.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(strides)))
    output.meta["original_output_strides"] = [list(stride) for stride in strides]
    told = tracing(TracingContext(mode))
    sums = _by_columns() if adds_up_columns(cluster) else contextlib.nullcontext()
    columns, settings = columns_of(cluster), settings_of(cluster)
    tiles = V.set_choices_handler(choices(by_channels=columns is not None))
    asked = (V.set_fake_mode(mode), told, config.patch(settings), torch.no_grad(), sums, tiles, two_dimensions(columns))
    with contextlib.ExitStack() as stack:
        for each in (*asked, compilers_go_on()):
            stack.enter_context(each)
        return compile_fx_inner(graph, operands, is_inference=True)  # type: ignore[no-any-return]


def trace_cluster(cluster: Cluster, device: torch.device) -> tuple[torch.fx.GraphModule, list[torch.Tensor], Any]:
    """What Inductor is given: a graph, the fake operands that it was traced with, and their mode."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def compute(*operands: torch.Tensor) -> list[torch.Tensor]:
        found = traced(cluster, operands)
        return [restrided(t, r) for t, r in zip(found, cluster.results, strict=True)]

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)  # Inductor's cache asks for one
    with mode, torch.no_grad():
        operands = [_fake(region, device) for region in cluster.inputs]
        return make_fx(compute, decomposition_table=select_decomp_table())(*operands), operands, mode


@contextlib.contextmanager
def _by_columns() -> Iterator[None]:
    """Inductor takes sums that are many already as they are, does not look how they lie, and tries a handful of kernels
    for each where it is first used. Here it is told that columns are added up."""
    from torch._inductor.ir import Reduction, ReductionHint

    splits = Reduction.num_splits

    def told(*args: Any, **kwargs: Any) -> tuple[ReductionHint, Any]:
        hint, split = splits(*args, **kwargs)
        return (ReductionHint.OUTER if hint is ReductionHint.DEFAULT and split == 1 else hint), split

    Reduction.num_splits = staticmethod(told)
    try:
        yield
    finally:
        Reduction.num_splits = staticmethod(splits)


def straight(compiled: Compiled) -> Compiled:
    """What a compiled cluster calls in the end, once it has been called: what it does around that is for the first
    call, in which its kernels are tuned."""
    inner = getattr(compiled, "current_callable", None)
    return inner if callable(inner) else compiled


def _has(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


def _fake(region: Region, device: torch.device) -> torch.Tensor:
    """An operand as the plan will give it: the same geometry, as well aligned."""
    count = region.span_bytes[1] // region.dtype.itemsize
    base = torch.empty(max(count, region.offset), dtype=region.dtype, device=device)
    return base.as_strided(region.shape, region.stride, region.offset)

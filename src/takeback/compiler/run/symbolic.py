"""One kernel for the clusters of a family, whatever their base: three of them in, a function of base and operands out.

Each of the three is traced by itself. Their graphs must be the same, node by node, but for numbers, and these must be
expressions of the base that hold for all three. Then the graph is traced once more with a symbol in the base's place,
and Inductor compiles it as it compiles what torch.compile calls dynamic. What it took for granted of the base, its
guards, is asked for every base before a kernel is used for it; and there it is compared with double precision like any
other (run/kernels.py).

Private torch throughout: checked on 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from takeback.compiler.program import Cluster, Region
from takeback.compiler.run import kernel_file
from takeback.compiler.run.cluster_family import (
    LEAST_BASE,
    ClusterFamily,
    Expression,
    Ratio,
    fitted,
    fitted_ratio,
)
from takeback.compiler.run.inductor import (
    Compiled,
    by_itself,
    compile_graph,
    found_or_compiled,
    look_at_folder_,
    settings_of,
    trace_cluster,
)
from takeback.compiler.run.kernel_file import Generated


@dataclass(frozen=True)
class SymbolicKernel:
    """Of one family."""

    generated: Generated

    def holds_for(self, base: int) -> bool:
        """Whether what was taken for granted is so for this base."""
        return base >= LEAST_BASE and kernel_file.hold(self.generated.guards, base)

    def at(self, base: int) -> Compiled:
        """For clusters of this base."""
        call = self.generated.call
        call = getattr(call, "current_callable", None) or call

        def run(operands: list[torch.Tensor]) -> Any:
            given = [base, *operands]
            operands.clear()
            return call(given)

        return run


def is_kept(family: ClusterFamily, members: Sequence[Cluster], base: int, device: torch.device) -> bool:
    """Whether an earlier process has compiled one that holds for this base."""
    return kernel_file.is_kept(_key(family, members, device), base)


def _key(family: ClusterFamily, members: Sequence[Cluster], device: torch.device) -> str | None:
    return kernel_file.key_of(family.text, device, settings_of(members[-1]))


def compile_family(
    family: ClusterFamily, members: Sequence[Cluster], base: int, device: torch.device
) -> SymbolicKernel:
    """One that holds for this base. `members`: three clusters of the family, by their bases. Raises `NotCompiled`;
    inside of `at_once` its compilers are to be waited for."""
    look_at_folder_()
    with by_itself(device):
        key = _key(family, members, device)
        return SymbolicKernel(found_or_compiled(key, lambda: _compile(family, members, base, device), base))


def _compile(family: ClusterFamily, members: Sequence[Cluster], hint: int, device: torch.device) -> Generated:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

    bases = [base for member in members if (base := family.base_of(member.key)) is not None]
    one = _OneGraph([trace_cluster(member, device)[0] for member in members], bases)
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    base = _symbol(shapes, hint)

    def of_all(regions: Sequence[Region], geometry: Callable[[Region], Sequence[int]]) -> list[Any]:
        return [_expression(values, bases).of(base) for values in zip(*map(geometry, regions), strict=True)]

    with mode, torch.no_grad():
        operands: list[Any] = [base]
        for regions in zip(*(member.inputs for member in members), strict=True):
            shape, stride = of_all(regions, lambda r: r.shape), of_all(regions, lambda r: r.stride)
            [offset] = {r.offset for r in regions}
            count = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            whole = torch.empty(count, dtype=regions[0].dtype, device=device)
            operands.append(whole.as_strided(shape, stride, offset))
        graph = make_fx(one.run)(*operands)
    results = list(zip(*(member.results for member in members), strict=True))
    made = [node.meta["val"] for node in graph.graph.output_node().args[0]]
    for regions, tensor in zip(results, made, strict=True):
        wanted = of_all(regions, lambda r: r.shape)
        if not all(statically_known_true(a == b) for a, b in zip(tensor.shape, wanted, strict=True)):
            raise ValueError(f"a result has the shape {tuple(tensor.shape)}, and not {tuple(wanted)}")
    strides = [of_all(regions, lambda r: r.stride) for regions in results]
    compiled = compile_graph(graph, operands, mode, strides, members[-1])
    guards = shapes.produce_guards_expression(placeholders=[base], guards=shapes.get_pruned_guards([base]))
    return Generated(compiled, guards, (base,), mode)


def _symbol(shapes: Any, hint: int) -> Any:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource("base")
    symbol = shapes.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=hint, source=source)


def _expression(values: Sequence[int], bases: Sequence[int]) -> Expression:
    found = fitted(values, bases)
    if found is None:
        raise ValueError(f"{list(values)} is no expression of {list(bases)}")
    return found


class _OneGraph:
    """Graphs that are the same but for numbers, as one function of the base and the operands."""

    def __init__(self, graphs: Sequence[GraphModule], bases: Sequence[int]) -> None:
        self._bases = bases
        nodes = [list(graph.graph.nodes) for graph in graphs]
        if len({len(each) for each in nodes}) != 1:
            raise ValueError("graphs of other sizes have other ops")
        self._at = [{node: i for i, node in enumerate(each)} for each in nodes]
        self._steps = [self._step(same) for same in zip(*nodes, strict=True)]

    def run(self, base: Any, *operands: torch.Tensor) -> Any:
        made: list[Any] = []
        given = iter(operands)
        for op, target, args, kwargs in self._steps:
            if op == "placeholder":
                made.append(next(given))
                continue
            found = _filled(args, base, made)
            if op == "output":
                return list(found[0])
            made.append(target(*found, **_filled(kwargs, base, made)))
        raise AssertionError("a graph has an output")

    def _step(self, same: Sequence[Node]) -> tuple[str, Any, Any, Any]:
        first = same[0]
        if any((n.op, n.target) != (first.op, first.target) for n in same) and first.op != "placeholder":
            raise ValueError(f"{first} is another op in other sizes")
        if first.op not in ("placeholder", "call_function", "output"):
            raise ValueError(f"{first} is a constant")
        return first.op, first.target, self._merged([n.args for n in same]), self._merged([n.kwargs for n in same])

    def _merged(self, values: Sequence[Any]) -> Any:
        """One argument of three: nodes by their number, numbers as expressions of the base."""
        first = values[0]
        kinds = {type(value) for value in values}
        if len(kinds) != 1:
            raise ValueError(f"{list(values)} are not of one kind")
        if isinstance(first, Node):
            [number] = {at[value] for at, value in zip(self._at, values, strict=True)}
            return _NodesValue(number)
        if isinstance(first, tuple | list):
            return tuple(self._merged(each) for each in zip(*values, strict=True))
        if isinstance(first, dict):
            return {name: self._merged([value[name] for value in values]) for name in first}
        if isinstance(first, int) and not isinstance(first, bool) and len(set(values)) > 1:
            return _expression(values, self._bases)
        if isinstance(first, float) and len(set(values)) > 1 and (ratio := fitted_ratio(values, self._bases)):
            return ratio
        if any(value != first for value in values):
            raise ValueError(f"{list(values)} is no expression of the base")
        return first


@dataclass(frozen=True)
class _NodesValue:
    """What a node made."""

    number: int


def _filled(value: Any, base: Any, made: Sequence[Any]) -> Any:
    if isinstance(value, _NodesValue):
        return made[value.number]
    if isinstance(value, Expression | Ratio):
        return value.of(base)
    if isinstance(value, tuple):
        return tuple(_filled(each, base, made) for each in value)
    if isinstance(value, dict):
        return {name: _filled(each, base, made) for name, each in value.items()}
    return value

"""How long an op takes, predicted: the bytes it moves and the operations it does, against a machine's rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

from takeback.compiler.ownership.facts import EMPTY
from takeback.compiler.program import Argument, BufferId, Cluster, Op, Region, Special
from takeback.compiler.schema import schema_of

aten = torch.ops.aten

#: One exponential or the like per element: on a CPU these are bound by arithmetic, not by memory.
_MATHS = frozenset(
    (
        *("gelu", "gelu_backward", "silu", "silu_backward", "sigmoid", "tanh", "exp", "log", "erf", "softplus", "mish"),
        *("elu", "_softmax", "_log_softmax", "sin", "cos", "pow", "log_sigmoid_forward", "logsumexp"),
    )
)
#: How often an op goes over its operands where it is more than once (measured on CPUs, benchmarks/frontier.py).
_TIMES = {
    "native_layer_norm": 2,
    "native_group_norm": 2,
    "native_layer_norm_backward": 2,
    "native_batch_norm_backward": 2,
}
_TRAINING_NORM = 4
_HALF_CONVOLUTION = 0.4  #: of a product's rate, on an H200 with ResNet-50's sizes
_TOGETHER = 8  #: channels
_WINDOWS = frozenset(("max_pool2d_with_indices", "avg_pool2d", "max_pool3d_with_indices", "avg_pool3d"))


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second, as run/calibrate.py found it."""

    bytes_per_s: float
    maths_per_s: float  #: elements of an exponential function, or of the like
    op_s: float  #: what any op costs, however small
    flops_per_s: Mapping[str, float] = field(default_factory=dict)  #: of a matrix product, by dtype
    convolution: float = 1.0  #: operations a second of a convolution, relative to a matrix product's
    attention: float = 1.0  #: of a fused attention
    #: the table where measuring was not steady; "known" are those of a GPU by its name
    source: Literal["measured", "table", "known"] = "measured"

    def product(self, dtype: torch.dtype) -> float:
        name = str(dtype).removeprefix("torch.")
        return self.flops_per_s.get(name) or self.flops_per_s["float32"]


def seconds(op: Op, rates: Rates) -> float:
    """The predicted time of one op."""
    if isinstance(op.target, Special) or op.target in EMPTY:
        return 0.0
    name = schema_of(op.target).name
    outputs = op.outputs
    moved = sum(_bytes(r) for r in dict.fromkeys((*op.inputs, *outputs)))
    if isinstance(op.target, Cluster):
        return rates.op_s + moved / rates.bytes_per_s
    times = _TIMES.get(name, 1)
    if name == "native_batch_norm" and op.args[5]:
        times = _TRAINING_NORM
    time = times * moved / rates.bytes_per_s
    if name in _MATHS:
        time = max(time, outputs[0].numel / rates.maths_per_s)
    if name in _WINDOWS:
        time = max(time, outputs[0].numel * math.prod(_window(op.args[1])) / rates.maths_per_s)
    flops: float = operations(op)
    if flops:
        rate = rates.product(_factors(op))
        if name.startswith("convolution"):
            # Measured in single precision, where a convolution may take shortcuts that products may not.
            half = _factors(op).itemsize < 4
            rate *= min(rates.convolution, _HALF_CONVOLUTION) if half else rates.convolution
            flops *= _in_groups(op) if half else 1.0
        elif name.startswith(("_scaled_dot_product", "_varlen_attn")):
            rate *= rates.attention
        time = max(time, flops / rate)
    return rates.op_s + time


def again_s(ops: Iterable[Op], rebuilt: Collection[BufferId], seconds: Callable[[Op], float]) -> float:
    """How much of the time of these ops goes into what is computed twice."""
    return sum(share * seconds(op) for op in ops if (share := _again_share(op, rebuilt)))


def _again_share(op: Op, rebuilt: Collection[BufferId]) -> float:
    """How much of an op is rebuilding: all, nothing, or of a cluster that makes other things too (passes/join.py), what
    it writes for it."""
    again = [r for r in op.outputs if r.buffer in rebuilt]
    if not again or len(again) == len(op.outputs):
        return float(bool(again))
    return sum(map(_bytes, again)) / max(1, sum(map(_bytes, (*op.inputs, *op.outputs))))


def _in_groups(op: Op) -> float:
    """How many times more a convolution computes in half precision, whose units take channels eight by eight: the first
    one of a network has three."""
    backward = op.name.startswith("convolution_backward")
    weight, groups = op.args[2 if backward else 1], op.args[9 if backward else 8]
    assert isinstance(weight, Region)
    if groups != 1:
        return 1.0  # other units may do these
    return math.prod(math.ceil(n / _TOGETHER) * _TOGETHER / n for n in weight.shape[:2] if n)


def _factors(op: Op) -> torch.dtype:
    """The narrowest floating-point type that an op reads: a product of narrow factors may have a wide result."""
    read = [r.dtype for r in op.inputs if r.dtype.is_floating_point]
    return min(read, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _window(arg: Argument) -> tuple[int, ...]:
    return tuple(int(n) for n in arg) if isinstance(arg, tuple) else ()


def operations(op: Op) -> int:
    """Floating-point operations of a matrix product, a convolution or an attention; 0 for everything else."""
    target = op.target
    if isinstance(target, Special | Cluster):
        return 0
    if target.namespace == "aten" and "_scaled_dot_product" in schema_of(target).name:
        return _attention(op)
    if target is aten.convolution_backward.default and not op.args[7]:
        return _convolution_backward(op)
    formula = flop_registry.get(target.overloadpacket)
    if formula is None:
        return 0
    # torch wraps a formula of shapes; the others, as of attention over texts in one row, ask tensors.
    given = _shape if hasattr(formula, "__wrapped__") else _without_values
    args = [given(a) for a in op.args if not isinstance(a, torch.dtype)]
    results = tuple(map(given, op.results))
    kwargs = {k: given(v) for k, v in op.kwargs.items() if k != "out"}
    return int(formula(*args, **kwargs, out_val=results if len(results) > 1 else results[0]))


def _shape(argument: Argument) -> Any:
    return argument.shape if isinstance(argument, Region) else argument


def _without_values(argument: Argument) -> Any:
    """A tensor of the region's shape."""
    return (
        torch.empty(argument.shape, dtype=argument.dtype, device="meta") if isinstance(argument, Region) else argument
    )


def _convolution_backward(op: Op) -> int:
    """Each of the two gradients takes what the forward did; torch's own formula forgets that channels may be in
    groups. Transposed ones it knows."""
    gradient, weight, wanted = op.args[0], op.args[2], op.args[10]
    assert isinstance(gradient, Region)
    assert isinstance(weight, Region)
    assert isinstance(wanted, tuple)
    return 2 * gradient.numel // max(1, weight.shape[0]) * weight.numel * (bool(wanted[0]) + bool(wanted[1]))


def _attention(op: Op) -> int:
    """Two products forward, five backward; half of that where the mask is causal."""
    backward = "backward" in op.name
    shapes = [r.shape for r in op.inputs if len(r.shape) == 4]
    query, key, value = shapes[1:4] if backward else shapes[:3]
    batch, heads, rows, width = query
    product = 2 * batch * heads * rows * key[2]
    total = product * (3 * width + 2 * value[3]) if backward else product * (width + value[3])
    return int(total // 2 if _causal(op) else total)


def _causal(op: Op) -> bool:
    assert not isinstance(op.target, Special)
    names = [p.name for p in schema_of(op.target).parameters]
    place = names.index("is_causal")
    return bool(op.args[place] if len(op.args) > place else op.kwargs.get("is_causal", False))


def _bytes(region: Region) -> int:
    return int(region.numel * region.dtype.itemsize)

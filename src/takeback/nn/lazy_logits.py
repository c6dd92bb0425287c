"""Logits that are made only if somebody reads them: hidden states, the layer that would make them, and what follows.

A converted output layer returns one while it trains. Scaling, tanh, casts, taking rows and reshaping are noted;
`cross_entropy` computes the loss in chunks; anything else makes the logits whole, by the operators that were asked
for, and is counted in the layer's `copies`. After the loss's backward the weights may be others: then it is too late,
and it says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from takeback import engine
from takeback.nn.linear_cross_entropy import stepped, summed_loss
from takeback.nn.loss_rows import LogitStep, LossSettings
from takeback.nn.owner import Copies

Number = float  #: by another name: here `float` is the method
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class Source:
    """What all lazy logits of one call have in common."""

    copies: Copies
    product_dtype: torch.dtype | None  #: autocast's, when the layer was called
    spent: bool = False  #: the backward of a loss has run


@dataclass(frozen=True)
class Product:
    """hidden @ weight.T + bias, and what follows."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    steps: tuple[LogitStep, ...]
    versions: tuple[int, int] = field(default=(0, 0))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))


class LazyLogits:
    """Stands for a tensor of logits: torch's functions, methods and operators work on it."""

    def __init__(self, product: Product, source: Source) -> None:
        self._product = product
        self._source = source
        self._made: Tensor | None = None

    # -- what is known without making them ---------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        return self._product.shape if self._made is None else self._made.shape

    @property
    def dtype(self) -> torch.dtype:
        if self._made is not None:
            return self._made.dtype
        casts = [step.dtype for step in self._product.steps if step.dtype is not None]
        return casts[-1] if casts else self._source.product_dtype or self._product.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self._product.hidden.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def requires_grad(self) -> bool:
        given = self._product
        return any(each is not None and each.requires_grad for each in (given.hidden, given.weight, given.bias))

    @property
    def is_cuda(self) -> bool:
        return bool(self.device.type == "cuda")

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        made = "not made" if self._made is None else "made"
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, {made})"

    # -- what is noted -------------------------------------------------------------------------------------------------

    def float(self) -> Any:
        return self.to(torch.float32)

    def to(self, *arguments: Any, **keywords: Any) -> Any:
        given = (*arguments, *keywords.values())
        if self._made is None and all(each in FLOATS or each == self.device for each in given):
            casts = [each for each in given if isinstance(each, torch.dtype) and each != self.dtype]
            return self._after(*(LogitStep("cast", dtype=dtype) for dtype in casts))
        return self._call("to", torch.Tensor.to, arguments, keywords)

    def contiguous(self) -> Any:
        return self if self._made is None else self._made.contiguous()

    def view(self, *shape: Any) -> Any:
        return self._reshaped("view", shape)

    def reshape(self, *shape: Any) -> Any:
        return self._reshaped("reshape", shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        last = end_dim % self.ndim
        if self._made is None and last < self.ndim - 1:
            return self._of_rows(self._product.hidden.flatten(start_dim, last))
        return self._call("flatten", torch.flatten, (start_dim, end_dim), {})

    def tanh(self) -> Any:
        return self._after(LogitStep("tanh"))

    def mul(self, other: Any) -> Any:
        return self._scaled("mul", other)

    def div(self, other: Any) -> Any:
        return self._scaled("div", other)

    def add(self, other: Any, *, alpha: Any = 1) -> Any:
        given = self._product
        is_bias = isinstance(other, Tensor) and other.numel() == self.shape[-1] == other.shape[-1] and alpha == 1
        if self._made is None and is_bias and not given.steps and given.bias is None and other.dtype == self.dtype:
            return LazyLogits(replace(given, bias=other.reshape(-1)), self._source)
        return self._call("add", torch.add, (other,), {"alpha": alpha})

    __mul__ = __rmul__ = mul
    __truediv__ = div
    __add__ = __radd__ = add

    def __getitem__(self, index: Any) -> Any:
        if self._made is None and (taken := _taken(self._product, index)) is not None:
            return LazyLogits(taken, self._source)
        return self._call("indexing", torch.Tensor.__getitem__, (index,), {})

    def _after(self, *steps: LogitStep) -> Any:
        if self._made is not None:
            return stepped(self._made, steps)
        return LazyLogits(replace(self._product, steps=(*self._product.steps, *steps)), self._source)

    def _scaled(self, kind: Any, other: Any) -> Any:
        if isinstance(other, (int, float)) and not isinstance(other, bool):
            return self._after(LogitStep(kind, other))
        return self._call(kind, getattr(torch, kind), (other,), {})

    def _of_rows(self, hidden: Tensor) -> LazyLogits:
        return LazyLogits(replace(self._product, hidden=hidden), self._source)

    def _reshaped(self, name: str, shape: tuple[Any, ...]) -> Any:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if self._made is None and not isinstance(sizes, torch.dtype) and sizes and sizes[-1] in (self.shape[-1], -1):
            rest = math.prod(sizes[:-1])
            known = sizes[-1] != -1 or (rest > 0 and rest == math.prod(self.shape[:-1]))
            if known and len(sizes) > 1:
                return self._of_rows(self._product.hidden.reshape(*sizes[:-1], self._product.hidden.shape[-1]))
        return self._call(name, getattr(torch.Tensor, name), shape, {})

    # -- the loss ------------------------------------------------------------------------------------------------------

    def loss(
        self,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: Number = 0.0,
    ) -> Tensor:
        """`F.cross_entropy`, in chunks where its arguments allow that."""
        plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
        rows = isinstance(target, Tensor) and not target.is_floating_point() and target.shape == self.shape[:-1]
        if self._made is not None or not (plain and rows and self.ndim == 2):
            asked = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
            return F.cross_entropy(self.made("cross_entropy of another form"), target, *asked)
        given, dtype = self._product, self.dtype
        self._check()
        how = LossSettings(given.steps, ignore_index, label_smoothing, self._source.product_dtype)
        total = summed_loss(given.hidden, given.weight, given.bias, target, how, after=self._spend)
        loss = total if reduction == "sum" else total / (target != ignore_index).sum()
        return loss.to(dtype)

    def _spend(self) -> None:
        self._source.spent = True

    # -- everything else -----------------------------------------------------------------------------------------------

    def made(self, reader: str | None = None) -> Tensor:
        """The logits, whole, as the layer would have made them; a `reader` is counted."""
        if self._made is None:
            self._check()
            given, dtype = self._product, self._source.product_dtype
            # With gradients even under no_grad: whoever reads them later may want some.
            with torch.enable_grad(), torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
                self._made = stepped(F.linear(given.hidden, given.weight, given.bias), given.steps)
            if reader is not None:
                self._source.copies.note(f"{reader} reads them", "the logits were made whole")
        return self._made

    def _check(self) -> None:
        given = self._product
        changed = given.versions != (engine.version_of(given.hidden), engine.version_of(given.weight))
        if self._source.spent or changed:
            raise RuntimeError(
                "these logits were never made: the loss was computed in chunks of rows, and since then "
                + (
                    "its backward has run, after which the weights may be others. "
                    if not changed
                    else "its inputs changed. "
                )
                + "Read outputs.logits before backward(), under torch.no_grad() if it is for a metric; or compute "
                "them in eval(); or convert(model, head=False) makes them as before."
            )

    def _call(
        self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        return function(self.made(name), *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(
            torch.Tensor, name
        ):  # copy, pickle and others ask for what is not there
            raise AttributeError(f"'LazyLogits' object has no attribute {name!r}")
        return getattr(self.made(f".{name}"), name)

    def __reduce__(self) -> Any:
        return _as_it_is, (self.made("pickling").detach(),)

    def __array__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.made("numpy").__array__(*arguments, **keywords)

    def __iter__(self) -> Any:
        return iter(self.made("a loop"))

    def __bool__(self) -> bool:
        return bool(self.made("bool()"))

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], cls):
            lazy, rest = args[0], args[1:]
        elif isinstance(kwargs.get("input"), cls):
            lazy, rest = kwargs.pop("input"), ()
        else:
            lazy, rest = None, ()
        if lazy is not None and function in _NOTED and "out" not in kwargs:
            return getattr(lazy, _NOTED[function])(*rest, **kwargs)
        name = getattr(function, "__name__", str(function))
        return function(*_whole(args, name), **_whole(kwargs, name))


_NOTED: dict[Any, str] = {
    F.cross_entropy: "loss",
    torch.tanh: "tanh",
    torch.add: "add",
    torch.mul: "mul",
    torch.div: "div",
    torch.true_divide: "div",
    torch.reshape: "reshape",
    torch.flatten: "flatten",
}


def lazy_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, copies: Copies) -> LazyLogits:
    """Those of `F.linear(hidden, weight, bias)` as it would be computed here."""
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    source = Source(copies, torch.get_autocast_dtype(device) if autocast else None)
    versions = engine.version_of(hidden), engine.version_of(weight)
    return LazyLogits(Product(hidden, weight, bias, (), versions), source)


def _taken(product: Product, index: Any) -> Product | None:
    """The product's rows, and first classes, that an index takes; None if it is of another kind."""
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() < product.hidden.dim():
        return replace(product, hidden=product.hidden[index])
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) or type(part) is int for part in parts):
        return None
    ndim = product.hidden.dim()
    if sum(part is Ellipsis for part in parts) > 1 or len(parts) - (Ellipsis in parts) > ndim:
        return None
    if Ellipsis not in parts and len(parts) < ndim:
        parts = (*parts, Ellipsis)
    weight, bias = product.weight, product.bias
    if parts[-1] is not Ellipsis:  # the last one is about the classes
        last = parts[-1]
        if not isinstance(last, slice) or last.step not in (None, 1) or last.start not in (None, 0):
            return None
        weight, bias = weight[last], None if bias is None else bias[last]
        parts = (*parts[:-1], slice(None))
    return replace(product, hidden=product.hidden[parts], weight=weight, bias=bias)


def _whole(value: Any, reader: str) -> Any:
    """The value with every lazy tensor in it made."""
    if isinstance(value, LazyLogits):
        return value.made(reader)
    if isinstance(value, (tuple, list)):
        return type(value)(_whole(each, reader) for each in value)
    if isinstance(value, dict):
        return {key: _whole(each, reader) for key, each in value.items()}
    return value


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.made(name), name)(*_whole(others, name))


_LEFT = ("sub", "rsub", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "neg", "abs", "mod", "floordiv")
_ASKING = ("eq", "ne", "lt", "le", "gt", "ge", "invert", "setitem", "index", "int", "float", "contains")
for _name in (*_LEFT, *_ASKING):
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))

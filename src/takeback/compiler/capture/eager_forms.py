"""What torch computes another way while a dispatch mode looks on: its C++ asks whether one is there, and spares it what
depends on data. A recorded step is to be eager's, so here is the form that eager has.

Of two sums over what a mask picks (`PickedSums`), each is one op, whose kernel makes eager's calls; with the values'
number inside of it, no plan has to hold that. A gradient that is shared evenly (`max()`) is filled in (`filled_share`).
Products are in eager_products.py, and what has no form of eager's is refused by looked_on.py.

tests/capture/test_looked_on.py tries every operator of torch's samples with a mode that only looks on: none is found
with other bits but these. Where the values of all samples hide a difference it finds none, and those of a step may hide
it from the first comparison with eager; then a later one tells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from takeback.compiler.capture.looked_on import EXTREMES, is_share, own_node

aten = torch.ops.aten

_library = torch.library.Library("takeback", "FRAGMENT")
_library.define("sum_of_masked(Tensor self, Tensor mask) -> Tensor")
_library.define("sum_of_gathered(Tensor self, Tensor index, Tensor left_out) -> Tensor")
SUM_OF_MASKED = torch.ops.takeback.sum_of_masked.default
SUM_OF_GATHERED = torch.ops.takeback.sum_of_gathered.default
PICKED_SUMS = (SUM_OF_MASKED, SUM_OF_GATHERED)


def _sum_of_masked(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = aten.sum.default(aten.masked_select.default(self, mask))
    return out


def _sum_of_gathered(self: torch.Tensor, index: torch.Tensor, left_out: torch.Tensor) -> torch.Tensor:
    picked = aten.masked_select.default(index, aten.bitwise_not.default(left_out))
    out: torch.Tensor = aten.sum.default(aten.gather.default(self, 0, picked))
    return out


def _shape_of_sum(self: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return self.new_empty(())


for _name, _kernel in (("sum_of_masked", _sum_of_masked), ("sum_of_gathered", _sum_of_gathered)):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"takeback::{_name}", _shape_of_sum, lib=_library)


# -- sums of what a mask picks -----------------------------------------------------------------------------------------

_FLATTENS = (aten.view.default, aten._unsafe_view.default, aten.clone.default)
_NODE = "MaskedFillBackward1"  #: masked_fill with a tensor for a value; checked on 2.11 and 2.13


@dataclass(frozen=True)
class _Zeroed:
    """A value in which zeros stand for what a mask leaves out, on its way to a sum."""

    storage: int
    operands: tuple[torch.Tensor, ...]
    made_at: tuple[int, ...]  #: by these ops
    target: Any = None  #: the op that gives the sum of what is picked; None if the values are still to be gathered


@dataclass
class PickedSums:
    """Told of the ops that are recorded, it says which of them eager has otherwise."""

    by_cross_entropy: Callable[[], bool]  #: whether torch's cross-entropy runs it
    spent: list[int] = field(default_factory=list)  #: where ops stand of which eager knows nothing
    _zeroed: _Zeroed | None = None
    _number: tuple[int, int] = (0, 0)  #: the storage of the last number that became a tensor, and where it was made

    def instead(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The op that is to run, and its operands."""
        zeroed = self._zeroed
        if zeroed is None or zeroed.target is None or func is not aten.sum.default or not _is(args[0], zeroed):
            return func, args
        self._zeroed = None
        self.spent += zeroed.made_at
        return zeroed.target, zeroed.operands

    def ran_(self, func: Any, args: tuple[Any, ...], out: Any, position: int) -> None:
        """An op has run, and been recorded at this position."""
        zeroed, self._zeroed = self._zeroed, None  # it waits for the very next ops alone
        if func is aten.where.self:
            if self._is_gradient_of_a_fill(args):
                zero = self._number[1:] if self._number[0] == _storage(args[2]) else ()
                self._zeroed = _Zeroed(_storage(out), (args[1], args[0]), (*zero, position), SUM_OF_MASKED)
        elif func is aten.scalar_tensor.default:
            self._number = (_storage(out), position)
        elif func is aten.masked_fill.Scalar:
            if args[2] == 0 and not args[0].is_floating_point() and self.by_cross_entropy():
                self._zeroed = _Zeroed(_storage(out), (args[0], args[1]), (position,))
        elif zeroed is None:
            pass
        elif func in _FLATTENS:
            self._zeroed = zeroed
            if func is aten.clone.default:  # of the value, of its mask or of the targets
                storage = _storage(out) if _is(args[0], zeroed) else zeroed.storage
                self._zeroed = _Zeroed(storage, zeroed.operands, (*zeroed.made_at, position), zeroed.target)
        elif func is aten.gather.default and zeroed.target is None and _is(args[2], zeroed):
            made_at = (*zeroed.made_at, position)
            self._zeroed = _Zeroed(_storage(out), (args[0], *zeroed.operands), made_at, SUM_OF_GATHERED)
        elif func is aten.masked_fill_.Scalar and zeroed.target is not None and _is(args[0], zeroed):
            self._zeroed = _Zeroed(zeroed.storage, zeroed.operands, (*zeroed.made_at, position), zeroed.target)

    def _is_gradient_of_a_fill(self, args: tuple[Any, ...]) -> bool:
        return args[2].numel() == 1 and _is_in((_NODE,))


# -- gradients that are shared evenly ----------------------------------------------------------------------------------


def filled_share(func: Any, args: tuple[Any, ...], run: Callable[..., torch.Tensor]) -> torch.Tensor | None:
    """In the place of `mask * (grad / count)`, which makes -0.0 and NaN of what gets nothing: eager's ops, by `run`.
    None where there is nothing to replace."""
    if not is_share(func, args) or not _is_in(EXTREMES):
        return None
    mask, share = args
    nothing = run(aten.new_zeros.default, (share, list(mask.shape)), {})
    return run(aten.masked_fill_.Tensor, (nothing, mask, share), {})


def _is_in(names: Collection[str]) -> bool:
    """Whether one of these nodes runs an op just now by itself."""
    node = torch._C._current_autograd_node()  # checked on 2.11 and 2.13; the name first, for frames take longer
    return node is not None and node.name() in names and own_node() is not None


def _storage(tensor: torch.Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _is(tensor: torch.Tensor, zeroed: _Zeroed) -> bool:
    return _storage(tensor) == zeroed.storage


# -- a kernel that conjugates inside -----------------------------------------------------------------------------------


def as_in_eager(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op. Below a mode torch (2.13) leaves out what resolves conjugate views, also those that the kernel of a
    complex pseudo-inverse makes inside, and gives another matrix. The gradient of lstsq asks for one."""
    if func is not aten.linalg_pinv.atol_rtol_tensor or not args[0].is_complex():
        return func(*args, **kwargs)
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.Conjugate)  # checked on 2.13
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        return func(*args, **kwargs)

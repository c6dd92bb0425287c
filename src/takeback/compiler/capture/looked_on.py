"""Which of autograd's nodes runs an op just now, by its own C++; and of those that compute another way while they are
recorded, and have no form of eager's here: a refusal, with a way out.

What is asked is the node's name, so it does not matter by which spelling, transform or script it was made.
eager_forms.py and eager_products.py have the forms that eager has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch._functorch.eager_transforms import _autograd_grad  # checked on 2.13
from torch.autograd.graph import Node

from takeback.compiler.capture.eager_products import running_products_differ
from takeback.compiler.capture.ran import origin_of_file
from takeback.errors import CaptureError

aten = torch.ops.aten

_ENGINE = torch.autograd.graph._engine_run_backward.__code__  # checked on 2.11 and 2.13
_TORCH = os.path.dirname(torch.__file__)
_WRAPS = tuple(os.path.join(_TORCH, *p) for p in (("_compile.py",), ("_dynamo", "eval_frame.py")))  # __torch_dispatch__
_TRANSFORMED = _autograd_grad.__code__  # how torch.func calls the engine


def own_node() -> Node | None:
    """The node of autograd's that runs an op just now by itself: in no hook, no function and no second forward of
    anybody's. None under torch.func, where eager is looked on, too."""
    node = torch._C._current_autograd_node()  # checked on 2.11 and 2.13
    if node is None:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_origin(frame) == "takeback" or frame.f_code.co_filename in _WRAPS):
        frame = frame.f_back
    if frame is None:
        return node  # a GPU's backward runs on a thread of autograd's, which has no frames below
    if frame.f_code is not _ENGINE:
        return None
    frame = frame.f_back
    while frame is not None and frame.f_code is not _ENGINE:
        if frame.f_code is _TRANSFORMED:
            return None
        frame = frame.f_back
    return node


def _origin(frame: FrameType) -> str:
    return origin_of_file(frame.f_code.co_filename)


@dataclass(frozen=True)
class _OtherForm:
    """Of a node: when its gradient is not eager's, and what to tell."""

    what: str
    way_out: str
    differs: Callable[[Any, tuple[Any, ...], Node], bool]


def refuse_other_form(func: Any, args: tuple[Any, ...], at: Callable[[], str]) -> None:
    """Before each op of a recording that is to have eager's bits. `at()` is the place, in words."""
    node = torch._C._current_autograd_node()  # checked on 2.11 and 2.13
    form = _OTHER_FORMS.get(node.name()) if node is not None else None
    if node is None or form is None or not form.differs(func, args, node) or own_node() is None:
        return
    raise CaptureError(
        f"torch computes {form.what} another way while it is recorded{at()}, and would not have eager's bits. "
        f"Nothing has been changed. {form.way_out}"
    )


def _is_of_many(func: Any, args: tuple[Any, ...], node: Node) -> bool:
    """Whether there is anything to multiply."""
    saved: Any = node
    input = saved._raw_saved_self.data  # checked on 2.13; unpacking would call hooks
    if isinstance(input, torch.Tensor):
        in_vmap = torch._C._functorch.is_functorch_wrapped_tensor(input)  # and eager is looked on, too; checked on 2.13
        return bool(input.dim() and input.numel()) and not in_vmap
    if input is None:
        return False  # done: the engine adds up what has been computed
    return func is not aten.detach.default  # a hook keeps it; of what is trivial nothing else is computed


def _is_running(func: Any, args: tuple[Any, ...], node: Node) -> bool:
    if func is not aten.eq.Scalar:
        return False
    return running_products_differ() or torch.is_grad_enabled() or bool(args[0].is_complex())


def _is_shared_with_graph(func: Any, args: tuple[Any, ...], node: Node) -> bool:
    return torch.is_grad_enabled() and is_share(func, args)


def is_share(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether `mask * (grad / count)` is computed, which eager has on no CPU."""
    if func is not aten.mul.Tensor:
        return False
    mask, share = args
    if not isinstance(share, torch.Tensor) or share.dim():
        return False
    return mask.dtype is torch.bool and mask.device.type != "cuda"


def _is_by_singular_values(func: Any, args: tuple[Any, ...], node: Node) -> bool:
    return torch.is_grad_enabled() and func is aten._linalg_svd.default


_OR = "Or use mode='fast' or unplanned='eager'."
_PRODUCT = _OtherForm(
    "the gradient of a product that it was not called for from Python (torch.func.vmap, TorchScript, a tensor's "
    "subclass, DisableTorchFunction)",
    f"Call torch.prod or Tensor.prod on a plain tensor, outside of these. {_OR}",
    _is_of_many,
)
_RUNNING = _OtherForm(
    "the gradient of this cumprod (in place, inside of another function, of complex numbers, with create_graph=True)",
    f"Multiply step by step, or update to torch 2.13 if it is older. {_OR}",
    _is_running,
)
_EXTREME = _OtherForm(
    "the gradient of max(), min(), median() or nanmedian() over a whole tensor, with create_graph=True,",
    f"Call x.amax() or x.amin(); for a median x.flatten().median(0).values. {_OR}",
    _is_shared_with_graph,
)
_DETERMINANT = _OtherForm(
    "the gradient of a determinant with create_graph=True",
    f"Use torch.linalg.slogdet. {_OR}",
    _is_by_singular_values,
)
#: Of full reductions one of the two is the node; the other, over a dimension, multiplies nothing.
EXTREMES = tuple(f"{name}Backward{i}" for name in ("Max", "Min", "Median", "Nanmedian") for i in (0, 1))
_OTHER_FORMS = {
    "ProdBackward0": _PRODUCT,
    "ProdBackward1": _PRODUCT,
    "CumprodBackward0": _RUNNING,
    **dict.fromkeys(EXTREMES, _EXTREME),
    "LinalgDetBackward0": _DETERMINANT,
}

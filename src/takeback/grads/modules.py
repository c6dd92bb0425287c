"""Gives modules a forward whose backward packs, without a change to the user's code, and takes it away again.

In: the user's model. Out: which forward each module takes, and for each parameter why its gradient cannot be packed, if
so. While attached a module's class is a subclass of its own with the same name, as torch's parametrize and fully_shard
do it: a bound method in the instance would follow it into replicas and compute with the original's weights. A copy, and
what comes back from a file, is of the plain class.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import nn

from takeback.engine import transformed
from takeback.errors import GradBufferError
from takeback.grads import conv, norms
from takeback.grads.linear import Embedding, Linear, autocast_to, cast_like_autocast
from takeback.grads.slots import slot_of

Forward = Callable[..., torch.Tensor]
BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
Conv: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d


def packs(module: nn.Module) -> bool:
    """Whether a call now is to be recorded by a Function of ours."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or transformed():
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or weight is bias or not weight.is_floating_point():
        return False  # no weight, or one that is computed (parametrize)
    return any(p is not None and p.requires_grad and slot_of(p) is not None for p in (weight, bias))


def _plainly(module: nn.Module, given: torch.Tensor) -> torch.Tensor:
    """What the module's own class does."""
    plain = module._plain_class if isinstance(module, PacksGradients) else type(module)
    return cast(torch.Tensor, plain.forward(module, given))


def _linear(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    if not packs(self):
        return _plainly(self, input)
    dtype = autocast_to(input)
    return Linear.apply(cast_like_autocast(input, dtype), self.weight, self.bias, dtype, False)


def _columns(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not packs(self):
        return _plainly(self, x)
    dtype = autocast_to(x)
    return Linear.apply(cast_like_autocast(x, dtype), self.weight, self.bias, dtype, True)


def _embedding(self: nn.Embedding, input: torch.Tensor) -> torch.Tensor:
    if not packs(self):
        return _plainly(self, input)
    return Embedding.apply(input, self.weight, self.padding_idx)


def _conv(self: Conv, input: torch.Tensor) -> torch.Tensor:
    if not packs(self) or input.dim() != self.weight.dim():
        return _plainly(self, input)
    dtype = autocast_to(input)
    return conv.Conv.apply(
        cast_like_autocast(input, dtype),
        self.weight,
        self.bias,
        self.stride,
        self.padding,
        self.dilation,
        self.groups,
        dtype,
    )


@functools.cache
def _widens(norm: str) -> bool:
    """Whether autocast on CUDA runs this norm in float32: it depends on the version of torch, which is asked."""
    x = torch.zeros(1, 1, 2, device="cuda", dtype=torch.float16)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        y = F.group_norm(x, 1) if norm == "group_norm" else getattr(F, norm)(x, (2,))
    return y.dtype is torch.float32


def _wide(x: torch.Tensor, norm: str) -> torch.Tensor:
    """As autocast does it on CUDA. On the CPU norms are left alone."""
    narrow = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled("cuda")
    return x.float() if narrow and _widens(norm) else x


def _layer_norm(self: nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
    if not packs(self):
        return _plainly(self, input)
    return norms.LayerNorm.apply(_wide(input, "layer_norm"), self.weight, self.bias, self.normalized_shape, self.eps)


def _rms_norm(self: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    if not packs(self):
        return _plainly(self, x)
    return norms.RMSNorm.apply(_wide(x, "rms_norm"), self.weight, self.normalized_shape, self.eps)


def _group_norm(self: nn.GroupNorm, input: torch.Tensor) -> torch.Tensor:
    if not packs(self) or not input.is_contiguous() or not input.numel():
        return _plainly(self, input)
    return norms.GroupNorm.apply(_wide(input, "group_norm"), self.weight, self.bias, self.num_groups, self.eps)


def _batch_norm(self: BatchNorm, input: torch.Tensor) -> torch.Tensor:
    batch_statistics = self.training or self.running_mean is None
    wrong = input.dim() < 2 or (batch_statistics and input.numel() <= input.shape[1])  # the class says what is wrong
    if wrong or not packs(self):
        return _plainly(self, input)
    self._check_input_dim(input)
    momentum = self.momentum or 0.0
    if self.training and self.track_running_stats and self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
        if self.momentum is None:  # a plain average over all batches
            momentum = 1.0 / float(self.num_batches_tracked)
    tracked = not self.training or self.track_running_stats
    running = (self.running_mean, self.running_var) if tracked else (None, None)
    return norms.BatchNorm.apply(input, self.weight, self.bias, running, batch_statistics, momentum, self.eps)


@dataclass(frozen=True)
class Packing:
    """How a module's gradients are packed: the forward it takes, if any, and why a parameter is copied nevertheless."""

    forward: Forward | None
    whole: str = ""  #: the reason for all of its parameters
    reasons: dict[str, str] = field(default_factory=dict)  #: the reasons for some

    def reason(self, name: str) -> str:
        return self.whole or self.reasons.get(name, "")


def _embedding_packing(module: nn.Embedding) -> Packing:
    if module.sparse:
        raise GradBufferError(
            "an nn.Embedding has sparse=True: its gradient is sparse, and a flat buffer is dense. Use sparse=False, or "
            "pass the parameters of the other modules only."
        )
    if module.max_norm is not None or module.scale_grad_by_freq:
        return Packing(None, "an embedding with max_norm or scale_grad_by_freq")
    return Packing(_embedding)


def _conv_packing(module: Conv) -> Packing:
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return Packing(None, f"a convolution with padding {module.padding_mode!r} or given as a word")
    if conv.is_product(module.weight, module.padding, module.groups):
        return Packing(_conv)
    size = "×".join(map(str, module.kernel_size))
    grouped = f" in {module.groups} groups" if module.groups > 1 else ""
    padded = " with padding" if set(module.kernel_size) == {1} and module.groups == 1 else ""
    reason = f"torch has no kernel that writes the weight gradient of a {size} convolution{grouped}{padded} into place"
    return Packing(_conv, reasons={"weight": reason})


def _always(forward: Forward) -> Callable[[nn.Module], Packing]:
    return lambda _: Packing(forward)


_KINDS: dict[type[nn.Module], Callable[[Any], Packing]] = {
    nn.Linear: _always(_linear),
    nn.Embedding: _embedding_packing,
    nn.LayerNorm: _always(_layer_norm),
    nn.RMSNorm: _always(_rms_norm),
    nn.GroupNorm: _always(_group_norm),
    nn.BatchNorm1d: _always(_batch_norm),
    nn.BatchNorm2d: _always(_batch_norm),
    nn.BatchNorm3d: _always(_batch_norm),
    nn.Conv1d: _conv_packing,
    nn.Conv2d: _conv_packing,
    nn.Conv3d: _conv_packing,
}


def packing_of(module: nn.Module) -> Packing:
    """How the gradients of a module's own parameters are packed."""
    kind = type(module)
    own = vars(module).get("forward")
    if own is not None and getattr(own, "__func__", None) is not kind.forward:
        return Packing(None, f"the forward of this {kind.__name__} was replaced")
    if f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D":
        return Packing(_columns)
    for known, packing in _KINDS.items():
        if isinstance(module, known) and kind.forward is known.forward:
            return packing(module)
    return Packing(None, f"{kind.__name__} computes with it in its own way")


# -- attaching ---------------------------------------------------------------------------------------------------------


class PacksGradients:
    """Marks the classes that `packed_class` makes."""

    _plain_class: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, or what comes back from a file, is of the plain class."""
        made, arguments, *rest = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        if made.__name__ == "__newobj__":  # which insists on the object's own class
            made, arguments = copyreg._reconstructor, (self._plain_class, object, None)  # type: ignore[attr-defined]
        return (made, arguments, *rest)


_packed_classes: dict[tuple[object, Forward], type[nn.Module]] = {}


def packed_class(plain: type[nn.Module], forward: Forward) -> type[nn.Module]:
    """The class with another forward, and in all else the same."""
    if found := _packed_classes.get((plain, forward)):
        return found
    body = {
        "forward": forward,
        "_plain_class": plain,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }
    made = type(plain.__name__, (PacksGradients, plain), body)
    return _packed_classes.setdefault((plain, forward), made)


_users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  #: how many buffers a module serves


def attach_(model: nn.Module) -> tuple[list[weakref.ref[nn.Module]], dict[int, str]]:
    """Gives every module its forward. Returns the modules that have one now, and for the ids of parameters why their
    gradients are copied."""
    modules = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    plans = [_plan(m) for m in modules]  # which may raise: nothing has been changed yet
    reasons: dict[int, str] = {}
    attached = []
    for module, (packing, packed) in zip(modules, plans, strict=True):
        for name, p in module.named_parameters(recurse=False):
            if reason := packing.reason(name) or ("" if p.is_floating_point() else f"it is {p.dtype}"):
                reasons.setdefault(id(p), reason)
        if packed is not None:
            module.__class__ = packed
            _users[module] = _users.get(module, 0) + 1
            attached.append(weakref.ref(module))
    return attached, reasons


def _plan(module: nn.Module) -> tuple[Packing, type[nn.Module] | None]:
    """How a module is packed, and the class it takes for that."""
    packing = _ours(module) or packing_of(module)
    if packing.forward is None or isinstance(module, PacksGradients):
        return packing, type(module) if packing.forward is not None else None
    try:
        return packing, packed_class(type(module), packing.forward)
    except TypeError as error:  # a class with rules of its own for subclasses
        return Packing(None, f"{type(module).__name__} cannot be subclassed: {error}"), None


def _ours(module: nn.Module) -> Packing | None:
    """The packing of a module that serves another buffer already."""
    if not isinstance(module, PacksGradients):
        return None
    module.__class__, packed = module._plain_class, type(module)
    try:
        return packing_of(module)
    finally:
        module.__class__ = packed


def detach_(modules: Iterable[weakref.ref[nn.Module]]) -> None:
    """Gives modules that serve no other buffer their class back, where nobody has put another in its place since."""
    for reference in modules:
        module = reference()
        if module is None:
            continue
        _users[module] -= 1
        if not _users[module]:
            del _users[module]
            if "_plain_class" in vars(type(module)):
                module.__class__ = type(module)._plain_class

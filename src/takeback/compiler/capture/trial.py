"""Tries a call once more with tensors whose bytes cannot be read, or are others: what the dispatcher is not told, the
call then cannot know.

In: a call, with the ops it dispatched. Out: whether it, or its backward, needs the bytes of given tensors outside of
those ops. Ops of the trial run on the real tensors; what belongs to others is not written, no number is drawn for
good, and autograd's history of no tensor changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from takeback.compiler.capture.modes import WithoutDispatchModes
from takeback.compiler.capture.op_facts import facts_of, written_tensors
from takeback.compiler.program import OpOverload
from takeback.engine import saved_through_hooks

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class OpForm:
    """An op that was dispatched, and what a replay would repeat of its arguments."""

    target: OpOverload
    arguments: str


@dataclass(frozen=True)
class Call:
    """A call that has been made, and the ops that it dispatched."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seen: tuple[OpForm, ...]


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether it holds whole numbers or booleans."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    if type(tree) in _PLAIN:
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        yield from tensors_in(tuple(tree.values()))


def form_of(tree: object) -> Hashable:
    """What decides, besides values in tensors, which ops a call dispatches."""
    if isinstance(tree, torch.Tensor):
        return (tree.dtype, tree.shape, tree.requires_grad)
    if isinstance(tree, list | tuple):
        return (*(form_of(item) for item in tree),)
    if isinstance(tree, dict):
        return tuple((key, form_of(item)) for key, item in tree.items())
    if isinstance(tree, float | complex):
        return repr(tree)  # NaN, too, is equal to itself
    return tree if isinstance(tree, int | str | None | torch.dtype | torch.device) else repr(tree)


def form_of_op(func: OpOverload, args: Any, kwargs: Any) -> OpForm:
    return OpForm(func, repr(_map((args, kwargs), lambda t: (t.dtype, t.shape))))


def _map(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if type(tree) in (list, tuple):
        return type(tree)(_map(item, change) for item in tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(item, change) for item in tree))
    if isinstance(tree, dict):
        return {key: _map(item, change) for key, item in tree.items()}
    return tree


def needs_bytes(call: Call, hidden: Sequence[torch.Tensor]) -> bool:
    """Whether the call does not dispatch the same ops, or has no backward, without the bytes of `hidden`."""
    first = _try(call, _WithoutBytes, hidden)
    if first.forward is None:
        return True
    seen: tuple[OpForm, ...] | None = call.seen
    if saved_through_hooks():
        # Torch saves its results in another way then: a trial, which has no hooks, can be compared with one alone.
        seen = _try(call, _WithoutBytes, ()).forward
        if seen is None:
            return True
    if first.forward == seen:
        # Some calls have no backward with bytes either.
        return not first.has_backward and _try(call, _WithoutBytes, ()).has_backward
    # torch takes another way for a tensor that is none of its own: once more, with plain tensors of other values.
    second = _try(call, _Decoys, hidden)
    return second.forward != seen or not second.has_backward


@dataclass(frozen=True)
class _Tried:
    """The ops that a trial dispatched, None if it failed; and whether its backward ran."""

    forward: tuple[OpForm, ...] | None
    has_backward: bool = False


def _try(call: Call, kind: type[_WithoutBytes], hidden: Sequence[torch.Tensor]) -> _Tried:
    with WithoutDispatchModes(), torch._C.DisableTorchFunction(), _no_hooks():
        trial = kind({t.untyped_storage()._cdata for t in tensors_in((call.args, call.kwargs))})
        unreadable = {id(t) for t in hidden}
        made: dict[int, torch.Tensor] = {}

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = trial.hide(tensor) if id(tensor) in unreadable else _alias(tensor)
            return made[id(tensor)]

        args, kwargs = _map(call.args, stand_in), _map(call.kwargs, stand_in)
        with trial:
            try:
                out = call.func(*args, **kwargs)
            except Exception:  # whatever it is: the call could not be made without these bytes
                return _Tried(None)
            forward = tuple(trial.seen)
            roots = [t for t in tensors_in(out) if t.requires_grad]
            leaves = [t for t in made.values() if t.requires_grad]
            try:
                if roots and leaves:
                    torch.autograd.grad(roots, leaves, [torch.ones_like(t) for t in roots], allow_unused=True)
            except Exception:
                return _Tried(forward)
    return _Tried(forward, has_backward=True)


@contextlib.contextmanager
def _no_hooks() -> Iterator[None]:
    """What a trial saves is none of the user's: the hooks of a checkpoint would run it again."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)  # checked on 2.13
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes with a history of its own, so that autograd leaves that of `tensor` alone."""
    alias = tensor.data
    if not tensor.requires_grad:
        return alias
    alias.requires_grad_()
    if tensor.is_leaf:
        return alias
    with _Passing():
        return alias.clone()


class _Passing(TorchDispatchMode):
    """Makes a clone the very bytes it is a clone of: to autograd it is a tensor of its own, and no view."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].detach()


class _Unreadable(torch.Tensor):
    """Stands for a tensor and has no bytes: C++ that asks for them gets an error. Checked on 2.13."""

    behind: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> _Unreadable:
        made: _Unreadable = torch.Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=real.device,
        )
        made.behind = real
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError("the mode of the trial is on, and comes first")


class _WithoutBytes(TorchDispatchMode):
    """Runs ops on what the stand-ins stand for, and leaves out those that write one of the storages `borrowed`."""

    def __init__(self, borrowed: set[int]) -> None:
        super().__init__()
        self.seen: list[OpForm] = []
        self._borrowed = borrowed

    def hide(self, tensor: torch.Tensor) -> torch.Tensor:
        return _Unreadable(tensor)

    def show(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a stand-in stands for; any other tensor itself."""
        return tensor.behind if isinstance(tensor, _Unreadable) else tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(form_of_op(func, args, kwargs or {}))
        real_args, real_kwargs = _map(args, self.show), _map(kwargs or {}, self.show)
        written = written_tensors(func, real_args, real_kwargs)
        if any(t.untyped_storage()._cdata in self._borrowed for t in written):
            returns = func._schema.returns
            if torch.Tag.inplace_view in func.tags or len(returns) > 1 or len(written) > 1:
                raise NotImplementedError(f"{func} in a trial")
            return written_tensors(func, args, kwargs or {})[0] if returns else None
        states = [(g, g.get_state()) for g in _drawn_from(func, real_args, real_kwargs)]
        out = func(*real_args, **real_kwargs)
        for generator, state in states:
            generator.set_state(state)
        if written:  # what the trial itself has made
            return written_tensors(func, args, kwargs or {})[0] if len(func._schema.returns) == 1 else out
        hidden = any(a is not b for a, b in zip(_leaves(args, kwargs), _leaves(real_args, real_kwargs), strict=True))
        # What comes of unreadable numbers is as unreadable, as long as it is whole numbers.
        return _map(out, lambda t: self.hide(t) if is_whole(t) else t) if hidden else out


def _leaves(args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map((args, kwargs), found.append)
    return found


def _drawn_from(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Generator]:
    if not facts_of(func).random:
        return []
    given = kwargs.get("generator")
    if given is not None:
        return [given]
    devices = {t.device for t in tensors_in((args, kwargs)) if t.device.type == "cuda"}
    return [torch.default_generator, *(torch.cuda.default_generators[d.index] for d in devices if d.index is not None)]


class _Decoys(_WithoutBytes):
    """The same with stand-ins that have bytes, every element another one than that of the tensor they stand for."""

    def __init__(self, borrowed: set[int]) -> None:
        super().__init__(borrowed)
        self._behind: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by storage: a decoy, and the real one

    def hide(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
        decoy = ~whole if tensor.dtype is torch.bool else whole + 1
        self._behind[decoy.untyped_storage()._cdata] = (decoy, whole)
        return decoy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def show(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._behind.get(tensor.untyped_storage()._cdata)
        if known is None:
            return tensor
        _, whole = known
        size = whole.numel() * whole.element_size() // tensor.element_size()
        typed = whole if tensor.dtype is whole.dtype else whole.view(tensor.dtype)[:size]
        return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

"""What only torch's internals can say: what a node has saved, and the entry to the autograd engine.

A guard must not change what it watches. Nodes are asked through `_raw_saved_*`, which unpacks nothing, so no checkpoint
is computed again; storages are held by weak pointers, so that a node which counts references sees its own. Everything
that enters the engine, also through a name imported before the guard, passes `_engine_run_backward`. Checked on 2.13;
an attribute that another version lacks is answered with "nothing known", never with an error.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import graph
from torch.autograd.graph import Node
from torch.utils import _python_dispatch, checkpoint

Run = Callable[..., Any]
MODULE_CALL = torch.nn.Module._call_impl.__code__
"""The frame of a module's call: its `self` is the module."""


def address_of(tensor: torch.Tensor) -> int | None:
    """Where the bytes of the tensor's storage begin, which a copy-on-write storage is not copied for."""
    try:
        return int(torch._C._data_address(tensor)) or None
    except (AttributeError, RuntimeError):
        return None


# -- the entry to the engine -------------------------------------------------------------------------------------------

_HOMES = (torch.autograd, graph)
_NAME = "_engine_run_backward"


def intercept(run: Callable[[Run, tuple[Any, ...], dict[str, Any]], Any]) -> Callable[[], None]:
    """Every call into the engine becomes `run(original, arguments, keywords)`, until the result is called."""
    original: Run = getattr(graph, _NAME)

    def intercepted(*arguments: Any, **keywords: Any) -> Any:
        return run(original, arguments, keywords)

    before = [getattr(home, _NAME) for home in _HOMES]
    for home in _HOMES:
        setattr(home, _NAME, intercepted)

    def undo() -> None:
        for home, function in zip(_HOMES, before, strict=True):
            setattr(home, _NAME, function)

    return undo


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Work of the guard is seen by no mode of the user's (a default device, a counter of flops), not recorded by
    autograd, and not traced."""
    trace = sys.gettrace()
    if trace is not None:
        sys.settrace(None)
    try:
        with torch._C.DisableTorchFunction(), _python_dispatch._disable_current_modes(), torch.no_grad():
            yield
    finally:
        if trace is not None:
            sys.settrace(trace)


# -- torch.compile -----------------------------------------------------------------------------------------------------


def never_compiled(function: Any) -> Any:
    """torch.compile takes a trace function, and what it calls, for code of the user's: it runs in the middle of it."""
    frames = torch._C._dynamo.eval_frame
    with contextlib.suppress(AttributeError):
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, skip)
    return function


# -- nodes -------------------------------------------------------------------------------------------------------------


def sequence_number() -> int:
    """The number that this thread gives to the next node it makes."""
    return int(torch.autograd._get_sequence_nr())


def number_of(node: Node) -> int | None:
    """The number a node was made with. Leaves have none."""
    number = int(node._sequence_nr())
    return None if number == 2**64 - 1 else number


def saved_by(node: Node) -> Iterator[tuple[str, object]]:
    """(name, value) of all that a node has saved and not yet released. With saved-tensor hooks the value is what the
    pack hook returned; it is not unpacked."""
    kind: Any = type(node)
    for attribute in _raw_attributes(kind):
        try:
            raw = getattr(node, attribute)
        except RuntimeError:  # released
            continue
        name = attribute.removeprefix("_raw_saved_")
        several = isinstance(raw, tuple | list)
        for i, one in enumerate(raw if several else (raw,)):
            value = getattr(one, "data", None)
            if value is not None:
                yield (f"{name}[{i}]" if several else name), value


@functools.lru_cache(maxsize=4096)
def _raw_attributes(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


CHECKPOINTS: tuple[type, ...] = tuple(
    kind for kind in (getattr(checkpoint, "_CheckpointFrame", None),) if kind is not None
)
"""What keeps the inputs of a checkpointed block, for computing it again."""


def inputs_of(frame: Any) -> Iterator[torch.Tensor]:
    """The tensors that a checkpoint computes again from; none where they are packed by hooks."""
    for one in getattr(frame, "saved_args", ()):
        value = getattr(one, "data", None)
        if isinstance(value, torch.Tensor):
            yield value


def has_computed_again(frame: Any) -> bool:
    """Whether a checkpoint has done so in the backward that is running."""
    return bool(getattr(frame, "is_recomputed", {}).get(torch._C._current_graph_task_id(), False))


def knows_what_is_saved() -> bool:
    """Whether this torch shows what a node saved without unpacking it."""
    return hasattr(torch._C._autograd.SavedTensor, "data")


def is_packed(node: Node) -> bool:
    """Whether saved-tensor hooks decide what a Function finds in `ctx.saved_tensors`, so that asking runs code."""
    try:
        return any(getattr(one, "unpack_hook", None) is not None for one in node._raw_saved_tensors)
    except (AttributeError, RuntimeError):
        return False


def tell_unpacked(kind: type, tell: Callable[[Any, tuple[Any, ...]], None]) -> Callable[[], None]:
    """`tell(node, tensors)` whenever a node of this type reads its saved tensors, until the result is called."""
    before = kind.__dict__.get("saved_tensors")

    def saved_tensors(node: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = torch._C._FunctionBase.saved_tensors.__get__(node)
        tell(node, found)
        return found

    kind.saved_tensors = property(saved_tensors)  # type: ignore[attr-defined]

    def undo() -> None:
        if before is None:
            del kind.saved_tensors  # type: ignore[attr-defined]
        else:
            kind.saved_tensors = before  # type: ignore[attr-defined]

    return undo


def takes_as_it_is(node: Node, index: int, gradient: torch.Tensor) -> bool:
    """Whether the engine hands this gradient on to the node's input without reducing or casting it first."""
    try:
        wanted = node._input_metadata[index]
        return tuple(wanted.shape) == tuple(gradient.shape) and wanted.dtype == gradient.dtype
    except (AttributeError, IndexError, RuntimeError):
        return True


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether code of the user's runs when the leaf's gradient has been accumulated."""
    return bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


def version_of(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor._version)
    except RuntimeError:  # made in inference mode
        return None

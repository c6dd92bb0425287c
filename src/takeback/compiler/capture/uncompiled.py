"""torch.compile and a compiled step: what torch.compile has compiled runs inside of a step as it was written, so that
its ops can be recorded and planned like all others; and a step itself cannot be compiled by it. What TorchScript has
compiled can be recorded as it was written, too.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from takeback.compiler.capture.ran import Seen
from takeback.errors import CaptureError

_FRAMES = "torch._dynamo.eval_frame"  #: holds the stance that torch.compiler.set_stance sets; checked on 2.13
_DYNAMO = "torch._dynamo"  #: only asked for if somebody has imported it: that takes seconds
NOTE = (
    "a part of the step is compiled by torch.compile. Inside of this step it runs as it was written, with the bits of "
    "eager, for the plan needs its single ops; elsewhere it stays compiled"
)


_lock = threading.Lock()
_inside: set[int] = set()  #: threads that run a user's step just now
_before: list[Any] = []  #: the stance that is put back when the last of them has left


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Around the user's code, wherever takeback calls it. torch.compile's stance is one for all threads, so the first
    one that comes sets it, and the last one that goes puts it back."""
    frames: Any = sys.modules.get(_FRAMES)
    if frames is None or threading.get_ident() in _inside:
        yield
        return
    with _lock:
        _inside.add(threading.get_ident())
        if not _before:
            _before.append(frames._stance)
            frames._stance = frames.DynamoStance("force_eager")
    try:
        yield
    finally:
        compiled_()


def compiled_() -> None:
    """This thread is outside again; called once more where Ctrl-C may have struck before that could be."""
    with _lock:
        _inside.discard(threading.get_ident())
        if not _inside and _before:
            sys.modules[_FRAMES]._stance = _before.pop()  # type: ignore[attr-defined]
        if _as_written.pop(threading.get_ident(), None) is not None and not _as_written:
            torch.jit.ScriptFunction.__call__ = _called[0]


# -- TorchScript -------------------------------------------------------------------------------------------------------

_as_written: dict[int, set[str]] = {}  #: by thread: the functions of TorchScript that ran there as they were written
_called: list[Any] = [torch.jit.ScriptFunction.__call__]  #: how they are called elsewhere: others may replace it, too
SCRIPTED = (
    "a part of the step is compiled by TorchScript, and makes tensors where nobody sees it. It was recorded as it was "
    "written, which was compared with what TorchScript gives"
)


@contextlib.contextmanager
def unscripted() -> Iterator[set[str]]:
    """Around the user's code: what torch.jit.script has compiled runs as it was written, on this thread. Gives the
    names of what has run so. `compiled_` ends it, too."""
    with _lock:
        if not _as_written:
            _called[0] = torch.jit.ScriptFunction.__call__
            torch.jit.ScriptFunction.__call__ = _call_as_written
        found = _as_written[threading.get_ident()] = set()
    try:
        yield found
    finally:
        compiled_()


def _call_as_written(function: Any, *args: Any, **kwargs: Any) -> Any:
    written = getattr(function, "_torchdynamo_inline", None)
    ran = _as_written.get(threading.get_ident())
    if ran is None or written is None or not _is_scripted(function, written):
        return _called[0](function, *args, **kwargs)
    ran.add(function.name)
    return written(*args, **kwargs)


def _is_scripted(function: Any, written: object) -> bool:
    """Whether torch.jit.script has made it of this source: what was traced may do something else than that. Checked on
    2.13."""
    known = torch.jit._state._try_get_jit_cached_function(written)
    return known is not None and known.qualified_name == function.qualified_name


def notes_of(seen: Seen) -> Iterator[str]:
    """Says so, if something that is compiled ran."""
    for code, _ in seen.codes.values():
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):  # checked on 2.13
            yield NOTE
            return


def check_not_compiled() -> None:
    """Raises inside of a function that torch.compile compiles: it would trace takeback itself."""
    if torch.compiler.is_compiling() or _is_being_compiled():
        raise CaptureError(
            "a compiled step is called inside of a function that torch.compile compiles, or is itself given to it. "
            "There is nothing left to compile: call the step as it is, and leave torch.compile to other code."
        )


def _is_being_compiled() -> bool:
    # Where dynamo has given up on a frame it runs it as it is, and goes on to compile what that calls. Checked on 2.13.
    return _DYNAMO in sys.modules and callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())

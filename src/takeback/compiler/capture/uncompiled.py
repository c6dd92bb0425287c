"""torch.compile and a compiled step: what torch.compile has compiled runs inside of a step as it was written, so that
its ops can be recorded and planned like all others; and a step itself cannot be compiled by it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from takeback.compiler.capture.ran import Seen
from takeback.errors import CaptureError

_DYNAMO = "torch._dynamo"  #: only asked for if somebody has imported it: that takes seconds
NOTE = (
    "a part of the step is compiled by torch.compile. Inside of this step it runs as it was written, with the bits of "
    "eager, for the plan needs its single ops; elsewhere it stays compiled"
)


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Around the user's code, wherever takeback calls it."""
    if _DYNAMO not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


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

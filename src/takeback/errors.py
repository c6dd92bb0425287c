"""Every exception takeback raises on purpose: each says what, where, why, and what to do.

`TakebackError` is the root. Nothing here is raised for a bug of ours: those are plain `assert`s.
"""

from __future__ import annotations


class TakebackError(Exception):
    """The root of all errors that takeback raises on purpose."""


class CaptureError(TakebackError):
    """The user's step cannot be recorded as one program that may be replayed."""


class PlanError(TakebackError):
    """A plan places two values that live at the same time onto the same bytes, or misses one."""


class BorrowError(TakebackError):
    """A plan reads bytes after another value was written onto them."""


class OverwriteError(TakebackError, RuntimeError):
    """A backward node overwrote bytes that somebody else can still read (`takeback.guard`).

    node      the name of the node that wrote
    tensor    what it overwrote, as that node knows it
    line      the forward line that made the node, with its module; None if it is not known
    readers   who can read the bytes later
    """

    def __init__(self, text: str, *, node: str, tensor: str, line: str | None, readers: tuple[str, ...]) -> None:
        super().__init__(text)
        self.node = node
        self.tensor = tensor
        self.line = line
        self.readers = readers


class VerifyError(TakebackError):
    """A compiled step did not give the same bits as eager (`verify_every`)."""


class StalePlanError(VerifyError):
    """A plan that was right once gives other results than eager: something it does not watch has changed."""


class GradBufferError(TakebackError, RuntimeError):
    """A gradient is not, or cannot be, where a `GradBuffer` keeps it."""


class ConvertError(TakebackError):
    """A model that `takeback.nn.convert` changed does not compute what it did before."""


class WorkspaceError(TakebackError, RuntimeError):
    """Scratch of a `Workspace` is asked for outside of a step, or used after the step it was taken in."""


class OptionError(TakebackError, ValueError):
    """A setting has a value that takeback does not know, or cannot honour yet."""


class ReduceError(TakebackError):
    """The ranks of a group could not average their gradients, or have different models."""


class NoRoomError(TakebackError, RuntimeError, MemoryError):
    """There is not enough memory for the step: says what is short by how much, and which `memory=` would fit. The step
    was not made; model, optimizer and random state are as before it.

    needed_bytes   what the step would take above what is there; None if that is not known
    room_bytes     what is left; None if that is not known
    """

    def __init__(self, text: str, *, needed_bytes: int | None = None, room_bytes: int | None = None) -> None:
        super().__init__(text)
        self.needed_bytes = needed_bytes
        self.room_bytes = room_bytes


class MemoryTargetError(OptionError):
    """The step's peak cannot be as low as `memory=` asks."""

    def __init__(self, target_bytes: int, lowest_bytes: int, text: str = "") -> None:
        super().__init__(
            text
            or f"the planned values cannot peak at {target_bytes:,} bytes or less; the lowest peak is {lowest_bytes:,}"
        )
        self.target_bytes = target_bytes
        self.lowest_bytes = lowest_bytes


def printable(text: str, *, keep: str = "") -> str:
    """For a terminal: names of modules, parameters and files may hold anything, and are to move no cursor. `keep`: what
    else may stand, such as the end of a line."""
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)

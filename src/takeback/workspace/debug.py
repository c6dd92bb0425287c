"""What debug mode adds: a use of scratch after its step is found, in one of four ways.

by the tensor     what `take` returns, and every view of it, knows its step; an op on it after that step raises
by the version    the step's end counts as a write, so autograd refuses to use what it saved of it
by poison         the step's end fills the bytes with 0xFF, which is NaN in every floating-point dtype: what numpy or a
                  raw pointer still reads is no plausible number
by broken poison  bytes that were written after that are noticed when the buffer is handed out again
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from takeback.errors import WorkspaceError
from takeback.workspace.internals import call_plainly, subclassed

if TYPE_CHECKING:
    from takeback.workspace.pool import Pool, PoolBuffer
    from takeback.workspace.scratch import Step

POISON = 0xFF
_HERE = str(Path(__file__).parent)


class Lease:
    """One take: where, in which step, and a tensor that shares the version counter of what was handed out."""

    __slots__ = ("name", "ours", "poisoned", "site", "step", "witness")

    def __init__(self, step: Step, name: str | None, witness: torch.Tensor, ours: int) -> None:
        self.step, self.name, self.site = step, name, _site()
        self.witness: torch.Tensor | None = witness  #: until the step is over
        self.ours = ours  #: the buffer's number of holders with the witness alone; 0 without it
        self.poisoned = False

    def check(self, func: Callable[..., object]) -> None:
        """Raises if the step is over."""
        if self.step.over:
            what = f"scratch {self.name!r}" if self.name is not None else "scratch"
            raise WorkspaceError(
                f"{what}, taken at {self.site} in step {self.step.number} of the workspace, is used by "
                f"{getattr(func, '__name__', func)} after that step is over: its bytes belong to whoever takes them "
                f"next. Take it in the step that uses it, or clone what must outlive the step."
            )


def inspect(buffer: PoolBuffer, pool: Pool) -> None:
    """Raises if the bytes were written since they were poisoned. The buffer is free again then."""
    before, buffer.lease = buffer.lease, None
    if before is not None and before.poisoned and not _intact(buffer, pool):
        pool.file(buffer)
        raise WorkspaceError(
            f"a buffer of {buffer.capacity_bytes:,} bytes, taken at {before.site} in step {before.step.number} of the "
            f"workspace, was written after that step was over: through numpy or a pointer, for no tensor was left. "
            f"Copy what must outlive a step."
        )


def lend(buffer: PoolBuffer, pool: Pool, tensor: torch.Tensor, step: Step, name: str | None) -> torch.Tensor:
    """What `take` returns in debug mode, full of poison."""
    _poison_(buffer, pool)
    buffer.lease = Lease(step, name, tensor, buffer.holders())
    scratch = subclassed(tensor, ScratchTensor)
    scratch.lease = buffer.lease
    return scratch


def retire_(buffer: PoolBuffer, pool: Pool) -> None:
    """If the buffer's step is over: poison, and a new version for whatever graph saved it."""
    lease = buffer.lease
    if lease is None or not lease.step.over or lease.poisoned:
        return
    assert lease.witness is not None
    if not lease.witness.is_inference():
        torch.autograd.graph.increment_version(lease.witness)
    lease.witness, lease.ours = None, 0
    _poison_(buffer, pool)
    lease.poisoned = True


def _poison_(buffer: PoolBuffer, pool: Pool) -> None:
    with _on_stream(pool):
        _bytes(buffer, pool).fill_(POISON)


def _intact(buffer: PoolBuffer, pool: Pool) -> bool:
    with _on_stream(pool):
        return bool((_bytes(buffer, pool) == POISON).all())


def _bytes(buffer: PoolBuffer, pool: Pool) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=pool.device)
    return empty.set_(buffer.storage, 0, (buffer.capacity_bytes,))


def _on_stream(pool: Pool) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.stream(pool.stream) if pool.stream is not None else contextlib.nullcontext()


def _site() -> str:
    """The line that called `take`."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class ScratchTensor(torch.Tensor):
    """A tensor of a workspace in debug mode. Before each op it asks whether its step is over; its views do the same."""

    lease: Lease | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = [scratch for scratch in _scratch_in((args, kwargs)) if scratch.lease is not None]
        for scratch in given:
            assert scratch.lease is not None
            scratch.lease.check(func)
        result = call_plainly(func, args, kwargs)
        return call_plainly(_marked, (result, given))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> torch.Tensor:
        plain = self.detach().as_subclass(torch.Tensor)  # asks about the step
        return plain.requires_grad_(self.requires_grad)


def _scratch_in(value: object) -> Iterator[ScratchTensor]:
    if isinstance(value, ScratchTensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _scratch_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _scratch_in(each)


def _marked(result: object, given: Sequence[ScratchTensor]) -> object:
    """The result of an op, with views of scratch as scratch."""
    if type(result) in (list, tuple):
        assert isinstance(result, list | tuple)
        return type(result)(_marked(each, given) for each in result)
    if not isinstance(result, torch.Tensor) or isinstance(result, ScratchTensor) or result.layout is not torch.strided:
        return result
    address = result.untyped_storage().data_ptr()
    source = next((s for s in given if s.untyped_storage().data_ptr() == address), None)
    if source is None:
        return result
    view = result.as_subclass(ScratchTensor)
    view.lease = source.lease
    return view

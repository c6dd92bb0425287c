"""What must still hold for a plan to be used: Python values as they were read, tensors where they were, no hooks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from takeback.compiler.capture.assumptions import Assumptions, TensorPlace, Varying
from takeback.compiler.capture.hooks import GLOBAL_HOOKS
from takeback.compiler.capture.subject import Subject


class Watch:
    """Compared before every replay; costs a few list walks."""

    def __init__(self, subject: Subject, assumptions: Assumptions, leaves: Sequence[torch.Tensor]) -> None:
        self.parameters = subject.parameters
        self._assumptions = assumptions
        watched = {id(t): t for t in (*subject.parameters, *subject.model.buffers(), *assumptions.tensors)}
        strided = [t for t in watched.values() if t.layout is torch.strided]
        self._tensors = [(t, t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in strided]
        # A batch tensor that the model or loss_fn holds as well: which of the two was read is not known, so the plan is
        # for this very tensor.
        reachable = {id(t) for t in assumptions.tensors}
        self._pinned = [(i, t) for i, t in enumerate(leaves) if id(t) in reachable]
        self._hooked = [t for t in watched.values() if t.requires_grad and t.is_leaf]

    def varying(self, leaves: Sequence[torch.Tensor]) -> Varying:
        """The numbers and values of the batch that are others now, if nothing else has changed."""
        return self._assumptions.varying() if self._tensors_change(leaves) is None else Varying()

    def change(self, leaves: Sequence[torch.Tensor]) -> str | None:
        """None while the plan may be used; else what is different."""
        return self._tensors_change(leaves) or self._assumptions.change()

    def displaced_bytes(self, but: Collection[int] = ()) -> int:
        """What the plan holds of tensors that the user has replaced: nobody else may hold them. `but` these, by id."""
        moved = [t for t, address, *_ in self._tensors if t.data_ptr() != address]  # the plan has the bytes it had
        replaced = [at.then for at in self._assumptions.displaced()]
        return sum(t.nbytes for t in {id(t): t for t in (*moved, *replaced)}.values() if id(t) not in but)

    def displaced(self) -> list[TensorPlace]:
        """Places where another tensor is now, which could be written."""
        return [at for at in self._assumptions.displaced() if type(at.container) in (dict, list) or at.is_attribute]

    def _tensors_change(self, leaves: Sequence[torch.Tensor]) -> str | None:
        for kind in GLOBAL_HOOKS:
            if getattr(torch.nn.modules.module, kind):
                return "there is a global module hook"
        for i, tensor in self._pinned:
            if leaves[i] is not tensor:
                return f"batch tensor {i}, which the model or loss_fn holds too, is another one"
        for tensor, address, shape, stride, dtype, needs_grad in self._tensors:
            if tensor.data_ptr() != address or tensor.shape != shape or tensor.stride() != stride:
                return "a tensor was given other memory"
            if tensor.dtype is not dtype:
                return "a tensor was given another dtype"
            if tensor.requires_grad is not needs_grad:
                return "requires_grad of a tensor changed"
        for tensor in self._hooked:
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                return "a parameter got a hook"
        return None

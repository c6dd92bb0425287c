"""What a run of the step leaves that is neither a result nor state of the model, and how it is set aside: gradients of
parameters that are not the model's and of batch tensors, and derived attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from takeback.compiler.capture.batch import tensors_of
from takeback.compiler.capture.batch_grads import as_before
from takeback.compiler.capture.derived import Derived, put_holders_back_, settle_


@dataclass(frozen=True)
class Aside:
    """`foreign`: parameters of other modules that take part in the loss. What is in their `.grad` is not the step's."""

    foreign: tuple[torch.nn.Parameter, ...] = ()
    derived: tuple[Derived, ...] = ()

    @contextlib.contextmanager
    def around(self, batch: object = ()) -> Iterator[None]:
        """Afterwards the foreign parameters have the gradients that they had, the batch's tensors are as they were, and
        each derived attribute has its holder: with the value that the run has left there, if it has not raised."""
        before = [(p, p.grad) for p in self.foreign]
        for p in self.foreign:
            p.grad = None
        try:
            with as_before(tensors_of(batch)):
                yield
            settle_(self.derived)
        finally:
            for p, grad in before:
                p.grad = grad
            put_holders_back_(self.derived)

"""What only torch's internals can say: what becomes of a gradient, who else holds a tensor's bytes, what is running.

`Tensor.backward` adds a leaf's gradient into `.grad`, `torch.autograd.grad` hands it to the caller, and either may not
want it at all. torch has no public way to ask, and a gradient written straight into `.grad` would be silently wrong in
the last two. Nor does it say how many tensors share a storage or whether the graph will be read again, without which
nothing that was saved may be overwritten. Under torch.func or forward mode a Function of ours has no rule. Checked on
2.11 and 2.13.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.graph import Node


class GradientUse(enum.Enum):
    """What happens to the gradient of a leaf in the running backward."""

    ACCUMULATED = enum.auto()  #: it is added into `.grad`
    RETURNED = enum.auto()  #: torch.autograd.grad gives it to its caller
    UNUSED = enum.auto()  #: nobody asked for it


def use_of(accumulate: Node) -> GradientUse:
    """The use of what reaches an AccumulateGrad node."""
    try:
        runs = torch._C._will_engine_execute_node(accumulate)
    except RuntimeError:  # it refuses leaves under torch.autograd.grad
        return GradientUse.RETURNED
    return GradientUse.ACCUMULATED if runs else GradientUse.UNUSED


def transformed() -> bool:
    """Whether torch.func's grad, vmap, jvp, ... or forward-mode differentiation is running."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def cuda_stream(device: int) -> int:
    """The current stream, in a fraction of the time that `torch.cuda.current_stream` takes: it is asked for every
    gradient."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def holders(storage: torch.UntypedStorage) -> int:
    """How many C++ owners the storage has: each tensor over it, alias or view, and the Python object itself."""
    return int(torch._C._storage_Use_Count(storage_key(storage)))


def storage_key(storage: torch.UntypedStorage) -> int:
    """What two Python objects over one storage have in common, for as long as it lives."""
    return int(storage._cdata)


class WeakStorage:
    """A storage that is not kept alive. While this object lives, no other storage has its `key`. torch's own, which
    Ctrl-C can leave half-made, then raises in its finalizer; this one is whole from the start."""

    key = 0  #: as storage_key() gives it; nothing is held yet

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.key = int(storage._weak_ref())

    def expired(self) -> bool:
        """Whether nobody else holds the storage any more."""
        return bool(torch.UntypedStorage._expired(self.key))

    def lock(self) -> torch.UntypedStorage | None:
        """The storage, if somebody still holds it."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.key)
        return found

    def address(self) -> int | None:
        """Where its bytes begin; None where there are none."""
        storage = self.lock()
        return (storage.data_ptr() or None) if storage is not None else None

    def is_lent(self) -> bool:
        """Whether others than torch know the bytes: a numpy array was made of them, or they of it."""
        storage = self.lock()
        return storage is not None and not storage.resizable()

    def __del__(self, free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:
        if self.key:  # `free` is at hand: at Python's end torch may be gone
            free(self.key)


def version_of(tensor: torch.Tensor) -> int:
    """How often torch has counted a write to the tensor's bytes."""
    return int(tensor._version)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd takes the tensor for a view of another one."""
    return bool(tensor._is_view())


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether somebody wants to see the tensor's gradient before it is accumulated."""
    return bool(tensor._backward_hooks)


def graph_is_kept() -> bool:
    """In a backward: whether it was called with retain_graph or create_graph, so that another may follow."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def backward_id() -> int:
    """A number of the running backward."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """In a backward: `callback` is called when all of it has run. If it raises, the callback is dropped, uncalled."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def saved_through_hooks() -> bool:
    """Whether what is saved for backward now goes through saved-tensor hooks: checkpointing, offloading, a user's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def being_recorded() -> bool:
    """Whether a dispatch mode sees every operator: make_fx, fake tensors, a profiler in Python, takeback's capture."""
    return int(torch._C._len_torch_dispatch_stack()) > 0


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has a shape and no values."""
    return isinstance(tensor, FakeTensor)

"""Which buffer a tensor looks into: every tensor that an op of the step touches becomes a `Region`.

In: real tensors (or fakes). Out: regions, the role and size of each buffer, and when eager freed it. Guaranteed: the
table keeps no tensor alive that was made in the step; it knows them by weak references to their storages.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from takeback.compiler.capture.modes import WithoutDispatchModes
from takeback.compiler.program import Buffer, BufferId, Region, Role
from takeback.engine import WeakStorage
from takeback.errors import CaptureError


class _Deathwatch(weakref.ref[torch.UntypedStorage]):
    """Calls back when a storage is freed. Python's object for a storage lives as long as the storage does."""

    ident: BufferId


@functools.cache
def _tells_of_deaths() -> bool:
    """Whether this torch's storages do so; checked on 2.13. If not, each is asked before each op."""
    fired: list[object] = []
    tensor = torch.empty(1, device="cpu")
    watch, weak = weakref.ref(tensor.untyped_storage(), fired.append), WeakStorage(tensor.untyped_storage())
    early = bool(fired) or watch() is None
    del tensor
    return not early and len(fired) == 1 and weak.expired()


class TouchesBoth(CaptureError):
    """The step comes across the bytes of a tensor that another one stands in for."""


class BufferTable:
    """The buffers of one step. `known` are the user's tensors, `reachable` those that the model or loss_fn can be seen
    to hold, `at()` says in an error where the step is. `addresses`: they are noted; a fake tensor has none. `replaced`:
    storages of tensors that others stand in for."""

    def __init__(
        self,
        known: Mapping[torch.Tensor, tuple[Role, str]],
        batch: Sequence[torch.Tensor],
        *,
        reachable: Sequence[torch.Tensor] = (),
        addresses: bool = False,
        replaced: Collection[int] = (),
        at: Callable[[], str] = str,
    ) -> None:
        self.buffers: dict[BufferId, Buffer] = {}
        self.externals: dict[BufferId, torch.Tensor] = {}
        self.leaves: dict[BufferId, int] = {}
        self.death: dict[BufferId, int] = {}  #: the op before which eager had freed it
        self.address: dict[BufferId, int] = {}  #: where eager had put what was made in the step
        self.device = next((t.device for t, (role, _) in known.items() if role is Role.PARAMETER), torch.device("cpu"))
        self.constants = 0  #: how many have been made of the step's own data
        self._at = at
        self._addresses = addresses
        self._replaced = replaced
        self._batch = tuple(batch)
        self._reachable = {t.untyped_storage()._cdata for t in reachable if t.layout is torch.strided}
        self._by_storage: dict[int, BufferId] = {}
        self._weak: dict[BufferId, WeakStorage] = {}
        self._alive: dict[BufferId, WeakStorage] = {}
        self._died: list[_Deathwatch] = []  #: since the last op; a list, for any thread may free a storage
        self._watches: dict[BufferId, _Deathwatch] = {}
        self._watched = _tells_of_deaths()
        self._leaf_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._leaf_storages: set[int] = set()
        # What the forward and backward hardly ever read comes last: the optimizer has no state when the first step is
        # recorded, and the buffers of one recording are to have the numbers of the next.
        self._unmet: dict[int, tuple[torch.Tensor, str]] = {}
        for tensor, (role, name) in known.items():
            if role is Role.STATE:
                self._unmet[tensor.untyped_storage()._cdata] = (tensor, name)
            else:
                self._borrow(tensor, role, name)
        for i, leaf in enumerate(batch):
            self._borrow_leaf(leaf, i)

    # -- making buffers --------------------------------------------------------------------------------------------

    def _borrow(self, tensor: torch.Tensor, role: Role, name: str) -> BufferId:
        storage = tensor.untyped_storage()._cdata
        if storage in self._replaced:
            raise TouchesBoth("the step comes across bytes that another tensor stands in for.")
        ident = self._by_storage.get(storage)
        if ident is None:
            ident = self._new(tensor, role, name)
            self.externals[ident] = tensor.detach()
        return ident

    def _borrow_leaf(self, leaf: torch.Tensor, position: int) -> None:
        ident = BufferId(len(self.buffers))
        begin, end = Region(ident, leaf.dtype, tuple(leaf.shape), leaf.stride(), 0).span_bytes
        self.buffers[ident] = Buffer(ident, end - begin, Role.BATCH, f"batch{position}", self._elsewhere(leaf))
        self.leaves[ident] = position
        self._leaf_of[leaf] = (ident, leaf.storage_offset())
        # A leaf is known by the tensor object and its views, not by its storage: x and y may be slices of one tensor.
        self._leaf_storages.add(leaf.untyped_storage()._cdata)

    def _met(self, key: int) -> tuple[torch.Tensor, Role, str]:
        tensor, name = self._unmet.pop(key)
        return tensor, Role.STATE, name

    def finish_(self) -> None:
        """The step is over: what it has not come across is there nevertheless."""
        for key in tuple(self._unmet):
            self._borrow(*self._met(key))

    def constant(self, tensor: torch.Tensor) -> Region:
        """A copy of the tensor that belongs to the program."""
        ident = BufferId(len(self.buffers))
        self.constants += 1
        with WithoutDispatchModes():  # fakes of other tensors may be about, but this is data
            constant = tensor.detach().clone()
        size, where = constant.untyped_storage().nbytes(), self._elsewhere(constant)
        self.buffers[ident] = Buffer(ident, size, Role.CONSTANT, f"constant{ident}", where)
        self.externals[ident] = constant
        return Region(ident, constant.dtype, tuple(constant.shape), tuple(constant.stride()), 0)

    def made(self, tensor: torch.Tensor) -> BufferId:
        """A buffer for a tensor that the step has just made."""
        ident = self._new(tensor, Role.INTERNAL)
        self._alive[ident] = self._weak[ident]
        storage = tensor.untyped_storage()
        if self._watched:
            watch = self._watches[ident] = _Deathwatch(storage, self._died.append)
            watch.ident = ident
        if self._addresses:
            self.address[ident] = storage.data_ptr()
        return ident

    def _new(self, tensor: torch.Tensor, role: Role, name: str = "") -> BufferId:
        ident = BufferId(len(self.buffers))
        storage = tensor.untyped_storage()
        self.buffers[ident] = Buffer(ident, storage.nbytes(), role, name, self._elsewhere(tensor))
        self._weak[ident] = WeakStorage(storage)  # keeps the address from being used again
        self._by_storage[storage._cdata] = ident
        return ident

    def _elsewhere(self, tensor: torch.Tensor) -> str:
        return "" if tensor.device.type == self.device.type else str(tensor.device)

    # -- looking up ------------------------------------------------------------------------------------------------

    def region(self, tensor: torch.Tensor, storage: int | None = None) -> Region:
        """Where the tensor looks. One that nobody has shown before belongs to the user's closure. `storage` is that of
        the tensor, if it is known."""
        key = tensor.untyped_storage()._cdata if storage is None else storage
        leaf = self._leaf_of.get(tensor) if key in self._leaf_storages else None
        if leaf is not None:
            ident, base = leaf
            offset = tensor.storage_offset() - base
        else:
            found = self._by_storage.get(key)
            if found is None and key in self._unmet:
                found = self._borrow(*self._met(key))
            if found is None and key in self._leaf_storages and key not in self._reachable:
                raise CaptureError(
                    f"a view of the batch reached an op{self._at()} by a way that takeback cannot follow, so the next "
                    f"batch would not be read there. Make the view with ordinary tensor methods inside loss_fn."
                )
            if found is None:
                found = self._borrow(tensor, Role.CLOSURE, f"closure{len(self.externals)}")
            ident, offset = found, tensor.storage_offset()
        return Region(ident, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)

    def of(self, tensor: torch.Tensor) -> Buffer:
        return self.buffers[self.region(tensor).buffer]

    def knows(self, tensor: torch.Tensor) -> bool:
        """False if the storage is a new one, if need be at the address of one that has died since (its weak reference
        has expired)."""
        key = tensor.untyped_storage()._cdata
        ident = self._by_storage.get(key)
        if ident is None:
            return key in self._unmet
        weak = self._weak.get(ident)
        return weak is None or not weak.expired()

    def follow_leaf(self, view: torch.Tensor, source: torch.Tensor, storage: int | None = None) -> None:
        """A view of a batch tensor is that batch tensor's. `storage` is the one they share, if it is known."""
        if storage is not None and storage not in self._leaf_storages:
            return
        trail = self._leaf_of.get(source)
        if trail is not None:
            self._leaf_of[view] = trail

    def whole(self, buffer: BufferId) -> torch.Tensor:
        """The user's tensor that a borrowed buffer is."""
        return self.externals[buffer] if buffer in self.externals else self._batch[self.leaves[buffer]]

    def shares_memory(self, leaf: BufferId) -> bool:
        """Whether a batch tensor's memory is also another one's, or that of a tensor the model or loss_fn holds."""
        mine = self.whole(leaf).untyped_storage()._cdata
        sharing = [t for t in self._batch if t.untyped_storage()._cdata == mine]
        return len(sharing) > 1 or mine in self._reachable

    # -- what has died ---------------------------------------------------------------------------------------------

    def bury(self, position: int) -> None:
        """Notes which buffers eager has freed before the op at `position`."""
        if self._watched:
            while self._died:
                self._bury(self._died.pop(0).ident, position)
            return
        for ident in [ident for ident, weak in self._alive.items() if weak.expired()]:
            self._bury(ident, position)

    def _bury(self, ident: BufferId, position: int) -> None:
        self.death[ident] = position
        del self._alive[ident]
        self._watches.pop(ident, None)

    def still_alive(self) -> Iterator[BufferId]:
        """Of what the step has made, what somebody holds just now."""
        yield from (ident for ident, weak in self._alive.items() if not weak.expired())

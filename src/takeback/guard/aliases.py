"""What else lies on the same bytes: a storage object, a numpy array, a tensor with a storage of its own (DLPack).

In: regions that changed. Out: the objects through which somebody may read them. Numpy's arrays are unknown to the
garbage collector, so they are looked for in what it knows; but only where torch has lent the memory or borrowed it,
since a storage cannot be resized from then on.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from takeback.engine import storage_key
from takeback.guard import engine
from takeback.guard.holders import kinds_of, live, user_variables
from takeback.guard.region import StorageRegion, region_of_array

Seen = Callable[[torch.Tensor], StorageRegion | None]


def aliases(changed: Iterable[StorageRegion], seen: Seen) -> Iterator[tuple[Any, StorageRegion]]:
    """(object, the changed region it reads), for all that is not a tensor of the region's own storage."""
    places = [(region, address) for region in changed if (address := region.storage.address()) is not None]
    for storage in live(torch.UntypedStorage):
        for region, _ in places:
            if region.storage.key == storage_key(storage):
                yield storage, region
                break
    for tensor in live(torch.Tensor):
        yield from _of_tensor(tensor, places, seen)
    on_cpu = [(region, address) for region, address in places if region.device.type == "cpu"]
    if on_cpu:
        yield from _of_arrays(on_cpu, everywhere=any(region.storage.is_lent() for region, _ in on_cpu))


def _of_tensor(
    tensor: torch.Tensor, places: list[tuple[StorageRegion, int]], seen: Seen
) -> Iterator[tuple[Any, StorageRegion]]:
    mine = seen(tensor)
    address = engine.address_of(tensor) if mine is not None else None
    for region, start in places:
        if mine is None or address is None:
            return
        elsewhere = mine.device == region.device and mine.storage.key != region.storage.key
        if elsewhere and region.overlaps(mine.moved(region.storage, address - start)):
            yield tensor, region
            return


def _of_arrays(places: list[tuple[StorageRegion, int]], *, everywhere: bool) -> Iterator[tuple[Any, StorageRegion]]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    kinds = kinds_of(numpy.ndarray)
    wanted = kinds | {dict, tuple}
    roots = list(user_variables())
    if everywhere:
        roots += gc.get_referents(*gc.get_objects())
    found = {id(thing): thing for thing in roots if type(thing) in wanted}
    del roots
    for holder in found.values():
        for array in _within(holder, kinds):
            for region, start in places:
                mine = region_of_array(array, region.storage, start)
                if mine is not None and region.overlaps(mine):
                    yield holder, region
                    break


def _within(thing: Any, kinds: set[type], depth: int = 3) -> Iterator[Any]:
    """The array itself, or those of a dict or tuple that the garbage collector does not know, as it has nothing else in
    it. Who holds such a container is known for the outermost only."""
    if type(thing) in kinds:
        yield thing
    elif depth and type(thing) in (dict, tuple) and not gc.is_tracked(thing):
        for one in thing.values() if isinstance(thing, dict) else thing:
            yield from _within(one, kinds, depth - 1)

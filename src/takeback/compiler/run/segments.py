"""Asks CUDA's caching allocator for segments that grow, so that what it reserves is what a plan needs.

Blocks of many sizes come and go in a step. In segments of fixed size each leaves gaps that the others do not fit:
ResNet-50's plan of 4.8 GiB reserved 7.1. Segments that grow are one range of addresses, in which gaps join.

The setting is the allocator's, so it holds for the whole process; memory that was there before stays as it is. Who has
set `expandable_segments` in PYTORCH_ALLOC_CONF has decided himself. Private torch: checked on 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools

import torch

from takeback.options import allocator_settings

_SETTING = "expandable_segments"
_PROBE_BYTES = 4 << 20  #: more than comes from the pool of small blocks


@functools.cache
def let_segments_grow_(device: torch.device) -> str | None:
    """Once a process. Why they do not, in words, or None."""
    set_ = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    given = allocator_settings()
    if _SETTING in given:
        return None if f"{_SETTING}:true" in given.lower().replace(" ", "") else f"{_SETTING} is off in {given!r}"
    if set_ is None or torch.cuda.get_allocator_backend() != "native":
        return "the allocator has no such setting"
    before = f"{given}," if given else ""
    set_(f"{before}{_SETTING}:True")
    try:
        torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None  # that is another matter
    except RuntimeError as error:  # a driver without virtual memory: some virtual GPUs
        with contextlib.suppress(RuntimeError):
            set_(f"{before}{_SETTING}:False")
        return f"the driver refuses ({str(error).strip().partition(chr(10))[0]})"
    return None

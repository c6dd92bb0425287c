"""One arena for all plans of a step: it grows to the largest of them, and plans bind their tensors to it anew then."""

from __future__ import annotations

import torch

from takeback.compiler.run.allocator import Arena, Native


class SharedArena:
    """The bytes everything internal lives in. `generation` changes whenever they move."""

    def __init__(self, native: Native | None) -> None:
        self._native = native
        self.mapped: Arena | None = None
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.generation = 0

    @property
    def size_bytes(self) -> int:
        return int(self.tensor.numel())

    def reserve_(self, size_bytes: int) -> None:
        """Makes sure that there are this many bytes. What was in them is lost if they had to grow."""
        if size_bytes <= self.size_bytes:
            return
        self.mapped = None
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old bytes go before the new ones come
        if self._native is not None:
            self.mapped = self._native.arena(size_bytes)
            self.tensor = self.mapped.tensor
        else:
            raw = torch.empty(size_bytes + 64, dtype=torch.uint8, device="cpu")
            skip = -raw.data_ptr() % 64
            self.tensor = raw[skip : skip + size_bytes]
        self.generation += 1

    def release_(self) -> None:
        """Unmaps it until the next step."""
        self.mapped = None
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.generation += 1

    def give_back_(self) -> None:
        """Lets the system have the pages until the next step: between steps nothing in them is needed."""
        if self.mapped is not None:
            self.mapped.give_back_()

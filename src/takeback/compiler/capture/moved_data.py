"""Parameters to which a step gives other memory, by `p.data = ...`: they are named, and given back what they had.

In: modules by name, before the step. A replay knows a parameter by its memory, and runs no Python that would give it
another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch


class ParameterData:
    """Where the parameters of these modules lie now. `""` is the name of the model."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._then = [
            (f"{outer}.{name}" if outer else name, p, p.data)
            for outer, module in modules.items()
            for name, p in module.named_parameters()
            if type(p) is torch.nn.Parameter and p.layout is torch.strided
        ]

    def moved(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those that lie elsewhere now."""
        for name, p, then in self._then:
            if p.layout is not torch.strided or p.untyped_storage()._cdata != then.untyped_storage()._cdata:
                yield name, p

    def put_back_(self) -> None:
        """Gives these their memory back, with what is in it now."""
        moved = {id(p) for _, p in self.moved()}
        for _, p, then in self._then:
            if id(p) in moved:
                p.data = then

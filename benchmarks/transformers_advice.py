"""What helps where a model of transformers is refused as it comes: each piece of advice is tried, not only told.

In: the reason of a refusal. Out: the `Advice` for it, which benchmarks/transformers_models.py follows in a second
attempt, in another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Advice:
    """`part` of a refusal's reason, and what is done about it."""

    part: str
    text: str
    config: Mapping[str, Any] = field(default_factory=dict)  #: fields to set
    uncached: str = ""  #: a method of one of its modules, of which the cache is left out

    def change_modules_(self, model: Any) -> None:
        for kind in {type(module) for module in model.modules()} if self.uncached else ():
            if method := getattr(kind, self.uncached, None):
                setattr(kind, self.uncached, getattr(method, "__wrapped__", method))

    def change_(self, config: Any) -> None:
        for name, value in self.config.items():
            setattr(config, name, value)


NONE = Advice("", "")
ADVICE = (
    Advice(
        "the step draws from numpy.random",
        "`apply_spec_augment=False, layerdrop=0.0` in the config of speech models",
        config={"apply_spec_augment": False, "layerdrop": 0.0},
    ),
    # An lru_cache whose keys are tensors of the step, so that it never gives back what it holds.
    Advice(
        "in _prepare_multilevel_features: spatial_shapes = torch.tensor(",
        "before training, `D._get_coords = D._get_coords.__wrapped__`, with `D = type(model.detr_decoder)`",
        uncached="_get_coords",
    ),
)


def advice_for(reason: str) -> Advice | None:
    return next((advice for advice in ADVICE if advice.part in reason), None)

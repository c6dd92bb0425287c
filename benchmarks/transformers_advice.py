"""What helps where a model of transformers is refused as it comes: each piece of advice is tried, not only told.

In: the reason of a refusal. Out: the `Advice` for it, which benchmarks/transformers_models.py follows in a second
attempt, in another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Advice:
    """`part` of a refusal's reason, and what is done about it."""

    part: str
    text: str
    config: Mapping[str, Any] = field(default_factory=dict)  #: fields to set
    without: tuple[str, ...] = ()  #: entries of the batch to leave out
    runs_once: bool = False  #: the model, before the first step
    no_script: bool = False  #: nothing is compiled by TorchScript

    def begin_(self) -> None:
        """Before the model's module is imported."""
        if self.no_script:
            torch.jit._state.disable()  # what PYTORCH_JIT=0 does

    def change_(self, config: Any) -> None:
        for name, value in self.config.items():
            setattr(config, name, value)

    def without_some(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name not in self.without}


NONE = Advice("", "")
ADVICE = (
    Advice(
        "draws other random numbers the first time",
        "run the model once before the first step",
        runs_once=True,
    ),
    Advice("without torch's dispatcher", "`PYTORCH_JIT=0` in the environment", no_script=True),
    Advice(
        "index.Tensor gives a tensor whose shape depends on the data, so",
        "`apply_spec_augment=False, layerdrop=0.0` in the config of speech models",
        config={"apply_spec_augment": False, "layerdrop": 0.0},
    ),
    Advice(
        "[shift_attention_mask",
        "no `attention_mask` where nothing is padded",
        without=("attention_mask",),
    ),
)


def advice_for(reason: str) -> Advice | None:
    return next((advice for advice in ADVICE if advice.part in reason), None)

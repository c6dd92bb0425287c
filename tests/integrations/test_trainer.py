"""TakebackTrainer has the bits of transformers' Trainer: parameters, optimizer state, and everything that is logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainer_twins import Texts, assert_same, assert_trained, both, means, padded

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
slow = pytest.mark.slow

LENGTHS = {"data": Texts(spread=1), "given": lambda: {"data_collator": padded}, "takeback": {"max_plans": 9}}
CASES: dict[str, dict[str, Any]] = {
    # five batches an epoch: the last accumulation has fewer microbatches
    "divided by the trainer": {"make": means, "gradient_accumulation_steps": 3},
    "one microbatch, smoothed": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "label_smoothing_factor": 0.1},
    "bf16, items counted, lengths": {"bf16": True, "gradient_accumulation_steps": 2, **LENGTHS},
    "more lengths": {"gradient_accumulation_steps": 2, **LENGTHS, "data": Texts(spread=4)},
    "items counted": {"gradient_accumulation_steps": 2, "logging_steps": 2},
    "bf16, one microbatch": {"bf16": True},
    "no clipping": {"max_grad_norm": 0.0, "lr_scheduler_type": "constant"},
    "smoothed, accumulated": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "accumulated, at once": {"make": means, "gradient_accumulation_steps": 2, "takeback": {"keep_grads": False}},
    "one microbatch, in turn": {"takeback": {"keep_grads": True}},
    "early": {"max_grad_norm": 0.0, "takeback": {"update": "early"}},
    "verified": {"takeback": {"verify_every": 2, "memory": "min"}, "gradient_accumulation_steps": 2},
    "noise on embeddings": {"neftune_noise_alpha": 5.0},
    "checkpointing": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
    "an optimizer's own step": {"optim": "adafactor", "max_steps": 4},
}
QUICK = tuple(CASES)[:3]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else slow) for n in CASES])
def test_two_epochs_have_trainers_bits(name: str, tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, **CASES[name])
    if name == "early":  # no norm is known: Trainer logs one, and takes it for that alone
        for entry in theirs.state.log_history:
            entry.pop("grad_norm", None)
    assert_same(theirs, ours)
    assert_trained(ours)

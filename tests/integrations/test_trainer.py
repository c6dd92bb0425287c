"""TakebackTrainer has the bits of transformers' Trainer: parameters, optimizer state, and everything that is logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch import distributed as dist

import texts_in_a_row

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import trainer_twins
from trainer_twins import Texts, assert_same, assert_trained, both, ia3, llama, means, padded, trainer
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from takeback.integrations.transformers import TakebackTrainer

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
slow = pytest.mark.slow

LENGTHS = {"data": Texts(spread=1), "given": lambda: {"data_collator": padded}, "takeback": {"max_plans": 9}}
CASES: dict[str, dict[str, Any]] = {
    # five batches an epoch: the last accumulation has fewer microbatches
    "divided by the trainer": {"make": means, "gradient_accumulation_steps": 3},
    "bf16, items counted, lengths": {"bf16": True, "gradient_accumulation_steps": 2, **LENGTHS},
    "one microbatch, smoothed": {"lr_scheduler_type": "polynomial", "label_smoothing_factor": 0.1},
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
CASES |= {
    "bfloat16 throughout": {"make": lambda: llama().bfloat16(), "gradient_accumulation_steps": 2},
    "IA3": {"make": ia3, "gradient_accumulation_steps": 2},
}
QUICK = (*tuple(CASES)[:2], "bfloat16 throughout", "IA3")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else slow) for n in CASES])
def test_two_epochs_have_trainers_bits(name: str, tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, **CASES[name])
    if name == "early":  # no norm is known: Trainer logs one, and takes it for that alone
        for entry in theirs.state.log_history:
            entry.pop("grad_norm", None)
    assert_same(theirs, ours)
    assert_trained(ours)


class OfTwo(TrainingArguments):
    """Says that there are two processes where there is one."""

    @property
    def world_size(self) -> int:
        return 2


def test_with_a_group_the_update_is_made_at_once_and_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of one, whose mean changes nothing. tests/integrations/test_trainer_ranks.py starts two processes."""
    case = {"gradient_accumulation_steps": 2, "num_train_epochs": 1}
    theirs = trainer(Trainer, tmp_path / "0", **case)
    theirs.train()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        monkeypatch.setattr(trainer_twins, "TrainingArguments", OfTwo)
        ours: Any = trainer(TakebackTrainer, tmp_path / "1", **case)
        ours.train()
        assert ours.compiled_step.options.group is dist.group.WORLD
        assert ours.compiled_step.options.clip_norm == 0.5
        assert "averaged over the group" in ours.takeback_report().notes[0]
    finally:
        dist.destroy_process_group()
    assert_same(theirs, ours)
    assert_trained(ours)


class Lists(Texts):
    def __getitem__(self, i: int) -> Any:
        return {name: values.tolist() for name, values in super().__getitem__(i).items()}


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=slow)])
def test_texts_packed_into_one_row_have_trainers_bits(attention: str, tmp_path: Path) -> None:
    theirs, ours = both(
        tmp_path,
        make=lambda: llama(attn_implementation=attention),
        data=Lists(spread=3),
        given=lambda: {"data_collator": DataCollatorWithFlattening()},
        takeback={"max_plans": 20},
    )
    assert_same(theirs, ours)
    assert_trained(ours)


def by_varlen(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """What transformers hands to a flash attention: cumulative lengths as a tensor, the longest text as a number."""
    ends, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    assert isinstance(longest, int)
    rows = (each[0].transpose(0, 1) for each in (query, key, value))
    out = texts_in_a_row.varlen.varlen_attn(*rows, ends, ends, longest, longest, **texts_in_a_row.CAUSAL)
    return out[None], None


def test_texts_in_one_row_under_a_flash_attention_have_trainers_bits(tmp_path: Path) -> None:
    AttentionInterface.register("by_varlen", by_varlen)
    AttentionMaskInterface.register("by_varlen", lambda *args, **kwargs: None)
    with texts_in_a_row.kernels_for_the_cpu():
        theirs, ours = both(
            tmp_path,
            make=lambda: llama(attn_implementation="by_varlen", num_key_value_heads=4),
            data=Lists(spread=3),
            given=lambda: {"data_collator": DataCollatorWithFlattening(return_flash_attn_kwargs=True)},
            takeback={"max_plans": 20},
        )
        assert "torch_attn." in str(ours.takeback_report())
    assert_same(theirs, ours)
    assert_trained(ours)

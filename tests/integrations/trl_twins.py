"""A trainer of TRL's and the same behind TakebackMixin, from the same weights on the same data, without a download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from takeback.integrations.transformers import TakebackMixin

disable_progress_bars()
WORDS = ["[pad]", "[eos]", "[unk]", *(f"w{i}" for i in range(30))]
#: What is measured with a clock, and so never the same.
_CLOCKED = ("runtime", "per_second", "step_time", "flos", "sampling/")


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[unk]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[pad]", eos_token="[eos]", unk_token="[unk]", padding_side="left"
    )


def _text(seed: int, length: int) -> str:
    picked = torch.randint(3, len(WORDS), (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in picked.tolist())


def texts(count: int = 12, *, spread: int = 1) -> Dataset:
    """`spread`: of how many lengths."""
    return Dataset.from_dict({"text": [_text(i, 6 + i % spread) for i in range(count)]})


def pairs(count: int = 8) -> Dataset:
    columns = {"prompt": 3, "chosen": 4, "rejected": 5}
    return Dataset.from_dict(
        {name: [" " + _text(100 * k + i, n) for i in range(count)] for k, (name, n) in enumerate(columns.items())}
    )


def judged(count: int = 8) -> Dataset:
    ours = pairs(count)
    return Dataset.from_dict(
        {"prompt": ours["prompt"], "completion": ours["chosen"], "label": [i % 2 == 0 for i in range(count)]}
    )


def _config(**changes: Any) -> LlamaConfig:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "max_position_embeddings": 64}
    return LlamaConfig(**({"vocab_size": len(WORDS)} | small | ids | changes))


def llama(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(_config(**changes))


def scoring() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(_config(num_labels=1))


def lengths(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward."""
    return [float(len(set(text.split()))) for text in completions]


_ONLINE = {"num_generations": 2, "max_completion_length": 5, "per_device_train_batch_size": 2}
#: By name: the trainer, its config, a dataset, a model, further arguments of the trainer and of the config.
KINDS: dict[str, tuple[type, type, Callable[[], Dataset], Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, texts, llama, {}, {}),
    "dpo": (DPOTrainer, DPOConfig, pairs, llama, {"ref_model": llama}, {}),
    "reward": (RewardTrainer, RewardConfig, pairs, scoring, {}, {}),
    "kto": (KTOTrainer, KTOConfig, judged, llama, {"ref_model": llama}, {}),
    "grpo": (GRPOTrainer, GRPOConfig, pairs, llama, {"reward_funcs": lengths}, _ONLINE),
    "rloo": (RLOOTrainer, RLOOConfig, pairs, llama, {"reward_funcs": lengths}, _ONLINE | {"beta": 0.0}),
}


def compiled(name: str) -> type:
    return type("Compiled", (TakebackMixin, KINDS[name][0]), {})


def trainer(
    name: str,
    folder: Path,
    *,
    ours: bool,
    takeback: dict[str, Any] | None = None,
    given: dict[str, Any] | None = None,
    make: Callable[[], nn.Module] | None = None,
    data: Dataset | None = None,
    **changes: Any,
) -> Any:
    kind, config, dataset, model, further, settings = KINDS[name]
    usual = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
    }
    options = {"takeback": {"memory": "keep", **(takeback or {})}} if ours else {}
    return (compiled(name) if ours else kind)(
        model=(make or model)(),
        args=config(**(usual | settings | changes)),
        train_dataset=data or dataset(),
        processing_class=tokenizer(),
        **{key: value() if value is llama else value for key, value in (further | (given or {})).items()},
        **options,
    )


def both(name: str, folder: Path, **case: Any) -> tuple[Any, Any]:
    trained = []
    for ours in (False, True):
        torch.manual_seed(0)
        trained.append(trainer(name, folder / str(ours), ours=ours, **case))
        trained[-1].train()
    return trained[0], trained[1]


def history(of: Any) -> list[dict[str, str]]:
    return [
        {key: repr(value) for key, value in entry.items() if not any(part in key for part in _CLOCKED)}
        for entry in of.state.log_history
    ]


def assert_same(theirs: Any, ours: Any) -> None:
    """Every metric that was logged, and every parameter, bit by bit."""
    assert history(ours) == history(theirs)
    assert len(history(ours)) > 2
    mine, stock = ours.model.state_dict(), theirs.model.state_dict()
    assert mine.keys() == stock.keys()
    assert [name for name in stock if not torch.equal(mine[name], stock[name])] == []
    assert ours.compiled_step.counts.planned > 0

"""A stock Trainer and a TakebackTrainer from the same weights on the same data, and what both must have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from takeback.integrations.transformers import TakebackTrainer

VOCABULARY, LENGTH, TEXTS = 61, 12, 10
_LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss", "train_loss")


def llama(**config: Any) -> nn.Module:
    """Two layers of width 32, with dropout in the attention."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    rest = {"vocab_size": VOCABULARY, "attention_dropout": 0.1, "max_position_embeddings": 32, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**(small | rest | config)))


def means(**config: Any) -> nn.Module:
    """The same, whose loss is the mean of its microbatch: the Trainer divides by their number."""
    model = llama(**config)
    model.accepts_loss_kwargs = False
    return model


def lora() -> nn.Module:
    """Adapters of the attention, with dropout; the base is frozen."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(1)
    return peft.get_peft_model(llama(), config)


def ia3() -> nn.Module:
    """Factors of what keys, values and the MLP make."""
    peft = pytest.importorskip("peft")
    targets = ["k_proj", "v_proj", "down_proj"]
    config = peft.IA3Config(target_modules=targets, feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(1)
    return peft.get_peft_model(llama(), config)


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Items of random tokens, the same for the same index. `spread`: how much shorter some of them are."""

    def __init__(self, count: int = TEXTS, *, spread: int = 0) -> None:
        self.count, self.spread = count, spread

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        length = LENGTH - i % (self.spread + 1)
        ids = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone()}


def padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """To the longest of the batch."""
    ids = nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([item["labels"] for item in items], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    usual = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
    }
    return TrainingArguments(**(usual | changes))


def trainer(
    kind: type[Trainer],
    folder: Path,
    *,
    make: Callable[[], nn.Module] = llama,
    takeback: dict[str, Any] | None = None,
    data: Texts | None = None,
    given: Callable[[], dict[str, Any]] = dict,
    **changes: Any,
) -> Trainer:
    """Ready to train. `given`: further arguments, made anew for each trainer."""
    options = {"takeback": {"memory": "keep", **(takeback or {})}} if issubclass(kind, TakebackTrainer) else {}
    args = arguments(folder, **changes)
    return kind(model=make(), args=args, train_dataset=data or Texts(), **options, **given())


def both(folder: Path, **case: Any) -> tuple[Trainer, Any]:
    """Both trained, one after the other: a Trainer seeds torch when it is made."""
    trained = []
    for i, kind in enumerate(case.pop("kinds", (Trainer, TakebackTrainer))):
        trained.append(trainer(kind, folder / str(i), **case))
        trained[-1].train()
    return trained[0], trained[1]


def history(of: Trainer) -> list[dict[str, str]]:
    """What was logged, less what is measured; as texts, for NaN is not NaN."""
    return [{key: repr(value) for key, value in entry.items() if key in _LOGGED} for entry in of.state.log_history]


def state_of(of: Trainer) -> dict[str, Tensor]:
    """Parameters, buffers and the optimizer's state."""
    tables = of.optimizer.state_dict()["state"].items()
    states = {f"{i}.{key}": v for i, table in tables for key, v in table.items() if isinstance(v, Tensor)}
    return dict(of.model.state_dict()) | states


def assert_same(theirs: Trainer, ours: Trainer) -> None:
    """Bit by bit."""
    assert history(ours) == history(theirs)
    assert len(history(ours)) > 1
    a, b = state_of(theirs), state_of(ours)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert ours.state.global_step == theirs.state.global_step > 0


def assert_trained(ours: Any) -> None:
    """By plans, all of it."""
    assert ours.compiled_step.counts.planned > 0
    assert ours.compiled_step.counts.plain == 0

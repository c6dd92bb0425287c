"""TakebackTrainer on a model of speech as it comes, whose SpecAugment draws masks with numpy in each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC

from harness import assert_same
from takeback.integrations.transformers import TakebackTrainer

pytestmark = [pytest.mark.usefixtures("one_thread", "short_search"), pytest.mark.filterwarnings("ignore")]


class Sounds(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(i)
        labels = torch.randint(1, 30, (3,), generator=g)
        return {"input_values": torch.randn(800, generator=g), "labels": labels}


def trained(kind: type[Trainer], folder: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]], float, Trainer]:
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=37,
        conv_dim=(32, 32),
        conv_stride=(4, 4),
        conv_kernel=(8, 8),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.0,
        mask_time_prob=0.3,
        mask_time_length=4,
    )
    model = Wav2Vec2ForCTC(config)
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    trainer = kind(model=model, args=arguments, train_dataset=Sounds())
    trainer.train()
    return dict(model.named_parameters()), trainer.state.log_history, float(np.random.rand()), trainer


def test_speech_with_specaugment_has_trainers_bits(tmp_path: Path) -> None:
    ours, logs, stands, trainer = trained(TakebackTrainer, tmp_path / "ours")
    theirs, expected, stood, _ = trained(Trainer, tmp_path / "stock")
    assert_same(ours, theirs)
    for ours_log, eagers in zip(logs, expected, strict=True):
        assert {k: ours_log.get(k) for k in ("loss", "grad_norm")} == {k: eagers.get(k) for k in ("loss", "grad_norm")}
    assert isinstance(trainer, TakebackTrainer)
    assert trainer.compiled_step is not None
    assert trainer.compiled_step.counts.plain == 0
    assert stands == stood, "numpy's generator is not where Trainer leaves it"

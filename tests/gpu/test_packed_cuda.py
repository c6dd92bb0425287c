"""Attention over texts of many lengths in one row, by torch's kernels for these on a GPU: eager's bits, plan for plan.

Texts are short, so that eager's own backward, which adds up blocks in any order, repeats its bits."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_twins import DEVICE, Case, train_both
from torch import nn

import texts_in_a_row

sys.path.append(str(Path(__file__).parents[1] / "integrations"))  # the twins are shared with the tests for the CPU

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def bf16_reader() -> nn.Module:
    return texts_in_a_row.Reader().bfloat16()  # the kernels have half precision alone


@pytest.mark.parametrize(("longest", "plans"), [(None, 2), (texts_in_a_row.LONGEST, 1)])
@pytest.mark.parametrize("memory", ["keep", "min"])
@pytest.mark.parametrize("autocast", [False, True])
def test_varlen_attn_has_eagers_bits(longest: int | None, plans: int, memory: str, autocast: bool) -> None:
    def draw(g: torch.Generator) -> tuple[Any, ...]:
        return texts_in_a_row.row(int(torch.randint(100, (1,), generator=g)), longest=longest)

    case = Case(
        texts_in_a_row.Reader if autocast else bf16_reader,
        texts_in_a_row.loss_of,
        draw,
        settings={"memory": memory},
        around=functools.partial(torch.autocast, DEVICE, dtype=torch.bfloat16) if autocast else contextlib.nullcontext,
    )
    step = train_both(case, steps=8, plans=None)
    assert len(step._plans) == plans
    assert "torch_attn." in str(step.report())


def test_flash_attention_2_of_transformers_on_texts_in_one_row(tmp_path: Path) -> None:
    pytest.importorskip("flash_attn")
    pytest.importorskip("transformers")
    from trainer_twins import Texts, arguments, assert_same, assert_trained, llama
    from transformers import DataCollatorWithFlattening, Trainer

    from takeback.integrations.transformers import TakebackTrainer

    class Lists(Texts):
        def __getitem__(self, i: int) -> Any:
            return {name: values.tolist() for name, values in super().__getitem__(i).items()}

    trained: list[Any] = []
    for i, kind in enumerate((Trainer, TakebackTrainer)):
        options = {"takeback": {"memory": "keep", "mode": "exact", "max_plans": 20}} if kind is TakebackTrainer else {}
        model = llama(attn_implementation="flash_attention_2", attention_dropout=0.0, dtype=torch.bfloat16)
        args = arguments(tmp_path / str(i), use_cpu=False)
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        made = kind(model=model, args=args, train_dataset=Lists(spread=3), data_collator=collator, **options)
        made.train()
        trained.append(made)
    assert_same(*trained)
    assert_trained(trained[1])

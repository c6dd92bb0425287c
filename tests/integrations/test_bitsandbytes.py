"""bitsandbytes on the CPU: quantised weights under adapters have eager's bits; its optimizers make their own step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

import bitsandbytes as bnb
import peft
from trainer_twins import assert_same, assert_trained, both, llama
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import takeback as tb
from takeback.errors import CaptureError
from takeback.integrations.transformers import TakebackTrainer

pytestmark = [pytest.mark.usefixtures("one_thread", "short_search"), pytest.mark.filterwarnings("ignore")]
slow = pytest.mark.slow

FLOAT = {"bnb_4bit_compute_dtype": torch.float32}
NESTED = {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
#: By name: how the base model is quantised, and how it is trained.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "4 bits": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **FLOAT}, {}),
    "8 bits": ({"load_in_8bit": True}, {}),
    "4 bits, nested, bf16": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **NESTED}, {"bf16": True}),
    "4 bits, fp4, rebuilt": ({"load_in_4bit": True, **FLOAT}, {"takeback": {"memory": "min"}}),
    "4 bits, 8-bit AdamW": ({"load_in_4bit": True, **FLOAT}, {"optim": "adamw_8bit"}),
    "4 bits, at once": ({"load_in_4bit": True, **FLOAT}, {"gradient_accumulation_steps": 1}),
}


def quantised(folder: Path, how: dict[str, Any]) -> Callable[[], nn.Module]:
    llama(hidden_size=64, intermediate_size=64, num_hidden_layers=1).save_pretrained(folder)

    def make() -> nn.Module:
        config = BitsAndBytesConfig(**how)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
        prepared = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
        return peft.get_peft_model(prepared, lora)

    return make


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "4 bits" else slow) for n in CASES])
def test_qlora_has_trainers_bits(name: str, tmp_path: Path) -> None:
    how, case = CASES[name]
    usual = {"gradient_accumulation_steps": 2, "max_steps": 3}
    theirs, ours = both(tmp_path, make=quantised(tmp_path / "base", how), **(usual | case))
    assert_same(theirs, ours)
    assert_trained(ours)
    kinds = {type(p).__name__ for p in ours.model.parameters()}
    assert kinds & {"Params4bit", "Int8Params"}
    assert "that are frozen" in "".join(ours.takeback_report().notes)  # no gradients of the base


def test_trained_quantised_weights_are_refused(tmp_path: Path) -> None:
    model = llama()
    model.lm_head = bnb.nn.Linear8bitLt(32, 61, bias=False, has_fp16_weights=True)
    with pytest.raises(CaptureError, match=r"'lm_head.weight' is quantised \(Int8Params\) and trained.*BitsAndBytes"):
        TakebackTrainer(model=model)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize(
    "name", ["AdamW8bit", *(pytest.param(n, marks=slow) for n in ("SGD8bit", "Lion8bit", "AdamW"))]
)
def test_its_optimizers_make_their_own_step(name: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        momentum = {"momentum": 0.9} if "SGD" in name else {}
        return model, getattr(bnb.optim, name)(model.parameters(), lr=1e-2, min_8bit_size=16, **momentum)

    (eager, theirs), (model, ours) = make(), make()
    step = tb.compile_step(model, cross_entropy, ours, memory="keep")
    torch.manual_seed(1)
    for _ in range(4):
        x, y = torch.randn(8, 16), torch.randint(4, (8,))
        theirs.zero_grad()
        loss = cross_entropy(eager, x, y)
        loss.backward()
        theirs.step()
        assert torch.equal(step(x, y), loss)
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(v, ours.state[q][key]) for key, v in theirs.state[p].items() if isinstance(v, Tensor))
    assert f"{name}'s own step() is called" in step.report().notes[0]

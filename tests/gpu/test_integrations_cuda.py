"""The frameworks' loops on a GPU: in mode exact a compiled step leaves their bits, in mode fast their losses nearly.

Texts are short, so that eager's own kernels repeat; with CUBLAS_WORKSPACE_CONFIG=:4096:8 deterministic algorithms are
asked for besides. What is not installed is skipped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "integrations"))  # the twins are shared with the tests for the CPU

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(method="thread"),  # Lightning keeps the handler of a signal
]


@pytest.fixture(autouse=True)
def steady_kernels() -> Iterator[None]:
    cudnn, asked = torch.backends.cudnn.deterministic, bool(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(asked)
    yield
    torch.backends.cudnn.deterministic = cudnn
    torch.use_deterministic_algorithms(False)


def near(ours: list[float], theirs: list[float], rel: float) -> None:
    """Losses of two trainings from the same weights, which have parted by rounding alone."""
    assert len(ours) == len(theirs) > 2
    assert ours == pytest.approx(theirs, rel=rel)
    assert len(set(ours)) > 2


# -- transformers ------------------------------------------------------------------------------------------------------

#: By name: settings of both trainers, and how near losses must be in mode fast.
TRAINERS: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({}, 1e-3),
    "accumulated": ({"gradient_accumulation_steps": 2}, 1e-3),
    "bf16": ({"bf16": True}, 3e-2),
    "bf16, accumulated": ({"bf16": True, "gradient_accumulation_steps": 2}, 3e-2),
    "fp16": ({"fp16": True}, 3e-2),
    "fp16, accumulated": ({"fp16": True, "gradient_accumulation_steps": 2}, 3e-2),
}


def trained(folder: Path, mode: str, **case: Any) -> tuple[Any, Any]:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from trainer_twins import both, llama

    usual = {"make": lambda: llama(attention_dropout=0.0), "use_cpu": False, "max_steps": 8}
    theirs, ours = both(folder, takeback={"mode": mode}, **(usual | case))
    assert next(ours.model.parameters()).is_cuda
    assert ours.compiled_step.mode == mode
    assert ours.compiled_step.counts.planned > 0
    assert ours.compiled_step.counts.plain == 0
    return theirs, ours


def losses(of: Any) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", list(TRAINERS))
def test_trainer_in_mode_exact_has_trainers_bits(name: str, tmp_path: Path) -> None:
    theirs, ours = trained(tmp_path, "exact", **TRAINERS[name][0])
    from trainer_twins import assert_same

    assert_same(theirs, ours)


@pytest.mark.parametrize("name", list(TRAINERS))
def test_trainer_in_mode_fast_has_trainers_losses(name: str, tmp_path: Path) -> None:
    case, rel = TRAINERS[name]
    theirs, ours = trained(tmp_path, "fast", **case)
    near(losses(ours), losses(theirs), rel)
    assert ours.state.global_step == theirs.state.global_step


def adapted() -> nn.Module:
    import peft
    from trainer_twins import llama

    model = llama(attention_dropout=0.0)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_adapters_on_a_frozen_model(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    theirs, ours = trained(tmp_path, mode, make=adapted, bf16=True, gradient_accumulation_steps=2)
    from trainer_twins import assert_same

    assert "that are frozen" in "".join(ours.takeback_report().notes)
    if mode == "exact":
        assert_same(theirs, ours)
    else:
        near(losses(ours), losses(theirs), 3e-2)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_quantised_weights_under_adapters(mode: str, tmp_path: Path) -> None:
    for package in ("transformers", "accelerate", "peft", "bitsandbytes"):
        pytest.importorskip(package)
    from test_bitsandbytes import CASES, quantised
    from trainer_twins import assert_same

    make = quantised(tmp_path / "base", CASES["4 bits, nested, bf16"][0])
    theirs, ours = trained(tmp_path, mode, make=make, bf16=True, gradient_accumulation_steps=2)
    if mode == "exact":
        assert_same(theirs, ours)
    else:
        near(losses(ours), losses(theirs), 3e-2)


@pytest.mark.parametrize("name", ["sft", "dpo", "reward", "grpo"])
def test_trainers_of_trl_have_its_losses_and_metrics(name: str, tmp_path: Path) -> None:
    """TRL's own Triton kernels score the texts that are stock's; the compiled step computes that with torch's ops."""
    pytest.importorskip("trl")
    import trl_twins

    theirs, ours = trl_twins.both(name, tmp_path, use_cpu=False, bf16=True, takeback={"mode": "fast"})
    assert ours.compiled_step.counts.planned > 0
    if name == "grpo":  # what is generated is up to the last bit
        assert len(losses(ours)) == len(losses(theirs))
        assert ours.state.log_history[0].keys() == theirs.state.log_history[0].keys()
        return
    near(losses(ours), losses(theirs), 3e-2)
    for mine, stock in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert mine.keys() == stock.keys()
        assert mine.get("num_tokens") == stock.get("num_tokens")


# -- Lightning ---------------------------------------------------------------------------------------------------------

FITS: dict[str, dict[str, Any]] = {
    "float32": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 2},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"precision": "16-mixed", "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("name", list(FITS))
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_lightning(name: str, mode: str) -> None:
    pytest.importorskip("pytorch_lightning")
    import lightning_twins

    settings = {"accelerator": "gpu", "devices": 1, **FITS[name]}
    if mode == "exact":
        done = lightning_twins.fit_both(options={"mode": "exact"}, **settings)
        assert next(done.module.parameters()).is_cuda or done.takeback is not None
        return
    stock = lightning_twins.fit(**settings)
    ours = lightning_twins.fit(takeback=lightning_twins.Takeback(memory="keep", mode="fast"), **settings)
    assert ours.takeback is not None
    assert ours.takeback.step is not None
    assert ours.takeback.step._replays > 0
    mine, theirs = ([values["loss_step"] for _, values in f.lines if "loss_step" in values] for f in (ours, stock))
    near(mine, theirs, 5e-2 if "mixed" in name else 1e-3)


# -- Accelerate --------------------------------------------------------------------------------------------------------

LOOPS: dict[str, dict[str, Any]] = {
    "float32": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
}


@pytest.mark.parametrize("name", list(LOOPS))
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_accelerate(name: str, mode: str) -> None:
    pytest.importorskip("accelerate")
    import accelerate_twins

    accelerate_twins.forget()  # what a Trainer has said to Accelerate before
    settings = {"cpu": False, "options": {"mode": mode}, **LOOPS[name]}
    if mode == "exact":
        accelerate_twins.train_both(**settings)
        return
    stock, ours = (accelerate_twins.train(compiled, **settings) for compiled in (False, True))
    assert ours.step is not None
    assert ours.step.compiled._replays > 0

    def seen(table: dict[str, Tensor]) -> list[float]:
        return [float(value) for key, value in table.items() if key.endswith("loss")]

    near(seen(ours.seen), seen(stock.seen), 5e-2 if "16" in name else 1e-3)

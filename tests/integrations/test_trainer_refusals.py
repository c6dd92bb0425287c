"""What a TakebackTrainer cannot honour is refused before anything is trained, and the message names a way out."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainer_twins import Texts, arguments, llama, trainer
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback

from takeback.errors import CaptureError, OptionError
from takeback.integrations.transformers import TakebackMixin, TakebackTrainer
from takeback.integrations.transformers.refusals import check_accelerator
from takeback.integrations.transformers.trainer import CompiledTrainer

EARLY = {"update": "early"}


def made(folder: Path, model: nn.Module | None = None, **options: Any) -> TakebackTrainer:
    """`set_`: attributes of the arguments that no installed package would let them be made with."""
    later = options.pop("set_", {})
    takeback = options.pop("takeback", None)
    args = arguments(folder, **options)
    for name, value in later.items():
        setattr(args, name, value)
    return TakebackTrainer(model=model or llama(), args=args, train_dataset=Texts(), takeback=takeback)


@pytest.mark.parametrize(
    ("options", "names", "way_out"),
    [
        ({"set_": {"deepspeed": "zero.json"}}, "deepspeed=", "transformers.Trainer"),
        ({"set_": {"fsdp": ["full_shard"]}}, "fsdp=", "memory='min'"),
        ({"set_": {"parallelism_config": object()}}, "parallelism_config=", "transformers.Trainer"),
        ({"set_": {"torch_compile": True}}, "torch_compile=True", "Leave it out"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True", "Leave it out"),
        ({"set_": {"_n_gpu": 2}}, "2 GPUs in one process", "torchrun"),
        ({"optim": "lomo"}, "optim='lomo'", "'update': 'early'"),
        ({"optim": "galore_adamw_layerwise"}, "optim='galore_adamw_layerwise'", "'update': 'early'"),
        ({"debug": "underflow_overflow"}, "debug=", "leave it out"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
            "sync_each_batch",
            "Leave it out",
        ),
        ({"takeback": EARLY}, "max_grad_norm=0.5", "max_grad_norm=0"),
        (
            {"takeback": EARLY, "max_grad_norm": 0.0, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=2",
            "sum",
        ),
        ({"takeback": {"accumulate": 2}}, "'accumulate'", "gradient_accumulation_steps"),
        ({"takeback": {"clip_norm": 1.0}}, "'clip_norm'", "max_grad_norm"),
        ({"takeback": {"group": 1}}, "'group'", "torchrun"),
        ({"takeback": {"scaler": 1}}, "'scaler'", "fp16"),
        ({"takeback": {"memroy": "min"}}, "no option 'memroy'", "memory, update"),
        ({"takeback": {"memory": "small"}}, "memory must be", "'min'"),
    ],
)
def test_an_argument_is_refused_by_name(options: dict[str, Any], names: str, way_out: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=re.escape(names)) as refused:
        made(tmp_path, **options)
    assert way_out in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "dynamo", "precision", "message"),
    [
        ("FSDP", "NO", "no", "distributed type FSDP"),
        ("DEEPSPEED", "NO", "no", "distributed type DEEPSPEED"),
        ("NO", "INDUCTOR", "no", "dynamo_backend=INDUCTOR"),
        ("NO", "NO", "fp8", "mixed_precision='fp8'"),
    ],
)
def test_what_accelerate_launch_asks_for_is_refused(kind: str, dynamo: str, precision: str, message: str) -> None:
    plugin = types.SimpleNamespace(backend=types.SimpleNamespace(value=dynamo))
    accelerator = types.SimpleNamespace(
        distributed_type=types.SimpleNamespace(value=kind),
        state=types.SimpleNamespace(dynamo_plugin=plugin),
        mixed_precision=precision,
    )
    with pytest.raises(OptionError, match=re.escape(message)):
        check_accelerator(accelerator)


class Params4bit(nn.Parameter):
    """As bitsandbytes names the weights of QLoRA."""


class FSDPModule:
    """As torch names what fully_shard makes of a module."""


class ShardedLinear(FSDPModule, nn.Linear):
    pass


def quantised() -> nn.Module:
    model = llama()
    model.model.norm.weight = Params4bit(torch.ones(32))  # not frozen
    return model


def loaded_by_gptq() -> nn.Module:
    model = llama()
    model.quantization_method = "gptq"
    return model


def sharded() -> nn.Module:
    model = llama()
    model.lm_head = ShardedLinear(32, 61, bias=False)
    return model


def spread() -> nn.Module:
    model = llama()
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (quantised, "'model.norm.weight' is quantised (Params4bit) and trained"),
        (loaded_by_gptq, "the model is quantised (gptq)"),
        (sharded, "it holds a ShardedLinear"),
        (spread, "spread over 0, cpu"),
        (lambda: nn.DataParallel(llama()), "wrapped in DataParallel"),
    ],
)
def test_a_model_is_refused_by_what_it_is(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=re.escape(message)):
        made(tmp_path, make())


def test_a_method_that_would_not_be_called_is_refused() -> None:
    class Timed(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    with pytest.raises(CaptureError, match=r"Timed has a training_step\(\) of its own.*TakebackMixin, Timed\)"):
        type("Mine", (TakebackTrainer, Timed), {})
    mine = type("Mine", (TakebackMixin, Timed), {})
    assert mine.__mro__.index(Timed) < mine.__mro__.index(CompiledTrainer) < mine.__mro__.index(Trainer)
    assert issubclass(type("Both", (TakebackTrainer, Seq2SeqTrainer), {}), Seq2SeqTrainer)  # has none of them


def test_the_mixin_needs_a_trainer() -> None:
    class Alone(TakebackMixin):
        pass

    with pytest.raises(CaptureError, match="Alone is no Trainer"):
        Alone()


def test_there_is_no_step_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="no compiled step yet"):
        made(tmp_path).takeback_report()


@pytest.mark.usefixtures("one_thread", "short_search")
def test_a_callback_that_looks_at_gradients_and_early_updates_do_not_go_together(tmp_path: Path) -> None:
    class Looking(TrainerCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            pass

    case = {"max_grad_norm": 0.0, "max_steps": 1, "given": lambda: {"callbacks": [Looking()]}}
    with pytest.raises(OptionError, match=re.escape("Looking.on_optimizer_step")):
        trainer(TakebackTrainer, tmp_path, takeback=EARLY, **case).train()
    trainer(TakebackTrainer, tmp_path, takeback={**EARLY, "keep_grads": False}, **case).train()

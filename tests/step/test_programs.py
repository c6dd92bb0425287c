"""Training programs as people write them, on the libraries that they use or on look-alikes of these: a step compiled in
their place has eager's bits, and at least half of the steps are replays.

A program that fails only because of what takeback assumes of Python between steps is marked so, with the reason.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_twins import mlp, sgd
from torch import Tensor, nn
from train_twice import Training, assert_equal_trainings, batch, simple

import takeback as tb

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


# -- a trainer class -----------------------------------------------------------------------------------------------


class Trainer:
    """A loss of its own, the compiled step, and what it counts: the loss reads none of the latter."""

    def __init__(self, compiled: bool, *, counts: bool) -> None:
        self.model = mlp(dropout=0.1)
        self.optimizer = sgd(self.model)
        self.smoothing = 0.1
        self.counts = counts
        self.global_step, self.losses = 0, []
        self.step = tb.compile_step(self.model, self.loss_fn, self.optimizer, memory="keep") if compiled else None

    def loss_fn(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, label_smoothing=self.smoothing)

    def train_step(self, i: int) -> Tensor:
        if self.step is not None:
            loss = self.step(*batch(i))
        else:
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model, *batch(i))
            loss.backward()
            self.optimizer.step()
        if self.counts:
            self.global_step += 1
            self.losses.append(loss.item())
        return loss


def train(compiled: bool, *, counts: bool) -> Training:
    trainer = Trainer(compiled, counts=counts)
    return Training(
        [trainer.model], [trainer.optimizer], trainer.train_step, [trainer.step] if trainer.step is not None else []
    )


def test_trainer_that_holds_its_compiled_step_and_a_bound_loss() -> None:
    assert_equal_trainings(lambda compiled: train(compiled, counts=False))


def test_trainer_that_counts_steps_and_keeps_losses_beside_its_bound_loss() -> None:
    assert_equal_trainings(lambda compiled: train(compiled, counts=True))


# -- LoRA ----------------------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    """As PEFT's: the layer frozen, two small factors per adapter in ModuleDicts, chosen by a list of names."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, layer.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.1)})
        self.scaling = {"default": 2.0}
        self.active_adapters = ["default"]
        self.merged_adapters: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        for name in self.active_adapters:
            if name in self.lora_A:
                down = self.lora_A[name](self.lora_dropout[name](x))
                out = out + self.lora_B[name](down) * self.scaling[name]
        return out


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def test_lora_on_a_frozen_model() -> None:
    def make(compiled: bool) -> Training:
        model = mlp()
        model[0], model[3] = LoRA(model[0]), LoRA(model[3])
        trained = [p for p in model.parameters() if p.requires_grad]
        return simple(model, cross_entropy, torch.optim.AdamW(trained, lr=1e-2), compiled)

    assert_equal_trainings(make)


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config).train()


def tokens(i: int) -> tuple[Tensor]:
    return (torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(i)),)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_peft_lora_on_a_transformers_model(checkpointing: bool) -> None:
    peft = pytest.importorskip("peft")

    def language(model: Any, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    def make(compiled: bool) -> Training:
        settings = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(gpt2(), settings)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        trained = [p for p in model.parameters() if p.requires_grad]
        return simple(model, language, torch.optim.AdamW(trained, lr=1e-2), compiled, draw=tokens)

    assert_equal_trainings(make, steps=4)


# -- Lightning -----------------------------------------------------------------------------------------------------


class LightningLike(nn.Module):
    """As a LightningModule that no Trainer runs: training_step uses the module itself, and log() writes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(dropout=0.1)
        self._log_hyperparams, self._current_fx_name, self._trainer = False, None, None

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def log(self, name: str, value: Tensor) -> None:
        if self._trainer is not None:
            raise AssertionError

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def lightning_training(make_module: Any) -> None:
    def loss_fn(module: Any, x: Tensor, y: Tensor) -> Tensor:
        return module.training_step((x, y), 0)

    def make(compiled: bool) -> Training:
        module = make_module()
        return simple(module, loss_fn, module.configure_optimizers(), compiled)

    assert_equal_trainings(make)


def test_training_step_of_a_module_like_lightnings() -> None:
    lightning_training(LightningLike)


def test_training_step_of_a_lightning_module() -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(dropout=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    lightning_training(Lit)

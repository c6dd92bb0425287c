"""Fits the same Lightning module twice, stock and with `Takeback`, from the same bits, and compares what is left:
parameters, buffers, optimizer and scheduler state, progress counters, random state, all logs and hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from harness import assert_same
from takeback.compiler.capture.batch import tensors_of
from takeback.integrations.lightning import Takeback

QUIET = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
}


BEGINS_AT = 2.0**19  #: a scale


class Lit(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
        self.hooks: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.hooks.append(f"start {batch_idx} {self.trainer.global_step}")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hooks.append(f"end {batch_idx} {self.trainer.global_step}")


class History(Logger):  # type: ignore[misc]
    """A logger that keeps everything."""

    name, version = "history", 0

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


@dataclass
class Fit:
    """What a training left."""

    module: Any
    trainer: Any
    lines: list[tuple[int | None, dict[str, float]]]
    random: Tensor
    scaler: dict[str, Any] | None  #: its state at the end
    takeback: Takeback | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> dict[str, Tensor]:
        found = {n: t for n, t in self.module.state_dict().items() if isinstance(t, Tensor)}
        for i, t in enumerate(tensors_of(self.trainer.optimizers[0].state_dict())):
            found[f"optimizer {i}"] = t
        return found


def scaled() -> MixedPrecision:
    """fp16 with a scaler that begins too high. For precision="16-mixed" on a CPU Lightning takes bfloat16 and none."""
    scaler = torch.amp.GradScaler("cpu", init_scale=BEGINS_AT, growth_interval=3)
    return MixedPrecision("16-mixed", device="cpu", scaler=scaler)


SCALED = (scaled,)  #: plugins of a fit, made anew for each


def rows(count: int = 40) -> TensorDataset:
    g = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(count, 6, generator=g), torch.randint(4, (count,), generator=g))


def fit(
    make: Callable[[], Any] = Lit,
    *,
    takeback: Takeback | None = None,
    callbacks: Sequence[Callable[[], Any]] = (),
    plugins: Sequence[Callable[[], Any]] = (),
    ckpt_path: str | None = None,
    count: int = 40,
    **settings: Any,
) -> Fit:
    pl.seed_everything(0, verbose=False)
    module, history = make(), History()
    made = [c() for c in callbacks]
    trainer = pl.Trainer(
        **{**QUIET, **settings},
        logger=history,
        callbacks=[*made, *([takeback] if takeback is not None else [])],
        plugins=[plugin() for plugin in plugins],
    )
    loader = DataLoader(rows(count), batch_size=8, shuffle=True)
    trainer.fit(module, loader, DataLoader(rows(8), batch_size=8), ckpt_path=ckpt_path)
    random = torch.get_rng_state()
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return Fit(module, trainer, history.lines, random, None if scaler is None else scaler.state_dict(), takeback)


def assert_equal_fits(ours: Fit, stock: Fit) -> None:
    assert_same(ours.state, stock.state)
    assert ours.trainer.global_step == stock.trainer.global_step
    assert ours.trainer.current_epoch == stock.trainer.current_epoch
    assert progress(ours.trainer) == progress(stock.trainer)
    assert ours.lines == stock.lines
    assert ours.module.hooks == stock.module.hooks
    assert torch.equal(ours.random, stock.random)
    assert ours.scaler == stock.scaler
    assert_same(dict(ours.trainer.callback_metrics), dict(stock.trainer.callback_metrics))
    mine, theirs = (
        [copy.deepcopy(c.scheduler.state_dict()) for c in t.lr_scheduler_configs] for t in (ours.trainer, stock.trainer)
    )
    assert mine == theirs


def progress(trainer: Any) -> Any:
    """The counters that a checkpoint holds."""
    return trainer.fit_loop.state_dict()


def fit_both(make: Callable[[], Any] = Lit, *, options: dict[str, Any] | None = None, **settings: Any) -> Fit:
    """Gives the compiled one."""
    stock = fit(make, **settings)
    ours = fit(make, takeback=Takeback(**{"memory": "keep", **(options or {})}), **settings)
    assert_equal_fits(ours, stock)
    assert ours.takeback is not None
    assert ours.takeback.step is not None
    assert ours.takeback.step._replays > 0, "nothing was replayed"
    if settings.get("plugins") == SCALED:
        assert_some_were_skipped(ours)
    return ours


def assert_some_were_skipped(done: Fit) -> None:
    """Of the updates; Lightning counts those too."""
    assert done.scaler is not None
    assert done.scaler["scale"] < BEGINS_AT
    made = {int(state["step"]) for state in done.trainer.optimizers[0].state.values()}
    assert 0 < max(made) < done.trainer.global_step

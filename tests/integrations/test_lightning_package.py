"""The callback in a Trainer of `lightning.pytorch`, whose classes are not those of `pytorch_lightning`: same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning.pytorch")

import lightning as L

import takeback
from takeback.integrations.lightning import Takeback

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread", "short_search"),
    pytest.mark.timeout(method="thread"),
]
QUIET = {"accelerator": "cpu", "enable_checkpointing": False, "enable_progress_bar": False, "logger": False}


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fitted(takeback: Takeback | None) -> tuple[Classifier, Any]:
    L.seed_everything(0, verbose=False)
    module = Classifier()
    data = TensorDataset(torch.randn(24, 6), torch.randint(4, (24,)))
    trainer = L.Trainer(
        max_epochs=2,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        enable_model_summary=False,
        callbacks=takeback,  # not in a list: then the Trainer asks whether it is a Callback
        **QUIET,
    )
    trainer.fit(module, DataLoader(data, batch_size=4))
    return module, trainer


def test_a_fit_is_stocks() -> None:
    callback = Takeback(memory="keep")
    assert isinstance(callback, L.Callback)
    (theirs, stock), (ours, trainer) = fitted(None), fitted(callback)
    assert callback.step is not None
    assert callback.step.counts.planned == 12
    assert trainer.global_step == stock.global_step == 6
    assert ours.losses == theirs.losses
    assert len(set(ours.losses)) > 6
    states = ours.state_dict()
    assert [name for name, t in theirs.state_dict().items() if not torch.equal(t, states[name])] == []


def test_the_callback_is_one_of_each_package_that_is_in_use() -> None:
    other = pytest.importorskip("pytorch_lightning")
    callback = Takeback()
    assert isinstance(callback, L.Callback)
    assert isinstance(callback, other.Callback)
    assert L.Trainer(callbacks=callback, **QUIET).callbacks[0] is callback
    assert other.Trainer(callbacks=callback, **QUIET).callbacks[0] is callback


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mine", "others"), [("lightning.pytorch", "pytorch_lightning"), ("pytorch_lightning", "lightning")]
)
@pytest.mark.parametrize("first", [True, False])
def test_one_package_is_imported_and_not_both(mine: str, others: str, first: bool) -> None:
    """Whether it is imported before the callback is, or after."""
    pytest.importorskip(mine)
    imports = [f"import {mine} as pl", "from takeback.integrations.lightning import Takeback"]
    lines = ["import sys", *(imports if first else reversed(imports))]
    lines += ["assert isinstance(Takeback(), pl.Callback)", f"assert {others!r} not in sys.modules"]
    path = str(Path(takeback.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path.insert(0, {path!r})\n" + "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]

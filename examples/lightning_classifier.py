"""Trains a small ResNet on drawn shapes with Lightning; the one line that takeback needs is the callback.

python examples/lightning_classifier.py
python examples/lightning_classifier.py --memory min      # a bigger batch in the same memory
"""

from __future__ import annotations

import argparse
from itertools import islice
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from takeback.integrations.lightning import Takeback
from takeback.zoo import ResNet, resnet, shape_batches
from takeback.zoo.data import SHAPES


class Classifier(pl.LightningModule):
    """An ordinary LightningModule: it knows nothing of takeback."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.net = ResNet(resnet.SMALL)
        self.train_accuracy, self.accuracy = MulticlassAccuracy(len(SHAPES)), MulticlassAccuracy(len(SHAPES))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=0.05)
        self.train_accuracy(logits, labels)
        self.log("loss", loss, prog_bar=True)
        self.log("train accuracy", self.train_accuracy, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def pictures(count: int, batch: int, seed: int) -> DataLoader[Any]:
    images, labels = next(islice(shape_batches(count, 32, seed=seed), 1))
    return DataLoader(TensorDataset(images, labels), batch_size=batch, shuffle=seed == 0, drop_last=seed == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--memory", default="auto", help="as for takeback.compile_step")
    parser.add_argument("--cpu", action="store_true", help="even if there is a GPU")
    arguments = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    module = Classifier(arguments.steps)
    train = pictures(min(arguments.steps, 100) * arguments.batch, arguments.batch, seed=0)
    takeback = Takeback(memory=arguments.memory)
    trainer = pl.Trainer(
        max_steps=arguments.steps,
        accelerator="cpu" if arguments.cpu else "auto",
        gradient_clip_val=1.0,
        callbacks=[takeback],  # this line
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train, pictures(8 * arguments.batch, arguments.batch, seed=1))

    print(f"accuracy after {trainer.global_step} steps: {trainer.callback_metrics['accuracy']:.3f}")
    report = takeback.report()
    ours, eager = (peak - report.resident_bytes for peak in (report.peak_bytes, report.eager_peak_bytes))
    print(f"peak above resident: {ours / 2**20:.1f} MiB, {ours / eager:.2f} of eager's")


if __name__ == "__main__":
    main()

"""Trains a small diffusion transformer on drawn shapes, compiled by takeback, and writes a grid of samples.

    python examples/train_dit.py                # flow matching
    python examples/train_dit.py --loss ddpm

Each row of the picture is one class: disc, ring, square, frame, diamond, cross, saltire, horizontal stripes, vertical
stripes, checkerboard.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
from rich.progress import track

import takeback as tb
from takeback.zoo import DiT, dit, shape_batches
from takeback.zoo.data import SHAPES
from takeback.zoo.pictures import grid, write_png

LOSSES = {"flow": (dit.flow_loss, dit.sample_flow), "ddpm": (dit.ddpm_loss, dit.sample_ddpm)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=LOSSES, default="flow")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--guidance", type=float, default=2.0, help="1 is none; more is more of the class")
    parser.add_argument("--sample-steps", type=int, default=50)
    parser.add_argument("--memory", default="auto", help="as for takeback.compile_step")
    parser.add_argument("--out", type=Path, default=Path("dit.png"))
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = DiT(dit.SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    loss_fn, sample = LOSSES[arguments.loss]
    step = tb.compile_step(model, loss_fn, optimizer, clip_norm=1.0, memory=arguments.memory)

    total = torch.zeros(())
    batches = islice(shape_batches(arguments.batch, model.config.size, seed=1), arguments.steps)
    for i, (images, labels) in enumerate(track(batches, "training", total=arguments.steps), start=1):
        total += step(images, labels)
        schedule.step()
        if i % max(arguments.steps // 10, 1) == 0:
            print(f"step {i:5}  mean loss {total.item() / max(arguments.steps // 10, 1):.4f}")
            total.zero_()

    report = step.report()
    ours, eager = (peak - report.resident_bytes for peak in (report.peak_bytes, report.eager_peak_bytes))
    print(f"peak above resident: {ours / 2**20:.1f} MiB, {ours / eager:.2f} of eager's")

    model.eval()
    labels = torch.arange(len(SHAPES)).repeat_interleave(8)
    generator = torch.Generator().manual_seed(2)
    images = sample(model, labels, steps=arguments.sample_steps, guidance=arguments.guidance, generator=generator)
    write_png(arguments.out, grid(images, columns=8), scale=4)
    print(f"{len(images)} samples written to {arguments.out}")


if __name__ == "__main__":
    main()

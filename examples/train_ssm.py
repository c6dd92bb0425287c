"""Trains a small Mamba-2 style model on Python's own source code, compiled by takeback, and lets it write.

python examples/train_ssm.py
python examples/train_ssm.py --steps 3000   # better text
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import islice

import torch
from rich.progress import track

import takeback as tb
from takeback.zoo import SSM, byte_batches, ssm


@torch.no_grad()
def write(model: torch.nn.Module, start: bytes, length: int, context: int) -> str:
    """Goes on from `start`, one byte after the other."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([list(start)])
    for _ in range(length):
        logits = model(tokens[:, -context:])[:, -1] / 0.7
        tokens = torch.cat((tokens, torch.multinomial(logits.softmax(1), 1, generator=generator)), dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--memory", default="auto", help="as for takeback.compile_step")
    parser.add_argument("--letters", type=int, default=300, help="how much it writes at the end")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = replace(ssm.SMALL, width=128, layers=3, context=128, chunk=32)
    model = SSM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    step = tb.compile_step(model, ssm.loss_fn, optimizer, clip_norm=1.0, memory=arguments.memory)

    total = torch.zeros(())
    batches = islice(byte_batches(arguments.batch, config.context, seed=1), arguments.steps)
    for i, (tokens, targets) in enumerate(track(batches, "training", total=arguments.steps), start=1):
        total += step(tokens, targets)
        schedule.step()
        if i % max(arguments.steps // 10, 1) == 0:
            print(f"step {i:5}  mean loss {total.item() / max(arguments.steps // 10, 1):.4f}")
            total.zero_()

    report = step.report()
    ours, eager = (peak - report.resident_bytes for peak in (report.peak_bytes, report.eager_peak_bytes))
    print(f"peak above resident: {ours / 2**20:.1f} MiB, {ours / eager:.2f} of eager's")
    print(write(model.eval(), b"def ", arguments.letters, config.context))


if __name__ == "__main__":
    main()

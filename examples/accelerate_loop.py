"""Trains a small GPT on Python's own source code in an Accelerate loop, with accumulation, clipping and a schedule.

python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py     # two processes: gradients are averaged as by DDP

Where a stock loop has accelerator.backward(loss), clip_grad_norm_(), optimizer.step() and optimizer.zero_grad(), this
one calls the compiled step.
"""

from __future__ import annotations

import argparse
from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from takeback.integrations.accelerate import compile_step
from takeback.zoo import GPT, byte_batches, gpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="updates")
    parser.add_argument("--batch", type=int, default=8, help="rows of a microbatch")
    parser.add_argument("--accumulate", type=int, default=4, help="microbatches of an update")
    parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--memory", default="auto", help="as for takeback.compile_step")
    parser.add_argument("--cpu", action="store_true", help="even if there is a GPU")
    arguments = parser.parse_args()

    accelerator = Accelerator(
        cpu=arguments.cpu,
        gradient_accumulation_steps=arguments.accumulate,
        mixed_precision=arguments.mixed_precision,
    )
    set_seed(0)
    model = GPT(gpt.SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps * accelerator.num_processes)
    rows = arguments.steps * arguments.accumulate * arguments.batch * accelerator.num_processes
    tokens, targets = next(islice(byte_batches(rows, gpt.SMALL.context, seed=1), 1))
    loader = DataLoader(TensorDataset(tokens, targets), batch_size=arguments.batch)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    step = compile_step(accelerator, model, gpt.loss_fn, optimizer, clip_norm=1.0, memory=arguments.memory)  # this line
    updates, total = 0, torch.zeros((), device=accelerator.device)
    for tokens, targets in loader:
        with accelerator.accumulate(model):
            total += step(tokens, targets)  # and this one
            schedule.step()
        if accelerator.sync_gradients:
            updates += 1
            if updates % max(arguments.steps // 10, 1) == 0:
                mean = total / (max(arguments.steps // 10, 1) * arguments.accumulate)
                accelerator.print(
                    f"update {updates:4}  mean loss {mean.item():.4f}  gradient norm {step.grad_norm:.3f}"
                )
                total.zero_()

    report = step.report()
    ours, eager = (peak - report.resident_bytes for peak in (report.peak_bytes, report.eager_peak_bytes))
    accelerator.print(f"peak above resident: {ours / 2**20:.1f} MiB, {ours / eager:.2f} of eager's")


if __name__ == "__main__":
    main()

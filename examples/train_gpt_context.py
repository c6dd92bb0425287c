"""Trains the same small GPT with and without the attention context, both compiled by takeback, side by side.

    python examples/train_gpt_context.py

Both start from the same weights and see the same text, Python's own source code. What is printed is each one's loss,
and how strong the context has become: it starts at 1 and is trained like any other parameter.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import islice

import torch
from rich.progress import track

import takeback as tb
from takeback.zoo import GPT, byte_batches, gpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--strength", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--memory", default="auto", help="as for takeback.compile_step")
    arguments = parser.parse_args()

    models, steps = {}, {}
    for name, strength in {"plain": 0.0, "context": arguments.strength}.items():
        torch.manual_seed(0)
        model = GPT(replace(gpt.SMALL, layers=4, context_strength=strength, context_rate=arguments.rate))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        models[name] = model
        steps[name] = tb.compile_step(model, gpt.loss_fn, optimizer, clip_norm=1.0, memory=arguments.memory)

    totals = {name: torch.zeros(()) for name in steps}
    batches = islice(byte_batches(arguments.batch, gpt.SMALL.context, seed=1), arguments.steps)
    for i, batch in enumerate(track(batches, "training", total=arguments.steps), start=1):
        for name, step in steps.items():
            totals[name] += step(*batch)
        if i % max(arguments.steps // 10, 1) == 0:
            losses = {name: total.item() / max(arguments.steps // 10, 1) for name, total in totals.items()}
            strength = models["context"].attention_context.strength
            shown = "" if strength is None else f"  strength {strength.item():.3f}"
            print(f"step {i:5}  mean loss: plain {losses['plain']:.4f}, context {losses['context']:.4f}{shown}")
            for total in totals.values():
                total.zero_()

    for name, step in steps.items():
        report = step.report()
        ours, eager = (peak - report.resident_bytes for peak in (report.peak_bytes, report.eager_peak_bytes))
        print(f"{name}: peak above resident {ours / 2**20:.1f} MiB, {ours / eager:.2f} of eager's")


if __name__ == "__main__":
    main()

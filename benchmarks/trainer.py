"""Trainer and TakebackTrainer in turns: CPU time of a training step, and the bytes that its tensors take.

    python benchmarks/trainer.py [--rounds 4] [--steps 6] [--memory auto keep]

A Llama (vocabulary 4096, width 256, 4 layers), 4 x 256 tokens a microbatch, AdamW fused, clipped, one or four
microbatches for each update. After the last round every parameter of TakebackTrainer's must have Trainer's bits. Peaks
are the report's, of the microbatch that was planned last, above parameters and optimizer state; gradients count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from common import machine
from takeback.integrations.transformers import TakebackTrainer

VOCABULARY, LENGTH, ROWS = 4096, 256, 4


class Clock(TrainerCallback):
    """CPU seconds of each step; the first of a training, which sets things up, is left out."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 1:
            self.seconds.append(time.process_time() - self.start)


def texts(count: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def made(kind: type[Trainer], folder: str, microbatches: int, steps: int, **options: Any) -> tuple[Trainer, Clock]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    args = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=microbatches,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    clock, data = Clock(), texts(ROWS * microbatches * steps)
    trainer = kind(model=LlamaForCausalLM(config), args=args, train_dataset=data, callbacks=[clock], **options)
    trainer.remove_callback(PrinterCallback)
    return trainer, clock


def measured(microbatches: int, rounds: int, steps: int, memories: list[str], folder: str) -> list[dict[str, Any]]:
    runs = {"Trainer": made(Trainer, folder, microbatches, steps)}
    for memory in memories:
        runs[memory] = made(TakebackTrainer, folder, microbatches, steps, takeback={"memory": memory})
    for i in range(rounds + 1):
        for name, (trainer, clock) in runs.items():
            torch.manual_seed(i)
            trainer.train()
            if i == 0:  # recorded, planned, rehearsed
                clock.seconds.clear()
            print(f"{microbatches} microbatches, round {i}: {name}", flush=True)
    reference, clock = runs.pop("Trainer")
    eager_s = statistics.median(clock.seconds)
    rows = []
    for name, (trainer, clock) in runs.items():
        for p, q in zip(reference.model.parameters(), trainer.model.parameters(), strict=True):
            assert torch.equal(p, q), f"the parameters of memory={name!r} are not Trainer's"
        report = trainer.takeback_report()
        waiting = report.resident.get("pending gradients", 0)
        ours = report.peak_bytes - report.resident_bytes + waiting
        eager = report.eager_peak_bytes - report.resident_bytes + waiting
        ratios = {"peak": round(ours / eager, 3), "time": round(statistics.median(clock.seconds) / eager_s, 3)}
        rows.append({"microbatches": microbatches, "memory": name, **ratios})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--memory", nargs="+", default=["auto", "keep"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for n in (1, 4) for row in measured(n, args.rounds, args.steps, args.memory, folder)]
    found = {"machine": machine(), "rows": rows}
    print(json.dumps(found, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

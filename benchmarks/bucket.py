"""takeback.bucket: what padding to few lengths costs and saves in plain eager training, on a small BERT.

    python benchmarks/bucket.py [--rounds 3] [--out FILE]

An epoch over texts of log-normal lengths, in batches that are padded
  to the longest item of each batch       drawn at random, as DataLoader and DataCollatorWithPadding do
  ... grouped by length                   as the Trainer of transformers does with group_by_length
  to the longest item of the data         always one length
  to n chosen lengths                     takeback.bucket

lengths    how many different lengths the batches of all epochs had
plans      how many different shapes: takeback needs a plan for each
padding    the part of all tokens that is padding
time       of an epoch in eager, in seconds of the CPU (one thread: others may use the machine meanwhile); ratios are
           medians over rounds of one system's time over another's in the same round, whose epochs run in turns of a
           few batches each
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler

import takeback as tb
from common import machine, ratio

ITEMS, BATCH, LONGEST, MEDIAN, SPREAD = 1000, 16, 256, 48, 0.65
TURNS = 9
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
DYNAMIC, GROUPED, ALWAYS = "longest of the batch", "longest of the batch, grouped by length", "longest of the data"
CONFIG = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": LONGEST,
}


@dataclass(frozen=True)
class Row:
    """One way to pad."""

    padded_to: str
    lengths: int
    plans: int
    padding_share: float
    median_s: float  #: an epoch
    to_dynamic: float
    to_always: float


def texts() -> list[dict[str, list[int]]]:
    """Log-normal lengths, cut off at the longest that the model takes, and one label for each text."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(MEDIAN), SPREAD, ITEMS).astype(int), 4, LONGEST)
    return [
        {"input_ids": draw.integers(5, 1000, n).tolist(), "attention_mask": [1] * int(n), "labels": int(n) % 2}
        for n in lengths
    ]


def loaders(data: list[dict[str, list[int]]]) -> dict[str, DataLoader]:
    lengths = tb.bucket.lengths_of(data)
    to_batch = tb.bucket.pad(to=sorted(set(lengths)))  # to the longest of each batch, whatever that is
    draw = torch.Generator().manual_seed(0)
    grouped = LengthGroupedSampler(BATCH, lengths=lengths, generator=draw)
    always = tb.bucket.pad(to=max(lengths))
    found = {
        DYNAMIC: DataLoader(data, BATCH, shuffle=True, collate_fn=to_batch, generator=draw),
        GROUPED: DataLoader(data, BATCH, sampler=grouped, collate_fn=to_batch),
        ALWAYS: DataLoader(data, BATCH, shuffle=True, collate_fn=always, generator=draw),
    }
    for count in COUNTS:
        found[f"{count} chosen length{'s' * (count > 1)}"] = tb.bucket.loader(data, BATCH, count=count)
    return found


def measured(systems: Mapping[str, DataLoader], rounds: int, console: Console) -> list[Row]:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shapes: dict[str, set[tuple[int, ...]]] = {name: set() for name in systems}
    tokens: dict[str, list[int]] = {name: [0, 0] for name in systems}  # all, and those that are texts
    times: dict[str, list[float]] = {name: [] for name in systems}

    def train(batches: Iterable[Mapping[str, torch.Tensor]]) -> float:
        start = time.process_time()
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        return time.process_time() - start

    train(list(systems[DYNAMIC])[:5])
    for r in track(range(rounds), "rounds", console=console, transient=True):
        epochs = {name: list(batches) for name, batches in systems.items()}  # the loaders themselves are not timed
        for name, batches in epochs.items():
            times[name].append(0.0)
            for batch in batches:
                shapes[name].add(tuple(batch["input_ids"].shape))
                tokens[name][0] += batch["input_ids"].numel()
                tokens[name][1] += int(batch["attention_mask"].sum())
        for turn in range(TURNS):
            for name in random.Random(TURNS * r + turn).sample(list(systems), len(systems)):
                gc.collect()
                times[name][-1] += train(epochs[name][turn::TURNS])
    return [
        Row(
            name,
            len({length for _, length in shapes[name]}),
            len(shapes[name]),
            round(1 - tokens[name][1] / tokens[name][0], 4),
            round(statistics.median(times[name]), 3),
            round(ratio(times, name, DYNAMIC), 3),
            round(ratio(times, name, ALWAYS), 3),
        )
        for name in systems
    ]


def show(console: Console, rows: list[Row]) -> None:
    table = Table("padded to", "lengths", "plans", "padding", "epoch, CPU s", "x longest of batch", "x longest of data")
    for r in rows:
        table.add_row(
            r.padded_to,
            str(r.lengths),
            str(r.plans),
            f"{100 * r.padding_share:.1f} %",
            f"{r.median_s:.2f}",
            f"{r.to_dynamic:.2f}",
            f"{r.to_always:.2f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="epochs of each")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "bucket-cpu.json")
    arguments = parser.parse_args()
    console = Console(width=130, file=sys.stdout)
    load = round(os.getloadavg()[0], 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = texts()
    rows = measured(loaders(data), arguments.rounds, console)
    about = machine() | {
        "transformers": transformers.__version__,
        "rounds": arguments.rounds,
        "texts": ITEMS,
        "tokens": sum(tb.bucket.lengths_of(data)),
        "batch": BATCH,
        "model": CONFIG,
        "load_before": load,
    }
    arguments.out.write_text(json.dumps({"machine": about, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    show(console, rows)
    console.print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()

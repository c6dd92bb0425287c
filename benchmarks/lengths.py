"""Training on batches of many lengths, beside eager: the first epochs of a tiny BERT whose batches are padded to 20
different lengths.

    python benchmarks/lengths.py [--steps 60] [--epochs 3] [--device cuda] [--mode fast] [--base] [--out results.json]

Both train the same model on the same batches, step by step in turn, and must have the same bits (in mode "fast": losses
within five percent). On the CPU times are of the whole process (CPU seconds) on one thread, so that other work on the
machine counts little. `plans` are there at the end of an epoch; `plain` steps ran in eager because their shape had not
earned a plan; `generated` of all `kernels` are not eager's. `--base` is BERT-base, 64 rows of 26 to 512 tokens under
bf16's autocast. With `--cache FOLDER` everything is kept there, and the second run is that of a second process.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

import takeback as tb
from common import machine, wait

VOCABULARY = 1000
LENGTHS = tuple(range(16, 96, 4))
SIZES: dict[str, dict[str, int]] = {
    "hidden 64, 8 rows": {"hidden": 64, "rows": 8},
    "hidden 128, 16 rows": {"hidden": 128, "rows": 16},
}
BASE = {"hidden": 768, "rows": 64}
BASE_LENGTHS = tuple(512 * i // 20 for i in range(1, 21))
#: max_plans, and whether the folder of plans knows the first one already, as in a second process.
WAYS: tuple[tuple[int | None, str], ...] = ((None, "empty"), (None, "filled"), (len(LENGTHS), "filled"))


def bert(hidden: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    if hidden == BASE["hidden"]:
        with torch.device(device):
            return BertForMaskedLM(BertConfig()).train()
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=4 * hidden,
        max_position_embeddings=128,
    )
    config._attn_implementation = "eager"  # on a GPU the backward of the fused one does not repeat its bits
    return BertForMaskedLM(config).to(device).train()


def loss_fn(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    out: Tensor = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    return out


def base_loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16):
        return loss_fn(model, ids, mask)


def lengths(steps: int, of: tuple[int, ...] = LENGTHS) -> list[int]:
    """Each length once, then at random."""
    draw = random.Random(0)
    first = draw.sample(of, len(of))
    return (first + draw.choices(of, k=max(0, steps - len(first))))[:steps]


def batch(rows: int, length: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed)).to(device)
    return ids, torch.ones_like(ids)


def now(device: str) -> float:
    wait(device)
    return time.process_time() if device == "cpu" else time.perf_counter()


def train(
    hidden: int, rows: int, max_plans: int | None, steps: int, epochs: int, device: str, mode: str = "exact"
) -> list[dict[str, Any]]:
    """One row for each epoch."""
    base = hidden == BASE["hidden"]
    loss_of, of = (base_loss, BASE_LENGTHS) if base else (loss_fn, LENGTHS)
    model = bert(hidden, device)
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(m.parameters(), 1e-4) for m in (model, twin))
    step = tb.compile_step(model, loss_of, optimizer, max_plans=max_plans, mode=mode)

    def eager(given: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_of(twin, *given)
        loss.backward()
        other.step()
        other.zero_grad()
        return loss.detach()

    found: list[dict[str, Any]] = []
    plain = 0
    for epoch in range(epochs):
        seconds = {"eager": 0.0, "takeback": 0.0}
        for number, length in enumerate(lengths(steps, of)):
            given = batch(rows, length, epoch * steps + number, device)
            losses: dict[str, Tensor] = {}
            for name, run in _in_turn(number, eager, lambda b: step(*b)):
                torch.manual_seed(number)
                start = now(device)
                losses[name] = run(given)
                seconds[name] += now(device) - start
            if mode == "exact":
                assert torch.equal(losses["eager"], losses["takeback"]), f"other bits in step {number} of epoch {epoch}"
            else:
                torch.testing.assert_close(losses["takeback"], losses["eager"], rtol=0.05, atol=0.05)
        counts = step.counts
        known = {k for plan in step._plans for k in plan.executor.kernels.in_program(plan.executor.program)}
        found.append(
            {
                "epoch": epoch + 1,
                "eager_s": round(seconds["eager"], 3),
                "takeback_s": round(seconds["takeback"], 3),
                "ratio": round(seconds["takeback"] / seconds["eager"], 3),
                "plans": len(step._plans),
                "plain": counts.plain - plain,
                "kernels": len(known),
                "generated": sum(k.note is None for k in known),
            }
        )
        plain = counts.plain
    longest = batch(rows, max(of), 0, device)
    step(*longest)
    report = step.report()
    transient = (report.peak_bytes - report.resident_bytes, report.eager_peak_bytes - report.resident_bytes)
    found[-1]["planned peak of the longest batch, of eager's"] = round(transient[0] / transient[1], 3)
    return found


def _in_turn(number: int, eager: Any, ours: Any) -> Sequence[tuple[str, Any]]:
    both = (("eager", eager), ("takeback", ours))
    return both if number % 2 else both[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="in an epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mode", choices=("exact", "fast"), default="exact")
    parser.add_argument("--base", action="store_true", help="BERT-base alone")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="the first so many")
    parser.add_argument("--cache", type=Path, help="a folder that stays")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    sizes = {"BERT-base, 64 rows": BASE} if args.base else dict(list(SIZES.items())[: args.sizes])
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.cache or Path(temporary)
        os.environ["TAKEBACK_CACHE"] = str(folder / "takeback")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        train(16, 2, None, 4, 1, args.device, args.mode)  # native code and the machine's rates are there from now on
        for name, size in sizes.items():
            for most, plans in WAYS:
                done = train(size["hidden"], size["rows"], most, args.steps, args.epochs, args.device, args.mode)
                for row in done:
                    rows.append({"model": name, "max_plans": most, "folder of plans": plans, **row})
                    print(json.dumps(rows[-1]), flush=True)
    result = {
        "machine": machine(args.device),
        "command": " ".join(("python", *sys.argv)),
        "mode": args.mode,
        "lengths": BASE_LENGTHS if args.base else LENGTHS,
        "rows": rows,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What `takeback.nn.convert` saves on causal language models of transformers, in plain eager training.

A step is forward with labels, backward, AdamW (fused), zero_grad. Systems: eager, takeback, takeback without its
chunked loss, takeback with torch's checkpointing on every block, and Liger-Kernel where it is installed, which needs a
GPU. Peaks are above what is alive between steps; `resident` is parameters and optimizer state. Times are the median
over rounds of a system's time over eager's in the same round.

    python benchmarks/convert.py                          # small models, CPU
    python benchmarks/convert.py --device cuda            # Llama 1.2 B, 4 x 2048, bf16, and GPT-2 124M, 16 x 1024
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import takeback as tb
from common import in_turn, machine, peak_bytes, ratio, wait

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """A model and its batch."""

    config: Any
    rows: int
    tokens: int
    dtype: torch.dtype
    autocast: torch.dtype | None = None


def cases(device: str) -> dict[str, Case]:
    if device == "cuda":
        llama = transformers.LlamaConfig(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            tie_word_embeddings=True,
        )
        return {
            "llama": Case(llama, 4, 2048, torch.bfloat16),
            "gpt2": Case(transformers.GPT2Config(), 16, 1024, torch.float32, torch.bfloat16),
        }
    small = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        "llama": Case(transformers.LlamaConfig(**small, **heads), 4, 256, torch.float32),
        "gemma2": Case(transformers.Gemma2Config(**small, **heads, head_dim=64), 4, 256, torch.float32),
        "gpt2": Case(transformers.GPT2Config(vocab_size=8192, n_embd=256, n_layer=4, n_head=4), 4, 256, torch.float32),
    }


def liger(model: Any) -> None:
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


def checkpointed(model: Any) -> None:
    tb.nn.convert(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


SYSTEMS: dict[str, Callable[[Any], object]] = {
    "eager": lambda model: None,
    "takeback": tb.nn.convert,
    "takeback, head=False": lambda model: tb.nn.convert(model, head=False),
    "takeback, checkpointed": checkpointed,
    "liger": liger,
}


@dataclass
class ConvertRow:
    """One system on one model."""

    case: str
    system: str
    loss: float
    step_ms: float
    ratio_to_eager: float
    peak_mib: float
    peak_to_eager: float
    resident_mib: float


def step_of(case: Case, prepare: Callable[[Any], object], device: str) -> tuple[Callable[[], float], int]:
    """One training step, and the bytes of parameters and optimizer state."""
    torch.manual_seed(0)
    config = type(case.config)(**case.config.to_dict())
    config.use_cache = False
    with torch.device(device):  # a billion random numbers take a CPU half a minute
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=case.dtype).train()
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(config.vocab_size, (case.rows, case.tokens), device=device)

    def step() -> float:
        with torch.autocast(device, case.autocast, enabled=case.autocast is not None):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    bytes_each = sum(each.numel() * each.element_size() for each in model.parameters())
    return step, 3 * bytes_each


def measure(name: str, case: Case, systems: list[str], device: str, rounds: int) -> list[ConvertRow]:
    steps: dict[str, Callable[[], float]] = {}
    peaks, residents, losses = {}, {}, {}
    for system in systems:
        gc.collect()
        step, residents[system] = step_of(case, SYSTEMS[system], device)
        losses[system] = float(step())
        for _ in range(2):
            step()
        wait(device)
        peaks[system] = peak_bytes(step, device)
        steps[system] = step
    times = in_turn(steps, rounds, 3, device)
    return [
        ConvertRow(
            *(name, system, losses[system]),
            step_ms=statistics.median(times[system]) * 1e3,
            ratio_to_eager=ratio(times, system, "eager"),
            peak_mib=peaks[system] / MIB,
            peak_to_eager=peaks[system] / peaks["eager"],
            resident_mib=residents[system] / MIB,
        )
        for system in systems
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--models", nargs="*", default=None)
    parser.add_argument("--systems", nargs="*", default=None, choices=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    device = arguments.device
    out = arguments.out or Path(__file__).parent / "results" / f"convert-{device}.json"
    have_liger = device == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    systems = arguments.systems or [name for name in SYSTEMS if name != "liger" or have_liger]
    rows: list[ConvertRow] = []
    for name, case in cases(device).items():
        if arguments.models is None or name in arguments.models:
            rows += measure(name, case, systems, device, arguments.rounds)
    about = machine(device) | {"transformers": transformers.__version__, "rounds": arguments.rounds}
    out.write_text(json.dumps({"machine": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    console = Console(width=120)
    table = Table("model", "system", "loss", "ms", "x eager", "peak MiB", "x peak", "resident MiB")
    for row in rows:
        numbers = (row.step_ms, row.ratio_to_eager, row.peak_mib, row.peak_to_eager, row.resident_mib)
        table.add_row(row.case, row.system, f"{row.loss:.6f}", *(f"{number:.3f}" for number in numbers))
    console.print(table)
    console.print(f"written to {out}")


if __name__ == "__main__":
    main()

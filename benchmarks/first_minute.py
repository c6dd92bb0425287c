"""What the first steps cost: three first steps of takeback beside three of eager, with an empty and a filled cache.

    python benchmarks/first_minute.py [--cases gpt2 bert ...] [--out benchmarks/results/first-minute-cpu.json]
    python benchmarks/first_minute.py --cases bert --profile     # where the time goes, with the cache as it is

Every measurement is a process of its own, with TAKEBACK_CACHE set to a folder that is empty for the first one of a case
and filled by it for the second. In it a model takes one step in eager to warm torch up, then three eager steps and
three first compiled ones of a copy are timed, by the wall clock and by the time that this process had a core: on a busy
machine the latter says more (of a compiler's process it says nothing). What the checks before a replay cost is measured
after 12 steps more, as a share of the median steady step.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import takeback as tb
from common import machine
from takeback import zoo
from takeback.compiler.capture.batch import take_apart
from takeback.compiler.capture.derived import settle_
from takeback.compiler.capture.modes import ambient
from takeback.compiler.run.eager import eager_step
from takeback.step import CompiledStep

STEADY = 12


@dataclass(frozen=True)
class FirstCase:
    """`loss_fn(model, *batch)` is the loss that the optimizer steps on."""

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: tuple[torch.Tensor, ...]
    memory: str = "auto"


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _of_zoo(name: str, size: str) -> FirstCase:
    case = zoo.case(name, size=size)
    kind, settings = type(case.optimizer), {k: v for k, v in case.optimizer.defaults.items() if k in ("lr", "momentum")}
    fused = bool(case.optimizer.defaults.get("fused"))
    more: dict[str, Any] = {"fused": True} if fused else {}
    return FirstCase(case.model, case.loss_fn, lambda m: kind(m.parameters(), **settings, **more), case.batch)


def _readme() -> FirstCase:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    batch = (torch.randn(128, 256), torch.randint(10, (128,)))
    return FirstCase(model, lambda m, x, y: F.cross_entropy(m(x), y), _adamw, batch)


def _tokens_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _gpt2() -> FirstCase:
    import transformers

    config = transformers.GPT2Config(n_layer=12, n_embd=384, n_head=6, vocab_size=8192, n_positions=256)
    return FirstCase(transformers.GPT2LMHeadModel(config), _tokens_loss, _adamw, (torch.randint(8192, (1, 256)),))


def _bert() -> FirstCase:
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=128, num_attention_heads=2, intermediate_size=512, vocab_size=1000
    )
    return FirstCase(transformers.BertForMaskedLM(config), _tokens_loss, _adamw, (torch.randint(1000, (8, 64)),))


class _Tagger(nn.Module):
    """A two-layer bidirectional GRU with a classifier for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 64)
        self.gru = nn.GRU(64, 64, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(128, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.gru(self.words(tokens))
        tags: torch.Tensor = self.head(hidden)
        return tags


def _gru(memory: str) -> FirstCase:
    batch = (torch.randint(1000, (8, 60)), torch.randint(20, (8, 60)))
    return FirstCase(_Tagger(), lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()), _adamw, batch, memory)


CASES: dict[str, Callable[[], FirstCase]] = {
    "gpt2": _gpt2,
    "readme": _readme,
    "bert": _bert,
    "gru": lambda: _gru("auto"),
    "gru keep": lambda: _gru("keep"),
    "zoo mlp": lambda: _of_zoo("mlp", "small"),
    "zoo gpt": lambda: _of_zoo("gpt", "small"),
    "zoo resnet": lambda: _of_zoo("resnet", "small"),
    "zoo gpt bench": lambda: _of_zoo("gpt", "bench"),
    "zoo resnet full": lambda: _of_zoo("resnet", "full"),
}


@dataclass(frozen=True)
class FirstRow:
    """One process. Seconds, and ratios to three eager steps of the same process."""

    case: str
    cache: str
    eager_step_s: float
    first_three_s: float
    first_step_s: float
    ratio_to_eager: float
    first_three_cpu_s: float
    cpu_ratio_to_eager: float
    steady_step_s: float
    checks_us: float
    checks_share: float
    ops: int
    equal_to_eager: bool


def _seconds(do: Callable[[], object], times: int) -> list[float]:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        do()
        found.append(time.perf_counter() - start)
    return found


def _checks(step: CompiledStep, batch: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """What a steady step asks before it replays."""
    plan = step._last
    assert plan is not None

    def check() -> None:
        step._optimizers.check_in_force()
        settle_(step._derived)
        leaves, _ = take_apart((batch, {}))
        ambient()
        assert plan.change(leaves) is None

    return check


def measure(name: str, cache: str, *, profile: bool = False) -> FirstRow:
    torch.manual_seed(0)
    case = CASES[name]()
    model = copy.deepcopy(case.model)
    eager_optimizer, optimizer = case.optimizer(case.model), case.optimizer(model)
    warm = copy.deepcopy(case.model)
    eager_step(warm, case.loss_fn, case.optimizer(warm), case.batch)
    torch.manual_seed(1)
    began = time.process_time()
    eager = _seconds(lambda: eager_step(case.model, case.loss_fn, eager_optimizer, case.batch), 3)
    eager_cpu = time.process_time() - began
    torch.manual_seed(1)
    profiler = cProfile.Profile()
    start, began = time.perf_counter(), time.process_time()
    if profile:
        profiler.enable()
    step = tb.compile_step(model, case.loss_fn, optimizer, memory=case.memory)
    ours = _seconds(lambda: step(*case.batch), 3)
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(70).sort_stats("tottime").print_stats(45)
    whole, whole_cpu = time.perf_counter() - start, time.process_time() - began
    expected = case.model.state_dict()
    equal = all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    steady = statistics.median(_seconds(lambda: step(*case.batch), STEADY))
    check = _checks(step, case.batch)
    checks = statistics.median(_seconds(check, 50))
    return FirstRow(
        name,
        cache,
        round(sum(eager) / 3, 4),
        round(whole, 3),
        round(ours[0], 3),
        round(whole / sum(eager), 2),
        round(whole_cpu, 3),
        round(whole_cpu / eager_cpu, 2),
        round(steady, 5),
        round(1e6 * checks, 1),
        round(checks / steady, 4),
        len(step._last.original.ops) if step._last is not None else 0,
        equal,
    )


def _in_process(name: str, cache: str, folder: str) -> dict[str, Any]:
    child = [sys.executable, __file__, "--cases", name, "--child", cache]
    environment = {**os.environ, "TAKEBACK_CACHE": folder}
    out = subprocess.run(child, env=environment, capture_output=True, text=True, check=False)
    if out.returncode:
        raise SystemExit(out.stderr)
    found: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", default="", help="one case in this process, as JSON")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "first-minute-cpu.json")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.child or arguments.profile:
        for name in arguments.cases:
            print(json.dumps(asdict(measure(name, arguments.child, profile=arguments.profile))))
        return
    rows = []
    for name in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "filled"):
                rows.append(_in_process(name, cache, folder))
                print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    arguments.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

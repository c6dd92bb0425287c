"""A model of transformers in a process that has less memory than eager needs: eager runs out of it, takeback trains.

    python benchmarks/fit_where_eager_does_not.py                      # GPT-2 124M, 32 × 1024, on a GPU, mode fast
    python benchmarks/fit_where_eager_does_not.py --mode exact
    python benchmarks/fit_where_eager_does_not.py --device cpu --tiny  # a small one; the limit is RLIMIT_AS

One process trains in eager without a limit: its peak, for everything, and its losses. One process for each of
memory="auto" (1.5 × as much needed as there is) and "min" (3 ×, or the next that the frontier reaches) is limited by
`torch.cuda.set_per_process_memory_fraction`; there eager is tried first and must run out of memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

import takeback as tb
from gpu_models import MODELS, GpuCase, build, placed, size_of
from takeback.compiler.run.fitting import lowered

MIB = 1 << 20
STEPS = 4
ROWS = {True: 768, False: 32}  #: by whether it is tiny
AT_LEAST = {"auto": (1.5,), "min": (3.0, 2.5, 2.0)}  #: times what is there: the first that goes


def case(device: str, *, tiny: bool) -> GpuCase:
    made = build("gpt2", device, tiny=tiny)
    size = size_of("gpt2", tiny=tiny)
    batch = size.draw(ROWS[tiny], torch.Generator(device).manual_seed(0))
    loss_fn = made.loss_fn if device == "cuda" else MODELS["gpt2"].loss_fn  # a CPU may have no products in bfloat16
    return GpuCase(made.model, loss_fn, made.optimizer, placed("gpt2", batch, device))


def eager_step(given: GpuCase) -> Tensor:
    given.optimizer.zero_grad()
    loss = given.loss_fn(given.model, *given.batch)
    loss.backward()
    given.optimizer.step()
    return loss.detach()


def virtual_bytes(name: str) -> int:
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def peak_bytes(device: str, base: int) -> int:
    """Since the start on a GPU; on the CPU above `base`."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else virtual_bytes("VmPeak") - base


def limit_(device: str, most_bytes: int, base: int) -> None:
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(most_bytes / total)
    else:
        resource.setrlimit(resource.RLIMIT_AS, (base + most_bytes, resource.RLIM_INFINITY))


def free_(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def child(args: argparse.Namespace) -> dict[str, Any]:
    """One process. Without `--most` eager, else takeback within that many bytes."""
    device = args.device
    torch.use_deterministic_algorithms(device == "cuda" and args.mode == "exact")
    # What a process takes whatever it trains: on the CPU that counts as memory, too.
    warm = case(device, tiny=True)
    step = tb.compile_step(warm.model, warm.loss_fn, warm.optimizer, mode=args.mode) if device == "cpu" else None
    for _ in range(2 if step is not None else 0):
        step(*(t[:4] for t in warm.batch))
    del warm, step
    free_(device)
    base = virtual_bytes("VmSize")
    if args.most is None:
        given = case(device, tiny=args.tiny)
        torch.manual_seed(1)
        losses = [float(eager_step(given)) for _ in range(STEPS)]
        return {"losses": losses, "peak": peak_bytes(device, base)}
    limit_(device, args.most, base)
    given = case(device, tiny=args.tiny)
    torch.manual_seed(1)
    out_of_memory = False
    try:
        eager_step(given)
        eager_step(given)  # the optimizer's state is there now
    except RuntimeError as error:
        out_of_memory = "memory" in str(error)
    del given
    free_(device)
    given = case(device, tiny=args.tiny)
    torch.manual_seed(1)
    began = time.perf_counter()
    step = tb.compile_step(given.model, given.loss_fn, given.optimizer, memory=args.memory, mode=args.mode)
    losses = []
    try:
        losses = [float(step(*given.batch)) for _ in range(STEPS)]
    except tb.NoRoomError as error:
        return {"refused": str(error), "eager_out_of_memory": out_of_memory}
    return {
        "losses": losses,
        "peak": peak_bytes(device, base),
        "reserved": torch.cuda.max_memory_reserved() if device == "cuda" else None,
        "eager_out_of_memory": out_of_memory,
        "seconds": time.perf_counter() - began,
        "notes": [note for note in step.report().notes if "no room" in note or lowered([note])],
    }


def run(args: argparse.Namespace, memory: str, most: int | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--device", args.device, "--mode", args.mode, "--memory", memory, "--child"]
    command += ["--tiny"] if args.tiny else []
    command += ["--most", str(most)] if most is not None else []
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--mode", default="fast", choices=("fast", "exact"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default=None, choices=tuple(AT_LEAST), help="one of the two limits alone")
    parser.add_argument("--memory", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--most", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return
    began = time.time()
    eager = run(args, "auto", None)
    print(f"eager, without a limit: peak {eager['peak'] / MIB:,.0f} MiB, losses {shown(eager['losses'])}")
    for memory, factors in AT_LEAST.items():
        if args.only not in (None, memory):
            continue
        for factor in factors:
            most = int(eager["peak"] / factor)
            found = run(args, memory, most)
            print(f"\n{most / MIB:,.0f} MiB there, eager needs {factor} x as much; memory={memory!r}, mode {args.mode}")
            print(f"  eager runs out of memory: {'yes' if found['eager_out_of_memory'] else 'NO'}")
            if "refused" in found:
                print(f"  takeback is refused: {found['refused']}")
                continue
            same = found["losses"] == eager["losses"]
            furthest = max(abs(a - b) for a, b in zip(found["losses"], eager["losses"], strict=True))
            print(f"  takeback: peak {found['peak'] / MIB:,.0f} MiB, {found['seconds']:.0f} s for {STEPS} steps")
            if found["reserved"] is not None:
                print(f"  reserved {found['reserved'] / MIB:,.0f} MiB")
            print(f"  losses {shown(found['losses'])}: {'the same bits' if same else f'{furthest:.2g} off at most'}")
            for note in found["notes"]:
                print(f"  note: {note}")
            break
    print(f"\n{time.time() - began:.0f} s in all")


def shown(losses: list[float]) -> str:
    return " ".join(f"{loss:.6f}" for loss in losses)


if __name__ == "__main__":
    main()

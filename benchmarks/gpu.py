"""Training steps on a GPU: eager, torch.compile at its budgets, Liger-Kernel and takeback: their time and memory.

    python benchmarks/gpu.py run gpt2 --systems eager,compile,compile@0.9,fast@keep,fast@auto,fast@min --json FILE
    python benchmarks/gpu.py row gpt2 fast@auto              # one of them, in this process
    python benchmarks/gpu.py curves gpt2 --steps 200         # losses of eager and of mode fast on the same batches
    python benchmarks/gpu.py table --json FILE               # what was measured so far
    python benchmarks/gpu.py run gpt2 bert --device cpu --tiny --mode exact      # to try the script

Models are in benchmarks/gpu_models.py, systems in benchmarks/gpu_systems.py. A row is a process of its own, forked from
one that has imported torch and the libraries of models; rows run one after another and are merged into the file as
they come, so an interrupted run keeps what it has. Ratios are to torch.compile on the same model.
`fast@peak:compile@0.9` is takeback asked for 99 % of the peak that the named system has in the file. Inductor's,
Triton's and takeback's caches are in one folder (--cache; with --cold each row has an empty one of its own).
--parallel-warm fills it first, several processes at a time; what kernels were found to run best with while others ran
is then forgotten, so that each row finds that out for itself, alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_results import Results, in_words, show

HERE = Path(__file__).parent
SYSTEMS = (
    *("eager", "compile", "compile:reduce-overhead", "compile@0.9", "compile@0.7", "compile@0.5", "compile@0.3"),
    *("fast@keep", "fast@auto", "fast@min"),
)
FORKED = multiprocessing.get_context("forkserver")
TOLD = 12  #: lines that are shown of what a process said that failed


# -- processes -----------------------------------------------------------------------------------------------------


def child(words: list[str], limit_s: float, threads: int | None = None) -> tuple[dict[str, Any] | None, str]:
    """What a command of this file wrote as --json; else the last line of what it said. It is a process of its own,
    forked from one that has imported what all need (gpu_imports.py)."""
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "row.json", Path(folder) / "said"
        words = [*words, "--json", str(out), "--since", str(time.time())]
        process = FORKED.Process(target=_in_child, args=(words, said, threads))
        process.start()
        try:
            process.join(limit_s)
            late = process.is_alive()
        finally:  # compile workers end with it
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid or 0, 9)
                process.join()
        if late:
            return None, f"stopped after {limit_s:.0f} s"
        if process.exitcode == 0:
            return json.loads(out.read_text()) if out.exists() else {}, ""
        lines = [line.strip() for line in said.read_text(errors="replace").splitlines() if line.strip()]
    print(*lines[-TOLD:], sep="\n", flush=True)
    return None, guilty(lines) or f"ended with {process.exitcode}"


def _in_child(words: list[str], said: Path, threads: int | None) -> None:
    os.setpgid(0, 0)  # a group of its own, which can be ended as one
    if threads is not None:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
    for stream, descriptor in ((os.devnull, 1), (said, 2)):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = [str(HERE / "gpu.py"), *words]
    main()


def guilty(lines: list[str]) -> str:
    """The last line that names an error, before the advice that some end with; else the last one."""
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\w*: ", line)]
    return (named or lines or [""])[-1][:500]


def common_words(arguments: argparse.Namespace) -> list[str]:
    words = ["--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
    return words + (["--cache", str(arguments.cache)] if arguments.cache else [])


def systems_of(arguments: argparse.Namespace) -> list[str]:
    names = arguments.systems.split(",")
    return [name.replace("fast@", f"{arguments.mode}@") if name.startswith("fast@") else name for name in names]


def asked_of(system: str, model: str, results: Results) -> str | None:
    """`fast@peak:NAME` with the bytes of that system's peak; None if it has none yet."""
    kind, found, name = system.partition("@peak:")
    if not found:
        return system
    row = results.median(model, name)
    peak = row.get("peak_mib") if row else None
    return None if peak is None else f"{kind}@{int(peak * 0.99 * (1 << 20))}B"


def run(arguments: argparse.Namespace) -> None:
    begun = time.monotonic()
    results = Results.of(arguments.json)
    systems = systems_of(arguments)
    if arguments.parallel_warm:
        if arguments.cache is None:
            raise SystemExit("--parallel-warm fills a cache: name its folder with --cache")
        fill(arguments, systems)
    for model in arguments.models:
        for process in range(arguments.repeat):
            for system in systems:
                left = arguments.total_s - (time.monotonic() - begun)
                if left < 10:
                    print(f"no time left for {model} {system}", flush=True)
                    continue
                asked = asked_of(system, model, results)
                name = {"model": model, "system": system, "process": process}
                if asked is None:
                    results.add_({}, name | {"error": f"the file has no peak of {system.partition(':')[2]}"})
                    continue
                with tempfile.TemporaryDirectory() as empty:
                    words = ["row", model, asked, "--steps", str(arguments.steps), *common_words(arguments)]
                    got, why = child(
                        [*words, *(["--cache", empty] if arguments.cold else [])], min(left, arguments.limit_s)
                    )
                row = name | {"error": why} if got is None else got["row"] | name | {"asked": asked}
                results.add_(got["machine"] if got else {}, row)
                print(in_words(row), flush=True)
    show(results, arguments.models)


def fill(arguments: argparse.Namespace, systems: list[str]) -> None:
    """The caches, by several processes at once: compiling keeps cores busy, and the device hardly."""
    # Models in turn: several large ones at once might not fit.
    todo = [(m, s) for s in systems for m in arguments.models if s.partition("@")[0] not in ("eager", "liger")]
    threads = max(1, (os.cpu_count() or 1) // arguments.jobs)

    def one(case: tuple[str, str]) -> str:
        start = time.monotonic()
        _, why = child(["row", *case, "--warm-only", *common_words(arguments)], 2 * arguments.limit_s, threads)
        return f"warm {' '.join(case)}: {time.monotonic() - start:.0f} s {why}"

    todo = [case for case in todo if "@peak:" not in case[1]]
    # What takeback measures of the machine, once, it measures while nothing else runs.
    alone = [case for case in todo if not case[1].startswith("compile")][:1]
    for case in alone:
        print(one(case), flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for line in pool.map(one, [case for case in todo if case not in alone]):
            print(line, flush=True)
    for found in (arguments.cache / "inductor").rglob("*.best_config"):
        found.unlink()


def curves(arguments: argparse.Namespace) -> None:
    results = Results.of(arguments.json)
    for model in arguments.models:
        for system in systems_of(arguments):
            words = ["learn", model, system, "--steps", str(arguments.steps), *common_words(arguments)]
            got, why = child(words, arguments.limit_s)
            row = got["row"] if got else {"model": model, "system": system, "error": why}
            results.add_(got["machine"] if got else {}, row)
            losses = row.get("losses", ())
            said = " ".join(f"{loss:.4f}" for loss in losses[:: max(1, len(losses) // 8)])
            print(f"{model} {system}: {why or said}", flush=True)


# -- one process ---------------------------------------------------------------------------------------------------


def one(arguments: argparse.Namespace) -> None:
    """`row` and `learn`: the only ones that import torch."""
    state = use_cache_(arguments) if arguments.cache else "unknown"
    import warnings

    warnings.simplefilter("ignore")
    import gpu_systems

    system = arguments.system
    where = {"device": arguments.device, "tiny": arguments.tiny}
    if arguments.command == "learn":
        found = gpu_systems.learn(arguments.model, system, steps=arguments.steps, **where)
    elif arguments.warm_only:
        gpu_systems.warm(arguments.model, system, **where)
        found = {}
    else:
        since = arguments.since or STARTED
        found = gpu_systems.row(arguments.model, system, steps=arguments.steps, since=since, cache=state, **where)
    if arguments.cache:
        marker_of(arguments).touch()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found) + "\n")
    elif found:
        print(json.dumps(found, indent=1))


STARTED = time.time()


def use_cache_(arguments: argparse.Namespace) -> str:
    """Everything that outlives a process goes into the folder; what was found there is said."""
    folder: Path = arguments.cache.resolve()
    state = "warm" if marker_of(arguments).exists() else "others'" if any(folder.glob("*/*")) else "cold"
    for variable, name in (
        ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
        ("TRITON_CACHE_DIR", "triton"),
        ("TAKEBACK_CACHE", "takeback"),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        os.environ[variable] = str(folder / name)
    keep_bytecode_()
    return state


def keep_bytecode_() -> None:
    """Where packages are installed by pip, they are compiled once. An image may come without that, and forbid to write
    it: each process would compile all that it imports. It is no part of a cache that a row is to find empty."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(tempfile.gettempdir()) / "gpu-benchmark-bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix


def marker_of(arguments: argparse.Namespace) -> Path:
    size = "tiny" if arguments.tiny else "full"
    words = (arguments.model, arguments.system, arguments.device, size)
    return Path(arguments.cache) / ("was-" + "-".join("".join(c if c.isalnum() else "_" for c in w) for w in words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "curves", "row", "learn", "table"):
        command = commands.add_parser(name)
        command.add_argument("--json", type=Path, default=None)
        if name in ("row", "learn"):
            command.add_argument("model")
            command.add_argument("system")
            command.add_argument("--warm-only", action="store_true", help="fill the caches and measure nothing")
            command.add_argument("--since", type=float, default=None, help=argparse.SUPPRESS)
        else:
            command.add_argument("models", nargs="*" if name == "table" else "+")
        if name == "table":
            continue
        command.add_argument("--steps", type=int, default=200 if name in ("curves", "learn") else 12)
        command.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
        command.add_argument("--tiny", action="store_true")
        command.add_argument("--cache", type=Path, default=None)
        if name in ("run", "curves"):
            default = ",".join(SYSTEMS) if name == "run" else "eager,eager@2,fast@auto"
            command.add_argument("--systems", default=default, help="separated by commas")
            command.add_argument("--mode", default="fast", help="exact: fast@min stands for exact@min, ...")
            command.add_argument("--limit-s", type=float, default=150 if name == "run" else 300, help="for each row")
        if name == "run":
            command.add_argument("--repeat", type=int, default=1, help="processes for each row")
            command.add_argument("--total-s", type=float, default=1e9, help="no row is begun after that")
            command.add_argument("--cold", action="store_true", help="an empty cache for each row")
            command.add_argument("--parallel-warm", action="store_true", help="fill the caches first")
            command.add_argument("--jobs", type=int, default=4, help="processes that do so at a time")
    arguments = parser.parse_args()
    if arguments.command in ("run", "curves"):
        # Python of before 3.13 does not tell that process where to look.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        FORKED.set_forkserver_preload(["gpu_imports"])
    if arguments.command == "table":
        results = Results.of(arguments.json)
        show(results, arguments.models or dict.fromkeys(row["model"] for row in results.rows))
    else:
        {"run": run, "curves": curves, "row": one, "learn": one}[arguments.command](arguments)


if __name__ == "__main__":
    main()

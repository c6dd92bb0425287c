"""Same program, same options, same rates: the same plan, byte for byte, on an idle machine and on a busy one.

One model is planned twice: in this process, and in one that shares its core with busy loops.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LOOPS = 1  #: busy ones, beside one of the processes
PLAN = """
import hashlib, json, os, re, subprocess, sys
import torch
sys.path.insert(0, {folder!r})
import takeback as tb
from long_steps import digest, long_step
from takeback import zoo
from takeback.compiler.plan.rebuild_rows import RebuildRows
from takeback.compiler.plan.rebuild_solve import Effort, RebuildSolver

torch.set_num_threads(1)
case = zoo.case({name!r})
if {loops}:
    os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range({loops})]
try:
    report = tb.predict(case.model, case.loss_fn, case.optimizer, *case.batch, memory="auto", solve_s={solve_s})
    rows = RebuildRows(long_step(12, seed=1))
    cut = RebuildSolver(rows, groups=1 << 20).lowest_peak(None, Effort(3, float("inf")))
finally:
    for loop in loops:
        loop.kill()
        loop.wait()
assert any(e.fate.name == "RECOMPUTED" for e in report.ledger), "nothing is rebuilt: this shows nothing"
assert not cut.proved, "the search was not cut short: this shows nothing"
said = re.sub(r'"line": "[^"]*"', "", report.to_json())  # who calls is not the same
print(json.dumps([hashlib.sha256(said.encode()).hexdigest(), digest(cut.answer)]))
"""


def in_another_process(code: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": "random"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def here(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"__name__": "plan"})
    return out.getvalue()


def plan(name: str, loops: int, run: Callable[[str], str], solve_s: float = 10_000.0) -> list[str]:
    """The digests of a report, with every offset in it, and of an answer whose search was cut short."""
    code = PLAN.format(folder=str(Path(__file__).parent / "plan"), loops=loops, solve_s=solve_s, name=name)
    found = json.loads(run(code).splitlines()[-1])
    assert isinstance(found, list)
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot be bound to a core here")
@pytest.mark.parametrize("name", ["gpt", pytest.param("resnet", marks=pytest.mark.slow)])
def test_plan_is_the_same_on_an_idle_and_on_a_busy_machine(name: str) -> None:
    idle = plan(name, 0, here)  # where the rates were not measured before, this does it, and the other reads them
    assert plan(name, LOOPS, in_another_process) == idle

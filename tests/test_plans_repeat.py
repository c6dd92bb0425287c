"""Same program, same options, same rates: the same plan, byte for byte, on an idle machine and on a busy one.

One model is planned twice, in two processes, one of which shares its core with busy loops.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOPS = 1  #: busy ones, beside one of the processes
PLAN = """
import hashlib, json, os, subprocess, sys
import torch
sys.path.insert(0, {folder!r})
import takeback as tb
from long_steps import digest, long_step
from takeback import zoo
from takeback.compiler.plan.rebuild_rows import RebuildRows
from takeback.compiler.plan.rebuild_solve import Effort, RebuildSolver

torch.set_num_threads(1)
case = zoo.case("resnet", batch=4)
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
print(json.dumps([hashlib.sha256(report.to_json().encode()).hexdigest(), digest(cut.answer)]))
"""


def plan(loops: int, solve_s: float = 10_000.0) -> list[str]:
    """The digests of a report, with every offset in it, and of an answer whose search was cut short."""
    code = PLAN.format(folder=str(Path(__file__).parent / "plan"), loops=loops, solve_s=solve_s)
    environment = {**os.environ, "PYTHONHASHSEED": "random"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, list)
    return found


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot be bound to a core here")
def test_plan_is_the_same_on_an_idle_and_on_a_busy_machine() -> None:
    idle = plan(0)  # where the rates were not measured before, this does it, and the other reads them
    assert plan(LOOPS) == idle

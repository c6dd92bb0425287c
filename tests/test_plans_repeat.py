"""Same program, same options, same rates: the same plan, byte for byte, on an idle machine and on a busy one.

One model is planned twice, in two processes, one of which shares its core with busy loops.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LOOPS = 2  #: busy ones beside the process
PLAN = """
import hashlib, json, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, {folder!r})
import takeback as tb
from takeback import zoo
from takeback.compiler.plan.rebuild_rows import RebuildRows
from takeback.compiler.plan.rebuild_solve import Effort, RebuildSolver
from test_rebuild_solve import digest, long_step

case = zoo.case("gpt", batch=2)
report = tb.predict(case.model, case.loss_fn, case.optimizer, *case.batch, memory="auto", solve_s={solve_s})
assert any(e.fate.name == "RECOMPUTED" for e in report.ledger), "nothing is rebuilt: this shows nothing"
rows = RebuildRows(long_step(12, seed=1))
cut = RebuildSolver(rows, groups=1 << 20).lowest_peak(None, Effort(3, float("inf")))
assert not cut.proved, "the search was not cut short: this shows nothing"
print(json.dumps([hashlib.sha256(report.to_json().encode()).hexdigest(), digest(cut.answer)]))
"""


@contextlib.contextmanager
def load(core: int | None) -> Iterator[None]:
    """Busy loops on one core."""
    pin = f"import os; os.sched_setaffinity(0, {{{core}}})" if core is not None else ""
    loops = [subprocess.Popen([sys.executable, "-c", f"{pin}\nwhile True: pass"]) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def plan(core: int | None = None) -> list[str]:
    """The digests of a report, with every offset in it, and of an answer that was cut short."""
    pin = f"import os; os.sched_setaffinity(0, {{{core}}})\n" if core is not None else ""
    code = pin + PLAN.format(folder=str(HERE / "plan"), solve_s=10_000.0)
    environment = {**os.environ, "PYTHONHASHSEED": "random"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, list)
    return found


def test_plan_is_the_same_on_an_idle_and_on_a_busy_machine() -> None:
    idle = plan()  # measures the rates, which the other reads
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("a process cannot be bound to a core here")
    core = min(os.sched_getaffinity(0))
    with load(core):
        busy = plan(core)
    assert idle == busy

"""What is remembered of a program's lifetimes goes with the program, also while the interpreter ends."""

from __future__ import annotations

import subprocess
import sys

#: As if somebody had asked the collector for all objects: the module, what it remembers, and the programs themselves
#: are alive until the module has been cleared.
SCRIPT = """
import gc
import torch
import takeback as tb
from takeback.compiler.ownership import lifetimes

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = tb.compile_step(model, lambda m, x: m(x).sin().sum(), optimizer, mode="exact")
for rows in (1, 2, 1, 2):
    step(torch.randn(rows, 4))
remembered = list(lifetimes._known.values())
programs = [program() for program, _ in remembered]
del step
gc.collect()
print(len(remembered))
held = [lifetimes, *remembered, *programs]
del remembered, programs
"""


def test_programs_that_outlive_the_module_say_nothing_when_the_interpreter_ends() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0
    assert int(done.stdout) > 0, "nothing was remembered"
    assert done.stderr == ""

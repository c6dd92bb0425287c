"""What all tests share: a cache of their own beside the repository, a machine whose rates are known, and a small heap.

To measure this machine would take seconds for each dtype (a half-precision product has no kernel on some CPUs), and the
plans would differ from one machine to the next. tests/run/test_calibrate.py measures.

A recording and many tests call `gc.collect()`, which walks all objects there are: thousands of collected tests, and what
they import. So what exists before a file's tests is set aside.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

# Before takeback is asked for it; processes that tests start inherit it. `make clean` removes it.
os.environ.setdefault("TAKEBACK_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "takeback"))

from takeback.compiler.passes.cost import Rates
from takeback.compiler.run import calibrate
from takeback.options import cache_dir

RATES = Rates(
    bytes_per_s=2e10,
    maths_per_s=1e9,
    op_s=2e-6,
    flops_per_s={"float32": 1e11, "float64": 5e10, "bfloat16": 5e10, "float16": 5e10},
    convolution=0.7,
    attention=0.7,
)


def pytest_configure() -> None:
    """Keeps the rates where takeback finds them, in this process and in those that tests start."""
    for threads in {1, 2, torch.get_num_threads()}:
        calibrate._write(cache_dir() / f"rates-{calibrate._machine('cpu', threads)}.json", RATES)


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    gc.collect()
    gc.freeze()

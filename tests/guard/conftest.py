"""One thread and a fixed seed. The guard walks the heap, which is small (tests/conftest.py) unless a test wants all."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _steady() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def whole_heap() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()

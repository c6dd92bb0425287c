"""One thread, a fixed seed, and a small heap: what existed before is set aside, as the guard walks it."""

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


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def whole_heap() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()

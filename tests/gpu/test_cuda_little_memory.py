"""A GPU that really has too little, at each stage of a step and for many sizes of what is left: the step is eager's, or
an error says what is short and nothing is lost. torch.cuda.set_per_process_memory_fraction sets the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import short_of_memory
import torch
from short_of_memory import Twins, put_back_, unchanged
from torch import Tensor, nn

from takeback.errors import NoRoomError, PlanError

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

ADAMW = partial(torch.optim.AdamW, lr=1e-3, foreach=True)
FUSED = partial(torch.optim.AdamW, lr=1e-3, fused=True)
#: Steps that are made with all the memory there is before the one that has little.
STAGES = {"recording": 0, "first replay": 1, "later replay": 4}
LEFT_MIB = (0, 4, 24, 48, 80, 112, 144, 192, 256, 384, 1024)
HALF = "some parameters may have been updated"


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Activations of 16 MiB each, and parameters of 13 MiB: the allocator's own blocks are small beside them."""

    def model_for(device: str) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Linear(16, 1024), nn.BatchNorm1d(1024), nn.GELU(), nn.Dropout(0.2), nn.Linear(1024, 2048), nn.ReLU()
        return nn.Sequential(*layers, nn.Linear(2048, 512), nn.GELU(), nn.Linear(512, 8)).to(device)

    monkeypatch.setattr(short_of_memory, "model_for", model_for)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def leave_(left_bytes: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + left_bytes) / total)


def limited(twins: Twins, left_mib: int, count: int, **how: Any) -> str:
    """One step with so much left, then one with all of it. Gives what came of the first."""
    before = twins.before()
    leave_(left_mib << 20)
    loss: Tensor | None = None
    said, made = "", True
    try:
        loss = twins.attempt(count, **how)
    except PlanError as error:
        said = str(error)
    except (NoRoomError, torch.OutOfMemoryError) as error:
        said, made = "\n".join((str(error), *getattr(error, "__notes__", ()))), False
    torch.cuda.set_per_process_memory_fraction(1.0)
    if made:
        assert not said or "the step was made" in said
        twins.follow(loss, count)
        return "made"
    if HALF not in said:
        unchanged(twins.everything(), before)
        return "taken back"
    unchanged(twins.everything(), before, but=twins.updated)
    if not before.keys() >= twins.updated:
        twins.optimizer.state.clear()
    put_back_(twins, before)
    return "half done"


@pytest.mark.parametrize("optimizer", [ADAMW, FUSED], ids=["foreach", "fused"])
@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}, {"memory": "min"}], ids=["plain", "clip", "min"])
@pytest.mark.parametrize("stage", STAGES)
def test_step_is_eagers_or_nothing_is_lost(stage: str, settings: dict[str, Any], optimizer: Any) -> None:
    rows, outcomes = 4096, []
    for left_mib in LEFT_MIB:
        twins = Twins("cuda", "exact", optimizer, **settings)
        twins.take(STAGES[stage], rows)
        outcomes.append(limited(twins, left_mib, rows))
        twins.take(2, rows)
    print(f"\n{stage}, {settings}: {dict(zip(LEFT_MIB, outcomes, strict=True))}")
    assert outcomes[0] != "made"
    assert outcomes[-1] == "made"
    assert "taken back" in outcomes


def test_another_shape_is_eagers_or_nothing_is_lost() -> None:
    outcomes = []
    for left_mib in LEFT_MIB:
        twins = Twins("cuda", "exact", ADAMW)
        twins.take(4, 2048)
        outcomes.append(limited(twins, left_mib, 4096))
        twins.take(2, 4096)
    print(f"\nanother shape: {dict(zip(LEFT_MIB, outcomes, strict=True))}")
    assert outcomes[0] != "made"
    assert outcomes[-1] == "made"


def test_second_call_of_an_accumulation_leaves_what_waits() -> None:
    rows, refused = 4096, 0
    for left_mib in LEFT_MIB:
        twins = Twins("cuda", "exact", ADAMW, clip_norm=0.5)
        for update in (False, False, True, False, False, True, False):
            twins.follow_adding(twins.attempt(rows, update=update), rows, update=update)
        before = twins.before()
        leave_(left_mib << 20)
        try:
            loss = twins.attempt(rows, update=False)
        except (NoRoomError, torch.OutOfMemoryError) as error:
            refused += 1
            dropped = "all of them were dropped" in "".join(getattr(error, "__notes__", ()))
            torch.cuda.set_per_process_memory_fraction(1.0)
            unchanged(twins.everything(), {k: v for k, v in before.items() if not (dropped and k.endswith(".grad"))})
            if dropped:
                twins.twin.zero_grad()
        else:
            torch.cuda.set_per_process_memory_fraction(1.0)
            twins.follow_adding(loss, rows)
        for update in (False, True):
            twins.follow_adding(twins.attempt(rows, update=update), rows, update=update)
    assert 0 < refused < len(LEFT_MIB)

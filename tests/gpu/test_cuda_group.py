"""On a GPU a step with a group reduces the gradients of a bucket together, where they lie: here in a group of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_twins import DEVICE, adamw, convnet, exact_step, images, labelled, momentum, same
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from takeback import flat
from takeback.compiler.run.allocator_executor import AllocatorExecutor
from takeback.compiler.run.eager import eager_step

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_nccl_available()), reason="needs NCCL")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("group") / "store"
    device = torch.device(DEVICE, 0)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1, device_id=device)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.heads = nn.Linear(64, 32), nn.ModuleList([nn.Linear(32, 10) for _ in range(3)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.heads[which](self.stem(x).relu())


def on_gpu(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(t.to(DEVICE) if isinstance(t, Tensor) else t for t in batch)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1, "accumulate": 2}], ids=["plain", "clipped, accumulated"])
@pytest.mark.parametrize("make", [adamw, momentum])
def test_group_of_one_has_eagers_bits(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, make: Any, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(flat, "BUCKET_BYTES", 4096)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(0)
    ours = convnet().to(DEVICE)
    torch.manual_seed(0)
    theirs = convnet().to(DEVICE)
    mine, reference = make(ours), make(theirs)
    step = exact_step(ours, labelled, mine, group=group, **settings)
    for i in range(5):
        batch = on_gpu(images(torch.Generator().manual_seed(i)))
        torch.manual_seed(i)
        loss = step(*batch)
        torch.manual_seed(i)
        expected = eager_step(theirs, labelled, reference, batch, **settings)
        assert same(loss, expected)
        for name, value in theirs.state_dict().items():
            assert same(ours.state_dict()[name], value), f"{name} after step {i}"
    assert step._last is not None
    assert isinstance(step._last.executor, AllocatorExecutor)
    assert step._group is not None
    assert step._group.reducer.count > 1
    assert any("averaged over the group" in note for note in step.report().notes)


def test_unused_parameters_are_skipped(group: dist.ProcessGroup) -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, which: int) -> Tensor:
        return F.cross_entropy(model(x, which), y)

    torch.manual_seed(0)
    ours = Branches().to(DEVICE)
    torch.manual_seed(0)
    theirs = Branches().to(DEVICE)
    mine, reference = adamw(ours), adamw(theirs)
    step = exact_step(ours, loss_fn, mine, group=group)
    for i, which in enumerate((0, 0, 1, 0, 1, 0)):
        generator = torch.Generator().manual_seed(i)
        x, y = torch.randn(8, 64, generator=generator), torch.randint(10, (8,), generator=generator)
        batch = on_gpu((x, y, which))
        assert same(step(*batch), eager_step(theirs, loss_fn, reference, batch))
        for name, value in theirs.state_dict().items():
            assert same(ours.state_dict()[name], value), f"{name} after step {i}"
    assert len(mine.state) == len(reference.state)


def test_gradients_are_reduced_where_they_lie(group: dist.ProcessGroup, tmp_path: Path) -> None:
    """No bucket is copied: the step with a group peaks no higher than the one without, but for the flags."""
    peaks = []
    for each in (None, group):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))).to(DEVICE)
        step = exact_step(model, lambda m, x: m(x).square().mean(), momentum(model), group=each, memory="keep")
        x = torch.randn(8, 1024, device=DEVICE)
        for _ in range(4):
            step(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(x)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del step, model, x
    assert peaks[1] <= peaks[0] + (1 << 20)

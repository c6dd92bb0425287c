"""Without a C++ compiler everything still works: one warning, eager's bits, and a report that says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.run import allocator
from takeback.options import cache_dir


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(512, 4)
    )


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch(i: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(rows, 3, 8, 8, generator=g), torch.randint(0, 4, (rows,), generator=g)


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "load", lambda *args, **kwargs: None)


@pytest.mark.usefixtures("no_native")
@pytest.mark.parametrize("poison", [False, True])
def test_without_the_allocator_losses_and_state_are_eagers(poison: bool) -> None:
    model, other = normed(), normed()
    optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, other))
    step = tb.compile_step(model, loss_fn, optimizer, poison=poison)
    for i in range(8):
        rows = 4 if i % 3 else 6
        torch.manual_seed(i)
        reference.zero_grad()
        expected = loss_fn(other, *batch(i, rows))
        expected.backward()
        reference.step()
        torch.manual_seed(i)
        assert torch.equal(step(*batch(i, rows)), expected.detach())
        for name, value in other.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), f"{name} after step {i}"


@pytest.mark.usefixtures("no_native")
def test_without_the_allocator_the_report_says_so() -> None:
    model = normed()
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    for i in range(4):
        step(*batch(i))
    report = step.report()
    assert not report.placed
    assert any("no native allocator" in note for note in report.notes)
    assert report.measured is not None
    assert report.measured.landed > 0
    assert report.allocations_per_step >= report.measured.landed, "ops allocate as in eager, and it is not counted"
    assert "allocator" in str(report)


SCRIPT = """
import warnings
import torch
import takeback as tb
from takeback.compiler.run import calibrate

calibrate._TURNS, calibrate._BYTES, calibrate._SIDE, calibrate._OPS = (2,), 1 << 12, 16, 1  # rates are not the point

def loss_fn(model, x):
    return model(x).square().mean()

def train(step, n):
    for i in range(n):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(i))
        loss = step(x)
    return loss

torch.manual_seed(0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    losses = []
    for compiled in (False, True, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if compiled:
            step = tb.compile_step(model, loss_fn, optimizer)
        else:
            def step(x):
                optimizer.zero_grad()
                loss = loss_fn(model, x)
                loss.backward()
                optimizer.step()
                return loss.detach()
        losses.append(train(step, 5))
assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])
print("placed", step.report().placed)
for w in caught:
    print("warning:", w.message)
"""


def run_script(tmp_path: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env={**os.environ, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_missing_compiler_warns_once_by_name_and_gives_the_same_bits(tmp_path: Path) -> None:
    out = run_script(tmp_path, CXX="no-such-compiler", TAKEBACK_CACHE=str(tmp_path / "cache"))
    assert "placed False" in out
    assert out.count("the native CPU allocator is not available") == 1
    assert "there is no compiler named 'no-such-compiler'" in out


@pytest.mark.slow
def test_broken_compiler_warns_once_and_gives_the_same_bits(tmp_path: Path) -> None:
    out = run_script(tmp_path, CXX="false", TAKEBACK_CACHE=str(tmp_path / "cache"))
    assert "placed False" in out
    assert out.count("the native CPU allocator is not available") == 1


@pytest.mark.slow
def test_compiler_missing_but_cache_filled_still_places(tmp_path: Path) -> None:
    """The cached library was built for this torch; its key must not need the compiler that built it."""
    assert allocator.load() is not None
    shutil.copytree(cache_dir(), tmp_path / "cache")
    assert "placed True" in run_script(tmp_path, CXX="no-such-compiler", TAKEBACK_CACHE=str(tmp_path / "cache"))


@pytest.fixture
def copying_compiler(tmp_path: Path) -> str:
    """Gives the library that was built from the allocator's source before: what compiles it is not the point."""
    assert allocator.load() is not None
    built = [path for path in cache_dir().glob("native-*") if b"tb_install" in path.read_bytes()]
    library = max(built, key=lambda path: path.stat().st_mtime)  # of this source: the others are of earlier ones
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\ncp "{library}" "$3"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
def test_cache_folder_that_is_a_file_warns_once_and_still_places(tmp_path: Path, copying_compiler: str) -> None:
    (tmp_path / "cache").write_text("in the way")
    out = run_script(tmp_path, CXX=copying_compiler, TAKEBACK_CACHE=str(tmp_path / "cache"))
    assert "placed True" in out
    assert out.count("warning:") == 1
    assert "cannot keep anything in the cache folder" in out


@pytest.mark.slow
def test_full_disk_for_the_cache_warns_once_and_still_places(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    out = run_script(tmp_path, TAKEBACK_CACHE="/dev/full/cache")
    assert "placed True" in out
    assert out.count("warning:") == 1

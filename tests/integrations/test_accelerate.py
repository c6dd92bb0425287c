"""A compiled step in an Accelerate loop gives what backward(), clip_grad_norm_() and step() give, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "parallel"))  # how processes are started is shared with its tests

from accelerate_twins import build, forget, loss_fn, train_both
from ranks import FINE, run_ranks

from harness import assert_same
from takeback.compiler.capture.batch import tensors_of
from takeback.errors import CaptureError, OptionError
from takeback.integrations.accelerate import compile_step

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("_forgets", "short_search")]
slow = pytest.mark.slow


@pytest.fixture
def _forgets() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    forget()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}, id="accumulated-in-bf16"),
        pytest.param({"gradient_accumulation_steps": 3}, id="accumulated", marks=slow),
        pytest.param({"mixed_precision": "bf16", "clips": False}, id="bf16", marks=slow),
        pytest.param({"gradient_accumulation_steps": 2, "rows": 36}, id="uneven", marks=slow),
    ],
)
def test_a_loop_is_stocks(settings: dict[str, Any]) -> None:
    step = train_both(**settings)
    assert not [note for note in step.report().notes if "not part of the plan" in note]


def scaling(**settings: Any) -> Any:
    """Accelerate refuses fp16 on the CPU, so it is told afterwards. The first scales are too large."""
    accelerator = accelerate.Accelerator(**settings)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3)
    return accelerator


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=slow)])
def test_the_scaler_skips_updates_and_schedulers_as_in_stock(each: int) -> None:
    step = train_both(make=scaling, gradient_accumulation_steps=each)
    scaler = step.compiled.options.scaler
    assert scaler is not None
    assert 0 < scaler.get_scale() < 2.0**19


def test_what_the_accelerator_says_is_no_option() -> None:
    model = build()
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(OptionError, match="gradient_accumulation_steps"):
        compile_step(accelerator, model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_sharded_parameters_are_refused(kind: str) -> None:
    model = build()
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(name=kind))
    with pytest.raises(CaptureError, match=f"of type {kind}.*alone or with DDP"):
        compile_step(accelerator, model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"mixed_precision": "fp16", "scaler": torch.amp.GradScaler("cpu")}, "fp16.*several processes.*'bf16'"),
        ({"mixed_precision": "fp8"}, "history of scales.*'bf16'"),
        ({"comm_hook": "fp16"}, "have a comm_hook or.*leave these out"),
        ({"broadcast_buffers": False}, "have a comm_hook or.*leave these out"),
    ],
)
def test_what_an_accelerator_asks_for_in_vain_is_refused(differs: dict[str, Any], message: str) -> None:
    model = build()
    said = {"mixed_precision": "no", "scaler": None, "comm_hook": "no", "broadcast_buffers": True} | differs
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(name="MULTI_CPU"),
        mixed_precision=said["mixed_precision"],
        scaler=said["scaler"],
        num_processes=2,
        ddp_handler=accelerate.DistributedDataParallelKwargs(
            comm_hook=accelerate.utils.DDPCommunicationHookType(said["comm_hook"]),
            broadcast_buffers=said["broadcast_buffers"],
        ),
    )
    with pytest.raises(CaptureError, match=message):
        compile_step(accelerator, model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_accelerator_comes_first() -> None:
    model = build()
    with pytest.raises(OptionError, match="a Sequential and not an Accelerator"):
        compile_step(model, accelerate.Accelerator(cpu=True), loss_fn, None)  # type: ignore[arg-type]


def by_hand(compiled: bool) -> dict[str, Any]:
    """Two microbatches for each update, without accumulate()."""
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    bare = build()
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2))
    step = compile_step(accelerator, model, loss_fn, optimizer, memory="keep") if compiled else None
    torch.manual_seed(1)
    for i in range(6):
        x, y = torch.randn(8, 6), torch.randint(4, (8,))
        if step is not None:
            step(x, y, update=i % 2 == 1)
            continue
        accelerator.backward(loss_fn(model, x, y)[0])
        if i % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    forget()
    return dict(bare.state_dict())


def test_a_loop_without_accumulate_says_which_microbatch_is_the_last() -> None:
    assert_same(by_hand(True), by_hand(False))


def loaded(compiled: bool, folder: Path, *, saves: bool) -> dict[str, Any]:
    """Four updates and what they left; saved after the first two, or loaded there."""
    accelerator = scaling(cpu=True)
    torch.manual_seed(0 if saves else 7)
    bare = build()
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))
    step = compile_step(accelerator, model, loss_fn, optimizer, clip_norm=0.1, memory="keep") if compiled else None

    def trained(updates: range) -> None:
        for i in updates:
            g = torch.Generator().manual_seed(i)
            x, y = torch.randn(8, 6, generator=g), torch.randint(4, (8,), generator=g)
            if step is not None:
                step(x, y)
            else:
                accelerator.backward(loss_fn(model, x, y)[0])
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()

    trained(range(5 if saves else 1))  # one that loads has a plan by then
    accelerator.save_state(str(folder)) if saves else accelerator.load_state(str(folder))
    trained(range(5, 9))
    found = {**bare.state_dict(), "scale": torch.tensor(accelerator.scaler.get_scale())}
    found |= {f"optimizer {i}": t for i, t in enumerate(tensors_of(optimizer.state_dict()))}
    found["rate"] = torch.tensor(schedule.get_last_lr())
    forget()
    return found


def test_a_state_that_is_saved_and_loaded_between_steps_goes_on_as_in_stock(tmp_path: Path) -> None:
    """Ours from its own, and from stock's; all as if nobody had saved."""
    stock, ours = loaded(False, tmp_path / "stock", saves=True), loaded(True, tmp_path / "ours", saves=True)
    assert_same(ours, stock)
    for compiled, folder in ((False, "stock"), (True, "ours"), (True, "stock")):
        assert_same(loaded(compiled, tmp_path / folder, saves=False), stock)
    assert not torch.equal(stock["scale"], torch.tensor(2.0**19))


def test_two_processes_train_as_with_ddp(tmp_path: Path) -> None:
    for name, said in run_ranks(2, "accelerate_ranks", ["ddp"], tmp_path).items():
        assert said == [FINE, FINE], f"{name}: {said}"


@slow
def test_under_torchrun() -> None:
    script = Path(__file__).parent / "accelerate_ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.stdout.count("the same") == 2, done.stdout + done.stderr

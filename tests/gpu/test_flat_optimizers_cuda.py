"""On a GPU takeback.optim updates a group in one launch, with the bits of torch's fused CUDA kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

sys.path.append(str(Path(__file__).parents[1] / "optim"))

from flat_twins import OURS, THEIRS, VARIANTS, Twins, same_bits

import takeback as tb
from takeback import optim
from takeback.optim import launch, proof

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # triton's own, while it compiles

CHUNK = launch.CHUNK
SHAPES = ((33, 7), (7,), (), (64, 64), (4, 3, 3, 3), (CHUNK,), (3 * CHUNK + 5,), (130, 65), (1, 1), (CHUNK + 4,))
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def twins(name: str, settings: dict[str, Any], **more: Any) -> Twins:
    return Twins(name, settings, device="cuda", **{"shapes": SHAPES, **more})


def two_groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[1:6:2], "lr": 0.03, "weight_decay": 0.1}, {"params": [params[0], *params[2:8:2]]}]


# -- bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_kernel_has_the_bits_of_the_fused_cuda_optimizer(variant: str, dtype: torch.dtype) -> None:
    name, settings = VARIANTS[variant]
    pair = twins(name, settings, dtypes=[dtype])
    pair.train(20)
    if variant == "sgd momentum maximize":
        assert "rounds it in two ways" in pair.ours.reasons[0]
    elif settings.get("weight_decay") and name == "Adam":  # the trial finds that torch rounds otherwise here
        assert all("had other bits than torch's" in reason for reason in pair.ours.reasons.values())
    else:
        assert pair.ours.reasons == {}, "our kernel was not used"


@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("variant", ["sgd nesterov decay", "adam amsgrad", "adamw"])
def test_torch_operators_on_lists_have_them_too(variant: str, dtype: torch.dtype) -> None:
    name, settings = VARIANTS[variant]
    pair = twins(name, settings, dtypes=[dtype], kernel="auto" if dtype == torch.float64 else "torch")
    pair.train(10)
    assert 0 in pair.ours.reasons


@pytest.mark.parametrize("variant", ["sgd momentum", "adam", "adamw"])
def test_bits_over_hundreds_of_steps_with_small_and_large_gradients(variant: str) -> None:
    name, settings = VARIANTS[variant]
    pair = twins(name, settings)
    for i in range(300):
        pair.gradients(scale=10.0 ** (-(i % 45) + 3))
        pair.ours.step()
        pair.reference.step()
    pair.check()
    assert pair.ours.reasons == {}


def test_groups_with_different_settings_on_the_gpu() -> None:
    pair = twins("AdamW", {"lr": 0.01}, groups=two_groups)
    pair.train(5)
    assert pair.ours.reasons == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OURS)
def test_tensor_learning_rate_on_the_gpu(name: str, device: str) -> None:
    pair = twins(name, {"lr": torch.tensor(0.02, device=device)})
    pair.train(3)
    for optimizer in (pair.ours, pair.reference):
        optimizer.param_groups[0]["lr"].fill_(0.005)
    pair.train(3)
    assert bool(pair.ours.reasons) == (device == "cuda")


def test_a_scheduler_that_changes_betas_at_every_step_runs_no_new_trial() -> None:
    pair = twins("AdamW", {"lr": 0.01})
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=20) for o in (pair.ours, pair.reference)
    ]
    pair.step()
    verdicts = len(proof._verdicts)
    for _ in range(15):
        for scheduler in schedulers:
            scheduler.step()
        pair.step()
    pair.check()
    assert len(proof._verdicts) == verdicts


def test_float32_gradients_of_bf16_parameters_on_the_gpu() -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("needs Tensor.grad_dtype")
    pair = twins("AdamW", {"lr": 0.01}, dtypes=[torch.bfloat16], grad_dtype=torch.float32)
    pair.train(5)
    assert pair.ours.reasons == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("name", OURS)
def test_clip_norm_on_the_gpu_is_clipping_before_the_step(name: str, kernel: str, dtype: torch.dtype) -> None:
    settings = {"lr": 0.1, "clip_norm": 0.5}
    pair = twins(name, settings, dtypes=[dtype], kernel=kernel, reference={"lr": 0.1})
    for _ in range(3):
        pair.gradients()
        flat = pair.buf.flat.clone()
        total = pair.buf.norm()
        for p in pair.theirs:
            assert p.grad is not None
            p.grad.mul_(torch.clamp(0.5 / (total + 1e-6), max=1.0))
        pair.ours.step()
        pair.reference.step()
        pair.check()
        if not pair.ours.reasons:
            assert same_bits(flat, pair.buf.flat), "our kernel scales as it reads"


# -- around the kernel -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["sgd nesterov decay", "adam amsgrad", "adamw"])
def test_state_dict_goes_both_ways_on_the_gpu(variant: str) -> None:
    name, settings = VARIANTS[variant]
    pair = twins(name, settings)
    pair.train(3)
    mine, theirs = pair.ours.state_dict(), pair.reference.state_dict()
    pair.reference = pair.fused(name, settings)
    pair.ours = OURS[name](pair.buf, **settings)
    pair.reference.load_state_dict(mine)
    # torch takes the tensors themselves: give it copies, or both would update one state.
    for state in pair.reference.state.values():
        state.update({key: value.clone() for key, value in state.items()})
    pair.ours.load_state_dict(theirs)
    pair.train(3)
    assert pair.ours.reasons == {}


@pytest.mark.parametrize("variant", ["sgd decay", "adamw"])
def test_parameters_without_gradient_are_skipped_on_the_gpu(variant: str) -> None:
    name, settings = VARIANTS[variant]
    pair = twins(name, settings)
    for without in ([2, 3], [], [0], [0, 2, 3, 8], range(len(SHAPES)), []):
        pair.step(without)
        pair.check()


def test_late_momentum_on_the_gpu_begins_with_the_gradient() -> None:
    pair = twins("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5})
    pair.reference = THEIRS["SGD"](pair.theirs, lr=0.1, momentum=0.9, dampening=0.5, fused=False, foreach=False)
    for without in ([1, 2], [], [1], []):
        pair.step(without)
    for p, q in zip(pair.mine, pair.theirs, strict=True):
        torch.testing.assert_close(p, q)


def test_a_parameter_that_moved_is_found_at_its_new_address() -> None:
    pair = twins("AdamW", {"lr": 0.1})
    pair.train(2)
    old = pair.mine[3].data
    pair.mine[3].data = old.clone()
    before = old.clone()
    pair.train(2)
    assert same_bits(old, before), "the old memory was written"


def test_parameters_at_odd_addresses() -> None:
    base = torch.randn(3 * CHUNK + 1, device="cuda")
    mine, theirs = nn.Parameter(base.clone()[1:]), nn.Parameter(base.clone()[1:])
    buf = tb.GradBuffer([mine])
    ours, reference = optim.AdamW(buf, lr=0.1), torch.optim.AdamW([theirs], lr=0.1, fused=True)
    for _ in range(3):
        buf.slots[0].view.normal_()
        mine.grad, theirs.grad = buf.slots[0].view, buf.slots[0].view.clone()
        ours.step()
        reference.step()
    assert same_bits(mine, theirs)
    assert ours.reasons == {}


def test_autograd_notices_the_update() -> None:
    p = nn.Parameter(torch.ones(4, device="cuda"))
    buf = tb.GradBuffer([p])
    ours = optim.SGD(buf, lr=0.1)
    loss = (p * p).sum()
    buf.slots[0].view.fill_(1.0)
    p.grad = buf.slots[0].view
    ours.step()
    assert ours.reasons == {}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_trial_leaves_the_random_state_alone() -> None:
    proof._verdicts.clear()
    pair = twins("Adam", {"lr": 0.1})
    before, before_gpu = torch.get_rng_state(), torch.cuda.get_rng_state()
    pair.step()
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(before_gpu, torch.cuda.get_rng_state())


@pytest.mark.parametrize("name", OURS)
def test_grad_scaler_on_the_gpu(name: str) -> None:
    pair = twins(name, {"lr": 0.1})
    scalers = [torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for scaler in scalers:
        scaler.scale(torch.zeros((), device="cuda"))
    for turn in range(5):
        pair.gradients(scale=8.0)
        if turn == 2:
            for p in (pair.mine[1], pair.theirs[1]):
                assert p.grad is not None
                p.grad[0] = torch.inf
        for scaler, optimizer in zip(scalers, (pair.ours, pair.reference), strict=True):
            scaler.step(optimizer)
            scaler.update()
        pair.check()
    assert "GradScaler" in pair.ours.reasons[0]


# -- how many launches -------------------------------------------------------------------------------------------------


def gpt_shapes(width: int, vocabulary: int) -> list[tuple[int, ...]]:
    """The 148 parameters of GPT-2 small, or of a narrower one."""
    block: list[tuple[int, ...]] = [
        *((width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)),
        *((width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)),
    ]
    return [(vocabulary, width), (1024, width), *block * 12, (width,), (width,)]


def launches(optimizer: torch.optim.Optimizer) -> list[str]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        optimizer.step()
        torch.cuda.synchronize()
    return [
        event.name
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Optimizer.")
    ]


@pytest.mark.parametrize("name", OURS)
def test_148_parameters_are_updated_in_one_launch(name: str) -> None:
    shapes = gpt_shapes(192, 5000)
    assert len(shapes) == 148
    pair = twins(name, {"lr": 0.01}, shapes=shapes)
    pair.train(2)
    pair.gradients()
    ours, theirs = launches(pair.ours), launches(pair.reference)
    print(f"{name}: {len(ours)} launches against {len(theirs)} of torch's fused")
    kernel = "sgd" if name == "SGD" else "adam"
    assert [n for n in ours if n == kernel] == [kernel], ours
    # Beside it: the step counts, and the powers of the betas, each one small operation.
    assert len(ours) == (1 if name == "SGD" else 3), ours
    pair.check()

"""takeback.optim has the bits of torch's fused optimizers, their state_dict, and their behaviour around a step."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flat_twins import OURS, SHAPES, THEIRS, VARIANTS, Twins, same_bits
from torch import nn

import takeback as tb
from takeback import optim
from takeback.errors import GradBufferError, OptionError
from takeback.flat import ALIGNMENT_BYTES, rounded_up
from takeback.optim import launch, proof
from takeback.optim.fused import AdamSettings, ScalerTensors, SGDSettings


def two_groups(params: Any) -> list[dict[str, Any]]:
    """With different settings, and the last parameter in neither."""
    return [{"params": params[1:6:2], "lr": 0.03, "weight_decay": 0.1}, {"params": [params[0], *params[2:8:2]]}]


# -- bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_updates_have_the_bits_of_the_fused_optimizer(variant: str, dtype: torch.dtype) -> None:
    name, settings = VARIANTS[variant]
    Twins(name, settings, dtypes=[dtype]).train(12)


@pytest.mark.parametrize("name", OURS)
def test_parameters_of_several_dtypes_are_updated_together(name: str) -> None:
    low = [] if name == "SGD" else [torch.bfloat16]
    Twins(name, {"lr": 0.01}, dtypes=[torch.float32, torch.float64, *low]).train(4)


@pytest.mark.parametrize("variant", ["sgd nesterov decay", "adam amsgrad", "adamw"])
def test_groups_with_different_settings(variant: str) -> None:
    name, settings = VARIANTS[variant]
    twins = Twins(name, settings, groups=two_groups)
    before = twins.mine[8].clone()
    twins.train(5)
    assert same_bits(twins.mine[8], before), "a parameter in no group was updated"


@pytest.mark.parametrize("name", OURS)
def test_learning_rate_may_be_a_tensor(name: str) -> None:
    twins = Twins(name, {"lr": torch.tensor(0.02)})
    twins.train(3)
    for optimizer in (twins.ours, twins.reference):
        optimizer.param_groups[0]["lr"].fill_(0.005)
    twins.train(3)


@pytest.mark.parametrize("name", OURS)
def test_schedulers_change_the_learning_rate(name: str) -> None:
    twins = Twins(name, {"lr": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}, groups=two_groups)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=10) for o in (twins.ours, twins.reference)
    ]
    for _ in range(8):
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    twins.check()
    assert twins.ours.param_groups[0]["lr"] == twins.reference.param_groups[0]["lr"] != 0.1


def test_gradients_of_another_dtype_are_rounded_to_the_parameters() -> None:
    twins = Twins("AdamW", {"lr": 0.01}, dtypes=[torch.bfloat16], grad_dtype=torch.float32)
    assert twins.buf.flat.dtype == torch.float32
    twins.train(4)


@pytest.mark.parametrize("limit", [0.5, 1e9])
@pytest.mark.parametrize("name", OURS)
def test_clip_norm_is_clipping_before_the_step(name: str, limit: float) -> None:
    twins = Twins(name, {"lr": 0.1, "clip_norm": limit}, reference={"lr": 0.1})
    for _ in range(3):
        twins.gradients()
        total = twins.buf.norm()
        for p in twins.theirs:
            assert p.grad is not None
            p.grad.mul_(torch.clamp(limit / (total + 1e-6), max=1.0))
        twins.ours.step()
        twins.reference.step()
        twins.check()
        assert twins.ours.grad_norm == total


def test_clip_norm_refuses_scaled_gradients() -> None:
    twins = Twins("AdamW", {"lr": 0.1, "clip_norm": 1.0}, reference={"lr": 0.1})
    twins.gradients()
    before = [p.detach().clone() for p in twins.mine]
    twins.ours.grad_scale, twins.ours.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with pytest.raises(OptionError, match=r"call scaler.unscale_\(optimizer\)"):
        twins.ours.step()
    assert all(map(torch.equal, before, twins.mine))
    with pytest.raises(OptionError, match="clip_norm must be a positive number"):
        OURS["SGD"](twins.buf, clip_norm=-1.0)


def test_a_model_trains_as_with_torch() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16), nn.Linear(16, 4)
        )
        return net.to(memory_format=torch.channels_last)

    mine, theirs = model(), model()
    buf = tb.GradBuffer(mine)
    ours = optim.AdamW(buf, lr=1e-2)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for i in range(6):
        x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(i))
        for net, optimizer in ((mine, ours), (theirs, reference)):
            optimizer.zero_grad()
            F.cross_entropy(net(x), torch.arange(5) % 4).backward()
        for slot, p in zip(buf.slots, theirs.parameters(), strict=True):
            assert p.grad is not None
            p.grad.copy_(slot.view)  # the gradients themselves are GradBuffer's claim, not this one's
            assert slot.has_gradient_in_place()
        ours.step()
        reference.step()
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert same_bits(p, q)


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["sgd", "sgd nesterov decay", "adam amsgrad", "adamw"])
def test_state_dict_goes_both_ways_in_mid_training(variant: str) -> None:
    name, settings = VARIANTS[variant]
    twins = Twins(name, settings, groups=two_groups)
    twins.train(3)
    mine, theirs = twins.ours.state_dict(), twins.reference.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert {i: s.keys() for i, s in mine["state"].items()} == {i: s.keys() for i, s in theirs["state"].items()}
    # Each goes on from what the other saved.
    saved = io.BytesIO()
    torch.save(mine, saved)
    saved.seek(0)
    loaded = torch.load(saved)
    twins.reference = twins.fused(name, settings, two_groups)
    twins.ours = OURS[name](twins.buf, two_groups(twins.mine), **settings)
    twins.reference.load_state_dict(loaded)
    twins.ours.load_state_dict(copy.deepcopy(theirs))
    twins.check()
    twins.train(3)


@pytest.mark.parametrize("name", OURS)
def test_state_dict_of_an_unfused_optimizer_is_taken(name: str) -> None:
    twins = Twins(name, {"lr": 0.1, **({"momentum": 0.9} if name == "SGD" else {})})
    unfused = THEIRS[name](
        twins.theirs, **{k: v for k, v in twins.reference.defaults.items() if k in ("lr", "momentum")}
    )
    for _ in range(2):
        twins.gradients()
        unfused.step()
    with torch.no_grad():
        for p, q in zip(twins.mine, twins.theirs, strict=True):
            p.copy_(q)
    twins.ours.load_state_dict(unfused.state_dict())
    twins.reference.load_state_dict(unfused.state_dict())
    for group in twins.reference.param_groups:
        group["fused"] = True
    twins.train(3)


def test_loaded_state_is_a_copy() -> None:
    twins = Twins("AdamW", {"lr": 0.1})
    twins.train(2)
    saved = twins.reference.state_dict()
    twins.ours.load_state_dict(saved)
    saved["state"][0]["exp_avg"].fill_(77.0)
    assert not (twins.ours.state[twins.mine[0]]["exp_avg"] == 77.0).any()


def test_state_of_parameters_in_another_order_is_not_overwritten_while_it_is_read() -> None:
    shapes = [(50,)] * 4
    twins = Twins("Adam", {"lr": 0.1}, shapes=shapes)
    twins.train(2)
    live = twins.ours.state_dict()  # views of the flat state itself
    expected = [s["exp_avg"].clone() for s in live["state"].values()]
    live["state"] = {0: live["state"][3], 1: live["state"][0], 2: live["state"][1], 3: live["state"][2]}
    twins.ours.load_state_dict(live)
    for i, p in enumerate(twins.mine):
        assert same_bits(twins.ours.state[p]["exp_avg"], expected[i - 1])


def test_state_assigned_by_hand_is_used() -> None:
    twins = Twins("AdamW", {"lr": 0.1})
    twins.train(2)
    for optimizer, params in ((twins.ours, twins.mine), (twins.reference, twins.theirs)):
        optimizer.state[params[3]]["exp_avg"] = torch.full_like(params[3], 0.25)
    twins.train(2)


def test_state_of_another_model_is_refused() -> None:
    twins, other = Twins("AdamW", {"lr": 0.1}), Twins("AdamW", {"lr": 0.1}, shapes=SHAPES[::-1])
    other.train(1)
    with pytest.raises(OptionError, match=r"exp_avg of parameter 0 has shape \(6, 5, 2\), and should have \(33, 7\)"):
        twins.ours.load_state_dict(other.ours.state_dict())


@pytest.mark.parametrize("variant", ["sgd dampening", "adamw amsgrad"])
def test_cleared_state_starts_anew(variant: str) -> None:
    twins = Twins(*VARIANTS[variant])
    twins.train(2)
    twins.ours.state.clear()
    twins.reference.state.clear()
    twins.train(2)


def test_there_is_no_state_before_the_first_step() -> None:
    twins = Twins("AdamW", {"lr": 0.1})
    assert twins.ours.state_dict()["state"] == {}


def test_param_group_added_later_keeps_the_state_of_the_others() -> None:
    def first(params: Any) -> list[dict[str, Any]]:
        return [{"params": params[:4]}]

    twins = Twins("AdamW", {"lr": 0.1}, groups=first)
    twins.train(3)
    for optimizer, params in ((twins.ours, twins.mine), (twins.reference, twins.theirs)):
        optimizer.add_param_group({"params": params[4:], "lr": 0.01})
    twins.train(3)
    steps = [twins.ours.state[p]["step"].item() for p in twins.mine]
    assert steps == [6.0] * 4 + [3.0] * (len(SHAPES) - 4)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["sgd decay", "adam decay", "adamw"])
def test_parameters_without_gradient_are_skipped(variant: str) -> None:
    name, settings = VARIANTS[variant]
    twins = Twins(name, settings)
    for without in ([2, 3], [], [0], [0, 2, 3, 8], range(len(SHAPES)), []):
        before = [p.clone() for p in twins.mine]
        twins.step(without)
        twins.check()
        for i in without:
            assert same_bits(before[i], twins.mine[i])


def test_momentum_of_a_parameter_that_comes_late_begins_with_its_gradient() -> None:
    """torch's fused SGD cannot do this at all; its unfused one can."""
    twins = Twins("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5})
    twins.reference = torch.optim.SGD(twins.theirs, lr=0.1, momentum=0.9, dampening=0.5, fused=False)
    for without in ([1, 2], [], [1], []):
        twins.step(without)
    for p, q in zip(twins.mine, twins.theirs, strict=True):
        torch.testing.assert_close(p, q)
        torch.testing.assert_close(twins.ours.state[p]["momentum_buffer"], twins.reference.state[q]["momentum_buffer"])


def test_foreign_gradient_is_refused_before_anything_changes() -> None:
    twins = Twins("AdamW", {"lr": 0.1})
    twins.train(2)
    twins.gradients()
    twins.mine[5].grad = torch.ones_like(twins.mine[5])
    before = [p.clone() for p in twins.mine]
    state = copy.deepcopy(twins.ours.state_dict()["state"])
    with pytest.raises(GradBufferError, match=r"gradient of parameter 5 is not in the GradBuffer.*gather_"):
        twins.ours.step()
    assert all(same_bits(p, q) for p, q in zip(twins.mine, before, strict=True))
    for i, entries in twins.ours.state_dict()["state"].items():
        assert all(same_bits(value, state[i][name]) for name, value in entries.items())
    twins.buf.gather_()
    twins.ours.step()


def test_zero_grad_to_none_and_to_zero() -> None:
    twins = Twins("SGD", {"lr": 0.1})
    twins.gradients(without=[3])
    twins.ours.zero_grad(set_to_none=False)
    assert twins.mine[3].grad is None
    assert all(slot.has_gradient_in_place() for i, slot in enumerate(twins.buf.slots) if i != 3)
    assert not twins.buf.flat.any()
    twins.ours.zero_grad()
    assert all(p.grad is None for p in twins.mine)


def test_zero_grad_leaves_gradients_of_other_parameters_alone() -> None:
    twins = Twins("SGD", {"lr": 0.1}, groups=two_groups)
    twins.gradients()
    expected = twins.buf.slots[8].view.clone()
    twins.ours.zero_grad(set_to_none=False)
    assert same_bits(twins.buf.slots[8].view, expected)
    assert not twins.buf.slots[0].view.any()


def test_frozen_parameters_may_be_in_a_group_so_that_state_dicts_fit() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    buf = tb.GradBuffer(model)
    ours = optim.AdamW(buf, model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    ours.step()
    assert sorted(ours.state_dict()["state"]) == [1, 2, 3]
    model[0].weight.requires_grad_(True)
    model[0].weight.grad = torch.ones(4, 3)
    with pytest.raises(GradBufferError, match=r"shape \(4, 3\) has a gradient but no place"):
        ours.step()


# -- the rest of torch.optim's interface -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_they_are_torch_optimizers(name: str) -> None:
    ours = Twins(name, {"lr": 0.1}).ours
    assert isinstance(ours, THEIRS[name])
    assert "lr: 0.1" in repr(ours)


def test_closure_and_step_hooks_are_called() -> None:
    twins = Twins("SGD", {"lr": 0.1})
    seen = []
    twins.ours.register_step_pre_hook(lambda *_: seen.append("before"))
    twins.ours.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        twins.ours.zero_grad()
        loss = sum((p * p).sum() for p in twins.mine)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss.detach()

    first, second = twins.ours.step(closure), twins.ours.step(closure)
    assert second < first
    assert seen == ["before", "after"] * 2


def test_torch_fused_sgd_on_a_cpu_still_needs_avoiding() -> None:
    """When this fails, torch has been repaired, and `fused.avoids` can go."""
    p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=0.5, fused=True).step()
    assert (p == 1).all()


@pytest.mark.parametrize("name", OURS)
def test_grad_scaler_skips_and_unscales_as_with_torch(name: str) -> None:
    twins = Twins(name, {"lr": 0.1})
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for scaler in scalers:
        scaler.scale(torch.zeros(()))  # makes its tensors
    for turn in range(5):
        twins.gradients(scale=8.0)
        if turn == 2:
            for p in (twins.mine[1], twins.theirs[1]):
                assert p.grad is not None
                p.grad[0] = torch.inf
        for scaler, optimizer in zip(scalers, (twins.ours, twins.reference), strict=True):
            scaler.step(optimizer)
            scaler.update()
        twins.check()
        for p, q in zip(twins.mine, twins.theirs, strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert same_bits(p.grad, q.grad)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    if name != "SGD":
        assert twins.ours.state[twins.mine[0]]["step"].item() == 4.0


def test_grad_scaler_with_sgd_that_is_not_fused() -> None:
    twins = Twins("SGD", {"lr": 0.1, "momentum": 0.9}, dtypes=[torch.bfloat16])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    twins.gradients(scale=8.0)
    for p in twins.theirs:
        assert p.grad is not None
        p.grad.div_(8.0)
    scaler.step(twins.ours)
    twins.reference.step()
    twins.check()
    scaler.update()
    twins.gradients(scale=8.0)
    assert twins.mine[1].grad is not None
    twins.mine[1].grad[0] = torch.inf
    scaler.step(twins.ours)
    twins.check()


def test_grad_scaler_takes_back_the_steps_of_what_was_updated_only() -> None:
    twins = Twins("AdamW", {"lr": 0.1})
    twins.train(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    twins.gradients(without=[0, 4])
    assert twins.mine[1].grad is not None
    twins.mine[1].grad[0] = torch.inf
    scaler.step(twins.ours)
    assert [twins.ours.state[p]["step"].item() for p in twins.mine] == [1.0] * len(SHAPES)


def test_wrong_arguments_are_refused() -> None:
    twins = Twins("SGD", {"lr": 0.1})
    with pytest.raises(OptionError, match=r"takes a takeback\.GradBuffer first, got a list"):
        optim.SGD(twins.mine)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"shape \(3,\) is not in the GradBuffer"):
        optim.SGD(twins.buf, [nn.Parameter(torch.zeros(3))])
    with pytest.raises(OptionError, match=r"shape \(3,\) is not in the GradBuffer"):
        twins.ours.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(twins.ours.param_groups) == 1
    with pytest.raises(OptionError, match='kernel must be "auto" or "torch"'):
        optim.SGD(twins.buf, kernel="cuda")
    with pytest.raises(ValueError, match="Invalid learning rate"):
        optim.AdamW(twins.buf, lr=-1.0)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(twins.ours)


def test_reasons_say_why_torch_operators_made_the_update() -> None:
    twins = Twins("AdamW", {"lr": 0.1}, groups=two_groups)
    twins.step()
    assert twins.ours.reasons == dict.fromkeys((0, 1), "the kernels are for CUDA, and this is cpu")
    low = Twins("SGD", {"lr": 0.1}, dtypes=[torch.bfloat16])
    low.step()
    assert "leaves torch.bfloat16 parameters on a CPU unchanged" in low.ours.reasons[0]
    chosen = Twins("AdamW", {"lr": 0.1}, kernel="torch")
    chosen.step()
    assert chosen.ours.reasons == {0: 'kernel="torch"'}


def test_kernels_refuse_what_they_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    adam = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.0, amsgrad=False, maximize=False, decoupled=True)
    sgd = SGDSettings(1e-3, 0.9, 0.0, 0.0, nesterov=False, maximize=True)
    scaled = ScalerTensors(found_inf=torch.zeros(()))
    monkeypatch.setattr(launch, "_has_triton", lambda: True)
    assert launch.refuses(cuda, torch.float32, adam, ScalerTensors()) == ""
    assert "compute in float32" in launch.refuses(cuda, torch.float64, adam, ScalerTensors())
    assert "GradScaler" in launch.refuses(cuda, torch.float32, adam, scaled)
    assert "maximize with momentum" in launch.refuses(cuda, torch.float32, sgd, ScalerTensors())
    monkeypatch.setattr(launch, "_has_triton", lambda: False)
    assert launch.refuses(cuda, torch.float32, adam, ScalerTensors()) == "triton is not installed"


def test_a_kernel_with_other_bits_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial itself, with torch's operators standing in for the kernel: once right, once off by one bit."""
    cpu = torch.device("cpu")
    sgd = SGDSettings(0.1, 0.0, 0.0, 0.02, nesterov=False, maximize=False)
    wrong = False

    def stand_in(table: launch.Chunks, grads: torch.Tensor, *_: object) -> None:
        offset = 0
        for p in table.params:
            g = grads[offset : offset + p.numel()].to(p.dtype)
            offset += rounded_up(p.numel(), ALIGNMENT_BYTES // p.itemsize)
            torch.ops.aten._fused_sgd_(
                [p], [g], [], weight_decay=0.02, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
                maximize=False, is_first_step=False,
            )  # fmt: skip
        if wrong:
            table.params[5].view(torch.int32)[17] ^= 1

    monkeypatch.setattr(launch, "sgd_", stand_in)
    monkeypatch.setattr(proof, "_verdicts", {})
    assert proof.differs(cpu, torch.float32, torch.float32, sgd, clips=False) == ""
    wrong = True
    assert proof.differs(cpu, torch.float32, torch.float32, sgd, clips=False) == "", "the first verdict is kept"
    monkeypatch.setattr(proof, "_verdicts", {})
    assert "1 of" in proof.differs(cpu, torch.float32, torch.float32, sgd, clips=False)


def test_a_table_covers_every_element_once() -> None:
    params = [torch.zeros(n) for n in (1, launch.CHUNK, 0, 3 * launch.CHUNK + 5)]
    table = launch.Chunks(
        params, [0, 64, 9000, 9000], [0, 32, 8500, 8500], range(4), "abcd", torch.float32, torch.device("cpu")
    )
    rows = table.rows.tolist()
    assert [row[3] for row in rows] == [1, launch.CHUNK, *[launch.CHUNK] * 3, 5]
    assert [row[4] for row in rows] == [0, 1, 3, 3, 3, 3]
    last = params[3].data_ptr()
    assert [row[0] for row in rows[2:]] == [last + 4 * launch.CHUNK * i for i in range(4)]
    assert rows[-1][1:3] == [9000 + 3 * launch.CHUNK, 8500 + 3 * launch.CHUNK]
    with pytest.raises(GradBufferError, match=r"a is torch\.float32 on cpu now; its state is torch\.bfloat16"):
        launch.Chunks(params[:1], [0], [0], [0], "a", torch.bfloat16, torch.device("cpu"))


def test_importing_needs_no_triton() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch._has_triton() in (True, False)


def test_parameters_may_move_between_groups() -> None:
    def groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": [params[0]], "lr": 0.0}, {"params": [params[1]], "lr": 1.0}]

    twins = Twins("SGD", {"lr": 0.1}, shapes=[(3, 4), (3, 4)], groups=groups)
    twins.train(2)
    for optimizer in (twins.ours, twins.reference):
        first, second = optimizer.param_groups
        first["params"], second["params"] = second["params"], first["params"]
    twins.train(2)

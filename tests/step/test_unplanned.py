"""unplanned="eager": a step that cannot be recorded runs as eager runs it, is counted, and says why."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import takeback as tb
from takeback.compiler.run.eager import eager_step

Loss = Any


def masked(model: torch.nn.Module, x: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = F.dropout(model(x), 0.3).square()
    return out[taken_out(keep)].mean(), {"out": out}


def taken_out(tensor: torch.Tensor) -> torch.Tensor:
    """The same, by a way that no replay can follow."""
    return torch.from_numpy(tensor.detach().numpy().copy())


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))


def batch(seed: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=draw)
    return x, torch.rand(rows, 3, generator=draw) > 0.4


def plain(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_cannot_be_planned_gives_eager_s_bits(
    scales: bool, clip_norm: float | None, accumulate: int
) -> None:
    model, other = model_of(), model_of()
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, other))
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) if scales else None for _ in range(2)]
    step = tb.compile_step(
        model,
        masked,
        mine,
        clip_norm=clip_norm,
        accumulate=accumulate,
        scaler=scalers[0],
        unplanned="eager",
        keep_grads=True,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(3):
            torch.manual_seed(n)
            loss, aux = step(*batch(n))
            torch.manual_seed(n)
            expected = eager_step(
                other, masked, theirs, batch(n), clip_norm=clip_norm, accumulate=accumulate, scaler=scalers[1]
            )
            assert torch.equal(loss, expected)
            assert not loss.requires_grad
            parts = (aux,) if accumulate == 1 else aux
            assert len(parts) == accumulate
            assert not parts[0]["out"].requires_grad
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(p, q)
                assert p.grad is not None
                assert q.grad is not None
                assert torch.equal(p.grad, q.grad)
            for b, c in zip(model.buffers(), other.buffers(), strict=True):
                assert torch.equal(b, c)
            assert (step.grad_norm is None) == (clip_norm is None)
    ours = [w for w in caught if "unplanned='eager'" in str(w.message)]
    assert len(ours) == 1
    assert issubclass(ours[0].category, RuntimeWarning)
    assert ours[0].filename == __file__
    assert "takes the data out of torch" in str(ours[0].message)
    assert (step.counts.planned, step.counts.plain) == (0, 3)
    assert list(step.counts.reasons.values()) == [3]
    with pytest.raises(tb.CaptureError, match="no plan to report on yet: 3 of 3 steps ran plainly in eager: 3 because"):
        step.report()


def test_by_default_it_raises() -> None:
    model = model_of()
    step = tb.compile_step(model, masked, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(tb.CaptureError, match="takes the data out of torch"):
        step(*batch(0))
    assert step.counts.plain == 0


@pytest.mark.filterwarnings("ignore:this step is not planned")
def test_planned_and_plain_steps_are_counted_and_reported() -> None:
    def mixed(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x).square()
        return out.mean() if len(x) == 8 else out[taken_out(out > 0.1)].mean()

    model, other = model_of(), model_of()
    step = tb.compile_step(model, mixed, torch.optim.SGD(model.parameters(), lr=0.1), unplanned="eager")
    beside = torch.optim.SGD(other.parameters(), lr=0.1)
    for n, rows in enumerate((8, 8, 6, 8, 6)):
        x, _ = batch(n, rows)
        assert torch.equal(step(x), eager_step(other, mixed, beside, (x,)))
    assert (step.counts.planned, step.counts.plain) == (3, 2)
    assert any(note.startswith("2 of 5 steps ran plainly in eager: 2 because") for note in step.report().notes)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:this step is not planned")
def test_a_refused_recording_is_tried_again_after_16_plain_steps_and_then_after_32() -> None:
    calls = []
    state = {"masks": True}

    def sometimes(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        recording = any(
            getattr(m, "records", False) for m in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        )
        calls.append(recording)
        out = model(x).square()
        return out[taken_out(out > 0.1)].mean() if state["masks"] else out.mean()

    model = model_of()
    step = tb.compile_step(model, sometimes, torch.optim.SGD(model.parameters(), lr=0.01), unplanned="eager")
    x, _ = batch(0)
    for _ in range(52):
        step(x)
    tried = [i for i, recording in enumerate(calls) if recording]
    assert tried == [0, 18, 52]  # each refused one is followed by a plain step
    assert step.counts.plain == 52
    state["masks"] = False
    for _ in range(40):
        step(x)
    assert step.counts.planned == 0  # 64 plain steps are not over yet


@pytest.mark.filterwarnings("ignore:this step is not planned")
def test_where_one_key_after_the_other_is_refused_new_keys_wait_too() -> None:
    model = model_of()
    recorded = []

    def counted(model: torch.nn.Module, x: torch.Tensor, keep: torch.Tensor) -> Any:
        recorded.append(len(x))
        return masked(model, x, keep)

    step = tb.compile_step(model, counted, torch.optim.SGD(model.parameters(), lr=0.01), unplanned="eager")
    for rows in range(4, 14):
        step(*batch(rows, rows))
    assert recorded == [4, 4, 5, 5, 6, 6, 7, 7, 8, 9, 10, 11, 12, 13]


@pytest.mark.filterwarnings("ignore:this step is not planned")
def test_a_value_that_is_new_each_time_runs_plainly_in_the_end() -> None:
    def reads(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return plain(model, x) * float(x.sum())

    model, other = model_of(), model_of()
    step = tb.compile_step(model, reads, torch.optim.SGD(model.parameters(), lr=1e-3), unplanned="eager", max_plans=2)
    beside = torch.optim.SGD(other.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(5):
            x, _ = batch(n)
            assert torch.equal(step(x), eager_step(other, reads, beside, (x,)))
    assert step.counts.plain >= 2
    assert any("the value was a new one" in reason for reason in step.counts.reasons)


@pytest.mark.filterwarnings("ignore:this step is not planned")
def test_errors_of_the_user_s_own_are_not_swallowed() -> None:
    def broken(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    def no_loss(model: torch.nn.Module, x: torch.Tensor) -> Any:
        return "no tensor"

    model = model_of()
    before = copy.deepcopy(model.state_dict())
    for loss_fn, error in ((broken, ValueError), (no_loss, tb.CaptureError)):
        step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), unplanned="eager")
        with pytest.raises(error):
            step(batch(0)[0])
        assert step.counts.plain == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_unknown_values_are_refused() -> None:
    model = model_of()
    with pytest.raises(tb.OptionError, match="unplanned must be one of 'raise', 'eager', got 'ignore'"):
        tb.compile_step(model, plain, torch.optim.SGD(model.parameters(), lr=0.1), unplanned="ignore")

"""Out of memory at each stage of a step: what comes of it is stated here, and the next step with room is right.

Wherever it happens before a parameter is written, nothing is lost: parameters, statistics, optimizer state, gradients
that wait and random state are as before. Where there is a way that takes less, it is taken instead: an excerpt is
recorded, a sample is left out, eager's kernels run. The same tests run on the CPU, where torch's allocator places as it
does on a GPU. A GPU that really has too little: test_cuda_little_memory.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from short_of_memory import WORDS, Shortage, Twins, in_recordings, in_replays, put_back_, unchanged

from takeback.compiler.run import calibrate, eager, inductor, kernels, plan_maker, verify
from takeback.compiler.run.cluster_ops import eagerly
from takeback.compiler.run.earnings import NOT_EARNED, Earnings
from takeback.compiler.run.inductor import NotCompiled
from takeback.compiler.run.proof import Thinning
from takeback.errors import NoRoomError, PlanError

pytestmark = pytest.mark.usefixtures("one_thread", "short_search", "whole_head")

ON_GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
everywhere = pytest.mark.parametrize("device", ["cpu", ON_GPU])
in_both_modes = pytest.mark.parametrize("mode", ["exact", "fast"])
OPTIMIZERS: dict[str, Any] = {
    "foreach": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "loop": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=False),
}
ADAMW = OPTIMIZERS["foreach"]
NO_ROOM_IN_EAGER = f"eager has no room for this step ({WORDS})"


@pytest.fixture(autouse=True)
def quick_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's in clusters, and in the update; what is compiled is the matter of the last tests."""

    def missing(cluster: object, device: object) -> None:
        raise NotCompiled("there is no compiler here")

    monkeypatch.setattr(kernels, "compile_cluster", missing)
    monkeypatch.setattr(plan_maker, "in_one_kernel", lambda optimizers: False)


@contextlib.contextmanager
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every recording and every plain step is refused memory."""

    def never(*given: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError(WORDS)

    with monkeypatch.context() as patch:
        patch.setattr(Shortage, "__call__", never)
        in_recordings(patch)
        patch.setattr(eager.Recipe, "forward_backward_", never)
        yield


# -- the first call --------------------------------------------------------------------------------------------------


@everywhere
@in_both_modes
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.98])
def test_recording_that_is_refused_memory_is_made_of_an_excerpt(
    device: str, mode: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a kernel of the forward or of the backward."""
    short = in_recordings(monkeypatch)
    Twins(device, mode, ADAMW).take()
    assert short.seen > 20
    twins = Twins(device, mode, ADAMW)
    short.after_(int(share * short.seen))
    twins.take()
    assert short.struck
    assert NO_ROOM_IN_EAGER in twins.notes()
    twins.take(3)


@everywhere
def test_recording_that_is_always_refused_memory_changes_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(device, "exact", ADAMW)
    with always(monkeypatch):
        twins.fails("could not be planned without running it")
    twins.take(4)


@everywhere
@pytest.mark.parametrize("name", ["foreach", "fused"])
@pytest.mark.parametrize("count", [0, 5])
def test_optimizer_without_room_for_its_state_leaves_none_behind(
    device: str, name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it would be taken for all by the next step."""
    twins, short = Twins(device, "exact", OPTIMIZERS[name]), Shortage()
    kind = type(twins.optimizer)  # which has a method of its own once Dynamo has been imported
    plain = kind._init_group  # type: ignore[attr-defined]

    def init_group(optimizer: torch.optim.Optimizer, *given: Any) -> Any:
        with monkeypatch.context() as patch:
            if optimizer is twins.optimizer:
                patch.setattr(torch, "zeros_like", short.before(torch.zeros_like))
            return plain(optimizer, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "_init_group", init_group)
    short.after_(count)
    twins.fails()
    assert not twins.optimizer.state
    twins.take(4)


@everywhere
def test_optimizer_that_fails_half_way_says_so(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in eager, some parameters may have been updated; statistics, gradients and random state are as before."""
    twins, short = Twins(device, "exact", ADAMW), Shortage()
    before = twins.before()
    monkeypatch.setattr(torch, "_foreach_sqrt", short.before(torch._foreach_sqrt))
    short.after_(0)
    with pytest.raises(torch.OutOfMemoryError, match=WORDS) as raised:
        twins.attempt()
    assert "some parameters may have been updated" in "".join(raised.value.__notes__)
    unchanged(twins.everything(), before, but=twins.updated)
    twins.optimizer.state.clear()
    put_back_(twins, before)
    twins.take(4)


@everywhere
@in_both_modes
def test_eagers_second_run_beside_a_recording_is_made_on_an_excerpt(
    device: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins, short = Twins(device, mode, ADAMW), Shortage()
    monkeypatch.setattr(verify, "_gradients", short.after(verify._gradients))
    short.after_(0)
    twins.take()
    assert short.struck
    assert NO_ROOM_IN_EAGER in twins.notes()
    twins.take(3)


@everywhere
def test_no_room_to_measure_the_machine_takes_its_rates_from_the_table(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*given: Any) -> None:
        raise torch.OutOfMemoryError(WORDS)

    monkeypatch.setattr(calibrate, "rates_of", lambda name: None)
    monkeypatch.setattr(calibrate, "_read", lambda text: None)
    monkeypatch.setattr(calibrate, "measure", measure)
    monkeypatch.setattr(calibrate, "keep_", lambda *given: pytest.fail("the table was kept for the next process"))
    calibrate._rates.cache_clear()
    try:
        twins = Twins(device, "exact", ADAMW)
        twins.take(2)
        assert "taken from a table" in twins.notes()
    finally:
        calibrate._rates.cache_clear()


@everywhere
def test_step_that_was_made_and_has_no_room_for_a_plan_says_so(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins, short = Twins(device, "exact", ADAMW), Shortage()
    monkeypatch.setattr(twins.step._maker, "executor", short.before(twins.step._maker.executor))
    short.after_(0)
    with pytest.raises(PlanError, match=f"the step was made, but no plan of it.*{WORDS}.*Do not make this step again"):
        twins.attempt()
    twins.follow(None)
    twins.take(3)


# -- replays -----------------------------------------------------------------------------------------------------------


@everywhere
@in_both_modes
def test_eager_without_room_beside_the_first_replay_is_run_on_an_excerpt(
    device: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins, short = Twins(device, mode, ADAMW), Shortage()
    twins.take()
    monkeypatch.setattr(verify, "_gradients", short.after(verify._gradients))
    short.after_(0)
    twins.take()
    assert short.struck
    assert "eager has no room for this step" in twins.notes()
    twins.take(3)


@everywhere
@in_both_modes
@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
def test_first_replay_that_is_refused_memory_is_planned_anew(
    device: str, mode: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a kernel of the forward or of the backward: a plan that has not been proved goes, and a lower one is made."""
    short = in_replays(monkeypatch)
    other, twins = Twins(device, mode, ADAMW), Twins(device, mode, ADAMW)
    other.take(2)
    twins.take()
    plan = twins.step._plans[0]
    short.after_(int(share * short.computed))
    twins.take()
    assert short.struck
    assert plan not in twins.step._plans
    assert "eager has no room for this step" in twins.notes()
    twins.take(3)


@everywhere
@in_both_modes
@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_later_replay_that_is_refused_memory_is_taken_back_until_its_update_writes(
    device: str, mode: str, clip_norm: float | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping comes before that. From there on it is half done, as in eager, and the error says so."""
    short = in_replays(monkeypatch)
    twins = Twins(device, mode, OPTIMIZERS[name], clip_norm=clip_norm)
    twins.take(4)
    short.after_(10_000)
    twins.take()
    every, computed, writes = short.seen, short.computed, short.committed
    assert 10 < computed <= writes < every
    assert (writes > computed) == (clip_norm is not None)
    for count in sorted({0, 1, computed // 4, computed // 2, computed - 1, (computed + writes - 1) // 2, writes - 1}):
        short.after_(count)
        error = twins.fails()
        assert isinstance(error, NoRoomError)
        assert "Nothing has been changed" in str(error)
    twins.take()
    for count in (writes, every - 1):
        before = twins.before()
        short.after_(count)
        with pytest.raises(NoRoomError, match=f"{WORDS}.*some parameters may have been updated"):
            twins.attempt()
        unchanged(twins.everything(), before, but=twins.updated)
        put_back_(twins, before)
    twins.take(2)


@everywhere
@in_both_modes
def test_sample_that_is_refused_memory_is_left_out(device: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins, short = Twins(device, mode, ADAMW), Shortage()
    monkeypatch.setattr(Thinning, "samples", lambda schedule, replays: replays > 3)
    twins.take(4)
    monkeypatch.setattr(eager.Recipe, "forward", short.after(eager.Recipe.forward))
    short.after_(0)
    twins.take()
    assert short.struck
    assert "OutOfMemoryError" in (twins.step._plans[0].unsampled or "")
    twins.take(2)


# -- another shape -----------------------------------------------------------------------------------------------------


@everywhere
@in_both_modes
def test_plain_step_that_is_refused_memory_gets_a_plan(device: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shape that has not earned one. Its forward and backward were made by then."""
    twins, short = Twins(device, mode, ADAMW), Shortage()
    twins.take(4)
    monkeypatch.setattr(Earnings, "waits", lambda *given, **named: NOT_EARNED)
    twins.take(count=24)
    assert twins.step.counts.plain == 1
    monkeypatch.setattr(eager.Recipe, "forward_backward_", short.after(eager.Recipe.forward_backward_))
    short.after_(0)
    twins.take(count=28)
    assert short.struck
    assert twins.step.counts.plain == 1
    assert NO_ROOM_IN_EAGER in twins.notes()
    twins.take(2, count=28)
    with always(monkeypatch):
        twins.fails("could not be planned without running it", count=20)
    twins.take(count=20)
    twins.take()


# -- accumulation over calls -------------------------------------------------------------------------------------------


@everywhere
@in_both_modes
def test_second_call_of_an_accumulation_that_is_refused_memory_leaves_what_waits(
    device: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has begun to add; later all gradients are dropped, and the error says so."""
    short = in_replays(monkeypatch)
    twins = Twins(device, mode, ADAMW, clip_norm=0.5)
    for _ in range(4):
        twins.accumulate()
    twins.add()
    short.after_(10_000)
    twins.add()
    computed, every = short.computed, short.seen
    assert 4 < computed < every
    for count in (0, computed // 2, computed - 1):
        short.after_(count)
        error = twins.fails(update=False)
        assert not getattr(error, "__notes__", ())
    recording = in_recordings(monkeypatch)
    recording.after_(10)
    twins.fails(update=False, count=20)  # of another shape
    assert recording.struck
    twins.add(update=True)
    twins.add()
    before = twins.before()
    short.after_(every - 1)
    with pytest.raises((torch.OutOfMemoryError, NoRoomError), match=WORDS) as raised:
        twins.attempt(update=False)
    assert "all of them were dropped" in "".join(raised.value.__notes__)
    unchanged(twins.everything(), {k: v for k, v in before.items() if not k.endswith(".grad")})
    twins.twin.zero_grad()
    twins.accumulate()


# -- kernels of clusters -----------------------------------------------------------------------------------------------


@everywhere
def test_cluster_that_cannot_be_compiled_for_want_of_memory_runs_with_eagers_kernels(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_(*given: Any) -> None:
        raise torch.OutOfMemoryError(WORDS)

    monkeypatch.setattr(kernels, "compile_cluster", inductor.compile_cluster)
    monkeypatch.setattr(inductor, "_compile", compile_)
    twins = Twins(device, "fast", ADAMW)
    twins.take(4)
    found = twins.kernels()
    assert found
    assert all(WORDS in (kernel.note or "") for kernel in found)


@everywhere
def test_kernel_that_finds_no_room_to_be_compared_is_compared_later(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Shortage()
    if device == "cuda":
        monkeypatch.setattr(kernels, "compile_cluster", inductor.compile_cluster)
    else:
        monkeypatch.setattr(kernels, "compile_cluster", lambda cluster, device: eagerly(cluster))
    monkeypatch.setattr(kernels, "what_is_wrong", short.before(kernels.what_is_wrong))
    twins = Twins(device, "fast", ADAMW)
    twins.take(2)
    short.after_(0)
    twins.take(3)
    assert short.struck
    assert twins.kernels()
    assert not any(kernel.waits for kernel in twins.kernels())

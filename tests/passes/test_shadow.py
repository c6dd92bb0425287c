"""What clusters of the backward make on their way: gather, shadow, postpone, join, and the max pool in one byte."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn_programs import recorded
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.explain.frontier import find_frontier
from takeback.compiler.form import check_form
from takeback.compiler.ownership.lifetimes import lifetimes
from takeback.compiler.ownership.meaning import MeaningError, check_meaning
from takeback.compiler.ownership.resident import resident_bytes
from takeback.compiler.ownership.writes import undo_bytes
from takeback.compiler.passes import PIPELINE, Draft, PassSettings, run_passes
from takeback.compiler.passes.choice import apply
from takeback.compiler.passes.cost import again_s
from takeback.compiler.passes.draft import Choice, Rebuild
from takeback.compiler.passes.gather import gather
from takeback.compiler.passes.join import join
from takeback.compiler.passes.partial import partial
from takeback.compiler.passes.postpone import postpone
from takeback.compiler.passes.rebuildable import may_rebuild, rebuild_gives
from takeback.compiler.passes.recompute import Again, Chooser, Keep, Remembered, Within, planned_peak
from takeback.compiler.passes.shadow import shadow
from takeback.compiler.passes.waiting import Headroom, no_higher
from takeback.compiler.planning import plan_within, settings_for
from takeback.compiler.program import BufferId, Cluster, Op, Phase, Program, Region
from takeback.options import Options

aten = torch.ops.aten
WHOLE_HEAD = [stage for stage in PIPELINE if stage.name != "chunk_head"]


def seconds(op: Op) -> float:
    return 1e-9 * sum(r.numel for r in (*op.inputs, *op.outputs))


def fast(**more: Any) -> PassSettings:
    return PassSettings(fast=True, chooser=Chooser(seconds, 60.0), **{"goal": Within(0.5), **more})


def until(program: Program, stage: Callable[..., Draft]) -> Draft:
    return run_passes(program, settings=fast(), stages=WHOLE_HEAD, before=stage)


def checked(before: Draft, after: Draft) -> Draft:
    check_form(after.program, after.kept)
    check_meaning(before.program, after.program)
    return after


def names(op: Op) -> list[str]:
    return [inner.name for inner in op.target.ops] if isinstance(op.target, Cluster) else [op.name]


def position(program: Program, name: str) -> int:
    [at] = [i for i, op in enumerate(program.ops) if name in names(op)]
    return at


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def gated() -> Program:
    """Three in a row: where the first one's backward runs, there is room below the peak."""
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated(), Gated())
    return recorded(model, lambda m, x: m(x).square().mean(), torch.randn(64, 8))


def silus(program: Program) -> int:
    return sum("silu" in " ".join(names(op)) and op.phase is Phase.BACKWARD for op in program.ops)


class Residual(nn.Module):
    """Convolutions, norms, a max pool and sums."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2 * blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2 * blocks + 1))
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norms[-1](self.first(x))))
        for i in range(0, len(self.convs), 2):
            y = F.relu(self.norms[i](self.convs[i](x)))
            x = F.relu(self.norms[i + 1](self.convs[i + 1](y)) + x)
        return self.last(x)


def residual() -> Program:
    """Without what convolutions take for themselves, which is another amount on each processor."""
    torch.manual_seed(0)
    program = recorded(Residual(blocks=3), lambda m, x: m(x).square().mean(), torch.randn(4, 3, 12, 12))
    ops = (replace(op, scratch=tuple(s for s in op.scratch if s.result is not None)) for op in program.ops)
    return replace(program, ops=tuple(ops))


class Branching(nn.Module):
    """A residual block whose other branch has a norm, too; and products after it, so that there is room below the
    peak when its backward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.rest = nn.Sequential(*(m for _ in range(3) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(F.relu(self.norms[0](self.conv(x)) + self.norms[1](self.other(x))))


def test_op_that_reads_what_an_earlier_cluster_makes_runs_in_it() -> None:
    """Eager runs the backward of one norm, its convolution's, and then the other norm's, alone."""
    torch.manual_seed(0)
    program = recorded(Branching(), lambda m, x: m(x).square().mean(), torch.randn(4, 8, 12, 12))
    before = until(program, gather)
    after = checked(before, gather(before))
    backward = "native_batch_norm_backward"
    assert sum([backward] == names(op) for op in before.program.ops) == 1
    [both] = [op for op in after.program.ops if names(op).count(backward) == 2]
    masked = next(op for op in before.program.ops if "threshold_backward" in names(op) and backward in names(op))
    alone = next(op for op in before.program.ops if [backward] == names(op))
    passed_on = {r.buffer for r in masked.outputs} & {r.buffer for r in alone.inputs}
    assert passed_on
    assert not passed_on & {r.buffer for r in both.outputs}  # it has no bytes any more


def test_two_clusters_that_read_the_same_are_one() -> None:
    before = until(gated(), gather)
    assert silus(before.program) == 6, "eager's order has a product between the two of a block"
    after = checked(before, gather(before))
    assert 3 <= silus(after.program) < 6
    assert planned_peak(after) <= planned_peak(before)


def test_cluster_that_needs_what_is_made_between_stays_where_it_is() -> None:
    program = recorded(
        nn.Linear(16, 16),
        lambda m, x: (m(torch.sigmoid(m(x) * x)) * torch.sigmoid(x)).square().mean(),
        torch.ones(64, 16),
    )
    before = until(program, gather)
    checked(before, gather(before))


def test_gated_activation_comes_out_of_its_backward_and_is_not_kept() -> None:
    before = until(gated(), shadow)
    after = checked(before, shadow(before))
    ops, alive = after.program.ops, lifetimes(after.program, after.kept)
    forward = sum(op.phase is Phase.FORWARD for op in ops)
    assert after.rebuilt
    for copy in after.rebuilt:
        [made] = [i for i, op in enumerate(ops) if any(r.buffer == copy for r in op.outputs)]
        readers = [i for i, op in enumerate(ops) if any(r.buffer == copy for r in op.inputs)]
        assert "silu_backward" in names(ops[made])
        assert [ops[i].name for i in readers] == ["mm"]
    kept = [r.buffer for op in ops if names(op) == ["silu", "mul.Tensor"] for r in op.outputs]
    assert sum(alive[z].end <= forward for z in kept) == len(after.rebuilt), "the forward's own dies in the forward"
    assert planned_peak(after) < planned_peak(before)


def test_convolutions_backward_is_split_and_its_input_comes_out_of_the_norms() -> None:
    before = until(residual(), shadow)
    after = checked(before, shadow(before))
    parts = [op for op in after.program.ops if op.target is aten.convolution_backward.default]
    split = [i for i, op in enumerate(parts) if op.args[10] == (True, False, False)]
    assert split
    for i in split:
        ahead, behind = parts[i : i + 2]
        assert behind.args[10] == (False, True, False)
        assert {r.buffer for r in behind.inputs} & after.rebuilt
        assert not {r.buffer for r in ahead.inputs} & after.rebuilt, "what the other was made of stands in"
    assert planned_peak(after) < planned_peak(before)


def test_weights_gradient_of_another_input_is_found_out() -> None:
    """The rule that lets an input's gradient have a stand-in lets nothing else have one."""
    before = until(residual(), shadow)
    after = shadow(before)
    ops = list(after.program.ops)
    masked = [i for i, op in enumerate(ops) if op.name == "convolution_backward"]
    at = next(i for i in masked if ops[i].args[10] == (False, True, False))
    given = ops[at].args[1]
    assert isinstance(given, Region)
    made = [r for op in ops[:at] for r in op.outputs]
    wrong = next(r for r in made if r.shape == given.shape and r.buffer != given.buffer)
    ops[at] = replace(ops[at], args=(ops[at].args[0], wrong, *ops[at].args[2:]))
    with pytest.raises(MeaningError):
        check_meaning(before.program, replace(after.program, ops=tuple(ops)))


def test_what_waits_for_a_cluster_is_joined_to_it_when_it_is_rebuilt() -> None:
    before = until(residual(), postpone)
    waiting = checked(before, postpone(before))
    ops = waiting.program.ops
    found = 0
    for position, op in enumerate(ops):
        if op.phase is not Phase.FORWARD or not isinstance(op.target, Cluster) or not may_rebuild(op, "cpu"):
            continue
        z = {r.buffer for r in rebuild_gives(op, "cpu")}
        readers = [i for i, o in enumerate(ops) if o.phase is Phase.BACKWARD and z & {r.buffer for r in o.inputs}]
        if readers:
            rebuilt = apply(waiting, Choice((Rebuild(readers[0], position),)))
            joined = checked(waiting, join(rebuilt))
            assert planned_peak(joined) <= planned_peak(rebuilt)
            found += len(rebuilt.program.ops) - len(joined.program.ops)
    assert found


def test_max_pool_keeps_a_byte_for_each_place() -> None:
    program = residual()
    kinds = {r.dtype for op in program.ops for r in op.outputs}
    assert torch.int64 in kinds
    after = run_passes(program, settings=fast(), stages=WHOLE_HEAD)
    made = [r for op in after.program.ops for r in op.outputs if r.buffer not in op.mutates]
    assert torch.int8 in {r.dtype for r in made}
    assert not [r for r in made if r.dtype == torch.int64 and r.numel > 1]
    back = after.program.ops[position(after.program, "max_pool2d_with_indices_backward")]
    forward = after.program.ops[position(after.program, "prims._low_memory_max_pool_with_offsets")]
    assert forward.inputs[0].buffer not in {r.buffer for r in back.inputs}, "something else stands in for its operand"


@pytest.mark.parametrize("build", [gated, residual], ids=["gated", "residual"])
def test_lowest_peak_lets_nothing_wait(build: Callable[[], Program]) -> None:
    with_it = run_passes(build(), settings=fast(waits=False), stages=WHOLE_HEAD)
    assert not {"shadow", "postpone"} & set(with_it.passes)
    assert {"shadow", "postpone", "join"} <= set(run_passes(build(), settings=fast(), stages=WHOLE_HEAD).passes)


def test_pool_that_is_rebuilt_stays_a_generated_kernel() -> None:
    """Eager's form of it would make places of eight bytes, several times."""
    draft = until(residual(), shadow)
    [op] = [op for op in draft.program.ops if "prims._low_memory_max_pool_with_offsets" in names(op)]
    again = partial(op)
    assert again is not None
    assert isinstance(again.target, Cluster)


class Drifting(nn.Module):
    """What it adds to an activation, its forward then writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 32)
        self.last = nn.Linear(32, 8)
        self.register_buffer("shift", torch.full((32,), 1.1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        z = torch.tanh(h) + self.shift
        with torch.no_grad():
            self.shift.mul_(0.9)
        return self.last(torch.sigmoid(h) + F.silu(self.third(self.second(z))))


def test_what_was_made_of_a_buffer_that_the_forward_wrote_since_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Drifting(), Drifting(), Drifting())
    before = until(recorded(model, lambda m, x: m(x).square().mean(), torch.randn(64, 8)), shadow)
    checked(before, shadow(before))


class Scaled(nn.Module):
    """An activation is made of the batch, and of one number that is no cluster's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = y * self.first(x).prod().clamp(0, 2)
        return self.last(torch.sigmoid(self.second(z)) * y)


def test_what_a_later_microbatch_makes_does_not_come_out_of_an_earlier_ones_backward() -> None:
    """Both read the same batch. Found by random programs."""
    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tb.compile_step(model, lambda m, *batch: m(*batch).square().mean(), optimizer, accumulate=2, memory="keep")
    step(torch.randn(64, 8), torch.randn(64, 32))
    before = until(step._plans[0].original, shadow)
    checked(before, shadow(before))


class GatedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.gate = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        z = F.relu(self.norm(self.conv(x)))
        return F.silu(self.gate(x)) * z


def test_what_is_joined_lifts_no_peak() -> None:
    """Two ops as one need what both need at the same time."""
    torch.manual_seed(0)
    model = nn.Sequential(GatedNorm(), GatedNorm())
    program = recorded(model, lambda m, x: m(x).square().mean(), torch.randn(4, 8, 6, 6))
    grown: dict[str, int] = {}

    def watch(name: str, before: Draft, after: Draft | str) -> None:
        if name in ("gather", "shadow", "postpone", "join") and isinstance(after, Draft):
            grown[name] = planned_peak(after) - planned_peak(before)

    run_passes(program, settings=fast(), stages=WHOLE_HEAD, watch=watch)
    assert len(grown) == 4
    assert max(grown.values()) <= 0, grown


def test_lowest_peak_is_not_above_that_of_auto() -> None:
    """What comes out of clusters on their way is not kept, which may be lower than what nothing waits for."""
    program = residual()
    peaks = {}
    for memory in ("auto", "min"):
        options = Options(mode="fast", memory=memory)
        settings = settings_for(program, options, seconds)
        peaks[memory] = plan_within(program, frozenset(), options, settings).layout.alive_bytes
    assert peaks["min"] <= peaks["auto"], peaks


def test_change_that_lifts_the_peak_is_offered_less_room_and_then_left() -> None:
    draft = until(gated(), shadow)
    everything = frozenset(b.id for b in draft.program.buffers.values() if not b.role.borrowed)
    lifted = replace(draft, kept=draft.kept | everything)
    assert planned_peak(lifted) > planned_peak(draft)
    rooms: list[Headroom] = []

    def lifts(before: Draft, room: Headroom) -> Draft:
        rooms.append(room)
        return lifted

    assert no_higher(draft, lifts) is draft
    assert len(rooms) > 1
    last = draft.program.ops[-3:]
    assert [room.for_(last) for room in rooms] == sorted((room.for_(last) for room in rooms), reverse=True)
    assert not rooms[-1].for_(last), "less room is offered each time"


def test_no_room_is_known_for_what_reads_a_value_that_was_made_since() -> None:
    """Random programs have found it: a `KeyError` of mode fast."""
    draft = until(deep(), shadow)
    room = Headroom(draft, 0)
    run = draft.program.ops[-3:]
    reads = next(op for op in draft.program.ops if op.inputs)
    since = BufferId(max(draft.program.buffers) + 1)
    assert not room.for_((reads.map(reads=lambda r: replace(r, buffer=since)), *run[1:]))


def deep() -> Program:
    """Six gated layers: as many values that come out of their backward."""
    layers = nn.ModuleList(nn.Linear(16, 32) for _ in range(6)), nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def loss_fn(m: nn.ModuleList, x: Tensor) -> Tensor:
        for up, down in zip(*m, strict=True):
            gate, value = up(x).chunk(2, -1)
            x = x + down(F.silu(gate) * value)
        return x.square().mean()

    return recorded(nn.ModuleList(layers), loss_fn, torch.ones(64, 16))


def outline(draft: Draft) -> list[object]:
    return [(names(op), op.inputs, op.outputs) for op in draft.program.ops]


def test_what_comes_out_of_clusters_counts_against_the_share_that_may_be_spent() -> None:
    program = deep()
    before = until(program, shadow)
    step_s = sum(map(seconds, before.program.ops))
    whole = shadow(before)
    spent = [again_s(whole.program.ops, whole.rebuilt, seconds) / step_s]
    for part in (0.9, 0.5, 0.2, 0.0):
        limited = checked(before, shadow(before, seconds=seconds, share=part * spent[0]))
        spent.append(again_s(limited.program.ops, limited.rebuilt, seconds) / step_s)
        assert spent[-1] <= part * spent[0]
        plan = run_passes(program, settings=fast(goal=Within(part * spent[0])), stages=WHOLE_HEAD)
        assert again_s(plan.program.ops, plan.rebuilt, seconds) <= part * spent[0] * step_s * (1 + 1e-9)
    assert spent == sorted(spent, reverse=True)
    assert len(set(spent)) == len(spent), "more may be spent, more is"


def test_what_is_not_worth_its_time_is_kept() -> None:
    before = until(deep(), shadow)
    assert shadow(before, seconds=seconds, share=1.0, worth=0.01).rebuilt == shadow(before).rebuilt
    assert shadow(before, seconds=seconds, share=1.0, worth=1e6).rebuilt == frozenset()


def test_no_more_comes_out_of_clusters_than_a_target_needs() -> None:
    before = until(deep(), shadow)
    numbers = shadow(before).shadows
    peaks = [planned_peak(shadow(before, only=numbers[:n])) for n in range(len(numbers) + 1)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]
    for room in {*peaks, peaks[0] + 1, peaks[-1] - 1}:
        made = shadow(before, room_bytes=room)
        assert len(made.rebuilt) == next((n for n, peak in enumerate(peaks) if peak <= room), len(peaks) - 1)


def test_choice_of_an_earlier_process_is_found_again_with_what_comes_out_of_clusters() -> None:
    """What is rebuilt are positions in a program that has as many of them."""
    program = deep()
    one = run_passes(program, settings=fast(goal=Within(0.02)), stages=WHOLE_HEAD)
    assert one.chosen is not None
    assert 0 < len(one.chosen.choice.shadows) < len(shadow(until(program, shadow)).shadows)
    assert one.planned_peak_bytes is not None
    known = Remembered(one.chosen.choice, one.planned_peak_bytes, (), Keep())
    again = run_passes(program, settings=fast(goal=known), stages=WHOLE_HEAD)
    assert (outline(again), again.planned_peak_bytes) == (outline(one), one.planned_peak_bytes)
    sibling = run_passes(program, settings=fast(goal=Again(one.chosen, Keep())), stages=WHOLE_HEAD)
    assert outline(sibling) == outline(one)


def dear(op: Op) -> float:
    """So that some of what clusters can make is not worth its time, and what comes later is."""
    return seconds(op) * (40 if any(r.buffer % 4 == 1 and r.numel > 512 for r in op.inputs) else 1)


def test_what_is_skipped_is_skipped_by_who_finds_the_choice_again() -> None:
    program = deep()
    told = PassSettings(fast=True, chooser=Chooser(dear, 60.0), goal=Within(0.5, 4.0))
    one = run_passes(program, settings=told, stages=WHOLE_HEAD)
    assert one.chosen is not None
    taken = one.chosen.choice.shadows
    assert taken
    assert taken != tuple(range(len(taken))), "nothing was skipped: this shows nothing"
    assert one.planned_peak_bytes is not None
    known = Remembered(one.chosen.choice, one.planned_peak_bytes, (), Keep())
    for goal in (known, Again(one.chosen, Keep())):
        again = run_passes(program, settings=replace(told, goal=goal), stages=WHOLE_HEAD)
        assert outline(again) == outline(one)


def test_frontier_of_mode_fast_begins_with_what_keep_gives() -> None:
    program, options = deep(), Options(mode="fast")
    found = find_frontier(program, frozenset(), options, seconds)
    keep = replace(options, memory="keep")
    plan = plan_within(program, frozenset(), keep, settings_for(program, keep, seconds))
    first = found.points[0]
    assert (first.memory, first.added_s, first.rebuilt_ops) == ("keep", 0.0, 0)
    assert first.peak_bytes == resident_bytes(program) + undo_bytes(program) + planned_peak(plan.layout.draft)
    assert any(point.rebuilt.get("made in clusters") for point in found.points)
    for above, below in itertools.pairwise(found.points):
        assert above.peak_bytes > below.peak_bytes
        assert above.added_s < below.added_s

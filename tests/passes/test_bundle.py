"""bundle: casts and counters that may run at one place are one op there, with eager's bits and no higher peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.form import FormError, check_form
from takeback.compiler.layout import lay_out
from takeback.compiler.ownership.lists import list_form_of
from takeback.compiler.ownership.meaning import MeaningError, check_meaning
from takeback.compiler.passes import PIPELINE, Draft, Home, PassSettings, run_passes
from takeback.compiler.passes import bundle as module
from takeback.compiler.passes.bundle import ALONE, HIGHER, LARGE, bundle
from takeback.compiler.passes.overwrite import planned_curve
from takeback.compiler.passes.recompute import Chooser, Lowest
from takeback.compiler.program import Buffer, BufferId, Cluster, Op, Phase, Program, Region, Role
from takeback.compiler.run.allocator_executor import AllocatorExecutor
from takeback.compiler.run.eager import eager_step
from takeback.compiler.run.kernels import Kernels

aten = torch.ops.aten
HALF, SINGLE = torch.bfloat16, torch.float32
WITHOUT = [stage for stage in PIPELINE if stage.name != "bundle"]


class Writer:
    """Writes a program op by op."""

    def __init__(self) -> None:
        self.buffers: dict[BufferId, Buffer] = {}
        self.given: dict[BufferId, Tensor] = {}
        self.ops: list[Op] = []
        self.loss: Region

    def value(self, elements: int, dtype: torch.dtype, role: Role = Role.INTERNAL) -> Region:
        ident = BufferId(len(self.buffers))
        self.buffers[ident] = Buffer(ident, elements * dtype.itemsize, role)
        if role.borrowed:
            self.given[ident] = torch.zeros(elements, dtype=dtype)
        return Region(ident, dtype, (elements,), (1,), 0)

    def weight(self, elements: int = 64, dtype: torch.dtype = SINGLE) -> Region:
        return self.value(elements, dtype, Role.PARAMETER)

    def op(self, target: Any, *args: Any, dtype: torch.dtype = HALF, phase: Phase = Phase.FORWARD) -> Region:
        elements = next(a for a in args if isinstance(a, Region)).numel
        made = self.value(elements, dtype)
        self.ops.append(Op(target, args, {}, (made,), phase=phase))
        return made

    def cast(self, given: Region, dtype: torch.dtype = HALF, phase: Phase = Phase.FORWARD) -> Region:
        made = self.value(given.numel, dtype)
        self.ops.append(Op(aten._to_copy.default, (given,), {"dtype": dtype}, (made,), phase=phase))
        return made

    def write(self, target: Any, given: Region, other: Any, phase: Phase = Phase.FORWARD) -> None:
        self.ops.append(Op(target, (given, other), {}, (given,), (given.buffer,), phase))

    def peak_in_the_forward_(self, size_bytes: int = 1 << 20) -> None:
        """A value that is alive at the first two ops only, and so many bytes large with what else is alive there."""
        first, second = (self.value(1, SINGLE) for _ in range(2))
        self.buffers[first.buffer] = replace(self.buffers[first.buffer], size_bytes=size_bytes - 4)
        x = next(iter(self.given))
        given = Region(x, self.given[x].dtype, (1,), (1,), 0)
        self.ops[:0] = [Op(aten.mul.Tensor, (given, 2), {}, (first,)), Op(aten.mul.Tensor, (first, 2), {}, (second,))]

    def draft(self, loss: Region, **more: Any) -> Draft:
        return Draft(Program(tuple(self.ops), self.buffers, self.given, {}, loss), frozenset(), Home.ALLOCATOR, **more)


def checked(before: Draft) -> Draft:
    """What the pass makes, which is right and has no higher peak."""
    after = bundle(before)
    check_form(after.program, after.kept)
    check_meaning(before.program, after.program)
    assert max(planned_curve(after)) <= max(planned_curve(before))
    return after


def bundles(program: Program) -> list[Op]:
    return [op for op in program.ops if isinstance(op.target, Cluster) and list_form_of(op.target) is not None]


def lengths(program: Program) -> list[int]:
    return [len(op.target.ops) for op in bundles(program) if isinstance(op.target, Cluster)]


def reasons(draft: Draft) -> set[str]:
    return {r.reason for r in draft.refusals if r.decision == "bundle"}


class Chain(nn.Module):
    """Products, whose weights autocast casts, and norms, which count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(torch.relu(layer(x)))
        return x


def autocast_loss(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", HALF):
        return model(x).float().square().mean()


def streamed(model: nn.Module, **settings: Any) -> tb.CompiledStep:
    """A step of mode fast, planned as for a GPU, that runs here: torch's allocator places."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = tb.compile_step(model, autocast_loss, optimizer, mode="fast", **settings)
    step._maker.home, step._maker.native = Home.ALLOCATOR, None
    return step


@pytest.fixture
def _nothing_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters run with eager's kernels: what differs then is the bundles' doing."""
    monkeypatch.setattr(Kernels, "compile_", lambda self, program, tell: None)


@pytest.mark.usefixtures("_nothing_is_generated")
@pytest.mark.parametrize("settings", [{}, {"poison": True, "keep_grads": True}, {"accumulate": 2}, {"update": "early"}])
def test_a_step_with_bundles_has_eagers_bits(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours, theirs = Chain(), Chain()
    theirs.load_state_dict(ours.state_dict())
    step = streamed(ours, memory="keep", **settings)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    recipe = {name: value for name, value in settings.items() if name == "accumulate"}
    for _ in range(4):
        x = torch.randn(32, 16)
        assert torch.equal(step(x), eager_step(theirs, autocast_loss, optimizer, (x,), **recipe))
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    assert step._last is not None
    assert isinstance(step._last.executor, AllocatorExecutor)
    assert len(bundles(step._last.executor.program)) >= 2
    for kernel in step._last.executor.kernels.in_program(step._last.executor.program):
        if list_form_of(kernel.cluster) is not None:
            assert (kernel.is_for_lists, kernel.note, kernel.tried, kernel.waits) == (True, None, True, False)


@pytest.mark.usefixtures("_nothing_is_generated")
def test_casts_of_weights_and_gradients_and_counters_are_a_bundle_each() -> None:
    torch.manual_seed(0)
    step = streamed(Chain(), memory="keep")
    for _ in range(2):
        step(torch.randn(32, 16))
    assert step._last is not None
    forms = {
        str(list_form_of(op.target)) for op in bundles(step._last.executor.program) if isinstance(op.target, Cluster)
    }
    assert forms == {"float32 to bfloat16", "bfloat16 to float32", "+= 1"}
    assert not [op for op in step._last.executor.program.ops if op.target is aten.add_.Tensor]
    report = step.report()
    lists = [kernel for kernel in report.kernels if kernel.is_for_lists]
    assert len(lists) == 3
    assert not any(kernel.generated or kernel.waits or kernel.fell_back for kernel in lists)
    assert report.launches_saved >= sum(len(kernel.ops) - 1 for kernel in lists)
    text = " ".join(str(report).split())
    assert "3 torch's own for lists of tensors" in text
    assert "for lists" in text


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    model = Chain()
    step = tb.compile_step(model, autocast_loss, torch.optim.SGD(model.parameters(), 0.1), memory="keep")
    step(torch.randn(32, 16))
    assert step._last is not None
    return step._last.original


def by_numel(op: Op) -> float:
    return 1e-9 * sum(r.numel for r in (*op.inputs, *op.outputs))


def fast(**more: Any) -> PassSettings:
    return PassSettings(**{"home": Home.ALLOCATOR, "fast": True, "chooser": Chooser(by_numel, 60.0), **more})


@pytest.mark.parametrize("settings", [fast(), fast(goal=Lowest())], ids=["keep", "lowest"])
def test_leaving_it_out_changes_a_plan_and_its_peak_is_no_lower(program: Program, settings: PassSettings) -> None:
    with_it, without = (run_passes(program, settings=settings, stages=stages) for stages in (PIPELINE, WITHOUT))
    assert bundles(with_it.program)
    assert not bundles(without.program)
    assert len(with_it.program.ops) < len(without.program.ops) - 12
    assert lay_out(with_it).alive_bytes <= lay_out(without).alive_bytes


@pytest.mark.parametrize(
    ("settings", "why"), [(fast(fast=False), "mode='exact'"), (fast(home=Home.ARENA), "a CPU launches nothing")]
)
def test_elsewhere_it_is_idle_and_says_why(program: Program, settings: PassSettings, why: str) -> None:
    told: dict[str, Draft | str] = {}
    run_passes(program, settings=settings, watch=lambda name, before, after: told.update({name: after}))
    reason = told["bundle"]
    assert isinstance(reason, str)
    assert why in reason


def test_what_is_in_a_bundle_is_not_said_to_have_stayed_out_of_clusters(program: Program) -> None:
    draft = run_passes(program, settings=fast())
    made = {r.buffer for op in bundles(draft.program) for r in (*op.outputs, *op.inputs)}
    assert not [r for r in draft.refusals if r.decision == "fuse" and r.buffer in made and r.op == "_to_copy"]


# -- where a bundle runs -----------------------------------------------------------------------------------------------


def weights_and_products(count: int = 5) -> Writer:
    """Each weight is cast just before it is read."""
    w = Writer()
    x = w.weight(dtype=HALF)
    for _ in range(count):
        x = w.op(aten.mul.Tensor, x, w.cast(w.weight()))
    w.loss = x
    return w


def gradients(count: int = 5) -> Writer:
    """Each is cast as soon as it is made; the update reads all of them."""
    w = Writer()
    x, weights = w.weight(dtype=HALF), [w.weight() for _ in range(count)]
    w.loss = w.op(aten.mul.Tensor, x, x)
    backward = Phase.BACKWARD
    grads = [w.cast(w.op(aten.mul.Tensor, x, x, phase=backward), SINGLE, backward) for _ in weights]
    for weight, grad in zip(weights, grads, strict=True):
        w.write(aten.add_.Tensor, weight, grad, Phase.UPDATE)
    return w


def test_casts_of_weights_run_where_the_first_is_read() -> None:
    w = weights_and_products()
    w.peak_in_the_forward_()
    after = checked(w.draft(w.loss))
    assert lengths(after.program) == [5]
    assert after.program.ops[2] in bundles(after.program)


def test_casts_of_gradients_run_before_the_update() -> None:
    w = gradients()
    w.peak_in_the_forward_()
    after = checked(w.draft(w.loss))
    [one] = bundles(after.program)
    assert one.phase is Phase.BACKWARD
    assert after.program.ops[after.program.ops.index(one) + 1].phase is Phase.UPDATE


def test_a_bundle_that_would_lift_the_peak_is_cut_in_half_and_in_the_end_left() -> None:
    w = gradients(16)
    before = w.draft(w.loss)
    peak = max(planned_curve(before))
    after = checked(before)
    assert lengths(after.program) == []  # the peak is in the end, where the narrow ones would be alive, too
    assert reasons(after) == {HIGHER}
    for spare, expected in ((16 * 128, [16]), (8 * 128, [8, 8]), (4 * 128, [8, 4, 4])):
        w = gradients(16)
        w.peak_in_the_forward_(peak + spare)
        assert lengths(checked(w.draft(w.loss)).program) == expected


def test_weights_that_are_read_late_are_not_cast_early_where_that_lifts_the_peak() -> None:
    after = checked((w := weights_and_products(8)).draft(w.loss))
    assert not bundles(after.program)
    assert reasons(after) == {HIGHER}


# -- what stays out of it ----------------------------------------------------------------------------------------------


def roomy(w: Writer, x: Region) -> Draft:
    """With a peak that nothing here reaches."""
    w.loss = x
    w.peak_in_the_forward_()
    return w.draft(x)


def use(w: Writer, *casts: Region) -> Region:
    """One op that reads them all."""
    made = w.value(casts[0].numel, casts[0].dtype)
    w.ops.append(Op(aten.cat.default, (casts,), {}, (w.value(sum(c.numel for c in casts), HALF),)))
    w.ops.append(Op(aten.mul.Tensor, (casts[0], 2), {}, (made,)))
    return made


def test_other_dtypes_are_bundles_of_their_own_or_none() -> None:
    w = Writer()
    half = [w.cast(w.weight()) for _ in range(4)]
    other = [w.cast(w.weight(), torch.float16) for _ in range(3)]
    after = checked(roomy(w, use(w, *half, *other)))
    assert lengths(after.program) == [4]
    assert reasons(after) == {ALONE}


def test_an_operand_that_is_written_in_between_keeps_its_cast_before_that() -> None:
    w = Writer()
    late = [w.weight() for _ in range(4)]
    early = w.weight()
    before = w.cast(early)
    w.write(aten.mul_.Tensor, early, 2.0)
    first = w.op(aten.mul.Tensor, before, 2)
    after = checked(roomy(w, use(w, *(w.cast(x) for x in late), first, w.cast(early))))
    [one] = bundles(after.program)
    written = next(i for i, op in enumerate(after.program.ops) if op.mutates)
    assert after.program.ops.index(one) <= written
    assert len(one.outputs) == 5  # the weight as it was before the write; its cast after it stays behind
    assert [op.target for op in after.program.ops[written:]].count(aten._to_copy.default) == 1
    assert reasons(after) == {ALONE}


def test_a_cast_of_what_is_made_later_is_not_in_an_earlier_bundle() -> None:
    w = Writer()
    four = [w.cast(w.weight()) for _ in range(4)]
    x = use(w, *four)
    y = w.cast(w.op(aten.mul.Tensor, x, x, dtype=SINGLE))
    after = checked(roomy(w, w.op(aten.mul.Tensor, y, y)))
    assert lengths(after.program) == [4]
    assert [op.target for op in after.program.ops].count(aten._to_copy.default) == 1


def test_a_cast_of_a_cast_comes_after_it() -> None:
    """Both are in bundles, and the second of them may begin only where the first has ended."""
    w = Writer()
    narrow = [w.cast(w.weight()) for _ in range(4)]
    wide = [w.cast(each, SINGLE) for each in narrow]
    after = checked(roomy(w, use(w, *(w.cast(each) for each in wide))))
    assert lengths(after.program)[:2] == [4, 4]


def test_a_cast_of_a_cast_is_in_no_bundle_that_runs_before_the_first() -> None:
    """The bundle of the first runs as late as just before the second, that of others of its kind earlier."""
    w = Writer()
    narrow = [w.cast(w.weight()) for _ in range(4)]
    others = [w.cast(w.weight(dtype=HALF), SINGLE) for _ in range(4)]
    w.op(aten.mul.Tensor, others[0], 2, dtype=SINGLE)
    again = w.cast(narrow[0], SINGLE)
    after = checked(roomy(w, use(w, *narrow, *others, again)))
    assert lengths(after.program) == [4, 4]


@pytest.mark.parametrize("what", ["turned", "part", "another device", "pinned", "whole numbers"])
def test_a_cast_that_changes_more_than_the_dtype_stays_as_it_is(what: str) -> None:
    w = Writer()
    casts = [w.cast(w.weight()) for _ in range(4)]
    draft = roomy(w, use(w, *casts))
    op = draft.program.ops[2]
    [given], [made] = op.inputs, op.outputs
    buffers = dict(draft.program.buffers)
    if what == "turned":
        given, made = replace(given, shape=(8, 8), stride=(8, 1)), replace(made, shape=(8, 8), stride=(1, 8))
    elif what == "part":
        buffers[made.buffer] = replace(buffers[made.buffer], size_bytes=256)
    elif what == "another device":
        buffers[given.buffer] = replace(buffers[given.buffer], device="cpu")
    elif what == "whole numbers":
        given = replace(given, dtype=torch.int32)
    kwargs = {"dtype": HALF, **({"pin_memory": True} if what == "pinned" else {})}
    other = replace(op, args=(given,), kwargs=kwargs, results=(made,))
    ops = (*draft.program.ops[:2], other, *draft.program.ops[3:])
    before = replace(draft, program=replace(draft.program, ops=ops, buffers=buffers))
    after = bundle(before)
    assert after.program.ops == before.program.ops
    assert reasons(after) == {ALONE}


def test_a_large_cast_stays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ELEMENTS", 100)
    w = Writer()
    four, large = [w.cast(w.weight()) for _ in range(4)], w.cast(w.weight(128))
    after = checked(roomy(w, use(w, *four, large)))
    assert lengths(after.program) == [4]
    assert reasons(after) == {LARGE}


def test_gradients_that_are_updated_early_are_cast_one_by_one() -> None:
    w = Writer()
    x, weights = w.weight(dtype=HALF), [w.weight() for _ in range(5)]
    loss = w.op(aten.mul.Tensor, x, x)
    for weight in weights:
        grad = w.cast(w.op(aten.mul.Tensor, x, x, phase=Phase.BACKWARD), SINGLE, Phase.BACKWARD)
        w.write(aten.add_.Tensor, weight, grad, Phase.UPDATE)
    after = checked(roomy(w, loss))
    assert not bundles(after.program)
    assert reasons(after) == {ALONE}


def test_what_is_rebuilt_is_in_no_bundle_of_the_forward() -> None:
    w = Writer()
    weights = [w.weight() for _ in range(5)]
    loss = use(w, *(w.cast(each) for each in weights))
    start = len(w.ops)
    again = [w.cast(each) for each in weights]
    w.ops.append(Op(aten.cat.default, (tuple(again),), {}, (w.value(320, HALF),), phase=Phase.BACKWARD))
    rebuilt = frozenset(op.outputs[0].buffer for op in w.ops[start:-1])
    after = checked(replace(roomy(w, loss), rebuilt=rebuilt))
    first, second = bundles(after.program)
    assert not {r.buffer for r in first.outputs} & rebuilt
    assert {r.buffer for r in second.outputs} == rebuilt


def test_counters_that_are_counted_twice_are_two_bundles_in_order() -> None:
    w = Writer()
    counters = [w.value(1, torch.int64, Role.BUFFER) for _ in range(4)]
    x = w.weight(dtype=HALF)
    for _ in range(2):
        x = w.op(aten.mul.Tensor, x, x)
        for each in counters:
            w.write(aten.add_.Tensor, each, 1)
    w.write(aten.mul_.Tensor, counters[0], 2)
    after = checked(roomy(w, w.op(aten.mul.Tensor, x, x)))
    assert lengths(after.program) == [4, 4]
    assert all(set(op.mutates) == {c.buffer for c in counters} for op in bundles(after.program))


@pytest.mark.parametrize("number", [1.0, True, 2])
def test_only_the_same_whole_number_is_added_to_a_list(number: Any) -> None:
    w = Writer()
    counters = [w.value(1, torch.int64, Role.BUFFER) for _ in range(4)]
    for i, each in enumerate(counters):
        w.write(aten.add_.Tensor, each, number if i == 0 else 1)
    x = w.weight(dtype=HALF)
    assert not bundles(checked(roomy(w, w.op(aten.mul.Tensor, x, x))).program)


# -- a broken pass is found --------------------------------------------------------------------------------------------


def moved(draft: Draft, by: Callable[[int], int]) -> Draft:
    """The draft with its first bundle at another place."""
    ops = list(draft.program.ops)
    at = next(i for i, op in enumerate(ops) if op in bundles(draft.program))
    one = ops.pop(at)
    ops.insert(by(at), one)
    return replace(draft, program=replace(draft.program, ops=tuple(ops)))


def test_a_bundle_behind_a_reader_is_found_at_its_own_door(program: Program) -> None:
    broken = moved(run_passes(program, settings=fast()), lambda at: at + 1)
    with pytest.raises(FormError, match="which nothing has written before it"):
        check_form(broken.program, broken.kept)


def test_a_bundle_behind_a_write_to_its_operand_has_another_meaning() -> None:
    w = Writer()
    weights = [w.weight() for _ in range(4)]
    casts = [w.cast(each) for each in weights]
    w.write(aten.mul_.Tensor, weights[0], 2.0)
    draft = roomy(w, use(w, *casts))
    after = checked(draft)
    assert lengths(after.program) == [4]
    with pytest.raises(MeaningError):
        check_meaning(draft.program, moved(after, lambda at: at + 1).program)


def test_counters_in_a_bundle_twice_have_another_meaning(program: Program) -> None:
    after = run_passes(program, settings=fast())
    [counters] = [op for op in bundles(after.program) if op.mutates]
    twice = tuple(one for op in after.program.ops for one in ((op, op) if op is counters else (op,)))
    with pytest.raises(MeaningError):
        check_meaning(program, replace(after.program, ops=twice))

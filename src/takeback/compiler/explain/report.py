"""`Report`: what a plan needs, what eager needs, where every value lives, what was copied and why.

Built from a layout and the recorded program, measured or predicted alike. All byte counts are of tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from takeback.compiler.capture.finish import OwnStep
from takeback.compiler.explain.advice import Advice
from takeback.compiler.explain.kernels import KernelAccount, fallback_notes, launches_saved, ops_in_clusters
from takeback.compiler.explain.ledger import Entry, Fate, ledger
from takeback.compiler.explain.plans import PlanAccount, above_resident, copied_grad_bytes, resident_of
from takeback.compiler.layout import Layout, asks_for_results
from takeback.compiler.ownership.curve import alive_bytes
from takeback.compiler.ownership.eager_peak import eager_peak
from takeback.compiler.passes.draft import Refusal
from takeback.compiler.program import Op, Phase, Program, Region
from takeback.compiler.run.execution import Counters, Execution
from takeback.compiler.run.proof import Skipped
from takeback.options import Options


@dataclass(frozen=True)
class Measured:
    """What the last replay showed. None fields of a report mean that nothing has been replayed yet."""

    served: int
    misses: int
    missed_bytes: int
    passed: int
    landed: int
    landed_bytes: int
    worker_new: int

    @classmethod
    def of(cls, counters: Counters) -> Measured:
        return cls(**{field.name: getattr(counters, field.name) for field in dataclasses.fields(cls)})


@dataclass(frozen=True)
class Report:
    """The account of one plan. Bytes alive at the peak include parameters, optimizer state and the batch."""

    peak_bytes: int
    eager_peak_bytes: int
    resident_bytes: int
    lower_bound_bytes: int
    arena_bytes: int
    allocations_per_step: int
    copied_bytes: int
    ledger: tuple[Entry, ...]
    refusals: tuple[Refusal, ...]
    resident: Mapping[str, int]  #: resident bytes by role
    ops: int
    eager_peak_at: str
    peak_curve: tuple[int, ...]  #: bytes of the arena alive during each op
    eager_curve: tuple[int, ...]  #: bytes eager holds above resident during each recorded op
    measured: Measured | None
    placed: bool  #: False where there is no native allocator
    notes: tuple[str, ...]
    step_s: float = 0.0  #: predicted for this machine, without rebuilding
    added_s: float = 0.0  #: predicted: what rebuilding adds
    rebuilt_ops: int = 0  #: how many ops are run again
    has_arena: bool = True  #: False where the device's own allocator places: `arena_bytes` is what is alive at the peak
    plans: tuple[PlanAccount, ...] = ()  #: all that the step has, the one that this is the report of first
    loading_s: float = 0.0  #: compiling and loading native code, when the step was made
    title: str = ""  #: the model, its batch, the options and the device
    update_at: int | None = None  #: the op of the plan with which the optimizer's tail begins
    eager_update_at: int | None = None  #: the same in eager's curve
    torch_version: str = torch.__version__
    mode: str = "exact"  #: in which it runs: "exact" or "fast"
    kernels: tuple[KernelAccount, ...] = ()  #: of clusters, what moves most bytes first; none in mode exact
    advisor: Callable[[], Advice] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        from takeback.compiler.explain.text import as_text

        return as_text(self)

    @functools.cached_property
    def advice(self) -> Advice:
        """What can be done about the peak, with what it would save and cost; found when it is first asked for, which
        may take as long as making the plan did."""
        return self.advisor() if self.advisor is not None else Advice()

    @property
    def ops_in_clusters(self) -> int:
        """How many ops of a step run as part of a cluster."""
        return ops_in_clusters(self.kernels)

    @property
    def launches_saved(self) -> int:
        """How many fewer calls a step makes by that, as far as these kernels are generated."""
        return launches_saved(self.kernels)

    def __getstate__(self) -> dict[str, object]:
        """Copied and pickled as data, with the advice if it was found: what finds it holds the plan, and the model."""
        return {**vars(self), "advisor": None}

    def to_json(self) -> str:
        """Everything as JSON text; the tips of `advice` if it was asked for."""
        data = dataclasses.asdict(dataclasses.replace(self, advisor=None))
        del data["advisor"]
        data["tips"] = [dataclasses.asdict(tip) for tip in self.advice.tips] if "advice" in vars(self) else None
        data["ops_in_clusters"], data["launches_saved"] = self.ops_in_clusters, self.launches_saved
        for refusal in data["refusals"]:
            site = refusal.pop("site")
            refusal["line"] = f"{site['file']}:{site['line']}" if site else ""
        return json.dumps(data, indent=1)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page and returns its path."""
        from takeback.compiler.explain.html import as_html

        target = Path(path)
        target.write_text(as_html(self), encoding="utf-8")
        return target


def build_report(
    layout: Layout,
    original: Program,
    execution: Execution,
    *,
    own_steps: Sequence[OwnStep] = (),
    skipped: Skipped | None = None,
    unplanned: str = "",
    unsampled: str | None = None,
    step_s: float = 0.0,
    added_s: float = 0.0,
    notes: Sequence[str] = (),
    state_bytes: int = 0,
    libraries_bytes: int = 0,
    plans: Sequence[PlanAccount] = (),
    loading_s: float = 0.0,
    title: str = "",
    mode: str = "exact",
    kernels: Sequence[KernelAccount] = (),
) -> Report:
    """`original` is the recorded program before the passes; it says what eager would hold. `own_steps`: the
    optimizers whose update is not in it. `skipped`: a comparison that was due and not made. `unplanned`: how many steps
    ran plainly, and why. `unsampled`: why replays are not compared with eager's forward. `notes`: of the recording.
    `state_bytes`: the optimizers' state as it is now, which a program without an update need not name.
    `libraries_bytes`: what cuBLAS and the like keep for themselves.
    `plans`: all of the step's, this one first. `loading_s`: what native code took, once. `title`: what the report is
    of. `mode`: in which it runs. `kernels`: those of its clusters."""
    program = layout.draft.program
    resident = {**resident_of(layout, state_bytes), "library workspaces": libraries_bytes}
    total = sum(resident.values())
    eager = eager_peak(original)
    entries = ledger(layout)
    measured = Measured.of(execution.counters) if execution.counters is not None else None
    copied = sum(e.size_bytes for e in entries if e.fate is Fate.COPIED) + copied_grad_bytes(layout, execution)
    top = original.ops[eager.position] if original.ops else None
    return Report(
        peak_bytes=total + above_resident(layout, execution),
        eager_peak_bytes=total + eager.transient_bytes,
        resident_bytes=total,
        lower_bound_bytes=layout.alive_bytes if layout.arena is None else layout.arena.lower_bound_bytes,
        arena_bytes=layout.alive_bytes if layout.arena is None else layout.arena.size_bytes,
        allocations_per_step=_allocations(layout, entries, execution, measured),
        copied_bytes=copied + (measured.landed_bytes if measured else 0),
        ledger=entries,
        refusals=(*layout.draft.refusals, *_refused(own_steps, program)),
        resident={k: v for k, v in resident.items() if v},
        ops=len(program.ops),
        eager_peak_at=_where(top) if top else "",
        peak_curve=tuple(alive_bytes(program, layout.owners, layout.draft.kept)),
        eager_curve=eager.curve,
        measured=measured,
        placed=execution.serves_ops,
        notes=(
            *((unplanned,) if unplanned else ()),
            *_notes(layout, execution, own_steps, skipped, (*fallback_notes(kernels), *notes, *_unsampled(unsampled))),
        ),
        step_s=step_s,
        added_s=added_s,
        rebuilt_ops=_rebuilt_ops(layout),
        has_arena=layout.arena is not None,
        plans=tuple(plans),
        loading_s=loading_s,
        title=title,
        update_at=_update_at(program),
        eager_update_at=_update_at(original),
        mode=mode,
        kernels=tuple(kernels),
    )


def title_of(model: torch.nn.Module, made_for: str, options: Options, device: torch.device, more: str = "") -> str:
    """`GPT, batch 4x64, memory="auto" on cpu`: what a report is of. `more`: what else is to be said of the device."""
    usual = Options()
    said = [f"memory={_shown(options.memory)}"]
    mode = options.mode_on(device.type)
    if mode == "fast" or mode != usual.mode_on(device.type):
        said.append(f"mode={_shown(mode)}")
    settings = [(name, getattr(options, name)) for name in ("update", "accumulate", "clip_norm", "keep_grads")]
    said += [f"{name}={_shown(value)}" for name, value in settings if value != getattr(usual, name)]
    said += [f"{name}=..." for name in ("scaler", "group") if getattr(options, name) is not None]
    return ", ".join((type(model).__name__, f"batch {made_for}", *said)) + f" on {device}{more}"


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _update_at(program: Program) -> int | None:
    """The op after which there are only those of the update; None if there is no such tail."""
    last = max((i for i, op in enumerate(program.ops) if op.phase is not Phase.UPDATE), default=-1)
    return last + 1 if last + 1 < len(program.ops) else None


def _allocations(layout: Layout, entries: Sequence[Entry], execution: Execution, measured: Measured | None) -> int:
    """Requests to the ordinary allocator in a steady step: as they were counted, else as far as they are known."""
    program = layout.draft.program
    if measured:
        outside = measured.misses + measured.passed + measured.worker_new
    else:
        passed = sum(e.fate is Fate.PASSED for e in entries)
        outside = len(set(layout.owners.values())) if layout.arena is None else passed
    if not execution.serves_ops:
        made = zip(program.ops, layout.kinds, strict=True)
        outside += sum(len(op.outputs) for op, kind in made if asks_for_results(kind))
    return outside if layout.arena is None else outside + len(program.returned)


def _refused(own_steps: Sequence[OwnStep], program: Program) -> Iterator[Refusal]:
    for own_step in own_steps:
        yield Refusal("plan the update", own_step.optimizer, program.loss.buffer, 0, own_step.reason)


def _notes(
    layout: Layout, execution: Execution, own_steps: Sequence[OwnStep], skipped: Skipped | None, more: Sequence[str]
) -> Iterator[str]:
    if execution.group:
        yield execution.group
    if layout.arena is None:
        yield _NO_ARENA
    elif not execution.serves_ops:
        yield _NO_NATIVE
    if execution.graph:
        yield f"CUDA graphs: {execution.graph}"
    for own_step in own_steps:
        yield (
            f"the update is not part of the plan: {own_step.optimizer}'s own step() is called after the backward, "
            f"because {own_step.reason}"
        )
    yield from more
    yield from layout.draft.notes
    if skipped is not None:
        yield skipped.reason


def _unsampled(reason: str | None) -> Iterator[str]:
    if reason is not None:
        yield f"replays are not compared with eager's forward from time to time: {reason}. verify_every=n compares"


_NO_ARENA = (
    "the device's caching allocator places the values, so there is no arena. What it has reserved from the device is "
    "another matter than what is alive (torch.cuda.memory_reserved)."
)
_NO_NATIVE = "no native allocator: ops without an out= kernel allocate as in eager, and are copied into place"


def _rebuilt_ops(layout: Layout) -> int:
    """How many ops of the step are run again. A batch norm counts once: a few small ops prepare its second run."""
    rebuilt = layout.draft.rebuilt
    again = [op for op in layout.draft.program.ops if any(r.buffer in rebuilt for r in op.outputs)]
    prepared = {
        r.buffer
        for op in again
        if op.name.startswith("native_batch_norm")
        for r in (op.args[1], op.args[4])
        if isinstance(r, Region)
    }
    return sum(not any(r.buffer in prepared for r in op.outputs) for op in again)


def _where(op: Op) -> str:
    place = "in the optimizer's update" if op.phase is Phase.UPDATE else str(op.site or "")
    return f"{op.name} {place}".strip()

"""What a step would need, before it runs: `predict` traces it with fake tensors, `frontier` says what less memory
would cost in time, `passes` shows what each pass does, `largest_batch` searches over batch sizes.

Nothing of the user's is touched or run: model, optimizer and batch are replaced by fakes of the same shapes. Only the
scratch inside kernels cannot be seen that way; on the CPU each distinct op that may take some is tried once, on zeros.
With `device="cuda"` and the name of a GPU, the same is predicted for that GPU, on any machine; scratch is estimated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from takeback.compiler.capture import subject as subjects
from takeback.compiler.capture.batch import batch_in_words
from takeback.compiler.explain.advice import Advice
from takeback.compiler.explain.advisor import AdvisedStep, WhatIf, by_saving
from takeback.compiler.explain.frontier import Frontier, find_frontier
from takeback.compiler.explain.half import what_to_write
from takeback.compiler.explain.passes import PassRecord
from takeback.compiler.explain.replan import Replan
from takeback.compiler.explain.report import Report, build_report, title_of
from takeback.compiler.explain.what_if import ChunkedLossTip
from takeback.compiler.ownership.resident import grad_bytes
from takeback.compiler.ownership.writes import undo_bytes
from takeback.compiler.passes.draft import Draft, Home
from takeback.compiler.passes.pipeline import PIPELINE
from takeback.compiler.planning import plan_within, settings_for
from takeback.compiler.run.calibrate import cost_of
from takeback.compiler.run.execution import Execution
from takeback.compiler.run.gpu_table import GPUS, MEASURED_ON, MIB, Gpu, gpu_named
from takeback.errors import OptionError
from takeback.options import Options, parse_bytes
from takeback.tracing import Traced, TracedStep, cost_on, half_of, planned

MakeCase = Callable[[int], Any]


def predict(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer | Sequence[Optimizer],
    *batch: Any,
    mode: str = "auto",
    memory: str = "auto",
    device: str | None = None,
    gpu: str | None = None,
    update: str = "end",
    accumulate: int = 1,
    clip_norm: float | None = None,
    keep_grads: bool = False,
    solve_s: float = 120.0,
    progress: Callable[[int, int], None] | None = None,
    **kwargs: Any,
) -> Report:
    """The `Report` that `compile_step` would give for this batch. Keywords it does not know go to loss_fn.

    `device="cuda"` with `gpu="H200"`, `"A100-80GB"`, `"RTX 4090"` ...: the report for that GPU, which need not be
    there; model and batch may be on the CPU or on the meta device. Kernels are those that torch chooses on an H200.

    A step that asks "am I being traced?" may show another program to fake tensors than it runs; the report of a
    compiled step is the truth.
    """
    options = Options(
        mode=mode,
        memory=memory,
        update=update,
        accumulate=accumulate,
        clip_norm=clip_norm,
        keep_grads=keep_grads,
        solve_s=solve_s,
    )
    card = _card(device, gpu)
    _check_exact(options, card)
    given = TracedStep(model, loss_fn, optimizer, batch, kwargs, options, card)
    traced = given.traced(progress)
    plan = planned(traced.finished, options, gpu=card)
    layout = plan.layout
    execution = Execution(
        serves_ops=traced.native is not None or card is not None,
        undo_bytes=undo_bytes(layout.draft.program),
        kept_grad_bytes=grad_bytes(traced.program) if keep_grads else 0,
    )
    report = build_report(
        layout,
        traced.program,
        execution,
        own_steps=traced.finished.own_steps,
        step_s=plan.step_s,
        added_s=plan.added_s,
        title=title_of(model, batch_in_words((batch, kwargs)), options, traced.program.device, _name(card)),
        notes=tuple(_notes(card)),
        libraries_bytes=card.workspace_bytes if card is not None else 0,
        mode=options.mode_on(traced.program.device_type),
    )
    replan = Replan(functools.partial(planned, gpu=card), execution, options)
    others = _others(given, traced, replan) if card is None else ()
    home = layout.draft.home
    return AdvisedStep(traced.program, traced.kept, options, plan.seconds, home, others).advised(report)


def _others(given: TracedStep, traced: Traced, replan: Replan) -> tuple[WhatIf, ...]:
    tip = ChunkedLossTip(traced.finished, given.model, replan, traced.native)
    return tip, half_of(given, replan, traced.program)


def _name(card: Gpu | None) -> str:
    return "" if card is None else f" ({card.name}, predicted)"


def _notes(card: Gpu | None) -> Iterator[str]:
    if card is None:
        return
    if card.name != MEASURED_ON:
        yield (
            f"kernel choices are the {MEASURED_ON}'s: which kernels torch runs was taken from there, and on the "
            f"{card.name} some may be others, with other values kept for the backward. Times are from data sheets."
        )
    yield (
        f"predicted without the GPU: what kernels take inside is estimated, convolutions are taken to take nothing, "
        f"and {card.workspace_bytes // MIB} MiB are counted for the workspaces of cuBLAS."
    )


def with_autocast(report: Report, case: Any, options: Options) -> Report:
    """The report of a compiled step of `case`, whose tip for bfloat16 has figures: the step is traced with it, on fake
    tensors. `case` has model, loss_fn, optimizer and batch."""
    if subjects.device_of(case.model).type != "cpu" or report.mode == "fast":
        return report

    def advisor() -> Advice:
        found = report.advice
        do = what_to_write("cpu")
        others = [tip for tip in found.tips if tip.do != do]
        if len(others) == len(found.tips):
            return found
        given = TracedStep(case.model, case.loss_fn, case.optimizer, tuple(case.batch), {}, options)
        traced = given.traced()
        replan = Replan(planned, Execution(traced.native is not None, undo_bytes(traced.program)), options)
        tips = sorted((*others, *half_of(given, replan, traced.program)(report)), key=by_saving)
        return replace(found, tips=tuple(tips))

    return replace(report, advisor=advisor)


def passes(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer | Sequence[Optimizer],
    *batch: Any,
    mode: str = "auto",
    memory: str = "auto",
    update: str = "end",
    accumulate: int = 1,
    clip_norm: float | None = None,
    keep_grads: bool = False,
    solve_s: float = Options.solve_s,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> tuple[PassRecord, ...]:
    """What each pass makes of the step, in the order in which they run: the program before and after it. Nothing of the
    user's is run. `takeback explain TARGET --passes` prints it."""
    options = Options(
        mode=mode,
        memory=memory,
        update=update,
        accumulate=accumulate,
        clip_norm=clip_norm,
        keep_grads=keep_grads,
        solve_s=solve_s,
    )
    say = progress or (lambda text: None)
    say("tracing the step")
    traced = TracedStep(model, loss_fn, optimizer, batch, kwargs, options).traced()
    settings = settings_for(traced.program, options, cost_of(traced.program), progress=progress)
    records: list[PassRecord] = []

    def watch(name: str, before: Draft, after: Draft | str) -> None:
        if name == PIPELINE[0].name:
            records.clear()  # a target may take several rounds: the last one made the plan
        records.append(PassRecord(name, before, after))

    plan_within(traced.program, traced.kept, options, settings, watch=watch)
    return tuple(records)


def frontier(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer | Sequence[Optimizer],
    *batch: Any,
    mode: str = "auto",
    device: str | None = None,
    gpu: str | None = None,
    update: str = "end",
    accumulate: int = 1,
    clip_norm: float | None = None,
    keep_grads: bool = False,
    solve_s: float = 120.0,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Frontier:
    """Peak against predicted time for this batch: what each setting of `memory=` would come to. Nothing is run.

    `solve_s` holds for the curve, and once more for what "auto" would choose. `progress(text)` is told what is being
    done. Keywords that are not known go to loss_fn.
    """
    options = Options(
        mode=mode,
        update=update,
        accumulate=accumulate,
        clip_norm=clip_norm,
        keep_grads=keep_grads,
        solve_s=solve_s,
    )
    card = _card(device, gpu)
    _check_exact(options, card)
    say = progress or (lambda text: None)
    say("tracing the step")
    traced = TracedStep(model, loss_fn, optimizer, batch, kwargs, options, card).traced(
        lambda done, total: say(f"trying ops for the scratch they take ({done} of {total})")
    )
    seconds, home = cost_on(traced.program, card), Home.ARENA if card is None else Home.ALLOCATOR
    return find_frontier(traced.program, traced.kept, options, seconds, home=home, progress=progress)


def _check_exact(options: Options, card: Gpu | None) -> None:
    if card is None and options.is_fast("cpu"):
        raise OptionError(
            "mode='fast' cannot be predicted: on a CPU, what generated kernels take for themselves is known when they "
            "are compiled. Compile the step, run it a few times and read its report, or predict with mode='exact'."
        )


def _card(device: str | None, gpu: str | None) -> Gpu | None:
    """The GPU that is meant; None for the CPU."""
    if device not in (None, "cpu", "cuda"):
        raise OptionError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if gpu is None:
        if device == "cuda":
            raise OptionError(f"device='cuda' needs gpu=: the name of one of {', '.join(GPUS)}")
        return None
    if device == "cpu":
        raise OptionError(f"gpu={gpu!r} belongs to device='cuda', got device='cpu'")
    return gpu_named(gpu)


def largest_batch(
    make_case: MakeCase,
    memory: str | int | None = None,
    *,
    memory_mode: str = "auto",
    mode: str = "auto",
    device: str | None = None,
    gpu: str | None = None,
    most: int = 1 << 20,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """The largest n for which the compiled step of `make_case(n)` peaks at no more than `memory`: 24 GiB, or with `gpu`
    what that has. `memory_mode`: the `memory=` of that step ("auto", "min" or "keep"), or "eager" for the step as it is
    without takeback. `mode`, `device` and `gpu` are those of `predict`.

    `make_case(n)` returns (model, loss_fn, optimizer, batch) for a batch of n. The peak is taken to grow with n; it is
    predicted at a handful of sizes, chosen by a straight line through the last two. `progress(n, peak_bytes)` is called
    for each. Raises `OptionError` if not even n = 1 fits.
    """
    card = _card(device, gpu)
    budget = parse_bytes("24GiB") if card is None else card.usable_bytes
    if memory is not None:
        budget = parse_bytes(memory)
    if memory_mode not in ("eager", "auto", "min", "keep"):
        raise OptionError(f"memory_mode must be 'eager', 'auto', 'min' or 'keep', got {memory_mode!r}")
    in_eager = memory_mode == "eager"

    def peak(n: int) -> int:
        case = make_case(n)
        model, loss_fn, optimizer, batch = (
            case if isinstance(case, tuple) else (case.model, case.loss_fn, case.optimizer, case.batch)
        )
        arguments = batch if isinstance(batch, tuple | list) else (batch,)
        report = predict(
            model,
            loss_fn,
            optimizer,
            *arguments,
            mode="exact" if in_eager else mode,
            memory="keep" if in_eager else memory_mode,
            device=device,
            gpu=gpu,
        )
        found = report.eager_peak_bytes if in_eager else report.peak_bytes
        if progress is not None:
            progress(n, found)
        return found

    fits, fits_bytes = 1, peak(1)
    if fits_bytes > budget:
        raise OptionError(
            f"a batch of 1 peaks at {fits_bytes:,} bytes ({memory_mode}), more than {budget:,}. "
            f"Make the model smaller, or give it more memory."
        )
    guess = 2
    too_large = most + 1
    while too_large - fits > 1:
        n = min(max(guess, fits + 1), too_large - 1)
        found = peak(n)
        slope = max((found - fits_bytes) / (n - fits), 1.0)
        if found <= budget:
            fits, fits_bytes = n, found
        else:
            too_large = n
        line = fits + int((budget - fits_bytes) / slope)
        # Where the line does not narrow the gap by itself, halve it.
        guess = line if fits < line < too_large else (fits + too_large) // 2
        if found <= budget and line <= fits:
            guess = fits + 1
    return fits

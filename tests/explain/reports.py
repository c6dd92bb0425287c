"""A small report made by hand, the same on every machine; and one of a zoo case."""

from __future__ import annotations

import dataclasses
from functools import cache

from takeback import compile_step, zoo
from takeback.compiler.explain.advice import OF_COPIES, OF_PEAK, Advice, Tip
from takeback.compiler.explain.kernels import KernelAccount, KernelOp
from takeback.compiler.explain.ledger import Entry, Fate
from takeback.compiler.explain.plans import PlanAccount
from takeback.compiler.explain.report import Measured, Report
from takeback.compiler.passes.draft import Refusal
from takeback.compiler.program import BufferId, Site
from takeback.compiler.run.spent import Spent

MIB = 1 << 20


def fixed_report() -> Report:
    """Three ops: a product, an activation written onto it, a copy; one request that leaves the arena."""
    line = "/home/somebody/with a/very/long/folder/" + "x" * 60 + "/train.py:66"
    return Report(
        peak_bytes=9 * MIB,
        eager_peak_bytes=12 * MIB,
        resident_bytes=4 * MIB,
        lower_bound_bytes=5 * MIB,
        arena_bytes=5 * MIB,
        allocations_per_step=2,
        copied_bytes=MIB + 4,
        ledger=(
            Entry("%9", MIB, Fate.MOVED, "clone", line, "eager copies %4 here; its bytes are handed on"),
            Entry(
                "%5", 2 * MIB, Fate.PLACED, "mm", line, "its bytes are its own", 0, 0, 2, "%5", "layers.3", "activation"
            ),
            Entry(
                *("%6", 2 * MIB, Fate.OVERWRITTEN, "relu", line, "written onto %5, which dies here"),
                *(0, 1, 3, "%5", "layers.3.mlp", "activation"),
            ),
            Entry(
                *("scratch", 2 * MIB, Fate.SCRATCH, "relu", line, "taken inside the op"),
                *(2 * MIB, 1, 2, "s", "layers.3.mlp", "scratch"),
            ),
            Entry(
                *("%7", MIB, Fate.COPIED, "_to_copy", "", "the program converts float32 to bfloat16"),
                *(4 * MIB, 1, 3, "%7", "", "gradient"),
            ),
            Entry("scratch", 64, Fate.PASSED, "relu", line, "outlives its op inside torch"),
            Entry("loss", 4, Fate.COPIED, "clone", "", "returned to the caller, so it must outlive the arena"),
        ),
        refusals=(
            Refusal(
                "overwrite", "mm", BufferId(5), 2 * MIB, "the operand is read again later", Site(line[:-3], 66, "f")
            ),
            Refusal("overwrite", "add", BufferId(8), MIB, "the operand is read again later"),
            Refusal("plan the update", "MyAdam", BufferId(1), 0, "its step() is not one of torch's"),
        ),
        resident={"parameter": 3 * MIB, "batch": MIB},
        ops=3,
        eager_peak_at=f"relu {line}",
        peak_curve=(2 * MIB, 5 * MIB, 3 * MIB),
        eager_curve=(2 * MIB, 8 * MIB, 4 * MIB, 2 * MIB),
        measured=Measured(2, 0, 0, 1, 0, 0, 0),
        placed=True,
        notes=("a note that is long enough to need a second line because it says a lot about very little",),
        step_s=0.2,
        added_s=0.005,
        rebuilt_ops=1,
        plans=(
            PlanAccount("input_ids 16x128, labels 16", 9 * MIB, Spent(1.23, 0.5, 2.0, 100.4, 12.34, 0.04), 1234, "yes"),
            PlanAccount("7x128, 7", 900 * MIB, Spent(recording_s=0.3), 0, "no"),
        ),
        loading_s=9.06,
        title='Net, batch 16x128, memory="auto" on cpu',
        torch_version="2.0",
        advisor=lambda: ADVICE,
    )


ADVICE = Advice(
    (
        Tip('memory="min"', 3 * MIB, OF_PEAK, 0.041, "runs 2 ops again in the backward"),
        Tip("train.py:66", MIB, OF_COPIES, None, "_to_copy: the program converts float32 to bfloat16"),
    )
)


def with_kernels(report: Report) -> Report:
    """As if the report were of mode fast: two kernels, one of which was given up, and ops that stayed out."""
    line = "/home/somebody/train.py:"
    ops = (KernelOp("add.Tensor", line + "12", "layers.3"), KernelOp("native_layer_norm", line + "14", "layers.3.norm"))
    many = tuple(KernelOp("mul.Tensor", line + "20", "head") for _ in range(60))
    return dataclasses.replace(
        report,
        mode="fast",
        kernels=(
            KernelAccount(
                *("cluster[add.Tensor, native_layer_norm]", 7, ops, ("layers.*", "layers.*.norm"), 3 * MIB, MIB),
                generated=True,
                why="",
            ),
            KernelAccount(
                *("cluster[mul.Tensor]", 1, many, ("head",), MIB, 4),
                generated=False,
                why="it could not be compiled (Error: no compiler)",
            ),
        ),
        refusals=(
            *report.refusals,
            Refusal("fuse", "addmm", BufferId(5), 2 * MIB, "it computes more than it moves", Site(line[:-1], 30, "f")),
            Refusal("fuse", "mm", BufferId(6), 3 * MIB, "it computes more than it moves"),
        ),
    )


def planted(text: str) -> Report:
    """The fixed report with `text` for every name that comes from the user."""
    report = fixed_report()
    site = Site(text, 1, text, text)
    return dataclasses.replace(
        report,
        ledger=tuple(
            dataclasses.replace(e, value=text, op=text, line=text, reason=text, module=text) for e in report.ledger
        ),
        refusals=(
            *(dataclasses.replace(r, op=text, reason=text, decision=text, site=site) for r in report.refusals),
            Refusal("fuse", text, BufferId(5), MIB, text, site),
        ),
        resident={text: 1},
        eager_peak_at=text,
        notes=(text,),
        plans=tuple(dataclasses.replace(plan, made_for=text) for plan in report.plans),
        title=text,
        kernels=(KernelAccount(text, 2, (KernelOp(text, text, text),), (text,), MIB, 4, generated=False, why=text),),
        advisor=lambda: Advice(tuple(dataclasses.replace(tip, do=text, why=text) for tip in ADVICE.tips)),
        torch_version=text,
    )


@cache
def zoo_report(name: str) -> Report:
    """What three steps of a small zoo case report."""
    case = zoo.case(name)
    step = compile_step(case.model, case.loss_fn, case.optimizer)
    for _ in range(3):
        step(*case.batch)
    return step.report()

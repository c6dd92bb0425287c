"""The report as text: a golden of a fixed report, 80 columns for every model, figures that agree with the ledger."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import pairwise

import pytest
import torch
from expecttest import assert_expected_inline
from reports import MIB, fixed_report, planted, zoo_report
from torch import nn

from takeback import compile_step, predict, zoo
from takeback.compiler.explain.advice import Advice
from takeback.compiler.explain.ledger import Entry, Fate
from takeback.compiler.explain.text import (
    IN_UPDATE,
    at_peak,
    peak_position,
    refusal_groups,
    short_batch,
    short_line,
    show_bytes,
)
from takeback.compiler.ownership.facts import Refused
from takeback.compiler.passes.draft import Overwrites


def test_value_is_called_overwritten_where_its_plan_overwrites() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
    step = compile_step(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters()), memory="keep")
    step(torch.randn(4, 6))
    layout = step._plans[0].executor.layout
    grads = {f"%{r.buffer}" for r in (layout.program.slices or layout.program.grads).values()}
    planned = {f"%{b}" for b, where in layout.draft.placements.items() if isinstance(where, Overwrites)} - grads
    called = {e.value for e in step.report().ledger if e.fate is Fate.OVERWRITTEN}
    assert called == planned != set()


def test_text_of_a_fixed_report() -> None:
    assert_expected_inline(
        str(fixed_report()),
        """\
Net, batch 16x128, memory="auto" on cpu

                              takeback         eager     ratio
peak                          9.00 MiB     12.00 MiB     0.75x
  above resident              5.00 MiB      8.00 MiB     0.62x
  resident                    4.00 MiB
    parameter                 3.00 MiB
    batch                     1.00 MiB
arena                         5.00 MiB    lower bound 5.00 MiB, 1.00x
allocations per step                 2    1 returned, 1 inside ops
copied per step               1.00 MiB
run again per step                1 op    2.5 % more time, predicted
eager peaks in relu at train.py:66; 3 ops in the plan

-- What makes the peak ---------------------------------------------------------
parameters                                  3.00 MiB  33 %  ####################
batch                                       1.00 MiB  11 %  #######
activations: layers.*.mlp                   2.00 MiB  22 %  #############
scratch                                     2.00 MiB  22 %  #############
gradients                                   1.00 MiB  11 %  #######

-- What you can do -------------------------------------------------------------
report.advice, or takeback explain, plans other settings and says what each
would save and cost.

-- Plans, and the seconds that making each took --------------------------------
for                       peak record choose  place  write  prove replays proved
16x128, 16            9.00 MiB    1.2    100   12.3    0.0    0.5   1,234    yes
7x128, 7            900.00 MiB    0.3    0.0    0.0    0.0    0.0       0     no
once, and then in the cache: native code 9.1 s, measuring this machine 2.0 s

-- Fates -----------------------------------------------------------------------
fate          values       bytes
moved              1    1.00 MiB   eager copies it; here the bytes are handed on
overwritten        1    2.00 MiB   written onto an operand that dies
placed             1    2.00 MiB   has bytes of its own
copied             2    1.00 MiB   copied, for the reasons below
scratch            1    2.00 MiB   taken inside an op
passed             1        64 B   taken inside an op, from malloc

-- Largest values at the peak (op 1 of 3) --------------------------------------
value    op        module or line  fate            bytes
%6       relu      layers.3.mlp    overwritten  2.00 MiB
scratch  relu      layers.3.mlp    scratch      2.00 MiB
%7       _to_copy  -               copied       1.00 MiB

-- Copies ----------------------------------------------------------------------
     1 x    1.00 MiB  the program converts float32 to bfloat16 (%7 by _to_copy)
     1 x         4 B  returned to the caller, so it must outlive the arena (loss
                      by clone)

-- Refusals --------------------------------------------------------------------
     2 x    3.00 MiB  overwrite: the operand is read again later (largest: mm at
                      train.py:66)
     1 x         0 B  plan the update: its step() is not one of torch's (MyAdam)

note: a note that is long enough to need a second line because it says a lot
      about very little""",
    )


def test_text_has_the_tips_once_they_were_asked_for() -> None:
    report = fixed_report()
    assert len(report.advice.tips) == 2
    assert """\
-- What you can do -------------------------------------------------------------
memory="min"                -3.00 MiB of the peak, for 4.1 % more time
    runs 2 ops again in the backward
train.py:66                 -1.00 MiB copied per step
    _to_copy: the program converts float32 to bfloat16

""" in str(report)
    assert [tip["do"] for tip in json.loads(report.to_json())["tips"]] == ['memory="min"', "train.py:66"]
    assert json.loads(fixed_report().to_json())["tips"] is None
    quiet = dataclasses.replace(report, advisor=Advice)
    assert not quiet.advice.tips
    assert "No other setting was found" in str(quiet)
    assert "What you can do" not in str(dataclasses.replace(report, advisor=None))


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_text_of_a_zoo_report_fits_80_columns_and_is_plain(name: str) -> None:
    text = str(zoo_report(name))
    assert max(map(len, text.splitlines())) <= 80
    assert text.isascii()
    assert "\x1b" not in text
    assert "/" not in text.split("-- Fates")[0]
    assert text == str(zoo_report(name))


@pytest.mark.parametrize("text", ["x" * 300, "/a/b c/" * 40 + "f.py:1", "two\nlines\x1b[31m", "", "größer 大"])
def test_text_fits_80_columns_whatever_the_names(text: str) -> None:
    lines = str(planted(text)).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("\x1b" in line for line in lines)


def test_text_says_that_nothing_was_replayed_or_counted() -> None:
    report = fixed_report()
    assert "predicted" in str(dataclasses.replace(report, measured=None))
    assert "not counted" in str(dataclasses.replace(report, placed=False))


def test_text_of_an_empty_plan() -> None:
    empty = dataclasses.replace(
        fixed_report(), ledger=(), refusals=(), peak_curve=(), eager_curve=(), resident={}, notes=(), eager_peak_at=""
    )
    assert "Fates" not in str(empty)


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_values_at_the_peak_never_own_a_byte_twice(name: str) -> None:
    report = zoo_report(name)
    spans = sorted((e.offset_bytes or 0, (e.offset_bytes or 0) + e.size_bytes) for e in at_peak(report))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert sum(end - start for start, end in spans) <= report.arena_bytes


def test_bytes_that_change_hands_at_the_peak_belong_to_the_later_value() -> None:
    assert peak_position(fixed_report()) == 1
    assert [(e.value, e.fate) for e in at_peak(fixed_report())] == [
        ("%6", Fate.OVERWRITTEN),
        ("scratch", Fate.SCRATCH),
        ("%7", Fate.COPIED),
    ]


def test_refusals_beyond_the_largest_groups_are_summed() -> None:
    report = fixed_report()
    many = tuple(dataclasses.replace(report.refusals[0], reason=f"reason {i}", size_bytes=MIB) for i in range(20))
    assert "and 12 more refused for 12 other reasons: 12.00 MiB" in str(dataclasses.replace(report, refusals=many))


def test_refusals_of_the_update_come_last_and_say_where_they_are() -> None:
    report = fixed_report()
    reason = Refused.BORROWED
    update = dataclasses.replace(report.refusals[0], op="sqrt", reason=reason, size_bytes=99 * MIB, site=None)
    users = dataclasses.replace(report.refusals[0], op="mul", reason=reason, size_bytes=MIB)
    groups = refusal_groups(dataclasses.replace(report, refusals=(update, users, *report.refusals)))
    assert [(g.count, g.example) for g in groups] == [
        (2, "mm at train.py:66"),
        (1, "mul at train.py:66"),
        (1, "MyAdam"),
        (1, "sqrt in the optimizer's update"),
    ]


def test_eager_may_peak_in_the_update() -> None:
    report = dataclasses.replace(fixed_report(), eager_peak_at=f"sqrt {IN_UPDATE}")
    assert "eager peaks in sqrt in the optimizer's update; 3 ops" in str(report)


def test_text_says_nothing_of_rebuilding_where_there_is_none() -> None:
    assert "run again" not in str(dataclasses.replace(fixed_report(), rebuilt_ops=0, added_s=0.0))


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_ops_that_are_run_again_are_those_of_the_plan_beyond_the_kept_one(name: str) -> None:
    case = zoo.case(name)
    kept = predict(case.model, case.loss_fn, case.optimizer, *case.batch, memory="keep")
    report = zoo_report(name)
    assert kept.rebuilt_ops == kept.added_s == 0
    assert 0 < report.added_s < report.step_s
    # A batch norm is run again with two small ops that prepare it.
    norms = sum(e.fate is Fate.RECOMPUTED and e.op.startswith("ones_like") for e in report.ledger)
    assert report.rebuilt_ops == report.ops - kept.ops - 2 * norms


def test_text_of_a_gpt_says_what_is_rebuilt() -> None:
    text = str(zoo_report("gpt"))
    assert re.search(r"run again per step +\d+ ops? +\d\.\d % more time, predicted", text)
    assert "dropped over the peak, and made again here" in text
    assert "in the optimizer's update" in text


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_peak_of_a_tiny_step_is_not_above_eagers(rows: int) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_step(model, lambda m, x, y: nn.functional.cross_entropy(m(x), y), optimizer)
    for _ in range(3):
        step(torch.randn(rows, 32), torch.randint(10, (rows,)))
    assert step.report().peak_bytes <= step.report().eager_peak_bytes


def test_every_fate_has_a_meaning() -> None:
    entries = tuple(Entry("%1", 1, fate, "op", "", "") for fate in Fate)
    text = str(dataclasses.replace(fixed_report(), ledger=entries))
    assert all(fate.value in text for fate in Fate)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (MIB - 1, "1.00 MiB"),
        (MIB, "1.00 MiB"),
        (5 << 30, "5.00 GiB"),
        (3 << 40, "3.00 TiB"),
    ],
)
def test_bytes_have_sensible_units(size: int, text: str) -> None:
    assert show_bytes(size) == text


@pytest.mark.parametrize("line", ["/a/b/file.py:66", r"C:\a\file.py:66", "file.py:66"])
def test_a_line_is_shown_without_its_folder(line: str) -> None:
    assert short_line(line) == "file.py:66"


# -- the plans of a step -------------------------------------------------------------------------------------------


def test_a_step_accounts_for_each_of_its_plans_the_last_used_first() -> None:
    model = nn.Linear(6, 2)
    step = compile_step(model, lambda m, x, y: (m(x) - y).square().mean(), torch.optim.SGD(model.parameters()))
    for rows in (4, 8, 4, 4):
        step(torch.randn(rows, 6), torch.randn(rows, 2))
    small, large = step.report().plans
    assert (small.made_for, small.replays, small.proved) == ("4x6, 4x2", 2, "yes")
    assert (large.made_for, large.replays, large.proved) == ("8x6, 8x2", 0, "family")
    assert small.peak_bytes == step.report().peak_bytes < large.peak_bytes
    for plan in (small, large):
        spent = plan.spent
        assert min(spent.recording_s, spent.choosing_s, spent.placing_s, spent.writing_s) > 0
        assert (spent.proving_s > 0) == (plan is small), "of siblings one is enough"
    text = str(step.report())
    assert re.search(r"^4x6, 4x2 +\d+.* 2    yes$", text, re.MULTILINE)
    assert re.search(r"^8x6, 8x2 +\d+.* 0 family$", text, re.MULTILINE)
    assert "proving_s" in step.report().to_json()


def test_proving_counts_the_first_replays_and_no_later_ones() -> None:
    model = nn.Linear(6, 2)
    step = compile_step(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters()), verify_every=1)
    x = torch.randn(4, 6)
    step(x)
    recorded = step.report().plans[0].spent
    while step.report().plans[0].proved == "no":
        step(x)
    proved = step.report().plans[0].spent
    assert proved.proving_s > recorded.proving_s
    assert proved == dataclasses.replace(recorded, proving_s=proved.proving_s)
    step(x)
    assert step.report().plans[0].spent == proved


def test_a_prediction_has_no_plans_to_show() -> None:
    model = nn.Linear(6, 2)
    report = predict(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters()), torch.randn(4, 6))
    assert report.plans == ()
    assert "-- Plans" not in str(report)


@pytest.mark.parametrize(
    ("made_for", "short"),
    [
        ("16x128, 16", "16x128, 16"),
        ("input_ids 16x128, attention_mask 16x128, labels 16", "16x128, 16"),
        ("x 4x6, scale 0.5", "x 4x6, scale 0.5"),
    ],
)
def test_a_batch_that_is_too_long_for_its_column_keeps_its_shapes(made_for: str, short: str) -> None:
    assert short_batch(made_for, 19) == short

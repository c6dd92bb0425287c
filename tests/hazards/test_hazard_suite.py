"""The hazard suite can fail: plain torch is right on it, ops broken on purpose are WRONG on what exposes them.

A hazard that no saboteur falls for shows nothing, so each is caught by one or named in CONTROLS with its reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hazard_saboteurs import SABOTEURS, Plain
from torch import Tensor, nn

from takeback.hazards import HAZARDS, OpUnderTest, Outcome, Trial, Verdict, compare, judge, run
from takeback.hazards.inputs import SAVES_ITS_RESULT
from takeback.hazards.outputs import HOLDS

QUICK = [each.name for each in HAZARDS if not each.slow]
ON_GPU = {name for name in QUICK if name.startswith(("two streams", "CUDA graph"))} | {"autocast, float16"}
BY_NAME = {each.name: each for each in HAZARDS}

# Graphs on which torch itself keeps readers apart, by order or by a copy: here to be right, as in any first test.
CONTROLS = {
    "plain chain",
    "mean().backward()",  # torch divides after expanding: a fresh tensor
    "x + y: the other reads the gradient before the op",  # the order that hides the bug
    "x + y: a leaf takes the gradient",  # AccumulateGrad copies what others have too
    "y + y",  # the engine adds into a fresh tensor, here and in the next
    "two losses in one backward",
    "tensor hook replaces the output's gradient",
    "post-accumulate hooks",
    "retain_grad of the output",  # torch keeps a copy
    "retain_grad of the input",
    "the output has several readers",  # all of them run before the op
    "the output's reader saved it",
    "y * y",
    "detach() branch",
    "input is a view",
    "autograd.grad with an unused input",
    "an error in the middle of backward, then another step",
    "inference_mode, weights made there too",
    "torch.func.grad",  # refuses Functions of the old form, as does the next
    "forward-mode differentiation",
}

# What each must be caught by, at least: the failures that were reported of the ops it imitates, and their kin.
CAUGHT: dict[str, set[str]] = {
    "OverwritesGradient": {
        "sum().backward()",
        "gradient expanded over the first dimension",
        "gradient expanded over the last dimension",
        "gradient passed to backward",
        "gradient passed to backward, expanded",
        "gradient passed to backward, strided",
        "gradient passed to backward, overlapping",
        "x + y: the other reads the gradient after the op",
        "two ops in a row, sum().backward()",
    },
    "OverwritesDenseGradient": {
        "gradient is a slice of the user's",
        "gradient passed to backward",
        "gradient passed to autograd.grad",
        "gradient passed to backward, through an add",
        "x + y: the other reads the gradient after the op",
        "x + y: the other has a view of the gradient",
        "x + y: a leaf's .grad is a view of the gradient",
        "x + y: the op on both sides",
        "residual around the op",
        "residual around two ops in a row",
        "gradient is another node's saved tensor",
        "another node keeps the gradient it hands on",
        "tensor hook keeps the output's gradient",
        "tensor hook keeps the gradient between two ops",
        "tensor hook hands in the user's tensor",
        "node prehook keeps the gradient",
        "node hook keeps what came in",
        "multi-grad hook keeps gradients",
        "module full backward hook",
        "module full backward pre-hook",
        "create_graph, without a double backward",
        "two threads, one module",
        "checkpoint, use_reentrant=False, the op inside",
        "checkpoint, use_reentrant=True, the op last",
    },
    "OverwritesOutput": {
        *(f"the user holds {form}" for form in HOLDS),
        "a later backward reads the output",
        "a later backward reads a view of the output",
        "retain_graph, then a second backward",
        "two losses",
        "an error in the middle of backward, then again",
        "save_on_cpu",
        "saved-tensor hooks that keep what was packed",
        "saved-tensor hooks that pack a copy, twice unpacked",
        "eval()",
        "frozen parameters",
        "autocast, bfloat16",
    },
    "WritesInput": {
        *(f"input from {name}, which saved it" for name in SAVES_ITS_RESULT),
        "the user holds the input from before the op",
        "input read before by a product that saved it",
        "input read again later",
        "input is the caller's batch",
        "input is a leaf that requires a gradient",
        "no_grad around the op",
        "no_grad inside a graph",
        "inference_mode",
        "checkpoint, use_reentrant=False, the op first",
        "checkpoint, use_reentrant=True, the op first",
    },
    "PastSaving": {
        "second backward without retain_graph",
        "create_graph and a double backward",
        "the user writes the output in place",
        "the user writes a view of the output in place",
        "weights changed between forward and backward",
    },
    "SharesWorkspace": {
        "two forwards, then two backwards",
        "one module twice in a graph",
        "two ops in a row",
        "diamond",
        "accumulation over two forward passes",
        "gradients of two steps, the first ones held",
        "tensor hook keeps the input's gradient",
        "deepcopy of the module between forward and backward",
    },
    "PopsState": {
        "the output is never read",
        "the user writes the input in place after the op",
        "two forwards, then two backwards in reverse",
        "an error before the op's backward, then another step",
    },
    "IgnoresStrides": {
        "gradient transposed",
        "gradient is a slice, by cat",
        "gradient is a slice, by stack",
        "input is transposed",
        "input is every other column, the whole is read later",
        "input is a slice of rows, the rest is read",
    },
    "ForgetsEdges": {"empty batch", "NaN in the input"},
    "OverwritesInputs": {
        *(f"input from {name}, which saved it" for name in SAVES_ITS_RESULT),
        "the user holds the input",
        "the user holds a view of the input",
        "input read before, through detach()",
        "one input, two ops",
        "inputs are the chunks of one tensor, dimension 0",
        "inputs are the chunks of one tensor, dimension -1",
        "one tensor as all inputs",
        "input is a leaf that requires a gradient",
        "one of several inputs requires a gradient",
        "an input borrows the bytes of a numpy array",
        "retain_graph, then a second backward",
    },
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, Outcome]]:
    return {subject.name: run(subject, quick=True) for subject in SABOTEURS}


def names(outcomes: dict[str, Outcome], *verdicts: Verdict) -> set[str]:
    return {name for name, outcome in outcomes.items() if outcome.verdict in verdicts}


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(8), nn.LeakyReLU(0.1))


@pytest.mark.parametrize("make", [normed, partial(nn.LayerNorm, 8)], ids=["BatchNorm1d", "LayerNorm"])
def test_plain_torch_is_right_and_raises_only_where_it_must(make: Any) -> None:
    outcomes = run(OpUnderTest("plain", make, make), quick=True)
    assert names(outcomes, Verdict.WRONG) == set()
    must_raise = {"second backward without retain_graph", "weights changed between forward and backward"}
    must_raise |= {"the user writes the input in place after the op"}
    assert names(outcomes, Verdict.RAISED) == must_raise
    several = {name for name in QUICK if name.startswith("inputs are the chunks")}
    several |= {"one tensor as all inputs", "one of several inputs requires a gradient"}
    several |= {"an input borrows the bytes of a numpy array"}
    assert names(outcomes, Verdict.SKIPPED) == several | ON_GPU


def test_torchs_own_in_place_op_is_wrong_only_where_nothing_protects_its_input() -> None:
    subject = OpUnderTest(
        "leaky_relu_", partial(nn.LeakyReLU, 0.1, True), partial(nn.LeakyReLU, 0.1), writes_input=True
    )
    outcomes = run(subject, quick=True)
    assert names(outcomes, Verdict.WRONG) == {
        "input overlaps itself",
        "checkpoint, use_reentrant=False, the op last",  # there tanh's saved result has no version to check
    }
    assert "input from exp, which saved it" in names(outcomes, Verdict.RAISED)
    assert "input read again later" in names(outcomes, Verdict.RIGHT)


@pytest.mark.parametrize("name", CAUGHT)
def test_saboteur_passes_an_ordinary_test_and_is_caught(name: str, table: dict[str, dict[str, Outcome]]) -> None:
    assert table[name]["plain chain"].verdict is Verdict.RIGHT
    wrong = names(table[name], Verdict.WRONG)
    assert CAUGHT[name] <= wrong, f"not caught: {CAUGHT[name] - wrong}"
    for each in CAUGHT[name]:
        assert table[name][each].error > 0
        assert table[name][each].detail


def test_every_hazard_is_caught_with_some_saboteur(table: dict[str, dict[str, Outcome]]) -> None:
    caught = set().union(*(names(outcomes, Verdict.WRONG) for outcomes in table.values()))
    assert set(QUICK) - caught - ON_GPU == CONTROLS


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_saboteur_is_caught_when_compiled(backend: str) -> None:
    outcome = judge(BY_NAME[f"torch.compile, {backend}"], SABOTEURS[0], "cpu")
    assert outcome.verdict in (Verdict.WRONG, Verdict.SKIPPED), outcome
    assert outcome.verdict is Verdict.WRONG or outcome.detail == "no C++ compiler"


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(HAZARDS)


# -- the judge ---------------------------------------------------------------------------------------------------------


class Refuses(Plain):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not on a Sunday\nnor on a Monday")


def test_error_is_an_outcome_with_its_first_line() -> None:
    outcome = judge(BY_NAME["plain chain"], OpUnderTest("refuses", Refuses, Plain), "cpu")
    assert outcome == Outcome(Verdict.RAISED, "RuntimeError: not on a Sunday")


def test_error_in_the_plain_form_skips_the_hazard() -> None:
    outcome = judge(BY_NAME["plain chain"], OpUnderTest("backwards", Plain, Refuses), "cpu")
    assert outcome.verdict is Verdict.SKIPPED
    assert "plain torch raises RuntimeError: not on a Sunday" in outcome.detail


class OverwriteError(RuntimeError):
    """By its name, what takeback.guard() raises."""


def test_error_of_the_guard_is_told_from_the_ops_own() -> None:
    @contextlib.contextmanager
    def guard() -> Iterator[None]:
        yield
        raise OverwriteError("dx was written onto a gradient that AddBackward0 handed to MulBackward0 too")

    subject = OpUnderTest("plain", Plain, Plain)
    assert judge(BY_NAME["plain chain"], subject, "cpu", guard).guard
    assert not judge(BY_NAME["plain chain"], OpUnderTest("refuses", Refuses, Plain), "cpu").guard


def trials(**values: Any) -> tuple[Trial, Trial]:
    plain, ours = (Trial(OpUnderTest("s", Plain, Plain), torch.device("cpu"), plain=p) for p in (True, False))
    plain.seen["t"], ours.seen["t"] = values["expected"], values["found"]
    return plain, ours


@pytest.mark.parametrize(
    ("expected", "found", "right"),
    [
        (torch.ones(3), torch.ones(3), True),
        (torch.ones(3), torch.ones(3) + 1e-4, True),
        (torch.ones(3), torch.ones(3) + 1e-2, False),
        (torch.zeros(3), torch.zeros(3) + 1e-5, True),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), False),
        (torch.ones(3), torch.ones(1, 3), False),
        (torch.ones(3), torch.tensor([1.0, float("nan"), 1.0]), False),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.ones(3), None, False),
        (None, torch.zeros(3), False),
        (None, None, True),
        (torch.empty(0), torch.empty(0), True),
    ],
)
def test_comparison(expected: Tensor | None, found: Tensor | None, right: bool) -> None:
    assert (compare(*trials(expected=expected, found=found)).verdict is Verdict.RIGHT) is right


def test_what_the_user_holds_must_keep_its_bits() -> None:
    plain, ours = trials(expected=None, found=None)
    value = torch.ones(3)
    ours.keep("value", value)
    value[1] += 1e-6
    outcome = compare(plain, ours)
    assert outcome.verdict is Verdict.WRONG
    assert "value was changed" in outcome.detail

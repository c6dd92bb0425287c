"""takeback's own in-place layers as `OpUnderTest`s, each beside what torch has for the same; and where they may raise.

`OURS` are the subjects. `failures` is what is left of an outcome table after that: it must be empty.
"""

from __future__ import annotations

import re
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from takeback.hazards import OpUnderTest, Outcome, Verdict
from takeback.nn import GELU, InPlaceABN, InPlaceLayerNorm, InPlaceRMSNorm, SwiGLU, inplace_abn

BOTH = (torch.bfloat16, torch.float16)
ACTIVATIONS = {
    "identity": nn.Identity,
    "leaky_relu": partial(nn.LeakyReLU, 0.01),
    "elu": nn.ELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}
PARAMS = {"elu": 1.0}


def batch_norm(activation: str, channels: int, dims: int) -> nn.Module:
    norm = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[dims](channels)
    return nn.Sequential(norm, ACTIVATIONS[activation]())


def abn(activation: str, channels: int) -> nn.Module:
    return InPlaceABN(channels, activation=activation, activation_param=PARAMS.get(activation, 0.01))


class Functional(nn.Module):
    """`inplace_abn` with parameters and no running statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return inplace_abn(x, self.weight, self.bias, None, None, activation="leaky_relu", activation_param=0.2)


class PlainFunctional(Functional):
    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(F.batch_norm(x, None, None, self.weight, self.bias, True), 0.2)


class PlainSwiGLU(nn.Module):
    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        if up is None:
            gate, up = gate.chunk(2, -1)
        return F.silu(gate) * up


def _abn(activation: str, shape: tuple[int, ...]) -> OpUnderTest:
    name = f"InPlaceABN, {activation}, {len(shape)}d"
    make, plain = partial(abn, activation, shape[1]), partial(batch_norm, activation, shape[1], len(shape))
    return OpUnderTest(name, make, plain, (shape,), writes_input=True, autocast=BOTH)


OURS = [
    *(_abn(activation, (6, 8)) for activation in ACTIVATIONS),
    *(_abn(activation, (4, 3, 5, 2)) for activation in ("leaky_relu", "relu")),
    OpUnderTest("inplace_abn", partial(Functional, 8), partial(PlainFunctional, 8), writes_input=True, autocast=BOTH),
    OpUnderTest("InPlaceLayerNorm", partial(InPlaceLayerNorm, 8), partial(nn.LayerNorm, 8), autocast=BOTH),
    OpUnderTest("InPlaceRMSNorm", partial(InPlaceRMSNorm, 8), partial(nn.RMSNorm, 8), ((3, 5, 8),), autocast=BOTH),
    OpUnderTest("SwiGLU(gate, up)", SwiGLU, PlainSwiGLU, ((6, 8), (6, 8)), autocast=BOTH),
    OpUnderTest("SwiGLU(x)", SwiGLU, PlainSwiGLU, ((6, 8),), autocast=BOTH),
    OpUnderTest("GELU", GELU, nn.GELU, autocast=BOTH),
    OpUnderTest("GELU, tanh", partial(GELU, approximate="tanh"), partial(nn.GELU, approximate="tanh"), autocast=BOTH),
]

MODIFIED = "modified by an inplace operation"
# Where an error is an answer, and which.
MAY_RAISE = {
    "second backward without retain_graph": "backward through the graph a second time",
    "create_graph and a double backward": "differentiate twice",
    "weights changed between forward and backward": MODIFIED,
    "the user writes the output in place": MODIFIED,
    "the user writes a view of the output in place": MODIFIED,
    "the user writes the output's detach() in place": MODIFIED,
    "the user writes the input in place after the op": MODIFIED,
    "torch.func.grad": "functorch transforms",
    "forward-mode differentiation": "forward AD|forward mode|jvp",
}
# Only where calling the op gives up its input.
MAY_RAISE_IF_INPUT_IS_GIVEN_UP = {
    "input read before by a product that saved it": MODIFIED,
    "input read before, through a view": MODIFIED,
    "input read before, through detach()": MODIFIED,
    "checkpoint, use_reentrant=False, the op first": MODIFIED,
    "no_grad inside a graph": MODIFIED,
}


def failures(subject: OpUnderTest, outcomes: dict[str, Outcome]) -> dict[str, str]:
    """What is wrong, raised without leave, or skipped because plain torch fails: that would be the suite's fault."""
    may_raise = MAY_RAISE | (MAY_RAISE_IF_INPUT_IS_GIVEN_UP if subject.writes_input else {})
    found = {}
    for name, outcome in outcomes.items():
        if outcome.verdict is Verdict.RAISED and name in may_raise:
            fine = re.search(may_raise[name], outcome.detail) is not None
        elif outcome.verdict is Verdict.SKIPPED:
            fine = "plain torch raises" not in outcome.detail or "memory descriptor" in outcome.detail  # oneDNN's gelu
        else:
            fine = outcome.verdict is Verdict.RIGHT
        if not fine:
            found[name] = str(outcome)
    return found

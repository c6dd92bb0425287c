"""A program in; where it makes logits as a whole, takes their cross-entropy and goes back, out: what a loss in chunks
(takeback.nn.functional.linear_cross_entropy) would take the place of. What is read by anything else is not found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from takeback.compiler.program import BufferId, Op, Phase, Program, Region, Role

_MEAN, _SUM = 1, 2  #: torch's numbers for the reductions of a loss


@dataclass(frozen=True)
class LossChain:
    """One cross-entropy of hidden @ weight.T + bias: its ops, and what they read and leave behind."""

    hidden: Region  #: [rows, columns]
    weight: Region  #: [classes, columns], a parameter
    bias: Region | None
    targets: Region
    mean: bool  #: over the rows that count, or their sum
    ignore_index: int
    loss: Region
    of_loss: Region  #: the gradient that arrives
    of_hidden: Region | None  #: gradients, each None where it is not computed
    of_weight: Region | None
    of_bias: Region | None
    forward_at: int  #: the last op of the forward's part; those of the chain are all gone after it
    backward_at: int  #: the first of the backward's
    ops: frozenset[int]  #: positions


class _Uses:
    """Who writes and reads each buffer, by position."""

    def __init__(self, program: Program) -> None:
        self.ops = program.ops
        self.writers: dict[BufferId, list[int]] = {}
        self.readers: dict[BufferId, list[int]] = {}
        for i, op in enumerate(program.ops):
            for region in op.outputs:
                self.writers.setdefault(region.buffer, []).append(i)
            for buffer in dict.fromkeys(r.buffer for r in op.inputs):
                self.readers.setdefault(buffer, []).append(i)

    def maker(self, region: Region) -> int | None:
        """The op that made it, if one wrote it and nothing else did."""
        found = self.writers.get(region.buffer, [])
        return found[0] if len(found) == 1 else None

    def following(self, region: Region, name: str) -> int | None:
        """The one op of that name that reads it."""
        found = [i for i in self.readers.get(region.buffer, []) if self.ops[i].name == name]
        return found[0] if len(found) == 1 else None


def find_chains(program: Program) -> Iterator[LossChain]:
    """Each loss that could come in chunks."""
    uses = _Uses(program)
    named = {region.buffer for _, region in program.named_regions()}
    for i, op in enumerate(program.ops):
        if op.name == "nll_loss_forward":
            chain = _chain(program, uses, i)
            if chain is not None and _by_itself(chain, program, uses, named):
                yield chain


def _chain(program: Program, uses: _Uses, at: int) -> LossChain | None:
    loss_op = program.ops[at]
    logs, targets, class_weight, reduction, ignore_index = loss_op.args
    if class_weight is not None or reduction not in (_MEAN, _SUM) or not isinstance(ignore_index, int):
        return None
    if not isinstance(logs, Region) or not isinstance(targets, Region) or not targets.contiguous:
        return None
    softmax = uses.maker(logs)
    if softmax is None or program.ops[softmax].name != "_log_softmax":
        return None
    above = _above_casts(uses, program.ops[softmax])
    product = program.ops[above[-1]] if above else None
    operands = _operands(product, program) if product is not None else None
    back = uses.following(logs, "nll_loss_backward")
    if operands is None or back is None:
        return None
    hidden, weight, bias = operands
    downward = _below(uses, back, hidden, weight)
    of_loss = program.ops[back].args[0]
    if downward is None or not isinstance(of_loss, Region):
        return None
    positions, of_hidden, of_weight, of_bias = downward
    return LossChain(
        hidden=hidden,
        weight=weight,
        bias=bias,
        targets=targets,
        mean=reduction == _MEAN,
        ignore_index=ignore_index,
        loss=loss_op.outputs[0],
        of_loss=of_loss,
        of_hidden=of_hidden,
        of_weight=of_weight,
        of_bias=of_bias,
        forward_at=at,
        backward_at=back,
        ops=frozenset((*above, softmax, at, *positions)),
    )


def _above_casts(uses: _Uses, softmax: Op) -> list[int]:
    """From the softmax up over casts to the op that made the logits, which comes last."""
    found: list[int] = []
    region = softmax.args[0]
    while isinstance(region, Region) and (maker := uses.maker(region)) is not None:
        found.append(maker)
        if uses.ops[maker].name != "_to_copy":
            return found
        region = uses.ops[maker].args[0]
    return []


def _operands(product: Op, program: Program) -> tuple[Region, Region, Region | None] | None:
    """hidden, weight and bias, where they lie as a linear layer has them and the weight is a parameter."""
    if product.name == "mm":
        bias, (hidden, turned) = None, product.args
    elif product.name == "addmm" and not product.kwargs:
        bias, hidden, turned = product.args
    else:
        return None
    if not isinstance(hidden, Region) or not isinstance(turned, Region) or not hidden.contiguous:
        return None
    weight = replace(turned, shape=turned.shape[::-1], stride=turned.stride[::-1])
    is_parameter = program.buffers[weight.buffer].role is Role.PARAMETER
    if not weight.contiguous or not is_parameter or weight.dtype != hidden.dtype:
        return None  # under autocast the product's weight is a copy, and what becomes of that is not known here
    if bias is not None and not (isinstance(bias, Region) and bias.dtype == hidden.dtype and bias.contiguous):
        return None
    return hidden, weight, bias


def _below(
    uses: _Uses, back: int, hidden: Region, weight: Region
) -> tuple[list[int], Region | None, Region | None, Region | None] | None:
    """From the loss's backward down to the gradients of hidden, weight and bias."""
    softmax = uses.following(uses.ops[back].outputs[0], "_log_softmax_backward_data")
    if softmax is None:
        return None
    positions, region = [back, softmax], uses.ops[softmax].outputs[0]
    while (cast := uses.following(region, "_to_copy")) is not None:
        positions.append(cast)
        region = uses.ops[cast].outputs[0]
    of_hidden = of_weight = of_bias = None
    for i in uses.readers.get(region.buffer, []):
        op = uses.ops[i]
        if op.name == "mm" and op.args[1] == hidden:
            of_weight = op.outputs[0]
        elif op.name == "mm" and op.args[1] == weight:
            of_hidden = op.outputs[0]
        elif op.name == "sum.dim_IntList" and op.args[1] == (0,):
            of_bias = op.outputs[0]
        else:
            return None
        positions.append(i)
    return positions, of_hidden, of_weight, of_bias


def _by_itself(chain: LossChain, program: Program, uses: _Uses, named: Iterable[BufferId]) -> bool:
    """Whether nobody else reads what only the chain should, and its gradients are as those of a loss in chunks."""
    results = [r for r in (chain.of_hidden, chain.of_weight, chain.of_bias) if r is not None]
    left = {chain.loss.buffer, *(r.buffer for r in results)}
    inner = {r.buffer for i in chain.ops for r in program.ops[i].outputs} - left
    if not results or inner & set(named) or not all(r.contiguous and r.offset == 0 for r in results):
        return False
    if any(program.ops[i].phase is Phase.UPDATE for i in chain.ops):
        return False
    return all(set(uses.readers.get(b, [])) <= chain.ops and len(uses.writers[b]) == 1 for b in inner)

"""A program in; the same with its losses in chunks out, to be planned, never to be run.

The ops of a loss in chunks are not written down here: `linear_cross_entropy` is traced on fake tensors of the shapes at
hand, and its trace takes the place of the chain that it would replace in the user's code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from takeback.compiler.capture import subject as subjects
from takeback.compiler.capture.fakes import FakeWorld
from takeback.compiler.capture.leaks import disarm_
from takeback.compiler.capture.record_step import capture
from takeback.compiler.explain.loss_chain import LossChain, find_chains
from takeback.compiler.program import BufferId, Op, Phase, Program, Region
from takeback.compiler.run.allocator import Native
from takeback.compiler.run.probe import probe_scratch
from takeback.compiler.run.transaction import Transaction
from takeback.nn.linear_cross_entropy import linear_cross_entropy


def in_chunks(program: Program, native: Native | None) -> Program | None:
    """None where there is no such loss. What eager would hold of it is not known: `eager_death` is empty."""
    found = None
    while (chain := next(find_chains(program), None)) is not None:  # each leaves the others at new positions
        found = program = _replaced(program, chain, _traced(chain, program.device, native))
    return found


def operands_of(program: Program) -> str:
    """What `linear_cross_entropy` is called with after the hidden states, in the words of the user's code."""
    chain = next(find_chains(program))
    names = [program.buffers[r.buffer].name for r in (chain.weight, chain.bias) if r is not None]
    return ", ".join((f"model.{names[0]}", "targets", *(f"model.{name}" for name in names[1:])))


class _Loss(nn.Module):
    """What the chain reads, as parameters, for the gradients that it computes."""

    def __init__(self, chain: LossChain, device: torch.device) -> None:
        super().__init__()
        self.chain = chain
        for name, region, gradient in _operands(chain):
            made = torch.empty(region.shape, dtype=region.dtype, device=device)
            self.register_parameter(name, nn.Parameter(made, requires_grad=gradient is not None))

    def forward(self, targets: Tensor) -> Tensor:
        bias = getattr(self, "bias", None)
        reduction: Any = "mean" if self.chain.mean else "sum"
        how = {"ignore_index": self.chain.ignore_index, "reduction": reduction}
        return linear_cross_entropy(self.hidden, self.weight, targets, bias, **how)


def _operands(chain: LossChain) -> list[tuple[str, Region, Region | None]]:
    """Name, place and gradient of each."""
    found = [("hidden", chain.hidden, chain.of_hidden), ("weight", chain.weight, chain.of_weight)]
    return [*found, ("bias", chain.bias, chain.of_bias)] if chain.bias is not None else found


def _traced(chain: LossChain, device: torch.device, native: Native | None) -> Program:
    with Transaction() as tracing:
        tracing.at_end(disarm_)
        tracing.compute()
        with FakeWorld():
            model = _Loss(chain, device)
            targets = torch.empty(chain.targets.shape, dtype=chain.targets.dtype, device=device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            subject = subjects.build(model, lambda m, t: m(t), optimizer, (targets,), accumulate=1, clip_norm=None)
            program = capture(subject, (targets,), {}, real=False).program
    return program if native is None else probe_scratch(program, native)


def _replaced(program: Program, chain: LossChain, trace: Program) -> Program:
    """The trace's buffers get new numbers; what it reads and leaves behind becomes what the chain read and left."""
    operands = _operands(chain)
    places = {name: region for name, region, _ in operands}
    bases = {b: places[trace.buffers[b].name] for b in trace.externals} | dict.fromkeys(trace.leaves, chain.targets)
    [first] = [op for op in trace.ops if op.name == "ones_like"]
    bases[first.outputs[0].buffer] = chain.of_loss
    bases[trace.loss.buffer] = chain.loss
    for position, region in trace.grads.items():
        gradient = operands[position][2]
        assert gradient is not None
        bases[region.buffer] = gradient
    own = [b for b in trace.buffers if b not in bases]
    ids = {b: BufferId(n) for n, b in enumerate(own, start=max(program.buffers) + 1)}

    def moved(region: Region) -> Region:
        base = bases.get(region.buffer)
        if base is None:
            return replace(region, buffer=ids[region.buffer])
        return replace(region, buffer=base.buffer, offset=base.offset + region.offset)

    inserted = [op.map(reads=moved, writes=moved) for op in trace.ops if op is not first]
    ops: list[Op] = []
    for i, op in enumerate(program.ops):
        if i == chain.forward_at:
            ops += [each for each in inserted if each.phase is Phase.FORWARD]
        elif i == chain.backward_at:
            ops += [each for each in inserted if each.phase is not Phase.FORWARD]
        elif i not in chain.ops:
            ops.append(op)
    new = {ids[b]: replace(trace.buffers[b], id=ids[b]) for b in own}
    return replace(program, ops=tuple(ops), buffers={**program.buffers, **new}, eager_death={})

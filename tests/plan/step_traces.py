"""A seed comes in, the lifetimes of a training step go out as a `Problem`, as a real step would ask for them.

Forward ops leave activations that live until the mirrored backward op; scratch and short-lived results
surround every op; gradients are born in backward and live to the update, which has transients of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from takeback.compiler.plan import Item, ItemId, Problem

KIB = 1024


@dataclass
class _Recorder:
    """Collects items; ids are given in the order of allocation, as an allocator would see them."""

    items: list[Item]

    def add(self, size_bytes: int, start: int, end: int) -> None:
        self.items.append(Item(ItemId(len(self.items)), size_bytes, start, end))

    def problem(self, alignment_bytes: int = 64) -> Problem:
        return Problem(tuple(self.items), alignment_bytes)


def mixed_step(seed: int, ops: int) -> Problem:
    """Every op draws its sizes at random over three decades: nothing repeats, so gaps rarely fit exactly."""
    draw = Random(seed)
    recorder = _Recorder([])
    update_at, end = 2 * ops, 3 * ops
    for op in range(ops):
        forward, backward = op, 2 * ops - 1 - op
        activation = int(10 ** draw.uniform(3, 6))
        parameter = int(10 ** draw.uniform(2, 6)) if draw.random() < 0.6 else 0
        if draw.random() < 0.8:
            recorder.add(activation, forward, backward + 1)
        else:
            recorder.add(activation, forward, min(forward + draw.randint(1, 4), ops))
        if draw.random() < 0.5:
            recorder.add(int(activation * draw.uniform(0.5, 3)), forward, forward + 1)
        recorder.add(activation, backward, backward + draw.randint(1, 3))
        if draw.random() < 0.6:
            recorder.add(int(activation * draw.uniform(0.5, 4)), backward, backward + 1)
        if parameter:
            free_at = end if seed % 2 else update_at + op + 1
            recorder.add(parameter, backward, free_at)
            recorder.add(parameter, backward, backward + 1)
            for _ in range(draw.randint(1, 3)):
                recorder.add(parameter, update_at + op, update_at + op + 1)
    return recorder.problem()


def transformer_step(seed: int, layers: int) -> Problem:
    """A GPT: per layer norms, qkv, attention with a mask, two-layer MLP; logits far larger than all else."""
    draw = Random(seed)
    recorder = _Recorder([])
    width = draw.choice([96, 128, 200, 256, 384]) * 4
    rows = draw.choice([256, 500, 1024])
    heads_rows = draw.choice([4, 8]) * rows * draw.choice([64, 128, 256])
    hidden = rows * width
    # (saved sizes, transient size, parameter size) of the ops of one layer
    layer: list[tuple[list[int], int, int]] = [
        ([hidden, rows * 4, rows * 4], 0, 2 * width),
        ([3 * hidden], 0, 3 * width * width),
        ([], 4 * heads_rows, 0),
        ([4 * heads_rows, heads_rows], 4 * heads_rows, 0),
        ([hidden], hidden, 0),
        ([hidden, hidden // 4], hidden, width * width),
        ([hidden, rows * 4, rows * 4], 0, 2 * width),
        ([4 * hidden], 0, 4 * width * width),
        ([4 * hidden], 8 * hidden, 0),
        ([hidden, hidden // 4], hidden, 4 * width * width),
    ]
    logits = rows * draw.choice([1000, 8000, 32000]) * 4
    program = layer * layers + [([logits], logits, width * 1000), ([logits, rows * 4], logits, 0)]
    ops, end = len(program), 4 * len(program)
    for op, (saved, transient, parameter) in enumerate(program):
        forward, backward = 2 * op, 4 * ops - 2 - 2 * op
        for size_bytes in saved:
            recorder.add(size_bytes, forward, backward + 2)
        if transient:
            recorder.add(transient, forward, forward + 2)
            recorder.add(transient, backward, backward + 1)
        recorder.add(sum(saved) or transient, backward, backward + 3)
        if parameter:
            recorder.add(parameter, backward, 5 * end)
            for step in range(3):
                recorder.add(parameter, end + 4 * op + step, end + 4 * op + step + 2)
    return recorder.problem()


def convnet_step(seed: int, blocks: int) -> Problem:
    """A ResNet: activations shrink as weights grow, shortcuts outlive their block, scratch is large."""
    draw = Random(seed)
    recorder = _Recorder([])
    ops = 3 * blocks
    update_at = 4 * ops
    for op in range(ops):
        stage = 4 * op // ops
        forward, backward = 2 * op, 4 * ops - 2 - 2 * op
        activation = 3211 * KIB * draw.choice([1, 1, 4]) // 4**stage * 2
        weight = 147 * KIB * 4**stage // draw.choice([1, 1, 9])
        channels = 256 * 2**stage
        recorder.add(activation, forward, backward + 2)
        recorder.add(activation, forward + 1, backward + 1)
        recorder.add(channels, forward + 1, backward + 1)
        recorder.add(channels, forward + 1, backward + 1)
        recorder.add(draw.choice([0, 1, 2]) * activation + weight, forward, forward + 1)
        if op % 3 == 0:
            recorder.add(activation, forward, forward + 6)
            recorder.add(activation, max(backward - 4, 2 * ops), backward + 2)
        recorder.add(activation, backward, backward + 2)
        recorder.add(activation, backward + 1, backward + 3)
        recorder.add(2 * (activation + weight), backward, backward + 1)
        recorder.add(weight, backward, update_at + ops)
        recorder.add(channels, backward + 1, update_at + ops)
        recorder.add(weight, update_at + op, update_at + op + 1)
    return recorder.problem()


def recomputed_step(seed: int, segments: int, ops: int) -> Problem:
    """Activation checkpointing: a segment keeps its input only; backward makes its activations again."""
    draw = Random(seed)
    recorder = _Recorder([])
    sizes = [int(10 ** draw.uniform(4, 6)) for _ in range(ops)]
    for segment in range(segments):
        backward_of_segment = segments * ops + 2 * ops * (segments - 1 - segment)
        recorder.add(sizes[0], segment * ops, backward_of_segment + 2 * ops)
        for op, size_bytes in enumerate(sizes):
            recorder.add(size_bytes, segment * ops + op, segment * ops + op + 2)
            recorder.add(2 * size_bytes, segment * ops + op, segment * ops + op + 1)
    clock, end = segments * ops, 3 * segments * ops
    for _ in range(segments):
        for op, size_bytes in enumerate(sizes):
            recorder.add(size_bytes, clock + op, clock + 2 * ops - op)
            backward = clock + 2 * ops - 1 - op
            recorder.add(size_bytes, backward, backward + 2)
            recorder.add(3 * size_bytes // 2, backward, backward + 1)
            recorder.add(draw.choice([1000, 40_000, 100_000]), backward, end + 10)
        clock += 2 * ops
    return recorder.problem()


def early_update_step(seed: int, ops: int) -> Problem:
    """`update="early"`: a gradient dies as soon as its parameter is updated, within the backward."""
    draw = Random(seed)
    recorder = _Recorder([])
    for op in range(ops):
        forward, backward = op, 3 * ops - 2 * op
        activation, parameter = int(10 ** draw.uniform(3, 6)), int(10 ** draw.uniform(2, 6.5))
        recorder.add(activation, forward, backward + 1)
        recorder.add(activation, backward, backward + 3)
        recorder.add(2 * activation, backward, backward + 1)
        recorder.add(parameter, backward, backward + 2)
        recorder.add(parameter, backward + 1, backward + 2)
    return recorder.problem()


def realistic_steps(seeds: range) -> list[tuple[str, Problem]]:
    """Named steps of every kind for every seed, from a hundred to a few thousand items."""
    steps: list[tuple[str, Problem]] = []
    for seed in seeds:
        steps += [
            (f"mixed-{seed}", mixed_step(seed, ops=40 + 37 * (seed % 8))),
            (f"transformer-{seed}", transformer_step(seed, layers=2 + seed % 12)),
            (f"convnet-{seed}", convnet_step(seed, blocks=8 + 4 * (seed % 6))),
            (f"recomputed-{seed}", recomputed_step(seed, segments=3 + seed % 6, ops=6 + 3 * (seed % 5))),
            (f"early-update-{seed}", early_update_step(seed, ops=50 + 30 * (seed % 8))),
        ]
    return steps

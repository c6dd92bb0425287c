"""An input that somebody else reads, holds or writes, or that lies in other bytes than its own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from takeback.hazards.judging import HazardKind
from takeback.hazards.trial import Skip, Trial

kind = HazardKind("an input that somebody else reads")
hazard = kind.hazard


SAVES_ITS_RESULT: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda v: (v * 0.5).exp(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": lambda v: v.mul(2).add(1).relu(),
    "softmax": lambda v: v.softmax(-1),
    "sqrt": lambda v: v.square().add(0.5).sqrt(),
}


def _saved_input(name: str, t: Trial) -> None:
    t.loss(t.op(*t.inputs(how=SAVES_ITS_RESULT[name]))).backward()


for _name in SAVES_ITS_RESULT:
    hazard(f"input from {_name}, which saved it")(functools.partial(_saved_input, _name))


@hazard("input read before by a product that saved it")
def input_read_before(t: Trial) -> None:
    x = t.inputs()
    before = [each * t.leaf(f"w{i}", each.shape) for i, each in enumerate(x)]
    loss = t.loss(t.op(*x)) + sum(t.loss(each, f"d{i}") for i, each in enumerate(before))
    del x
    loss.backward()


@hazard("input read before, through a view")
def input_read_before_view(t: Trial) -> None:
    x = t.inputs()
    before = [each.view(-1)[1:] * t.leaf(f"w{i}", (each.numel() - 1,)) for i, each in enumerate(x)]
    loss = t.loss(t.op(*x)) + sum(t.loss(each, f"d{i}") for i, each in enumerate(before))
    del x
    loss.backward()


@hazard("input read before, through detach()")
def input_read_before_detached(t: Trial) -> None:
    x = t.inputs()
    before = [each.detach() * t.leaf(f"w{i}", each.shape) for i, each in enumerate(x)]
    loss = t.loss(t.op(*x)) + sum(t.loss(each, f"d{i}") for i, each in enumerate(before))
    del x
    loss.backward()


@hazard("input read again later")
def input_read_later(t: Trial) -> None:
    x = t.inputs()
    loss = t.loss(t.op_(*x))
    for i, each in enumerate(x):
        loss = loss + t.loss(each * t.leaf(f"w{i}", each.shape), f"d{i}")
    del x, each
    loss.backward()


@hazard("input added to the output")
def input_added_later(t: Trial) -> None:
    t.same_shape()
    x = t.inputs()
    y = t.op_(*x)
    loss = t.loss(x[0] + y)
    del x, y
    loss.backward()


@hazard("one input, two ops")
def input_of_two_ops(t: Trial) -> None:
    t.same_shape()
    x = t.inputs()
    loss = t.loss(t.op_(*x, i=0)) + t.loss(t.op_(*x, i=1), "d")
    del x
    loss.backward()


@hazard("two ops in a row")
def two_in_a_row(t: Trial) -> None:
    t.same_shape()
    t.loss(t.op(t.op(*t.inputs(), i=0), *t.inputs("b")[1:], i=1)).backward()


@hazard("two ops in a row, sum().backward()")
def two_in_a_row_sum(t: Trial) -> None:
    t.same_shape()
    t.op(t.op(*t.inputs(), i=0), *t.inputs("b")[1:], i=1).sum().backward()


def _bigger(shape: tuple[int, ...], dim: int) -> list[int]:
    sizes = list(shape)
    sizes[dim] *= 2
    return sizes


@hazard("input is a view")
def input_is_view(t: Trial) -> None:
    shapes = t.subject.shapes
    wholes = [t.leaf(f"x{i}", (torch.Size(s).numel(),)) * 1.5 for i, s in enumerate(shapes)]
    loss = t.loss(t.op(*(whole.view(s) for whole, s in zip(wholes, shapes, strict=True))))
    del wholes
    loss.backward()


@hazard("input is a slice of rows, the rest is read")
def input_is_rows(t: Trial) -> None:
    wholes = [t.leaf(f"x{i}", _bigger(s, 0)) * 1.5 for i, s in enumerate(t.subject.shapes)]
    loss = t.loss(t.op(*(whole[len(whole) // 2 :] for whole in wholes)))
    loss = loss + sum(t.loss(whole[: len(whole) // 2].sin(), f"d{i}") for i, whole in enumerate(wholes))
    del wholes
    loss.backward()


@hazard("input is every other column, the whole is read later")
def input_is_columns(t: Trial) -> None:
    wholes = [t.leaf(f"x{i}", _bigger(s, -1)) * 1.5 for i, s in enumerate(t.subject.shapes)]
    loss = t.loss(t.op_(*(whole[..., ::2] for whole in wholes)))
    loss = loss + sum(t.loss(whole.sin(), f"d{i}") for i, whole in enumerate(wholes))
    del wholes
    loss.backward()


@hazard("input is a chunk, the other chunk is a summand")
def input_is_chunk(t: Trial) -> None:
    t.same_shape()
    wholes = [t.leaf(f"x{i}", _bigger(s, -1)) * 1.5 for i, s in enumerate(t.subject.shapes)]
    chunks = [whole.chunk(2, -1) for whole in wholes]
    loss = t.loss(t.op(*(first for first, _ in chunks)) + chunks[0][1])
    del wholes, chunks
    loss.backward()


def _chunks_of_one(dim: int, t: Trial) -> None:
    shapes = t.subject.shapes
    if len(set(shapes)) != 1 or len(shapes) == 1:
        raise Skip("the op has one input")
    sizes = list(shapes[0])
    sizes[dim] *= len(shapes)
    whole = t.leaf("x", sizes) * 1.5
    before = whole.sin()
    loss = t.loss(t.op(*whole.chunk(len(shapes), dim))) + t.loss(before, "d") + t.loss(whole.cos(), "e")
    del whole
    loss.backward()


for _dim in (0, -1):
    hazard(f"inputs are the chunks of one tensor, dimension {_dim}")(functools.partial(_chunks_of_one, _dim))


@hazard("one tensor as all inputs")
def one_tensor_as_all(t: Trial) -> None:
    shapes = t.subject.shapes
    if len(set(shapes)) != 1 or len(shapes) == 1:
        raise Skip("the op has one input")
    t.loss(t.op(*[t.leaf("x", shapes[0]) * 1.5] * len(shapes))).backward()


@hazard("input is transposed")
def input_transposed(t: Trial) -> None:
    shapes = t.subject.shapes
    leaves = [t.leaf(f"x{i}", (s[-1], *s[1:-1], s[0])) for i, s in enumerate(shapes)]
    t.loss(t.op(*((leaf * 1.5).transpose(0, -1) for leaf in leaves))).backward()


@hazard("input overlaps itself")
def input_overlapping(t: Trial) -> None:
    def windows(i: int, shape: tuple[int, ...]) -> Tensor:
        base = t.leaf(f"x{i}", (sum(shape),)) * 1.5
        return base.as_strided(shape, [1] * len(shape))

    t.loss(t.op(*(windows(i, s) for i, s in enumerate(t.subject.shapes)))).backward()


@hazard("input is the caller's batch")
def input_is_batch(t: Trial) -> None:
    batch = [t.draw(f"x{i}", s) for i, s in enumerate(t.subject.shapes)]
    if not t.in_place:
        for i, each in enumerate(batch):
            t.keep(f"batch {i}", each)
    if list(t.module().parameters()):
        t.loss(t.op(*batch)).backward()
    else:
        t.op(*batch)


@hazard("an input borrows the bytes of a numpy array")
def input_from_numpy(t: Trial) -> None:
    shapes = t.subject.shapes
    t.needs_numpy()
    if len(shapes) == 1:
        raise Skip("the op has one input")
    for i, shape in enumerate(shapes):
        array = t.draw(f"array {i}", shape).numpy()
        then = torch.from_numpy(array.copy())
        x = [torch.from_numpy(array) if k == i else each for k, each in enumerate(t.inputs())]
        loss = t.loss(t.op(*x))
        del x  # from here on torch knows of no other owner of the array's bytes
        loss.backward()
        t.kept.append((f"array {i}", torch.from_numpy(array), then))


@hazard("an intermediate lies in a numpy array")
def intermediate_in_numpy(t: Trial) -> None:
    t.needs_numpy()
    arrays = [t.draw("array", s).numpy() for s in t.subject.shapes]
    x = [torch.from_numpy(a).copy_(each) for a, each in zip(arrays, t.inputs(), strict=True)]
    loss = t.loss(t.op(*x))
    del x
    then = [torch.from_numpy(a.copy()) for a in arrays]
    loss.backward()
    t.kept += [(f"array {i}", torch.from_numpy(a), b) for i, (a, b) in enumerate(zip(arrays, then, strict=True))]


@hazard("the user writes the input in place after the op")
def user_writes_input(t: Trial) -> None:
    if t.in_place:
        raise Skip("after the op, the input is the output")
    x = t.inputs()
    loss = t.loss(t.op(*(each.clone() for each in x) if t.plain else x))
    for each in x:
        each.mul_(2)
    del x, each
    loss.backward()


@hazard("input is a leaf that requires a gradient")
def input_is_leaf(t: Trial) -> None:
    t.loss(t.op(*t.inputs(how=lambda v: v))).backward()


@hazard("input is a leaf, shared gradient")
def input_is_leaf_shared(t: Trial) -> None:
    other = t.leaf("v") * t.leaf("w")
    t.loss(other + t.op(*t.inputs(how=lambda v: v))).backward()

"""Averages flat tensors over a torch.distributed group, in a few large buckets that start before the last is complete.

Buckets are cut from sizes alone (flat.py), so that every rank has the same ones. A `Reducer` is handed each bucket as
it becomes complete, starts them strictly in one order on every rank, and waits for all of them.
What fails raises `ReduceError`; after that the group's ranks may be anywhere, so nothing more is sent. `Replicas` makes
models equal at the start and keeps their buffers equal. Nothing here knows the compiler.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import distributed as dist

from takeback import flat
from takeback.errors import OptionError, ReduceError


def check_group(group: object) -> None:
    """Raises `OptionError` for anything but a process group that this rank is a member of."""
    if not dist.is_available():
        raise OptionError("group= needs torch.distributed, and this build of torch has none. Leave it at None.")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise OptionError("this rank is not a member of the group=. Use it on the group's ranks only.")
    if not isinstance(group, dist.ProcessGroup):
        raise OptionError(
            f"group must be a process group of torch.distributed, such as dist.group.WORLD after init_process_group(), "
            f"or None for one process; got {group!r}"
        )


def gather_texts(mine: Sequence[str], group: dist.ProcessGroup, device: torch.device) -> list[list[str]]:
    """The lines of every rank. As JSON: what torch.distributed gathers as objects are pickles, and whoever reaches the
    group's port could have written them."""
    world = dist.get_world_size(group)
    sent = torch.frombuffer(bytearray(json.dumps(list(mine)).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([sent.numel()], device=device), group=group)
    counts = [int(size) for size in sizes]
    whole = sent.new_zeros(max(counts))
    whole[: sent.numel()] = sent
    received = [torch.empty_like(whole) for _ in range(world)]
    dist.all_gather(received, whole, group=group)
    return [
        [str(line) for line in json.loads(bytes(t[:count].tolist()))] for t, count in zip(received, counts, strict=True)
    ]


# -- reducing ----------------------------------------------------------------------------------------------------------


class Reducer:
    """Averages `count` buckets over a group, once for each `begin`: `ready(i, tensors)` for every bucket in any order,
    then `finish()`. A bucket is one tensor, or several that are reduced together without being copied."""

    def __init__(self, group: dist.ProcessGroup, count: int) -> None:
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.count = count
        self.failure: str | None = None  #: why nothing is sent any more
        self._group = group
        self._given: list[Sequence[torch.Tensor] | None] = [None] * count
        self._works: list[dist.Work] = []
        self._hold = False

    def check(self) -> None:
        """Raises `ReduceError` if this rank has failed before: the others are not where it is."""
        if self.failure is not None:
            raise ReduceError(
                f"rank {self.rank} has failed in an earlier step ({self.failure}), so the ranks of the group are no "
                f"longer at the same step. Start all of them again, from a checkpoint."
            )

    def begin(self, *, hold: bool = False) -> None:
        """A new round. `hold`: nothing is sent before `finish`, so that the round can be given up without harm."""
        self.check()
        assert not self._works, "the round before was not finished"
        self._given = [None] * self.count
        self._hold = hold

    def ready(self, index: int, tensors: Sequence[torch.Tensor]) -> None:
        """Bucket `index` is complete: it is started as soon as all before it are. Its tensors must be 1-D and stay as
        they are until `finish`, which leaves the average over the ranks in them."""
        assert self._given[index] is None, f"bucket {index} was given twice"
        self._given[index] = tensors
        if not self._hold:
            self._start_()

    def finish(self) -> None:
        """Starts what was held, and waits for all buckets."""
        self._hold = False
        self._start_()
        assert len(self._works) == self.count, "not every bucket was given"
        for index, work in enumerate(self._works):
            with self._reaching(f"bucket {index + 1} of {self.count}"):
                work.wait()
        self._works, self._given = [], [None] * self.count

    def fail(self, why: str) -> None:
        """Nothing is sent from now on. Buckets on their way keep their tensors: they may still be written."""
        if self.failure is None:
            self.failure = why

    def _start_(self) -> None:
        while len(self._works) < self.count:
            index = len(self._works)
            tensors = self._given[index]
            if tensors is None:
                return
            with self._reaching(f"bucket {index + 1} of {self.count}"):
                # As DistributedDataParallel does it: each rank's share first, then a sum. The result has the same bits.
                torch.ops.aten._foreach_mul_.Scalar(list(tensors), 1.0 / self.world)
                self._works.append(self._send(tensors))

    def _send(self, tensors: Sequence[torch.Tensor]) -> dist.Work:
        if len(tensors) == 1:
            work = dist.all_reduce(tensors[0], group=self._group, async_op=True)
            assert work is not None
            return work
        options = dist.AllreduceCoalescedOptions()
        options.asyncOp = True
        return self._group.allreduce_coalesced(
            list(tensors), options
        )  # what the coalescing manager calls (2.11 - 2.13)

    @contextlib.contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self.fail(f"{what} could not be averaged")
            raise _unreached(f"{what} could not be averaged over the group", self.rank, self.world, error) from error


def _unreached(what: str, rank: int, world: int, error: Exception) -> ReduceError:
    return ReduceError(
        f"{what} (rank {rank} of {world}): {str(error).strip()}. Another rank has failed or ended, or did not come to "
        f"the same step within the group's timeout. Model and optimizer are as after the last complete step. Look at "
        f"the other ranks' errors, and start all of them again from a checkpoint."
    )


# -- the same model everywhere -----------------------------------------------------------------------------------------


class Replicas:
    """The copies of a model on the ranks of a group. They are compared when this is made, and refused if they differ;
    `send_` makes them equal."""

    def __init__(self, model: torch.nn.Module, group: dist.ProcessGroup) -> None:
        self._model, self._group = model, group
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        with self._reaching("the models could not be compared"):
            descriptions = gather_texts(_description(model), group, _device_of(model))
        for rank, other in enumerate(descriptions):
            difference = _difference(descriptions[0], other)
            if difference is not None:
                raise ReduceError(
                    f"rank {rank} has another model than rank 0: {difference}. A group trains one model: build it the "
                    f"same way on every rank. Nothing has been changed."
                )
        self._buffer_bytes = sum(map(_size_bytes, model.buffers()))

    def send_(self) -> None:
        """Gives every rank the parameters and buffers of rank 0."""
        everything = [*self._model.parameters(), *self._model.buffers()]
        runs: list[list[torch.Tensor]] = [[]]
        for t in everything:
            if sum(_size_bytes(x) for x in runs[-1]) >= flat.BUCKET_BYTES:
                runs.append([])
            runs[-1].append(t)
        for run in runs:
            self._send_(run)

    def send_buffers_(self) -> Callable[[], None]:
        """Gives every rank the buffers of rank 0, as DistributedDataParallel does before each forward. Returns what
        takes it back."""
        buffers = list(self._model.buffers())
        if sum(map(_size_bytes, buffers)) != self._buffer_bytes:
            raise ReduceError(
                "the model has other buffers than when the step was compiled, and the ranks of a group must have the "
                "same ones. Call compile_step again on every rank."
            )
        return self._send_(buffers)

    def _send_(self, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        if not sum(map(_size_bytes, tensors)):
            return lambda: None
        sent = torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in tensors])
        before = None if self._rank == 0 else sent.clone()
        with self._reaching("what rank 0 has could not be sent to all"):
            dist.broadcast(sent, src=dist.get_global_rank(self._group, 0), group=self._group)
        if before is None:
            return lambda: None
        _take_(tensors, sent)
        return lambda: _take_(tensors, before)

    @contextlib.contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise _unreached(what, self._rank, self._world, error) from error


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def _size_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _take_(tensors: Sequence[torch.Tensor], sent: torch.Tensor) -> None:
    start = 0
    for t in tensors:
        part = sent[start : start + _size_bytes(t)]
        start += _size_bytes(t)
        # A clone starts at an address of its own, so that it can be looked at as any dtype.
        t.detach().copy_(part.clone().view(t.dtype).reshape(t.shape))


def _description(model: torch.nn.Module) -> list[str]:
    """One line for each parameter and buffer: what must be the same on every rank."""
    found = [
        f"parameter {name!r} of shape {tuple(p.shape)}, strides {p.stride()}, {p.dtype}"
        + ("" if p.requires_grad else ", frozen")
        for name, p in model.named_parameters()
    ]
    return found + [f"buffer {name!r} of shape {tuple(b.shape)}, {b.dtype}" for name, b in model.named_buffers()]


def _difference(ours: Sequence[str], theirs: Sequence[str]) -> str | None:
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return f"{other} there, {mine} on rank 0"
    if len(ours) != len(theirs):
        return f"{len(theirs)} parameters and buffers there, {len(ours)} on rank 0"
    return None

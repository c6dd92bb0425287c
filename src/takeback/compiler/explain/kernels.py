"""A program with clusters in; an account of each distinct kernel of theirs out: how often it runs, which ops of the
user's it is, what it reads and writes, and whether it was generated, is torch's for lists, or eager's, and why.

A program without clusters has no such account: mode exact runs eager's kernels, op by op.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from takeback.compiler.program import Cluster, Op, Program, Region
from takeback.compiler.run.kernels import Kernels
from takeback.compiler.run.list_kernels import launches

MOST_REASONS = 3
"""So many reasons for which kernels were given up are named in a note."""


@dataclass(frozen=True)
class KernelOp:
    """An op inside of a kernel, at its first place in the step."""

    name: str
    line: str  #: the user's; "" if there is none
    module: str  #: the path of the module that ran it


@dataclass(frozen=True)
class KernelAccount:
    """What runs for all equal clusters of a step. Bytes are those of one run."""

    name: str
    count: int  #: how many times it is in the step
    ops: tuple[KernelOp, ...]
    modules: tuple[str, ...]  #: of all its places; numbers of layers are `*`
    read_bytes: int
    written_bytes: int
    generated: bool
    why: str  #: eager's kernels run for it; "" if others do
    waits: bool = False  #: that is so for now: it is not compiled, or not used yet
    launches: int = 0  #: of one run of torch's own kernel for lists of tensors (run/list_kernels.py); 0 for others

    @property
    def fell_back(self) -> bool:
        """Whether there is no generated kernel that may be used."""
        return not self.generated and not self.waits and not self.is_for_lists

    @property
    def is_for_lists(self) -> bool:
        """Whether torch's own kernel for lists of tensors runs, which is as it is meant."""
        return self.launches > 0

    @property
    def moved_bytes(self) -> int:
        """In a whole step."""
        return self.count * (self.read_bytes + self.written_bytes)

    @property
    def op_names(self) -> str:
        """`add, mul x3, native_layer_norm`: each kind once, in the order of their first one."""
        names = [op.name.partition(".")[0] for op in self.ops]
        counts = {name: names.count(name) for name in dict.fromkeys(names)}
        return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items())


def kernel_accounts(program: Program, kernels: Kernels) -> tuple[KernelAccount, ...]:
    """Of every distinct cluster, what moves most bytes in a step first."""
    places: dict[str, list[Op]] = {}
    for op in program.ops:
        if isinstance(op.target, Cluster):
            places.setdefault(op.target.key, []).append(op)
    found = [_account(ops, kernels) for ops in places.values()]
    return tuple(sorted(found, key=lambda each: -each.moved_bytes))


def fallback_notes(accounts: Sequence[KernelAccount]) -> Iterator[str]:
    """That kernels were given up, and why."""
    fell = [each for each in accounts if each.fell_back]
    if not fell:
        return
    reasons: dict[str, list[str]] = {}
    for each in fell:
        reasons.setdefault(each.why, []).append(each.name)
    said = [f"{names[0]}{_and_more(len(names) - 1)}: {why}" for why, names in reasons.items()]
    yield (
        f"{len(fell)} of {len(accounts)} distinct kernels of clusters are not generated ones: eager's run in their "
        f"place, which take more time and memory. {'; '.join(said[:MOST_REASONS])}{_and_more(len(said) - MOST_REASONS)}"
    )


def _and_more(count: int) -> str:
    return f" and {count:,} more" if count > 0 else ""


def ops_in_clusters(accounts: Sequence[KernelAccount]) -> int:
    """In one step, with those that a kernel of the backward makes again on its way."""
    return sum(each.count * len(each.ops) for each in accounts)


def launches_saved(accounts: Sequence[KernelAccount]) -> int:
    """How many fewer calls a step makes than one for each of these ops. Clusters on eager's kernels save none."""
    run = [(each, each.launches or 1) for each in accounts if each.generated or each.is_for_lists]
    return sum(each.count * max(0, len(each.ops) - calls) for each, calls in run)


def _account(ops: Sequence[Op], kernels: Kernels) -> KernelAccount:
    cluster = ops[0].target
    assert isinstance(cluster, Cluster)
    kernel = kernels.of(cluster)
    modules = (inner.site.module for op in ops for inner in _inside(op) if inner.site is not None)
    written = (*cluster.results, *(cluster.inputs[i] for i in cluster.writes))
    return KernelAccount(
        str(cluster),
        len(ops),
        tuple(_described(inner) for inner in cluster.ops),
        tuple(dict.fromkeys(_alike(module) for module in modules if module)),
        sum(map(_bytes, cluster.inputs)),
        sum(map(_bytes, written)),
        kernel.note is None and not kernel.is_for_lists,
        kernel.note or "",
        kernel.waits,
        launches(cluster) if kernel.is_for_lists else 0,
    )


def _inside(op: Op) -> tuple[Op, ...]:
    assert isinstance(op.target, Cluster)
    return op.target.ops


def _described(op: Op) -> KernelOp:
    site = op.site
    return KernelOp(op.name, str(site or ""), site.module if site is not None else "")


def _alike(module: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def _bytes(region: Region) -> int:
    return int(region.numel * region.dtype.itemsize)

"""Kernels for clusters of many shapes: clusters of all plans come in, kernels that serve a family of them go out.

A kernel of a family is compiled once, when three clusters have shown what varies; from then on clusters of the family
that are new take it at no price, wherever what it takes for granted holds. What cannot be compiled so is noted and not
tried again. Of clusters that no family serves, so many get a kernel of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from takeback.compiler.program import Cluster
from takeback.compiler.run.cluster_family import MEMBERS, ClusterFamily, family_of, outline_of
from takeback.compiler.run.inductor import Compiled, NotCompiled, wait_for
from takeback.compiler.run.kernel_workers import at_once
from takeback.compiler.run.symbolic import SymbolicKernel, compile_family, is_kept

COMPILING_S = 1.0  #: what writing a kernel of a family takes, about; its compiler works in another process
KEPT_S = 0.01  #: what it takes to find one of an earlier process
_MOST_KNOWN = 8  #: clusters of one outline, the latest
_MOST_KERNELS = 3  #: of one family: what is taken for granted may part short lengths from long ones
# A process never gives back what it has loaded, and lengths may go on and on.
_MOST_PLANS = 32  #: for which clusters of one outline get kernels of their own
_MOST_FAMILIES = 32  #: of one outline, that are compiled or given up
_MOST_ASKED = 1000  #: bases for which it is remembered whether there is a kernel


@dataclass
class _Relatives:
    """Clusters that might be of one family."""

    clusters: dict[str, Cluster] = field(default_factory=dict)
    kernels: list[tuple[ClusterFamily, SymbolicKernel]] = field(default_factory=list)
    given_up: list[ClusterFamily] = field(default_factory=list)
    alone: set[int] = field(default_factory=set)  #: hashes of clusters that were given a kernel of their own


@dataclass(frozen=True)
class Uncompiled:
    """A family without a kernel that holds for a base, and the clusters that show it."""

    family: ClusterFamily
    members: tuple[Cluster, ...]
    base: int


class KernelFamilies:
    """Of one compiled step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._relatives: dict[str, _Relatives] = {}
        self._kept: dict[tuple[str, int], bool] = {}  #: by an earlier process, of families and bases

    def add_(self, cluster: Cluster) -> None:
        known = self._relatives.setdefault(outline_of(cluster.key), _Relatives()).clusters
        known.setdefault(cluster.key, cluster)
        while len(known) > _MOST_KNOWN:
            del known[next(iter(known))]

    def kernel_for(self, cluster: Cluster) -> Compiled | None:
        """That of its family, if there is one that holds for it."""
        for family, kernel in self._relatives[outline_of(cluster.key)].kernels:
            base = family.base_of(cluster.key)
            if base is not None and kernel.holds_for(base):
                return kernel.at(base)
        return None

    def may_have_its_own_(self, cluster: Cluster, beside: int) -> bool:
        """Whether a kernel is compiled for this one alone; `beside`: how many of its outline a plan has. Where lengths
        never come again, each plan would bring some more."""
        alone = self._relatives[outline_of(cluster.key)].alone
        if len(alone) < _MOST_PLANS * beside:
            alone.add(hash(cluster.key))
        return hash(cluster.key) in alone

    def uncompiled(self, clusters: Sequence[Cluster]) -> list[Uncompiled]:
        """Families of these clusters for which a kernel might be compiled."""
        found: dict[str, Uncompiled] = {}
        for cluster in clusters:
            text = cluster.key
            relatives = self._relatives[outline_of(text)]
            tried = [
                f for f in (*relatives.given_up, *(f for f, _ in relatives.kernels)) if f.base_of(text) is not None
            ]
            given_up = any(family in relatives.given_up for family in tried) or len(tried) == _MOST_KERNELS
            given_up = given_up or len(relatives.kernels) + len(relatives.given_up) >= _MOST_FAMILIES
            if len(relatives.clusters) < MEMBERS or given_up or self.kernel_for(cluster) is not None:
                continue
            seen = family_of([*(other for other in relatives.clusters if other != text), text])
            if seen is not None:
                family, members = seen
                known = {**relatives.clusters, text: cluster}
                base = family.base_of(text)
                assert base is not None
                found[family.text] = Uncompiled(family, tuple(known[member] for member in members), base)
        return list(found.values())

    def seconds(self, families: Sequence[Uncompiled]) -> float:
        """What it takes to compile them, about."""
        if len(self._kept) > _MOST_ASKED:
            self._kept.clear()
        for each in families:
            if (each.family.text, each.base) not in self._kept:  # it takes a while to look
                kept = is_kept(each.family, each.members, each.base, self._device)
                self._kept[each.family.text, each.base] = kept
        return sum(KEPT_S if self._kept[each.family.text, each.base] else COMPILING_S for each in families)

    def compile_(self, families: Sequence[Uncompiled], tell: Callable[[str], None]) -> None:
        """All of them at once."""
        written: list[tuple[Uncompiled, SymbolicKernel, Callable[[], None]]] = []
        with at_once() as afterwards:
            for number, each in enumerate(families):
                tell(f"writing kernel {number + 1} of {len(families)}, for all lengths")
                try:
                    kernel = compile_family(each.family, each.members, each.base, self._device)
                except NotCompiled:
                    self._of(each).given_up.append(each.family)
                else:
                    written.append((each, kernel, afterwards.taken_()))
        for number, (each, kernel, wait) in enumerate(written):
            tell(f"compiling kernel {number + 1} of {len(families)}, for all lengths")
            try:
                wait_for(wait, self._device)
            except NotCompiled:
                self._of(each).given_up.append(each.family)
            else:
                self._of(each).kernels.append((each.family, kernel))

    def _of(self, each: Uncompiled) -> _Relatives:
        return self._relatives[outline_of(each.members[0].key)]

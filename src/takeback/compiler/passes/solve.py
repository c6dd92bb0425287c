"""The choice as an integer program: which values are carried and which units run again, so that the peak is lowest
for a given cost, or the cost lowest for a given peak. HiGHS does the work.

Most moments at which something is rebuilt never bind, so their rows are added only when a solution breaks them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from takeback.compiler.passes.menu import Menu, Row

_PEAK_GAP = 0.008  #: of the peak without rebuilding: a solution this near to the best is taken
_COST_GAP = 0.004  #: of the step's time
WORTH = 0.25  #: a percent of the step's time must buy this much of a percent of the peak
_STALL_NODES = 50  #: a search that finds nothing better for so long is over


@dataclass(frozen=True)
class Solution:
    """What the solver found. `proved` is False where a limit cut it short."""

    ones: frozenset[int]
    peak_bytes: int
    seconds: float
    proved: bool


class Solver:
    """Solves one menu for several goals; rows that were needed once are kept."""

    def __init__(self, menu: Menu, *, step_seconds: float, groups: int) -> None:
        self.menu = menu
        self._class = menu.ties(groups)
        self._n = max(self._class, default=-1) + 1  # the last unknown is the peak
        self._scale = float(max(*menu.curve, 1))
        self._unit = max(step_seconds, 1e-12)
        self._cost = np.zeros(self._n + 1)
        for (name, _), unknown in menu.rebuild.items():
            self._cost[self._class[unknown]] += menu.units[name].seconds / self._unit
        self._moments = menu.op_rows()
        self._known: set[tuple[int, int]] = set()
        self._rows: list[tuple[dict[int, float], float, float]] = []  # coefficients, least, most
        for those, that in menu.implications():
            row: dict[int, float] = {}
            for unknown in those:
                row[self._class[unknown]] = 1.0
            if that is not None and self._class[that] not in row:
                row[self._class[that]] = -1.0
            elif that is not None:
                continue  # holds by itself: a unit of one copy is what another copy waits for
            self._rows.append((row, 1.0 if that is None else 0.0, highspy.kHighsInf))
        for at in _outstanding(self._moments):
            self._add(self._moments[at])

    def _add(self, moment: Row) -> None:
        row: dict[int, float] = {self._n: -1.0}
        for unknown, size in moment.terms:
            cls = self._class[unknown]
            row[cls] = row.get(cls, 0.0) + size / self._scale
        self._rows.append((row, -highspy.kHighsInf, -moment.fixed_bytes / self._scale))

    def lowest_peak(self, most_seconds: float, *, deadline: float, start: Solution | None = None) -> Solution | None:
        """The lowest peak worth its cost, for no more than `most_seconds`."""
        return self._solve(most_seconds, None, deadline, start)

    def lowest_cost(self, peak_bytes: int, *, deadline: float, start: Solution | None = None) -> Solution | None:
        """The least time that keeps below `peak_bytes`; None if that is impossible, or none was found in time."""
        return self._solve(None, peak_bytes, deadline, start)

    def _solve(
        self, most_seconds: float | None, peak_bytes: int | None, deadline: float, start: Solution | None
    ) -> Solution | None:
        proved = True
        values = None
        if start is not None:
            values = np.zeros(self._n + 1)
            for unknown in start.ones:
                values[self._class[unknown]] = 1.0
            values[self._n] = start.peak_bytes / self._scale
        while True:
            found = self._once(most_seconds, peak_bytes, deadline, values)
            if found is None:
                return None
            values, done = found
            proved = proved and done
            limit = values[self._n] * self._scale if peak_bytes is None else float(peak_bytes)
            top = self._add_broken(values, limit)
            if top <= limit * (1 + 1e-6) or time.monotonic() > deadline:
                if peak_bytes is not None and top > limit * (1 + 1e-6):
                    return None
                ones = frozenset(u for u, c in enumerate(self._class) if values[c] > 0.5)
                cost = float(self._cost[: self._n] @ (values[: self._n] > 0.5)) * self._unit
                return Solution(ones, int(top), cost, proved)

    def _once(
        self, most_seconds: float | None, peak_bytes: int | None, deadline: float, start: np.ndarray | None
    ) -> tuple[np.ndarray, bool] | None:
        n = self._n
        rows = list(self._rows)
        objective, gap = self._cost, _COST_GAP
        highest = highspy.kHighsInf if peak_bytes is None else peak_bytes / self._scale
        if peak_bytes is None:
            objective, gap = self._cost * WORTH, _PEAK_GAP
            objective[n] = 1.0
            if most_seconds is not None and most_seconds < highspy.kHighsInf:
                costs = {int(i): float(self._cost[i]) for i in np.flatnonzero(self._cost)}
                rows.append((costs, -highspy.kHighsInf, most_seconds / self._unit))
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = n + 1, len(rows)
        lp.col_cost_ = objective
        lp.col_lower_ = np.zeros(n + 1)
        lp.col_upper_ = np.append(np.ones(n), highest)
        lp.row_lower_ = np.array([low for _, low, _ in rows])
        lp.row_upper_ = np.array([high for _, _, high in rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0] + [len(r) for r, _, _ in rows])
        lp.a_matrix_.index_ = np.array([i for r, _, _ in rows for i in r], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([v for r, _, _ in rows for v in r.values()])
        whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        lp.integrality_ = [whole] * n + [real]
        solver = highspy.Highs()
        for option, value in {
            "output_flag": False,
            "time_limit": max(deadline - time.monotonic(), 0.05),
            "mip_rel_gap": 0.0,
            "mip_abs_gap": gap,
            "mip_max_stall_nodes": _STALL_NODES,
        }.items():
            solver.setOptionValue(option, value)
        solver.passModel(lp)
        if start is not None:
            known = highspy.HighsSolution()
            known.col_value = list(start)
            solver.setSolution(known)
        solver.run()
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        done = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return np.array(solver.getSolution().col_value), done

    def _add_broken(self, values: np.ndarray, limit: float) -> float:
        """Adds the rows that a solution breaks, and says how high it goes."""

        def height(moment: Row) -> int:
            return moment.fixed_bytes + sum(s for unknown, s in moment.terms if values[self._class[unknown]] > 0.5)

        top = float(max(map(height, self._moments), default=0))
        for (name, stop), unknown in self.menu.rebuild.items():
            if values[self._class[unknown]] > 0.5:
                moment = self.menu.rebuild_row(name, stop)
                level = height(moment)
                top = max(top, level)
                if level > limit * (1 + 1e-6) and (name, stop) not in self._known:
                    self._known.add((name, stop))
                    self._add(moment)
        return top


def _outstanding(rows: Sequence[Row]) -> list[int]:
    """Of moments with the same terms, the highest; and only those that can be the peak at all."""
    best: dict[tuple[tuple[int, int], ...], int] = {}
    for at, row in enumerate(rows):
        held = best.get(row.terms)
        if held is None or rows[held].fixed_bytes < row.fixed_bytes:
            best[row.terms] = at
    sure = max((r.fixed_bytes for r in rows), default=0)
    return sorted(at for at in best.values() if rows[at].fixed_bytes + sum(s for _, s in rows[at].terms) >= sure)

"""A `RebuildProblem` comes in; which values are carried and which units are rebuilt goes out, so that the peak is
lowest for a given cost, or the cost lowest for a given peak. HiGHS does the work.

The same problem gets the same answer on every machine, busy or idle: the search is limited by what it does (nodes,
visits, rounds), never by the clock. A guard in seconds stands behind that; where it strikes, the outcome says so.

Most moments at which something is rebuilt never bind, so their rows are added only when a solution breaks them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from takeback.compiler.plan.rebuild_problem import RebuildAnswer, Run, kept_bytes
from takeback.compiler.plan.rebuild_rows import RebuildRows, Row

if TYPE_CHECKING:  # to load it takes longer than all of takeback: only a search does
    import highspy

PEAK_GAP = 0.008  #: of the peak without rebuilding: a solution this near to the best is taken
COST_GAP = 0.004  #: of the step's time
WORTH = 0.25  #: of a percent of the peak, that a percent of the step's time must buy, if nothing else is said
_STALL_NODES = 50  #: a search that finds nothing better for so long is over
_NODES = 500  #: so many are searched at most
_TOLERANCE = 1e-6  #: of a peak, that of HiGHS
_ROUNDS = 3  #: so often rows are added and the problem is solved again


@dataclass(frozen=True)
class Effort:
    """How far one run of HiGHS may go. `visits` are the moments at which it asks whether it shall go on: after a round
    of cuts, a node, a heuristic. They come in the same order on every machine."""

    visits: int
    deadline: float  #: by time.monotonic(): the guard


@dataclass(frozen=True)
class SolverOutcome:
    """What a search found."""

    answer: RebuildAnswer | None  #: None: nothing was found
    proved: bool  #: nothing is better by more than the gap; without an answer, there is none
    struck: bool  #: the guard ended it: the next time it may end elsewhere


@dataclass(frozen=True)
class _Found:
    """What one run of HiGHS found."""

    values: np.ndarray | None
    proved: bool
    struck: bool


class RebuildSolver:
    """Solves one problem for several goals; rows that were needed once are kept. `groups`: how many the copies of a
    repeated block are decided on in."""

    def __init__(self, rows: RebuildRows, *, groups: int, worth: float = WORTH) -> None:
        self._rows, self._worth = rows, worth
        self._class = rows.families(groups)
        self._n = max(self._class, default=-1) + 1  # the last unknown is the peak
        self._scale = float(max(*kept_bytes(rows.problem), 1))

        self._step_ns = max(rows.problem.step_ns, 1)
        self._cost = np.zeros(self._n + 1)
        for (name, stop), unknown in rows.run.items():
            self._cost[self._class[unknown]] += rows.problem.cost_ns(rows.units[name], stop) / self._step_ns
        self._bound: set[Run] = set()
        self._lines: list[tuple[dict[int, float], float, float]] = []  # coefficients, least, most
        for rule in rows.rules:
            line = {self._class[unknown]: 1.0 for unknown in rule.those}
            if rule.that is not None and self._class[rule.that] not in line:
                line[self._class[rule.that]] = -1.0
            elif rule.that is not None:
                continue  # holds by itself: a unit of one copy is what another copy waits for
            self._lines.append((line, 1.0 if rule.that is None else 0.0, np.inf))
        for row in rows.highest_rows:
            self._add(row)

    @property
    def classes(self) -> Sequence[int]:
        """By unknown: those of one class are one decision."""
        return self._class

    def lowest_peak(self, most_ns: int | None, effort: Effort, start: RebuildAnswer | None = None) -> SolverOutcome:
        """The lowest peak worth its cost, for no more than `most_ns`. `start` is an answer to begin with."""
        usable = start is not None and (most_ns is None or start.cost_ns <= most_ns)
        return self._solve(most_ns, None, effort, start if usable else None)

    def lowest_cost(self, peak_bytes: int, effort: Effort, start: RebuildAnswer | None = None) -> SolverOutcome:
        """The least time that keeps below `peak_bytes`."""
        usable = start is not None and start.peak_bytes <= peak_bytes
        return self._solve(None, peak_bytes, effort, start if usable else None)

    def _solve(
        self, most_ns: int | None, peak_bytes: int | None, effort: Effort, start: RebuildAnswer | None
    ) -> SolverOutcome:
        best = start
        for _ in range(_ROUNDS):
            found = self._once(most_ns, peak_bytes, effort, best)
            if found.values is None:
                return SolverOutcome(best, found.proved and best is None, found.struck)
            ones = frozenset(u for u, c in enumerate(self._class) if found.values[c] > 0.5)
            limit = found.values[self._n] * self._scale if peak_bytes is None else float(peak_bytes)
            fits = self._add_broken(ones, limit * (1 + _TOLERANCE))
            answer = self._rows.answer(ones)
            if (fits or peak_bytes is None) and (
                best is None or self._price(answer, peak_bytes) < self._price(best, peak_bytes)
            ):
                best = answer
            if fits or found.struck:
                break
        return SolverOutcome(best, found.proved and fits, found.struck)

    def _price(self, answer: RebuildAnswer, peak_bytes: int | None) -> float:
        """What is minimised."""
        cost = answer.cost_ns / self._step_ns
        return cost if peak_bytes is not None else answer.peak_bytes / self._scale + self._worth * cost

    def _values_of(self, answer: RebuildAnswer) -> np.ndarray:
        values = np.zeros(self._n + 1)
        for unknown in self._rows.ones(answer):
            values[self._class[unknown]] = 1.0
        values[self._n] = answer.peak_bytes / self._scale
        return values

    def _once(self, most_ns: int | None, peak_bytes: int | None, effort: Effort, start: RebuildAnswer | None) -> _Found:
        import highspy

        solver = highspy.Highs()
        objective, gap = (self._cost, COST_GAP) if peak_bytes is not None else (self._cost * self._worth, PEAK_GAP)
        if peak_bytes is None:
            objective[self._n] = 1.0
        for option, value in {
            "output_flag": False,
            "parallel": "off",
            "random_seed": 0,
            "time_limit": max(effort.deadline - time.monotonic(), 0.0),
            "mip_rel_gap": 0.0,
            "mip_abs_gap": gap,
            "mip_max_nodes": _NODES,
            "mip_max_stall_nodes": _STALL_NODES,
            "mip_allow_restart": False,  # begins the root anew, which is where the visits go
        }.items():
            solver.setOptionValue(option, value)
        solver.passModel(self._model(objective, most_ns, peak_bytes))
        if start is not None:
            first = highspy.HighsSolution()
            first.col_value = list(self._values_of(start))
            solver.setSolution(first)
        visits = 0

        def visit(event: highspy.highs.HighsCallbackEvent) -> None:
            nonlocal visits
            visits += 1
            if visits >= effort.visits:
                event.interrupt()

        solver.cbMipInterrupt += visit
        solver.run()
        status = solver.getModelStatus()
        known = solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return _Found(
            np.array(solver.getSolution().col_value) if known else None,
            status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible),
            status == highspy.HighsModelStatus.kTimeLimit,
        )

    def _model(self, objective: np.ndarray, most_ns: int | None, peak_bytes: int | None) -> highspy.HighsLp:
        import highspy

        n, lines = self._n, list(self._lines)
        if most_ns is not None:
            costs = {int(i): float(self._cost[i]) for i in np.flatnonzero(self._cost)}
            lines.append((costs, -np.inf, most_ns / self._step_ns))
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = n + 1, len(lines)
        lp.col_cost_ = objective
        lp.col_lower_ = np.zeros(n + 1)
        lp.col_upper_ = np.append(np.ones(n), np.inf if peak_bytes is None else peak_bytes / self._scale)
        lp.row_lower_ = np.array([low for _, low, _ in lines])
        lp.row_upper_ = np.array([high for _, _, high in lines])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0] + [len(r) for r, _, _ in lines])
        lp.a_matrix_.index_ = np.array([i for r, _, _ in lines for i in r], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([v for r, _, _ in lines for v in r.values()])
        whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        lp.integrality_ = [whole] * n + [real]
        return lp

    def _add(self, row: Row) -> None:
        line: dict[int, float] = {self._n: -1.0}
        for unknown, size in row.terms:
            cls = self._class[unknown]
            line[cls] = line.get(cls, 0.0) + size / self._scale
        self._lines.append((line, -np.inf, -row.fixed_bytes / self._scale))

    def _add_broken(self, ones: frozenset[int], limit: float) -> bool:
        """Adds the rows of moments of rebuilding that a solution breaks; False if any row is."""
        fits = all(row.height(ones) <= limit for row in self._rows.highest_rows)
        for run, unknown in self._rows.run.items():
            row = self._rows.run_row(*run) if unknown in ones else None
            if row is not None and row.height(ones) > limit:
                fits = False
                if run not in self._bound:
                    self._bound.add(run)
                    self._add(row)
        return fits

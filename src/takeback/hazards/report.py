"""All hazards for one op: outcomes in, the lines of the command `takeback hazards` and its JSON out."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from takeback.errors import printable
from takeback.guard import guard
from takeback.hazards.judging import Hazard, HazardKind, judge
from takeback.hazards.trial import OpUnderTest, Outcome, Verdict

WIDTH = 80
_INDENT = " " * 10


@dataclass(frozen=True)
class Findings:
    """What one op did on the hazards; `guarded` is the same inside `takeback.guard()`, where that was asked for."""

    subject: OpUnderTest
    device: str
    outcomes: Mapping[str, Outcome]
    guarded: Mapping[str, Outcome]

    @property
    def failed(self) -> bool:
        """Whether anything is wrong, or was missed because the plain form raises."""
        return any(each.verdict is Verdict.WRONG or each.missed for each in self.outcomes.values())

    def __str__(self) -> str:
        lines = [f"{printable(self.subject.name)} on {self.device}: {len(self.outcomes)} hazards"]
        for verdict in (Verdict.WRONG, Verdict.RAISED):
            for name, outcome in self.outcomes.items():
                if outcome.verdict is verdict:
                    lines += self._row(verdict.value, name, outcome)
        for name, outcome in self.outcomes.items():
            if outcome.missed:
                lines += self._row("missed", name, outcome)
        counts = {v: sum(each.verdict is v for each in self.outcomes.values()) for v in Verdict}
        lines.append(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))
        return "\n".join(lines)

    def _row(self, label: str, name: str, outcome: Outcome) -> list[str]:
        lines = _wrapped(name, f"  {label:<8}") + _wrapped(outcome.detail, _INDENT)
        guarded = self.guarded.get(name)
        if guarded is not None:
            lines += _wrapped(f"the guard: {guarded.detail if guarded.guard else 'silent'}", _INDENT)
        return lines

    def to_json(self) -> dict[str, dict[str, Any]]:
        """A row for each hazard."""
        return {name: self._json(name, outcome) for name, outcome in self.outcomes.items()}

    def _json(self, name: str, outcome: Outcome) -> dict[str, Any]:
        row: dict[str, Any] = {
            "verdict": outcome.verdict.value,
            "detail": outcome.detail,
            "error": outcome.error,
            "missed": outcome.missed,
        }
        guarded = self.guarded.get(name)
        if guarded is not None:
            row |= {"guard": guarded.detail if guarded.guard else None, "under guard": str(guarded)}
        return row


def findings(
    subject: OpUnderTest,
    hazards: Iterable[Hazard],
    device: str | torch.device,
    *,
    under_guard: bool = False,
    tell: Callable[[str], None] = lambda name: None,
) -> Findings:
    """Runs the hazards; `tell` hears the name of each before it begins."""
    outcomes: dict[str, Outcome] = {}
    guarded: dict[str, Outcome] = {}
    for each in hazards:
        tell(each.name)
        outcomes[each.name] = judge(each, subject, device)
        if under_guard:
            guarded[each.name] = judge(each, subject, device, guard)
    return Findings(subject, str(device), outcomes, guarded)


def listed(kinds: Iterable[HazardKind], chosen: Iterable[Hazard]) -> str:
    """The names of the hazards, by kind."""
    wanted = set(chosen)
    lines: list[str] = []
    for kind in kinds:
        names = [f"  {each.name}{' (slow)' * each.slow}" for each in kind.hazards if each in wanted]
        lines += [kind.title, *names] if names else []
    return "\n".join(lines)


def _wrapped(text: str, start: str) -> list[str]:
    text = printable(" ".join(text.split()))
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=_INDENT, break_on_hyphens=False)

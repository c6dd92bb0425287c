"""The note of a plan that is lower than "auto" would make it is found by who asks for it, however it is worded."""

from __future__ import annotations

import types
from typing import Any

import pytest

from takeback.compiler.run import fitting
from takeback.compiler.run.room import Room

MIB = 2**20


@pytest.mark.parametrize(("needed", "lower"), [(500, False), (2000, True)])
def test_note_of_a_lower_plan_is_found(monkeypatch: pytest.MonkeyPatch, needed: int, lower: bool) -> None:
    asked, made = {"what": "auto"}, {"what": "lower"}
    sizes = {"auto": needed * MIB, "lower": 100 * MIB}
    monkeypatch.setattr(fitting, "needed_bytes", lambda maker, planned: sizes[planned["what"]])
    monkeypatch.setattr(fitting, "room_for", lambda maker: Room(1000 * MIB, "a limit", kills=False))
    monkeypatch.setattr(fitting, "resident_bytes", lambda program: 0)
    monkeypatch.setattr(fitting, "replace", lambda options, **changes: options)
    options = types.SimpleNamespace(memory="auto")
    maker: Any = types.SimpleNamespace(fast=False, options=options, lay_out=lambda finished, options: made)
    one, finished, planned = fitting.Fitting(maker, "why"), types.SimpleNamespace(program=None), asked
    taken: Any = one.fitted(finished, planned)  # type: ignore[arg-type]
    assert (taken is made) is lower
    assert fitting.lowered([*one.notes, "another note"]) is lower

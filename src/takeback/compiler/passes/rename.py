"""Gives one buffer's uses to another: the rewriting that `move` and `chunk_loss` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from takeback.compiler.passes.draft import Draft
from takeback.compiler.program import BufferId, Program, renaming


def rename_in(draft: Draft, program: Program, table: Mapping[BufferId, BufferId]) -> Draft:
    """The draft with `program` in place of its own, renamed; what must be kept is renamed with it."""
    kept = frozenset(_final(b, table) for b in draft.kept)
    return replace(draft, program=rename(program, table), kept=kept)


def _final(buffer: BufferId, table: Mapping[BufferId, BufferId]) -> BufferId:
    while buffer in table:
        buffer = table[buffer]
    return buffer


def rename(program: Program, table: Mapping[BufferId, BufferId]) -> Program:
    """The program with every buffer of `table` replaced, everywhere it is read, written or returned. What is borrowed
    is the caller's, and keeps its name."""
    assert not any(program.buffers[b].role.borrowed for b in table), "a borrowed buffer cannot be given another name"
    return program.map(renaming({b: _final(b, table) for b in table})) if table else program

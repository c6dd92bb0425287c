"""Faults in the code that is generated where torch's allocator places (a GPU): a name is dropped before its bytes are
read for the last time, or later than the plan says, or a call has its operands, results or kernel from elsewhere."""

from __future__ import annotations

import functools
import os
import pickle
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from types import FrameType
from typing import Any
from unittest import mock

import torch
from break_flights import flights_of
from plans_to_break import Subject

from takeback.compiler.run import allocator_executor
from takeback.compiler.run.allocator_code import AllocatorCode, generate_for_allocator
from takeback.compiler.run.allocator_executor import AllocatorExecutor
from takeback.compiler.run.audit import audit
from takeback.errors import BorrowError

Lines = list[tuple[int, str]]
_LONGEST_S = 60.0  #: that a fork may take: some milliseconds are usual
_DROP = re.compile(r"(v\d+ = )+None")


@dataclass(frozen=True)
class CodeMutant:
    """`lines` have not been audited."""

    lines: Lines
    what: str


@functools.lru_cache(maxsize=8)
def _code(name: str, layout_id: int) -> dict[str, Any]:
    return {}


def code_of(subject: Subject) -> AllocatorCode:
    """The valid code, in poison mode."""
    kept = _code(subject.name, id(subject.layout))
    if "code" not in kept:
        kept["code"] = generate_for_allocator(subject.layout, poison=True)
    return kept["code"]


def drop_early(subject: Subject, draw: Random) -> CodeMutant | None:
    """A name is dropped some ops before the last that reads it, or before its bytes are handed on under it."""
    found = _some_drop(subject, draw)
    if found is None:
        return None
    lines, i, name = found
    position = lines[i][0]
    sooner = max(0, position - draw.choice((1, 1, 1, 2, 3, 5)))
    lines = _without(lines, i, name)
    after = [k for k, (p, _) in enumerate(lines) if p <= sooner]
    if sooner == position or not after or not any(re.match(rf".*\b{name}\b.*=", t) for p, t in lines if p <= sooner):
        return None
    if any(text.startswith("return") for _, text in lines[after[-1] : i]):
        return None  # it would be in another function
    lines.insert(after[-1] + 1, (sooner, f"{name} = None"))
    return CodeMutant(lines, f"{name} is dropped after op {sooner} instead of {position}")


def drop_late(subject: Subject, draw: Random) -> CodeMutant | None:
    """A name keeps its bytes for longer than the plan says, or to the end."""
    found = _some_drop(subject, draw)
    if found is None:
        return None
    lines, i, name = found
    position = lines[i][0]
    later = position + draw.choice((1, 2, 3, 5, 1000))
    lines = _without(lines, i, name)
    end = [k for k, (p, text) in enumerate(lines) if p <= later and not text.startswith("return")]
    if later - position < 1000:
        if any(text.startswith("return") for _, text in lines[i : end[-1] + 1]):
            return None
        lines.insert(end[-1] + 1, (lines[end[-1]][0], f"{name} = None"))
    return CodeMutant(lines, f"{name} is dropped after op {later} instead of {position}, or never")


def drop_in_flight(subject: Subject, draw: Random) -> CodeMutant | None:
    """A block goes back to the allocator, by all of its names, after its bucket was handed over and before the group is
    waited for: the next op that asks for as much gets it while it is on its way."""
    found = flights_of(subject)
    if found is None or not subject.is_streamed:
        return None
    sends, wait = found
    lines = list(code_of(subject).lines)
    send = draw.choice(sends)
    handed = [text for p, text in lines if p == send and text.startswith("reduce(")]
    slices = re.findall(r"\bv\d+\b", " ".join(handed))
    if not slices:
        return None
    names = _names_of_the_bytes(draw.choice(slices), [text for p, text in lines if p <= send])
    for name in names:
        for k in reversed([k for k, (p, t) in enumerate(lines) if p >= send and _DROP.fullmatch(t)]):
            if re.search(rf"\b{name}\b", lines[k][1]):
                lines = _without(lines, k, name)
    position = draw.randrange(send, wait)
    at = max(k for k, (p, _) in enumerate(lines) if p <= position)
    if any(text.startswith("return") for _, text in lines[: at + 1]):
        return None  # it would be in another function
    lines.insert(at + 1, (lines[at][0], " = ".join([*names, "None"])))
    return CodeMutant(
        lines, f"{', '.join(names)} of the bucket of op {send} dropped after op {position}, before {wait}"
    )


def _names_of_the_bytes(name: str, texts: list[str]) -> list[str]:
    """Every name that stands for the same bytes, in code that says so by calls of as_strided, over and fit."""
    found = [name]
    looks = [re.match(r"(v\d+) = (?:as_strided|over|fit)\((v\d+)\b", text) for text in texts]
    pairs = [look.groups() for look in looks if look is not None]
    for one in found:
        for pair in (pair for pair in pairs if one in pair):
            found += [other for other in pair if other not in found]
    return found


def call_otherwise(subject: Subject, draw: Random) -> CodeMutant | None:
    """A call has two operands in each other's place, one of another op's, its results in another order, another
    kernel, or another number."""
    if not subject.is_streamed or flights_of(subject) is not None:
        return None  # with a group it cannot run in a process of its own
    code = code_of(subject)
    lines = list(code.lines)
    calls = [k for k, (_, text) in enumerate(lines) if re.search(r"\b[fc]\d+\(", text)]
    k = draw.choice(calls)
    position, text = lines[k]
    left, call, right = (
        re.match(r"(.*?= )?(\b[fc]\d+\()(.*)", text).groups()
        if "= f" in text or "= c" in text
        else (
            "",
            *re.match(r"(.*?\b[fc]\d+\()(.*)", text).groups(),
        )
    )
    left = left or ""
    operands = list(dict.fromkeys(re.findall(r"\b[vtx]\d+\b", right)))
    kind = draw.choice(("exchange", "exchange", "other", "other", "results", "kernel", "number"))
    if kind == "exchange" and len(operands) > 1:
        one, other = draw.sample(operands, 2)
        right = re.sub(rf"\b({one}|{other})\b", lambda m: other if m[0] == one else one, right)
    elif kind == "other" and operands:
        one = draw.choice(operands)
        like = [name for name in _alive(lines, k, code) if name not in text and _alike(name, one, code)]
        if not like:
            return None
        right = re.sub(rf"\b{one}\b", draw.choice(like), right)
    elif kind == "results" and left.count("v") > 1:
        one, other = draw.sample(re.findall(r"v\d+", left), 2)
        left = re.sub(rf"\b({one}|{other})\b", lambda m: other if m[0] == one else one, left)
    elif kind == "kernel":
        called = re.search(r"[fc]\d+", call)[0]
        others = [n for n in code.constants if n[0] == called[0] and n[1:].isdigit() and n != called]
        if not others:
            return None
        call = call.replace(called, draw.choice(others))
    elif kind == "number" and (numbers := re.findall(r"\bn\d+\b", right)):
        one = draw.choice(numbers)
        others = [n for n in code.constants if re.fullmatch(r"n\d+", n) and code.constants[n] != code.constants[one]]
        if not others:
            return None
        right = re.sub(rf"\b{one}\b", draw.choice(others), right)
    changed = left + call + right
    if changed == text:
        return None
    lines[k] = (position, changed)
    return CodeMutant(lines, f"op {position}: `{changed}` instead of `{text}`")


def _some_drop(subject: Subject, draw: Random) -> tuple[Lines, int, str] | None:
    if not subject.is_streamed:
        return None
    lines = list(code_of(subject).lines)
    i = draw.choice([k for k, (_, text) in enumerate(lines) if _DROP.fullmatch(text)])
    return lines, i, draw.choice(re.findall(r"v\d+", lines[i][1]))


def _without(lines: Lines, i: int, name: str) -> Lines:
    """Line `i` without one of its names, and what is poisoned through that with it."""
    position, text = lines[i]
    left = [n for n in re.findall(r"v\d+", text) if n != name]
    new = [(position, " = ".join([*left, "None"]))] if left else []
    poisons = [k for k, line in enumerate(lines) if line == (position, f"poison({name})") and k < i]
    gone = poisons[-1:]  # the one before the drop; a result is poisoned before it is made, too
    return [line for k, line in enumerate([*lines[:i], *new, *lines[i + 1 :]]) if k not in gone]


def _alive(lines: Lines, k: int, code: AllocatorCode) -> list[str]:
    alive: dict[str, None] = {}
    for _, text in lines[:k]:
        if text.startswith("return"):
            alive.clear()
        elif _DROP.fullmatch(text):
            for name in re.findall(r"v\d+", text):
                alive.pop(name, None)
        elif "=" in text:
            alive.update(dict.fromkeys(re.findall(r"\bv\d+\b", text.partition(" = ")[0])))
    return [*alive, *code.meant.borrowed]


def _alike(name: str, other: str, code: AllocatorCode) -> bool:
    known = {**code.meant.borrowed, **code.meant.claims}
    one, two = known.get(name), known.get(other)
    return one is not None and two is not None and (one.dtype, one.shape) == (two.dtype, two.shape)


# -- judging -------------------------------------------------------------------------------------------------------


def rejection_of_code(subject: Subject, mutant: CodeMutant) -> str | None:
    try:
        audit(mutant.lines, code_of(subject).meant, subject.layout)
    except BorrowError as error:
        return f"{type(error).__name__}: {error}"
    return None


def harm_of_code(subject: Subject, mutant: CodeMutant) -> str | None:
    """By running it: what it leaves behind is not what the valid code does, or at some op more bytes are alive."""
    kept = _code(subject.name, id(subject.layout))
    if "alive" not in kept:
        wrong, kept["alive"] = _run(subject, code_of(subject))
        assert wrong is None, wrong
    code = _rewritten(code_of(subject), mutant.lines)
    if flights_of(subject) is not None:  # a fork has no threads that talk to the group; only names are dropped here
        found: tuple[str | None, dict[int, int]] | str = _run(subject, code)
    else:
        found = _forked(lambda: _run(subject, code))
    if isinstance(found, str):
        return found
    wrong, alive = found
    if wrong is not None:
        return wrong
    more = [p for p, size in alive.items() if size > kept["alive"].get(p, size)]
    return f"{alive[more[0]] - kept['alive'][more[0]]} bytes more are alive after op {more[0]}" if more else None


def _forked(run: Callable[[], tuple[str | None, dict[int, int]]]) -> tuple[str | None, dict[int, int]] | str:
    """What it gives in a process of its own, or how that ended: a kernel on operands that it was not made for may write
    anywhere. A fork may find a lock that a thread of its parent held: one that hangs is tried once more."""
    data = _answer_of(run) or _answer_of(run)
    return pickle.loads(data) if data is not None else "the process hangs"


def _answer_of(run: Callable[[], tuple[str | None, dict[int, int]]]) -> bytes | None:
    """None if it was late."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with open(writer, "wb") as sink:
                pickle.dump(run(), sink)
        finally:
            os._exit(0)
    os.close(writer)
    until, parts = time.monotonic() + _LONGEST_S, []
    with open(reader, "rb", buffering=0) as source:
        while select.select([source], [], [], max(0.0, until - time.monotonic()))[0] and (part := source.read(1 << 16)):
            parts.append(part)
    late = time.monotonic() >= until
    if late:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if late:
        return None
    return b"".join(parts) if parts and not status else pickle.dumps(f"the process died ({status})")


def _run(subject: Subject, code: AllocatorCode) -> tuple[str | None, dict[int, int]]:
    maker = subject.step._maker
    watch = _Alive(code)
    with mock.patch.object(allocator_executor, "generate_for_allocator", return_value=code):
        before = sys.gettrace()
        sys.settrace(watch.enter)
        try:
            reducer = maker.group.reducer if maker.group is not None else None
            wrong = subject.run_by(
                lambda: AllocatorExecutor(subject.layout, poison=True, reducer=reducer, kernels=maker.kernels)
            )
        finally:
            sys.settrace(before)
    return wrong, watch.alive


class _Alive:
    """How many bytes the local names of the running code hold when each op is over."""

    def __init__(self, code: AllocatorCode) -> None:
        self.alive: dict[int, int] = {}
        texts = [line.strip() for line in code.source.splitlines()]
        position_of: dict[int, int] = {}
        at = iter(enumerate(texts, 1))
        for position, text in code.lines:
            number = next(n for n, there in at if there == text)
            position_of[number] = position
        self._position_of = position_of
        self._at = -1

    def enter(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename == "<takeback step>" and frame.f_code.co_name in ("compute", "update"):
            self._at = -1
            return self._line
        return None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        position = self._position_of.get(frame.f_lineno)
        if event == "line" and position is not None and position != self._at:
            if self._at >= 0:
                held = [t for t in frame.f_locals.values() if isinstance(t, torch.Tensor)]
                sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
                self.alive[self._at] = sum(sizes.values())
            self._at = position
        return self._line


def _rewritten(code: AllocatorCode, lines: Lines) -> AllocatorCode:
    """The code with other lines in its two functions."""
    source = "\n".join(_sections(code, lines)) + "\n"
    return replace(code, source=source, compiled=compile(source, "<takeback step>", "exec"), lines=tuple(lines))


def _sections(code: AllocatorCode, lines: Lines) -> Iterator[str]:
    """What comes before the functions' bodies stays."""
    texts = code.source.splitlines()
    update = texts.index("    def update(B, S, H):")
    compute = texts.index("    def compute(B):")
    old = _bodies(list(code.lines))
    new = _bodies(lines)
    yield from texts[: compute + 1]
    yield from texts[compute + 1 : update - len(old[0])]
    yield from (f"        {text}" for text in new[0])
    yield from texts[update : len(texts) - 1 - len(old[1])]
    yield from (f"        {text}" for text in new[1])
    yield texts[-1]


def _bodies(lines: Lines) -> tuple[list[str], list[str]]:
    texts = [text for _, text in lines]
    end = next(k for k, text in enumerate(texts) if text.startswith("return")) + 1
    return texts[:end], texts[end:]

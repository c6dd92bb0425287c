"""Finds the line of the user's code behind an op, the innermost Python frame outside torch and takeback's compiler, and
the module that runs there.

An op of the backward pass has no such frame; it gets the line of the forward op whose autograd node is running.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Mapping
from types import FrameType

import torch

from takeback.compiler.program import Site

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep  # all of takeback
_ZOO = os.path.join(_OURS, "zoo") + os.sep
_COMPILER = os.path.join(_OURS, "compiler") + os.sep
_CALL = torch.nn.Module._call_impl.__code__  # every call of a module runs it; checked on 2.11 and 2.13


def belongs_to_user(frame: FrameType) -> bool:
    """False for torch's frames and for takeback's own, the zoo's models excepted."""
    return _is_users(frame.f_code.co_filename)


@functools.cache
def _is_users(file: str) -> bool:
    if file.startswith((_TORCH, "<")):
        return False
    return not file.startswith(_OURS) or file.startswith(_ZOO)


def level_of_user() -> int:
    """For a warning: how far above the function that asks is the innermost frame outside takeback, as `stacklevel`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level


def at(site: Site | None) -> str:
    """The place in words, to follow what happened there in an error; nothing if it is not known."""
    return f" at {site.describe()}" if site else ""


class Sites:
    """Remembers the line of every autograd node made in the forward, to name it in the backward. `modules`: the paths
    of the model's modules, by id."""

    def __init__(self, modules: Mapping[int, str] | None = None) -> None:
        self._modules = modules or {}
        self._by_node: dict[int, Site] = {}
        self._seen: dict[tuple[str, int, str], Site] = {}

    def here(self) -> Site | None:
        """The user's line for the op being dispatched right now."""
        # Checked on 2.11 and 2.13: the node of the op in flight is made before its kernel is dispatched,
        # so its sequence number is the counter minus one; in the backward the engine knows the running node.
        node = torch._C._current_autograd_node()
        if node is not None:
            return self._by_node.get(node._sequence_nr())
        frame: FrameType | None = sys._getframe(1)
        module: str | None = None
        while frame is not None and not _is_users(frame.f_code.co_filename):
            if module is None and frame.f_code is _CALL:
                module = self._path(frame)
            frame = frame.f_back
        if frame is None:
            return None
        site = self._site(frame, self._module_around(frame) if module is None else module)
        # The first op after a node is made is the node's own; later ones without a node of theirs are not.
        self._by_node.setdefault(torch.autograd._get_sequence_nr() - 1, site)
        return site

    def at(self) -> str:
        """The same in words, for an error."""
        return at(self.here())

    def _site(self, frame: FrameType, module: str) -> Site:
        key = (frame.f_code.co_filename, frame.f_lineno, module)
        site = self._seen.get(key)
        if site is None:
            text = linecache.getline(*key[:2]).strip()
            site = self._seen[key] = Site(key[0], key[1], frame.f_code.co_name, text, module)
        return site

    def _module_around(self, inner: FrameType) -> str:
        """The module whose forward has called this frame; "" up to where the step begins."""
        frame: FrameType | None = inner
        while frame is not None and not frame.f_code.co_filename.startswith(_COMPILER):
            if frame.f_code is _CALL and (path := self._path(frame)) is not None:
                return path
            frame = frame.f_back
        return ""

    def _path(self, frame: FrameType) -> str | None:
        """Of the module that this call is of; None if it is none of the model's."""
        return self._modules.get(id(frame.f_locals.get("self")))

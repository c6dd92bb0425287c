"""Modes are left as they were found, wherever Ctrl-C strikes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from takeback.compiler.capture.modes import WithoutDispatchModes, be_on_dispatch_stack_


class Looking(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        be_on_dispatch_stack_(self)
        super().__exit__(*error)


def struck(without: Callable[[], AbstractContextManager[Any]], name: str, event: str, after: int = 0) -> bool:
    """Enters modes, takes them off, and strikes Ctrl-C where a frame of that name has such an event, after so many of
    them. Whether it did."""
    seen = 0

    def strike(frame: FrameType, what: str, arg: object) -> Any:
        nonlocal seen
        if frame.f_code.co_name == name and what == event:
            seen += 1
            if seen > after:
                sys.setprofile(None)
                sys.settrace(None)
                raise KeyboardInterrupt
        return strike

    watch = sys.settrace if event == "line" else sys.setprofile
    try:
        with Looking(), Looking():
            watch(strike)
            with without():
                pass
            watch(None)
    except KeyboardInterrupt:
        return True
    finally:
        watch(None)
    return False


@pytest.mark.parametrize("name", ["__enter__", "__exit__"])
@pytest.mark.parametrize("event", ["call", "return", "c_call", "c_return", "line"])
def test_ctrl_c_around_modes_that_are_off_leaves_none_behind(name: str, event: str) -> None:
    count = 0
    while struck(WithoutDispatchModes, name, event, count):
        gc.collect()
        assert _get_current_dispatch_mode_stack() == []
        count += 1
    assert count


def test_torchs_own_way_leaves_some_behind() -> None:
    """Which is why there is another one. Where this fails, torch has mended it."""
    left, count = set(), 0
    while struck(_disable_current_modes, "__enter__", "c_return", count):
        gc.collect()
        left.add(len(_get_current_dispatch_mode_stack()))
        while _get_current_dispatch_mode_stack():
            torch.utils._python_dispatch._pop_mode()
        count += 1
    assert 2 in left


def test_modes_are_off_inside_and_on_again_in_their_order() -> None:
    with Looking() as outer, Looking() as inner:
        with WithoutDispatchModes():
            assert _get_current_dispatch_mode_stack() == []
        assert _get_current_dispatch_mode_stack() == [outer, inner]

"""Finds the tensors whose values a call reads in C++ where the recorder sees no op: lengths that become sizes, indices
that become slices, numbers that become constants.

The recorder sees what passes the dispatcher. `torch.tensor_split(x, indices)`, `torch.lstm(data, batch_sizes, ...)` or
`torch.tensor([a, b])` look at the bytes of a tensor before any op is dispatched, so a replay would go on with the old
values. A list of such functions would never be complete. So each call that is given whole numbers or booleans is tried
once more, beside the recorded one (trial.py), on stand-ins for these that have no bytes. If the trial dispatches the
very same ops, and its backward runs, nobody looked at the bytes. If not, the plan is for these values only: they are
held by content (`Recorder.hold`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack  # checked on 2.11 and 2.13

from takeback.compiler.capture.modes import be_on_function_stack_
from takeback.compiler.capture.ran import pause_profile_
from takeback.compiler.capture.recorder import Recorder
from takeback.compiler.capture.trial import Call, OpForm, form_of, is_whole, needs_bytes, tensors_in

#: These run Python of the user's, in which calls are seen for themselves.
_BACKWARDS = (torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward)
#: And this one, of all that may be overridden, is given a function of the user's. It reads nothing itself.
_CALLS_BACK = torch.nn.functional.triplet_margin_with_distance_loss


class Reads(TorchFunctionMode):
    """Use around a recorded step, outside of the recorder. `found` is what was held, for tests."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.Size]] = []
        self._recorder = recorder
        self._proved: set[Hashable] = set()

    def __exit__(self, *error: Any) -> None:
        be_on_function_stack_(self)
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        profile = pause_profile_()  # what is looked at in here is not what the step's code looks at
        try:
            kwargs = kwargs or {}
            name = getattr(func, "__name__", str(func))
            tensors = () if name == "__get__" or func in _BACKWARDS else tuple(tensors_in((args, kwargs)))
            if name == "__get__" and func.__self__ is torch.Tensor.grad:
                self._recorder.grads_read.add(id(args[0]))
            numbers = [t for t in tensors if is_whole(t) and t.numel()]
            versions = {id(t): _version(t) for t in tensors}
            constants = self._recorder.table.constants
        finally:
            if profile is not None:
                sys.setprofile(profile)
        if func in _BACKWARDS:
            with self._looking_into_engine():
                return func(*args, **kwargs)
        if func is _CALLS_BACK and callable(kwargs.get("distance_function")):
            return func(*args, **{**kwargs, "distance_function": self._seen_in(kwargs["distance_function"])})
        if not tensors:
            return func(*args, **kwargs)
        recorder = self._recorder
        suspects: list[torch.Tensor] = []
        if not numbers:
            with self._looking_into_hooks():
                out = func(*args, **kwargs)
        else:
            ops: list[OpForm] = []
            recorder.seen = ops
            try:
                with self._looking_into_hooks():
                    out = func(*args, **kwargs)
                seen = tuple(ops)
            finally:
                recorder.seen = None
            unique = list({id(t): t for t in numbers}.values())
            suspects = self._suspects(Call(func, args, kwargs, seen), tensors, unique)
        if recorder.table.constants > constants:
            suspects += _numbers_in_lists((*args, *kwargs.values()))
        for tensor in suspects:
            recorder.hold(tensor, name, changed=_version(tensor) != versions[id(tensor)])
            self.found.append((name, tensor.shape))
        return out

    # Torch takes this mode off during a call, in which Python of the user's may run all the same.

    def _seen_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """With this mode on again. Its ops are none of the call's."""

        def seen(*args: Any, **kwargs: Any) -> Any:
            ops, self._recorder.seen = self._recorder.seen, None
            try:
                with self:
                    return function(*args, **kwargs)
            finally:
                self._recorder.seen = ops

        return seen

    @contextlib.contextmanager
    def _looking_into_hooks(self) -> Iterator[None]:
        """Into those that pack what is saved for the backward."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # checked on 2.11 and 2.13
        if hooks is None or not torch._C._autograd._saved_tensors_hooks_is_enabled():
            yield
            return
        pack, unpack = hooks
        torch._C._autograd._push_saved_tensors_default_hooks(self._seen_in(pack), unpack)
        try:
            yield
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    @contextlib.contextmanager
    def _looking_into_engine(self) -> Iterator[None]:
        """Into functions and hooks that a backward runs which the step itself asks for."""
        engine, thread = torch.autograd._engine_run_backward, threading.get_ident()  # checked on 2.11 and 2.13
        seen, goes_on = self._seen_in(engine), True

        def run(*args: Any, **kwargs: Any) -> Any:
            others = not goes_on or threading.get_ident() != thread
            if others or any(mode is self for mode in _get_current_function_mode_stack()):
                return engine(*args, **kwargs)
            return seen(*args, **kwargs)

        torch.autograd._engine_run_backward = run
        try:
            yield
        finally:
            goes_on = False
            if torch.autograd._engine_run_backward is run:  # after Ctrl-C this may come late
                torch.autograd._engine_run_backward = engine

    def _suspects(self, call: Call, tensors: Sequence[torch.Tensor], numbers: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the whole numbers without whose bytes the call does not dispatch the ops that it did."""
        key = (call.func, call.seen, form_of((call.args, call.kwargs)))
        if key in self._proved or _is_own_kernel(call) or any(map(_is_wrapped, tensors)):
            return []
        if not needs_bytes(call, numbers):
            self._proved.add(key)
            return []
        return [t for t in numbers if needs_bytes(call, [t])] or numbers


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether it stands for many tensors, or for one in a transform (torch.func.vmap, grad): it has no bytes of its own
    to try without, and torch reads none of it. Checked on 2.13."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _is_own_kernel(call: Call) -> bool:
    """Whether an operator that is not torch's was called and did nothing but dispatch itself. It may be Python of the
    user's, which is not run twice."""
    if len(call.seen) != 1 or call.seen[0].target.namespace == "aten":
        return False
    target = call.seen[0].target
    return call.func in (target, target.overloadpacket)


def _numbers_in_lists(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """What has become a part of a constant: torch.tensor([a, b]) of two losses."""
    nested = (t for arg in args if isinstance(arg, list | tuple) for t in tensors_in(arg))
    return [t for t in nested if t.numel() == 1 and not is_whole(t)]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # an inference tensor counts no writes

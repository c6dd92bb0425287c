"""Follows the random generators through a recorded step, so that a replay draws eager's numbers.

Between two random ops nobody should touch a generator. Where somebody did (torch.utils.checkpoint restores an earlier
state before it runs a block again), the state found must be one that was current earlier in the step: then the replay
saves it there and restores it here. Any other state came from a seed inside the step, and the recording is refused.

Other threads may draw from the same generator meanwhile (own_thread.py). That is no matter to a step that draws nothing
from it; if it does, eager and a replay would give different numbers by chance, and the recording is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from takeback.compiler.capture.own_thread import OwnThread
from takeback.compiler.capture.site import at
from takeback.compiler.program import Op, Phase, Site, Special
from takeback.errors import CaptureError


@dataclass(frozen=True)
class _Moment:
    """A moment of the recording: before the op at `position`, the generator had this state."""

    position: int
    generator: torch.Generator


def default_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators that ops of a step on this device draw from if they are given none."""
    if device.type != "cuda":
        return (torch.default_generator,)
    index = torch.cuda.current_device() if device.index is None else device.index
    return (torch.default_generator, torch.cuda.default_generators[index])


_ELSE = struct.Struct("<qqd")  # what belongs to a state besides its block of numbers


class NumpyGenerator(torch.Generator):
    """numpy's global generator, as torch's are known here, so that whoever saves and restores those need not know of
    it: its state is numpy's, and torch draws nothing from it. A program's own keeps what the program calls to draw."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    @staticmethod
    def can_be_followed() -> bool:
        """Whether numpy draws from the generator that it begins with: somebody may have put another in its place."""
        return bool(np.random.get_state(legacy=False)["bit_generator"] == "MT19937")

    def get_state(self) -> torch.Tensor:
        _, key, *others = np.random.get_state(legacy=True)
        assert isinstance(key, np.ndarray)
        return torch.from_numpy(np.frombuffer(bytearray(key.tobytes() + _ELSE.pack(*others)), dtype=np.uint8))

    def set_state(self, state: torch.Tensor) -> NumpyGenerator:
        told = torch._C.TensorBase.numpy(state).tobytes()  # not Tensor's, which is trapped while a step is recorded
        key, others = told[: -_ELSE.size], _ELSE.unpack(told[-_ELSE.size :])
        np.random.set_state(("MT19937", np.frombuffer(key, dtype=np.uint32), *others))
        return self


class DrawsFromNumpy(CaptureError):
    """The step draws from numpy's global generator, where no replay would."""

    def __init__(self, why: str = "") -> None:
        """`why` a function that draws is not called in each replay."""
        super().__init__(
            "the step draws from numpy.random; a replay would use the first draw for ever. Draw before the step and "
            "pass the result in as a tensor, draw with torch, or draw in a function of a module that keeps nothing and "
            "returns an array, of which the step makes a tensor (torch.tensor): such a function is called in each step."
            + (f" Here that cannot be done: {why}." if why else "")
        )


def _state(generator: torch.Generator) -> bytes:
    # Not Tensor's numpy, which is trapped while a step is recorded (leaks.py); a mode, such as set_default_device puts
    # on, would look it up there again. Checked on 2.11 and 2.13.
    with torch._C.DisableTorchFunction():
        return bytes(torch._C.TensorBase.numpy(generator.get_state()).tobytes())


def generator_key(generator: torch.Generator) -> int:
    return int(generator._cdata)


class RandomTrail:
    """The states seen so far, and the save and restore ops that a replay needs."""

    def __init__(
        self,
        generators: Sequence[torch.Generator] = (),
        device: torch.device = torch.device("cpu"),  # noqa: B008
        own: OwnThread | None = None,
    ) -> None:
        self._own = own if own is not None else OwnThread()
        self._used: set[torch.Generator] = set()  #: those that the step itself drew from or set
        self._foreign: set[torch.Generator] = set()  #: those that another thread drew from meanwhile
        self.ends: dict[torch.Generator, torch.Tensor] = {}  #: the states in which the step left those it used
        self._defaults = default_generators(device)
        self._current: dict[torch.Generator, bytes] = {}
        self._seen: dict[tuple[torch.Generator, bytes], _Moment] = {}
        self._saves: dict[_Moment, int] = {}
        self._restores: list[tuple[int, Op]] = []
        # The dispatcher hands a generator over in a new wrapper each time; the thing inside is what counts.
        self._known = {generator_key(g): g for g in (*self._defaults, *generators)}
        for generator in self._known.values():
            state = self._current[generator] = _state(generator)
            self._seen[generator, state] = _Moment(0, generator)
        self._drew_numpy = False
        self._begin = [(generator, generator.get_state()) for generator in self._current]

    def rewind_(self) -> None:
        """Sets every generator back to where the step began, except those that the step left alone: what has moved
        such a one is another thread's."""
        for generator, state in self._begin:
            if generator in self._used or not self._own.exact:
                generator.set_state(state)

    def own(self, generator: torch.Generator) -> torch.Generator:
        """The one that is known, of what the dispatcher hands over."""
        return self._known.get(generator_key(generator), generator)

    def before(self, generator: torch.Generator | None, position: int, site: Site | None) -> None:
        """Called before a random op (and, for every generator, at the end of the step)."""
        if generator is None:  # the op draws from one of these, by the device of its result
            for each in self._defaults:
                self.before(each, position, site)
            return
        own = self._known.get(generator_key(generator))
        if own is None:
            raise CaptureError(
                f"the step draws from a generator{at(site)} that was made inside the step, or is out of takeback's "
                f"sight. A replay would go on drawing from it instead of making it anew. Make it before the step and "
                f"keep it where loss_fn or the model can be seen to hold it."
            )
        now = _state(own)
        was_set = not isinstance(own, NumpyGenerator) and self._own.has_set_(generator_key(own))
        if isinstance(own, NumpyGenerator):
            if now != self._current[own] and (self._own.drew_numpy or not self._own.exact_numpy):
                raise DrawsFromNumpy
            self._drew_numpy = self._own.drew_numpy
        if now != self._current[own] and was_set:
            self._used.add(own)
            self._jump(own, now, position, site)
        elif now != self._current[own]:
            self._foreign.add(own)
            self._current[own] = now
        self._seen.setdefault((own, now), _Moment(position, own))

    def after(self, generator: torch.Generator | None, position: int) -> None:
        """Called after a random op that ran as the op before `position`."""
        if generator is None:
            for each in self._defaults:
                self.after(each, position)
            return
        own = self._known[generator_key(generator)]
        if isinstance(own, NumpyGenerator):
            self._own.drew_numpy = self._drew_numpy  # what such an op draws is drawn in each replay
        state = _state(own)
        if state != self._current[own]:
            self._used.add(own)
        self._current[own] = state
        self._seen.setdefault((own, state), _Moment(position, own))

    def finish(self, position: int) -> None:
        for generator in tuple(self._current):
            self.before(generator, position, None)
        both = self._used & self._foreign
        if both:
            whose = "numpy's" if all(isinstance(g, NumpyGenerator) for g in both) else "torch's"
            raise CaptureError(
                f"another thread drew from {whose} default generator while the step was recorded, and the step draws "
                f"from it as well. Which numbers each of them gets is chance, in eager too, so a plan cannot be "
                f"compared with eager. Give the thread a generator of its own, or let it rest during the first steps."
            )
        self.ends = {generator: generator.get_state() for generator in self._current if generator in self._used}

    def _jump(self, generator: torch.Generator, state: bytes, position: int, site: Site | None) -> None:
        moment = self._seen.get((generator, state))
        if moment is None:
            where = f" before {site.describe()}" if site else " in the step"
            raise CaptureError(
                f"the random state was set{where} to one that this step had not seen (torch.manual_seed or "
                f"set_rng_state inside the step). A replay would draw other numbers than eager. "
                f"Seed before the step, or give the op a generator of its own."
            )
        number = self._saves.setdefault(moment, len(self._saves))
        restore = Op(Special.RESTORE_RANDOM, (number, generator), {}, (), phase=Phase.FORWARD, site=site)
        self._restores.append((position, restore))
        self._current[generator] = state

    def weave(self, ops: list[Op]) -> list[Op]:
        """The ops with the saves and restores put in where they belong."""
        extra: dict[int, list[Op]] = {}
        for moment, number in self._saves.items():
            save = Op(Special.SAVE_RANDOM, (number, moment.generator), {}, ())
            extra.setdefault(moment.position, []).append(save)
        for position, restore in self._restores:
            extra.setdefault(position, []).append(restore)
        if not extra:
            return ops
        woven: list[Op] = []
        for position in range(len(ops) + 1):
            woven.extend(extra.get(position, ()))
            woven.extend(ops[position : position + 1])
        return woven

"""What making a plan took: the seconds of its stages come in from `Work`; a record for the report goes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from takeback.compiler.passes.pipeline import PIPELINE, Watcher
from takeback.compiler.passes.recompute import recompute
from takeback.progress import Doing, Work


@dataclass(frozen=True)
class Spent:
    """Seconds spent on one plan, by stage."""

    recording_s: float = 0.0  #: the step in eager under the recorder, and its update as ops
    proving_s: float = 0.0  #: eager beside the recording and beside the first replays, with those replays
    measuring_s: float = 0.0  #: what an op costs on this machine; once, then it is in the cache
    choosing_s: float = 0.0  #: what to rebuild, with the passes before that
    placing_s: float = 0.0  #: an offset for every value, and the checks of the result
    kernels_s: float = 0.0  #: generated kernels, in mode fast
    writing_s: float = 0.0  #: the code that replays

    @classmethod
    def of(cls, seconds: Mapping[Doing, float]) -> Spent:
        names = {field.name for field in dataclasses.fields(cls)}
        found = {f"{doing.name.lower()}_s": s for doing, s in seconds.items()}
        return cls(**{name: s for name, s in found.items() if name in names})

    def plus(self, seconds: Mapping[Doing, float]) -> Spent:
        more = dataclasses.asdict(Spent.of(seconds))
        return Spent(**{name: s + more[name] for name, s in dataclasses.asdict(self).items()})

    @property
    def total_s(self) -> float:
        return float(sum(dataclasses.asdict(self).values()))


def watcher_for(work: Work) -> Watcher:
    """Tells the work where the passes are. They may be run several times over, for one target after the other."""
    work.begin(Doing.CHOOSING)

    def watch(name: str, before: object, after: object) -> None:
        if name == PIPELINE[0].name:
            work.begin(Doing.CHOOSING)
        elif name == recompute.__name__:
            work.begin(Doing.PLACING)

    return watch

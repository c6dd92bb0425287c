"""A device that refuses memory when it is told to: in the k-th kernel of a replay, of a recording, of an optimizer.

The seams are those that a GPU and the CPU share, so that the same tests run on both: on the CPU torch's allocator
places, as it does on a GPU. `Twins` trains one model compiled and in eager, and compares everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from harness import eager_step, gradients_of, same, state_of
from takeback.compiler.passes import Home
from takeback.compiler.run import recorded_step
from takeback.compiler.run.allocator_code import AllocatorCode
from takeback.compiler.run.kernels import ClusterKernel

WORDS = "out of memory, for a test"
#: In mode fast on a GPU, of a tensor's norm: what a few steps of AdamW make of sums in another order.
NEAR = 1e-2


class Shortage:
    """Counts kernels, and refuses memory to the one at a given count, once."""

    def __init__(self) -> None:
        self.seen, self._left = 0, -1
        self.computed = self.committed = 0  #: kernels before the end of the backward, before the update first writes

    def after_(self, count: int) -> None:
        self.seen, self._left = 0, count

    def __call__(self, *given: Any) -> None:
        self.seen += 1
        if self._left == 0:
            self._left = -1
            raise torch.OutOfMemoryError(WORDS)
        self._left -= self._left > 0

    @property
    def struck(self) -> bool:
        return self._left < 0

    def before(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self()
            return kernel(*args, **kwargs)

        return run

    def after(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """What it has done by then is to be taken back."""

        def run(*args: Any, **kwargs: Any) -> Any:
            made = work(*args, **kwargs)
            self()
            return made

        return run


def in_replays(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    """Of the kernels that generated code calls, clusters among them; call it before there is a plan."""
    short, plain = Shortage(), AllocatorCode.bind

    def bind(code: AllocatorCode, externals: Mapping[Any, Tensor], extra: Mapping[str, object]) -> Any:
        def trapped(name: str, value: object) -> object:
            kernel = name[0] == "f" and name[1:].isdigit() and callable(value)
            return short.before(value) if kernel or isinstance(value, ClusterKernel) else value  # type: ignore[arg-type]

        constants = {name: trapped(name, value) for name, value in code.constants.items()}
        given = {name: trapped(name, value) for name, value in extra.items()}

        def commits() -> None:
            short.committed = short.seen
            extra["commits"]()  # type: ignore[operator]

        def computing(batch: list[Tensor]) -> list[Tensor]:
            made: list[Tensor] = compute(batch)
            short.computed = short.seen
            return made

        compute, update = plain(
            dataclasses.replace(code, constants=constants), externals, {**given, "commits": commits}
        )
        return computing, update

    monkeypatch.setattr(AllocatorCode, "bind", bind)
    return short


def in_recordings(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    """Of the kernels that a recording runs."""
    short, plain = Shortage(), recorded_step.capture

    def capture(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **{**kwargs, "took_": short})

    monkeypatch.setattr(recorded_step, "capture", capture)
    return short


def model_for(device: str) -> nn.Module:
    torch.manual_seed(0)
    # No bias before the norm: its gradient is rounding alone, of which AdamW would make full steps.
    layers = nn.Linear(16, 48, bias=False), nn.BatchNorm1d(48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 24), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(24, 8)).to(device)


def labelled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def rows(i: int, device: str, count: int = 32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    x, y = torch.randn(count, 16, generator=g), torch.randint(8, (count,), generator=g)
    return x.to(device), y.to(device)


def random_states() -> dict[str, Tensor]:
    found = {"random state of the CPU": torch.get_rng_state()}
    return found | ({"random state": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


Optimizers = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


class Twins:
    """A compiled step, which lets torch's allocator place, and eager's."""

    def __init__(self, device: str, mode: str, optimizer: Optimizers, **settings: Any) -> None:
        self.device, self.near = device, NEAR if (device, mode) == ("cuda", "fast") else 0.0
        self.model, self.twin = model_for(device), model_for(device)
        self.optimizer, self.twins = optimizer(self.model.parameters()), optimizer(self.twin.parameters())
        settings.setdefault("graphs", "never")  # of which memory is asked once, and not by each kernel in each step
        self.step = tb.compile_step(self.model, labelled, self.optimizer, mode=mode, **settings)
        self.step._maker.home, self.step._maker.native = Home.ALLOCATOR, None
        self.recipe = {k: v for k, v in settings.items() if k in ("clip_norm", "accumulate")}
        self.taken = 0

    def everything(self) -> dict[str, Tensor]:
        found = state_of(self.model, self.optimizer) | gradients_of(self.model)
        return {name: t.detach().clone() for name, t in found.items()} | random_states()

    def before(self) -> dict[str, Tensor]:
        """Everything, as it is when this step begins."""
        torch.manual_seed(self.taken)
        return self.everything()

    def attempt(self, rows_of: int = 32, **how: Any) -> Tensor:
        """This step of the compiled one."""
        torch.manual_seed(self.taken)
        out: Tensor = self.step(*rows(self.taken, self.device, rows_of), **how)
        return out

    def follow(self, loss: Tensor | None, count: int = 32) -> None:
        """The same one of eager's, and everything is compared."""
        ours = self.everything()
        torch.manual_seed(self.taken)
        expected = eager_step(self.twin, labelled, self.twins, rows(self.taken, self.device, count), **self.recipe)
        self.twin.zero_grad()
        self.compare(loss if loss is not None else expected, expected, ours)
        self.taken += 1

    def add(self, *, update: bool = False) -> None:
        """A call of an accumulation, and the same in eager; with the update, if that is asked for."""
        self.follow_adding(self.attempt(update=update), update=update)

    def follow_adding(self, loss: Tensor, rows_of: int = 32, *, update: bool = False) -> None:
        """What eager does in such a call, and everything is compared."""
        ours = self.everything()
        torch.manual_seed(self.taken)
        expected = labelled(self.twin, *rows(self.taken, self.device, rows_of))
        expected.backward()
        if update:
            nn.utils.clip_grad_norm_(self.twin.parameters(), self.recipe["clip_norm"])
            self.twins.step()
            self.twin.zero_grad()
        self.compare(loss, expected.detach(), ours)
        self.taken += 1

    def accumulate(self) -> None:
        self.add()
        self.add()
        self.add(update=True)

    @property
    def updated(self) -> set[str]:
        """What the update writes: where it has begun, this may not be as before."""
        names = [name for name, _ in self.model.named_parameters()]
        kept = [name for name in state_of(self.model, self.optimizer) if name.rpartition(".")[0] in names]
        return {*names, *kept}

    def notes(self) -> str:
        return "\n".join(self.step.report().notes)

    def kernels(self) -> list[ClusterKernel]:
        return self.step._maker.kernels.in_program(self.step._plans[0].executor.program)

    def compare(self, loss: Tensor, expected: Tensor, ours: Mapping[str, Tensor]) -> None:
        theirs = state_of(self.twin, self.twins) | gradients_of(self.twin) | random_states() | {"loss": expected}
        compared = {**ours, "loss": loss}
        assert compared.keys() == theirs.keys()
        for name, value in theirs.items():
            assert self._alike(compared[name], value), f"{name} is not eager's after step {self.taken}"

    def _alike(self, mine: Tensor, theirs: Tensor) -> bool:
        if not self.near or not theirs.is_floating_point():
            return same(mine, theirs)
        mine, theirs = mine.detach(), theirs.detach()
        return float((mine - theirs).norm()) <= self.near * float(theirs.norm()) + 1e-6

    def take(self, steps: int = 1, count: int = 32) -> None:
        for _ in range(steps):
            self.follow(self.attempt(count), count)

    def fails(self, match: str = WORDS, count: int = 32, **how: Any) -> BaseException:
        """The step is refused memory, says so, and everything is as before it."""
        before = self.before()
        with pytest.raises((torch.OutOfMemoryError, tb.errors.NoRoomError), match=match) as raised:
            self.step(*rows(self.taken, self.device, count), **how)
        unchanged(self.everything(), before)
        assert torch.is_grad_enabled()
        return raised.value


def unchanged(now: Mapping[str, Tensor], before: Mapping[str, Tensor], but: Collection[str] = ()) -> None:
    assert now.keys() - but == before.keys() - but, (now.keys() ^ before.keys()) - set(but)
    changed = [name for name, value in before.items() if name not in but and not same(now[name], value)]
    assert not changed, f"{changed} are not as before the step"


def put_back_(twins: Twins, before: Mapping[str, Tensor]) -> None:
    """What a user's own copy would: into the very tensors."""
    with torch.no_grad():
        for name, tensor in state_of(twins.model, twins.optimizer).items():
            tensor.copy_(before[name])

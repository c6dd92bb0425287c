"""What a loss of TRL's keeps is told after the step, with that step's values; who looks at one in the step reads it.

tests/integrations/test_trl.py has the trainers themselves."""

from __future__ import annotations

import types
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import takeback as tb
from takeback.errors import CaptureError
from takeback.integrations.transformers.telling import Telling, ToldLater, reading, tell_

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")

#: As code of TRL's reads and keeps: what it does is known by the module that it stands in.
SOURCE = """
def compute_loss(trainer, model, x, mask):
    out = model(x)
    loss = out.square().mean()
    seen = trainer.accelerator.gather_for_metrics(mask.sum()).sum().item()
    trainer._total += seen // 1
    metrics = trainer._metrics["train"]
    metrics["count"] = [trainer._total]
    picked = out.detach()[mask].sum()
    metrics["mean"].append(trainer.accelerator.gather_for_metrics(picked).item() / seen if seen > 0 else 0.0)
    metrics["twice"].append(2 * metrics["mean"][-1])
    metrics["rows"].append(len(out.detach()[mask]) if trainer.looks else 0)
    metrics["fixed"].append(7)
    return loss
"""
MODULE = types.ModuleType("trl.stand_in")
exec(SOURCE, vars(MODULE))


class Gathering:
    def gather_for_metrics(self, values: Any) -> Any:
        return values

    gather = reduce = gather_for_metrics


class Stepping:
    def __init__(self) -> None:
        self.telling: Telling | None = None
        self.kept: dict[str, Any] = {}


class Keeping:
    """As a trainer of TRL's keeps."""

    _metrics = ToldLater("_metrics")
    _total = ToldLater("_total")

    def __init__(self, *, looks: bool = False) -> None:
        self._takeback, self.accelerator, self.looks = Stepping(), Gathering(), looks
        self._metrics, self._total = {"train": defaultdict(list)}, 0

    def plain(self, model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        loss: Tensor = MODULE.compute_loss(self, model, x, mask)
        return loss

    def loss(self, model: nn.Module, x: Tensor, mask: Tensor) -> tuple[Tensor, list[Any]]:
        with reading(self.accelerator) as telling:
            self._takeback.telling = telling
            try:
                loss = self.plain(model, x, mask)
            finally:
                self._takeback.telling = None
        return loss, telling.data()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 4), torch.rand(6, 3) < 0.2 + 0.2 * i) for i in range(count)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def test_each_step_tells_its_own_values_by_one_plan() -> None:
    theirs, ours = Keeping(), Keeping()
    net, twin = model(), model()
    sgd, eager = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    step = tb.compile_step(net, ours.loss, sgd, memory="keep")
    for x, mask in batches(5):
        _, told = step(x, mask)
        tell_(ours._takeback.kept, told)
        eager.zero_grad()
        theirs.plain(twin, x, mask).backward()
        eager.step()
    assert ours._metrics == theirs._metrics
    assert ours._total == theirs._total > 0
    assert len(set(ours._metrics["train"]["mean"])) == 5
    assert step.counts.planned == 5
    assert len(step._plans) == 1


def test_who_looks_gets_the_value_of_a_plan_of_its_own() -> None:
    ours, net = Keeping(looks=True), model()
    step = tb.compile_step(net, ours.loss, torch.optim.SGD(net.parameters(), 0.1), memory="keep")
    for x, mask in batches(2):
        tell_(ours._takeback.kept, step(x, mask)[1])
    assert ours._metrics["train"]["rows"] == [int(mask.sum()) for _, mask in batches(2)]
    assert len(step._plans) == 2


def test_a_number_is_computed_with_after_the_step() -> None:
    telling = Telling()
    total = telling.read("_total")
    telling.write("_total", 1 + (total - 2) * 3 % 5)
    telling.read("_metrics")["train"]["total"] = [telling.read("_total"), total]
    kept: dict[str, Any] = {"_total": 4, "_metrics": {"train": {}}}
    tell_(kept, telling.data())
    assert kept == {"_total": 2, "_metrics": {"train": {"total": [2, 4]}}}


def test_kept_numbers_are_those_before_the_step() -> None:
    telling = Telling()
    one, two = telling.read("_total"), telling.read("_other")
    telling.write("_total", one + 1)
    telling.write("_other", two + one)
    kept: dict[str, Any] = {"_total": 4, "_other": 10}
    tell_(kept, telling.data())
    assert kept == {"_total": 5, "_other": 14}


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (lambda t: t.read("_total") > 3, "looks at trainer._total"),
        (lambda t: float(t.read("_total")), "looks at trainer._total"),
        (lambda t: f"{t.read('_total')}", "looks at trainer._total"),
        (lambda t: len(t.read("_metrics")["train"]["mean"]), "history of its metric 'mean'"),
        (lambda t: t.read("_metrics")["train"]["mean"][-1], "history of its metric 'mean'"),
        (lambda t: sum(t.read("_metrics")["train"]["mean"]), "history of its metric 'mean'"),
    ],
)
def test_what_no_replay_has_cannot_be_looked_at(look: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        look(Telling())

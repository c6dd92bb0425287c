"""What a loss of TRL's keeps is told after the step, with that step's values; who looks at one in the step reads it.

tests/integrations/test_trl.py has the trainers themselves."""

from __future__ import annotations

import re
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainingArguments

import takeback as tb
from takeback.errors import CaptureError
from takeback.integrations.transformers import TakebackMixin
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
    metrics["pair"] += [(seen, {"half": seen / 2}), 1]
    metrics["more"].extend([seen, 1])
    metrics["by dimension"].append(out.detach()[mask].mean(dim=0).item())
    metrics["tensor"].append(out.detach()[mask].sum())
    running = mask.sum()
    metrics["before"].append(running.item())
    running += 100
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
        told = telling.data()
        telling.end({"trainer": self, "model": model})
        return loss, told


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
        (lambda t: t.read("_metrics")["train"]["mean"].pop(), r"metric 'mean' \(train\) by .pop"),
        (lambda t: t.read("_metrics")["train"]["mean"] == [], r"metric 'mean' \(train\) by =="),
        (lambda t: t.read("_metrics")["train"]["mean"] + [1], r"metric 'mean' \(train\) by \+"),
        (lambda t: "mean" in t.read("_metrics")["train"], r"metrics \(train\) by in"),
        (lambda t: t.read("_metrics")["train"].setdefault("mean", []), r"metrics \(train\) by .setdefault"),
        (lambda t: list(t.read("_metrics")), "metrics .* by a loop"),
    ],
)
def test_what_no_replay_has_cannot_be_looked_at(look: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        look(Telling())


#: x: 3.0, n: 3, v: 0.0 to 5.0, m: v > 2; what eager makes of them.
LOOKS = """
torch.tensor(x.item())    torch.tensor([x.item(), 1.0])    torch.full((2,), x.item())    torch.zeros(n.item())
torch.clamp(v, max=x.item())    v.clamp(min=x.item())    v.masked_fill(m, x.item())    torch.arange(n.item())
torch.add(v, x.item())    v.add(x.item())    v.pow(x.item())    v.split(n.item())    v.sum(n.item() - 3)
v > x.item()    x.item() > v    x.item() == v    v[:n.item()]    v[n.item()]    v.view(n.item(), 2)
v.view((n.item(), 2))    torch.where(v > x.item(), v, x.item())    x.item() == None    x.item() == n.item()
divmod(n.item(), 2)    +x.item()    n.item() & 1    1 | n.item()    x.item().is_integer()    {x.item(): 1}[3.0]
v[m] == 4    v[m] != 4    4 == v[m]    v[m] == v[m]    (v[m] == v[m]).float().mean()    m[m] & (v > 3)[m]
m[m] | (v > 3)[m]    m[m] ^ (v > 3)[m]    ~(v > 3)[m]    True & m[m]    torch.stack([v[m].mean(), x])
torch.cat([v[m], v])    torch.cat(tensors=(v, v[m]))    v[m].mean(0)    v[m].mean(dim=0)
v[m].sum(dim=-1, keepdim=True)    v.view(3, 2)[n > v[:3]].sum(0)    v.view(3, 2)[v[:3] > 0].mean(0)[1]
v[m][v[m] > 3]    v[m].sum(dtype=torch.double)    f"{v[m].mean():.1f}"    x.item() + v[m]    v[m] @ v[m]
v.index_select(0, v[m].long())    v[m].clamp(max=x.item())    v[m].mean() > x.item()    len({v[m], v[m]})
x.item() in [1.0, 3.0]    max(x.item(), 1.0)    v[m][v[m].argmax()]
"""


@pytest.mark.parametrize("look", [each for line in LOOKS.split("\n") for each in re.split(r"\s{2,}", line) if each])
def test_who_looks_gets_what_eager_gives(look: str) -> None:
    home: dict[str, Any] = {}
    exec(f"def compute_loss(torch, x, n, v, m):\n    return {look}", home)
    v = torch.arange(6.0)
    operands = (torch, torch.tensor(3.0), torch.tensor(3), v, v > 2)
    theirs = home["compute_loss"](*operands)
    with reading(Gathering()) as telling:
        ours = home["compute_loss"](*operands)
    telling.write("_result", ours)
    kept: dict[str, Any] = {}
    tell_(kept, telling.data())
    assert type(kept["_result"]) is type(theirs)
    assert str(kept["_result"]) == str(theirs)  # few, short, and exact; a dtype shows


def test_what_is_written_to_a_picked_tensor_stays() -> None:
    def compute_loss(x: Tensor) -> tuple[Any, Any, Any]:
        picked = x[x > 1]
        before = picked.sum()
        picked.add_(1)
        picked[0] = 7
        return before.item(), picked.sum().item(), picked

    with reading(Gathering()):
        before, after, picked = compute_loss(torch.arange(4.0))
        assert (float(before), float(after), picked.tolist()) == (5.0, 11.0, [7.0, 4.0])


@pytest.mark.parametrize("use", [lambda picked: picked.sum().item(), lambda picked: picked.max()])
def test_what_is_picked_later_is_what_was_there_or_refused(use: Any) -> None:
    def compute_loss(telling: Telling, x: Tensor, of: Tensor) -> None:
        picked = of[x > 1]
        x.zero_()
        telling.write("_picked", use(picked))

    def told(telling: Telling, x: Tensor, of: Tensor) -> None:
        compute_loss(telling, x, of)
        telling.data()

    x = torch.arange(4.0)
    with reading(Gathering()) as telling:
        told(telling, x.clone(), x.clone())
        with pytest.raises(CaptureError, match=r"tensor\.clone\(\)\[mask"):
            told(telling, x, x)


ELSEWHERE: list[Any] = []


def keeping_by(line: str) -> Keeping:
    lines = ("out = model(x)", "loss = out.mean()", line, "return loss")
    home: dict[str, Any] = {"elsewhere": ELSEWHERE}
    exec("\n    ".join(("def compute_loss(trainer, model, x, mask):", *lines)), home)
    ours = Keeping()
    ours.plain = lambda *args: home["compute_loss"](ours, *args)  # type: ignore[method-assign]
    return ours


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        ("trainer.last = loss.item()", "trainer.last."),
        ("trainer.last = 2 * loss.item() + 1", "trainer.last."),
        ("trainer.last = trainer._total", "trainer.last."),
        ("trainer.last = out.detach()[mask]", "trainer.last."),
        ("trainer.last = {'a': [(1, loss.item())]}", "trainer.last['a'][0][1]."),
        ("trainer.accelerator.last = loss.item()", "trainer.accelerator.last."),
        ("model.last = loss.item()", "model.last."),
        ("model.weight.last = loss.item()", "a variable outside of trainer and model."),
        ("elsewhere.append(loss.item())", "a variable outside of trainer and model."),
    ],
)
def test_who_keeps_a_value_where_nobody_tells_it_is_refused_by_name(keep: str, name: str) -> None:
    ours = keeping_by(keep)
    with pytest.raises(CaptureError, match=re.escape(f"keeps a value of the step in {name}")):
        ours.loss(model(), *batches(1)[0])
    ELSEWHERE.clear()


def test_a_value_in_a_cycle_that_nobody_has_is_not_kept() -> None:
    ours = keeping_by("me = [loss.item()]; me.append(me)")
    _, told = ours.loss(model(), *batches(1)[0])
    assert told == []


TRAINER = """
from collections import defaultdict
from transformers import Trainer

class StandIn(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._metrics, self._total_train_tokens = {"train": defaultdict(list)}, 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(inputs["x"]).square().mean()
        self._metrics["train"]["loss"].append(loss.item())
        return loss
"""


def test_a_trainer_does_not_keep_a_number_of_one_step_for_all(tmp_path: Path) -> None:
    exec(TRAINER, vars(MODULE))

    class Compiled(TakebackMixin, MODULE.StandIn):  # type: ignore[misc, name-defined]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.keeps:
                self.last = loss.item()
            return loss

    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False
    )
    rows = [{"x": torch.full((4,), float(i))} for i in range(24)]
    made = Compiled(model=model(), args=arguments, train_dataset=rows)
    made.keeps = False
    made.train()
    assert len(set(made._metrics["train"]["loss"])) == 3
    made.keeps = True
    with pytest.raises(CaptureError, match=re.escape("in trainer.last.")):
        made.train()

"""A Lightning Trainer with the Takeback callback leaves what a stock one leaves, bit by bit, or says why not."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "parallel"))  # how processes are started is shared with its tests
from lightning_twins import SCALED, Fit, Lit, assert_equal_fits, assert_some_were_skipped, fit, fit_both, scaled
from ranks import FINE, run_ranks

from harness import same_bits
from takeback.errors import CaptureError, OptionError
from takeback.integrations.lightning import Takeback
from takeback.integrations.lightning_checks import wants_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("_alone", "short_search"),
    # By a signal, the handler of which Lightning keeps: from there all tests of the session are in the module's reach.
    pytest.mark.timeout(method="thread"),
]
slow = pytest.mark.slow


@pytest.fixture
def _alone() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


# -- settings of the Trainer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, id="accumulated-and-clipped"),
        pytest.param({"gradient_clip_val": 0.1}, id="clipped", marks=slow),
        pytest.param({"accumulate_grad_batches": 3}, id="accumulated", marks=slow),
        pytest.param({"precision": "bf16-mixed"}, id="bf16-mixed"),
        pytest.param({"plugins": SCALED, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}, id="16-mixed"),
        pytest.param({"plugins": SCALED}, id="16-mixed-plain", marks=slow),
        pytest.param({"precision": "bf16-true"}, id="bf16-true", marks=slow),
        pytest.param({"precision": "64-true"}, id="64-true", marks=slow),
        pytest.param({"max_steps": 7, "max_epochs": -1, "val_check_interval": 2}, id="many-validations", marks=slow),
    ],
)
def test_a_fit_is_stocks(settings: dict[str, Any]) -> None:
    done = fit_both(**settings)
    assert done.takeback is not None
    assert done.takeback.leaves_grads == ()
    assert done.takeback.report().peak_bytes > 0


@slow
def test_one_plan_serves_all_batches_of_a_shape() -> None:
    done = fit_both(max_epochs=3, count=36)
    assert done.takeback is not None
    assert len(done.takeback.step._plans) == 2  # the last batch of an epoch has four rows  # type: ignore[union-attr]


def clipped_by_value() -> dict[str, Any]:
    return {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


class Groups(Lit):
    """Its optimizer has the parameters in another order than the module."""

    def configure_optimizers(self) -> Any:
        last, first = list(self.net[4].parameters()), [*self.net[0].parameters(), *self.net[1].parameters()]
        return torch.optim.AdamW([{"params": last, "weight_decay": 0.0}, {"params": first}], lr=1e-2)


class Between(Lit):
    """Looks at gradients, changes them, and decides on the update itself."""

    def on_after_backward(self) -> None:
        self.hooks.append(f"after {self.net[0].weight.grad.norm().item()}")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())
        for p in self.parameters():
            p.grad.mul_(0.5)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + self.trainer.global_step)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


class Watching(pl.Callback):  # type: ignore[misc]
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.hooks.append(f"grad {pl_module.net[4].bias.grad.sum().item()}")


@pytest.mark.parametrize(
    ("make", "settings", "why"),
    [
        pytest.param(Between, {"accumulate_grad_batches": 2}, "overrides on_after_backward", id="hooks"),
        pytest.param(Between, {"plugins": SCALED}, "overrides on_after", id="hooks-and-scaler", marks=slow),
        pytest.param(Lit, {"callbacks": [Watching]}, "the callback Watching", id="callback", marks=slow),
        pytest.param(Lit, clipped_by_value(), "by value", id="by-value", marks=slow),
        pytest.param(Groups, {"gradient_clip_val": 0.1}, "order of the optimizer's groups", id="groups", marks=slow),
    ],
)
def test_who_looks_between_backward_and_update_finds_stocks_gradients(
    make: Callable[[], Any], settings: dict[str, Any], why: str
) -> None:
    done = fit_both(make, **settings)
    assert done.takeback is not None
    assert why in " ".join(done.takeback.leaves_grads)


# -- what training_step tells ------------------------------------------------------------------------------------------


class Telling(Lit):
    """Logs tensors, numbers and metrics; returns more than a loss."""

    def __init__(self) -> None:
        super().__init__()
        metrics = pytest.importorskip("torchmetrics")
        self.accuracy = metrics.classification.MulticlassAccuracy(4)
        self.both = metrics.MetricCollection(
            [metrics.classification.MulticlassRecall(4), metrics.classification.MulticlassPrecision(4)]
        )
        self.mean = metrics.MeanMetric()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1 if self.current_epoch else 0.0)
        self.log_dict({"a/loss": loss, "a/rows": float(len(x)), "a/top": logits.max()}, on_step=True, on_epoch=True)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("at once", self.both["MulticlassRecall"](logits, y))
        self.both.update(logits, y)
        self.mean.update(loss)
        return {"loss": loss, "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.outputs += [outputs["loss"], outputs["logits"]]

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.both.compute())
        self.log("mean", self.mean.compute())
        self.both.reset()


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=slow)])
def test_what_is_logged_and_returned_is_stocks(each: int) -> None:
    stock = fit(Telling, accumulate_grad_batches=each)
    ours = fit(Telling, takeback=Takeback(memory="keep"), accumulate_grad_batches=each)
    assert_equal_fits(ours, stock)
    assert any("accuracy_epoch" in line for _, line in ours.lines)
    for mine, theirs in zip(ours.module.outputs, stock.module.outputs, strict=True):
        assert same_bits(mine, theirs.detach())
        assert not mine.requires_grad


class WithoutIndex(Lit):
    """Logs a number that the scheduler changes after each step, too."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return F.cross_entropy(self(x), y)


@slow
def test_a_number_that_is_logged_is_the_one_of_its_step() -> None:
    done = fit_both(WithoutIndex)
    assert done.takeback is not None
    assert done.takeback.step is not None
    assert done.takeback.step._replays == 8
    assert len({line["rate"] for _, line in done.lines if "rate" in line}) == 10


class Computes(Telling):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        return out["loss"] * (1 - self.accuracy(out["logits"], batch[1]))


class Keeps(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses = [*getattr(self, "losses", []), loss.detach()]
        return loss


class Skips(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Counts(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, 0) * (1 if batch_idx % 2 else 2)


class Manual(Lit):
    automatic_optimization = False


class Several(Lit):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 4)]


class Backward(Lit):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class BeforeBackward(pl.Callback):  # type: ignore[misc]
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Computes, {}, r"computes at .*test_lightning.py:\d+ with what the metric 'accuracy' gave"),
        (Keeps, {}, r"as aux|keeps state"),
        (Skips, {}, r"without a loss"),
        (Counts, {}, r"uses batch_idx at .*test_lightning.py:\d+, .*on_train_batch_end"),
        (Manual, {}, r"compile the steps yourself"),
        (Backward, {}, r"the module overrides backward"),
        (Lit, {"callbacks": [BeforeBackward]}, r"the callback BeforeBackward overrides on_before_backward"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_way_out(
    make: Callable[[], Any], settings: dict[str, Any], message: str
) -> None:
    module = make()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    with pytest.raises(CaptureError, match=message) as caught:
        fit(lambda: module, takeback=Takeback(memory="keep"), **settings)
    if make is Keeps:  # a refusal of the step itself says what Lightning's way is
        assert any("on_train_batch_end(outputs" in note for note in caught.value.__notes__)
    for name, now in module.state_dict().items():
        assert same_bits(now, before[name]), name


def told(**differs: Any) -> SimpleNamespace:
    """What the checks look at of a Trainer."""
    module = Lit()
    said = {
        "lightning_module": module,
        "callbacks": [],
        "optimizers": [torch.optim.SGD(module.parameters(), lr=0.1)],
        "strategy": pl.strategies.SingleDeviceStrategy("cpu"),
        "precision_plugin": pl.plugins.Precision(),
        "gradient_clip_val": None,
        "gradient_clip_algorithm": None,
    }
    return SimpleNamespace(**(said | differs))


class Iterates(Lit):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"strategy": type("FSDPStrategy", (), {})()}, "strategy is FSDPStrategy.*strategy='ddp'"),
        ({"strategy": type("DeepSpeedStrategy", (), {})()}, "strategy is DeepSpeedStrategy"),
        (
            {"precision_plugin": type("TransformerEnginePrecision", (), {})()},
            "plugin is TransformerEngine.*'bf16-mixed'",
        ),
        ({"lightning_module": Iterates()}, "takes a dataloader_iter.*needs the batch"),
        ({"strategy": pl.strategies.DDPStrategy(ddp_comm_hook=print)}, "has a communication hook.*without these"),
        ({"strategy": pl.strategies.DDPStrategy(model_averaging_period=2)}, "model averaging.*without these"),
        ({"strategy": pl.strategies.DDPStrategy(broadcast_buffers=False)}, "broadcast_buffers=False.*without these"),
        ({"strategy": pl.strategies.DDPStrategy(), "precision_plugin": scaled()}, "a scaler and.*DDP.*'bf16-mixed'"),
    ],
)
def test_what_a_trainer_asks_for_in_vain_is_refused(differs: dict[str, Any], message: str) -> None:
    assert wants_of(told()).leaves_grads == ()
    with pytest.raises(CaptureError, match=message):
        wants_of(told(**differs))


def test_several_optimizers_are_refused() -> None:
    with pytest.raises((CaptureError, RuntimeError), match="optimizers"):
        fit(Several, takeback=Takeback())


def test_what_the_trainer_says_is_no_option() -> None:
    with pytest.raises(OptionError, match="gradient_clip_val"):
        Takeback(clip_norm=1.0)
    with pytest.raises(CaptureError, match="no batch"):
        Takeback().report()


# -- over time ---------------------------------------------------------------------------------------------------------


def test_a_fit_goes_on_from_a_checkpoint_as_stock_does(tmp_path: Path) -> None:
    """Each goes on from its own checkpoint, and ours from stock's: all are the same."""
    ends = {}
    for name, takeback in (("stock", False), ("ours", True)):
        made = Takeback(memory="keep") if takeback else None
        first = fit(takeback=made, max_epochs=1, plugins=SCALED)
        first.trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    for name, source, takeback in (("stock", "stock", False), ("ours", "ours", True), ("crossed", "stock", True)):
        made = Takeback(memory="keep") if takeback else None
        ends[name] = fit(takeback=made, max_epochs=3, plugins=SCALED, ckpt_path=str(tmp_path / f"{source}.ckpt"))
    assert_equal_fits(ends["ours"], ends["stock"])
    assert_equal_fits(ends["crossed"], ends["stock"])
    assert ends["ours"].trainer.global_step == 15
    assert_some_were_skipped(ends["ours"])


def test_a_fit_goes_on_from_the_middle_of_an_epoch_as_stock_does(tmp_path: Path) -> None:
    """From what ModelCheckpoint wrote after three of five batches: all progress counters are in there."""
    ends = {}
    for name, takeback in (("stock", None), ("ours", Takeback(memory="keep"))):
        saves = functools.partial(
            pl.callbacks.ModelCheckpoint, tmp_path / name, "{step}", every_n_train_steps=3, save_top_k=-1
        )
        fit(takeback=takeback, callbacks=[saves], plugins=SCALED, enable_checkpointing=True)
        path = str(tmp_path / name / "step=3.ckpt")
        made = Takeback(memory="keep") if takeback else None
        ends[name] = fit(takeback=made, plugins=SCALED, ckpt_path=path)
    assert_equal_fits(ends["ours"], ends["stock"])
    assert_some_were_skipped(ends["ours"])
    assert ends["ours"].trainer.global_step == 10
    assert ends["ours"].module.hooks[0] == "start 3 3"


class Thawing(pl.Callback):  # type: ignore[misc]
    """Freezes the first layer for an epoch, then gives it to the optimizer, in a group of its own at the end."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.net[0].requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(pl_module.net[0].parameters())})


class Late(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for m in list(self.net)[1:] for p in m.parameters()], lr=1e-2)


@slow
def test_parameters_that_are_thawed_are_trained_and_clipped_as_in_stock() -> None:
    done = fit_both(Late, callbacks=[Thawing], gradient_clip_val=0.1, max_epochs=3)
    assert done.takeback is not None
    assert "order" in done.takeback.leaves_grads[0]


class Ema(pl.Callback):  # type: ignore[misc]
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        rate = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(pl_module.net, multi_avg_fn=rate, use_buffers=True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(pl_module.net)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.hooks.append([t.tolist() for t in self.average.state_dict().values()])


@pytest.mark.parametrize(
    "callbacks",
    [
        pytest.param([Ema], id="ema"),
        pytest.param([lambda: pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})], id="accumulation", marks=slow),
        pytest.param([lambda: pl.callbacks.StochasticWeightAveraging(1e-2, 1)], id="swa", marks=slow),
        pytest.param([lambda: pl.callbacks.LearningRateMonitor("step")], id="lr", marks=slow),
        pytest.param([lambda: pl.callbacks.WeightAveraging()], id="weight-averaging", marks=slow),
    ],
)
def test_callbacks_find_what_they_find_in_stock(callbacks: list[Callable[[], Any]]) -> None:
    fit_both(callbacks=callbacks, max_epochs=3)


@slow
def test_the_trainer_is_as_it_was_after_a_fit() -> None:
    ours = fit(takeback=Takeback(memory="keep"))
    loop = ours.trainer.fit_loop.epoch_loop.automatic_optimization
    assert "_make_closure" not in vars(loop)
    assert "_optimizer_step" not in vars(loop)
    assert "log" not in vars(ours.module)


@slow
def test_one_callback_serves_two_fits() -> None:
    takeback = Takeback(memory="keep")
    again: list[Fit] = [fit(takeback=takeback) for _ in range(2)]
    assert_equal_fits(again[0], again[1])


@slow
def test_gradients_are_there_afterwards_if_they_are_asked_for() -> None:
    class Reads(Lit):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.hooks.append(f"{self.net[0].weight.grad.sum().item()}")

    fit_both(Reads, options={"keep_grads": True})


@slow
def test_two_processes_train_as_with_ddp(tmp_path: Path) -> None:
    for name, said in run_ranks(2, "lightning_ranks", ["ddp", "ddp_refusals"], tmp_path, limit_s=240).items():
        assert said == [FINE, FINE], f"{name}: {said}"

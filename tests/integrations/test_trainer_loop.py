"""What goes on around the steps of a TakebackTrainer goes on as in Trainer: callbacks, losses of the user's, evaluation
and generation, checkpoints, LoRA, several trainings."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainer_twins import (
    Texts,
    assert_same,
    assert_trained,
    both,
    history,
    llama,
    lora,
    means,
    padded,
    state_of,
    trainer,
)
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback
from transformers.tokenization_utils_base import BatchEncoding

from takeback.errors import CaptureError
from takeback.integrations.transformers import TakebackTrainer

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
slow = pytest.mark.slow


# -- callbacks -----------------------------------------------------------------------------------------------------


class Average(TrainerCallback):
    """An exponential moving average of the parameters."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.mean = copy.deepcopy(dict(model.named_parameters()))

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, p in model.named_parameters():
            self.mean[name].lerp_(p, 0.1)


class Generating(TrainerCallback):
    """Writes a text after each update, and draws random numbers for it."""

    def __init__(self) -> None:
        self.written: list[Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        was = model.training
        model.eval()
        start = torch.tensor([[5, 6]])
        mask = torch.ones_like(start)
        text = model.generate(start, attention_mask=mask, max_new_tokens=3, do_sample=True, pad_token_id=0)
        self.written.append(text)
        model.train(was)


class Meddling(TrainerCallback):
    """Changes gradients before the update, and looks at them after it."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p), alpha=0.01)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.norms.append(sum(float(p.grad.norm()) for p in model.parameters()))


def test_an_average_generation_and_evaluation_between_steps_change_nothing(tmp_path: Path) -> None:
    def given() -> dict[str, Any]:
        return {"callbacks": [Average(), Generating()], "eval_dataset": Texts(3)}

    case = {"given": given, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 5}
    theirs, ours = both(tmp_path, gradient_accumulation_steps=2, **case)
    assert_same(theirs, ours)
    assert_trained(ours)
    assert any("eval_loss" in entry for entry in history(ours))
    (mean, writing), (our_mean, our_writing) = (
        [c for c in each.callback_handler.callbacks if isinstance(c, Average | Generating)] for each in (theirs, ours)
    )
    assert all(torch.equal(p, our_mean.mean[name]) for name, p in mean.mean.items())
    assert len(writing.written) == 5
    assert all(map(torch.equal, writing.written, our_writing.written))


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=slow)])
def test_callbacks_find_gradients_where_trainer_has_them(microbatches: int, tmp_path: Path) -> None:
    case = {"given": lambda: {"callbacks": [Meddling()]}, "max_steps": 4}
    theirs, ours = both(tmp_path, gradient_accumulation_steps=microbatches, **case)
    assert_same(theirs, ours)
    assert_trained(ours)
    norms, our_norms = (
        next(c for c in each.callback_handler.callbacks if isinstance(c, Meddling)).norms for each in (theirs, ours)
    )
    assert len(norms) == 4
    assert our_norms == norms


@slow
def test_a_callback_may_drop_gradients(tmp_path: Path) -> None:
    class Dropping(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 1:
                model.zero_grad()

    theirs, ours = both(tmp_path, given=lambda: {"callbacks": [Dropping()]}, max_steps=4)
    assert_same(theirs, ours)


@slow
def test_an_optimizer_and_a_scheduler_may_be_given(tmp_path: Path) -> None:
    trained = []
    for i, kind in enumerate((Trainer, TakebackTrainer)):
        model = llama()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        pair = (sgd, torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.9))
        made = {"make": lambda model=model: model, "given": lambda pair=pair: {"optimizers": pair}}
        trained.append(trainer(kind, tmp_path / str(i), max_steps=4, **made))
        trained[-1].train()
    assert_same(*trained)
    assert_trained(trained[1])


def own_optimizer(kind: type[Trainer]) -> type[Trainer]:
    """Makes both itself, without a word to Trainer: as its documentation has it."""

    class Own(kind):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            if self.optimizer is None:
                groups = [
                    {"params": [*self.model.lm_head.parameters()], "lr": 1e-3},
                    {"params": [*self.model.model.parameters()]},
                ]
                self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if self.lr_scheduler is None:
                rates = [group["lr"] for group in self.optimizer.param_groups]
                self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
                    self.optimizer, rates, total_steps=num_training_steps
                )
            return self.lr_scheduler

    return Own


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=slow)])
def test_a_trainer_may_make_its_optimizer_without_super(microbatches: int, tmp_path: Path) -> None:
    kinds = (own_optimizer(Trainer), own_optimizer(TakebackTrainer))
    case = {"gradient_accumulation_steps": microbatches, "max_steps": 4}
    theirs, ours = both(tmp_path, kinds=kinds, **case)
    assert_same(theirs, ours)
    assert_trained(ours)
    assert ours.optimizer.optimizer.state  # the update is the compiled step's, on this optimizer


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=slow)])
def test_an_optimizer_that_is_put_in_the_place_of_the_steps_is_refused(microbatches: int, tmp_path: Path) -> None:
    """Its step() would find no gradients, or make an update that the step knows nothing of."""

    class Replacing(TrainerCallback):
        trainer: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.trainer.optimizer = torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)

    replacing = Replacing()
    case = {"max_steps": 2, "gradient_accumulation_steps": microbatches}
    ours = trainer(TakebackTrainer, tmp_path, given=lambda: {"callbacks": [replacing]}, **case)
    replacing.trainer = ours
    with pytest.raises(CaptureError, match=r"trainer\.optimizer is a SGD.*create_optimizer\(\)"):
        ours.train()


@slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_losses_that_are_not_finite_are_logged_as_in_trainer(microbatches: int, tmp_path: Path) -> None:
    case = {"learning_rate": 1e30, "max_steps": 4, "gradient_accumulation_steps": microbatches}
    theirs, ours = both(tmp_path, **case)
    assert history(ours) == history(theirs)
    assert "nan" in str(history(ours))


@slow
def test_hooks_of_the_optimizer_are_called(tmp_path: Path) -> None:
    calls: list[list[int]] = []

    class Hooked(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            mine: list[int] = []
            calls.append(mine)
            optimizer.optimizer.register_step_pre_hook(lambda *_: mine.append(state.global_step))

    theirs, ours = both(tmp_path, given=lambda: {"callbacks": [Hooked()]}, max_steps=3)
    assert_same(theirs, ours)
    assert calls == [[0, 1, 2], [0, 1, 2]]


# -- losses --------------------------------------------------------------------------------------------------------


def weighted(kind: type[Trainer]) -> type[Trainer]:
    """A trainer with a loss of its own, whose weight changes after a while, and which looks at the batch."""

    class Weighted(kind):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.weight = 0.5

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            ids = inputs.pop("input_ids")
            out = model(input_ids=ids, labels=inputs.pop("labels"))
            return out.loss + self.weight * out.logits.square().mean()

    return Weighted


class Warming(TrainerCallback):
    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.weight = 0.5 + 0.25 * state.global_step


def test_compute_loss_of_a_subclass_is_what_is_trained(tmp_path: Path) -> None:
    trained = []
    for i, kind in enumerate((Trainer, TakebackTrainer)):
        warming = Warming()
        each = trainer(
            weighted(kind),
            tmp_path / str(i),
            make=means,
            given=lambda warming=warming: {"callbacks": [warming]},
            gradient_accumulation_steps=2,
            max_steps=4,
        )
        warming.trainer = each
        each.train()
        trained.append(each)
    assert_same(*trained)
    assert_trained(trained[1])
    assert len(trained[1].compiled_step._plans) == 1  # the weight is a number that the plan reads anew


def test_what_changes_in_the_trainer_between_steps_is_heard(tmp_path: Path) -> None:
    """With smoothed labels, one microbatch for each update, and a warmup."""

    class Smoothing(TrainerCallback):
        trainer: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.trainer.label_smoother.epsilon = 0.1 if state.global_step < 3 else 0.5

    trained = []
    for i, kind in enumerate((Trainer, TakebackTrainer)):
        each = trainer(kind, tmp_path / str(i), label_smoothing_factor=0.1, lr_scheduler_type="cosine", warmup_steps=2)
        smoothing = Smoothing()
        smoothing.trainer = each
        each.add_callback(smoothing)
        each.train()
        trained.append(each)
    assert_same(*trained)


@slow
def test_compute_loss_func_gets_the_items_of_the_whole_batch(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        rows = outputs.logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(rows, labels[:, 1:].flatten(), reduction="sum") / (num_items_in_batch + 1)

    case = {"given": lambda: {"compute_loss_func": loss, "data_collator": padded}, "data": Texts(spread=3)}
    theirs, ours = both(tmp_path, gradient_accumulation_steps=2, **case)
    assert_same(theirs, ours)


@slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_that_cannot_be_planned_is_trained_as_in_trainer(microbatches: int, tmp_path: Path) -> None:
    """Where that is asked for."""

    def picking(kind: type[Trainer]) -> type[Trainer]:
        class Picking(kind):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                logits = model(input_ids=inputs["input_ids"]).logits
                return logits[logits > logits.mean()].square().mean()

        return Picking

    case = {"make": means, "max_steps": 6, "gradient_accumulation_steps": microbatches}
    kinds = (picking(Trainer), picking(TakebackTrainer))
    with pytest.warns(RuntimeWarning, match="shape depends on the data"):
        theirs, ours = both(tmp_path, kinds=kinds, takeback={"unplanned": "eager"}, **case)
    assert_same(theirs, ours)
    assert ours.compiled_step.counts.plain > 0
    with pytest.raises(CaptureError, match="shape depends on the data"):
        trainer(picking(TakebackTrainer), tmp_path / "refused", **case).train()


@slow
def test_batch_encodings_stay_what_they_are(tmp_path: Path) -> None:
    def collate(items: list[dict[str, Tensor]]) -> BatchEncoding:
        return BatchEncoding(padded(items))

    def own(kind: type[Trainer]) -> type[Trainer]:
        class Own(kind):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                return model(input_ids=inputs.input_ids, labels=inputs.labels).loss

        return Own

    case = {"given": lambda: {"data_collator": collate}, "max_steps": 3}
    theirs, ours = both(tmp_path, kinds=(own(Trainer), own(TakebackTrainer)), **case)
    assert_same(theirs, ours)


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lora, pytest.param(llama, marks=slow)])
def test_a_training_that_is_resumed_ends_with_the_same_bits(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Of Trainer's whole training, and of one that Trainer began."""
    case = {"make": make, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    theirs, ours = both(tmp_path, **case)
    assert_same(theirs, ours)
    for i, begun in enumerate((theirs, ours)):
        again: Any = trainer(TakebackTrainer, tmp_path / f"resumed-{i}", **case)
        again.train(resume_from_checkpoint=str(Path(begun.args.output_dir) / "checkpoint-2"))
        for each in (theirs, again):
            each.state.log_history[-1].pop("train_loss", None)  # of the steps of one call
        assert_same(theirs, again)
        assert_trained(again)


@slow
def test_the_best_model_is_loaded_and_a_second_training_goes_on(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 1}
    theirs, ours = both(tmp_path, given=lambda: {"eval_dataset": Texts(3)}, **saving, **best)
    assert_same(theirs, ours)
    for each in (theirs, ours):
        torch.manual_seed(3)
        each.args.max_grad_norm = 0.1  # another clipping
        each.train()
    assert_same(theirs, ours)


# -- other loops ---------------------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Three batches and no length: an accumulation of two is left over."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([Texts()[i] for i in range(6)])


@slow
@pytest.mark.parametrize("keep", [None, False])
def test_what_a_stream_leaves_over_goes_into_the_next_update(keep: bool | None, tmp_path: Path) -> None:
    case = {"data": Stream(), "max_steps": 4, "gradient_accumulation_steps": 2, "takeback": {"keep_grads": keep}}
    theirs, ours = both(tmp_path, **case)
    assert_same(theirs, ours)


@slow
def test_it_is_mixed_into_another_trainer(tmp_path: Path) -> None:
    class Mixed(TakebackTrainer, Seq2SeqTrainer):
        pass

    trained = []
    for i, kind in enumerate((Seq2SeqTrainer, Mixed)):
        args = Seq2SeqTrainingArguments(output_dir=str(tmp_path / str(i)), use_cpu=True, report_to=[], max_steps=2)
        trained.append(kind(model=llama(), args=args, train_dataset=Texts()))
        trained[-1].train()
    a, b = map(state_of, trained)
    assert all(torch.equal(a[name], b[name]) for name in a)


@slow
def test_a_batch_that_does_not_fit_is_made_smaller(tmp_path: Path) -> None:
    def small(kind: type[Trainer]) -> type[Trainer]:
        class Small(kind):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                if len(inputs["input_ids"]) > 2:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return super().compute_loss(model, inputs, *args, **kwargs)

        return Small

    case = {"auto_find_batch_size": True, "per_device_train_batch_size": 4, "max_steps": 4}
    theirs, ours = both(tmp_path, kinds=(small(Trainer), small(TakebackTrainer)), **case)
    assert ours._train_batch_size == theirs._train_batch_size < 4
    assert_same(theirs, ours)
    assert_trained(ours)


@slow
def test_a_model_is_made_anew_for_each_training(tmp_path: Path) -> None:
    trained = []
    for i, kind in enumerate((Trainer, TakebackTrainer)):
        each = trainer(
            kind, tmp_path / str(i), make=lambda: None, given=lambda: {"model_init": lambda: llama()}, max_steps=3
        )
        each.train()
        first = each.model
        each.train()
        assert each.model is not first
        trained.append(each)
    assert_same(*trained)


@pytest.mark.parametrize("optim", ["adamw_torch", pytest.param("adamw_torch_fused", marks=slow)])
@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=slow)])
def test_a_scaler_scales_skips_and_unscales(microbatches: int, optim: str, tmp_path: Path) -> None:
    """fp16 needs a GPU for Accelerate, but a scaler does not: its accelerator is given one."""
    trained = []
    for i, kind in enumerate((Trainer, TakebackTrainer)):
        case = {"gradient_accumulation_steps": microbatches, "max_steps": 6, "optim": optim}
        each = trainer(kind, tmp_path / str(i), **case)
        each.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        each.accelerator.native_amp = True
        each.accelerator.state._mixed_precision = "fp16"
        try:
            each.train()
        finally:
            each.accelerator.state._mixed_precision = "no"
        trained.append(each)
    theirs, ours = trained
    assert ours.accelerator.scaler.state_dict() == theirs.accelerator.scaler.state_dict()
    assert_same(theirs, ours)
    norms = [float(entry["grad_norm"]) for entry in history(ours)[:-1]]
    assert not all(map(math.isfinite, norms))
    assert any(map(math.isfinite, norms))


# -- training steps of the user's ------------------------------------------------------------------------------------


def twice(kind: type[Trainer]) -> type[Trainer]:
    class Twice(kind):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            super().training_step(*args, **kwargs)
            return super().training_step(*args, **kwargs)

    return Twice


def test_a_training_step_that_runs_twice_is_refused_where_the_first_has_updated(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="called again after the update"):
        trainer(twice(TakebackTrainer), tmp_path / "refused", max_steps=2).train()


@slow
def test_a_training_step_may_run_twice_where_gradients_wait(tmp_path: Path) -> None:
    kinds = (twice(Trainer), twice(TakebackTrainer))
    theirs, ours = both(tmp_path, kinds=kinds, max_steps=2, takeback={"keep_grads": True})
    assert_same(theirs, ours)


def test_a_training_step_past_the_compiled_one_is_refused(tmp_path: Path) -> None:
    class Past(TakebackTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            return Trainer.training_step(self, *args, **kwargs)

    with pytest.raises(CaptureError, match="must call super"):
        trainer(Past, tmp_path, max_steps=2).train()

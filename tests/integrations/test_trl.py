"""A trainer of TRL's behind TakebackMixin has its bits: parameters, losses, and every metric that its loss keeps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from transformers import TrainerCallback
from trl import GRPOConfig, SFTConfig, SFTTrainer
from trl.extras import profiling
from trl.kernels import chunked_logprob
from trl_twins import assert_same, both, compiled, history, llama, texts, trainer

from takeback.errors import CaptureError, OptionError
from takeback.integrations.transformers import TakebackMixin, TakebackTrainer
from takeback.integrations.transformers.refusals import check_of_trl
from takeback.integrations.transformers.telling import loss_alone

pytestmark = [pytest.mark.usefixtures("one_thread", "short_search"), pytest.mark.filterwarnings("ignore")]
slow = pytest.mark.slow

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
#: By name: which trainer, and how.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "dpo, one microbatch": ("dpo", {"gradient_accumulation_steps": 1, "max_steps": 3}),
    "dpo": ("dpo", {}),
    "dpo, the reference's known": ("dpo", {"precompute_ref_log_probs": True}),
    "dpo, ipo": ("dpo", {"loss_type": "ipo"}),
    "reward": ("reward", {}),
    "kto": ("kto", {}),
    "grpo": ("grpo", {}),
    "grpo, batches used twice": ("grpo", {"num_iterations": 2}),
    "rloo": ("rloo", {}),
    "packed": ("sft", {"packing": True, "max_length": 16, "data": texts(spread=4)}),
    "packed by chunks": ("sft", {"packing": True, "packing_strategy": "wrapped", "max_length": 8}),
    "padding-free": ("sft", {"padding_free": True, "max_length": None, "data": texts(spread=3)}),
    "lengths": ("sft", {"data": texts(spread=3)}),
    "checkpointing": ("sft", {"gradient_checkpointing": True}),
    "bf16": ("sft", {"bf16": True}),
    "dft": ("sft", {"loss_type": "dft"}),
    "smoothed": ("sft", {"label_smoothing_factor": 0.1}),
    "evaluated": ("sft", {"eval_strategy": "steps", "eval_steps": 2, "given": {"eval_dataset": texts(4)}}),
    "verified": ("sft", {"takeback": {"verify_every": 2, "memory": "min"}}),
}
#: Whose plans are for one shape: a metric that differs from step to step costs no plan.
ONE_PLAN = ("sft", "dpo", "reward", "kto", "bf16", "dft")
QUICK = tuple(CASES)[:2]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else slow) for n in CASES])
def test_a_training_has_trls_bits_and_metrics(name: str, tmp_path: Path) -> None:
    kind, case = CASES[name]
    theirs, ours = both(kind, tmp_path, **case)
    assert_same(theirs, ours)
    if name in ONE_PLAN:
        assert len(ours.compiled_step._plans) == 1
    if kind == "sft":
        logged = [entry["entropy"] for entry in history(ours) if "entropy" in entry]
        assert len(set(logged)) == len(logged) > 1  # of each step, not of the one that was recorded
        assert ours._total_train_tokens == theirs._total_train_tokens > 0


@slow
@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_adapters_have_trls_bits(name: str, tmp_path: Path) -> None:
    """Those of DPO and GRPO are left out where the reference is computed, inside of the step."""
    peft = pytest.importorskip("peft")
    given = {"peft_config": peft.LoraConfig(**LORA), **({"ref_model": None} if name == "dpo" else {})}
    case = {"beta": 0.1} if name == "grpo" else {}
    assert_same(*both(name, tmp_path, given=given, **case))


@slow
def test_a_training_is_resumed_with_the_count_of_tokens(tmp_path: Path) -> None:
    """TRL counts anew in each run, and so does the mixin."""
    trained = []
    for ours in (False, True):
        folder = tmp_path / str(ours)
        trainer("sft", folder, ours=ours, save_strategy="steps", save_steps=2).train()
        trained.append(trainer("sft", folder, ours=ours))
        trained[-1].train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert_same(*trained)
    assert trained[0]._total_train_tokens == trained[1]._total_train_tokens


def test_a_step_that_fails_tells_nothing(tmp_path: Path) -> None:
    class Failing(compiled("sft")):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            super().compute_loss(*args, **kwargs)
            raise RuntimeError("after all metrics")

    failing = Failing(
        model=llama(),
        args=SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True),
        train_dataset=texts(4),
        processing_class=trainer("sft", tmp_path, ours=False).processing_class,
    )
    with pytest.raises(RuntimeError, match="after all metrics"):
        failing.train()
    assert dict(failing._metrics["train"]) == {}
    assert failing._total_train_tokens == 0
    assert "gather_for_metrics" not in vars(failing.accelerator)


@slow
def test_a_loss_around_trls_may_keep_metrics_of_its_own(tmp_path: Path) -> None:
    class Keeping:
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
            mine = self._metrics["train"]  # type: ignore[attr-defined]
            mine["root"].append(loss.detach().sqrt().item())
            ids = inputs["input_ids"]
            mine["large"].append(ids[ids > 15].sum().item() / 2)
            return loss

    trained = []
    for bases in ((SFTTrainer,), (TakebackMixin, SFTTrainer)):
        made = trainer("sft", tmp_path, ours=False)
        options = {"takeback": {"memory": "keep"}} if TakebackMixin in bases else {}
        kind: Any = type("Mine", (Keeping, *bases), {})
        trained.append(
            kind(
                model=llama(),
                args=made.args,
                train_dataset=texts(),
                processing_class=made.processing_class,
                **options,
            )
        )
        trained[-1].train()
    assert_same(*trained)
    assert len(trained[1].compiled_step._plans) == 1
    assert len({entry["large"] for entry in trained[1].state.log_history if "large" in entry}) == 4


@slow
def test_a_loss_that_looks_at_what_changes_in_each_step_is_refused(tmp_path: Path) -> None:
    class Counting(TakebackMixin, SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * 2 if self._total_train_tokens > 100 else loss

    class Remembering(TakebackMixin, SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * len(self._metrics["train"]["entropy"])

    for kind, message in ((Counting, "trainer._total_train_tokens"), (Remembering, "history of its metric 'entropy'")):
        made = kind(
            model=llama(),
            args=SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True),
            train_dataset=texts(4),
            processing_class=trainer("sft", tmp_path, ours=False).processing_class,
        )
        with pytest.raises(CaptureError, match=re.escape(message)):
            made.train()


class OfTwo(SFTConfig):
    """Says that there are two processes where there is one."""

    @property
    def world_size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: OfTwo(f, use_cpu=True, bf16=False), "gathers metrics of 2 processes"),
        (lambda f: SFTConfig(f, use_cpu=True, bf16=False, activation_offloading=True), "memory='min'"),
        (
            lambda f: GRPOConfig(f, use_cpu=True, bf16=False, use_adaptive_entropy=True, entropy_coef=0.1),
            "entropy_coef",
        ),
    ],
)
def test_an_argument_of_trl_is_refused_by_name(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        check_of_trl(compiled("sft"), make(str(tmp_path)))


def test_the_mixin_stands_in_front_and_takeback_trainer_does_not() -> None:
    with pytest.raises(CaptureError, match=re.escape("SFTTrainer has a training_step() of its own")):
        type("Mine", (TakebackTrainer, SFTTrainer), {})


def test_beside_a_step_trl_is_as_it_was() -> None:
    context, kernels = profiling.profiling_context, chunked_logprob._TRITON_AVAILABLE
    with loss_alone():
        assert not chunked_logprob._use_triton(torch.device("cuda"))
    assert profiling.profiling_context is context
    assert kernels == chunked_logprob._TRITON_AVAILABLE


@slow
def test_callbacks_find_gradients_where_trl_has_them(tmp_path: Path) -> None:
    class Looking(TrainerCallback):
        def __init__(self) -> None:
            self.norms: list[float] = []

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.norms.append(sum(float(p.grad.norm()) for p in model.parameters()))

    looks = [Looking(), Looking()]
    trained = []
    for ours, look in zip((False, True), looks, strict=True):
        trained.append(trainer("sft", tmp_path / str(ours), ours=ours, given={"callbacks": [look]}))
        trained[-1].train()
    assert_same(*trained)
    assert looks[0].norms == looks[1].norms
    assert len(looks[0].norms) == 4

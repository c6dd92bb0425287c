"""Forward hooks run while a step is recorded, so what they compute is part of the program: norms that torch and people
put on modules by hooks, checkpointing, transformers' captured outputs. A hook that keeps something is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from step_twins import assert_same, mlp, sgd, snapshot
from torch import Tensor, nn
from train_twice import Training, assert_equal_trainings, batch, simple

import takeback as tb
from harness import same_bits
from takeback.errors import CaptureError

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


# -- norms ---------------------------------------------------------------------------------------------------------


def old_weight_norm(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(model[0])


def old_spectral_norm(model: Any) -> None:
    torch.nn.utils.spectral_norm(model[0])
    torch.nn.utils.spectral_norm(model[3])


def pruned(model: Any) -> None:
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    prune.random_structured(model[3], "weight", amount=1, dim=0)
    prune.l1_unstructured(model[3], "bias", amount=1)


def new_weight_norm(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model[0])


def new_spectral_norm(model: Any) -> None:
    torch.nn.utils.parametrizations.spectral_norm(model[3])


def standardized(model: Any) -> None:
    """A pre-hook of one's own that changes the input, and a hook that changes the output."""
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model[3].register_forward_hook(lambda module, args, out: out - out.mean(1, keepdim=True))


NORMS = [old_weight_norm, old_spectral_norm, pruned, new_weight_norm, new_spectral_norm, standardized]


@pytest.mark.parametrize("put", NORMS, ids=lambda f: f.__name__)
def test_norm_on_a_module_trains_to_eagers_bits_through_evaluations(put: Callable[[Any], None]) -> None:
    """An evaluation between steps sets the weight anew, and needs no new plan."""
    weights: dict[bool, list[Tensor]] = {False: [], True: []}

    def make(compiled: bool) -> Training:
        model = mlp(dropout=0.1)
        put(model)
        training = simple(model, cross_entropy, sgd(model), compiled)
        usual = training.step

        def step(i: int) -> Any:
            loss = usual(i)
            if put in (old_weight_norm, old_spectral_norm, pruned):
                weights[compiled].append(model[0].weight.detach().clone())
            if i == 3:
                model.eval()
                with torch.no_grad():
                    model(batch(99)[0])
                model.train()
            return loss

        training.step = step
        return training

    done = assert_equal_trainings(make)
    assert done.compiled[0]._replays == 5
    for eager, ours in zip(weights[False], weights[True], strict=True):
        assert same_bits(eager, ours), "the weight that the hook leaves on the module"


def more_pruned(model: Any) -> None:
    prune.l1_unstructured(model[0], "weight", amount=0.3)


def not_pruned(model: Any) -> None:
    prune.remove(model[0], "weight")


def first_by_another_mask(model: Any) -> None:
    prune.remove(model[0], "weight")
    prune.custom_from_mask(model[0], "weight", torch.arange(96).view(16, 6) % 3 > 0)


CHANGES = [
    (mlp, more_pruned),
    (pruned, more_pruned),
    (pruned, not_pruned),
    (pruned, first_by_another_mask),
]


@pytest.mark.parametrize(("put", "change"), CHANGES, ids=lambda f: f.__name__)
def test_pruning_may_come_and_go_between_steps(put: Callable[[Any], Any], change: Callable[[Any], None]) -> None:
    """More is pruned by the weight that the last forward has left."""
    states: dict[bool, list[dict[str, Tensor]]] = {False: [], True: []}

    def make(compiled: bool) -> Training:
        model = mlp()
        if put is not mlp:
            put(model)
        training = simple(model, cross_entropy, sgd(model), compiled)
        usual = training.step

        def step(i: int) -> Any:
            if i == 3:
                change(model)
            loss = usual(i)
            left = {"weight": model[0].weight.detach().clone()}
            states[compiled].append({n: t.detach().clone() for n, t in model.state_dict().items()} | left)
            return loss

        training.step = step
        return training

    done = assert_equal_trainings(make, steps=8)
    assert done.compiled[0]._replays == 6
    for eager, ours in zip(states[False], states[True], strict=True):
        assert_same(ours, eager)


def test_step_that_fails_leaves_pruned_weights_as_they_were() -> None:
    model = mlp()
    pruned(model)
    optimizer = sgd(model)

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model, x, y)
        if x.shape[0] == 3:
            raise RuntimeError("the user's own")
        return loss

    step = tb.compile_step(model, loss_fn, optimizer)
    for i in range(3):
        step(*batch(i))
    before, weight = snapshot(model, optimizer), model[0].weight.clone()
    with pytest.raises(RuntimeError, match="the user's own"):
        step(*(t[:3] for t in batch(3)))
    assert_same(snapshot(model, optimizer), before)
    assert same_bits(model[0].weight, weight)


def test_prediction_of_a_module_with_an_old_norm_is_made() -> None:
    model = mlp()
    old_weight_norm(model)
    prune.l1_unstructured(model[3], "weight", amount=0.3)
    assert tb.predict(model, cross_entropy, sgd(model), *batch(0)).ops > 10


@pytest.mark.parametrize("change", ["added", "removed", "replaced"])
def test_hook_that_changes_between_steps_takes_effect(change: str) -> None:
    def make(compiled: bool) -> Training:
        model = mlp()
        handles = [] if change == "added" else [model[0].register_forward_hook(lambda m, a, out: out * 2.0)]
        training = simple(model, cross_entropy, sgd(model), compiled)
        usual = training.step

        def step(i: int) -> Any:
            if i == 3:
                for handle in handles:
                    handle.remove()
                if change != "removed":
                    model[0].register_forward_hook(lambda m, a, out: out * 3.0)
            return usual(i)

        training.step = step
        return training

    assert_equal_trainings(make, steps=8)


def test_hook_that_stores_an_activation_is_refused_with_the_way_out() -> None:
    model, activations = mlp(), {}
    handle = model[0].register_forward_hook(lambda m, a, out: activations.update(first=out))
    optimizer = sgd(model)
    step = tb.compile_step(model, cross_entropy, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(CaptureError, match="Return it as aux instead"):
        step(*batch(0))
    assert_same(snapshot(model, optimizer), before)
    handle.remove()
    activations.clear()
    step(*batch(0))


# -- transformers --------------------------------------------------------------------------------------------------


def gpt2(**settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1, **settings
    )
    return transformers.GPT2LMHeadModel(config).train()


def wav2vec2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_stride=(4, 4),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        num_labels=3,
        apply_spec_augment=False,
        layerdrop=0.0,
    )
    return transformers.Wav2Vec2ForSequenceClassification(config).train()


def tokens(i: int) -> tuple[Tensor]:
    return (torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(i)),)


def sound(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(2, 160, generator=g), torch.randint(0, 3, (2,), generator=g)


def language(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradient_checkpointing_of_transformers_trains_to_eagers_bits(reentrant: bool) -> None:
    def make(compiled: bool) -> Training:
        model = gpt2()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return simple(model, language, adamw(model), compiled, draw=tokens)

    assert_equal_trainings(make, steps=4)


@pytest.mark.parametrize("what", [pytest.param("output_hidden_states", marks=pytest.mark.slow), "output_attentions"])
def test_captured_outputs_of_transformers_are_part_of_the_step(what: str) -> None:
    def loss_fn(model: Any, ids: Tensor) -> Tensor:
        out = model(input_ids=ids, labels=ids, **{what: True})
        more = out.hidden_states if what == "output_hidden_states" else out.attentions
        return out.loss + 0.1 * torch.stack([m.square().mean() for m in more]).sum()

    def make(compiled: bool) -> Training:
        model = gpt2(attn_implementation="eager")
        return simple(model, loss_fn, adamw(model), compiled, draw=tokens)

    assert_equal_trainings(make, steps=4)


def test_evaluation_that_captures_outputs_does_not_stop_the_training() -> None:
    def make(compiled: bool) -> Training:
        model = gpt2()
        training = simple(model, language, adamw(model), compiled, draw=tokens)
        usual = training.step

        def step(i: int) -> Any:
            if i == 2:
                with torch.no_grad():
                    model.eval()(input_ids=tokens(i)[0], output_hidden_states=True)
                    model.train()
            return usual(i)

        training.step = step
        return training

    assert assert_equal_trainings(make).compiled[0]._replays == 4, "one new plan, for the hooks that are there now"


def test_wav2vec2_trains_to_eagers_bits_with_hidden_states() -> None:
    """Its positions are a convolution under weight norm."""

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x, labels=y, output_hidden_states=True)
        return out.loss + out.hidden_states[0].square().mean()

    def make(compiled: bool) -> Training:
        model = wav2vec2()
        return simple(model, loss_fn, adamw(model), compiled, draw=sound)

    assert_equal_trainings(make, steps=4)

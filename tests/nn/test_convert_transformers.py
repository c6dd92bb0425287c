"""`convert` on causal language models of transformers: the same numbers, keys and behaviour, with less kept.

None of these architectures is named in the code. `Strange` is one that transformers does not have.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback.errors import ConvertError
from takeback.nn import LazyLogits, conversion, convert, copies_of, revert

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

#: Config and what is converted: norms, gated MLPs, activations.
MODELS: dict[str, tuple[Any, tuple[int, int, int]]] = {
    "Llama": (lambda: transformers.LlamaConfig(**SIZES, **HEADS, **IDS), (5, 2, 0)),
    "Gemma2": (lambda: transformers.Gemma2Config(**SIZES, **HEADS, **IDS, head_dim=8), (9, 2, 0)),
    "Qwen2": (lambda: transformers.Qwen2Config(**SIZES, **HEADS, **IDS), (5, 2, 0)),
    "Phi3": (lambda: transformers.Phi3Config(**SIZES, **HEADS, **IDS), (5, 2, 0)),
    "GPT2": (
        lambda: transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, **IDS),
        (5, 0, 2),
    ),
    "Granite": (lambda: transformers.GraniteConfig(**SIZES, **HEADS, **IDS, logits_scaling=3.0), (5, 2, 0)),
    "Gemma": (lambda: transformers.GemmaConfig(**SIZES, **HEADS, **IDS, head_dim=8), (5, 2, 0)),
    "Mistral": (lambda: transformers.MistralConfig(**SIZES, **HEADS, **IDS), (5, 2, 0)),
    "Olmo": (lambda: transformers.OlmoConfig(**SIZES, **HEADS, **IDS), (5, 2, 0)),  # norms without weight
    "NanoChat": (lambda: transformers.NanoChatConfig(**SIZES, **HEADS, **IDS), (9, 0, 0)),
    "Lfm2": (  # its forwards call F.silu
        lambda: transformers.Lfm2Config(**SIZES, **HEADS, **IDS, layer_types=["conv", "full_attention"]),
        (7, 2, 0),
    ),
    "Olmo2": (lambda: transformers.Olmo2Config(**SIZES, **HEADS, **IDS), (9, 2, 0)),
    "Qwen3": (lambda: transformers.Qwen3Config(**SIZES, **HEADS, **IDS, head_dim=8), (9, 2, 0)),
    "Cohere": (lambda: transformers.CohereConfig(**SIZES, **HEADS, **IDS), (3, 2, 0)),
}
QUICK = ("Llama", "Gemma2", "GPT2", "Phi3")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = MODELS[name][0]()
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # nothing at 0 or 1, where mistakes would not show
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: Any, **more: Any) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    loss = model(**batch(), **more).loss
    loss.backward()
    grads = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=1e-6, atol=0)
    whole = sum(float(each.double().square().sum()) for name, each in theirs.items() if name != "loss") ** 0.5
    for name, value in theirs.items():
        assert float((ours[name] - value).norm()) <= 1e-5 * float(value.norm()) + 1e-6 * whole, name


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_stay_and_revert_gives_the_very_bits_back(name: str) -> None:
    model = model_of(name)
    before, keys, classes = step(model), list(model.state_dict()), [type(each) for each in model.modules()]
    attributes = [set(vars(each)) for each in model.modules()]
    assert convert(model) is model
    report = conversion(model)
    kinds = [changed.what for changed in report.changed]
    assert tuple(map(kinds.count, ("norm", "gated MLP", "activation"))) == MODELS[name][1], str(report)
    assert kinds.count("output layer") == 1
    assert_near(step(model), before)
    assert isinstance(model(**batch()).logits, LazyLogits)
    assert not any("whole" in str(copies) for copies in copies_of(model).values())
    assert list(model.state_dict()) == keys
    revert(model)
    assert [type(each) for each in model.modules()] == classes
    assert [set(vars(each)) for each in model.modules()] == attributes
    assert not any(vars(each)["_forward_hooks"] for each in model.modules())
    after = step(model)
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "Llama" else pytest.mark.slow) for n in MODELS])
def test_in_bfloat16_it_is_no_further_from_float64_than_twice_the_distance(name: str) -> None:
    half = model_of(name, torch.bfloat16)
    exact = step(copy.deepcopy(half).double())
    theirs, ours = step(half), step(convert(half))

    def distance(one: dict[str, Tensor]) -> float:
        grads = [key for key in exact if key != "loss"]
        far = sum(float((one[key].double() - exact[key]).square().sum()) for key in grads)
        return (far / sum(float(exact[key].square().sum()) for key in grads)) ** 0.5

    assert distance(ours) <= 2 * distance(theirs)
    assert abs(float(ours["loss"] - exact["loss"])) <= max(2 * abs(float(theirs["loss"] - exact["loss"])), 2e-3)


def test_the_report_says_what_stayed_and_why() -> None:
    text = str(conversion(convert(model_of("GPT2"))))
    assert text.startswith("5 norms, 2 activations, 1 output layer converted, 2 kept\n")
    assert "kept: its layers are Conv1D, not Linear (gated MLP)\n    transformer.h.0.mlp" in text
    assert "lm_head" in text


def test_without_labels_or_in_eval_the_model_runs_as_before() -> None:
    model = model_of("Llama")
    twin = copy.deepcopy(model)
    convert(model)
    ids = batch()["input_ids"]
    logits = model(ids).logits
    assert type(logits) is Tensor
    assert logits.requires_grad
    torch.testing.assert_close(logits, twin(ids).logits)
    model.eval(), twin.eval()
    with torch.no_grad():
        ours, theirs = model(**batch()), twin(**batch())
        assert torch.equal(ours.logits, theirs.logits)
        assert torch.equal(ours.loss, theirs.loss)
        generated = [each.generate(ids, max_new_tokens=5, do_sample=False) for each in (model, twin)]
    assert torch.equal(*generated)
    model.train(), twin.train()
    assert torch.equal(
        model(**batch(), return_dict=False)[1].argmax(-1), twin(**batch(), return_dict=False)[1].argmax(-1)
    )


def test_the_number_of_items_and_shifted_labels_reach_the_loss() -> None:
    model = model_of("Llama")
    shifted = {"shift_labels": F.pad(batch()["labels"], (0, 1), value=-100)[:, 1:].contiguous()}
    for more in ({"num_items_in_batch": torch.tensor(7)}, {"num_items_in_batch": 7}, shifted):
        expected = step(model, **more)
        assert_near(step(convert(model), **more), expected)
        revert(model)


def test_logits_can_be_read_before_backward_and_not_after() -> None:
    model = convert(model_of("Llama"))
    outputs = model(**batch())
    with torch.no_grad():
        assert outputs.logits.argmax(-1).shape == (2, 12)
    outputs = model(**batch())
    outputs.loss.backward()
    with pytest.raises(RuntimeError, match=r"Read outputs.logits before backward"):
        outputs.logits.argmax(-1)
    whole = convert(revert(model), head=False)(**batch())
    assert type(whole.logits) is Tensor


def test_it_pickles_copies_saves_and_loads(tmp_path: Path) -> None:
    model = convert(model_of("Llama"))
    expected = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(value, expected[key]) for key, value in step(other).items())
        assert type(revert(other).lm_head) is nn.Linear
    model.save_pretrained(tmp_path)
    assert '"LlamaForCausalLM"' in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert_near(step(loaded), expected)
    model.load_state_dict(loaded.state_dict())
    assert all(torch.equal(value, expected[key]) for key, value in step(model).items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same(reentrant: bool) -> None:
    model = model_of("Llama")
    expected = step(model)
    convert(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_near(step(model), expected)


def test_under_autocast_the_loss_is_as_near() -> None:
    model = model_of("Llama")
    exact = step(copy.deepcopy(model).double())
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = step(model), step(convert(model))
    for key in ("lm_head.weight", "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"):
        far, near = (float((each[key].double() - exact[key]).norm()) for each in (ours, theirs))
        assert ours[key].dtype == torch.float32
        assert far <= 2 * near


@pytest.mark.parametrize("first", ["convert", "peft"])
def test_adapters_of_peft_work_before_and_after(first: str) -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "down_proj", "gate_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(model, config).train()

    expected = step(adapted(model_of("Llama")))
    model = model_of("Llama")
    model = adapted(convert(model)) if first == "convert" else convert(adapted(model))
    got = step(model)
    assert_near(got, expected)
    assert all("lora_" in key for key in got if key != "loss")
    assert isinstance(model(**batch()).logits, LazyLogits)


def test_an_adapter_on_the_output_layer_makes_the_logits_and_is_right() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(model, config).train()

    expected = step(adapted(model_of("Llama")))
    model = adapted(convert(model_of("Llama")))
    assert_near(step(model), expected)
    assert any("made whole" in str(copies) for copies in copies_of(model).values())


@pytest.mark.parametrize("name", ["Llama", pytest.param("GPT2", marks=pytest.mark.slow)])
def test_a_compiled_step_has_the_bits_of_the_converted_model_in_eager(name: str) -> None:
    model = convert(model_of(name))
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin)]
    compiled = tb.compile_step(model, lambda m, ids, labels: m(input_ids=ids, labels=labels).loss, optimizers[0])
    for _ in range(3):
        given = batch()
        torch.manual_seed(5)
        loss = compiled(given["input_ids"], given["labels"])
        torch.manual_seed(5)
        expected = twin(**given).loss
        assert torch.equal(loss, expected.detach())
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


# -- an architecture of nobody's ---------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.g, self.tiny = nn.Parameter(torch.full((width,), 0.5)), 1e-5

    def forward(self, values: Tensor) -> Tensor:
        return (values / (values.float().square().mean(-1, keepdim=True) + self.tiny).sqrt() * (1 + self.g)).type_as(
            values
        )


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.z = nn.Linear(width, 20), nn.Linear(width, 20), nn.Linear(20, width)
        self.squash = F.mish

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.z(self.b(values) * self.squash(self.a(values)))
        return result


class Strange(nn.Module):
    """A language model with soft-capped logits, a padded vocabulary and a hand-written loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(90, 16)
        self.norms, self.feeds = nn.ModuleList(map(Scale, (16, 16))), nn.ModuleList([Feed(16)])
        self.voice = nn.Linear(16, 96, bias=True)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.voice

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        x = self.words(input_ids)
        x = self.norms[1](x + self.feeds[0](self.norms[0](x)).cumsum(1))
        logits = 5.0 * torch.tanh(self.voice(x)[..., :90] / 5.0)
        if labels is None:
            return None, logits
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 90), labels[:, 1:].reshape(-1), label_smoothing=0.1)
        return loss, logits


def test_an_architecture_that_nobody_has_named_is_converted_by_what_it_computes() -> None:
    torch.manual_seed(0)
    model = Strange()
    ids = torch.randint(90, (3, 10))

    def grads() -> list[Tensor]:
        model.zero_grad()
        loss = model(ids, ids)[0]
        loss.backward()
        return [loss.detach(), *(each.grad.clone() for each in model.parameters())]

    before = grads()
    convert(model, example=(ids, ids))
    assert [(each.what, each.path) for each in conversion(model).changed] == [
        ("norm", "norms.0"),
        ("norm", "norms.1"),
        ("gated MLP", "feeds.0"),
        ("output layer", "voice"),
    ]
    for ours, theirs in zip(grads(), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert isinstance(model(ids, ids)[1], LazyLogits)
    assert type(model(ids)[1]) is Tensor
    assert str(vars(model.voice)["takeback_form"].copies) == "none"


def test_a_conversion_that_changes_numbers_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("Llama")
    monkeypatch.setattr("takeback.nn.head_form.lazy_logits", lambda x, w, b, copies: F.linear(x, w, b) * 1.1)
    with pytest.raises(ConvertError, match="differs"):
        convert(model, example=batch())
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.norm).__mro__[1] is nn.Module


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_less_is_kept_between_forward_and_backward(name: str) -> None:
    def kept_bytes(model: Any) -> int:
        kept: dict[int, int] = {}
        own = {each.untyped_storage().data_ptr() for each in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = model(**batch())
        del outputs
        return sum(size for address, size in kept.items() if address not in own)

    model = model_of(name)
    before = kept_bytes(model)
    convert(model)
    assert kept_bytes(model) < 0.75 * before  # hooks make norms keep their input: without them it is less

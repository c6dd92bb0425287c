"""Models of the transformers package, unchanged, train to eager's bits: tiny, built from config objects, dropout on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import Case, train_both
from pairwise import quick_ones

pytestmark = pytest.mark.usefixtures("short_search")

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH, ROWS = 61, 12, 3


def generator(i: int) -> torch.Generator:
    return torch.Generator().manual_seed(i)


def causal(i: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator(i))
    return {"input_ids": ids, "labels": ids}


def causal_with_padding(i: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator(i))
    mask = torch.ones_like(ids)
    mask[0, LENGTH - 3 :] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def sentences(i: int) -> dict[str, Tensor]:
    g = generator(i)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=g)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(4, (ROWS,), generator=g)}


def masked(i: int) -> dict[str, Tensor]:
    g = generator(i)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=g)
    hidden = torch.rand(ROWS, LENGTH, generator=g) < 0.3
    return {
        "input_ids": ids.masked_fill(hidden, 2),
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(~hidden, -100),
    }


def images(i: int) -> dict[str, Tensor]:
    g = generator(i)
    return {
        "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=g),
        "labels": torch.randint(4, (ROWS,), generator=g),
    }


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
    )
    assert config.resid_pdrop == config.attn_pdrop == config.embd_pdrop == 0.1
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=0.1,
            max_position_embeddings=LENGTH,
        )
    )


def qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
        )
    )


def deepseek_v2() -> nn.Module:
    """Rotary embeddings in complex numbers, whose backward conjugates."""
    return transformers.DeepseekV2ForCausalLM(
        transformers.DeepseekV2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            first_k_dense_replace=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=4,
            max_position_embeddings=LENGTH,
        )
    )


def bert_config() -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=4,
    )
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.1
    return config


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_labels=4,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        )
    )


def eager_attention(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model with attention written out in matrix products and softmax."""

    def made() -> nn.Module:
        model = build()
        model.set_attn_implementation("eager")  # type: ignore[operator]
        return model

    return made


def with_checkpoints(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Blocks recomputed in the backward. transformers adds a hook that only reentrant checkpoints need; takeback
    refuses hooks, so it is taken off."""

    def made() -> nn.Module:
        model = build()
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        model.disable_input_require_grads()  # type: ignore[operator]
        return model

    return made


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "gpt2": (gpt2, causal),
    "gpt2-padding": (gpt2, causal_with_padding),
    "gpt2-eager-attention": (eager_attention(gpt2), causal),
    "gpt2-checkpoints": (with_checkpoints(gpt2), causal),
    "llama": (llama, causal),
    "llama-padding": (llama, causal_with_padding),
    "qwen2": (qwen2, causal),
    "deepseek-v2": (deepseek_v2, causal),
    "bert-classification": (lambda: transformers.BertForSequenceClassification(bert_config()), sentences),
    "bert-masked": (lambda: transformers.BertForMaskedLM(bert_config()), masked),
    "vit": (vit, images),
}


def loss_of(model: nn.Module, **batch: Tensor) -> Tensor:
    return model(**batch).loss


@pytest.fixture(autouse=True)
def _quiet_on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()
    torch.set_num_threads(before)


QUICK = ("gpt2", "gpt2-checkpoints", "llama-padding", "bert-classification")


@pytest.mark.parametrize("name", quick_ones(MODELS, QUICK))
def test_transformers_model_trains_to_eagers_bits(name: str) -> None:
    build, draw = MODELS[name]

    def train() -> nn.Module:
        return build().train()

    memory = "auto" if name in ("gpt2", "bert-classification") else "keep"
    train_both(Case(train, loss_of, lambda i: ((), draw(i)), has_kwargs=True), steps=4, memory=memory)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert-masked", "vit"])
def test_transformers_model_trains_to_eagers_bits_for_twenty_steps(name: str) -> None:
    build, draw = MODELS[name]
    case = Case(lambda: build().train(), loss_of, lambda i: ((), draw(i)), has_kwargs=True)
    train_both(case, steps=20, memory="auto")


@pytest.mark.parametrize("name", quick_ones(["gpt2", "llama", "bert-masked", "vit"], ["bert-masked"]))
def test_transformers_model_keeps_its_bits_when_dead_bytes_are_poisoned(name: str) -> None:
    build, draw = MODELS[name]
    train_both(Case(lambda: build().train(), loss_of, lambda i: ((), draw(i)), has_kwargs=True), steps=4, poison=True)

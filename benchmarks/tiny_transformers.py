"""Architectures of the installed transformers at tiny size, without downloads, and batches for them.

In: a task and a model type. Out: configs shrunk by the names of their fields, and batches that the model's forward
takes. The same arguments give the same bits.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

ROWS, LENGTH, VOCABULARY, SIDE, LABELS = 2, 16, 128, 32, 4
FIRST_WORD = 20  #: ids below are special tokens
MOST_PARAMETERS = 24_000_000

#: Walked in this order; a class is taken once, and "base" only where no head of the same type was.
TASKS: Mapping[str, str] = {
    "causal LM": "CAUSAL_LM",
    "masked LM": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "speech seq2seq": "SPEECH_SEQ_2_SEQ",
    "image classification": "IMAGE_CLASSIFICATION",
    "video classification": "VIDEO_CLASSIFICATION",
    "masked image": "MASKED_IMAGE_MODELING",
    "segmentation": "SEMANTIC_SEGMENTATION",
    "universal segmentation": "UNIVERSAL_SEGMENTATION",
    "depth": "DEPTH_ESTIMATION",
    "object detection": "OBJECT_DETECTION",
    "CTC": "CTC",
    "audio classification": "AUDIO_CLASSIFICATION",
    "image and text contrast": "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "image and text to text, without images": "IMAGE_TEXT_TO_TEXT",
    "time series": "TIME_SERIES_PREDICTION",
    "base": "",
}


@dataclass(frozen=True)
class Architecture:
    """One model class and what it is trained for."""

    name: str
    task: str
    model_type: str

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.name)

    @property
    def config_class(self) -> Any:
        own = self.model_class.config_class  # of the text part alone, for some
        return own if own is not None else transformers.models.auto.CONFIG_MAPPING[self.model_type]


def architectures() -> list[Architecture]:
    found: dict[str, Architecture] = {}
    types: set[str] = set()
    for task, mapping in TASKS.items():
        table = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES" if mapping else "MODEL_MAPPING_NAMES")
        for model_type, names in sorted(table.items(), key=_unlike):
            for name in (names,) if isinstance(names, str) else names[:1]:
                if task != "base" or model_type not in types:
                    found.setdefault(name, Architecture(name, task, model_type))
        types |= table.keys()
    return list(found.values())


def _unlike(entry: tuple[str, Any]) -> tuple[bool, str]:
    """Types that a class is named after come first: GPT2LMHeadModel is that of gpt2, not of gpt-sw3."""
    model_type, names = entry
    return not str(names).lower().startswith(re.sub(r"\W|_", "", model_type)), model_type


# -- configs ---------------------------------------------------------------------------------------------------

#: The first that matches a field's name gives its size, where the default is larger.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size|num_channels|in_channels|num_labels", 1 << 30),
    (r"(.*_)?vocab_size(_.*)?|codebook_size", VOCABULARY),
    (r"(num_|n_)?(\w+_)?(hidden_layers?|layers?|blocks|depth)", 2),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|n_kv_heads|kv_heads|num_query_groups|num_key_heads)", 2),
    (r"(.*_)?(attention_heads|num_heads|n_heads?|value_heads|mamba_n_heads|num_head)", 4),
    (r"(.*_)?(rope_head_dim|nope_head_dim|rotary_dim)", 8),
    (r"(.*_)?(head_dim|head_size|d_kv|kv_channels|d_head|attention_key_size)", 16),
    (r"(.*_)?(lora_rank|rank|rank_dim|low_rank_dim|time_step_rank)", 16),
    (r"(.*_)?(state_size|d_state|state_dim)", 8),
    (r"mamba_chunk_size|chunk_size|chunk_length|.*attn_chunk_length|block_size", 8),
    (r"(num_|n_)?(\w+_)?(experts|routed_experts)", 4),
    (r"num_experts_per_tok|top_?k|num_experts_per_token|moe_topk|moe_k|experts_top_k|moe_top_k", 2),
    (r"n_group|topk_group|n_groups|mamba_n_groups|num_expert_group", 1),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim|feed_forward_size|mlp_hidden_size)", 64),
    (
        r"(.*_)?(hidden_size(_.*)?|d_model|n_embd|hidden_dim|embed_dim|embedding_size|dim|width|d_embed|embedding_dim)",
        64,
    ),
    (r"(.*_)?(output_channels|num_channels_\w+|channels|projection_size|encoder_size|decoder_size|fusion_dim)", 64),
    (r"(.*_)?(max_position_embeddings|n_positions|max_\w*positions|max_sequence_length|max_seq_len|n_ctx)", 64),
    (r"(.*_)?(sliding_window|attention_window|local_attention|window_attention)", 8),
    (r"(.*_)?(image_size|img_size|input_size|crop_size)", SIDE),
    (r"num_frames|frames_per_clip", 4),
    (r"(.*_)?patch_size", 8),
    (r"(.*_)?(num_queries|num_query_tokens|num_latents|num_object_queries|num_denoising|two_stage_num_proposals)", 8),
    (r"(.*_)?(num_mel_bins|n_mels|feature_size|input_feat_per_channel)", 16),
    (r"mask_time_length|mask_feature_length", 2),
    (r"(.*_)?(num_conv_pos_embeddings)", 8),
    (r"(.*_)?(num_conv_pos_embedding_groups|window_size)", 4),
    (r"(.*_)?(num_codevectors_per_group|num_buckets|num_hash\w*)", 8),
)
#: Without defaults in some configs.
_NEEDED = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "attn_layer_indices": [1]}
_NEEDED |= {"head_dim": 16}
_TOKEN = re.compile(r".*token_(id|index|ids|indices)$|(image|video|audio)_token\w*_(id|index)")
_PER_LAYER = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers")
_LEAVE = frozenset(("out_indices", "out_features", "stage_names", "id2label", "label2id", "architectures", "dtype"))


def _size(name: str, value: int) -> int:
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return min(value, size)
    return value


def _listed(name: str, values: list[Any], kept: list[int] | None, layers: int) -> list[Any]:
    if kept is not None and len(values) == layers:
        return [values[i] for i in kept]
    if not all(type(v) is int for v in values) or not values:
        return values
    if re.fullmatch(r".*layer_(indices|idx|ids)", name):
        return [1]
    if re.fullmatch(r".*(depths|depth|num_blocks|layers?|layer_repeats)", name):
        return [1] * len(values)
    if re.fullmatch(r".*(heads|num_heads)", name):
        return [min(v, 2) for v in values]
    if re.fullmatch(r".*(conv_dim|tdnn_dim)", name):
        return [32] * len(values)
    if re.fullmatch(r".*(image_size|img_size)", name):
        return [SIDE] * len(values)
    if re.fullmatch(r".*(hidden_sizes|dims?|embed_dims|channels|widths|sizes)", name) and max(values) > 32:
        return [32 * (i + 1) for i in range(len(values))]
    return values


def changes(config: Any) -> dict[str, Any]:
    """The fields that a tiny model has otherwise."""
    fields = {k: v for k, v in vars(config).items() if not k.startswith("_") and k not in _LEAVE}
    layers = next((v for k in _PER_LAYER if type(v := fields.get(k) or getattr(config, k, None)) is int), 0)
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    computed = getattr(config, "layers_block_type", None) if kinds is None else None  # from a period and an offset
    kept: list[int] | None = None
    staged = isinstance(fields.get("depths"), list | tuple)
    if layers > 2 and not staged:  # a layer of each kind
        kept = sorted({kinds.index(k) for k in kinds}) if isinstance(kinds, list) and len(kinds) == layers else []
        if isinstance(computed, list) and len(computed) == layers:
            kept = list(range(max(map(computed.index, computed)) + 1))
        kept = sorted({*kept, *[i for i in range(layers) if i not in kept][: max(0, 2 - len(kept))]})
    found: dict[str, Any] = {}
    specials = iter(range(3, FIRST_WORD))
    for name, value in fields.items():
        now: Any = value
        if isinstance(value, transformers.PretrainedConfig):
            now = tiny_config(value)
        elif _TOKEN.fullmatch(name):
            if type(value) is int and value >= FIRST_WORD:
                now = next(specials)
            elif isinstance(value, list) and any(type(v) is int and v >= FIRST_WORD for v in value):
                now = [next(specials)]
        elif kept is not None and name in _PER_LAYER:
            now = len(kept)
        elif type(value) is int and not (staged and name == "num_layers"):
            now = _size(name, value)
        elif value is None:
            now = _NEEDED.get(name)
        elif isinstance(value, list | tuple):
            now = type(value)(_listed(name, list(value), kept, layers))
        if now is not value and (isinstance(now, transformers.PretrainedConfig) or now != value):
            found[name] = now
    if staged and type(fields.get("embed_dim")) is int:
        found["embed_dim"] = 16  # doubled from stage to stage, as windows are halved
        found |= {"hidden_size": 16 << len(fields["depths"]) - 1} if "hidden_size" in fields else {}
        found |= {"window_size": 2, "image_size": 2 * SIDE} if type(fields.get("window_size")) is int else {}
    if set(found.get("layer_types", ())) == {"linear_attention"}:  # a cache must have a layer with attention
        found["layer_types"] = ["linear_attention", "full_attention"]
    if config.model_type == "lfm2_moe":
        found["layer_types"] = ["conv", "full_attention"]
    if "qk_rope_head_dim" in fields and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        found["head_dim"] = 8
    expand = fields.get("expand") or fields.get("mamba_expand")
    for name in ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"):
        if type(expand) is int and type(fields.get(name)) is int:
            found[name] = expand * 64 // 16
    heads = fields.get("num_attention_heads")
    if type(heads) is int and fields.get("num_key_value_heads") == heads and heads > 4:
        found["num_key_value_heads"] = 4
    return found


def tiny_config(config: Any) -> Any:
    """Made anew where the class allows it, for what follows from the fields; else changed in place."""
    new = changes(config)
    plain = {k: v.to_dict() if isinstance(v, transformers.PretrainedConfig) else v for k, v in new.items()}
    drop = {"transformers_version", "model_type", *_LEAVE}
    for extra in ({k: v for k, v in config.to_dict().items() if k not in drop and k not in plain}, {}):
        try:
            return type(config)(**extra, **plain)
        except Exception:
            continue
    made = copy.deepcopy(config)
    for name, value in new.items():
        setattr(made, name, value)
    return made


def configs(architecture: Architecture) -> Iterator[Any]:
    """From tiny to as it comes."""
    default = architecture.config_class()
    yield tiny_config(default)
    changed = copy.deepcopy(default)  # what follows from other fields stays as it was
    for name, value in changes(default).items():
        setattr(changed, name, value)
    yield changed
    layers_only = copy.deepcopy(default)
    for name, value in changes(default).items():
        if re.search(r"layer|vocab|token", name) and not isinstance(value, transformers.PretrainedConfig):
            setattr(layers_only, name, value)
    yield layers_only
    yield default


# -- batches ---------------------------------------------------------------------------------------------------


def batches(architecture: Architecture, model: Any, seed: int) -> Iterator[dict[str, Any]]:
    """What the model's forward may take, the likeliest first."""
    g = torch.Generator().manual_seed(seed)
    config = model.config
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None) or VOCABULARY
    words = vocabulary if isinstance(vocabulary, int) else VOCABULARY
    ids = torch.randint(min(FIRST_WORD, words - 1), words, (ROWS, LENGTH), generator=g)
    label = torch.randint(LABELS if getattr(config, "num_labels", 0) >= LABELS else 2, (ROWS,), generator=g)
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", None) or SIDE
    height, width = (side, side) if isinstance(side, int) else tuple(side)[-2:]
    channels = getattr(vision, "num_channels", 3)
    channels = channels if isinstance(channels, int) else 3
    pixels = torch.randn(ROWS, channels, height, width, generator=g)
    frames = getattr(vision, "num_frames", 4)
    video = torch.randn(ROWS, frames if isinstance(frames, int) else 4, channels, height, width, generator=g)
    sound = torch.randn(ROWS, 4000, generator=g)
    bins = next(
        (
            v
            for k in ("num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "num_mel_bins")
            if type(v := getattr(config, k, None)) is int
        ),
        16,
    )
    length = 2 * getattr(config, "max_source_positions", 32)
    spectrum = torch.randn(ROWS, bins, length if isinstance(length, int) else 64, generator=g)
    masked = torch.rand(ROWS, 16, generator=g) < 0.5
    both = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    few = ids[:, :6]
    numbers = torch.randn(ROWS, 64, generator=g)
    places = torch.randint(0, 8, (ROWS, LENGTH, 4), generator=g).sort(-1).values
    boxes = {"bbox": places}
    task = architecture.task
    if task == "image and text contrast":
        yield {**both, "pixel_values": pixels, "return_loss": True}
    if task in ("causal LM", "masked LM", "seq2seq", "image and text to text, without images"):
        # The same tensor twice, as it is given to causal models; some others write into their labels.
        yield {**both, "labels": ids if task == "causal LM" else ids.clone()}
        yield {**both, **boxes, "labels": ids}
        yield {**both, "decoder_input_ids": ids, "labels": ids}
        yield {**both}
    if "seq2seq" in task or task in ("CTC", "audio classification"):
        labels = label if task == "audio classification" else few
        yield {"input_values": sound, "labels": labels}
        yield {"input_features": spectrum, "labels": labels}
        yield {"input_features": spectrum.mT.contiguous(), "labels": labels}
        yield {"input_values": spectrum.mT.contiguous(), "labels": labels}
        yield {"input_features": spectrum, "decoder_input_ids": few}
        yield {"input_features": spectrum.mT.contiguous(), "decoder_input_ids": few}
    if task in ("image classification", "video classification"):
        yield {"pixel_values": pixels if task[0] == "i" else video, "labels": label}
    if task == "segmentation":
        yield {"pixel_values": pixels, "labels": torch.randint(2, (ROWS, height, width), generator=g)}
    if task == "masked image":
        patches = (height // getattr(config, "patch_size", 8)) ** 2 if isinstance(side, int) else 16
        yield {"pixel_values": pixels, "bool_masked_pos": torch.rand(ROWS, patches, generator=g) < 0.5}
    if task == "time series":
        yield {"past_values": numbers, "future_values": numbers[:, :8]}
        yield {"past_values": numbers, "freq": torch.zeros(ROWS, dtype=torch.long)}
    yield {"pixel_values": pixels}
    yield {"pixel_values": video}
    yield {"pixel_values_videos": video}
    yield {**both}
    yield {**both, "decoder_input_ids": few}
    yield {**both, **boxes}
    yield {**both, "pixel_values": pixels}
    yield {**both, **boxes, "pixel_values": pixels}
    yield {**both, "pixel_values": pixels, "return_loss": True}
    yield {"input_values": sound}
    yield {"input_values": sound[:, None]}
    yield {"input_features": spectrum}
    yield {"input_features": spectrum.mT.contiguous()}
    yield {"input_values": spectrum.mT.contiguous()}
    yield {"past_values": numbers}
    yield {"pixel_values": pixels, "bool_masked_pos": masked}


def fits(model: Any, batch: Mapping[str, Any]) -> bool:
    """Whether forward names everything in the batch, and nothing else must be given."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {p.name for p in parameters if p.kind in kinds}
    required = {p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty}
    return required <= batch.keys() and batch.keys() <= named | ({"labels"} if "kwargs" in str(parameters) else set())


def loss_of(model: Any, **batch: Any) -> torch.Tensor:
    """The model's own loss, or else one made of every output that can be trained."""
    out = model(**batch)
    loss = getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.dim() == 0:
        return loss
    total = torch.zeros(())
    for value in out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else (out,):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad:
            total = total + value.float().pow(2).mean()
    return total

"""What a TakebackTrainer cannot train, found before anything is trained: arguments, models, classes.

In: what the user gave. Out: nothing, or an error that names the argument, says why, and what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments
from transformers.utils import is_sagemaker_mp_enabled

from takeback.errors import CaptureError, OptionError
from takeback.options import Options

_PLAIN = "use transformers.Trainer for this training"
_SEVERAL = "Use one device for each process: start the script with torchrun, and the processes train together"

#: Options of compile_step that follow from TrainingArguments, which say them.
_DECIDED = {
    "accumulate": "gradient_accumulation_steps",
    "clip_norm": "max_grad_norm",
    "scaler": "fp16",
    "group": "what torchrun started",
}
_OPEN = ("mode", "memory", "update", "keep_grads", "verify_every", "max_plans", "poison", "solve_s", "unplanned")

_COMPILED = (
    "the whole step is compiled by takeback, and torch.compile around the model would hide its ops. Leave it out, or "
    "compile single submodules before"
)
_PAST_TORCH = "its kernels are launched past torch's dispatcher, where no recording sees them. Leave it out"
#: Arguments of TRL's configs.
_OF_TRL = {
    "activation_offloading": "the plan says where activations live. Leave it out; memory='min' keeps the fewest",
    "use_liger_loss": _PAST_TORCH,
    "use_adaptive_entropy": "its loss keeps a count over microbatches, which a replay has not. Give entropy_coef alone",
}
#: Accelerate's names for processes of one device each.
_PROCESSES = ("NO", "MULTI_GPU", "MULTI_CPU")

#: Optimizers that update inside of the backward, by the name that TrainingArguments.optim gives them.
_IN_BACKWARD = ("lomo", "adalomo")


def checked_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of compile_step that were given as `takeback=`. `keep_grads` may be None: as callbacks need it."""
    options = dict(given or {})
    for name in options:
        if name in _DECIDED:
            raise OptionError(
                f"takeback={{'{name}': ...}} is not the trainer's to set: TrainingArguments say it ({_DECIDED[name]})."
            )
        if name not in _OPEN:
            raise OptionError(f"takeback= has no option {name!r}; there are {', '.join(_OPEN)}.")
    Options(**{name: value for name, value in options.items() if (name, value) != ("keep_grads", None)})
    return options


def is_of_trl(kind: type) -> bool:
    """Whether it is made of a trainer of TRL's, or of one that is written as those are."""
    return any(base.__module__.partition(".")[0] == "trl" for base in kind.__mro__)


def check_class(kind: type, core: type) -> None:
    """Raises where a class has methods of Trainer's that `core`, which comes before it, would never call."""
    order = kind.__mro__
    for base in order[order.index(core) + 1 :]:
        for name in sorted(vars(core).keys() & vars(base).keys()):
            if base.__module__ != Trainer.__module__ and callable(vars(core)[name]) and not name.startswith("__"):
                raise CaptureError(
                    f"{kind.__qualname__}: {base.__qualname__} has a {name}() of its own, which would not be called. "
                    f"Write class {kind.__name__}(TakebackMixin, {base.__name__}), in place of TakebackTrainer."
                )


def check_of_trl(kind: type, args: TrainingArguments) -> None:
    """Raises for what a loss of TRL's does that no compiled step can honour."""
    if not is_of_trl(kind):
        return
    if args.world_size > 1:
        raise OptionError(
            f"{kind.__qualname__} gathers metrics of {args.world_size} processes inside of its loss, where no replay "
            f"can follow. Train in one process, or use TRL's trainer for this training."
        )
    for name, why in _OF_TRL.items():
        if getattr(args, name, False):
            raise OptionError(f"{kind.__qualname__} cannot honour {name}=True: {why}.")


def check_arguments(args: TrainingArguments, options: Mapping[str, Any]) -> None:
    """Raises for the first argument that no compiled step can honour."""
    for name, why in _refused(args):
        raise OptionError(f"TakebackTrainer cannot honour {name}: {why}.")
    if options.get("update", "end") == "early":
        for name, why in _refused_early(args):
            raise OptionError(f"takeback={{'update': 'early'}} does not go with {name}: {why}.")


def check_accelerator(accelerator: Accelerator) -> None:
    """Raises for what `accelerate launch`, or its config file, may have asked for past TrainingArguments."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in _PROCESSES:
        raise OptionError(
            f"TakebackTrainer cannot honour Accelerate's distributed type {kind}: each process of a compiled step has "
            f"all of the model on one device. Start the script with torchrun, or {_PLAIN}."
        )
    backend = str(getattr(accelerator.state.dynamo_plugin.backend, "value", accelerator.state.dynamo_plugin.backend))
    if backend != "NO":
        raise OptionError(f"TakebackTrainer cannot honour Accelerate's dynamo_backend={backend}: {_COMPILED}.")
    if accelerator.mixed_precision not in ("no", "bf16", "fp16"):
        raise OptionError(
            f"TakebackTrainer cannot honour Accelerate's mixed_precision={accelerator.mixed_precision!r}: its layers "
            f"keep a history of scales that a replay would not write. Use bf16=True."
        )


def _refused(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    if getattr(args, "deepspeed", None) or getattr(args, "deepspeed_plugin", None):
        yield "deepspeed=...", f"DeepSpeed runs forward, backward and update in an engine of its own; {_PLAIN}"
    if getattr(args, "fsdp", None) or getattr(args, "fsdp_plugin_args", None):
        yield (
            "fsdp=...",
            f"a compiled step needs all of the model on each device, and memory='min' may well make that fit; else "
            f"{_PLAIN}",
        )
    if getattr(args, "parallelism_config", None) is not None:
        yield "parallelism_config=...", f"tensors of one step are on one device; {_PLAIN}"
    if is_sagemaker_mp_enabled():
        yield "SageMaker's model parallelism", f"it runs forward and backward itself; {_PLAIN}"
    if args.device.type not in ("cpu", "cuda"):
        yield f"training on {args.device}", "takeback runs on the CPU and on CUDA"
    if args.n_gpu > 1:
        yield (
            f"{args.n_gpu} GPUs in one process",
            f"transformers would wrap the model in DataParallel, one process for all of them. {_SEVERAL}, or show it "
            f"one GPU with CUDA_VISIBLE_DEVICES",
        )
    if args.torch_compile:
        yield "torch_compile=True", _COMPILED
    if args.use_liger_kernel:
        yield "use_liger_kernel=True", _PAST_TORCH
    optim = str(getattr(args.optim, "value", args.optim))
    if optim in _IN_BACKWARD or optim.endswith("_layerwise"):
        yield (
            f"optim={optim!r}",
            "this optimizer updates in hooks of the backward. Use another, with takeback={'update': 'early'}, which "
            "updates each parameter as soon as its gradient is complete",
        )
    if args.fp16 and args.world_size > 1:
        yield "fp16=True", "a scaler and several processes do not go together yet. Use bf16=True"
    accumulation = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    if accumulation.get("sync_each_batch"):
        yield (
            "accelerator_config={'gradient_accumulation_kwargs': {'sync_each_batch': True}}",
            "gradients are averaged once for each update. Leave it out",
        )
    if args.world_size > 1 and args.ddp_broadcast_buffers is False:
        yield "ddp_broadcast_buffers=False", "buffers are those of rank 0 in each step. Leave it out"
    if any("underflow_overflow" in str(getattr(o, "value", o)) for o in args.debug):
        yield "debug='underflow_overflow'", "it looks at each module's results, and a replay has none; leave it out"


def _refused_early(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    if args.max_grad_norm > 0:
        yield f"max_grad_norm={args.max_grad_norm}", "clipping needs the norm of all gradients; set max_grad_norm=0"
    if args.gradient_accumulation_steps > 1:
        yield f"gradient_accumulation_steps={args.gradient_accumulation_steps}", "their sum must be known first"
    if args.world_size > 1:
        yield f"{args.world_size} processes", "gradients are averaged over the processes first"
    if args.fp16:
        yield "fp16=True", "its scaler skips the update if one gradient is not finite"


def check_model(model: torch.nn.Module) -> None:
    """Raises for a model whose parameters are not plain tensors on one device."""
    for kind, found in _MODELS.items():
        name = found(model)
        if name is not None:
            raise CaptureError(f"{name}, and {kind}.")


def _quantised(model: torch.nn.Module) -> str | None:
    """All but frozen weights of bitsandbytes, whose kernels are operators of torch's dispatcher as any others."""
    method = getattr(model, "quantization_method", None)
    kind = str(getattr(method, "value", method))
    if method is not None and not kind.startswith("bitsandbytes"):
        return f"the model is quantised ({kind})"
    for name, p in model.named_parameters():
        if type(p).__name__ in ("Params4bit", "Int8Params") and p.requires_grad:
            return f"parameter {name!r} is quantised ({type(p).__name__}) and trained"
    return None


def _wrapped(model: torch.nn.Module) -> str | None:
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            return f"the model is wrapped in {type(module).__name__}"
    return None


def _sharded(model: torch.nn.Module) -> str | None:
    for module in model.modules():
        if any(base.__name__ in ("FullyShardedDataParallel", "FSDPModule") for base in type(module).__mro__):
            return f"the model is sharded: it holds a {type(module).__name__}"
    for name, p in model.named_parameters():
        if any(base.__name__ == "DTensor" for base in type(p).__mro__):
            return f"the model is sharded: parameter {name!r} is a DTensor"
    return None


def _spread(model: torch.nn.Module) -> str | None:
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    return f"the model is spread over {', '.join(sorted(places))} (device_map)" if len(places) > 1 else None


_MODELS: dict[str, Callable[[torch.nn.Module], str | None]] = {
    f"of quantised weights takeback knows those of bitsandbytes, frozen, under adapters. Load it by "
    f"BitsAndBytesConfig, or in bfloat16, or {_PLAIN}": _quantised,
    "TakebackTrainer averages gradients itself. Pass the module inside (model.module)": _wrapped,
    f"a compiled step needs whole parameters. Pass the model as it was before, or {_PLAIN}": _sharded,
    f"a compiled step runs on one device. Load it with device_map={{'': device}}, or {_PLAIN}": _spread,
}

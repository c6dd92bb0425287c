"""Why eager may not repeat its own bits on a GPU, in words: which ops of a step may be at it, and what to set."""

from __future__ import annotations

import torch

from takeback.compiler.program import Program

#: Ops whose CUDA kernels may add in whatever order the threads come, unless they are told not to.
_UNSTEADY = (
    *("convolution_backward", "attention_backward", "pool2d_with_indices_backward", "pool3d", "adaptive", "upsample"),
    *("index_add", "index_put", "scatter", "embedding_bag", "grid_sampler", "ctc_loss", "cumsum", "reflection_pad"),
    *("replication_pad", "kthvalue", "bincount", "histc", "median"),
)

WAY_OUT = "mode='fast' asks for no bits: it compares results within rounding, and is what mode='auto' takes on CUDA."


def nondeterminism(program: Program, *, seen: bool = False) -> str:
    """Advice for a step on CUDA; nothing for one on the CPU. `seen`: two plain runs of eager did differ."""
    if program.device_type != "cuda":
        return ""
    found = dict.fromkeys(
        f"{op.name} at {op.site}" if op.site else op.name
        for op in program.ops
        if any(name in op.name for name in _UNSTEADY)
    )
    said = [
        "On this device eager itself does not repeat its bits: two plain runs of this step differ."
        if seen
        else "On this device eager itself may not repeat its bits.",
        "Some kernels add in the order in which threads come.",
    ]
    if found:
        said.append(f"Ops of this step that may do so: {', '.join(list(found)[:4])}.")
    said.append(WAY_OUT)
    said.append(
        "For eager's bits set torch.backends.cudnn.deterministic = True, or torch.use_deterministic_algorithms(True) "
        "with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment, before the first step."
    )
    if any("cudnn_attention_backward" in op.name for op in program.ops):
        said.append("cuDNN's attention has no backward that repeats: torch.backends.cuda.enable_cudnn_sdp(False).")
    if any("attention_backward" in op.name for op in program.ops):
        said.append("Attention repeats under use_deterministic_algorithms(True) only, not with warn_only=True.")
    if torch.backends.cudnn.benchmark:
        said.append("cudnn.benchmark = True lets every thread choose its own kernels: set it to False.")
    return " ".join(said) + " "

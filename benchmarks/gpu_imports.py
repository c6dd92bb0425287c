"""What every row of benchmarks/gpu.py imports, once: rows are forked from a process that has it.

None of it starts CUDA or Inductor, whose processes could not be forked.
"""

from __future__ import annotations

import contextlib
import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU is asked without starting CUDA

import torch

import gpu_systems

with contextlib.suppress(ImportError):
    import torchvision
with contextlib.suppress(ImportError):
    import transformers

__all__ = ["gpu_systems", "torch", "torchvision", "transformers"]

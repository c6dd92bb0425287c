"""What machines do in a second, as a small table: of GPUs that are known by name, which are alike, and for where
measuring is not steady, so that plans repeat.

What counts for a plan is how the rates compare with one another, within tens of percents.
"""

from __future__ import annotations

from dataclasses import replace

from takeback.compiler.passes.cost import Rates

#: One thread of a CPU: between what run/calibrate.py measured for one thread and for each of 16, on an idle Intel Xeon
#: of 16 cores with torch 2.11 (one: 1.3e10, 4.7e8, 3.4e-6, 1.6e11, 7.6e10, 0.93, 0.32; each of 16: 6e9, 2.7e8, 3.8e-6,
#: 7.6e10, 3.8e10, 0.61, 0.26). Products in half precision differ a thousandfold between CPUs (bfloat16: 7.4e11 there,
#: 4.8e8 on an AMD EPYC without instructions for it); the table takes them to be as fast as single ones.
_CPU_THREAD = Rates(
    bytes_per_s=1.1e10,
    maths_per_s=3.5e8,
    op_s=3.6e-6,
    flops_per_s={"float32": 1.0e11, "float64": 5.0e10, "bfloat16": 1.0e11, "float16": 1.0e11},
    convolution=0.8,
    attention=0.3,
    source="table",
)
_MEMORY_THREADS = 8  #: more threads hardly move more bytes: 7.5e10 a second with 8 of that Xeon's, 1.0e11 with 16

#: An NVIDIA H200 with torch 2.11 (CUDA 13): the median of three runs of run/calibrate.py; they agreed within 6 percent,
#: which is enough for another choice: what "auto" gave a ResNet-50 was 3 percent larger with the rates of another day.
_H200 = Rates(
    bytes_per_s=3.1e12,
    maths_per_s=3.5e11,
    op_s=6.7e-6,
    flops_per_s={"float32": 5.07e13, "float64": 6.2e13, "bfloat16": 6.6e14, "float16": 6.9e14},
    convolution=2.9,
    attention=0.58,
    source="table",
)
_GPUS = {"H200": _H200}  #: by a part of the device's name
#: No measurement: of an H200's rates a third, and a call as dear as there. The ratios are what a plan depends on.
_OTHER_GPU = Rates(
    bytes_per_s=1.0e12,
    maths_per_s=1.2e11,
    op_s=6.7e-6,
    flops_per_s={"float32": 1.7e13, "float64": 2.0e13, "bfloat16": 2.2e14, "float16": 2.3e14},
    convolution=2.9,
    attention=0.58,
    source="table",
)


def rates_of(name: str) -> Rates | None:
    """Of a GPU that is known: what was measured of one holds for all of its name, and predictions are of the same plan.
    A part of one (MIG) has another name."""
    row = _GPUS.get(name.removeprefix("NVIDIA "))
    return replace(row, source="known") if row is not None else None


def table_rates(device: str, name: str, threads: int) -> Rates:
    """The row for a device: `name` is a GPU's, `threads` are those of a CPU."""
    if device != "cpu":
        return next((row for part, row in _GPUS.items() if part in name), _OTHER_GPU)
    one = _CPU_THREAD
    return replace(
        one,
        bytes_per_s=one.bytes_per_s * min(threads, _MEMORY_THREADS),
        maths_per_s=one.maths_per_s * threads,
        flops_per_s={dtype: rate * threads for dtype, rate in one.flops_per_s.items()},
    )

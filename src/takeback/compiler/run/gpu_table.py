"""GPUs by name, for predictions where there is none: how much memory a process can have, and what an op costs there.

An H200's rates are those of rate_table.py, which were measured. Of the others, the makers' data sheets are taken times
the part of its own data sheet that an H200 was measured to reach; a plan depends on their ratios, not on the figures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from takeback.compiler.passes.cost import Rates
from takeback.compiler.run.rate_table import table_rates
from takeback.errors import OptionError

MIB = 1 << 20
MEASURED_ON = "H200"  #: whose kernels, rates and workspaces predictions know
_CONTEXT_BYTES = 600 * MIB  #: of the driver's context, kernels included, in each process: assumed
_HANDLES = 2  #: of cuBLAS: one of the thread that calls the step, one of autograd's


@dataclass(frozen=True)
class Gpu:
    """A row of the table. Bytes and operations a second are the data sheet's: dense, tensor cores in half precision."""

    name: str
    memory_mib: int  #: as the driver reports it
    capability: tuple[int, int]
    bytes_per_s: float
    half_per_s: float
    single_per_s: float
    double_per_s: float

    @property
    def usable_bytes(self) -> int:
        """What torch's allocator can have."""
        return self.memory_mib * MIB - _CONTEXT_BYTES

    @property
    def workspace_bytes(self) -> int:
        """What cuBLAS takes from torch's allocator at the first product, and keeps."""
        large = self.capability in ((9, 0), (10, 0))  # an H200 keeps 66 to 75 MiB beside the tensors
        return _HANDLES * (32 * MIB if large else 8 * MIB + 128 * 1024)

    @property
    def rates(self) -> Rates:
        measured, known = table_rates("cuda", MEASURED_ON, 1), GPUS[MEASURED_ON]
        if self.name == known.name:
            return measured
        half, single = self.half_per_s / known.half_per_s, self.single_per_s / known.single_per_s
        times = {
            "bfloat16": half,
            "float16": half,
            "float32": single,
            "float64": self.double_per_s / known.double_per_s,
        }
        return replace(
            measured,
            bytes_per_s=measured.bytes_per_s * self.bytes_per_s / known.bytes_per_s,
            maths_per_s=measured.maths_per_s * single,
            flops_per_s={name: rate * times[name] for name, rate in measured.flops_per_s.items()},
        )


GPUS = {
    row.name: row
    for row in (
        Gpu("H200", 143771, (9, 0), 4.8e12, 9.89e14, 6.7e13, 6.7e13),
        Gpu("B200", 183359, (10, 0), 8.0e12, 2.25e15, 8.0e13, 4.0e13),
        Gpu("H100-80GB", 81559, (9, 0), 3.35e12, 9.89e14, 6.7e13, 6.7e13),
        Gpu("A100-80GB", 81920, (8, 0), 2.04e12, 3.12e14, 1.95e13, 1.95e13),
        Gpu("A100-40GB", 40960, (8, 0), 1.56e12, 3.12e14, 1.95e13, 1.95e13),
        Gpu("L40S", 46068, (8, 9), 8.64e11, 3.62e14, 9.16e13, 1.4e12),
        Gpu("L4", 23034, (8, 9), 3.0e11, 1.21e14, 3.03e13, 4.7e11),
        Gpu("A10", 23028, (8, 6), 6.0e11, 1.25e14, 3.12e13, 4.9e11),
        Gpu("RTX 6000 Ada", 49140, (8, 9), 9.6e11, 3.64e14, 9.11e13, 1.4e12),
        Gpu("RTX A6000", 49140, (8, 6), 7.68e11, 1.55e14, 3.87e13, 6.0e11),
        Gpu("RTX 5090", 32607, (12, 0), 1.79e12, 2.10e14, 1.05e14, 1.6e12),
        Gpu("RTX 4090", 24564, (8, 9), 1.01e12, 1.65e14, 8.26e13, 1.3e12),
        Gpu("RTX 3090", 24576, (8, 6), 9.36e11, 7.1e13, 3.56e13, 5.6e11),
    )
}


def gpu_named(name: str) -> Gpu:
    """The row of this name, however it is written (`rtx4090`, `NVIDIA H200`)."""
    wanted = _plain(name)
    found = next((row for known, row in GPUS.items() if _plain(known) == wanted), None)
    if found is None:
        raise OptionError(f"gpu={name!r} is not known; there are {', '.join(GPUS)}")
    return found


def _plain(name: str) -> str:
    letters = "".join(c for c in name.lower() if c.isalnum())
    return letters.removeprefix("nvidia").removeprefix("geforce")

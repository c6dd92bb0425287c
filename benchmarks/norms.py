"""In-place activated norms against torch's BatchNorm + activation, torch.compile and the package inplace_abn.

    python benchmarks/norms.py [--device cuda] [--only layers kernels models rows] [--rounds 10] [--out FILE]

layers   one norm + activation on activations as in a ResNet-50: forward and backward, and the memory that backward
         takes beyond what was alive before it
kernels  (GPU) the two kernels that write an activation, as a part of the bandwidth of a copy of the same size
models   (GPU) steps of ResNet-50 and ResNet-101, batch 256 at 224², under autocast with SGD: peak and time
rows     LayerNorm, RMSNorm, SwiGLU and GELU against torch's

All systems of a row run in turn in one process; ratios are medians over rounds of a system's time over eager's in the
same round. inplace_abn takes part where it is installed, in the dtypes it has (no bf16). Eager's activation is ReLU;
the in-place norms have leaky_relu, as models for inplace_abn do, or "relu": the same function as eager.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import takeback as tb
from common import in_turn, machine, ratio, wait
from takeback.nn.kernels import activated

MIB = 1 << 20
SLOPE = 0.01
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYOUTS = {"channels_last": torch.channels_last, "NCHW": torch.contiguous_format}
THEIRS = importlib.util.find_spec("inplace_abn") is not None


@dataclass
class Row:
    what: str
    case: str
    dtype: str
    layout: str
    system: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    step_ms: float | None = None
    ratio_to_eager: float | None = None  #: of forward + backward, or of the step
    forward_to_eager: float | None = None
    backward_to_eager: float | None = None
    backward_transient_mib: float | None = None
    peak_mib: float | None = None
    reserved_mib: float | None = None
    peak_to_eager: float | None = None
    of_copy_bandwidth: float | None = None


# -- systems -----------------------------------------------------------------------------------------------------------

Norm = Callable[[int, str], nn.Module]  #: channels, and "act" or "identity"


def eager(channels: int, then: str) -> nn.Module:
    norm = nn.BatchNorm2d(channels)
    return nn.Sequential(norm, nn.ReLU(inplace=True)) if then == "act" else norm


def ours(channels: int, then: str) -> nn.Module:
    return tb.nn.InPlaceABN(channels, activation="leaky_relu" if then == "act" else "identity", activation_param=SLOPE)


def ours_relu(channels: int, then: str) -> nn.Module:
    return tb.nn.InPlaceABN(channels, activation="relu" if then == "act" else "identity")


def theirs(channels: int, then: str) -> nn.Module:
    import inplace_abn

    activation = "leaky_relu" if then == "act" else "identity"
    return inplace_abn.InPlaceABN(channels, activation=activation, activation_param=SLOPE)


def systems(dtype: str) -> dict[str, Norm]:
    found: dict[str, Norm] = {"eager": eager, "takeback": ours, "takeback relu": ours_relu}
    if THEIRS and dtype != "bf16":
        found["inplace_abn"] = theirs
    return found


# -- one layer ---------------------------------------------------------------------------------------------------------

LAYERS = {
    "cuda": [
        (256, 64, 112, 112),
        (256, 64, 56, 56),
        (256, 256, 56, 56),
        (256, 512, 28, 28),
        (256, 1024, 14, 14),
        (256, 512, 7, 7),
        (256, 2048, 7, 7),
    ],
    "cpu": [(16, 64, 56, 56), (16, 256, 28, 28), (16, 256, 14, 14), (16, 2048, 7, 7)],
}


class Pass:
    """Forward and backward of one layer, timed apart. Its input is an intermediate, as in a model, and made anew."""

    def __init__(self, layer: nn.Module, leaf: Tensor, gradient: Tensor, device: str) -> None:
        self.layer, self.leaf, self.gradient, self.device = layer, leaf, gradient, device
        self.seconds: dict[str, list[float]] = {"forward": [], "backward": []}
        self.transient_bytes = 0

    def __call__(self) -> None:
        y, forward = self._timed(self.layer, self.leaf.clone())
        root = y.clone()  # so that nobody holds y itself; a clone's backward hands its gradient on
        del y
        before = _allocated(self.device)
        _, backward = self._timed(root.backward, self.gradient)
        self.transient_bytes = _peak(self.device) - before
        self.leaf.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None
        self.seconds["forward"].append(forward)
        self.seconds["backward"].append(backward)

    def _timed(self, call: Callable[[Tensor], Any], argument: Tensor) -> tuple[Any, float]:
        if self.device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            result = call(argument)
            end.record()
            torch.cuda.synchronize()
            return result, start.elapsed_time(end) / 1e3
        begin = time.perf_counter()
        result = call(argument)
        return result, time.perf_counter() - begin


def _allocated(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _peak(device: str) -> int:
    return int(torch.cuda.max_memory_allocated()) if device == "cuda" else 0


def layers(device: str, rounds: int, dtypes: list[str]) -> list[Row]:
    rows: list[Row] = []
    for shape in LAYERS[device]:
        for dtype in dtypes:
            for layout, memory_format in LAYOUTS.items():
                leaf = torch.randn(shape, device=device, dtype=DTYPES[dtype]).contiguous(memory_format=memory_format)
                gradient = torch.randn_like(leaf)
                leaf.requires_grad_()
                passes = {
                    name: Pass(make(shape[1], "act").to(device), leaf, gradient, device)
                    for name, make in systems(dtype).items()
                    if not (name == "inplace_abn" and device == "cpu" and dtype == "fp16")
                }
                for one in passes.values():
                    for _ in range(3):
                        one()
                    one.seconds = {"forward": [], "backward": []}
                for r in range(rounds * 3):
                    for name in list(passes) if r % 2 else list(reversed(passes)):
                        passes[name]()
                case = "x".join(map(str, shape))
                rows += [_layer_row(case, dtype, layout, name, passes, device) for name in passes]
    return rows


def _layer_row(case: str, dtype: str, layout: str, name: str, passes: dict[str, Pass], device: str) -> Row:
    one, reference = passes[name].seconds, passes["eager"].seconds

    def times(which: str) -> float:
        return statistics.median(a / b for a, b in zip(one[which], reference[which], strict=True))

    whole = statistics.median(
        (f + b) / (g + c)
        for f, b, g, c in zip(*(s[w] for s in (one, reference) for w in ("forward", "backward")), strict=True)
    )
    return Row(
        *("layers", case, dtype, layout, name),
        forward_ms=statistics.median(one["forward"]) * 1e3,
        backward_ms=statistics.median(one["backward"]) * 1e3,
        ratio_to_eager=whole,
        forward_to_eager=times("forward"),
        backward_to_eager=times("backward"),
        backward_transient_mib=passes[name].transient_bytes / MIB if device == "cuda" else None,
    )


# -- kernels -----------------------------------------------------------------------------------------------------------


def kernels(rounds: int) -> list[Row]:
    rows: list[Row] = []
    for shape in ((256, 256, 56, 56), (256, 512, 28, 28), (256, 2048, 7, 7)):
        for dtype in ("bf16", "fp32"):
            for layout, memory_format in LAYOUTS.items():
                x = torch.randn(shape, device="cuda", dtype=DTYPES[dtype]).contiguous(memory_format=memory_format)
                dy, out = torch.randn_like(x), torch.empty_like(x)
                weight, bias = torch.rand(2, shape[1], device="cuda") + 0.5
                layer = activated.Layer(
                    *activated.sizes(x), weight, bias, activated.Activation.LEAKY_RELU, SLOPE, from_output=True
                )
                mean, invstd = activated.batch_statistics(x, layer, 1e-5, None, None, 0.0)
                sums = activated.gather_sums(dy, x, layer, mean, invstd)
                calls: dict[str, tuple[int, Callable[[], object]]] = {
                    "copy": (2, lambda out=out, x=x: out.copy_(x)),
                    "statistics": (1, lambda x=x, a=layer: activated.batch_statistics(x, a, 1e-5, None, None, 0.0)),
                    "normalise_": (2, lambda x=x, a=layer, m=mean, i=invstd: activated.normalise_(x, x, a, m, i)),
                    "gather_sums": (
                        2,
                        lambda d=dy, x=x, a=layer, m=mean, i=invstd: activated.gather_sums(d, x, a, m, i),
                    ),
                    "put_": (
                        3,
                        lambda d=dy, x=x, a=layer, m=mean, i=invstd, s=sums: activated.put_(
                            d, x, x, a, m, i, s, a.count
                        ),
                    ),
                }
                times = {name: _queued(call, rounds) for name, (_, call) in calls.items()}
                for name, (moved, _) in calls.items():
                    rows.append(
                        Row(
                            *("kernels", "x".join(map(str, shape)), dtype, layout, name),
                            step_ms=times[name] * 1e3,
                            of_copy_bandwidth=(moved / times[name]) / (2 / times["copy"]),
                        )
                    )
    return rows


def _queued(call: Callable[[], object], rounds: int, burst: int = 10) -> float:
    """Seconds of the GPU for one call: bursts are queued while it sleeps, so that the host's time does not count."""
    call()
    seconds = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000)
        start.record()
        for _ in range(burst):
            call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / burst)
    return statistics.median(seconds)


# -- models ------------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, norm: Norm, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.abn1 = nn.Conv2d(width_in, width, 1, bias=False), norm(width, "act")
        self.conv2, self.abn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width, "act")
        self.conv3, self.abn3 = nn.Conv2d(width, 4 * width, 1, bias=False), norm(4 * width, "identity")
        self.shortcut: nn.Module | None = None
        if stride != 1 or width_in != 4 * width:
            convolution = nn.Conv2d(width_in, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, norm(4 * width, "identity"))

    def forward(self, x: Tensor) -> Tensor:
        y = self.abn3(self.conv3(self.abn2(self.conv2(self.abn1(self.conv1(x))))))
        return F.relu_(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """ResNet-50 and -101, with the norm and its activation as one replaceable part."""

    def __init__(self, norm: Norm, blocks: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64, "act"), nn.MaxPool2d(3, 2, 1))
        body: list[nn.Module] = []
        width_in = 64
        for stage, count in enumerate(blocks):
            width = 64 << stage
            for i in range(count):
                body.append(Bottleneck(norm, width_in, width, 2 if stage and not i else 1))
                width_in = 4 * width
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(2048, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


MODELS = {"ResNet-50": (3, 4, 6, 3), "ResNet-101": (3, 4, 23, 3)}


def step_of(
    make: Norm, blocks: tuple[int, ...], dtype: str, layout: str, batch: int, compiled: bool
) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = ResNet(make, blocks).cuda().to(memory_format=LAYOUTS[layout]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randn(batch, 3, 224, 224, device="cuda").contiguous(memory_format=LAYOUTS[layout])
    labels = torch.randint(1000, (batch,), device="cuda")
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast("cuda", DTYPES[dtype]):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def model(name: str, dtype: str, layout: str, rounds: int, batch: int, compiled: bool) -> list[Row]:
    makers: dict[str, tuple[Norm, bool]] = {system: (make, False) for system, make in systems(dtype).items()}
    if compiled and (name, dtype, layout) == ("ResNet-50", "bf16", "channels_last"):  # it takes minutes to compile
        makers["torch.compile"] = (eager, True)
    steps: dict[str, Callable[[], Any]] = {}
    peaks: dict[str, tuple[int, int]] = {}
    for system, (make, by_compiler) in makers.items():
        gc.collect()
        torch.cuda.empty_cache()
        others = torch.cuda.memory_allocated()
        steps[system] = step_of(make, MODELS[name], dtype, layout, batch, by_compiler)
        for _ in range(3):
            steps[system]()
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps[system]()
        wait("cuda")
        reserved = torch.cuda.max_memory_reserved() - held
        peaks[system] = torch.cuda.max_memory_allocated() - others, reserved - others
    times = in_turn(steps, rounds, 3, "cuda")
    return [
        Row(
            *("models", name, dtype, layout, system),
            step_ms=statistics.median(times[system]) * 1e3,
            ratio_to_eager=ratio(times, system, "eager"),
            peak_mib=peaks[system][0] / MIB,
            reserved_mib=peaks[system][1] / MIB,
            peak_to_eager=peaks[system][0] / peaks["eager"][0],
        )
        for system in steps
    ]


# -- along rows --------------------------------------------------------------------------------------------------------


def along_rows(device: str, rounds: int, dtypes: list[str]) -> list[Row]:
    rows: list[Row] = []
    shape = (16, 1024, 2048) if device == "cuda" else (4, 512, 768)
    pairs: dict[str, tuple[nn.Module, nn.Module]] = {}
    for dtype in dtypes:
        made = {"device": device, "dtype": DTYPES[dtype]}
        width = shape[-1]
        pairs = {
            "LayerNorm": (nn.LayerNorm(width, **made), tb.nn.InPlaceLayerNorm(width, **made)),
            "RMSNorm": (nn.RMSNorm(width, **made), tb.nn.InPlaceRMSNorm(width, **made)),
            "SwiGLU": (_SwiGLU(), tb.nn.SwiGLU()),
            "GELU": (nn.GELU(), tb.nn.GELU()),
        }
        for name, (plain, inplace) in pairs.items():
            leaf = torch.randn(shape, **made)
            gradient = torch.randn(*shape[:-1], width // 2 if name == "SwiGLU" else width, **made)
            leaf.requires_grad_()
            passes = {"eager": Pass(plain, leaf, gradient, device), "takeback": Pass(inplace, leaf, gradient, device)}
            for one in passes.values():
                one()
                one()
                one.seconds = {"forward": [], "backward": []}
            for r in range(rounds * 3):
                for system in list(passes) if r % 2 else list(reversed(passes)):
                    passes[system]()
            case = f"{name} {'x'.join(map(str, shape))}"
            for row in (_layer_row(case, dtype, "", system, passes, device) for system in passes):
                row.what = "rows"
                rows.append(row)
    return rows


class _SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


# -- the table ---------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="*", default=["layers", "kernels", "models", "rows"])
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds for each system")
    parser.add_argument("--batch", type=int, default=256, help="of the models")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument(
        "--compile", action="store_true", help="also torch.compile, for ResNet-50 in bf16, channels_last"
    )
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    device, rounds = arguments.device, arguments.rounds
    out = arguments.out or Path(__file__).parent / "results" / f"norms-{device}.json"
    dtypes = ["bf16", "fp16"] if device == "cuda" else ["fp32", "bf16"]
    console = Console(width=130, file=sys.stdout)
    rows: list[Row] = []

    def keep(more: list[Row]) -> None:
        rows.extend(more)
        about = machine(device) | {"rounds": rounds, "batch": arguments.batch, "inplace_abn": THEIRS}
        out.write_text(json.dumps({"machine": about, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        say = lambda text: progress.update(task, description=text)  # noqa: E731
        for what in arguments.only:
            say(what)
            if what == "layers":
                keep(layers(device, rounds, dtypes))
            elif what == "rows":
                keep(along_rows(device, rounds, dtypes))
            elif device == "cuda" and what == "kernels":
                keep(kernels(rounds))
            elif device == "cuda" and what == "models":
                for name, dtype, layout in itertools.product(arguments.models, ("bf16", "fp16"), LAYOUTS):
                    say(f"{name} {dtype} {layout}")
                    keep(model(name, dtype, layout, rounds, arguments.batch, arguments.compile))
    show(console, rows)
    console.print(f"written to {out}")


COLUMNS = {
    "fwd ms": "forward_ms",
    "bwd ms": "backward_ms",
    "ms": "step_ms",
    "x eager": "ratio_to_eager",
    "fwd x": "forward_to_eager",
    "bwd x": "backward_to_eager",
    "bwd MiB": "backward_transient_mib",
    "peak MiB": "peak_mib",
    "reserved MiB": "reserved_mib",
    "x peak": "peak_to_eager",
    "of copy": "of_copy_bandwidth",
}


def show(console: Console, rows: list[Row]) -> None:
    for what in dict.fromkeys(row.what for row in rows):
        mine = [row for row in rows if row.what == what]
        shown = {title: name for title, name in COLUMNS.items() if any(getattr(r, name) is not None for r in mine)}
        table = Table("case", "dtype", "layout", "system", *shown, title=what)
        for r in mine:
            values = (getattr(r, name) for name in shown.values())
            table.add_row(*(r.case, r.dtype, r.layout, r.system), *("" if v is None else f"{v:.3f}" for v in values))
        console.print(table)


if __name__ == "__main__":
    main()

"""The pictures of the documentation, drawn from committed results: benchmarks/results/*.json in, docs/assets/*.svg out.

    python docs/plots.py

Plain SVG, without a library: the same results give the same bytes, and tests/test_site.py compares them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, ASSETS = ROOT / "benchmarks" / "results", ROOT / "docs" / "assets"
INK, FAINT, EAGER, OURS, OURS_LOWER, OTHERS = "#24292f", "#6b7280", "#9ca3af", "#0f766e", "#5eaaa1", "#c2803d"
WIDTH = 760


@dataclass(frozen=True)
class Bar:
    """One system: its peak and time, as parts of eager's; `color` says whose it is."""

    label: str
    peak: float
    time: float
    color: str = OTHERS


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 13,
    anchor: str = "start",
    color: str = INK,
    weight: str = "",
    on_bars: bool = False,
) -> str:
    bold = ' font-weight="600"' if weight else ""
    halo = ' stroke="#fff" stroke-width="4" paint-order="stroke"' if on_bars else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{bold}{halo}>'
        f"{escape(words)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, color: str = "#e5e7eb", dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{dashes}/>'


def page(height: float, title: str, parts: Iterable[str]) -> str:
    """One picture on a white card, which is legible on a light and on a dark page."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f"font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif\">"
    )
    card = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8" fill="#fff" stroke="#e5e7eb"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", card, *parts, "</svg>", ""])


# -- memory over a step --------------------------------------------------------------------------------------------


LONGEST_RUN = 6
"""The loss is computed in chunks, a hundred small ops that take a moment: to draw each would hide all others."""


def shortened(values: Sequence[float]) -> list[float]:
    out: list[float] = []
    for value in values:
        if len(out) < LONGEST_RUN or any(before != value for before in out[-LONGEST_RUN:]):
            out.append(value)
    return out


def memory_curve(data: dict[str, Any]) -> str:
    """Bytes above resident over the ops of a step, each system on its own scale from its first op to its last."""
    left, right, top, bottom, height = 64, 20, 64, 44, 330
    rows = {row["system"]: shortened(row["above_resident_mib"]) for row in data["rows"]}
    most = max(map(max, rows.values()))
    ceiling = -(-most // 100) * 100
    wide, tall = WIDTH - left - right, height - top - bottom

    def y(mib: float) -> float:
        return top + tall * (1 - mib / ceiling)

    def path(values: Sequence[float]) -> str:
        """Steps: what is alive during an op is alive during all of it."""
        each = wide / len(values)
        points = [f"M{left:.1f} {y(0):.1f}"]
        for i, value in enumerate(values):
            points.append(f"L{left + i * each:.1f} {y(value):.1f}H{left + (i + 1) * each:.1f}")
        return "".join(points) + f"L{left + wide:.1f} {y(0):.1f}Z"

    looks = (
        ("eager", EAGER, 0.25, "eager"),
        ("takeback auto", OURS, 0.30, 'takeback, memory="auto"'),
        ("takeback min", OURS_LOWER, 0.45, 'takeback, memory="min"'),
    )
    title = "Memory over one training step of a small GPT"
    parts = [text(left, 26, title, size=15, weight="bold")]
    for mib in range(0, int(ceiling) + 1, 100):
        parts += [
            line(left, y(mib), left + wide, y(mib)),
            text(left - 8, y(mib) + 4, f"{mib}", anchor="end", color=FAINT),
        ]
    for name, color, opacity, _ in looks:
        parts.append(f'<path d="{path(rows[name])}" fill="{color}" fill-opacity="{opacity}" stroke="{color}"/>')
    x = left + wide - 262
    for i, (name, color, opacity, label) in enumerate(looks):
        words = f"{label}: {max(rows[name]):.0f} MiB"
        swatch = (
            f'<rect x="{x}" y="{52 + 20 * i}" width="12" height="12" fill="{color}" fill-opacity="{opacity + 0.4}"/>'
        )
        parts += [swatch, text(x + 18, 62 + 20 * i, words)]
    parts.append(text(left, 46, "MiB above what is resident anyway", size=12, color=FAINT))
    below = f"ops of the step, first to last; of more than {LONGEST_RUN} that hold the same, {LONGEST_RUN} are drawn"
    parts.append(text(left, height - 16, below, size=12, color=FAINT))
    return page(height, title, parts)


# -- bars ----------------------------------------------------------------------------------------------------------


def bars(title: str, below: str, systems: Sequence[Bar]) -> str:
    """Two columns of bars, peak and time, with a line at eager's 1.0."""
    left, gap, top, row = 268, 44, 74, 26
    column = (WIDTH - left - gap - 56) / 2
    height = top + row * len(systems) + 40
    parts = [text(20, 28, title, size=15, weight="bold")]
    for name, start, values in _columns(left, column, gap, systems):
        most = max(1.2, *values)
        ends = [start + column * value / most for value in values]
        parts.append(text(start, 58, name, size=12, color=FAINT))
        for i, (system, end) in enumerate(zip(systems, ends, strict=True)):
            place = f'x="{start:.1f}" y="{top + i * row}" width="{end - start:.1f}"'
            parts.append(f'<rect {place} height="15" rx="2" fill="{system.color}"/>')
        at = start + column / most
        parts.append(line(at, top - 8, at, top + row * len(systems) - 4, FAINT, "3 3"))
        for i, (value, end) in enumerate(zip(values, ends, strict=True)):
            parts.append(text(end + 5, top + i * row + 12, f"{value:.2f}", size=12, on_bars=True))
    for i, system in enumerate(systems):
        ours = "bold" if system.color == OURS else ""
        parts.append(text(left - 10, top + i * row + 12, system.label, anchor="end", weight=ours))
    parts.append(text(20, height - 16, below, size=12, color=FAINT))
    return page(height, title, parts)


def _columns(
    left: float, column: float, gap: float, systems: Sequence[Bar]
) -> Iterator[tuple[str, float, list[float]]]:
    yield "peak above resident, × eager", left, [system.peak for system in systems]
    yield "time, × eager", left + column + gap, [system.time for system in systems]


def machine_of(data: dict[str, Any]) -> str:
    machine = data["machine"]
    return f"{machine['device']}, torch {machine['torch']}; the line is eager"


FRONTIER = (
    ("takeback auto", 'takeback, memory="auto"', OURS),
    ("takeback min", 'takeback, memory="min"', OURS),
    ("takeback min early", '"min", update="early"', OURS),
    ("takeback early min", '"min", update="early"', OURS),
    ("takeback keep", 'takeback, memory="keep"', OURS),
    ("compile 1", "torch.compile", OTHERS),
    ("compile 0.75", "torch.compile, budget 0.75", OTHERS),
    ("compile 0.5", "torch.compile, budget 0.5", OTHERS),
    ("compile 0.25", "torch.compile, budget 0.25", OTHERS),
    ("checkpoint", "torch.utils.checkpoint", OTHERS),
)


def frontier(case: str, title: str) -> Callable[[dict[str, Any]], str]:
    def draw(data: dict[str, Any]) -> str:
        rows = {row["system"]: row for row in data["rows"] if row["case"] == case}
        found = [(rows[name], label, color) for name, label, color in FRONTIER if name in rows]
        systems = [Bar(label, row["peak_to_eager"], row["ratio_to_eager"], color) for row, label, color in found]
        return bars(title, machine_of(data), systems)

    return draw


def architectures(data: dict[str, Any]) -> str:
    names = {"gpt": "GPT", "gpt_context": "GPT, attention context", "dit": "DiT", "ssm": "Mamba-2 style SSM"}
    found = [row for row in data["rows"] if row["system"] == "takeback auto"]
    systems = [Bar(names[row["case"]], row["peak_to_eager"], row["time_to_eager"], OURS) for row in found]
    return bars('Architectures of the zoo, memory="auto"', machine_of(data), systems)


def norms(data: dict[str, Any]) -> str:
    looks = {"takeback": ("tb.nn", OURS), "inplace_abn": ("inplace_abn 1.1.0", OTHERS)}
    rows = [r for r in data["rows"] if r["what"] == "models" and r["case"] == "ResNet-50" and r["system"] in looks]
    # Where a bar would be sixteen times as long as the line of eager, the others could not be seen.
    rows = [row for row in rows if row["ratio_to_eager"] < 5]
    systems = [
        Bar(
            f"{looks[r['system']][0]}, {r['dtype']}, {r['layout']}",
            r["peak_to_eager"],
            r["ratio_to_eager"],
            looks[r["system"]][1],
        )
        for r in rows
    ]
    return bars("ResNet-50, batch 256 × 224²: in-place norms", machine_of(data), systems)


# -- losses --------------------------------------------------------------------------------------------------------


def loss_curves(model: str, title: str) -> Callable[[dict[str, Any]], str]:
    """The losses of two eager trainings that differ in their dropout, and of takeback's, over the steps."""
    looks = (
        ("eager", "eager", EAGER, 5.0, ""),
        ("eager@2", "eager, other dropout", OTHERS, 1.5, "2 3"),
        ("fast@auto", 'takeback, mode="fast"', OURS, 1.5, ""),
    )

    def draw(data: dict[str, Any]) -> str:
        left, right, top, bottom, height = 64, 20, 64, 44, 330
        rows = {row["system"]: row["losses"] for row in data["rows"] if row["model"] == model and "losses" in row}
        most = max(map(max, rows.values()))
        ceiling = -(-most // 1)
        wide, tall = WIDTH - left - right, height - top - bottom
        parts = [text(left, 26, title, size=15, weight="bold"), text(left, 46, "loss", size=12, color=FAINT)]
        for tick in range(0, int(ceiling) + 1, max(1, int(ceiling) // 6)):
            y = top + tall * (1 - tick / ceiling)
            parts += [line(left, y, left + wide, y), text(left - 8, y + 4, f"{tick}", anchor="end", color=FAINT)]
        found = [look for look in looks if look[0] in rows]
        for i, (name, label, color, width, dash) in enumerate(found):
            each = wide / max(1, len(rows[name]) - 1)
            points = (f"{left + k * each:.1f},{top + tall * (1 - v / ceiling):.1f}" for k, v in enumerate(rows[name]))
            style = f'fill="none" stroke="{color}" stroke-width="{width}"' + (
                f' stroke-dasharray="{dash}"' * bool(dash)
            )
            parts.append(f'<polyline points="{" ".join(points)}" {style}/>')
            x, y = left + wide - 190, 58 + 20 * i
            parts += [f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" {style}/>', text(x + 32, y + 4, label)]
        parts.append(text(left, height - 16, _apart(rows, data), size=12, color=FAINT))
        return page(height, title, parts)

    return draw


def _apart(rows: dict[str, list[float]], data: dict[str, Any]) -> str:
    """`200 steps; mean distance from eager 0.004, of another dropout's eager 0.005; NVIDIA H200, torch 2.11`."""

    def distance(name: str) -> str:
        return f"{sum(abs(a - b) for a, b in zip(rows[name], eager, strict=True)) / len(eager):.4f}"

    eager = rows["eager"]
    said = [f"{len(eager)} steps; mean distance from eager {distance('fast@auto')}"]
    said += [f", of eager with other dropout {distance('eager@2')}"] if "eager@2" in rows else []
    return "".join(said) + f"; {data['machine']['device']}, torch {data['machine']['torch']}"


def has_losses(source: str, model: str) -> bool:
    if not (RESULTS / source).exists():
        return False
    rows = json.loads((RESULTS / source).read_text())["rows"]
    return {"eager", "fast@auto"} <= {row["system"] for row in rows if row["model"] == model and "losses" in row}


CURVES = {
    "gpt2": "GPT-2 124M, 16 × 1024 bytes of text",
    "resnet50": "ResNet-50, 256 × 224², drawn shapes",
}

PLOTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "memory-over-a-step.svg": ("memory-curve-cpu.json", memory_curve),
    "frontier-cpu-gpt.svg": ("frontier-cpu.json", frontier("gpt", "GPT, 4 layers of 384, 8 × 256 tokens, on a CPU")),
    "frontier-cpu-resnet.svg": ("frontier-cpu.json", frontier("resnet", "ResNet-50, 8 × 112², on a CPU")),
    "frontier-cuda-gpt.svg": ("frontier-cuda.json", frontier("gpt", "GPT-2 124M, 8 × 1024 tokens, on an H200")),
    "frontier-cuda-resnet.svg": ("frontier-cuda.json", frontier("resnet", "ResNet-50, 256 × 112², on an H200")),
    "architectures-cpu.svg": ("architectures-cpu.json", architectures),
    "norms-cuda.svg": ("norms-cuda.json", norms),
}


PLOTS |= {
    f"gpu-curves-{model}.svg": ("gpu-curves.json", loss_curves(model, title))
    for model, title in CURVES.items()
    if has_losses("gpu-curves.json", model)
}


def drawn(name: str) -> str:
    """The picture of that name, as its results are now."""
    source, draw = PLOTS[name]
    return draw(json.loads((RESULTS / source).read_text()))


def main() -> None:
    ASSETS.mkdir(exist_ok=True)
    for name in PLOTS:
        (ASSETS / name).write_text(drawn(name), encoding="utf-8")


if __name__ == "__main__":
    main()

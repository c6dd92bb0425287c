"""What all pages share: the frame with its style and script, sections, cards, tables, and the axes of a picture.

A page loads nothing, and every text from the user's code is escaped here. Words of the compiler's own are explained
where they are pointed at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from takeback.compiler.explain.text import clean, show_bytes

CURVE_HEIGHT = 240
"""In pixels, with the room for labels around a picture."""
TAIL_SHARE = 0.1
"""Of the width of a picture: the optimizer's ops, of which there are many and none at the peak, get no more."""

WORDS = {
    "resident": "alive between steps anyway: parameters, optimizer state, buffers, the batch",
    "above resident": "what the step itself takes, besides what is alive between steps anyway",
    "arena": "one block of memory in which every value of the step has a planned place",
    "lower bound": "the most bytes of values that are alive at one time: no arena can be smaller",
    "run again": "ops whose results are dropped over the peak and made again when they are read",
    "run again per step": "ops whose results are dropped over the peak and made again when they are read",
    "fate": "what became of a value's bytes",
    "Fates": "what became of the bytes of each value",
    "Refusals": "decisions that were not taken, each with its reason",
    "moved": "eager copies it; here its bytes are handed on",
    "overwritten": "written onto an operand that nobody reads any more",
    "packed": "has a fixed place in a larger buffer: the gradients lie side by side",
    "placed": "has bytes of its own from its first write to its last use",
    "recomputed": "dropped over the peak, and made again just before it is read",
    "copied": "copied, for the reason that is given",
    "scratch": "bytes that an op takes for itself while it runs",
    "passed": "bytes that an op takes for itself, from the ordinary allocator",
    "Kernels": "runs of ops that move memory and compute little are one kernel each, which is generated",
    "proved": "its first replay was compared with eager, in mode exact bit by bit; family: that of a plan with other "
    "shapes was",
    "replays": "how often a step has run by this plan",
}


def page(title: str, sub: str, parts: Sequence[str]) -> str:
    """A whole page around parts that are HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text_of(title)}</title>\n<style>{_STYLE}</style></head>\n<body><main>\n"
        f"<h1>takeback</h1><p class=sub>{text_of(sub)}</p>\n"
        + "\n".join(parts)
        + f"\n</main><script>{_SCRIPT}</script></body></html>\n"
    )


def text_of(text: object) -> str:
    return escape(clean(str(text)))


def explained(text: str) -> str:
    """The text, with what it means where that is not plain to see."""
    meaning = WORDS.get(text)
    return f'<abbr title="{escape(meaning)}">{text_of(text)}</abbr>' if meaning else text_of(text)


def section(title: str, body: str, lead: str) -> str:
    return f"<section><h2>{explained(title)}</h2>{lead}{body}</section>" if body else ""


def cards(shown: Iterable[tuple[str, str, str]]) -> str:
    """(name, figure, remark) side by side."""
    return (
        "<div class=cards>"
        + "".join(
            f"<div class=card><div class=name>{explained(name)}</div><div class=figure>{text_of(figure)}</div>"
            f"<div class=sub>{text_of(sub)}</div></div>"
            for name, figure, sub in shown
        )
        + "</div>"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int]) -> str:
    """Cells are escaped here, and only here."""

    def cell(tag: str, index: int, text: str) -> str:
        shown = explained(text) if tag == "th" else text_of(text)
        of = f' data-of="{text_of(header[index])}"' if tag == "td" else ""  # a phone shows it beside the cell
        return f"<{tag}{' class=right' if index in right else ''}{of}>{shown}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(header))
    body = "".join("<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


class Axes:
    """Maps ops and bytes onto a picture, in percent of its width and height, so that it fits any window and its texts
    keep their size; y grows upwards. What comes at `tail_at` and later gets no more than `TAIL_SHARE` of the width."""

    def __init__(self, span: float, top_bytes: int, height: int, tail_at: float | None = None) -> None:
        self.span, self.top_bytes, self.height = max(span, 1e-9), max(top_bytes, 1), height
        long = tail_at is not None and 0 < tail_at < (1 - TAIL_SHARE) * self.span
        self.tail_at = tail_at if long else None

    def x(self, time: float) -> float:
        if self.tail_at is None:
            return 100 * time / self.span
        if time <= self.tail_at:
            return 100 * (1 - TAIL_SHARE) * time / self.tail_at
        return 100 * (1 - TAIL_SHARE * (self.span - time) / (self.span - self.tail_at))

    def y(self, size_bytes: float) -> float:
        return 100 * (1 - size_bytes / self.top_bytes)

    def grid(self) -> str:
        lines = []
        for value in _ticks(self.top_bytes):
            y = f"{self.y(value):.2f}%"
            lines.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
            lines.append(f'<text class="y" x="-8" y="{y}">{_tick_label(value)}</text>')
        return "".join(lines)

    def picture(self, name: str, body: str, ident: str = "") -> str:
        """`ident`: of one that takes part in the page's script, and can be walked through with the keyboard."""
        live = f' id="{escape(ident)}" tabindex="0"' if ident else ""
        return (
            f'<div class="plot" style="height:{self.height}px"><svg role="img"{live} '
            f'aria-label="{escape(name)}">{self.grid()}{body}</svg></div>'
        )

    def label(self, x: float, text: str, anchor: str = "middle") -> str:
        return f'<text class="x" x="{x:.2f}%" y="100%" dy="20" text-anchor="{anchor}">{escape(text)}</text>'


def stretched(paths: str) -> str:
    """Paths whose points are in percent, which only other shapes can have."""
    return f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" width="100%" height="100%">{paths}</svg>'


def _tick_label(value: float) -> str:
    return show_bytes(value).replace(".00 ", " ").replace(".0 ", " ")


def _ticks(top_bytes: int) -> list[int]:
    """0 and a few round numbers of bytes up to the top."""
    step = 1
    while top_bytes / step > 6:
        step *= 2
    return list(range(0, top_bytes + 1, step))


_STYLE = """
:root{color-scheme:light dark;--page:#f7f7f5;--card:#fff;--ink:#1c1f24;--dim:#666c76;--line:#e2e2dd;--grid:#ecece7;
--moved:#2a9d8f;--overwritten:#e07a3f;--packed:#8367c7;--placed:#4c7fb8;--recomputed:#c2a83e;--copied:#c8384b;
--scratch:#b9bec7;--passed:#7a4a2b;--ours:#2f6db3;--eager:#d0713a}
@media(prefers-color-scheme:dark){:root{--page:#15171a;--card:#1e2125;--ink:#e8e9eb;--dim:#9aa1ab;--line:#33373d;
--grid:#2a2e33;--moved:#3fbfae;--overwritten:#e58a52;--packed:#9c83da;--placed:#5b8fca;--recomputed:#cdb650;
--copied:#e25b6c;--scratch:#596069;--passed:#a8714c;--ours:#6ba6e8;--eager:#e8935e}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:26px;margin:0;letter-spacing:-.01em}h2{font-size:17px;margin:0 0 6px}
.sub,section>p,.readout{color:var(--dim);font-size:13px}section>p,.readout{margin:0 0 10px}h1+.sub{margin:2px 0 18px}
.note{background:var(--card);border-left:3px solid var(--copied);padding:8px 12px;border-radius:4px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:12px;margin-bottom:16px}
.card,section{background:var(--card);border:1px solid var(--line);border-radius:10px}
.card{padding:14px 16px}.card .name{font-size:13px;color:var(--dim)}
.figure{font-size:25px;font-weight:650;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
section{padding:18px 20px;margin-bottom:16px}
.scroll{overflow-x:auto}.key svg{display:block}.plot{padding:12px 12px 30px 72px}
.plot>svg{display:block;width:100%;height:100%;overflow:visible}.plot path,.plot rect{vector-effect:non-scaling-stroke}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px}.key{display:inline-flex;align-items:center;gap:6px}
.readout{min-height:20px;font-variant-numeric:tabular-nums}
rect{stroke:var(--card);stroke-width:.6;stroke-opacity:.7}
.plot rect:hover{stroke:var(--ink);stroke-width:1.6;stroke-opacity:1}
.moved{fill:var(--moved)}.overwritten{fill:var(--overwritten)}.packed{fill:var(--packed)}.placed{fill:var(--placed)}
.recomputed{fill:var(--recomputed)}.copied{fill:var(--copied)}.scratch{fill:var(--scratch)}.passed{fill:var(--passed)}
.grid{stroke:var(--grid);stroke-width:1}.peak{stroke:var(--ink);stroke-width:1;stroke-dasharray:4 3;pointer-events:none}
text{fill:var(--dim);font-size:12px}.y{text-anchor:end;dominant-baseline:middle}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round}.curve.ours{stroke:var(--ours)}.curve.eager{stroke:var(--eager)}
.limit{stroke:var(--eager);stroke-width:1.4;stroke-dasharray:6 4}.limit+text{fill:var(--eager)}
.dot{fill:var(--ours);stroke:var(--card);stroke-width:1.5}.dot.auto{fill:var(--overwritten)}
.dot:hover{stroke:var(--ink)}.dot+text{font-size:12px}
.area{stroke:none}.area.ours{fill:var(--ours);fill-opacity:.16}.area.eager{fill:var(--eager);fill-opacity:.12}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;padding:5px 16px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
abbr{text-decoration:underline dotted;text-underline-offset:3px;cursor:help}
.dim{opacity:.08}.chosen{stroke:var(--ink);stroke-width:1.6;stroke-opacity:1}
input{font:inherit;color:inherit;background:var(--page);border:1px solid var(--line);border-radius:6px;padding:4px 10px;
width:min(100%,340px);margin-bottom:10px}
summary{cursor:pointer;padding:5px 0;overflow-wrap:anywhere}summary .sub{display:block;margin-left:16px}
details{border-bottom:1px solid var(--line)}details table{margin:2px 0 10px 16px;width:calc(100% - 16px)}
details td,.left td{overflow-wrap:anywhere}details td:first-child{white-space:normal}
h3{font-size:14px;margin:16px 0 4px}
svg:focus-visible,input:focus-visible,summary:focus-visible{outline:2px solid var(--ours)}
.bar{display:flex;height:34px;border-radius:6px;overflow:hidden;margin:4px 0 14px;gap:1px}
.bar span{min-width:2px}.swatch{display:inline-block;width:12px;height:12px;border-radius:3px;vertical-align:-1px}
.k0{background:#4c7fb8}.k1{background:#7d6bb5}.k2{background:#a9b4c2}.k3{background:#2a9d8f}.k4{background:#e07a3f}
.k5{background:#c8384b}.k6{background:#c2a83e}.k7{background:#8b9199}.k8{background:#d9a5b3}.k9{background:#7fae3f}
.parts td:first-child,.tips td:first-child{white-space:normal;overflow-wrap:anywhere}
.parts td:last-child{padding-right:0}
@media(max-width:600px){main{padding:20px 12px 40px}section{padding:14px}
.plot{padding:10px 0 30px 56px}text,.dot+text{font-size:11px}
.scroll table,.scroll tbody,.scroll tr,.scroll td{display:block}.scroll thead{display:none}
.scroll tr{padding:8px 0;border-bottom:1px solid var(--line)}.scroll td{border:0;padding:2px 0;overflow-wrap:anywhere}
.scroll td[data-of]{display:flex;gap:14px;justify-content:space-between;text-align:right}.scroll td:empty{display:none}
.scroll td[data-of]::before{content:attr(data-of);color:var(--dim);text-align:left;flex:none}
.scroll .right,.scroll td:first-child{white-space:normal}.scroll tr:last-child{border-bottom:0}}
code{font:13px/1.4 ui-monospace,"DejaVu Sans Mono",monospace;background:var(--page);padding:2px 6px;border-radius:4px;
-webkit-box-decoration-break:clone;box-decoration-break:clone}.tips td{min-width:9em}
.tips td:first-child{min-width:17em}
tbody tr:last-child td{border-bottom:0}td:first-child{white-space:nowrap}
th{color:var(--dim);font-weight:500}.right{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
"""

_SCRIPT = """
(() => {
  const out = document.getElementById("readout");
  if (!out) return;
  const picture = document.getElementById("arena"), find = document.getElementById("find");
  const all = [...picture.querySelectorAll("rect")];
  const titleOf = (rect) => rect.querySelector("title").textContent;
  let idle = out.textContent, shown = all, at = -1;
  const show = (rect) => {
    for (const other of picture.querySelectorAll(".chosen")) other.classList.remove("chosen");
    if (rect) rect.classList.add("chosen");
    out.textContent = rect ? titleOf(rect) : idle;
  };
  picture.addEventListener("pointerover", (e) => show(e.target.tagName === "rect" ? e.target : null));
  picture.addEventListener("pointerleave", () => show(null));
  picture.addEventListener("keydown", (e) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (!step || !shown.length) return;
    e.preventDefault();
    at = (at + step + shown.length) % shown.length;
    show(shown[at]);
  });
  find.addEventListener("input", () => {
    const wanted = find.value.trim().toLowerCase();
    shown = all.filter((rect) => titleOf(rect).toLowerCase().includes(wanted));
    at = -1;
    const found = new Set(shown);
    for (const rect of all) rect.classList.toggle("dim", !found.has(rect));
    idle = wanted ? `${shown.length} of ${all.length} values` : out.dataset.idle;
    show(null);
  });
})();
"""

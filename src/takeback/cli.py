"""The command line: `takeback demo | explain | predict | fit | bench | check | hazards`.

Exit codes: 0 done; 1 a `TakebackError`, or a bit that differs; 2 an unusable argument. `check` has the script's own.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

import takeback
from takeback import comparison
from takeback import demo as demos
from takeback.compiler.explain.frontier import Frontier
from takeback.compiler.explain.memory_viz import write_snapshot
from takeback.compiler.explain.passes import passes_text
from takeback.compiler.explain.report import Report
from takeback.compiler.explain.text import show_bytes
from takeback.compiler.run.gpu_table import MEASURED_ON, gpu_named
from takeback.errors import OptionError, OverwriteError, TakebackError, printable
from takeback.guard import Guard
from takeback.options import Options, parse_bytes
from takeback.predict import frontier as find_frontier
from takeback.predict import passes as find_passes
from takeback.predict import with_autocast
from takeback.targets import BadArgument, device_named, load_case, load_maker, load_subjects, parts_of_case


class _Command(TyperCommand):
    """A command whose help shows --help as a plain flag."""

    def get_help_option(self, ctx: Any) -> Any:
        return _plain(super().get_help_option(ctx))


class _CommandGroup(TyperGroup):
    """The same for the command that holds the others."""

    def get_help_option(self, ctx: Any) -> Any:
        return _plain(super().get_help_option(ctx))


def _plain(option: Any) -> Any:
    if option is not None:
        option.metavar = FLAG
    return option


FLAG = ""
"""The metavar of a flag, which takes no value."""

app = typer.Typer(
    cls=_CommandGroup,
    help="Compiles a PyTorch training step so that every buffer has one owner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

TARGET_HELP = (
    "A model of the zoo (gpt, gpt/small, zoo:resnet/full), or file.py:function or package.module:function, where "
)
RUNS_CODE = "It runs that code, with your rights: give it none that you would not run yourself."
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help=f"{TARGET_HELP}function() returns (model, loss_fn, optimizer, batch). {RUNS_CODE}"
    ),
]
MakerArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help=f"{TARGET_HELP}function(n) returns (model, loss_fn, optimizer, batch) with a batch of n. {RUNS_CODE}",
    ),
]

MemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="MEMORY",
        help="auto (the default), min, keep, a part of eager's peak such as 0.6x, or a size such as 12GiB.",
    ),
]
ModeOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        help="exact (eager's bits), fast (generated kernels), or auto (the default): fast on CUDA, exact elsewhere.",
    ),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Predict for this GPU instead of the CPU: H200, H100-80GB, A100-80GB, RTX 4090, ... It need not be there. "
        "An unknown name shows those that are known.",
    ),
]
AUTO, AUTO_MODE, SOLVE_S = Options.memory, Options.mode, Options.solve_s


def main() -> None:
    """The `takeback` command."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"takeback {takeback.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar=FLAG, callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Compiles a PyTorch training step so that every buffer has one owner."""


@app.command(cls=_Command)
def demo(
    steps: Annotated[int, typer.Option(min=4, help="How many steps each model is trained.")] = demos.STEPS,
    out: Annotated[Path | None, typer.Option(help="Also write the GPT's report as a page to this file.")] = None,
    tiny: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Train a small GPT and a small ResNet, in eager and compiled, and compare memory, time and every bit."""
    with _CleanErrors():
        _check_writable(out)
        equal = demos.run_demo(_console(), steps=steps, out=out, tiny=tiny)
    if not equal:
        _fail("takeback did not give eager's bits; please report this with the table above.", code=1)


@app.command(cls=_Command)
def explain(
    target: TargetArgument,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page to this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="How many steps to run first: 3 are enough, and 5 where kernels are generated."),
    ] = None,
    memory: MemoryOption = None,
    mode: ModeOption = None,
    fail_over: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Exit with 1 if the peak is above this, such as 12GiB: a check for CI."),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="Write the plan's memory over the step to this file, for pytorch.org/memory_viz."),
    ] = None,
    tips: Annotated[
        bool, typer.Option("--tips/--no-tips", metavar=FLAG, help="What you can do, which takes as long as planning.")
    ] = True,
    frontier: Annotated[
        bool,
        typer.Option(
            "--frontier", metavar=FLAG, help="Show peak against predicted time instead; no step of TARGET is run."
        ),
    ] = False,
    passes: Annotated[
        bool,
        typer.Option(
            "--passes", metavar=FLAG, help="Show what each pass changes in the program instead; nothing is run."
        ),
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", metavar=FLAG, help="With --passes: the whole program after each pass.")
    ] = False,
    solve_s: Annotated[
        float, typer.Option(help="A last guard on the choice of what to rebuild, in seconds.")
    ] = SOLVE_S,
) -> None:
    """Run a few steps of TARGET, and show its peak, what makes it, and what can be done about it.

    TARGET is code of yours, and it is run."""
    with _CleanErrors():
        _check_writable(html, json, snapshot)
        limit = parse_bytes(fail_over) if fail_over is not None else None
        if (frontier or passes) and (limit is not None or snapshot is not None):
            raise BadArgument("--fail-over and --snapshot are about a plan; leave --frontier and --passes out")
        if frontier and memory is not None:
            raise BadArgument("--frontier shows every --memory side by side; leave one of the two out")
        if passes and (frontier or html or json):
            raise BadArgument("--passes prints text, and nothing else; leave --frontier, --html and --json out")
        if whole and not passes:
            raise BadArgument("--whole belongs to --passes")
        if passes:
            _show_passes(target, AUTO if memory is None else memory, mode or AUTO_MODE, solve_s, whole=whole)
            return
        made: Report | Frontier
        if frontier:
            subject = load_case(target)
            with _telling(f"tracing {target}") as tell:
                made = find_frontier(
                    subject.model,
                    subject.loss_fn,
                    subject.optimizer,
                    *subject.batch,
                    mode=mode or AUTO_MODE,
                    solve_s=solve_s,
                    progress=tell,
                )
        else:
            made = _report(target, steps, AUTO if memory is None else memory, mode or AUTO_MODE, solve_s, tips=tips)
    _write(made, html, json, snapshot)
    if isinstance(made, Report):
        _check_limit(made, limit, fail_over)


def _write(made: Report | Frontier, html: Path | None, json: Path | None, snapshot: Path | None = None) -> None:
    typer.echo(str(made))
    if snapshot is not None and isinstance(made, Report):
        typer.echo(f"\nsnapshot: {write_snapshot(made, snapshot)}, for https://pytorch.org/memory_viz")
    if html is not None:
        typer.echo(f"\npage: {made.to_html(html)}")
    if json is not None:
        json.write_text(made.to_json(), encoding="utf-8")
        typer.echo(f"\ndata: {json}")


def _check_limit(report: Report, limit: int | None, said: str | None) -> None:
    if limit is not None and report.peak_bytes > limit:
        _fail(f"the peak is {show_bytes(report.peak_bytes)}, above --fail-over {said}", code=1)


def _show_passes(target: str, memory: str, mode: str, solve_s: float, *, whole: bool) -> None:
    subject = load_case(target)
    with _telling(f"tracing {target}") as tell:
        records = find_passes(
            subject.model,
            subject.loss_fn,
            subject.optimizer,
            *subject.batch,
            mode=mode,
            memory=memory,
            solve_s=solve_s,
            progress=tell,
        )
    console = Console(highlight=False)
    for line in passes_text(records, whole=whole):
        # On a terminal a line of the program stays one line; a file or a pipe gets all of it.
        if console.is_terminal:
            style = {"-": "red", "+": "green"}.get(line.strip()[:1], "")
            console.print(Text(line, style=style, no_wrap=True, overflow="ellipsis"))
        else:
            typer.echo(line)


def _report(target: str, steps: int | None, memory: str, mode: str, solve_s: float, *, tips: bool) -> Report:
    subject = load_case(target)
    with _telling(f"recording {target}, and choosing what to rebuild") as tell:
        step = takeback.compile_step(
            subject.model, subject.loss_fn, subject.optimizer, mode=mode, memory=memory, solve_s=solve_s
        )
        steps = steps or (comparison.REHEARSALS if step.mode == "exact" else comparison.REHEARSALS_FAST)
        for i in range(steps):
            step(*subject.batch)
            tell(f"{target}: step {i + 1} of {steps}")
        report = step.report()
        if not tips:
            return replace(report, advisor=None)
        report = with_autocast(report, subject, step.options)
        tell(f"{target}: planning other settings")
        assert report.advice is not None  # found here, while the terminal says so
    return report


@app.command(cls=_Command)
def predict(
    target: TargetArgument,
    gpu: GpuOption = None,
    memory: MemoryOption = None,
    mode: ModeOption = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page to this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file.")] = None,
    fail_over: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Exit with 1 if the peak is above this, such as 12GiB: a check for CI."),
    ] = None,
) -> None:
    """Show the report that TARGET would have, without running a step of it: for the CPU, or for a GPU by its name."""
    with _CleanErrors(), _telling(f"tracing {target}"):
        _check_writable(html, json)
        limit = parse_bytes(fail_over) if fail_over is not None else None
        subject = load_case(target)
        report = takeback.predict(
            subject.model,
            subject.loss_fn,
            subject.optimizer,
            *subject.batch,
            memory=AUTO if memory is None else memory,
            mode=mode or AUTO_MODE,
            device=None if gpu is None else "cuda",
            gpu=gpu,
        )
    _write(report, html, json)
    _check_limit(report, limit, fail_over)


@app.command(cls=_Command)
def fit(
    target: MakerArgument,
    memory: Annotated[
        str | None,
        typer.Option(help="How much memory a step may take, such as 24GiB; with --gpu what that GPU has, if not said."),
    ] = None,
    gpu: GpuOption = None,
    memory_mode: Annotated[
        str | None,
        typer.Option(metavar="MEMORY", help="Only for this memory= of compile_step: auto, min, keep."),
    ] = None,
) -> None:
    """Find the largest batch of TARGET that fits, in eager and compiled.

    A function of yours is called as function(n), n the batch size; the steps themselves are not run."""
    modes = ("auto", "min") if memory_mode is None else (memory_mode,)
    device = None if gpu is None else "cuda"
    with _CleanErrors(), _telling(f"loading {target}") as tell:
        if memory_mode is not None and memory_mode not in ("auto", "min", "keep"):
            raise BadArgument(f"--memory-mode is auto, min or keep, got {memory_mode!r}")
        if memory is None and gpu is None:
            raise BadArgument("say how much there is: --memory 24GiB, or --gpu and the name of a GPU")
        card = gpu_named(gpu) if gpu is not None else None
        make = load_maker(target)
        found: dict[str, int] = {}
        why: TakebackError | None = None
        for mode in ("eager", *modes):

            def told(n: int, peak_bytes: int, mode: str = mode) -> None:
                tell(f"{mode}: a batch of {n} peaks at {show_bytes(peak_bytes)}")

            try:
                found[mode] = takeback.largest_batch(
                    lambda n: parts_of_case(make(n)),
                    memory=memory,
                    memory_mode=mode,
                    device=device,
                    gpu=gpu,
                    progress=told,
                )
            except OptionError as error:  # not even one row fits
                found[mode], why = 0, error
        if why is not None and not any(found.values()):
            raise why
    room = memory if card is None or memory is not None else show_bytes(card.usable_bytes)
    typer.echo(f"{target}: the largest batch that fits {room}{f' on the {card.name}, predicted' if card else ''}")
    for mode, batch in found.items():
        named = "in eager" if mode == "eager" else f'with memory="{mode}"'
        typer.echo(f"  {batch:>8}  {named}")
    if card is not None and card.name != MEASURED_ON:
        typer.echo(f"kernel choices are the {MEASURED_ON}'s; on the {card.name} some may be others")


@app.command(cls=_Command)
def bench(
    target: TargetArgument = "gpt/small",
    rounds: Annotated[int, typer.Option(min=1, help="How many steps of each are timed.")] = 20,
    memory: MemoryOption = None,
    mode: ModeOption = None,
) -> None:
    """Time TARGET in eager and compiled, in turns; also peak, allocations and page faults."""
    with _CleanErrors(), _telling(f"loading {target}") as tell:
        result = comparison.compare(
            load_case(target),
            load_case(target),
            rounds,
            mode=mode or AUTO_MODE,
            memory=AUTO if memory is None else memory,
            progress=tell,
        )
    console = _console()
    setting = "".join(f', {k}="{v}"' for k, v in (("memory", memory), ("mode", mode)) if v is not None)
    console.print(comparison.comparison_table(f"{target}{setting}, {rounds} steps of each in turns", result))
    console.print(comparison.verdict(result))


@app.command(cls=_Command, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def check(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help=f"A training script; it is run as `python SCRIPT`. {RUNS_CODE}")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The script's own arguments.")
    ] = None,
) -> None:
    """Run a script, and stop where a backward node overwrites what others can still read. It takes longer than usual.

    Exits with 1 after an unsafe overwrite, else with the script's own code."""
    with _CleanErrors():
        if not script.is_file():
            raise BadArgument(f"there is no file {script}")
    code: object = 0
    with takeback.guard() as guard:
        try:
            _run_script(script, arguments or [])
        except SystemExit as end:
            code = end.code
        except OverwriteError:
            pass  # the guard has it too
    if guard.errors:
        _fail(f"OverwriteError in {script.name}\n\n{guard.errors[0]}", code=1)
    typer.echo(_summary(guard), err=True)
    if code is not None and not isinstance(code, int):  # as Python does for sys.exit("a message")
        _fail(str(code), code=1)
    raise typer.Exit(code or 0)


def _run_script(script: Path, arguments: list[str]) -> None:
    """As `python script arguments` does."""
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.resolve().parent)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path


def _summary(guard: Guard) -> str:
    counts = guard.report()
    lines = [
        f"takeback check: no unsafe overwrite. {counts['backwards']:,} backwards, {counts['nodes']:,} nodes, of which "
        f"{counts['checked']:,} were watched; {counts['fingerprinted_bytes'] / 2**20:,.1f} MiB fingerprinted, "
        f"{counts['seconds']:.1f} s in the guard.",
        *(f"not watched: {reason} ({count:,} times)" for reason, count in sorted(guard.skipped.items())),
    ]
    return "\n".join(textwrap.fill(line, 80, subsequent_indent="  ") for line in lines)


@app.command(cls=_Command)
def hazards(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="package.module:factory or file.py:factory, where factory() returns a takeback.hazards.OpUnderTest or "
            f"a list of them. {RUNS_CODE}",
        ),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", metavar=FLAG, help="Show the hazards, and run none.")] = False,
    only: Annotated[str, typer.Option(metavar="PATTERN", help="Only hazards whose name contains this.")] = "",
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Where the op runs: cpu, cuda, cuda:1.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", metavar=FLAG, help="Without compilers and processes.")] = False,
    guard: Annotated[
        bool, typer.Option("--guard", metavar=FLAG, help="Run each inside takeback.guard() too: does it name it?")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the outcomes as JSON to this file.")] = None,
) -> None:
    """Try an in-place op on graphs where somebody else still reads what it overwrites.

    Exits with 1 if a result is wrong, or if a hazard was missed because the plain form raises."""
    from takeback import hazards as suite
    from takeback.hazards.report import findings, listed

    with _CleanErrors():
        chosen = suite.chosen(only, quick=quick)
        if not chosen:
            raise BadArgument(f"no hazard's name contains {only!r}; takeback hazards --list shows them")
        if show_list:
            typer.echo(listed(suite.KINDS, chosen))
            return
        if target is None:
            raise BadArgument("give package.module:factory or file.py:factory; takeback hazards --help says more")
        _check_writable(json)
        where = device_named(device)
        subjects = load_subjects(target, where)
        with _counting(len(subjects) * len(chosen)) as tell:
            found = [findings(each, chosen, where, under_guard=guard, tell=tell) for each in subjects]
    typer.echo("\n\n".join(map(str, found)))
    if json is not None:
        json.write_text(dumps({each.subject.name: each.to_json() for each in found}, indent=1), encoding="utf-8")
        typer.echo(f"\ndata: {json}")
    if any(each.failed for each in found):
        raise typer.Exit(1)


# -- files -------------------------------------------------------------------------------------------------------


def _check_writable(*paths: Path | None) -> None:
    """Raises if one of the files could not be written in the end."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise BadArgument(f"cannot write {path}: it is a folder")
        if not path.parent.is_dir():
            raise BadArgument(f"cannot write {path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise BadArgument(f"cannot write {path}: no permission")


# -- the terminal ------------------------------------------------------------------------------------------------


def _console() -> Console:
    console = Console(highlight=False)
    console.width = min(console.width, 80) if console.is_terminal else 80
    return console


@contextlib.contextmanager
def _telling(text: str) -> Iterator[Callable[[str], None]]:
    """Shows on the terminal what is being done, and elsewhere nothing. It is redrawn when it is told something and by
    no thread of its own, which would take page faults in a step that is being measured."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: None
        return
    with Live(Text(text, style="dim"), console=console, auto_refresh=False, transient=True) as live:
        live.refresh()
        yield lambda text: live.update(Text(text, style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)


@contextlib.contextmanager
def _counting(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on the terminal that is one further for each call, and says what is next; elsewhere nothing."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: None
        return
    with Progress(
        BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), console=console, transient=True
    ) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda text: bar.update(task, advance=1, description=escape(text))


class _CleanErrors:
    """Errors of takeback end the command with their message, without a traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BadArgument):
            _fail(str(error), code=2)
        if isinstance(error, TakebackError):
            _fail(f"{type(error).__name__}: {error}", code=1)


def _fail(message: str, *, code: int) -> NoReturn:
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(printable(message, keep="\n\t"), style="red"))
    raise typer.Exit(code)

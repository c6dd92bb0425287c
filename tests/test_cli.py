"""Every command of the command line: its help, its answer, and its exit code when something is wrong."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from pairwise import in_turns
from takeback import __version__, comparison, demo, predict
from takeback.cli import app
from takeback.compiler.run.eager import eager_step

pytestmark = pytest.mark.usefixtures("short_search")

USER_FILE = """
import torch

def make(rows=4):
    model = torch.nn.Linear(8, 2)
    return model, (lambda m, x: m(x).square().mean()), torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(rows, 8)

def reads_values():
    model = torch.nn.Linear(8, 2)
    def loss_fn(model, x):
        model.kept = model(x)
        return model.kept.mean()
    return model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(4, 8),)

def wrong():
    return 3

def loss_fn(model, x):
    return model(x).mean()
"""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "users_step.py"
    path.write_text(USER_FILE)
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"NO_COLOR": "1", "COLUMNS": "80", "TERM": "dumb"})


@pytest.mark.parametrize("command", ["demo", "explain", "fit", "bench", "check", "hazards"])
def test_each_command_has_a_help_text(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout
    assert command in run("--help").stdout


@pytest.mark.parametrize("command", ["explain", "fit", "bench", "check", "hazards"])
def test_help_says_that_the_users_code_is_run(command: str) -> None:
    text = " ".join(run(command, "--help").stdout.replace("│", " ").split())
    assert "It runs that code, with your rights" in text


def test_version() -> None:
    assert run("--version").stdout.strip() == f"takeback {__version__}"


@pytest.mark.parametrize("target", ["zoo:mlp/small", "mlp/small", "mlp"])
def test_explain_shows_a_model_of_the_zoo(target: str) -> None:
    result = run("explain", target)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("MLP, batch ")
    assert lines[3].startswith("peak")
    titles = [line.split("-- ")[1].split(" --")[0] for line in lines if line.startswith("-- ")]
    assert titles[:2] == ["What makes the peak", "What you can do"]
    assert max(map(len, lines)) <= 80


def test_explain_fails_over_a_peak_and_only_over_it() -> None:
    result = run("explain", "mlp", "--steps", "1", "--no-tips", "--fail-over", "10KiB")
    assert result.exit_code == 1
    assert re.search(r"the peak is [\d.]+ MiB, above --fail-over 10KiB", result.stderr)
    assert "What makes the peak" in result.stdout, "the report is shown all the same"
    assert run("explain", "mlp", "--steps", "1", "--no-tips", "--fail-over", "1GiB").exit_code == 0
    assert run("explain", "mlp", "--fail-over", "much").exit_code == 1
    assert run("explain", "mlp", "--frontier", "--fail-over", "1GiB").exit_code == 2


def test_explain_writes_page_and_data(tmp_path: Path) -> None:
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    result = run("explain", "mlp", "--html", str(page), "--json", str(data), "--steps", "1")
    assert result.exit_code == 0, result.output
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(data.read_text())["ops"] > 0


def test_explain_shows_the_frontier(tmp_path: Path) -> None:
    page, data = tmp_path / "f.html", tmp_path / "f.json"
    result = run("explain", "gpt", "--frontier", "--solve-s", "2", "--html", str(page), "--json", str(data))
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80 + len(str(tmp_path))
    assert "-- What is run again" in result.stdout
    assert re.search(r"^min .* %", result.stdout, re.MULTILINE)
    assert "auto" in result.stdout
    assert '<circle class="dot auto"' in page.read_text()
    assert json.loads(data.read_text())["points"][0]["memory"] == "keep"


def test_frontier_runs_no_step_of_the_users(user_file: Path) -> None:
    assert "users_step" not in run("explain", f"{user_file}:make", "--frontier").stdout
    result = run("explain", f"{user_file}:reads_values", "--frontier")
    assert result.exit_code == 1
    assert "CaptureError" in result.stderr


WRONG_FILE = """
import torch

def loss_fn(model, x):
    return model(x).mean()

def raises(n=0):
    raise ZeroDivisionError("no\\nsuch data")

def raises_in_torch(n=0):
    return torch.zeros(2) @ torch.zeros(3)

def no_model(n=0):
    return "model", loss_fn, None, ()

def no_loss(n=0):
    return torch.nn.Linear(8, 2), 3, None, ()

def no_optimizer(n=0):
    return torch.nn.Linear(8, 2), loss_fn, "sgd", ()

def too_few(n=0):
    return torch.nn.Linear(8, 2), loss_fn
"""

WRONG_TARGETS = {
    "raises": r"users_step\.py:raises\(.*\) raised ZeroDivisionError: no \(users_step\.py:\d+: raise Zero",
    "raises_in_torch": r"raised RuntimeError: .* \(users_step\.py:\d+: return torch\.zeros\(2\) @ torch\.zeros\(3\)\)",
    "no_model": r"must return \(model, loss_fn, optimizer, batch\); its model is a str and no torch\.nn\.Module",
    "no_loss": r"must return \(model, loss_fn, optimizer, batch\); its loss_fn is a int and no function",
    "no_optimizer": r"must return .*; its optimizer is a str and no torch\.optim\.Optimizer",
    "too_few": r"must return \(model, loss_fn, optimizer, batch\) or a takeback\.zoo\.Case, got tuple",
}


@pytest.mark.parametrize("name", WRONG_TARGETS)
@pytest.mark.parametrize(
    "command",
    [["explain"], ["explain", "--frontier"], ["explain", "--passes"], ["bench"], ["fit", "--memory", "1GiB"]],
    ids=" ".join,
)
def test_a_target_that_raises_or_returns_the_wrong_thing_is_one_line(
    command: list[str], name: str, tmp_path: Path
) -> None:
    file = tmp_path / "users_step.py"
    file.write_text(WRONG_FILE)
    result = run(*command, f"{file}:{name}")
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert re.search(WRONG_TARGETS[name], lines[0])


@pytest.mark.parametrize("command", ["explain", "bench"])
def test_a_file_that_cannot_be_imported_is_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "broken_step.py").write_text("import torch\nvalue = torch.zeros(2).nothing_like_it\n")
    (tmp_path / "bad_syntax.py").write_text("def make(:\n")
    for name, match in (("broken_step", r"broken_step\.py:2: value = torch"), ("bad_syntax", "SyntaxError")):
        result = run(command, f"{tmp_path / name}.py:make")
        assert result.exit_code == 2, result.output
        assert len(result.stderr.strip().splitlines()) == 1
        assert re.search(rf"{name}\.py cannot be imported: .*{match}", result.stderr)


@pytest.mark.parametrize("command", [["explain"], ["explain", "--passes"], ["bench"], ["fit"]], ids=" ".join)
def test_an_empty_memory_is_an_error(command: list[str]) -> None:
    result = run(*command, "mlp", "--memory", "")
    assert result.exit_code == 1, result.output
    assert re.search(r"OptionError: .*got ''", result.stderr)


def test_frontier_and_memory_exclude_each_other() -> None:
    result = run("explain", "mlp", "--frontier", "--memory", "min")
    assert result.exit_code == 2
    assert "leave one of the two out" in result.stderr


def test_explain_takes_a_memory() -> None:
    peaks = {}
    for memory in ("keep", "min", "5MiB"):
        result = run("explain", "gpt", "--memory", memory, "--steps", "1", "--no-tips")
        assert result.exit_code == 0, result.output
        peaks[memory] = float(re.findall(r"^peak +([\d.]+) MiB", result.stdout, re.MULTILINE)[0])
    assert peaks["min"] < peaks["5MiB"] <= 5.0 < peaks["keep"]


@pytest.mark.parametrize(("command", "memory"), in_turns(["explain", "bench"], ["0.01x", "a lot"]))
def test_memory_that_cannot_be_is_an_error(command: str, memory: str) -> None:
    message = {
        "0.01x": r"MemoryTargetError: memory='0.01x' is .* the lowest peak that rebuilding reaches is [\d.]+ MiB",
        "a lot": "OptionError: memory must be 'auto', 'min', 'keep'",
    }[memory]
    result = run(command, "gpt", "--memory", memory)
    assert result.exit_code == 1
    assert re.search(message, result.stderr.replace("\n", " "))
    assert result.stdout == ""


def test_explain_takes_a_function_of_a_file(user_file: Path) -> None:
    result = run("explain", f"{user_file}:make")
    assert result.exit_code == 0, result.output
    assert "users_step.py:6" in result.stdout


def test_explain_takes_a_function_of_a_module(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(user_file.parent)
    assert run("explain", "users_step:make").exit_code == 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gpt/huge", "gpt/small"),
        ("zoo:nothing", "resnet/small"),
        ("no_such_file.py:make", "there is no file no_such_file.py"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
        ("{file}:nothing", "loss_fn, make, reads_values, wrong"),
        ("{file}:loss_fn", "cannot be called as function(): missing a required argument: 'model'"),
        ("{file}", "users_step.py:make"),
        ("{file}:", "users_step.py:make"),
        ("own.py", "own.py needs a function: own.py:make"),
        ("{file}:wrong", "must return"),
    ],
)
def test_unknown_target_exits_2_and_says_what_there_is(target: str, message: str, user_file: Path) -> None:
    result = run("explain", target.format(file=user_file))
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_an_error_of_takeback_is_a_message_without_traceback(user_file: Path) -> None:
    result = run("explain", f"{user_file}:reads_values")
    assert result.exit_code == 1
    assert result.stderr.startswith("CaptureError: ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", [("explain", "mlp", "--html"), ("explain", "mlp", "--json"), ("demo", "--out")])
@pytest.mark.parametrize(
    ("name", "message"), [("nodir/x", "there is no folder"), ("", "it is a folder"), ("x", "no permission")]
)
def test_a_file_that_cannot_be_written_is_noticed_before_the_work(
    command: tuple[str, ...], name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("the work had begun")

    monkeypatch.setattr("takeback.compile_step", never)
    monkeypatch.setattr(demo, "run_demo", never)
    if name == "x":
        monkeypatch.setattr("os.access", lambda *_: False)  # the tests may run as root, who may write everywhere
    result = run(*command, str(tmp_path / name))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("cannot write ")
    assert message in result.stderr


@pytest.mark.parametrize("command", [(), ("demo",), ("explain",), ("fit",), ("bench",), ("check",)])
def test_help_shows_flags_without_a_value_and_targets_in_capitals(command: tuple[str, ...]) -> None:
    text = run(*command, "--help").stdout
    assert "<bool>" not in text
    assert "{target}" not in text
    assert ("TARGET" in text) == (command in [(), ("explain",), ("fit",), ("bench",)])


def test_help_of_fit_says_that_the_function_takes_the_batch_size() -> None:
    text = run("fit", "--help").stdout
    assert "function(n) returns" in text
    assert "function()" not in text


def test_fit_of_a_function_without_the_batch_size_exits_2(user_file: Path) -> None:
    result = run("fit", f"{user_file}:wrong", "--memory", "64KiB")
    assert result.exit_code == 2
    assert "cannot be called as function(n)" in result.stderr


def test_fit_finds_a_batch(user_file: Path) -> None:
    result = run("fit", f"{user_file}:make", "--memory", "64KiB")
    assert result.exit_code == 0, result.output
    rows = dict(line.split(maxsplit=1)[::-1] for line in result.stdout.splitlines()[1:])
    assert list(rows) == ["in eager", 'with memory="auto"', 'with memory="min"']
    assert 0 < int(rows["in eager"]) <= int(rows['with memory="min"'])


def test_fit_for_one_memory_mode_says_which(user_file: Path) -> None:
    result = run("fit", f"{user_file}:make", "--memory", "64KiB", "--memory-mode", "keep")
    assert result.exit_code == 0, result.output
    assert [line.split(maxsplit=1)[1] for line in result.stdout.splitlines()[1:]] == ["in eager", 'with memory="keep"']
    assert run("fit", f"{user_file}:make", "--memory", "64KiB", "--memory-mode", "some").exit_code == 2


def test_fit_refuses_a_memory_it_cannot_read() -> None:
    result = run("fit", "mlp", "--memory", "a lot")
    assert result.exit_code == 1
    assert "a lot" in result.stderr


def test_bench_compares_side_by_side() -> None:
    result = run("bench", "mlp", "--rounds", "3")
    assert result.exit_code == 0, result.output
    assert "time, median" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_bench_takes_a_memory() -> None:
    result = run("bench", "mlp", "--rounds", "1", "--memory", "keep")
    assert result.exit_code == 0, result.output
    assert 'mlp, memory="keep", 1 steps of each in turns' in result.stdout


SCRIPT = """
import sys
import torch
import neighbour

class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        if "--sabotage" in sys.argv:
            x.detach().numpy()[...] = 7  # as a raw kernel does: no version counter sees it
        return dy * 2

assert __name__ == "__main__"
print("arguments", sys.argv[1:])
h = torch.tanh(torch.randn(3, 4, requires_grad=True))
Scale.apply(h).square().mean().backward()
if "--exit" in sys.argv:
    sys.exit(3)
if "--fail" in sys.argv:
    raise KeyError("mine")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "neighbour.py").write_text("")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_check_runs_a_script_and_says_what_it_watched(script: str) -> None:
    before = list(sys.argv), list(sys.path)
    result = run("check", script, "--lr", "3")
    assert result.exit_code == 0, result.output
    assert result.stdout == "arguments ['--lr', '3']\n"
    assert "no unsafe overwrite. 1 backwards, 5 nodes, of which 1 were" in result.stderr
    assert max(map(len, result.output.splitlines())) <= 80
    assert (sys.argv, sys.path) == before


def test_check_names_an_overwrite_and_exits_1(script: str) -> None:
    result = run("check", script, "--sabotage")
    assert result.exit_code == 1
    assert "ScaleBackward overwrote its saved_tensors[0] (float32 [3, 4])" in result.stderr
    assert "TanhBackward0, which saved it as result" in result.stderr
    assert "h = torch.tanh(torch.randn(3, 4, requires_grad=True))" in result.stderr
    assert "Traceback" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_check_ends_as_the_script_ends(script: str) -> None:
    assert run("check", script, "--exit").exit_code == 3
    result = run("check", script, "--fail")
    assert isinstance(result.exception, KeyError)
    assert run("check", "no_such_file.py").exit_code == 2


def test_demo_ends_with_equal_bits_and_what_to_do_next(tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    result = run("demo", "--tiny", "--steps", "4", "--out", str(page))
    assert result.exit_code == 0, result.output
    assert result.stdout.count("losses: bit-equal   gradients: bit-equal   parameters: bit-equal") == 2
    assert "takeback.compile_step(" in result.stdout.splitlines()[-1]
    assert "GPT, 2 layers, 16 wide, on 2 x 16 bytes" in result.stdout
    assert result.stdout.count("time, median of 1 ") == 2
    assert result.stdout.count("half of them within") == 2
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert page.exists()


@pytest.fixture
def one_lesson(monkeypatch: pytest.MonkeyPatch) -> None:
    first = demo.lessons(tiny=True)[:1]
    monkeypatch.setattr(demo, "lessons", lambda *, tiny: first)


@pytest.mark.usefixtures("one_lesson")
def test_demo_exits_1_where_a_gradient_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_check_gradients", lambda lesson, advance: 3)
    result = run("demo", "--tiny", "--steps", "4")
    assert result.exit_code == 1
    assert "gradients: 3 DIFFER" in result.stdout


def test_demo_finds_a_loss_and_a_parameter_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def sabotaged(model: torch.nn.Module, *rest: object) -> torch.Tensor:
        loss = eager_step(model, *rest)  # type: ignore[arg-type]
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
        return loss

    monkeypatch.setattr(demo, "eager_step", sabotaged)
    result = demo.teach(demo.lessons(tiny=True)[0], 4, lambda text: None)
    assert all(result.differences.values()), result.differences
    assert not result.equal


def test_ratio_of_times_is_the_median_of_pairs_and_its_spread_is_shown() -> None:
    """The machine becomes ten times slower after two pairs: medians of each side would say nothing."""
    eager = [comparison.Sample(s, 0) for s in (1.0, 1.0, 10.0, 10.0, 10.0)]
    ours = [comparison.Sample(s, 0) for s in (0.5, 0.5, 5.0, 6.0, 7.0)]
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = predict(model, lambda m, x: m(x).square().mean(), optimizer, torch.ones(4, 8))
    result = comparison.SideBySide(eager, ours, None, report, (0, 0))
    assert result.ratios == [0.5, 0.5, 0.5, 0.6, 0.7]
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(comparison.comparison_table("t", result))
    assert re.search(r"time, median of 5 .* 0\.50x", captured.get())
    assert re.search(r"half of them within .* 1,000-10,000 ms .* 500-6,000 ms .* 0\.50-0\.60x", captured.get())


def test_demo_leaves_some_threads_to_others_and_puts_their_number_back() -> None:
    for there, used in ((1, 1), (2, 1), (6, 3), (16, 4)):
        torch.set_num_threads(there)
        with demo.few_threads() as threads:
            assert threads == (used, there)
            assert torch.get_num_threads() == used
        assert torch.get_num_threads() == there


@pytest.mark.usefixtures("one_lesson")
def test_demo_works_without_the_native_allocator_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("takeback.compiler.run.allocator.load", lambda *_: None)
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as captured:
        assert demo.run_demo(console, steps=4, tiny=True)
    assert "not measured" in captured.get()
    assert "No native allocator on this machine" in captured.get()

"""Kernels of an earlier process are found by a key of all that they depend on, and what is not right there is compiled
anew. That one is found and right is shown on a real kernel, in test_inductor.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import codecache, config
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.triton_bundler import TritonBundle, TritonBundler

from takeback.compiler.program import BufferId, Cluster, Op, Phase, Region
from takeback.compiler.run import inductor, kernel_file
from takeback.compiler.run.inductor import compile_cluster, wait_for
from takeback.compiler.run.kernel_file import Generated
from takeback.compiler.run.kernel_workers import at_once

CPU = torch.device("cpu")


def cluster_of(rows: int = 4, factor: object = 2.0) -> Cluster:
    x, y = (Region(BufferId(i), torch.float32, (rows,), (1,), 0) for i in range(2))
    op = Op(torch.ops.aten.mul.Tensor, (x, factor), {}, y, (), Phase.FORWARD, False, None)  # type: ignore[arg-type]
    return Cluster((op,), {}, (x,), (y,))


def key_of(cluster: Cluster, device: torch.device = CPU, **settings: object) -> str | None:
    return kernel_file.key_of(cluster.key, device, settings)


def test_key_is_of_the_cluster_the_machine_the_settings_and_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    key = key_of(cluster_of())
    assert key is not None
    assert key == key_of(cluster_of()), "another process makes it of another cluster that is equal"
    others = [key_of(cluster_of(rows=5)), key_of(cluster_of(factor=3.0)), key_of(cluster_of(), max_autotune=True)]
    with config.patch(epilogue_fusion=False):
        others.append(key_of(cluster_of()))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        others.append(key_of(cluster_of()))
    gpu = mock.Mock(major=9, minor=0, multi_processor_count=132)
    for name in ("NVIDIA H200", "NVIDIA H100"):
        gpu.name = name
        with mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu):
            others.append(key_of(cluster_of(), device=torch.device("cuda", 0)))
    monkeypatch.setattr(kernel_file, "_source", lambda: b"another takeback")
    others.append(key_of(cluster_of()))
    assert len({key, *others}) == 1 + len(others)


def test_nothing_is_kept_where_caches_are_off_or_a_text_is_of_this_process_alone() -> None:
    assert key_of(cluster_of(factor=object())) is None
    with config.patch(force_disable_caches=True):
        assert key_of(cluster_of()) is None
    with config.patch(post_grad_custom_post_pass=lambda graph: None):
        assert key_of(cluster_of()) is None


def test_key_is_not_of_how_many_compile() -> None:
    key = key_of(cluster_of())
    with config.patch(compile_threads=3):
        assert key_of(cluster_of()) == key


def test_source_is_of_all_that_traces_a_cluster() -> None:
    """A module that `inductor.py` imports of this package has a part in what Inductor is given."""
    named = Path(inductor.__file__).read_text()
    for name in ("cluster_forms", "cluster_ops", "norm_forms", "sum_forms"):
        assert f"run.{name} import" in named
    files = mock.Mock(return_value=b"")
    with mock.patch.object(Path, "read_bytes", lambda self: files(self.name)):
        kernel_file._source.__wrapped__()
    seen = {call.args[0] for call in files.call_args_list}
    assert seen >= {f"{n}.py" for n in ("inductor", "cluster_forms", "norm_forms", "sum_forms", "program", "geometry")}


def test_kept_module_imports_what_it_uses() -> None:
    """The rest would bring all that Inductor compiles with."""
    heavy = "from torch._inductor.select_algorithm import extern_kernels\n"
    align = "from torch._inductor.codegen.memory_planning import _align as align\n"
    body = "import torch\nassert_alignment = torch._C._dynamo.guards.assert_alignment\n"
    assert kernel_file.less_imports(align + body + heavy) == body
    uses = f"{heavy}{body}extern_kernels.mm(a, b, out=c)\n"
    assert kernel_file.less_imports(align + uses) == uses
    assert kernel_file.less_imports(f"{align}{body}align(3)\n") == f"{align}{body}align(3)\n"


@pytest.mark.parametrize("fault", ["not there", "no pickle", "it does not load"])
def test_what_is_not_right_is_compiled_anew(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    key = key_of(cluster_of(), **inductor.settings_of(cluster_of()))
    assert key is not None
    folder = Path(codecache.FxGraphCache._get_tmp_dir_for_key(key))
    assert folder.is_relative_to(tmp_path)
    folder.mkdir(parents=True)
    if fault == "no pickle":
        (folder / "entry").write_bytes(b"torn")
    if fault == "it does not load":
        failing = mock.Mock(spec=CompiledFxGraph, _triton_bundle=None, guards_expr=None)
        failing.after_deserialization.side_effect = RuntimeError("no such symbol")
        candidates = mock.Mock(return_value=iter([(failing, b"", True)]))
        monkeypatch.setattr(codecache.FxGraphCache, "iterate_over_candidates", candidates)
    made = Generated(lambda operands: operands)
    monkeypatch.setattr(inductor, "_compile", lambda *args: made)
    monkeypatch.setattr(kernel_file, "keep_", lambda key, made, wait: wait())
    assert compile_cluster(cluster_of(), CPU) is made.call


def test_graph_is_kept_when_its_compilers_are_done_with_what_they_made(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Graph(CompiledFxGraph):
        def __init__(self) -> None:
            self.compiled_fn_runner, self.source_code, self._original_gm = None, "import math\n", None

    happened: list[str] = []
    bundle = TritonBundle([], [])

    def compiles(*args: object) -> Generated:
        from takeback.compiler.run.kernel_workers import put_off

        put_off(lambda: happened.append(f"compilers are done, noted: {TritonBundler._entries is not None}"))
        return Generated(Graph())

    def save(key: str, graph: Any, *rest: object) -> None:
        happened.append(f"kept with {'its' if graph._triton_bundle is bundle else 'no'} bundle")

    collect: Callable[[], Any] = lambda: (bundle, None)  # noqa: E731
    monkeypatch.setattr(TritonBundler, "collect", collect)
    monkeypatch.setattr(TritonBundler, "is_enabled", lambda: True)
    monkeypatch.setattr(kernel_file, "found", lambda key, base: None)
    monkeypatch.setattr(inductor, "_compile", compiles)
    monkeypatch.setattr(codecache.FxGraphCache, "_save_graph", save)
    with at_once() as afterwards:
        compile_cluster(cluster_of(), CPU)
    assert happened == []
    wait_for(afterwards.taken_(), CPU)
    assert happened == ["compilers are done, noted: True", "kept with its bundle"]
    assert TritonBundler._entries is None


def test_kernel_that_cannot_be_kept_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    graph = mock.Mock(spec=CompiledFxGraph, source_code="import math\n")
    monkeypatch.setattr(codecache.FxGraphCache, "_save_graph", mock.Mock(side_effect=OSError("the disk is full")))
    kernel_file.keep_("key", Generated(graph), lambda: waited.append("compilers"))
    monkeypatch.setattr(TritonBundler, "_entries", [])  # torch.compile notes what it makes, on another thread
    kernel_file.keep_("key", Generated(graph), lambda: waited.append("compilers"))
    assert TritonBundler._entries == []
    assert waited == ["compilers"] * 2

# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# On machines whose AMX is advertised but unusable, bf16 products die with SIGILL unless this is set first.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

# Tests run in two processes, and most of their models are tiny: a second thread would only wake up and wait. Tests of
# what threads do set their own number.
warm pytest test-all faults trust: export OMP_NUM_THREADS ?= 1
# Modules are compiled when they are first imported: pip would compile thousands that nobody imports. Where an environment
# forbids to keep the result, each process would do so anew.
demo warm pytest test-all: export PYTHONDONTWRITEBYTECODE :=
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal
WHEEL := build/wheel
UNPACKED := $(WHEEL)/.unpacked
FROM_WHEEL := TAKEBACK_WHEEL=$(CURDIR)/$(WHEEL) PYTHONPATH=$(CURDIR)/$(WHEEL)

.PHONY: demo test test-all lint types warm pytest faults trust audit bench docs wheel clean

demo: $(STAMP)
	$(BIN)/takeback demo

# What CI runs. `make test-all` adds the slow tests, each of which repeats on more cases what a quick one shows. The site
# is built on one core while what the tests need is installed on the other, and that is compiled while mypy runs.
test:
	$(MAKE) --jobs 2 --output-sync docs warm lint types
	$(MAKE) pytest

test-all: lint types docs $(UNPACKED)
	$(FROM_WHEEL) $(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check src tests benchmarks examples docs

types: $(STAMP)
	$(BIN)/mypy

# What each worker of the tests would otherwise do for itself: the native code is compiled into the tests' cache, and the
# modules that they import become bytecode.
warm: $(UNPACKED)
	@$(FROM_WHEEL) $(BIN)/python -m pytest --collect-only -qq > build/collected.txt || { cat build/collected.txt; false; }

# The tests, and with them every code block of the documentation, run from the built wheel: tests/conftest.py demands it.
pytest: $(UNPACKED)
	$(FROM_WHEEL) $(PYTEST) -m "not slow"

# Plants each fault of tests/faults/faults.py and demands that the tests of `make test` catch it.
faults: $(STAMP)
	$(BIN)/python tests/faults/run_faults.py

# The long runs, which take some hours: docs/trust.md says what came of the last ones.
SAMPLES := benchmarks/op_samples.py --json benchmarks/results/op-samples.json
HARD := --memory min --early --poison
trust: $(STAMP)
	PYTHONPATH=tests $(BIN)/python tests/mutation/run_mutations.py --json benchmarks/results/mutations.json
	$(BIN)/python benchmarks/soak.py --json benchmarks/results/soak.json
	$(BIN)/python benchmarks/soak.py --mode fast --steps 20000 --json benchmarks/results/soak-fast.json
	$(BIN)/python benchmarks/new_lengths.py --json benchmarks/results/new-lengths.json
	$(BIN)/python $(SAMPLES) --of modules --mode exact --samples 4 --key "modules, exact, auto"
	$(BIN)/python $(SAMPLES) --of modules --mode exact --samples 4 $(HARD) --key "modules, exact, min"
	$(BIN)/python $(SAMPLES) --of modules --mode fast --samples 4 $(HARD) --key "modules, fast, min"
	$(BIN)/python $(SAMPLES) --mode exact --samples 3 $(HARD) --key "ops, exact, min"
	$(BIN)/python $(SAMPLES) --mode fast --samples 3 $(HARD) --key "ops, fast, min"
	$(BIN)/python $(SAMPLES) --mode exact --samples 3 --key "ops, exact, auto"
	$(BIN)/python $(SAMPLES) --mode fast --samples 3 --kernels traced --memory keep --key "ops, fast, traced"
	$(BIN)/python $(SAMPLES) --of modules --mode fast --samples 4 --kernels traced $(HARD) --key "modules, fast, traced"
	$(BIN)/python $(SAMPLES) --mode fast --kernels generated --memory keep --processes 2 --key "ops, fast, generated kernels"
	$(BIN)/python benchmarks/transformers_models.py --json benchmarks/results/transformers-models.json
	$(BIN)/python benchmarks/transformers_models.py --mode fast --memory min --json benchmarks/results/transformers-models-fast.json
	$(BIN)/python benchmarks/transformers_models.py --markdown docs/models.md
	PYTHONPATH=tests:tests/fuzz $(BIN)/python tests/fuzz/run_fuzz.py --minutes 120 --json benchmarks/results/fuzz.json
	PYTHONPATH=tests:tests/fuzz $(BIN)/python tests/fuzz/run_fuzz.py --traced --json benchmarks/results/fuzz-traced.json
	$(BIN)/python benchmarks/interrupts.py --replays 20 --out benchmarks/results/interrupts.json
	if awk '/MemAvailable/ {exit $$2 < 60e6}' /proc/meminfo; then \
	    $(BIN)/python benchmarks/big_buffers.py --json benchmarks/results/big-buffers.json; \
	else echo "left out, for want of 60 GB: benchmarks/big_buffers.py"; fi
	if command -v nvidia-smi > /dev/null; then \
	    $(BIN)/python benchmarks/soak_gpu.py --json benchmarks/results/soak-gpu.json && \
	    $(BIN)/python benchmarks/fast_gradients.py --json benchmarks/results/gradients-fast-h200.json; \
	else echo "left out, for want of a GPU: benchmarks/soak_gpu.py, benchmarks/fast_gradients.py"; fi
	$(BIN)/python benchmarks/trust.py

# Known vulnerabilities of what is installed here. It asks a server, so it is not part of `make test`. Strictly: a package
# of which the server knows nothing is an error, not a pass. `+cpu` and the like are no part of a version there. The tool
# has an environment of its own: it brings packages that would be audited along.
AUDIT := .venv-audit
audit: $(STAMP)
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/pip list --format freeze --exclude-editable --disable-pip-version-check | sed 's/+.*//' > $(AUDIT)/installed.txt
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --requirement $(AUDIT)/installed.txt

bench: $(STAMP)
	$(BIN)/python benchmarks/cpu.py

# The documentation site, strictly: a broken link or a page outside the navigation is an error. It needs no torch, so it
# has an environment of its own.
DOCS := .venv-docs
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs build --strict

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt \
	    $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

# Without what an older build left behind, and without a network.
$(UNPACKED): $(STAMP) README.md LICENSE $(shell find src/takeback -type f -not -name '*.pyc')
	rm -rf $(WHEEL) build/lib build/bdist.*
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir $(WHEEL) .
	$(BIN)/python -m zipfile -e $(WHEEL)/*.whl $(WHEEL)
	touch $@

# sdist and wheel, in dist/.
wheel: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt build
	$(BIN)/python -m build --outdir dist .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(DOCS) $(AUDIT) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

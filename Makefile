# make demo   sets everything up and trains on two ranks; make test   sets the same up and runs the tests.
# make test-all   runs every case, which takes one to three hours; SLICE=2/4 runs the second of four parts.
# make coverage   prints which lines of weft the quick tests run.
# make test-docs   runs what the documentation and the notebooks show, which make test leaves out.
# make docs   builds the documentation's site into site/; broken links and anchors fail it.
# make browser   installs Debian's chromium and playwright, and runs the tests of pages, which make test leaves out.
# make wheel   builds a wheel, checks what it holds, and trains with it where nothing else is installed, without a compiler.
# make gpu   on a machine with a GPU and PyTorch's CUDA build: builds weft beside it, fetching nothing (wheels in .whl/ are installed),
#            runs the tests of GPUs and measures, in nine minutes; OUT names the results.
# make campaign   attacks the program for WEFT_CAMPAIGN_SECONDS (3600), by the seed WEFT_CAMPAIGN_SEED (0).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
PACKAGES := $(shell find weft -name __init__.py)
# Also where the environment says not to, since each of many processes would compile all sources again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-optimized test-all coverage test-docs docs browser wheel gpu campaign lint clean

demo: $(VENV)/ready
	rm -rf runs/demo
	$(BIN)/weft train digits --model gcn --decoupled --strategy tensor --workers 2 --epochs 200 --out runs/demo

test: $(VENV)/ready
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# The quick tests under python -O, in which weft's own asserts are not executed: no result may depend on one.
test-optimized: $(VENV)/ready
	PYTHONOPTIMIZE=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# All cases, without a limit of time: the full product of the matrix, the campaign's seeds, docs and notebooks.
SLICE ?= 1/1
test-all: $(VENV)/ready
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "" --slice $(SLICE)

# Lines of each file of weft that the quick tests run, ranks included.
coverage: $(VENV)/ready
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check coverage
	$(BIN)/python -m tests.covered

test-docs: $(VENV)/ready
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m slow tests/test_docs.py tests/test_notebooks.py

# docs/results is generated from benchmarks/results. No --quiet, as --strict counts no warnings with it.
docs: $(VENV)/ready
	$(BIN)/python benchmarks/result_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

browser: $(VENV)/ready
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check playwright
	command -v chromium >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends chromium; }
	$(BIN)/python -m pytest -m "" tests/test_site.py tests/reporting/test_browser.py

wheel:
	rm -rf build/dist
	$(PYTHON) -m venv --clear build/venv
	PIP_CONSTRAINT=constraints.txt build/venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/dist .
	$(PYTHON) tests/wheel.py build/dist/weft-*.whl
	build/venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt build/dist/weft-*.whl
	build/venv/bin/python tests/wheel.py

OUT ?= gpu
gpu:
	test ! -d .whl || $(PYTHON) -m pip install --quiet --no-index --no-deps .whl/*.whl
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
	$(PYTHON) benchmarks/gpu.py --out $(OUT)

campaign: $(VENV)/ready
	$(BIN)/python -m tests.campaign

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

# Editable, so that changes in weft/ count at once; changes in csrc/ build again. So does a new package: the import hook has a
# list of modules and their files, and one that has become a package is not found where it was.
$(VENV)/ready: $(SOURCES) $(PACKAGES)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weft needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,docs]'
	touch $@

clean:
	rm -rf $(VENV) build runs site

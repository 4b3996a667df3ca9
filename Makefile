# Needs Python 3.10 to 3.13, git and make. Everything else goes into .venv.

PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
ZOO ?= .venv-zoo
PEERS ?= .venv-peers
# The minor versions of TensorFlow that `make test-versions` tries.
VERSIONS ?= 2.16 2.17 2.18 2.19 2.20 2.21
# Test workers. Each one holds its own copy of TensorFlow in memory.
WORKERS ?= 2

PIP_FLAGS := --quiet --disable-pip-version-check
# A file stays on one worker, so its set-up is done once.
PYTEST_FLAGS := -n $(WORKERS) --dist loadfile -p tests.times
QUICK := -m "not thorough"
# What a change is compared with by `make test-touched`.
BASE ?= HEAD

# The version is a part of the stamp's name. So another PYTHON makes a new
# environment, and an unsuitable one never finds a stamp and is reported.
PYVER := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
READY := $(VENV)/.ready-$(PYVER)
# with EXTRA: the stamp of what an extra of setup.py adds to the environment.
with = $(VENV)/.with-$(1)-$(PYVER)
OLDEST_READY := $(OLDEST)/.ready-$(PYVER)
ZOO_READY := $(ZOO)/.ready-$(PYVER)
PEERS_READY := $(PEERS)/.ready-$(PYVER)

# Silences the start-up messages of TensorFlow's C++ part.
export TF_CPP_MIN_LOG_LEVEL := 3

# Images of containers often forbid what Python keeps compiled; each of the tests'
# processes would compile the package again, and each worker all tests.
export PYTHONDONTWRITEBYTECODE :=

# What `geutil.report` puts into its pages; the first file stands for all of them.
VIEWER := geutil/report/static/viewer.js
VIEWER_SOURCES := $(wildcard web/*.json web/*.mjs web/src/*)

# An activated environment or a source tree elsewhere must not leak in.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help env web docs-images env-oldest demo test test-times test-touched test-all test-oldest
.PHONY: coverage mutants test-version test-versions lint format bench bench-gpu bench-plan bench-quantize house zoo docs clean dist check-dist browser

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' Makefile

# check_python VERSIONS, WHAT-NEEDS-THEM: stops unless PYTHON is one of VERSIONS.
define check_python
	@case " $(1) " in \
	  *" $(or $(PYVER),none) "*) ;; \
	  *) echo "error: $(2) needs one of Python $(1)." >&2; \
	     echo "'$(PYTHON)' is $(if $(PYVER),Python $(PYVER),not a Python that runs)." >&2; \
	     echo "Name another one: make PYTHON=/path/to/python TARGET" >&2; \
	     exit 1 ;; \
	esac
endef

# create_venv DIR: makes the environment, or repairs one that was interrupted. An
# environment of another Python version is emptied first: they do not mix.
define create_venv
	@rm -f $(1)/.ready-* $(1)/.with-*
	@clear=; if [ -d $(1) ] && [ ! -d $(1)/lib/python$(PYVER) ]; then clear=--clear; fi; \
	  echo "Setting up $(1) with Python $(PYVER)"; \
	  $(PYTHON) -m venv $$clear $(1)
endef

# The stamp is written last. If a step before it fails or is interrupted, there is
# none, and the next run goes on from there.
$(READY): setup.py pyproject.toml
	$(call check_python,3.10 3.11 3.12 3.13,geutil)
	$(call create_venv,$(VENV))
	@echo "Installing TensorFlow and what the tests need (a few minutes the first time)"
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[test,web]'
	@touch $@

# Linters, mkdocs, clusters: only the targets that run them pay for them.
$(call with,%): $(READY)
	@echo "Installing what geutil[$*] needs"
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[$*]'
	@touch $@

# Node comes from the package index with the environment. npm gets what the lock file
# says and nothing else.
$(VIEWER): $(READY) $(VIEWER_SOURCES)
	@echo "Building the viewer of pages"
	@cd web && PATH="$(abspath $(VENV))/bin:$$PATH" && export PATH && \
	  npm ci --silent --no-audit --no-fund --ignore-scripts && \
	  npm run --silent check && npm run --silent build

$(OLDEST_READY): setup.py pyproject.toml requirements-oldest.txt
	$(call check_python,3.10 3.11 3.12,TensorFlow 2.16)
	$(call create_venv,$(OLDEST))
	@echo "Installing the oldest supported TensorFlow"
	@$(OLDEST)/bin/python -m pip install $(PIP_FLAGS) -c requirements-oldest.txt -e '.[test,thorough]'
	@touch $@

# Keras does not say which TensorFlow it works with; this one works with all of them.
.venv-tf%/.ready-$(PYVER): setup.py pyproject.toml
	$(call check_python,3.10 3.11 3.12,every TensorFlow from 2.16 on)
	$(call create_venv,.venv-tf$*)
	@echo "Installing TensorFlow $*"
	@.venv-tf$*/bin/python -m pip install $(PIP_FLAGS) 'tensorflow==$*.*' 'keras==3.12.*' -e '.[test]'
	@touch $@

# An environment of its own: keras-hub brings packages that may hold others back.
$(ZOO_READY): setup.py pyproject.toml
	$(call check_python,3.11 3.12 3.13,the zoo)
	$(call create_venv,$(ZOO))
	@echo "Installing keras-hub and tf-keras"
	@$(ZOO)/bin/python -m pip install $(PIP_FLAGS) -e '.[test,zoo]'
	@touch $@

# An environment of its own: it brings another protobuf than TensorFlow's.
$(PEERS_READY): Makefile
	$(call check_python,3.10 3.11 3.12 3.13,the LiteRT quantizer)
	$(call create_venv,$(PEERS))
	@echo "Installing the LiteRT quantizer"
	@$(PEERS)/bin/python -m pip install $(PIP_FLAGS) 'litert-quantizer==0.11.0'
	@touch $@

env: $(READY) $(VIEWER) ## Set up .venv (the other targets do this when needed)

env-oldest: $(OLDEST_READY) ## Set up .venv-oldest, with the oldest TensorFlow

web: $(VIEWER) ## Build the viewer of pages (the other targets do this when needed)

demo: $(READY) $(VIEWER) ## Run the demonstrations
	@$(VENV)/bin/python -m examples.mobilenet
	@$(VENV)/bin/python -m examples.int8
	@$(VENV)/bin/python -m examples.pages
	@$(VENV)/bin/python -m examples.training

test: $(READY) $(VIEWER) ## Run the tests and doctests (ARGS="..." goes to pytest)
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS) $(QUICK) $(ARGS)

# On a machine that does nothing else.
test-times: $(READY) $(VIEWER) ## Run them, and write where the time goes (tests/times.tsv)
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS) $(QUICK) --times $(ARGS)

test-touched: $(READY) $(VIEWER) ## Run those that the change since BASE=HEAD reaches
	@$(VENV)/bin/python -m tools.touched --base $(BASE) $(PYTEST_FLAGS) $(QUICK) $(ARGS)

test-all: export NO_MKDOCS_2_WARNING := 1
test-all: $(READY) $(VIEWER) $(call with,thorough) $(call with,docs) ## Run all of them, with the thorough ones
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS) $(ARGS)

# `make mutants` needs what it writes.
COVERED := --cov=geutil --cov-branch --cov-context=test --cov-report=
coverage: $(VIEWER) $(call with,thorough) ## Print what the tests run of the code, quick and all
	@mkdir -p build/coverage
	COVERAGE_FILE=build/coverage/quick $(VENV)/bin/python -m pytest -q $(PYTEST_FLAGS) $(QUICK) $(COVERED)
	COVERAGE_FILE=build/coverage/all $(VENV)/bin/python -m pytest -q $(PYTEST_FLAGS) $(COVERED)
	@$(VENV)/bin/python -m tools.strength coverage

mutants: $(VIEWER) $(call with,thorough) ## Change the code in 60 places, and print who notices (ARGS="...")
	@$(VENV)/bin/python -m tools.strength mutants $(ARGS)

test-oldest: $(OLDEST_READY) $(VIEWER) ## Run them on the oldest supported TensorFlow
	$(OLDEST)/bin/python -m pytest $(PYTEST_FLAGS) $(ARGS)

test-version: .venv-tf$(VERSION)/.ready-$(PYVER) $(VIEWER) ## Run the smoke tests on VERSION=2.18, say
	.venv-tf$(VERSION)/bin/python -m pytest -q -m smoke tests/smoke $(ARGS)

# A version that fails shows all that its tests print; one that passes, the last line.
test-versions: $(VIEWER) ## Run them on every TensorFlow from the oldest on
	@failed=; \
	for version in $(VERSIONS); do \
	  if $(MAKE) -s --no-print-directory .venv-tf$$version/.ready-$(PYVER) && \
	    said=$$($(MAKE) --no-print-directory test-version VERSION=$$version 2>&1); \
	  then \
	    echo "TensorFlow $$version: $$(printf '%s' "$$said" | tail -n 1)"; \
	  else \
	    printf '%s\n' "$$said" "TensorFlow $$version: FAILED"; \
	    failed="$$failed $$version"; \
	  fi; \
	  said=; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

# All three run, so that one run shows all there is to mend.
lint: $(call with,lint) ## Check style, formatting and types
	@failed=; \
	for check in 'ruff check .' 'ruff format --check .' 'mypy'; do \
	  echo "$$check"; \
	  $(VENV)/bin/python -m $$check || failed="$$failed [$$check]"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

format: $(call with,lint) ## Format the code and make the safe fixes
	$(VENV)/bin/python -m ruff check --fix-only .
	$(VENV)/bin/python -m ruff format .

house: $(READY) ## Print how the package is laid out (ARGS="--list" names the places)
	@$(VENV)/bin/python -m tools.house $(ARGS)

zoo: $(ZOO_READY) $(VIEWER) ## Take real architectures through every client (ARGS="...")
	@nice $(ZOO)/bin/python -m zoo $(ARGS)

bench: $(call with,bench) ## Run the benchmarks (ARGS="..." goes to them)
	$(VENV)/bin/python -m benchmarks $(ARGS)

bench-plan: $(call with,bench) ## Print what the planner finds (ARGS="--json out.json")
	@$(VENV)/bin/python -m benchmarks.plans $(ARGS)

bench-gpu: $(call with,bench) ## Print what steps hold on a GPU beside their reports (ARGS="--way memory")
	@$(VENV)/bin/python -m benchmarks.chunks $(ARGS)

bench-quantize: $(call with,bench) $(PEERS_READY) ## Print how quantized files do beside peers' (ARGS="--quick")
	@$(VENV)/bin/python -m benchmarks.quantized --peers $(PEERS)/bin/python $(ARGS)

# The wheel is built from the archive, so the archive holds all that it takes.
dist: $(VIEWER) $(call with,release) ## Build the wheel and the source archive into dist/
	@rm -rf dist
	@$(VENV)/bin/python -m build --quiet --outdir dist .

check-dist: dist ## Check them, and run the wheel's smoke tests where nothing else is
	@$(VENV)/bin/python -m tools.check_dist

# Debian's packages bring the libraries that the browser needs.
browser: ## Install Chromium for the tests of pages, if there is none
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then \
	  exit 0; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; \
	else \
	  echo "error: there is no chromium; install it, on Debian as root with" >&2; \
	  echo "apt-get install chromium" >&2; \
	  exit 1; \
	fi

docs-images: $(READY) $(VIEWER) ## Make the pictures of the README (needs `make browser`)
	@$(VENV)/bin/python -m tools.docs_images

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(call with,docs) ## Build the documentation into build/site; warnings are errors
	$(VENV)/bin/python -m mkdocs build --strict
	GEUTIL_SITE=build/site $(VENV)/bin/python -m pytest -q tests/documentation/test_site.py

clean: ## Remove the environments, caches and build results
	rm -rf $(VENV) $(OLDEST) $(ZOO) $(PEERS) .venv-tf* build dist *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name .git -prune -o -type d -name __pycache__ -print0 | xargs -0 rm -rf

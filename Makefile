# The verbs that a person and CI share. Everything starts from Python >= 3.10, make, gcc and git.
#   make install     a virtual environment in .venv with the kit in it
#   make demo        a bootstrap peer and three volunteers train together on this machine
#   make test        the tests (minutes); make test-slow: the long ones; make test-tpu: with torch_xla (7 GB, once)
#   make test-transformers-4   what tests the Trainer, with the last transformers 4
#   make test-kaggle-data      what tests data and logins, with Kaggle's pyarrow, datasets and huggingface_hub
#   make test-colab            half of the quick suite, with Colab's Python and packages (its torch: 5 GB, once)
#   make dist        the sdist and the wheel into dist/, and the wheel tried in an empty environment (.ci/package)
#   make check       ruff, the floors of the house (import-linter), the types (mypy), and the docs
#   make docs        the docs as a site in build/site
#   make fuzz SECONDS=60 TARGET=tar   fuzz each decoder of others' bytes, or one, for so many seconds (tests/fuzz)
#   make bench       every benchmark, one after another

VENV ?= .venv
PY = $(VENV)/bin/python
STAMP = $(VENV)/.installed
# Without an NVIDIA driver, the version that the tests ran with; an unpinned torch brings gigabytes of CUDA along.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.5' || echo 'torch==2.13.0')
DEMO ?=
TEST ?=
SECONDS ?= 60
TARGET ?=
# Two files of tests at a time, and three of the quick suite, whose tests wait a lot: on two cores it takes 11.5 minutes
# and not 14.8. TEST="-n 0" takes one at a time, TEST=... some.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile
# Files with one slow test run first: they take longest, and one of them at the end would leave half of the machine idle.
SLOW_FILES = $$(grep -c 'mark[.]slow' tests/test_*.py | grep -v ':0$$' | sort -t: -n -k2 | cut -d: -f1)

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: install demo test test-slow test-tpu test-transformers-4 test-kaggle-data test-colab dist check docs fuzz bench clean

install: $(STAMP)

$(STAMP): requirements.txt setup.cfg pyproject.toml
	@set -e; for candidate in "$(PYTHON)" python3 python3.11 python3.12 python3.13 python3.10; do \
	  [ -n "$$candidate" ] && "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && found=$$candidate && break; \
	done; \
	if [ -z "$$found" ]; then echo "No Python 3.10 or newer was found: install one, or name it: make install PYTHON=/path/to/python3"; exit 1; fi; \
	"$$found" -c 'import ensurepip, venv' 2>/dev/null || { echo "$$found cannot make virtual environments: install its venv package (Debian: apt-get install python3-venv), or name another Python: make install PYTHON=..."; exit 1; }; \
	[ -x $(PY) ] || "$$found" -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip wheel "setuptools>=77"
	$(PY) -m pip install -q "$(TORCH)" -r requirements.txt
	$(PY) -m pip install --no-deps dalle-pytorch==1.6.6 taming-transformers-rom1504==0.0.6
	PYTHONWARNINGS=ignore $(PY) -m pip install -q --no-build-isolation -e '.[dev]'
	@touch $(STAMP)

demo: install
	$(VENV)/bin/volunteer-kit demo $(DEMO)

test: install
	$(PYTEST) -n 3 -m "not slow" $(TEST)

test-slow: install
	$(PYTEST) -m slow --timeout 600 --durations 20 --no-loadscope-reorder $(SLOW_FILES) $(TEST)

test-tpu:
	.ci/test-tpu $(TEST)

test-transformers-4: install
	PYTHONPATH=$$($(PY) -m tests.older_packages transformers-4) $(PYTEST) tests/test_hf_trainer.py \
	  tests/test_hf_optimizer.py tests/test_hf_swarm.py -k "not udp and not port and not router and not readme" $(TEST)

test-kaggle-data: install
	PYTHONPATH=$$($(PY) -m tests.older_packages kaggle-data) $(PYTEST) tests/test_parquet.py tests/test_hub.py \
	  tests/test_login.py -m "not newer_packages" $(TEST)

test-colab: install
	PYTHON=$(PY) .ci/test-colab $(TEST)

dist: install
	VENV=$(VENV) DIST=$(CURDIR)/dist .ci/package

check: install docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports --no-logo --no-cache
	$(VENV)/bin/mypy --no-error-summary

docs: install
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

fuzz: install
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m tests.fuzz --seconds $(SECONDS) $(addprefix --target ,$(TARGET))

bench: install
	@for file in benchmarks/*.py; do echo "== $$file"; $(PY) $$file || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info

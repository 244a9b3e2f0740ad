# Two commands do everything on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
BIN := .venv/bin
READY := .venv/.ready
DEV := .venv/.ready-dev
PIP := $(BIN)/pip install --quiet --quiet --disable-pip-version-check -c constraints.txt

.PHONY: peers scale heart wheel demo docs figures test test-lowest lowest chaos fuzz lint slow bench clean

# An environment of another Python version is cleared, with all its marks, and made anew.
%/.python-$(VERSION):
	$(PYTHON) -m venv --clear $*
	touch $@

$(READY): .venv/.python-$(VERSION) pyproject.toml constraints.txt
	$(PIP) -e .
	touch $(READY)

$(DEV): $(READY)
	$(PIP) -e '.[dev,docs,flower,report,text]'
	touch $(DEV)

demo: $(READY)
	$(BIN)/fedveil demo --results results --out results/demo/report.html

figures: demo
	$(BIN)/python docs/figures/make_figures.py results/demo-recommended results/demo
	$(BIN)/python docs/figures/make_method_figures.py

test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile

# The lowest versions that pyproject.toml allows have an environment of their own; what else they need is in the file.
LOWEST := .venv-lowest
$(LOWEST)/.ready: $(LOWEST)/.python-$(VERSION) pyproject.toml constraints-lowest.txt
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check -c constraints-lowest.txt -e '.[dev,flower,report,text]'
	touch $@

test-lowest: $(LOWEST)/.ready
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -q -n auto --dist loadfile

# Run this after a change of the bounds. CUDA packages come with some builds of torch only.
lowest: $(DEV)
	{ echo '# The lowest versions that pyproject.toml declares, and what they need. Written by `make lowest`.'; \
	  $(BIN)/uv pip compile pyproject.toml --extra dev --extra flower --extra report --extra text --quiet \
	    --resolution lowest-direct --python-version 3.11 --no-header --no-annotate \
	  | grep -vE '^(nvidia|triton|cuda)'; } > constraints-lowest.txt

slow: $(DEV)
	$(BIN)/python -m pytest -q -m slow

chaos: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.faults --kills 50

fuzz: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto tests/fuzz tests/unit/data/test_robustness.py tests/unit/test_messages.py --hypothesis-show-statistics

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site, in site/. Broken links, pages outside the navigation and bad docstrings fail.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

bench: $(DEV)
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/t_tsvd.py
	$(BIN)/python benchmarks/per_example.py
	$(BIN)/python benchmarks/gradient_matching.py
	$(BIN)/python benchmarks/noise.py
	$(BIN)/python benchmarks/accounting.py
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/scattering.py
	$(BIN)/python benchmarks/deployment.py sizes
	$(BIN)/python benchmarks/deployment.py clients

# Peers have an environment of their own: none of them is a dependency of the project.
PEERS := benchmarks/peers/.venv
$(PEERS)/.ready: $(PEERS)/.python-$(VERSION) pyproject.toml constraints.txt benchmarks/peers/requirements.txt
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,flower]'
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers/requirements.txt
	touch $@

# About ten minutes of an otherwise idle machine. What could be measured is written even if a peer does not start.
peers: $(PEERS)/.ready
	export PYTHONPATH=benchmarks; python=$(PEERS)/bin/python; peers=benchmarks/peers; failed=0; \
	$$python $$peers/compare.py --json $$peers/results.json || failed=1; \
	$$python $$peers/ray_cluster.py --json $$peers/ray.json || failed=1; \
	$$python $$peers/table.py && exit $$failed

# Fed-Heart-Disease by FLamby's protocol; recorded settings are kept.
heart: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/heart_disease.py choose
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/heart_disease.py run
	$(BIN)/python benchmarks/heart_disease.py page

wheel: $(READY)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

scale: $(DEV)
	$(BIN)/python benchmarks/scale.py --figure docs/figures/scale.png

clean:
	rm -rf .venv .venv-lowest site build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

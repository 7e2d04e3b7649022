# Everything on a machine with Python 3.11+ and nothing else: each target makes .venv first.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Tests begin many processes, and each would compile all modules anew where no bytecode is kept.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-slow test-exhaustive test-flower test-floors .floors test-data check docs format bench bench-peers clean

demo: $(STAMP)
	$(BIN)/python examples/glyphs.py --out runs/demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow and not data and not flower"

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "slow and not data and not flower and not exhaustive"

# Every test of conformance for every method on every fleet: for a change of a fleet.
test-exhaustive: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m exhaustive

# Real processes on loopback, and in network namespaces if root runs it, with all other tests that
# need the extra. One worker starts each federation.
test-flower: .venv/.flower
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup -m flower tests/deploy \
	  tests/config/test_plugins.py tests/system/test_user_method.py tests/system/test_simulated_time.py

# The lowest versions that pyproject.toml allows, all at once, in an environment of their own, torch
# excepted, of which a second build is gigabytes: that, pytest and the rest are the main one's.
FLOORS := .venv-floors
FLOOR_TESTS := tests/config/test_config.py tests/core/test_storage.py tests/data/sources/test_sources.py \
  tests/config/test_option_help.py tests/reports/test_page.py tests/reports/test_pictures.py \
  tests/reports/test_table.py tests/use/test_estimator.py
# On Python 3.11 alone: for later ones the lowest versions have no wheels.
test-floors: $(STAMP)
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then $(MAKE) .floors; \
	else echo "test-floors left out: it needs Python 3.11, and $(BIN) has $$($(BIN)/python --version)"; fi

.floors: $(FLOORS)/.installed
	PYTHONPATH=src OMP_NUM_THREADS=1 $(FLOORS)/bin/python -m pytest -n 2 -W ignore -m "not slow and not data" $(FLOOR_TESTS)

test-data: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m data tests/real_data tests/data/sources/test_sources.py

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in `site/`; a word spelt wrong, an error in a notebook or a link that leads nowhere stops it.
# Each cell of results has a page there, and each notebook.
docs: .venv/.docs
	$(BIN)/codespell
	rm -rf .docs && mkdir .docs && cp -r docs .docs/pages && cp -r results/. .docs/pages/results
	$(BIN)/python -m fedshot reproduce results --results .docs/pages/results --to .docs/pages/results.md --cell-pages
	rm .docs/pages/results/*/notes.md
	OMP_NUM_THREADS=2 $(BIN)/python examples/notebooks/render.py .docs/pages/notebooks
	$(BIN)/zensical build --clean --strict

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Speed beside the ordinary simulator and other libraries, for a quiet machine; an hour at most.
bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

# The libraries that `bench` compares with, in an environment of their own that uses this one's torch.
PEERS := .venv-peers
SITE = $(1)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
bench-peers: $(STAMP)
	$(BIN)/python -m venv $(PEERS)
	echo '*' > $(PEERS)/.gitignore
	$(call SITE,$(BIN)) > "$$($(call SITE,$(PEERS)/bin))/main.pth"
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -r benchmarks/requirements-peers.txt
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps easyfsl==1.5.0
	mkdir -p $(PEERS)/src
	$(PEERS)/bin/pip download --quiet --disable-pip-version-check --no-deps --dest $(PEERS)/src learn2learn==0.2.0
	tar -xzf $(PEERS)/src/learn2learn-0.2.0.tar.gz -C $(PEERS)/src

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"fedshot needs Python 3.11 or newer; this is {v.major}.{v.minor}. Run make PYTHON=python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,onnx,secure,privacy]'
	touch $(STAMP)

.venv/.flower: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,flower]'
	touch .venv/.flower

$(FLOORS)/.installed: $(STAMP)
	$(BIN)/python -m venv $(FLOORS)
	echo '*' > $(FLOORS)/.gitignore
	$(BIN)/python tests/floors.py > $(FLOORS)/floors.txt
	$(FLOORS)/bin/pip install --quiet --disable-pip-version-check -r $(FLOORS)/floors.txt
	$(call SITE,$(BIN)) > "$$($(call SITE,$(FLOORS)/bin))/main.pth"
	touch $(FLOORS)/.installed

.venv/.docs: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs]'
	touch .venv/.docs

clean:
	rm -rf .venv .docs site $(PEERS) $(FLOORS) .mypy_cache .ruff_cache .import_linter_cache .hypothesis

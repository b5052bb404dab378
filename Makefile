# Two commands: `make demo` and `make test`. Both make the environment in .venv/ first.
PYTHON ?= python3.11
BIN := .venv/bin
INSTALLED := .venv/.installed
export OMP_NUM_THREADS := 1

.PHONY: help demo claim test lint clean

help:
	@echo "make demo   two tiny agents teach each other (about 5 minutes); results in runs/tiny-pair/"
	@echo "make claim  HACPO against its baselines over five seeds (about an hour); results in runs/claim/"
	@echo "make test   linters, type checker and all tests that need neither root nor a second environment (about 10 minutes)"
	@echo "make lint   linters and type checker alone"
	@echo "make clean  remove the environment and the demo's run"

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/hacpo launch examples/tiny/pair.yaml --overwrite

claim: $(INSTALLED)
	$(BIN)/python benchmarks/claim.py --out runs/claim

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -m "not slow and not sglang and not slurm" -n 2 --dist loadfile --durations=15

clean:
	rm -rf .venv runs/tiny-pair

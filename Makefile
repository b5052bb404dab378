# Two commands: `make demo` and `make test`. Both make the environment in .venv/ first.
PYTHON ?= python3.11
BIN := .venv/bin
INSTALLED := .venv/.installed
SGLANG := .venv-sglang/.installed
NEWEST := .venv-megatron-newest
export OMP_NUM_THREADS := 1

.PHONY: help demo claim test test-real sglang-cpu slurm-packages lint clean

help:
	@echo "make demo   two tiny agents teach each other (about 5 minutes); results in runs/tiny-pair/"
	@echo "make claim  HACPO against its baselines over five seeds (about an hour); results in runs/claim/"
	@echo "make test   linters, type checker and all tests that need neither root nor a second environment (about 10 minutes)"
	@echo "make test-real  whole runs that are killed and go on, and the tests that install SGLang, Slurm and another megatron-core first (about 20 minutes)"
	@echo "make sglang-cpu  SGLang for CPUs in an environment of its own, .venv-sglang/"
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
	$(BIN)/pytest -m "not slow and not real and not sglang and not slurm" -n 2 --dist loadfile --durations=15

sglang-cpu: $(SGLANG)

$(SGLANG): tools/sglang_cpu_requirements.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-sglang/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	touch $@

# The newest megatron-core asks for Python 3.12, but runs on 3.11.
$(NEWEST)/.installed:
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
		--python-version 3.12 --only-binary=:all: --target $(NEWEST) megatron-core==0.19.2
	touch $@

# Programs that the tests of slurm/ start; they skip without root.
SLURM_PACKAGES := slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2 shellcheck

slurm-packages:
	@if [ "$$(id -u)" = 0 ] && ! { command -v slurmctld && command -v shellcheck; } > /dev/null; then apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES) > /dev/null; fi

test-real: $(INSTALLED) $(SGLANG) $(NEWEST)/.installed slurm-packages
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt reasoning-gym
	MEGATRON_NEWEST=$(NEWEST) $(BIN)/pytest -m "(real or sglang or slurm) and not slow" -n 2 --dist loadfile --durations=15

clean:
	rm -rf .venv runs/tiny-pair

# Python 3.10 or newer, pip and g++ are all that these commands assume.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready

.PHONY: setup demo test docs bench clean

setup: $(STAMP)

# torch and setuptools come first: the package is built against them, not in isolation.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10+ is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

# What CI runs, all of it.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mkdocs build -q --strict
	$(BIN)/torchgraft native runtime  # minutes of a compiler, which no test should wait for
	$(BIN)/torchgraft native npu
	$(BIN)/python -m pytest -n auto --dist loadfile --max-worker-restart 0

docs: setup
	$(BIN)/mkdocs build --strict

# Other compilers to compare with: .venv/bin/pip install -c constraints.txt -e '.[bench]'
bench: setup
	$(BIN)/python -m bench cpu

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

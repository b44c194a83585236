# gradaudit: the two commands a newcomer needs are `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check install clean

demo: $(STAMP)
	@$(BIN)/gradaudit demo

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy

install: $(STAMP)

# Constraints pin every version (torch's CPU build on machines that carry it); the package's own ranges stay open.
$(STAMP): pyproject.toml constraints.txt
	@echo "installing gradaudit and its libraries into $(VENV), once: a few minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build src/*.egg-info

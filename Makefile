# gradaudit: the two commands a newcomer needs are `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check docs install clean

demo: $(STAMP)
	@$(BIN)/gradaudit demo

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy

# in an environment of its own, so that developing needs none of it; a warning (a dead link) fails
docs: build/docs/.installed
	build/docs/bin/python -m sphinx -W --keep-going -q -c docs . build/site
	@echo "open build/site/docs/index.html"

build/docs/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv build/docs
	@build/docs/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	@build/docs/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

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

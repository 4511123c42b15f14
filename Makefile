# Everything runs in .venv, made from a bare Python; `make demo` and `make test` need nothing else but g++.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CPP := $(wildcard csrc/*.cc csrc/*.h csrc/tests/*.cc csrc/tests/*.h \
	tests/gfx950_sim/hip/src/*.cc tests/gfx950_sim/hip/src/*.h)
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow lint format clean

$(INSTALLED): pyproject.toml $(wildcard csrc/*.cc csrc/*.h csrc/CMakeLists.txt)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test,examples]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/python -m examples.deepseek_v32.demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -m 'not slow'

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -m slow

lint: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[test,examples,lint]'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf $(VENV) build dist

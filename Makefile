PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(VENV)/.installed  ## Plan a Llama for two unlike GPUs, run it on CPU lanes, check it against eager.
	$(BIN)/tessera demo

# Two halves at once: two cores are what the suite is meant for, and most of it keeps one busy.
test: $(VENV)/.installed
	@mkdir -p build; \
	$(BIN)/python -m pytest tests/passes tests/ptx_tools > build/tests.log 2>&1 & half=$$!; \
	$(BIN)/python -m pytest tests/runtime tests/tessera_compile; other=$$?; \
	wait $$half; status=$$?; cat build/tests.log; \
	test $$status -eq 0 && test $$other -eq 0

# mypy wants packages nested as they are imported; the folders are mapped, so it gets a tree of links.
lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed && mkdir -p build/typed/tessera_compile
	ln -s $(CURDIR)/tessera_compile/* build/typed/tessera_compile/
	ln -s $(CURDIR)/passes $(CURDIR)/ptx_tools $(CURDIR)/runtime build/typed/tessera_compile/
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p tessera_compile

clean:
	rm -rf build dist *.egg-info $(VENV)

# One way to run things. Every target makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
JOBS ?= 4
# The warnings of build tools are no news to who wants to run something.
INSTALL = PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Empty: the many processes of the tests are to share what the first has compiled.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test thorough lint check pyright format docs dist clean bench record chaos jitter soak fuzz mutation audit

$(VENV)/.demo: setup.cfg pyproject.toml
	@echo "installing into $(VENV), which takes a minute the first time ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) --editable '.[local]'
	touch $@

$(VENV)/.dev: setup.cfg pyproject.toml
	@echo "installing into $(VENV), which takes a minute the first time ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/.demo

# Streams one answer through engine, router, worker and a real llama-server.
demo: $(VENV)/.demo
	$(BIN)/provider-llamacpp chat --local --thinking low

# More processes than cores: most tests wait for a server. A shared machine may stall for seconds at
# the wrong moment: what fails twice is a fault.
TEST = pytest -n $(JOBS) --reruns 1

test: $(VENV)/.dev
	$(BIN)/python -m $(TEST)

# The tests that take their minutes, which "make test" leaves out, and ten times as many examples of
# each property.
thorough: $(VENV)/.dev
	$(BIN)/python -m $(TEST) --thorough -m "thorough or hypothesis"

CODE = provider_llamacpp bench docs/extensions examples tests
# Bus functions, which only the table of surfaces names: vulture cannot see that they are used.
CALLED_BY_NAME = from provider_llamacpp.surfaces.table import SURFACES; \
	print(*(each.name for each in SURFACES), sep=chr(10))

# Format, lint, strict types, nothing unused, nothing written twice.
lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=docs/extensions $(BIN)/mypy docs/extensions docs/conf.py
	MYPYPATH=examples $(BIN)/mypy examples
	MYPYPATH=tests $(BIN)/mypy packaging bench
	mkdir -p build
	$(BIN)/python -c "$(CALLED_BY_NAME)" > build/called_by_name.py
	$(BIN)/vulture $(CODE) build/called_by_name.py
	$(BIN)/pylint --recursive=y $(CODE)

# The same, and the tests with coverage of lines and branches.
check: lint
	$(BIN)/coverage erase
	$(BIN)/coverage run -m $(TEST) --thorough
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The examples as pyright sees them: what an application's author who uses it gets. It needs Node.js,
# or fetches one.
pyright: $(VENV)/.dev
	$(INSTALL) pyright
	$(BIN)/pyright --pythonpath $(BIN)/python examples

clean:
	rm -rf $(VENV) $(VENV)-bench build dist *.egg-info .coverage* .mypy_cache .ruff_cache .pytest_cache

# An environment of its own: one of the peers takes older versions of what the embedded engine needs.
$(VENV)-bench/.bench: setup.cfg pyproject.toml bench/requirements.txt
	@echo "installing into $(VENV)-bench, which takes a minute the first time ..."
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(BENCH_INSTALL) --upgrade pip
	$(BENCH_INSTALL) --editable '.[bench]' --requirement bench/requirements.txt
	touch $@

BENCH_INSTALL = $(subst $(BIN),$(VENV)-bench/bin,$(INSTALL))

# The worker beside its peers and limits: the cases that have a bar. "python -m bench" runs all.
bench: $(VENV)-bench/.bench
	mkdir -p build
	$(VENV)-bench/bin/python -m bench --short --json build/bench.json --plot build/bench.png

# The commands at a terminal of 80 columns and 24 lines: recordings and pictures in docs/terminal/.
record: $(VENV)/.demo
	$(BIN)/python packaging/record.py

# A minute of faults under a new seed, which is printed and makes the run again: --seed N.
chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos --seconds 40
	$(BIN)/python -m tests.chaos --seconds 20 --real
	$(BIN)/python -m tests.chaos --seconds 20 --resume

# The suite with random pauses where threads take turns: make jitter SEED=7.
SEED ?= $(shell date +%s)
jitter: $(VENV)/.dev
	JITTER=$(SEED) PYTHONPATH=tests $(BIN)/python -m pytest -n $(JOBS) -p jitter

# Streams and bus calls without a pause, and what the worker has of memory, threads and descriptors
# meanwhile: build/soak.json and build/soak.svg.
MINUTES ?= 30
soak: $(VENV)/.dev
	mkdir -p build
	$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES) --json build/soak.json \
		--plot build/soak.svg

.PHONY: pyz arm

# One file that runs with nothing but Python 3.10 or later: build/provider-llamacpp.pyz. It holds
# bytecode for the Pythons that are found, or for those named: make pyz PYTHONS="python3.11 ..."
pyz:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python packaging/pyz.py $(addprefix --python ,$(PYTHONS))

# Source distribution and wheel, and what the index would refuse.
dist:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# Wheel and one file in emulated Debian systems for armhf and arm64: install, streams, aborts, memory.
# Needs root, debootstrap and qemu-user-static, and the first time a quarter of an hour.
arm: $(VENV)/.demo
	$(BIN)/python packaging/arm.py

# atheris has no wheels for some Pythons, so it is in no other extra.
$(VENV)/.fuzz: $(VENV)/.dev
	$(INSTALL) --editable '.[fuzz]'
	touch $@

# Looks for inputs that break a law: by coverage, then by state machines. SECONDS for each of them.
SECONDS ?= 20
TARGETS = sse stream frames bus writer url convert
fuzz: $(VENV)/.fuzz
	mkdir -p build/fuzz
	set -e; for each in $(TARGETS); do \
		mkdir -p build/fuzz/$$each; \
		$(BIN)/python -m tests.fuzz.atheris_driver $$each build/fuzz/$$each \
			-max_total_time=$(SECONDS) -max_len=2048 -artifact_prefix=build/fuzz/$$each- \
			2> build/fuzz/$$each.log || { tail -40 build/fuzz/$$each.log; exit 1; }; \
		echo "$$each: $$(tail -1 build/fuzz/$$each.log)"; \
	done
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) stream-machine bus-machine

# How many of the changes that mutmut makes to the pure modules their unit tests notice. All modules
# take hours; for less: make mutation MODULES="fields events/sse" SAMPLE=5
MODULES ?=
SAMPLE ?= 25
mutation: $(VENV)/.fuzz
	$(BIN)/python -m tests.mutation --sample $(SAMPLE) $(MODULES)

# An SBOM of what requirements/ deploys, and what is known against it.
audit:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) pip-audit cyclonedx-bom
	$(BIN)/python packaging/audit.py

$(VENV)/.docs: setup.cfg pyproject.toml
	@echo "installing into $(VENV), which takes a minute the first time ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) --editable '.[docs]'
	touch $@

# The pages as a site in build/docs; warnings are errors, examples are run, links are followed.
docs: $(VENV)/.docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky docs build/docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --builder doctest docs build/doctest
	$(BIN)/python docs/extensions/links.py build/docs
	@echo "open build/docs/index.html"

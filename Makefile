# Every target does its own set-up and may be repeated: what is installed is noted in stamp files and
# installed again when one of STATED changed.
#
#   make demo            train on drawn images, stop, resume, show the profile; DATA=path: on a folder of images or tars
#   make test            the tests that hold each promise once, on all cores; ARGS="-n 0 -x" for one process
#   make test-all        the rest of them: every case of the parametrised tests, and those that need an S3 server,
#                        FFmpeg, DALI or nvImageCodec, installed for it
#   make lint            ruff and mypy
#   make docs            the documentation as a site in site/
#   make bench           the benchmarks against other loaders, in an environment of their own; PIPEGRAPH_TEST_IMAGES names
#                        a folder of photographs for those on images
#   make fuzz            2,000 random graphs (EXAMPLES=n for another number) and a twentieth of that for each order, a
#                        thousand orders of a device's streams, the slow tests, the report in Chromium, a notebook
#   make schedules       ten minutes of random interleavings of the engine; ARGS="--total 1000000" for a number of them
#   make test-ray        stages on a local Ray cluster, with Ray installed for it
#   make test-interop    trainers, transforms and the loaders of docs/migration.md, installed for it (4 GB)
#   make release-check   sdist and wheel, installed alone on every Python here from 3.11, with the oldest and the newest
#                        versions admitted (2 to 4 GB each)
#   make clean           remove all environments and caches

SHELL := /bin/sh
VENV := .venv
BENCH := .venv-bench
DOCS := .venv-docs
INTEROP := .venv-interop
RELEASE := .venv-release
RAY := .venv-ray
MIGRATION := .venv-migration
# The machine's own Python where it is 3.11 or later, else a later one that is here.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	if command -v $$p >/dev/null && $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$p; break; fi; done)
PIP := -m pip install --disable-pip-version-check -c constraints.txt
STATED := pyproject.toml constraints.txt setup.py operators/images/rows.c

.PHONY: help demo test test-all lint docs bench fuzz schedules test-ray test-interop release-check clean
help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.installed-demo
	@if [ -n "$$DATA" ]; then exec $(VENV)/bin/pipegraph demo --data "$$DATA"; else exec $(VENV)/bin/pipegraph demo; fi
export DATA

# Two processes more than there are cores, for many tests wait (for processes to start, for deadlines), and each takes
# work from the others when its own is done. The processes that tests start read compiled modules also where the
# environment says not to write them: each compiled all of them anew. A test that hangs fails, by name and with every
# thread's stack, and the others go on.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: PART := not matrix
test-all: PART := matrix
test: $(VENV)/.installed-test
test-all: $(VENV)/.installed-test-all
test test-all:
	$(VENV)/bin/python -m pytest -n $$(($$(nproc) + 2)) --dist worksteal -m "not slow and $(PART)" \
		-o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true $(ARGS)

schedules: $(VENV)/.installed-test
	$(VENV)/bin/python tests/schedules/run.py $(ARGS)

# Transforms in a process of their own, which has no other threads yet: its worker processes are forks of it and know the
# operators that the test names in place of torchvision's compiled ones.
test-interop: $(INTEROP)/.installed $(MIGRATION)/.installed
	PIPEGRAPH_TORCHVISION=$(CURDIR)/$(INTEROP)/vision $(INTEROP)/bin/python -m pytest -n 0 -o faulthandler_timeout=600 tests/interop/test_transforms.py $(ARGS)
	$(INTEROP)/bin/python -m pytest -n 0 -o faulthandler_timeout=600 tests/interop --ignore tests/interop/test_transforms.py $(ARGS)
	$(MIGRATION)/bin/python -m pytest tests/docs/test_migration.py $(ARGS)

# In one process: each test file starts a cluster of its own.
test-ray: $(RAY)/.installed
	$(RAY)/bin/python -m pytest -o faulthandler_timeout=600 tests/ray tests/docs/test_examples.py -k "ray" $(ARGS)

lint: $(VENV)/.installed-lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

release-check: $(RELEASE)/.installed
	$(RELEASE)/bin/python .ci/release_check.py $(ARGS)

# The tests drive the system's Chromium over its debugging pipe themselves: no driver has to be installed.
fuzz: $(VENV)/.installed-notebook
	PIPEGRAPH_FUZZ_EXAMPLES=$(EXAMPLES) $(VENV)/bin/python -m pytest tests/engine/test_fuzz.py tests/order/test_every_order.py $(ARGS)
	PIPEGRAPH_DEVICE_SCHEDULES=1000 $(VENV)/bin/python -m pytest -n $$(nproc) -k "random_schedule or other_devices" \
		tests/device/test_every_wait.py tests/replicas/test_every_wait.py tests/device/test_other_devices.py $(ARGS)
	$(VENV)/bin/python -m pytest -n 0 -m "slow or browser" $(ARGS)
EXAMPLES := 2000

bench: $(BENCH)/.installed
	$(BENCH)/bin/python benchmarks/run_all.py $(ARGS)

# Strict: a broken link, anchor or reference ends it. (With --quiet nothing would: it hides warnings before they count.)
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs build --strict
	@echo "the site is in site/: $(PYTHON) -m http.server --directory site, or open site/index.html"

clean:
	rm -rf $(VENV) $(BENCH) $(DOCS) $(INTEROP) $(RAY) $(MIGRATION) $(RELEASE) site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.made $(BENCH)/.made $(DOCS)/.made $(INTEROP)/.made $(RAY)/.made $(MIGRATION)/.made $(RELEASE)/.made:
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or later with its venv module is needed: install it, or say make PYTHON=..." >&2; exit 2; fi
	$(PYTHON) -m venv $(@D)
	@touch $@

$(VENV)/.installed-demo: $(STATED) | $(VENV)/.made
	@echo "installing pipegraph with what it needs into $(VENV), once. PyTorch is large: this takes minutes; pip says what it does."
	$(VENV)/bin/python $(PIP) -e ".[images,cli]"
	@touch $@

$(VENV)/.installed-test: $(STATED) | $(VENV)/.made
	@echo "installing pipegraph and what its tests need into $(VENV), once: this takes minutes"
	$(VENV)/bin/python $(PIP) -e ".[test]"
	@touch $@

$(VENV)/.installed-test-all: $(STATED) | $(VENV)/.made
	$(VENV)/bin/python $(PIP) -e ".[test-all]"
	@touch $@

$(VENV)/.installed-notebook: $(VENV)/.installed-test-all
	$(VENV)/bin/python $(PIP) nbclient ipykernel
	@touch $@

$(VENV)/.installed-lint: $(STATED) | $(VENV)/.made
	$(VENV)/bin/python $(PIP) -e ".[lint]"
	@touch $@

$(RELEASE)/.installed: | $(RELEASE)/.made
	$(RELEASE)/bin/python $(PIP) "build>=1.2" "twine>=6" "uv>=0.9"
	@touch $@

$(RAY)/.installed: $(STATED) | $(RAY)/.made
	@echo "installing pipegraph and Ray into $(RAY), once: this takes minutes"
	$(RAY)/bin/python $(PIP) -e ".[ray,images,cli]" "pytest>=8"
	@touch $@

# The peers pull other versions of torch and numpy, so they never share the environment of the tests.
$(BENCH)/.installed: $(STATED) benchmarks/requirements.txt | $(BENCH)/.made
	$(BENCH)/bin/python $(PIP) -r benchmarks/requirements.txt
	$(BENCH)/bin/python $(PIP) --no-deps -e .
	@touch $@

# torchvision of this torch stands apart: its operators need CUDA's libraries, and what imports it if it is there
# (torchmetrics) fails on a torch without them. Its transforms are Python and need no operator.
$(INTEROP)/.installed: $(STATED) tests/interop/requirements.txt | $(INTEROP)/.made
	$(INTEROP)/bin/python $(PIP) -e ".[test]" -r tests/interop/requirements.txt
	$(INTEROP)/bin/python $(PIP) --no-deps litdata==0.2.76
	$(INTEROP)/bin/python $(PIP) --no-deps --upgrade --target $(INTEROP)/vision torchvision==0.28.0
	@touch $@

$(MIGRATION)/.installed: $(STATED) tests/docs/requirements.txt | $(MIGRATION)/.made
	@echo "installing pipegraph and the loaders of docs/migration.md into $(MIGRATION), once: this takes minutes and 4 GB"
	$(MIGRATION)/bin/python $(PIP) -e ".[images,cli]" -r tests/docs/requirements.txt
	@touch $@

# Reads the sources, so it needs neither torch nor the package itself.
$(DOCS)/.installed: docs/requirements.txt | $(DOCS)/.made
	$(DOCS)/bin/python $(PIP) -r docs/requirements.txt
	@touch $@

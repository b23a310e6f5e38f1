# Every target does its own set-up and may be repeated: what is installed is noted in stamp files and
# installed again when pyproject.toml or constraints.txt changed.
#
#   make demo                    train on drawn images, stop, resume, show the profile
#   make demo DATA=path          the same on a folder of images or tar shards
#   make test                    the tests (not the slow ones) on all cores; ARGS="-n 0 -x" for one process
#   make lint                    ruff and mypy
#   make release-check           sdist and wheel, installed alone on every Python here from 3.11, with the oldest and the
#                                newest versions admitted: example, demo, doctor, a part of the tests (2 to 4 GB each)
#   make fuzz                    2,000 random graphs (EXAMPLES=n for another number) and a twentieth of that for each
#                                order, then the slow tests
#   make schedules               ten minutes of random interleavings of every model of the engine (docs/schedules.md);
#                                ARGS="--total 1000000" for a number of them
#   make test-interop            the trainers' examples (Lightning, Accelerate, Hugging Face, DDP, FSDP2) and other people's
#                                transforms, in an environment of their own
#   make test-ray                stages on a local Ray cluster, with Ray installed for it in .venv-ray
#   make test-migration          both sides of docs/migration.md, with the other loaders (4 GB) in an environment of their own
#   make device-schedules        copies and replicas on the simulated device in 1,000 random schedules each (SCHEDULES=n), and on devices unlike it
#   make device-coverage         lines of device/, replicas/ and to_device that tests on an accelerator, or the simulated one, run
#   make notebook                worker processes in a notebook, with Jupyter's kernel (60 MB) installed for it
#   make browser                 the report of a profile in headless Chromium; skipped where there is none
#   make bench                   the benchmarks against other loaders, in an environment of their own;
#                                PIPEGRAPH_TEST_IMAGES names a folder of photographs for those on images
#   make docs                    the documentation as a site in site/; make docs-serve shows it at 127.0.0.1:8000
#   make docs-version            commit the site of VERSION=0.1 to the branch gh-pages
#   make clean                   remove all environments and caches

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
STATED := pyproject.toml constraints.txt

.PHONY: help demo test schedules test-interop test-ray test-migration lint release-check fuzz device-schedules device-coverage notebook browser bench docs docs-serve docs-version clean
help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.installed-demo
	@if [ -n "$$DATA" ]; then exec $(VENV)/bin/pipegraph demo --data "$$DATA"; else exec $(VENV)/bin/pipegraph demo; fi
export DATA

# Two processes more than there are cores, for many tests wait (for processes to start, for deadlines), and each takes
# work from the others when its own is done. The processes that tests start read compiled modules also where the
# environment says not to write them: each compiled all of them anew. A test that hangs fails, by name and with every
# thread's stack, and the others go on.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest -n $$(($$(nproc) + 2)) --dist worksteal -m "not slow" \
		-o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true $(ARGS)

schedules: $(VENV)/.installed-test
	$(VENV)/bin/python tests/schedules/run.py $(ARGS)

# Transforms in a process of their own, which has no other threads yet: its worker processes are forks of it and know the
# operators that the test names in place of torchvision's compiled ones.
test-interop: $(INTEROP)/.installed
	PIPEGRAPH_TORCHVISION=$(CURDIR)/$(INTEROP)/vision $(INTEROP)/bin/python -m pytest -n 0 -o faulthandler_timeout=600 tests/interop/test_transforms.py $(ARGS)
	$(INTEROP)/bin/python -m pytest -n 0 -o faulthandler_timeout=600 tests/interop --ignore tests/interop/test_transforms.py $(ARGS)

# In one process: each test file starts a cluster of its own.
test-ray: $(RAY)/.installed
	$(RAY)/bin/python -m pytest -o faulthandler_timeout=600 tests/ray tests/docs/test_examples.py -k "ray" $(ARGS)

test-migration: $(MIGRATION)/.installed
	$(MIGRATION)/bin/python -m pytest tests/docs/test_migration.py $(ARGS)

lint: $(VENV)/.installed-lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

release-check: $(RELEASE)/.installed
	$(RELEASE)/bin/python .ci/release_check.py $(ARGS)

fuzz: $(VENV)/.installed-test
	PIPEGRAPH_FUZZ_EXAMPLES=$(EXAMPLES) $(VENV)/bin/python -m pytest tests/engine/test_fuzz.py tests/order/test_every_order.py $(ARGS)
	$(VENV)/bin/python -m pytest -m slow $(ARGS)
EXAMPLES := 2000

device-schedules: $(VENV)/.installed-test
	PIPEGRAPH_DEVICE_SCHEDULES=$(SCHEDULES) $(VENV)/bin/python -m pytest -n $$(nproc) -k "random_schedule or other_devices" \
		tests/device/test_every_wait.py tests/replicas/test_every_wait.py tests/device/test_other_devices.py $(ARGS)
SCHEDULES := 1000

# Without the tests that only take waits away.
device-coverage: $(VENV)/.installed-test
	$(VENV)/bin/python -m coverage run --source=pipegraph/device,pipegraph/replicas,operators -m pytest -n 0 \
		-m "accelerator and not slow" -k "not missing_is_found and not random_schedule" tests/device tests/replicas tests/loader $(ARGS)
	$(VENV)/bin/python -m coverage report -m --include='*/device/*,*/replicas/*,*/to_device.py,*/batch_slabs.py'

notebook: $(VENV)/.installed-notebook
	$(VENV)/bin/python -m pytest -m slow -n 0 tests/process/test_surroundings.py $(ARGS)

# The tests drive the system's Chromium over its debugging pipe themselves: no driver has to be installed.
browser: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest -n 0 -m browser tests/profile $(ARGS)

bench: $(BENCH)/.installed
	$(BENCH)/bin/python benchmarks/run_all.py $(ARGS)

# Strict: a broken link, anchor or reference ends it. (With --quiet nothing would: it hides warnings before they count.)
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs build --strict
	@echo "the site is in site/: make docs-serve, or open site/index.html through any web server"

# Commits the site of one version to the branch gh-pages, beside those of the others; VERSION=0.1
docs-version: export NO_MKDOCS_2_WARNING := 1
docs-version: $(DOCS)/.installed
	@if [ -z "$(VERSION)" ]; then echo "say which: make docs-version VERSION=0.1" >&2; exit 2; fi
	PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" $(DOCS)/bin/mike deploy --update-aliases "$(VERSION)" latest
	PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" $(DOCS)/bin/mike set-default latest

docs-serve: docs
	@echo "http://127.0.0.1:8000 (Ctrl-C ends it)"
	$(DOCS)/bin/python -m http.server 8000 --bind 127.0.0.1 --directory site

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

$(VENV)/.installed-notebook: $(VENV)/.installed-test
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

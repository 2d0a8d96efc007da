# make setup | make demo | make demo-compose | make test | make test-all | make test-samples | make test-fresh | make test-oldest
# make flower-newest
# make lint | make docs | make faults | make mutants | make fuzz | make audit | make statistics | make gpu | make bench
# make lock | make outdated | make airgap
# Each sets up what it needs. VENV=/path takes another environment, TORCH=cpu a torch without libraries for GPUs.
VENV ?= .venv
PYTHON ?= python3
TORCH ?= auto
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
SAMPLES ?= ../shared
RUN := PYTHONPATH="$(CURDIR)" "$(VENV)/bin/python"
# Of the demo: how many sites, and where its run folder goes.
SITES ?= 5
OUT ?= runs
# Files or folders of tests, such as TESTS=tests/common; all of them without it.
TESTS ?=

export FLWR_TELEMETRY_ENABLED = 0
export FLWR_DISABLE_UPDATE_CHECK = 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION = 1
export RAY_USAGE_STATS_ENABLED = 0
export GRPC_ENABLE_FORK_SUPPORT = 0

.PHONY: setup lock outdated airgap demo demo-compose test test-all test-samples test-fresh test-oldest flower-newest faults mutants fuzz audit \
	statistics gpu lint docs bench proto

# Prints what it does, and nothing where the environment has all versions of the lock.
setup:
	@test -n "$(VENV)" || { echo "VENV is empty; name a folder for the environment, or leave VENV out"; exit 1; }
	@python="$(VENV)/bin/python"; "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || python="$(PYTHON)"; \
	command -v "$$python" >/dev/null || { echo "there is no $$python; name a Python: make PYTHON=/path/to/python3.11"; exit 1; }; \
	"$$python" deploy/environment.py "$(VENV)" --torch $(TORCH) --torch-index "$(TORCH_INDEX)"

# Newer versions into requirements.lock, as far as pyproject.toml allows; then `make setup` installs them.
lock:
	@test -x "$(VENV)/bin/uv" || $(MAKE) --no-print-directory setup
	@$(RUN) deploy/lock.py renew

outdated: setup
	@"$(VENV)/bin/python" -m uv pip list --outdated --python "$(VENV)/bin/python"

# An archive for machines without internet: wheels, list of software, licences, compose files, documentation, and the image IMAGE
# with its base BASE where an engine has them. KEY signs it, and never leaves this machine. TORCH_PINS are builds of torch for
# processors in place of those of the lock, where TORCH_INDEX has others.
KEY ?= release.key
AIRGAP ?= build/fedsurrogate-airgap
TORCH_PINS ?=
# More of pyproject.toml: EXTRAS='image backbones simulation' packs Ray, 74 MB.
EXTRAS ?=
airgap: setup
	@$(RUN) deploy/airgap.py "$(AIRGAP)" --key "$(KEY)" --torch $(if $(filter gpu,$(TORCH)),gpu,cpu) --torch-index "$(TORCH_INDEX)" \
		$(if $(TORCH_PINS),--torch-pins $(TORCH_PINS)) $(if $(EXTRAS),--extras $(EXTRAS)) $(if $(IMAGE),--image "$(IMAGE)") $(if $(BASE),--base "$(BASE)")

# A coordinator and three hospitals in containers; on a machine with Docker.
demo-compose:
	@deploy/demo.sh

demo: setup
	@$(RUN) -m fedsurrogate.server_app.cli.main simulate --sites $(SITES) -c 'compare=true output-dir="$(OUT)"'

# One thread a process: the same numbers on every machine. Three, because tests of real processes mostly wait. Python keeps what
# it compiles, also where the shell says otherwise: half of the time to collect tests, and most of the start of a process.
# THREADS=2 gives each of them more threads.
THREADS ?= 1
PYTEST := -m pytest -n 3 --dist worksteal --durations 25
unexport PYTHONDONTWRITEBYTECODE

# One method of each family, and a share of cases and examples: tests/quick.py.
test: setup
	OMP_NUM_THREADS=$(THREADS) $(RUN) $(PYTEST) --quick -m "not faults and not slow and not samples" $(TESTS)

# All methods, cases and examples, and what takes minutes: real processes, and checks that repeat a run hundreds of times. `make bench` runs the faults.
test-all: setup
	OMP_NUM_THREADS=$(THREADS) $(RUN) $(PYTEST) -m "not faults and not samples" $(TESTS)

# Tests on real images and trained weights, in the folder SAMPLES; a test whose file is not there is skipped, and says so. A file
# at a time: else each process starts the hospitals of a file for itself, which takes minutes.
test-samples: setup
	@test -d "$(SAMPLES)" || { echo "there is no folder $(SAMPLES) with sample data: make test-samples SAMPLES=/path"; \
		exit $(if $(filter file,$(origin SAMPLES)),0,1); }
	@test ! -d "$(SAMPLES)" || FEDSURROGATE_SAMPLES="$$(realpath -m "$(SAMPLES)")" OMP_NUM_THREADS=1 $(RUN) $(PYTEST) --dist loadfile -rs -m "samples and not faults" $(TESTS)

# The two commands above in clones on machines unlike this one: other users, paths, languages, Pythons, and kernels of other
# processors (the place `processors`, which plays the numeric tests six times). PLACES="blank busy"
# plays some, WHOLE=1 runs all tests in each. Some places need root.
test-fresh: setup
	$(RUN) tests/fresh/places.py $(if $(PLACES),--only $(PLACES)) $(if $(WHOLE),--whole)

# The quick part with the oldest versions that pyproject.toml allows, in an environment of its own. The newest allowed ones are
# those of a new `make lock`.
OLDEST ?= .venv-oldest
test-oldest: setup
	@test "$(OLDEST).lock" -nt pyproject.toml || $(RUN) deploy/lock.py oldest "$(OLDEST).lock"
	@"$(PYTHON)" deploy/environment.py "$(OLDEST)" --lock "$(OLDEST).lock" --torch $(TORCH) --torch-index "$(TORCH_INDEX)"
	OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)" "$(OLDEST)/bin/python" $(PYTEST) --quick -m "not faults and not slow and not samples" $(TESTS)

# Tests of all that touches Flower with the newest one that common/flower has a file for. It lies in a folder of its own, before
# the environment's packages: flwr and what it needs beyond the lock, without a second torch. Made once, from pip's index.
NEWEST ?= build/flower-newest
NEWEST_LOCK := deploy/flower-newest.lock
ON_NEWEST := tests/common/flower tests/client_app/processes tests/client_app/test_own_account.py tests/server_app/deployment \
	tests/server_app/control_api tests/attacks/coordinator/test_runtime_sockets.py tests/attacks/sites/test_foreign_settings.py \
	tests/attacks/sites/test_senders.py tests/attacks/sites/test_strangers.py tests/e2e/test_two_flowers.py
flower-newest: setup
	@test "$(NEWEST)/flwr" -nt $(NEWEST_LOCK) || { rm -rf "$(NEWEST)" && "$(VENV)/bin/python" -m pip install -q --no-deps \
		--require-hashes --only-binary :all: --target "$(NEWEST)" -r $(NEWEST_LOCK) && touch "$(NEWEST)/flwr"; }
	OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR):$(abspath $(NEWEST))" "$(VENV)/bin/python" $(PYTEST) -rs -m "not faults and not samples" \
		$(or $(TESTS),$(ON_NEWEST))

# Processes are killed, lines cut and disks filled, as in a real deployment; they mostly wait, but for minutes each. And all
# pairs of neighbours, of which `make test-all` examines a third.
faults: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile -m faults tests/faults tests/e2e/test_upgrade.py \
		tests/attacks/privacy/test_uncharged_answers.py

# COUNT small faults, which SEED draws anew, are planted in the code that carries the promises; the tests must notice 90 of 100.
SEED ?= 0
COUNT ?= 200
# Seconds for all of it, and the folders to draw from; all of them without.
LIMIT ?=
PACKAGES ?=
mutants: setup
	OMP_NUM_THREADS=1 $(RUN) benchmarks/mutants.py --jobs 2 --seed $(SEED) --count $(COUNT) $(if $(LIMIT),--seconds $(LIMIT)) $(if $(PACKAGES),--packages $(PACKAGES))

# Changed messages and files for every parser of foreign bytes; fails where one takes memory or time, or raises another exception.
MINUTES ?= 30
fuzz: setup
	OMP_NUM_THREADS=1 $(RUN) benchmarks/fuzz.py --minutes $(MINUTES)

# A lower bound on epsilon for every private mechanism, next to its claim; fails where a bound exceeds its claim.
audit: setup
	OMP_NUM_THREADS=1 $(RUN) benchmarks/audit.py

# Every sampler and every private release against the distribution that is claimed for it; fails where one contradicts its claim.
statistics: setup
	OMP_NUM_THREADS=1 $(RUN) benchmarks/distributions.py

# Parity with the processor, and speed against stated limits, on a GPU. No set-up: it needs torch and torchvision only.
gpu:
	PYTHONPATH="$(CURDIR)" "$$(test -x "$(VENV)/bin/python" && echo "$(VENV)/bin/python" || echo "$(PYTHON)")" -m benchmarks.gpu

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# The documentation, into site/; strict: a dead link fails.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "open site/index.html"

bench: setup
	@for script in $$(ls benchmarks/[a-z]*.py | grep -v -e mutants -e fuzz -e pages) benchmarks/reproduce/[a-z]*.py; do echo "== $$script"; $(RUN) "$$script" || exit 1; done
	@$(RUN) benchmarks/pages.py
	@$(MAKE) --no-print-directory faults

proto: setup
	$(RUN) -m grpc_tools.protoc -I common --python_out=common --pyi_out=common common/surrogate.proto

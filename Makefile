# make demo | make demo-compose | make test | make test-all | make faults | make mutants | make audit | make gpu | make lint | make docs | make bench. Each sets up what it needs; VENV=/path takes an environment that exists.
VENV ?= .venv
PYTHON ?= python3
RUN := PYTHONPATH="$(CURDIR)" "$(VENV)/bin/python"
SITES ?= 5
NEEDED := flwr torch torchvision open_clip_torch timm scikit-learn scipy dp-accounting opacus POT cryptography pydantic safetensors protobuf pyarrow \
	pydicom pillow filelock psutil rich typer jinja2 matplotlib pytest pytest-xdist PyYAML hypothesis ruff mypy grpcio-tools \
	types-protobuf types-psutil prometheus_client pandas mkdocs mkdocs-material mkdocstrings-python

export FLWR_TELEMETRY_ENABLED = 0
export FLWR_DISABLE_UPDATE_CHECK = 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION = 1
export RAY_USAGE_STATS_ENABLED = 0
export GRPC_ENABLE_FORK_SUPPORT = 0

# The packages are there, and the commands of this project are those that pyproject.toml names now.
define CHECK_INSTALLED
import sys, tomllib
from importlib.metadata import distribution, version
[version(name) for name in sys.argv[1:]]
scripts = {entry.name: entry.value for entry in distribution("fedsurrogate").entry_points}
assert scripts == tomllib.load(open("pyproject.toml", "rb"))["project"]["scripts"]
endef
export CHECK_INSTALLED

.PHONY: setup demo demo-compose test test-all faults mutants audit gpu lint docs bench proto

setup:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x "$(VENV)/bin/python" || $(PYTHON) -m venv "$(VENV)"
	@"$(VENV)/bin/python" -c "$$CHECK_INSTALLED" $(NEEDED) 2>/dev/null \
		|| "$(VENV)/bin/python" -m pip install --quiet --progress-bar off -c constraints.txt -e '.[dev]'

# A coordinator and three hospitals in containers; on a machine with Docker.
demo-compose:
	@deploy/demo.sh

demo: setup
	@$(RUN) -m server_app.cli.main simulate --sites $(SITES) -c 'compare=true'

# One thread a process: the same numbers on every machine. Three, because tests of real processes mostly wait.
PYTEST := -m pytest -n 3 --dist worksteal --durations 25
test: setup
	OMP_NUM_THREADS=1 $(RUN) $(PYTEST) -m "not faults and not slow"

# And what takes minutes: real processes, and checks that repeat a run hundreds of times. `make bench` runs the faults.
test-all: setup
	OMP_NUM_THREADS=1 $(RUN) $(PYTEST) -m "not faults"

# Processes are killed, lines cut and disks filled, as in a real deployment; they mostly wait, but for minutes each. And all
# pairs of neighbours, of which `make test-all` examines a third.
faults: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile -m faults tests/faults tests/e2e/test_upgrade.py \
		tests/attacks/privacy/test_uncharged_answers.py

# Small faults are planted in the code that carries the promises; the tests must notice 95 of 100.
mutants: setup
	OMP_NUM_THREADS=1 $(RUN) benchmarks/mutants.py --jobs 2

# A lower bound on epsilon for every private mechanism, next to its claim; fails where a bound exceeds its claim.
audit: setup
	OMP_NUM_THREADS=1 $(RUN) benchmarks/audit.py

# Parity with the processor, and speed against stated limits, on a GPU. No set-up: it needs torch and torchvision only.
gpu:
	PYTHONPATH="$(CURDIR)" $$(test -x "$(VENV)/bin/python" && echo "$(VENV)/bin/python" || echo "$(PYTHON)") -m benchmarks.gpu

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# The documentation, into site/; strict: a dead link fails.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "open site/index.html"

bench: setup
	@for script in $$(ls benchmarks/[a-z]*.py | grep -v mutants) benchmarks/reproduce/[a-z]*.py; do echo "== $$script"; $(RUN) "$$script" || exit 1; done
	@$(MAKE) --no-print-directory faults

proto: setup
	$(RUN) -m grpc_tools.protoc -I common --python_out=common --pyi_out=common common/surrogate.proto

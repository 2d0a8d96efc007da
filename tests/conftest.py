"""Every test draws the same random numbers each time, whatever ran before it, and does not depend
on how it was started.

Slow files are marked here, and each test gets its time limit. The home folder is a temporary one.
Signals that a shell ignores for what it starts in the background have their default effect again,
also in processes that tests start.

Noise of privacy comes from the operating system. In the process of the tests its keys follow from
the test that asks, so that a bound of a few standard deviations holds always or never. `pytest
--noise 1` gives other noise, which finds bounds that are close. A test with the fixture
`system_noise` has the noise of the operating system, and so have other processes. Hypothesis tries
the same examples each time.

In the process of the tests nothing waits for the disk, because no test cuts the power; a descriptor
that cannot be flushed still raises.

The noise of training and its epsilon, which take seconds to find, are found once for all processes
of a run.
"""

import gc
import hashlib
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from fedsurrogate.common.files import replace_file
from fedsurrogate.common.privacy import accounting, gaussian_mechanism, mechanism
from tests import quick
from tests.samples import Samples, sample

TESTS = Path(__file__).parent
# Real processes, checks that repeat a run hundreds of times, full runs of every method: minutes
# each. `make test-all` runs them too.
SLOW = (
    "e2e",
    "attacks/coordinator/test_foreign_app.py",
    "attacks/ledger/test_ledger_kills.py",
    "attacks/privacy/test_sensitivity.py",
    "attacks/sites/test_senders.py",
    "client_app/features/test_device_processes.py",
    "client_app/governance/test_ledger_processes.py",
    "client_app/methods/fedpft/test_empirical_epsilon.py",
    "client_app/processes",
    "test_defaults.py",
    "test_dependencies_alone.py",
)
# Seconds after which a test counts as hanging, fixtures included. All other tests: `timeout` in
# pyproject.toml.
LIMITS = {"slow": 900, "faults": 3600}
# What a command adds a filter to when it opens its log: see `common/logs.py`.
LOGS = ("flwr", "fedsurrogate.site")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests by their folder, those of sample data by their fixture, and give each its
    time limit.

    First, before `-m` selects by these marks.
    """
    slow = {TESTS / name for name in SLOW}
    # Once for each file: this takes longer than to collect a test.
    is_slow = cache(lambda path: not slow.isdisjoint((path, *path.parents)))
    for item in items:
        if is_slow(item.path):
            item.add_marker(pytest.mark.slow)
        if "samples" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.samples)
        limits = [seconds for name, seconds in LIMITS.items() if item.get_closest_marker(name)]
        if limits and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(max(limits)))


class Keys:
    """Keys of privacy noise, by the test or the shared fixture that draws it, and by how many were
    drawn there before.
    """

    def __init__(self) -> None:
        self.salt, self.owner, self.drawn = 0, "", 0

    def begin(self, owner: str) -> None:
        """Draw for a test or a fixture from now on, and begin the other random numbers again."""
        self.owner, self.drawn = owner, 0
        # Of processors alone: `torch.manual_seed` notes the whole stack for GPUs, a millisecond.
        torch.default_generator.manual_seed(0)

    def urandom(self, count: int) -> bytes:
        """What `os.urandom` is replaced by."""
        self.drawn += 1
        return hashlib.shake_256(f"{self.salt} {self.owner} {self.drawn}".encode()).digest(count)


KEYS = Keys()


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option for other noise, and one for what `make test` runs."""
    parser.addoption(
        "--noise", type=int, default=0, help="Number of the noise of privacy that tests draw."
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="One method of each family a test, and a share of the generated examples: "
        "tests/quick.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Replace the operating system's random bytes where privacy noise is drawn, and only there."""
    # No deadline: on a busy machine every example may be slow.
    settings.register_profile("the same", derandomize=True, deadline=None)
    settings.load_profile("the same")
    KEYS.salt = config.getoption("--noise", 0)
    if config.getoption("--quick", False):
        config.pluginmanager.register(quick)
    gaussian_mechanism.os = SimpleNamespace(urandom=KEYS.urandom)  # type: ignore[attr-defined]
    os.fsync = _flush
    _heed_signals()
    if not hasattr(config, "workerinput"):
        _own_home(config)
    mechanism._calibrated = _found_once(mechanism._calibrated, Path.home() / "noise")
    for module, name in ((mechanism, "_spent"), (accounting, "composed")):
        setattr(module, name, _found_once(getattr(module, name), Path.home() / "spent"))


def pytest_collection_finish() -> None:
    """Leave what libraries and the collected tests consist of out of every later search for garbage."""
    gc.collect()
    gc.freeze()


def _found_once(find: Callable[..., float], folder: Path) -> Callable[..., float]:
    """A function of numbers whose values the processes of this run share in a folder."""
    folder.mkdir(exist_ok=True)

    @cache
    def found(*arguments: object) -> float:
        file = folder / hashlib.sha256(repr(arguments).encode()).hexdigest()
        if not file.exists():
            replace_file(file, repr(find(*arguments)).encode())
        return float(file.read_text())

    return found


def _flush(file: int | IO[Any]) -> None:
    """What `os.fsync` is replaced by."""
    os.fstat(file if isinstance(file, int) else file.fileno())


def _heed_signals() -> None:
    """Undo what a shell without job control does to background processes: they ignore Ctrl-C, and
    so do their children.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )


def _own_home(config: pytest.Config) -> None:
    """A home folder for this run of the tests, which its worker processes share. Tests leave
    nothing in the user's own.
    """
    folder = tempfile.TemporaryDirectory(prefix="fedsurrogate-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    for name in [each for each in os.environ if each.startswith("XDG_")]:
        del os.environ[name]
    os.environ |= {"HOME": folder.name, "MPLCONFIGDIR": str(Path(folder.name) / "matplotlib")}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Random numbers of a test do not depend on what its fixtures drew: another test may have made
    them. What a test changes at the logs ends with it.
    """
    KEYS.begin(item.nodeid)
    loggers = [logging.getLogger(name) for name in LOGS]
    logs = [log for logger in loggers for log in (logger, *logger.handlers)]
    filters = [(log, log.filters[:]) for log in logs]
    os.umask(umask := os.umask(0o022))
    try:
        return (yield)
    finally:
        for log, before in filters:
            log.filters[:] = before
        assert os.umask(umask) == umask, "the test leaves another umask"


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Random numbers of a fixture do not depend on the test that happens to ask first, nor those of
    the test on it.
    """
    before, state = (KEYS.owner, KEYS.drawn), torch.get_rng_state()
    KEYS.begin(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param_index', 0)}")
    try:
        return (yield)
    finally:
        KEYS.owner, KEYS.drawn = before
        torch.set_rng_state(state)


@pytest.fixture(scope="session")
def samples() -> Samples:
    """The function that finds files of the sample data; who takes this fixture is marked `samples`."""
    return sample


@pytest.fixture(scope="session")
def mobilenet_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random weights for the backbone torchvision:mobilenet_v2, in 16 bits."""
    from safetensors.torch import save_file
    from torchvision.models import mobilenet_v2

    file, model = (
        tmp_path_factory.mktemp("weights") / "mobilenet_v2.safetensors",
        mobilenet_v2(weights=None),
    )
    with torch.no_grad():
        # Means and variances of a batch: without them, the features of random weights vanish.
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        model.train()(torch.randn(8, 3, 64, 64))
    state = model.state_dict()
    save_file(
        {key: value.half() if value.is_floating_point() else value for key, value in state.items()},
        file,
    )
    return file


@pytest.fixture
def system_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of privacy with keys of the operating system, as outside of tests."""
    monkeypatch.setattr(gaussian_mechanism, "os", os)


@pytest.fixture
def vectors(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """The last vector of whole numbers that each site of secure aggregation masks, with its noise, as it
    runs.
    """
    import fedsurrogate.client_app.secure_aggregation as masked

    found: dict[str, np.ndarray] = {}
    real = masked.protocol.mask

    def seen(state: Any, delivered: Any, rules: Any, values: Any) -> Any:
        found[state.site] = values
        return real(state, delivered, rules, values)

    monkeypatch.setattr(masked.protocol, "mask", seen)
    return found

"""Every test draws the same random numbers each time, whatever ran before it. Slow files are marked here.

Noise of privacy comes from the operating system. In the process of the tests its keys follow from the test that asks, so
that a bound of a few standard deviations holds always or never. `pytest --noise 1` gives other noise, which finds bounds
that are close. A test with the fixture `system_noise` has the noise of the operating system, and so have other processes.
Hypothesis tries the same examples each time.
"""

import hashlib
import os
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from common.privacy import gaussian_mechanism

TESTS = Path(__file__).parent
# Real processes, checks that repeat a run hundreds of times, full runs of every method: minutes each. `make test-all` runs
# them too.
SLOW = (
    "e2e",
    "attacks/coordinator/test_foreign_app.py",
    "attacks/ledger/test_ledger_kills.py",
    "attacks/privacy/test_sensitivity.py",
    "attacks/privacy/test_uncharged_answers.py",
    "attacks/sites/test_senders.py",
    "client_app/governance/test_ledger_processes.py",
    "client_app/methods/fedpft/test_empirical_epsilon.py",
    "client_app/processes",
    "test_defaults.py",
    "test_dependencies_alone.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests by their folder."""
    slow = [TESTS / name for name in SLOW]
    for item in items:
        if any(path == item.path or path in item.path.parents for path in slow):
            item.add_marker(pytest.mark.slow)


class Keys:
    """Keys of privacy noise, by the test or the shared fixture that draws it, and by how many were drawn there before."""

    def __init__(self) -> None:
        self.salt, self.owner, self.drawn = 0, "", 0

    def begin(self, owner: str) -> None:
        """Draw for a test or a fixture from now on, and begin the other random numbers again."""
        self.owner, self.drawn = owner, 0
        torch.manual_seed(0)

    def urandom(self, count: int) -> bytes:
        """What `os.urandom` is replaced by."""
        self.drawn += 1
        return hashlib.shake_256(f"{self.salt} {self.owner} {self.drawn}".encode()).digest(count)


KEYS = Keys()


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option for other noise."""
    parser.addoption("--noise", type=int, default=0, help="Number of the noise of privacy that tests draw.")


def pytest_configure(config: pytest.Config) -> None:
    """Replace the operating system's random bytes where privacy noise is drawn, and only there."""
    settings.register_profile("the same", derandomize=True)
    settings.load_profile("the same")
    KEYS.salt = config.getoption("--noise", 0)
    gaussian_mechanism.os = SimpleNamespace(urandom=KEYS.urandom)  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Random numbers of a test do not depend on what its fixtures drew: another test may have made them."""
    KEYS.begin(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Random numbers of a fixture do not depend on the test that happens to ask first, nor those of the test on it."""
    before, state = (KEYS.owner, KEYS.drawn), torch.get_rng_state()
    KEYS.begin(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param_index', 0)}")
    try:
        return (yield)
    finally:
        KEYS.owner, KEYS.drawn = before
        torch.set_rng_state(state)


@pytest.fixture
def system_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of privacy with keys of the operating system, as outside of tests."""
    monkeypatch.setattr(gaussian_mechanism, "os", os)


@pytest.fixture
def vectors(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """The last vector of whole numbers that each site of a secure sum masks, with its noise, as it runs."""
    import client_app.secure_sum.masked as masked

    found: dict[str, np.ndarray] = {}
    real = masked.mask

    def seen(state: Any, delivered: Any, rules: Any, values: Any) -> Any:
        found[state.site] = values
        return real(state, delivered, rules, values)

    monkeypatch.setattr(masked, "mask", seen)
    return found

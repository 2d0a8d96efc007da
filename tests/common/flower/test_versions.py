"""Which version of Flower is used, and what every version provides."""

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError

import flwr
import pytest

import fedsurrogate.common.flower
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower import VERSIONS, flower


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Plays an installed version."""
    flower.cache_clear()
    yield lambda number: monkeypatch.setattr(
        fedsurrogate.common.flower, "version", lambda package: number
    )
    flower.cache_clear()


def test_the_installed_flower_is_supported() -> None:
    assert ".".join(flwr.__version__.split(".")[:2]) in VERSIONS
    assert flower() is flower()


@pytest.mark.parametrize("last", ["0", "9", "0.dev1"])
@pytest.mark.parametrize("number", VERSIONS)
def test_the_last_number_does_not_matter(
    installed: Callable[[str], None], number: str, last: str
) -> None:
    installed(f"{number}.{last}")
    assert type(flower()).__name__ == f"Flower{number.replace('.', '')}"


@pytest.mark.parametrize(
    "number", ["1.3.4", "1.33.0", "1.35.0", "1.340.0", "1.41.9", "1.43.0", "2.42.0"]
)
def test_another_version_is_named_with_those_that_work(
    installed: Callable[[str], None], number: str
) -> None:
    installed(number)
    with pytest.raises(
        ConfigError, match=rf"flwr {number} is installed.* works with flwr 1\.34\.x, 1\.42\.x"
    ):
        flower()


def test_a_missing_flower_is_named(
    monkeypatch: pytest.MonkeyPatch, installed: Callable[[str], None]
) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(fedsurrogate.common.flower, "version", missing)
    with pytest.raises(ConfigError, match="flwr is not installed"):
        flower()

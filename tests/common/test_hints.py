"""What a refused setting says leads to what was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedsurrogate as fs
from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import parse_overrides

X, Y = [[0.1, 0.2], [0.3, 0.4], [0.9, 0.8], [0.7, 0.9]], [0, 0, 1, 1]


def test_a_budget_of_a_preset_can_be_taken_away() -> None:
    assert parse_overrides(["epsilon=0 delta=0"]) == {"epsilon": 0, "delta": 0}


@pytest.mark.parametrize(
    ("method", "key", "hint"),
    [
        ("fedavg", "rounds", r"'fedavg\.rounds'\?"),
        ("dp-fedavg", "rounds", r"rounds'"),
        ("fedpft", "rank", r"'fedpft\.rank'\?"),
        ("fedpft", "epochs", r"'head\.epochs'"),
        ("fedpft", "epsilom", r"'epsilon'\?"),
        ("fedpft", "power-transform", r"'features\.power-transform'"),
    ],
)
def test_an_unknown_key_leads_to_the_section_that_has_it(method: str, key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; did you mean .*{hint}"):
        parse_run({"method": method, key: 5})


@pytest.mark.parametrize("call", [fs.fit, fs.simulate, fs.sweep])
def test_an_epsilon_of_zero_is_refused_in_python(call: Any) -> None:
    given = (X, Y) if call is fs.fit else ([(X, Y)],)
    with pytest.raises(ConfigError, match=r"epsilon = 0 would be no differential privacy"):
        call(*given, epsilon=0)


@pytest.mark.parametrize("name", ["run", "runs/a.fedsurrogate", "model.safetensors", "site.pb"])
def test_what_is_not_there_is_said_not_to_be_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(SurrogateError, match=r"does not exist; name a run folder"):
        fs.load(tmp_path / name)


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"epsilon": 8.0, "delta": 1e-5}, []),
        ({"epsilon": 1e6, "delta": 1e-5}, ["epsilon = 1e+06 is above 20"]),
        ({"epsilon": 8.0, "delta": 0.01}, ["delta = 0.01 is above 1 / 400 records"]),
        ({"epsilon": 21.0, "delta": 0.005}, ["epsilon = 21", "delta = 0.005"]),
    ],
)
def test_a_budget_that_promises_little_is_warned_of(
    budget: dict[str, float], said: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    fs.fit(X * 100, Y * 100, classes=[0, 1], **budget)
    found = [str(each.message) for each in recwarn]
    assert len(found) == len(said)
    assert all(start in each for start, each in zip(said, found, strict=True))

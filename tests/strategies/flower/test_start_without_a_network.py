"""Flower's `start` around a run that is pretended: what it takes, in which order it asks, and what its
result holds; and the reasons of sites that do not reply.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.run import parse_run
from fedsurrogate.strategies import DPCVAE, FedLAP, FedPFT
from fedsurrogate.strategies.flower import (
    FlowerStrategy,
    arrays_of,
    no_reply,
    settings_of,
)
from tests.strategies.base.test_courses_of_a_run import Kept

GRID: Any = object()


def arrays(value: float) -> ArrayRecord:
    return arrays_of({"a": torch.full((2,), value)})


class Pretended(FlowerStrategy):
    """Two rounds, of which the second makes no model; `calls` is what was asked, in order."""

    def __init__(self, run: Any, tested: int = 0) -> None:
        super().__init__()
        self.config, self.recorder = run, Kept()
        self.outcome: Any = SimpleNamespace(
            model=None,
            accuracy={"model": 0.5} if tested else {},
            sites={at: SimpleNamespace(tested=tested * at, correct=at) for at in (1, 2)},
        )
        self.calls: list[Any] = []

    def run(self, grid: Any, deadline: float = 0.0) -> float | None:
        assert grid is GRID
        self.calls.append(("run", deadline, self.last_round, len(self.initial)))
        self._finish_round(1, (arrays(1), MetricRecord({"used": 3})))
        self._finish_round(2, (None, MetricRecord({"used": 2})))
        self._finish_round(3, (None, None))
        return None

    def configure_train(self, *given: Any) -> Any:
        raise NotImplementedError

    def aggregate_train(self, *given: Any) -> Any:
        raise NotImplementedError

    def _broadcast(self) -> Any:
        return iter(["a message"])

    def _judge(self, replies: Any) -> float | None:
        self.calls.append(list(replies))
        return None


ROUNDS = {"method": "fedlap", "fedlap.rounds": 4}


@pytest.mark.parametrize(
    ("run", "more", "reason"),
    [
        (ROUNDS, {"num_rounds": 5}, "= 5: at most fedlap.rounds = 4, which the sites also use; set fedlap.rounds$"),
        (ROUNDS, {"num_rounds": 4}, ""), (ROUNDS, {}, ""), (ROUNDS, {"num_rounds": 1}, ""),
        (ROUNDS, {"num_rounds": 0}, "num_rounds = 0: must be at least 1$"), ({}, {"num_rounds": 99}, ""),
        ({"method": "fedsgd", "fedavg.rounds": 3}, {"num_rounds": 4}, "at most fedavg.rounds = 3,"),
        (ROUNDS, {"timeout": 0.0}, "timeout = 0: must be above 0 seconds"), (ROUNDS, {"timeout": -1.5}, "timeout = -1.5:"),
        (ROUNDS, {"timeout": 1e-3}, ""),
        (ROUNDS, {"train_config": ConfigRecord({"b": 1, "a": 2})}, "^train_config has a, b: sites"),
        (ROUNDS, {"evaluate_config": ConfigRecord({"b": 1})}, "^evaluate_config has b: sites"),
        (ROUNDS | {"resume": "runs/x"}, {"initial_arrays": arrays(1)}, "initial_arrays and resume = 'runs/x', whose"),
        (ROUNDS | {"resume": "runs/x"}, {"initial_arrays": ArrayRecord()}, ""), (ROUNDS | {"resume": "runs/x"}, {}, ""),
    ],
)  # fmt: skip
def test_arguments_are_checked_before_anything_is_asked(
    run: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    strategy = Pretended(parse_run(run))
    if reason:
        with pytest.raises(ConfigError, match=reason):
            strategy.start(GRID, **more)
        assert strategy.calls == []
        return
    strategy.start(GRID, **more)
    ((_, deadline, last, _),) = strategy.calls
    assert (deadline, last) == (more.get("timeout", 0.0), more.get("num_rounds", 0))


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (0, "the site did not answer"), (1, "the site's app could not be loaded"), (2, "the site's app failed"),
        (3, "the site's reply is not complete, as after a lost connection, or cannot be read"),
        (4, "the site's reply no longer exists"), (5, "the site's SuperNode was stopped, or its connection was lost"),
        (6, "the site did not answer"), (7, "the site did not answer"),
        (8, "the site's app was ended, or did not respond for a minute"), (9, "the site did not answer"),
    ],
)  # fmt: skip
def test_a_code_of_flower_has_its_meaning(code: int, why: str) -> None:
    assert no_reply(code, None) == f"{why} (Flower error code {code})"
    assert no_reply(code, "") == no_reply(code, " \n ") == no_reply(code, None)
    assert no_reply(code, "a\n b: c \n\n") == f"{why} (Flower error code {code}): b: c"


def test_settings_name_the_method_that_a_strategy_runs_first() -> None:
    run = parse_run(ROUNDS)
    assert settings_of(FedLAP, run) is run
    assert settings_of(DPCVAE, None).settings.method == "dpcvae"
    assert settings_of(DPCVAE, {"dpcvae.rounds": 7}).rounds == 7
    chain = {"fedpft.topology": "chain", "method": "fedpft"}
    # What the sites of a chain have sent is learned from again as from a star.
    assert settings_of(FedPFT, chain).plan.kind == "chain"
    assert settings_of(type("Own", (FedLAP,), {}), None).settings.method == "fedlap"
    reason = "method = 'fedlap' is run by FedLAP, not by FedPFT$"
    for given_ in (run, ROUNDS):
        with pytest.raises(ConfigError, match=reason):
            settings_of(FedPFT, given_)
    with pytest.raises(ConfigError, match=r"method = 'fedpft' is run by FedPFT, not by DPCVAE$"):
        settings_of(DPCVAE, {"method": "fedpft"})

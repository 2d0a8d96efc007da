"""Flower's `start` around a run that is pretended: what it takes, in which order it asks, and what its
result holds; and the reasons of sites that do not reply.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies import DPCVAE, FedLAP, FedPFT
from fedsurrogate.strategies.flower import (
    FlowerStrategy,
    arrays_of,
    check_no_settings,
    classifier_arrays,
    metrics_of,
    no_reply,
    settings_of,
    worker_failure,
)
from tests.strategies.base.test_courses_of_a_run import Kept

GRID: Any = object()
REMEDY = (
    "simulate fewer sites at the same time, such as `coordinator simulate --parallel 1`, or one by "
    "one with --engine local"
)


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


FACTS = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=2)
ROUNDS = {"method": "fedlap", "fedlap.rounds": 4}


@pytest.mark.parametrize("judged", [False, True])
@pytest.mark.parametrize("tested", [0, 4])
@pytest.mark.parametrize("timeout", [None, 0.5])
def test_the_result_has_the_last_arrays_and_the_metrics_of_each_round(
    judged: bool, tested: int, timeout: float | None
) -> None:
    strategy, seen = Pretended(parse_run(ROUNDS), tested), []

    def judge(number: int, given_: ArrayRecord) -> MetricRecord | None:
        seen.append((number, given_["a"].numpy().tolist()))
        return MetricRecord({"x": 1}) if number else None

    more: dict[str, Any] = {"evaluate_fn": judge} if judged else {}
    result = strategy.start(GRID, arrays(7), 2, timeout, ConfigRecord({"server-round": 1}), **more)
    assert strategy.calls == [("run", timeout or 0.0, 2, 1)]
    assert result is strategy.result
    assert result.arrays["a"].numpy().tolist() == [1, 1]
    assert dict(result.train_metrics_clientapp) == {
        1: MetricRecord({"used": 3}),
        2: MetricRecord({"used": 2}),
    }
    assert seen == ([(0, [7, 7]), (1, [1, 1])] if judged else [])
    wanted = {1: MetricRecord({"x": 1})} if judged else {}
    assert dict(result.evaluate_metrics_serverapp) == wanted
    facts: dict[str, Any] = {"accuracy.model": 0.5, "accuracy": 0.25, "correct": 3, "tested": 12}
    assert dict(result.evaluate_metrics_clientapp) == ({2: MetricRecord(facts)} if tested else {})


def test_without_a_model_no_site_is_asked_to_judge_it() -> None:
    strategy = Pretended(parse_run(ROUNDS), 4)
    none = ConfigRecord()
    assert strategy.configure_evaluate(1, ArrayRecord(), none, GRID) == []
    strategy.outcome.model = object()
    assert strategy.configure_evaluate(1, ArrayRecord(), none, GRID) == ["a message"]
    wrong = ConfigRecord({"lr": 1})
    with pytest.raises(ConfigError, match=r"^evaluate_config has lr: sites take no settings"):
        strategy.configure_evaluate(1, ArrayRecord(), wrong, GRID)
    replies: Any = ["one", "other"]
    found = strategy.aggregate_evaluate(1, replies)
    assert found is not None
    assert (found["tested"], strategy.calls) == (12, [["one", "other"]])
    assert Pretended(parse_run(ROUNDS)).aggregate_evaluate(1, replies) is None


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


@given(st.dictionaries(st.text(max_size=3), FACTS))
@settings(max_examples=30, deadline=None)
def test_metrics_are_the_facts_that_are_numbers(facts: dict[str, Any]) -> None:
    wanted = {
        name: value
        for name, value in facts.items()
        if not isinstance(value, bool) and isinstance(value, int | float)
    }
    assert dict(metrics_of(facts)) == wanted


@given(st.sets(st.sampled_from(["server-round", "a", "b" * 300, "c"])))
def test_a_message_of_flower_has_its_round_and_no_settings(names: set[str]) -> None:
    record = ConfigRecord(dict.fromkeys(names, 1))
    if extra := sorted(names - {"server-round"}):
        with pytest.raises(ConfigError) as refusal:
            check_no_settings(record, "train_config")
        shown = ", ".join(extra)[:200]
        assert str(refusal.value).startswith(f"train_config has {shown}: sites take no settings")
    else:
        check_no_settings(record, "train_config")
        check_no_settings(None, "train_config")


@pytest.mark.parametrize("clip", [None, 0.0, 2.5])
def test_arrays_of_a_head_have_its_clip_and_are_32_bit_numbers(clip: float | None) -> None:
    header = Header("fedpft", "r", "coordinator", "f", ("a", "b"))
    head = Head(header, torch.ones(2, 3).double().T.contiguous().T, torch.zeros(2).double(), clip)
    found = classifier_arrays(head)
    assert set(found) == {"weight", "bias"} | ({"clip"} if clip is not None else set())
    assert {array.numpy().dtype for array in found.values()} == {np.dtype(np.float32)}
    assert {name: tuple(array.shape) for name, array in found.items()} == {
        "weight": (2, 3),
        "bias": (2,),
        **({"clip": ()} if clip is not None else {}),
    }
    if clip is not None:
        assert found["clip"].numpy() == clip
    assert isinstance(found["weight"], Array)


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


def test_the_last_line_of_a_failure_is_shown_to_500_characters_and_lost_memory_by_its_remedy() -> (
    None
):
    assert worker_failure("why", None) == worker_failure("why", "") == "why"
    assert worker_failure("why", "x\n" + 499 * "a") == "why: " + 499 * "a"
    assert worker_failure("why", "x\n" + 900 * "a") == "why: " + 500 * "a"
    killed = (
        f"the process of this simulated site was killed, most likely for lack of memory; {REMEDY}"
    )
    ended = (
        "the server of Ray, which runs the simulated sites, has ended: killed for lack of memory, or "
        f"too slow on a busy machine; {REMEDY}"
    )
    for name in ("OutOfMemory", "ActorDied", "ActorUnavailable", "RayActor", "WorkerCrashed"):
        assert worker_failure("why", f"ray.{name}Error: x") == killed
    for words in ("node has crashed", "NodeDiedError", "the node died", "LocalRayletDiedError"):
        assert worker_failure("why", f"RayActorError: {words}") == ended

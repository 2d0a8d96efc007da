"""Rounds of a target around steps that are pretended: what is checked, how sites weigh, what is kept, and
what secure aggregation passes on.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.pooling import class_means
from fedsurrogate.strategies.pooling.site_weights import Total, shares_kept
from fedsurrogate.strategies.targets import residual_steps as in_rounds
from fedsurrogate.strategies.targets.residual_steps import TargetRounds, absorb_total
from fedsurrogate.strategies.targets.sums import sum_rounding
from tests.strategies.base.test_courses_of_a_run import Kept

TIME: dict[str, Any] = {"task": "survival", "horizon": 3.0, "bins": 4, "time-head": "residuals"}
PRIVATE = {"epsilon": 4.0, "delta": 1e-5}
ROWS = ("r1", "r2")


class Steps:
    """A course that records what it is given; only some rounds count records."""

    def __init__(self, counts: list[list[float] | None]) -> None:
        self.rows = counts
        self.seen: list[Any] = []

    def check(self, reply: Parameters) -> None:
        self.seen.append(("check", reply.header.site))
        if reply.records == 13:
            raise SurrogateError("no records have these")

    def counts(self, reply: Parameters) -> list[float] | None:
        return self.rows[int(reply.header.site[1:])]

    def pooled(self, replies: list[Parameters], shares: list[float]) -> Any:
        return [each.header.site for each in replies], shares

    def absorb(self, training: Training, *sums: Any) -> dict[str, object]:
        self.seen.append(("absorb", training.round, sums))
        if not self.rows:
            raise SurrogateError("nothing there")
        return {"fact": 3}

    def head(self, training: Training) -> Any:
        return "head", training.round


def begun(
    monkeypatch: pytest.MonkeyPatch, steps: Steps, **more: Any
) -> tuple[TargetRounds, Training]:
    run = parse_run(TIME | more)
    monkeypatch.setattr(in_rounds, "ResidualSteps", lambda given_: steps if given_ is run else None)
    return TargetRounds(run, Kept()), Training(run, ROWS, "f", 4, {}, {"kept": torch.ones(1)})


def reply(site: int, records: int = 5, rows: tuple[str, ...] = ROWS) -> Parameters:
    return Parameters(Header("fedpft", "r", f"s{site}", "f", rows), 1, {}, records)


ROW = st.lists(st.integers(0, 900).map(float), min_size=1, max_size=3)
COUNTS = st.lists(st.none() | ROW, min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(COUNTS, st.booleans(), st.sampled_from([0.0, 1.0, 3.0]))
def test_sites_weigh_by_the_records_of_this_round_or_of_an_earlier_one(
    counts: list[list[float] | None], private: bool, most: float
) -> None:
    counts = [row and (row + [0.0] * 3)[:3] for row in counts]
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(counts)
        strategy, training = begun(
            patch, steps, **{"max-share": most} | (PRIVATE if private else {})
        )
        training.memory = {**training.memory, "share.s1": torch.tensor([0.25])}
        replies = [reply(at) for at in range(len(counts))]
        if None in counts:
            shares = [0.25 if at == 1 else 1.0 for at in range(len(counts))]
        else:
            shares = shares_kept(counts, most, 2.0 if private else 1.0)  # type: ignore[arg-type]
        defended = strategy.defend(training, replies)
        assert defended.kept == replies
        assert defended.capped == {f"s{at}": each for at, each in enumerate(shares) if each < 1}
        assert strategy.absorb(training, replies) == {"fact": 3}
        names = [f"s{at}" for at in range(len(counts))]
        assert steps.seen == [("absorb", 0, (names, shares))]
        kept = {name: float(each) for name, each in training.memory.items() if "share" in name}
        assert kept == {"share.s1": 0.25} | {f"share.s{at}": own for at, own in enumerate(shares)}
        assert "kept" in training.memory
        assert (training.round, training.confirmed) == (1, dict.fromkeys(names, 1))
        assert strategy.classifier(training) == ("head", 1)
        assert strategy._accuracy(None) is None  # type: ignore[arg-type]


def test_a_reply_has_the_rows_of_the_target_and_sums_of_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps([[1.0]])
    strategy, training = begun(monkeypatch, steps)
    strategy.check(reply(0), training)
    assert steps.seen == [("check", "s0")]
    for rows in (ROWS[::-1], ROWS[:1], (*ROWS, "r3")):
        with pytest.raises(SurrogateError, match="sums of other rows than the run's"):
            strategy.check(reply(0, rows=rows), training)
    with pytest.raises(SurrogateError, match="no records have these"):
        strategy.check(reply(0, 13), training)


def test_sums_are_read_up_to_the_size_of_their_round(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, training = begun(monkeypatch, Steps([[1.0]]))
    first = strategy.shapes(training)
    training.round = 1
    later = strategy.shapes(training)
    assert first != later
    messages = training.config.plan.messages
    sizes = messages.sizes(2, 4, 1)
    assert first == {each.name: each.sizes(sizes) for each in messages.schema(True)}
    assert later == {each.name: each.sizes(sizes) for each in messages.schema(False)}
    for number, shapes in ((0, first), (1, later)):
        training.round = number
        most = sum(torch.Size(shape).numel() for shape in shapes.values())
        for more in (0, 1):
            sent = Parameters(reply(0).header, number + 1, {"a": torch.ones(most + more)}, 5)
            if more:
                with pytest.raises(SurrogateError):
                    strategy.parse(pack_parameters(sent), training)
            else:
                assert strategy.parse(pack_parameters(sent), training).tensors["a"].numel() == most


def test_a_run_that_begins_again_looks_for_a_charged_round(monkeypatch: pytest.MonkeyPatch) -> None:
    run = parse_run(TIME | PRIVATE)
    training = Training(run, ROWS, "f", 4, {}, {})
    monkeypatch.setattr(
        class_means.RoundsOfParameters, "_begin", lambda self, grid, deadline: training
    )
    strategy = TargetRounds(run, Kept())
    grid: Any = object()
    assert strategy._begin(grid, 1.0) is training
    training.asked = 1
    with pytest.raises(RunError, match="but is charged"):
        strategy._begin(grid, 1.0)


@pytest.mark.parametrize("noisy", [False, True])
def test_secure_aggregation_passes_on_its_noise_or_its_rounding(
    monkeypatch: pytest.MonkeyPatch, noisy: bool
) -> None:
    steps = Steps([[1.0]])
    _, training = begun(monkeypatch, steps)
    sigmas = {"squares": 2.0} if noisy else {}
    tensors = {"squares": torch.ones(3), "code": torch.ones(2)}
    total = Total(training.header(), tensors, sigmas, usual_rounding={"squares": 0.5, "code": 7.0})
    absorb_total(total, training, ["a", "b"])
    ((_, number, (given, noise, rounding)),) = steps.seen
    assert (number, training.round, training.confirmed) == (0, 1, {"a": 1, "b": 1})
    assert {name: each.dtype for name, each in given.items()} == dict.fromkeys(
        tensors, torch.float64
    )
    assert noise == sigmas
    assert rounding == (0.0 if noisy else sum_rounding(0.5, 4)) == (0.0 if noisy else 2.0)
    without = SimpleNamespace(tensors=tensors, sigmas={}, usual_rounding={})
    absorb_total(without, training, ["a"])  # type: ignore[arg-type]
    assert steps.seen[-1][2][2] == 0.0
    steps.rows = []
    with pytest.raises(
        RunError, match="the secure aggregation has nothing there, so some site has added"
    ):
        absorb_total(total, training, ["a"])
    assert training.round == 2

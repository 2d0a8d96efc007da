"""Every strategy with Flower's interface: the result of `start`, and equal learning in Flower's own
loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result, Strategy
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.methods import FEDPFT_CHAIN, METHODS
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings import FedPFTSettings, Settings
from fedsurrogate.strategies import DPCVAE, Federation, FedLAP, FedPFT, strategy_of
from fedsurrogate.strategies.flower import arrays_of, tensors_like
from tests.grid import FAST, FIRST_NODE, Fault, InProcessGrid, sites

FEW: dict[str, Any] = {
    **FAST,
    "alpha": 1.0,
    "fedlap.rounds": 2,
    "fedlap.model": "linear",
    "fedlap.image-steps": 5,
    "fedlap.server-steps": 5,
    "dpcvae.rounds": 2,
    "dpcvae.local-epochs": 1,
    "dpcvae.synthetic": 100,
    "fedavg.rounds": 2,
    "fedavg.local-epochs": 1,
}
# Names of the arrays of a Result, by method.
NAMES = {
    "fedpft": {"weight", "bias"},
    "fedlap": {"weight", "bias"},
    "dpcvae": {"means", "counts", "linear.weight"},
}
# One method per strategy, and the chain.
ONE_EACH: dict[str, dict[str, Any]] = {
    name: {"method": name}
    for name in ("fedpft", "average", "local", "kd", "fedavg", "fedlap", "dpcvae")
} | {"chain": {"method": "fedpft", "fedpft.topology": "chain"}}


class FlowerGrid(InProcessGrid):
    """A grid with the method that Flower's own loop calls."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


@pytest.fixture(autouse=True)
def _no_idling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsurrogate.strategies.base.collection.POLL_SECONDS", 0.01)


def settings_of(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    return FEW | {"output-dir": str(tmp_path / "runs")} | settings


def grid_for(
    tmp_path: Path, settings: dict[str, Any], count: int = 3, faults: dict[int, Fault] | None = None
) -> FlowerGrid:
    """Sites with the run-config that Flower gives them."""
    nodes = sites(count, state_dir=str(tmp_path / "state"), cache_dir=str(tmp_path / "cache"))
    grid = FlowerGrid(nodes, faults)
    grid.run_config = dict(settings)
    return grid


def numbers(result: Result) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in result.arrays.items()}


def test_strategies_of_the_registry_are_flower_strategies() -> None:
    for spec in (*METHODS.values(), FEDPFT_CHAIN):
        own = FedPFTSettings(topology="chain" if spec is FEDPFT_CHAIN else "star")
        plan = spec.plan(spec.fill(Settings(method=spec.name, fedpft=own)))
        assert issubclass(load(plan.combination.strategy), Strategy), spec.name
    assert {FedPFT.__name__, FedLAP.__name__, DPCVAE.__name__} == {"FedPFT", "FedLAP", "DPCVAE"}


@pytest.mark.parametrize(("kind", "rounds"), [(FedPFT, 1), (FedLAP, 2), (DPCVAE, 2)])
def test_the_result_holds_the_model_and_the_metrics_of_every_round(
    tmp_path: Path, kind: Any, rounds: int
) -> None:
    method = kind.__name__.lower()
    settings = settings_of(tmp_path, method=method)
    strategy, seen = kind(settings), []

    def judge(number: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append((number, len(arrays)))
        return MetricRecord({"arrays": len(arrays)})

    result = strategy.start(grid_for(tmp_path, settings), ArrayRecord(), evaluate_fn=judge)
    assert isinstance(result, Result)
    found = numbers(result)
    assert set(found) >= NAMES[method], sorted(found)
    assert all(np.isfinite(array).all() for array in found.values())
    assert list(result.train_metrics_clientapp) == list(range(1, rounds + 1))
    for metrics in result.train_metrics_clientapp.values():
        assert metrics["used"] == 3
        assert float(str(metrics["bytes_up"])) > 0
    (last,) = result.evaluate_metrics_clientapp
    assert last == rounds
    assert 0 <= float(str(result.evaluate_metrics_clientapp[last]["accuracy"])) <= 1
    assert seen == [(0, 0)] + [(number, len(found)) for number in range(1, rounds + 1)]
    assert list(result.evaluate_metrics_serverapp) == list(range(rounds + 1))
    assert not (tmp_path / "runs").exists(), "a run folder that nobody has asked for"


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_EACH)
def test_flowers_own_loop_learns_what_start_learns(tmp_path: Path, name: str) -> None:
    settings = settings_of(tmp_path, **ONE_EACH[name])
    config = parse_run(settings)
    ours = strategy_of(config.plan)(settings).start(grid_for(tmp_path, settings), ArrayRecord())
    theirs = Strategy.start(
        strategy_of(config.plan)(settings),
        grid_for(tmp_path, settings),
        ArrayRecord(),
        num_rounds=3,
    )
    assert set(numbers(ours)) == set(numbers(theirs))
    for key, array in numbers(ours).items():
        np.testing.assert_array_equal(array, numbers(theirs)[key])
    assert bool(ours.arrays) == (name != "local")
    assert list(ours.train_metrics_clientapp) == list(theirs.train_metrics_clientapp)
    last = max(theirs.evaluate_metrics_clientapp)
    (found,) = ours.evaluate_metrics_clientapp.values()
    assert found["accuracy"] == theirs.evaluate_metrics_clientapp[last]["accuracy"]


@pytest.mark.parametrize("kind", [FedPFT, FedLAP, DPCVAE])
def test_configure_train_asks_each_connected_node_once(tmp_path: Path, kind: Any) -> None:
    settings = settings_of(tmp_path, method=kind.__name__.lower())
    strategy, grid = kind(settings), grid_for(tmp_path, settings)
    messages = list(
        strategy.configure_train(1, ArrayRecord(), ConfigRecord({"server-round": 1}), grid)
    )
    assert sorted(m.metadata.dst_node_id for m in messages) == [
        FIRST_NODE + index for index in range(3)
    ]
    assert {m.metadata.message_type for m in messages} == {"train"}
    assert grid.asked("train") == [], "Flower pushes what configure_train returns"


@pytest.mark.parametrize("kind", [FedPFT, FedLAP, DPCVAE])
def test_a_site_that_fails_does_not_stop_start(tmp_path: Path, kind: Any) -> None:
    settings = settings_of(tmp_path, method=kind.__name__.lower())
    strategy = kind(settings)
    result = strategy.start(
        grid_for(tmp_path, settings, faults={1: Fault(crash=RuntimeError("broken"))}), ArrayRecord()
    )
    assert all(metrics["used"] == 2 for metrics in result.train_metrics_clientapp.values())
    assert result.arrays
    assert strategy.outcome.sites[FIRST_NODE + 1].fate == "rejected"


def test_a_site_that_is_silent_is_waited_for_until_the_timeout(tmp_path: Path) -> None:
    settings, began = settings_of(tmp_path), time.monotonic()
    grid = grid_for(tmp_path, settings, faults={1: Fault(offline=True)})
    strategy = FedPFT(settings)
    assert strategy.start(grid, timeout=2.0).train_metrics_clientapp[1]["used"] == 2
    assert time.monotonic() - began >= 2.0
    assert strategy.outcome.sites[FIRST_NODE + 1].fate == "dropped"


def test_training_begins_with_the_initial_arrays_and_ends_after_num_rounds(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, method="fedavg")
    kind = strategy_of(parse_run(settings).plan)
    first = kind(settings).start(grid_for(tmp_path, settings), num_rounds=1)
    again = kind(settings).start(grid_for(tmp_path, settings), first.arrays, num_rounds=1)
    fresh = kind(settings).start(grid_for(tmp_path, settings), num_rounds=1)
    weight = "weight"
    assert list(first.train_metrics_clientapp) == [1]
    np.testing.assert_array_equal(numbers(first)[weight], numbers(fresh)[weight])
    assert not np.array_equal(numbers(first)[weight], numbers(again)[weight])


@hypothesis_settings(max_examples=30)
@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), min_size=1),
    st.sampled_from(["", "nan", "inf", "-inf", "shape", "less", "more"]),
)
def test_arrays_of_a_model_are_taken_only_with_its_shapes_and_finite_numbers(
    shapes: dict[str, int], fault: str
) -> None:
    model = {name: torch.randn(size, 2) for name, size in shapes.items()}
    given_ = {name: tensor.clone() for name, tensor in model.items()}
    last = sorted(given_)[-1]
    if fault in ("nan", "inf", "-inf"):
        given_[last] = torch.cat([given_[last], torch.full((1, 2), float(fault))])
        model[last] = torch.zeros_like(given_[last])
    elif fault == "shape":
        given_[last] = given_[last].T.reshape(-1)
    elif fault == "more":
        given_["d"] = torch.zeros(1)
    elif fault == "less":
        model["d"] = torch.zeros(1)
    if fault:
        with pytest.raises(ConfigError, match="arrays with"):
            tensors_like(model, arrays_of(given_))
    else:
        found = tensors_like(model, arrays_of(given_))
        assert all(torch.equal(found[name], model[name]) for name in model | found)


def test_no_further_round_is_asked_for_than_the_budget_affords(tmp_path: Path) -> None:
    """Flower's loop may continue, but the strategy sends no more requests."""
    private = {"epsilon": 8.0, "delta": 1e-5, "fedavg.sample-rate": 1.0, "fedavg.batch-size": 512}
    settings = settings_of(tmp_path, method="dp-fedavg", **private)
    strategy: Federation = strategy_of(parse_run(settings).plan)(settings)
    grid = grid_for(tmp_path, settings)
    result = Strategy.start(strategy, grid, ArrayRecord(), num_rounds=4)
    assert len(grid.asked("train")) == 2 * 3
    assert list(result.train_metrics_clientapp) == [1, 2]

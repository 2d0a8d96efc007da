"""Rounds of secure aggregation with distributed noise whose coordinator stops at any message: they
continue, and all
of it costs at most the budget of one run.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedsurrogate.client_app.governance.ledger import Ledger, dataset_id
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.privacy.accounting import epsilon_spent
from fedsurrogate.common.run import parse_run
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedpft.logistic_rounds import LogisticRounds
from tests.grid import InProcessGrid, NodeConfig, events_of, metrics_of, run_federation, run_folders
from tests.strategies.base.test_courses_of_a_run import Kept

ROUNDS = 4
RUNS: dict[str, dict[str, Any]] = {
    "logistic": {},
    "dp-fedavg": {"method": "dp-fedavg", "fedavg.rounds": ROUNDS},
    "noise at each site": {
        "method": "dp-fedavg",
        "fedavg.rounds": ROUNDS,
        # Without a sample, composition is exact and takes no time.
        "fedavg.sample-rate": 1.0,
        "secure-aggregation": False,
    },
}
SECURE: dict[str, Any] = {
    "classes": "a,b,c",
    "secure-aggregation": True,
    "epsilon": 4.0,
    "delta": 1e-5,
}


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fedsurrogate.common.methods.logistic_rounds.STEPS", ((float("inf"), ROUNDS - 1),)
    )


class PowerError(Exception):
    """The coordinator's machine has no power."""


class Stopping(InProcessGrid):
    """A grid whose coordinator stops when it sends message number `after`."""

    after = 0

    def _deliver(self, message: Message) -> None:
        self.after -= 1
        if self.after == 0:
            raise PowerError
        super()._deliver(message)


def hospitals(home: Path) -> list[NodeConfig]:
    """Four sites with data of their own, whose total budget is that of one run."""
    rules = "mechanisms = ['secure-aggregation', 'dp-sgd']\nepsilon-per-run = 4.0\nepsilon-total = 4.0\n"
    (home / "policy.toml").write_text(rules)
    nodes: list[NodeConfig] = []
    for k in range(4):
        generator = torch.Generator().manual_seed(k)
        y = torch.arange(60) % 3
        x = torch.randn(60, 64, generator=generator) + 3 * torch.eye(3, 64)[y]
        for part in ("train", "test"):
            file = home / f"data-{k}" / f"own-{part}.safetensors"
            file.parent.mkdir(exist_ok=True)
            save_file({"x": x, "y": y}, file, {"classes": "a,b,c"})
        nodes.append(
            {
                "site": f"s{k}",
                "data": "safetensors",
                "data-dir": str(home / f"data-{k}"),
                "dataset": "own",
                "state-dir": str(home / f"state-{k}"),
                "policy": str(home / "policy.toml"),
            }
        )
    return nodes


def charged(node: NodeConfig) -> int:
    """The number of releases in a site's ledger."""
    place = Path(str(node["state-dir"])) / "ledgers"
    ledger = Ledger(place, dataset_id(str(node["data"]), str(node["data-dir"])))
    return sum(entry["kind"] == "release" for entry in ledger.entries())


@pytest.mark.parametrize("name", RUNS)
@given(after=st.integers(1, 24) | st.integers(25, 95), again=st.integers(0, 95))
@settings(max_examples=2, deadline=None, phases=(Phase.explicit, Phase.generate))
# In a round that some sites were charged for, of every run.
@example(after=10, again=0)
def test_a_run_that_stops_at_any_message_continues_within_its_budget(
    name: str, after: int, again: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        chosen, nodes, last, stops = SECURE | RUNS[name], hospitals(home), "", 0
        for number, at in enumerate((after, again, 0)):
            grid = Stopping(nodes, run_id=77 + number)
            grid.after = at
            resumed = {"resume": last} if last else {}
            run = None
            with suppress(PowerError):
                run = run_federation(home, grid, **chosen, **resumed)
            newest = max(run_folders(home / "runs"), key=lambda each: each.stat().st_mtime_ns)
            if run is not None:
                break
            stops += 1
            if (newest / "checkpoint.safetensors").is_file():
                last = str(newest)
        assert run is not None
        rounds = metrics_of(run)["rounds"]
        done = len(rounds)
        assert [each["round"] for each in rounds] == list(range(1, done + 1))
        assert ROUNDS - stops <= done <= ROUNDS
        mechanism = parse_run(chosen).mechanism
        assert mechanism is not None
        assert rounds[-1]["epsilon"] <= 4.0 + 1e-9
        if any(each["event"] == "round" for each in events_of(run)):
            paid = mechanism.epsilon_after(max(map(charged, nodes)))
            assert paid <= rounds[-1]["epsilon"] + 1e-9
        for node in nodes:
            assert done <= charged(node) <= ROUNDS
        assert [each["bytes_up"] for each in rounds] == sorted(each["bytes_up"] for each in rounds)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_over_when_it_is_continued_says_what_its_rounds_have_cost(
    name: str, tmp_path: Path
) -> None:
    chosen, nodes = SECURE | RUNS[name], hospitals(tmp_path)
    first = run_federation(tmp_path, InProcessGrid(nodes), **chosen)
    grid = InProcessGrid(nodes, run_id=78)
    again = run_federation(tmp_path, grid, **chosen, resume=str(first))
    before, after = (metrics_of(run)["privacy"] for run in (first, again))
    assert after["epsilon"] == before["epsilon"] == pytest.approx(4.0)
    for same in ("mechanism", "delta", "covers"):
        assert after[same] == before[same]
    assert "record" in after["relation"]
    assert list(after["per_site"]) == ["sites of earlier rounds"]


@pytest.mark.parametrize("steps", [3, 10, 15, 25, 40])
def test_a_first_round_is_paid_twice_only_where_the_budget_allows_it(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many steps each costs less than the first round."""
    monkeypatch.setattr(
        "fedsurrogate.common.methods.logistic_rounds.STEPS", ((float("inf"), steps),)
    )
    run = parse_run(SECURE | {"resume": str(tmp_path)})
    training = Training.begin(run, run.settings.classes, "f" * 16, 64)
    training.asked = 1
    (tmp_path / "checkpoint.safetensors").write_bytes(training.save())
    assert run.mechanism is not None
    first, later = run.mechanism.event(1), run.mechanism.event(2)
    twice = (first, first, replace(later, count=run.rounds - 2))
    strategy = LogisticRounds(run, Kept())
    if epsilon_spent(twice, 1e-5) <= 4.0:
        strategy._resume()
        assert not strategy._over()
    else:
        with pytest.raises(RunError, match="does not pay for it twice"):
            strategy._resume()
    assert (epsilon_spent(twice, 1e-5) <= 4.0) == (steps < 25)


@pytest.mark.parametrize(("last", "ends"), [(0, 3), (2, 2), (3, 3), (4, 3)])
def test_fewer_rounds_than_planned_are_all_done_after_one_that_did_not_end(
    last: int, ends: int, tmp_path: Path
) -> None:
    """As where Flower's `num_rounds` asks for them: the budget still has one for each."""
    run = parse_run(SECURE | {"resume": str(tmp_path)})
    training = Training.begin(run, run.settings.classes, "f" * 16, 64)
    training.round, training.asked, training.history = 1, 2, [{"bytes_up": 3}]
    training.memory = {"counted": torch.tensor([100.0, 3.0])}
    (tmp_path / "checkpoint.safetensors").write_bytes(training.save())
    strategy = LogisticRounds(run, Kept())
    strategy.last_round = last
    strategy._resume()
    assert strategy._training is not None
    assert not strategy._over()
    strategy._training.round = ends
    assert strategy._over()
    strategy._training.round = ends - 1
    assert not strategy._over()

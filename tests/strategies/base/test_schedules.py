"""Schedules over the rounds of a run: they end with the last round that the budget pays for."""

from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings import DPCVAESettings, FedLAPSettings
from tests.grid import run_federation, sites

FEW = {"fedlap.image-steps": 1, "fedlap.loops": 1, "fedlap.server-steps": 1, "head.min-steps": 2}
CLASSES = ",".join(map(str, range(10)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "section"), [("fedlap", FedLAPSettings), ("dpcvae", DPCVAESettings)]
)
def test_a_schedule_ends_with_the_last_round_that_the_budget_pays_for(
    method: str, section: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise is given, and pays for fewer rounds than were asked for."""
    budget = {"epsilon": 1.0, "delta": 1e-5, "classes": CLASSES, "sites": 1, "partition": "iid"}
    noise = {"fedlap": 7.0, "dpcvae": 40.0}[method]
    own = {f"{method}.rounds": 60, f"{method}.noise-multiplier": noise, f"{method}.cosine": True}
    settings = {"method": method, **budget, **FEW, **own}
    last = parse_run(settings).rounds
    assert 1 < last < 60
    seen, rate = set(), section.rate

    def recorded(own: Any, round: int, rounds: int, *usual: float) -> float:
        seen.add((round, rounds))
        result: float = rate(own, round, rounds, *usual)
        return result

    monkeypatch.setattr(section, "rate", recorded)
    run_federation(tmp_path, sites(1), **settings)
    assert seen == {(round, last) for round in range(1 + (method == "dpcvae"), last + 1)}

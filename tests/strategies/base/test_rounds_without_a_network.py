"""Replies of a round, sites that join during a run, and rounds that only budgets stop, without a network."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.parameters import CONTROL, Parameters
from fedsurrogate.strategies.base.outcome import Outcome, Site
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedavg import Updates, with_memory
from tests.strategies.base.test_courses_of_a_run import Kept


def begun(monkeypatch: pytest.MonkeyPatch, sites: int = 3, **more: Any) -> tuple[Updates, Training]:
    strategy = Updates({"method": "fedavg", "classes": "a,b"} | more, Kept())
    training = Training.begin(strategy.config, ("a", "b"), "f" * 20, 4)
    training.round = 4
    strategy.outcome.sites = {at: Site(f"s{at}", "used", "old") for at in range(sites)}
    monkeypatch.setattr(strategy, "_node", lambda reply: reply[0])
    return strategy, training


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ([0, 2**62, 4], "RuntimeError"),
        ([0, 2**63], "TypeError"),
        ([2**40, 2**40, 0], "SafetensorError"),
    ],
)
def test_a_checkpoint_of_a_side_that_torch_cannot_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, shape: list[int], kind: str
) -> None:
    _, training = begun(monkeypatch)
    content = training.save()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert Training.load(training.config, content, "checkpoint").round == 4
    huge = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    text = json.dumps({"__metadata__": header["__metadata__"], "model.weight": huge}).encode()
    text += b" " * (-len(text) % 8)
    with pytest.raises(RunError, match=rf"^checkpoint is not a valid checkpoint \({kind}\)$"):
        Training.load(training.config, len(text).to_bytes(8, "little") + text, "checkpoint")


def test_barred_sites_do_not_count_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, training = begun(monkeypatch, 4, method="scaffold")
    strategy.outcome.sites[2].barred = True
    with_memory(training)
    ones = {name: torch.ones_like(part) for name, part in training.model.items()}
    ones |= {CONTROL + name: part for name, part in ones.items()}
    assert strategy.absorb(training, [Parameters(training.header(), 4, ones, 1)]) == {}
    for name in training.model:
        assert training.memory[CONTROL + name].flatten()[0].item() == pytest.approx(1 / 3)


def test_units_are_those_of_all_claims_that_count() -> None:
    def claimed(unit: str) -> Any:
        return SimpleNamespace(claim=SimpleNamespace(unit=unit) if unit else None)

    outcome = Outcome()
    assert outcome.units == frozenset()
    outcome.surrogates = [claimed("record"), claimed("")]
    assert outcome.units == {"record"}
    outcome.sites = {
        1: Site("a", "used", "", claim=claimed("patient").claim),
        2: Site("b", "dropped", "", claim=claimed("other").claim),
        3: Site("c", "used", ""),
    }
    assert outcome.units == {"record", "patient"}

"""Rounds of FedLAP at the coordinator: what is learned, stated, recorded and kept in each of them."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header, Synthetic
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedlap import FedLAP, gradient_of, learn
from fedsurrogate.strategies.robustness.defence import defend_synthetic
from tests.strategies.base.test_courses_of_a_run import Kept

CLASSES, D = ("a", "b"), 4


def sets_of(seed: int, number: int, radii: list[float]) -> list[Synthetic]:
    draw = torch.Generator().manual_seed(seed)
    found = []
    for site, radius in enumerate(radii):
        values = torch.randn(4, D, generator=draw) * (1 + 9 * (site == 2))
        header = Header("fedlap", "r", f"s{site}", "f", CLASSES[:: 1 - 2 * (site % 2)])
        labels = torch.tensor([0, 0, 1, 1])
        found.append(Synthetic(header, number, values, labels, radius, 10 + 30 * site))
    return found


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 999),
    st.integers(1, 4),
    st.lists(st.sampled_from([0.001, 0.3, 1.0, 4.0]), min_size=1, max_size=4),
    st.sampled_from(["min", "median"]),
)
def test_each_round_learns_states_and_keeps_what_it_should(
    seed: int, rounds: int, radii: list[float], rule: str
) -> None:
    flat: dict[str, Any] = {
        "method": "fedlap", "fedlap.model": "linear", "fedlap.rounds": rounds, "fedlap.rule": rule,
        "fedlap.images-per-class": 2, "fedlap.server-steps": 4, "fedlap.descent": "annealed",
    }  # fmt: skip
    run, recorder = parse_run(flat), Kept()
    strategy = FedLAP(run, recorder)
    training = Training.begin(run, CLASSES, "f", D)
    for number in range(1, rounds + 1):
        sets = sets_of(seed + number, number, radii)
        other = Training.load(run, training.save(), "copy")
        gradients = [
            gradient_of(training.model, D, CLASSES, each, run.settings.fedlap) for each in sets
        ]
        ours = strategy.defend(training, sets)
        theirs = defend_synthetic(sets, gradients, run.defence, run.settings.max_share)
        assert (ours.capped, ours.suspects, ours.bounded) == (
            theirs.capped,
            theirs.suspects,
            theirs.bounded,
        )
        wanted = learn(other, sets)
        recorder.events.clear()
        recorder.surrogates.clear()
        facts = strategy.absorb(training, sets)
        assert facts == wanted | {"radii": {f"s{site}": each for site, each in enumerate(radii)}}
        assert training.round == number
        assert training.confirmed == {f"s{site}": number for site in range(len(radii))}
        for name, tensor in other.model.items():
            torch.testing.assert_close(training.model[name], tensor)
        floor = statistics.median(radii) / 10
        raised = [f"s{site}" for site, radius in enumerate(radii) if radius < floor]
        assert recorder.events == (
            [{"event": "radius-raised", "sites": raised, "round": number}] if raised else []
        )
        due = ["first"] * (number == 1) + ["middle"] * (number == (rounds + 1) // 2) + ["last"]
        names = [f"file synthetic-{name}.safetensors" for name in due]
        assert list(recorder.surrogates) == names
        for content in recorder.surrogates.values():
            tensors = load(content)
            assert len(tensors) == 2 * len(sets)
            for each in sets:
                torch.testing.assert_close(tensors[each.header.site], each.values.half())
                assert torch.equal(tensors[f"{each.header.site} labels"], each.labels)
            head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            assert head["__metadata__"] == {
                "round": str(number),
                "sites": json.dumps({each.header.site: each.header.classes for each in sets}),
                "model": "linear",
            }


@pytest.mark.parametrize("sites", [2, 3])
def test_sets_are_read_as_they_were_sent(sites: int) -> None:
    from fedsurrogate.common.wire.model_proto import pack_synthetic

    run = parse_run({"method": "fedlap", "fedlap.model": "linear", "fedlap.images-per-class": 2})
    strategy, training = FedLAP(run, Kept()), Training.begin(run, CLASSES, "f", D)
    for each in sets_of(0, 1, [1.0] * sites):
        read = strategy.parse(pack_synthetic(each), training)
        assert (read.header, read.round, read.records) == (each.header, 1, each.records)
        assert strategy.records(read) == each.records


def test_records_that_spoil_the_sum_of_gradients_are_refused() -> None:
    run = parse_run({"method": "fedlap", "fedlap.model": "linear", "fedlap.images-per-class": 2})
    strategy, training = FedLAP(run, Kept()), Training.begin(run, CLASSES, "f", D)
    (sent,) = sets_of(0, 1, [1.0])
    strategy.check(sent, training)
    with pytest.raises(SurrogateError, match="this is round 1"):
        strategy.check(replace(sent, round=2), training)
    training.model = {name: torch.full_like(each, 3e38) for name, each in training.model.items()}
    with pytest.raises(SurrogateError, match="whose gradient is not finite"):
        strategy.check(sent, training)

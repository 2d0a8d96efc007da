"""Rounds of DP-CVAE at the coordinator, with and without secure aggregation: weights, caps, what is stated of a
reply, and what is kept and sent of the generator.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.generators import COUNTS, SUMS, Generator
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.common.wire.records import from_record
from fedsurrogate.strategies.base.outcome import Site
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.dpcvae import (
    DPCVAE,
    FILE,
    expected_shapes,
)
from fedsurrogate.strategies.pooling.site_weights import shares_kept
from fedsurrogate.strategies.robustness.defence import defend_updates
from tests.strategies.base.test_courses_of_a_run import Kept

CLASSES, D = ("a", "b", "c"), 4
few = settings(max_examples=25, deadline=None)


def run_of(**more: Any) -> Run:
    flat: dict[str, Any] = {"method": "dpcvae", "dpcvae.latent": 2, "dpcvae.hidden": 0}
    return parse_run(flat | {"dpcvae.synthetic": 3, "head.min-steps": 2, "head.epochs": 1} | more)


PLAIN, PRIVATE = run_of(), run_of(epsilon=6.0, delta=1e-5)


def first(site: str, counts: list[float], config: Run) -> Parameters:
    sizes = torch.tensor(counts)
    sums = 0.1 * sizes.clamp_min(0)[:, None] * torch.eye(3, D)
    header = Header("dpcvae", config.digest, site, "f", CLASSES)
    return Parameters(header, 1, {COUNTS: sizes, SUMS: sums}, 0, config.mechanism)


COUNTED = st.lists(
    st.lists(st.sampled_from([-2.4, 0.0, 3.0, 20.0, 900.0]), min_size=3, max_size=3),
    min_size=1,
    max_size=5,
)


@few
@given(COUNTED, st.sampled_from([PLAIN, PRIVATE]), st.sampled_from([0.0, 2.0, 3.0]))
def test_class_sizes_are_capped_and_stated(
    counts: list[list[float]], config: Run, most: float
) -> None:
    settings_ = config.settings.model_copy(update={"max_share": most})
    config = replace(config, settings=settings_)
    strategy, training = DPCVAE(config, Kept()), Training.begin(config, CLASSES, "f", D)
    sent = [first(f"s{at}", each, config) for at, each in enumerate(counts)]
    for each, own in zip(sent, counts, strict=True):
        assert strategy.records(each) == max(0, round(float(torch.tensor(own).sum())))
        names = dict(zip(CLASSES, torch.tensor(own).tolist(), strict=True))
        assert strategy.facts(each) == {"counts": names}
    defended = strategy.defend(training, sent)
    power = 2.0 if config.mechanism is not None else 1.0
    shares = shares_kept([[max(0.0, n) for n in own] for own in counts], most, power)
    assert defended.capped == pytest.approx(
        {f"s{at}": share for at, share in enumerate(shares) if share < 1}
    )
    for kept, each, share in zip(defended.kept, sent, shares, strict=True):
        for name in (COUNTS, SUMS):
            torch.testing.assert_close(kept.tensors[name], min(share, 1.0) * each.tensors[name])


@few
@given(st.integers(0, 999), st.integers(1, 4))
def test_updates_are_stated_without_sizes_and_defended_as_updates(seed: int, sites: int) -> None:
    strategy, training = DPCVAE(PLAIN, Kept()), Training.begin(PLAIN, CLASSES, "f", D)
    strategy.absorb(training, [first(f"s{at}", [4.0, 5.0, 6.0], PLAIN) for at in range(sites)])
    assert (training.round, training.confirmed) == (1, {f"s{at}": 1 for at in range(sites)})
    draw = torch.Generator().manual_seed(seed)
    sent = [
        Parameters(
            Header("dpcvae", PLAIN.digest, f"s{at}", "f", CLASSES),
            2,
            {name: (9.0 if at == 3 else 1.0) * torch.randn(shape, generator=draw)
             for name, shape in expected_shapes(training).items()},
            0,
        )
        for at in range(sites)
    ]  # fmt: skip
    assert strategy.shapes(training) == expected_shapes(training)
    for each in sent:
        assert strategy.records(each) == 0
        assert strategy.facts(each) == {}
        strategy.check(each, training)
        other = replace(each, header=replace(each.header, classes=CLASSES[::-1]))
        with pytest.raises(
            SurrogateError, match="its 3 classes are not the run's in the run's ord"
        ):
            strategy.check(other, training)
    ours = strategy.defend(training, sent)
    theirs = defend_updates(sent, PLAIN.defence, PLAIN.settings.max_share)
    assert (ours.capped, ours.suspects, ours.bounded) == (
        theirs.capped,
        theirs.suspects,
        theirs.bounded,
    )


def test_a_generator_is_kept_and_sent_to_the_used_sites_alone() -> None:
    recorder = Kept()
    strategy, training = DPCVAE(PLAIN, recorder), Training.begin(PLAIN, CLASSES, "f", D)
    training.asked = 5
    strategy.absorb(training, [first("s0", [4.0, 5.0, 6.0], PLAIN)])
    head = strategy.classifier(training)
    assert head.header == training.header()
    assert strategy.outcome.parameters == sum(
        math.prod(shape) for shape in expected_shapes(training).values()
    )
    assert list(recorder.surrogates) == [f"file {FILE}"]
    source = strategy.outcome.learned
    assert isinstance(source, Generator)
    for limit, each in ((9, 3), (11, 3), (2, 1), (0, 1)):
        x, y = source.sample(4, limit)
        assert y.tolist() == [c for c in range(3) for _ in range(each)]
        torch.testing.assert_close(x, source.draw(y, stream(4, "picture")))
    strategy.outcome.sites = {1: Site("s0", "used", ""), 2: Site("s1", "rejected", "why")}
    (message,) = list(strategy._broadcast())
    assert message.metadata.dst_node_id == 1
    payload, info = from_record(message.content, 2**20)
    assert payload is not None
    assert info["bytes"] == len(payload)
    sent = unpack_parameters(payload)
    assert (sent.round, sent.header) == (1, training.header())
    assert sent.tensors.keys() == training.model.keys()

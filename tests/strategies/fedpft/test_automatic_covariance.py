"""The covariance that a run has where its settings say "auto": the same at both sides, what was set
keeps its meaning, and what a site sends follows from its dimension.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.site_data import SiteData, make_surrogate
from fedsurrogate.client_app.governance.work_limits import NO_LIMITS, SiteLimits
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.methods.fedpft import (
    AUTO_RANK,
    LARGEST_GRAM,
    explained,
    form_of,
    largest_gram,
)
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Surrogate
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from fedsurrogate.common.wire.tensors import Expectation, check_reply, check_surrogate
from fedsurrogate.strategies.fedpft.strategy import learn
from tests.pins.facts import facts

BUDGET: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "classes": "a,b"}

RUNS = st.fixed_dictionaries(
    {},
    optional={
        "fedpft.covariance": st.sampled_from(["auto", "full", "diag", "lowrank", "gram"]),
        "fedpft.rank": st.sampled_from([0, 4]),
        "fedpft.bits": st.sampled_from([0, 16]),
        "fedpft.components": st.sampled_from([1, 3]),
        "fedpft.topology": st.sampled_from(["star", "chain"]),
        "secure-aggregation": st.booleans(),
        "budget": st.sampled_from([0.0, 0.5, 8.0]),
        "sites": st.sampled_from([0, 3, 100]),
        "features.records": st.sampled_from([100, 10_000, 1_000_000]),
        "max-payload-mib": st.sampled_from([1, 256]),
    },
)


def run_of(flat: dict[str, Any]) -> Run | None:
    """The run of drawn settings; None where they do not agree."""
    budget = flat.pop("budget", 0.0)
    flat |= {"epsilon": budget, "delta": 1e-5 if budget else 0.0, "classes": "a,b"}
    try:
        return parse_run(flat)
    except Exception:
        return None


@given(RUNS)
@settings(max_examples=150, deadline=None)
def test_a_run_of_resolved_settings_is_the_same_run(flat: dict[str, Any]) -> None:
    """Runs are resolved at both sides, and again by `refit`."""
    run = run_of(flat)
    if run is None:
        return
    again = parse_run(run.settings.flat())
    assert (again.settings, again.digest) == (run.settings, run.digest)
    assert facts(again.settings.flat()) == facts(run.settings.flat())


@given(RUNS, st.sampled_from([2, 500, 1280, 2048, 2049, 8192]))
@settings(max_examples=150, deadline=None)
def test_the_rule_gives_a_form_that_the_run_supports(flat: dict[str, Any], dimension: int) -> None:
    free = {key: value for key, value in flat.items() if not key.startswith("fedpft.")}
    run = run_of(free)
    assert run is not None, "a run with nothing set about its covariance is never refused"
    form = form_of(run.settings, dimension)
    assert form.family in ("gram", "lowrank", "spherical")
    if run.settings.secure_aggregation:
        assert form.family == "gram"
    elif not run.private:
        limit = largest_gram(run.settings.max_payload_mib)
        assert (form.family == "gram") == (dimension <= limit)
    assert form.family in explained(run.settings, dimension)
    sizes = run.plan.messages.sizes(2, dimension, 1000)
    sent = {field.name for field in run.plan.messages.leaving(2, dimension, 1000)}
    if not run.hides_sites:
        assert sent >= {"weights", "means", "variances"}
        assert ("correlations" in sent) == (form.family == "gram")
        assert ("loadings" in sent) == (form.family == "lowrank")
        assert sizes["r"] == (AUTO_RANK if form.family == "lowrank" else 0)


def test_more_epsilon_or_records_never_lose_the_second_moment() -> None:
    def family(epsilon: float, records: int, sites: int) -> str:
        settings = {"epsilon": epsilon, "features.records": records, "sites": sites}
        return form_of(parse_run(BUDGET | settings).settings, 0).family

    steps = [family(epsilon, 10_000, 10) for epsilon in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)]
    assert steps == sorted(steps, reverse=True)
    assert set(steps) == {"spherical", "lowrank"}
    steps = [family(1.0, 10**power, 10) for power in range(2, 8)]
    assert steps == sorted(steps, reverse=True)
    steps = [family(4.0, 10_000, sites) for sites in (1, 10, 100, 1000)]
    assert steps == sorted(steps)


def site_data(dimension: int, site: str = "s", seed: int = 0) -> SiteData:
    """Records of two classes."""
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.arange(80) % 2
    features = torch.randn(80, dimension, generator=drawn) + labels[:, None]
    return SiteData(features, labels, ("a", "b"), "print", site)


def sent_by(run: Run, data: SiteData, limits: SiteLimits = NO_LIMITS) -> Surrogate:
    """What arrives of a site, after all checks of the coordinator."""
    made = make_surrogate(data, run, limits).surrogate
    arrived = unpack_surrogate(pack_surrogate(made, 8))
    place = Expectation.of(run, (), "print")
    assert isinstance(arrived, Surrogate)
    check_all(arrived, run, place)
    return arrived


def check_all(sent: Surrogate, run: Run, place: Expectation) -> None:
    """The checks of form and of numbers, in the order of the coordinator."""
    check_reply(sent, run.plan.messages, place)
    check_surrogate(sent, place)


@pytest.mark.parametrize(("dimension", "family"), [(724, "gram"), (725, "lowrank")])
def test_a_site_sends_a_whole_covariance_up_to_the_limit(dimension: int, family: str) -> None:
    assert largest_gram(1) == 724 < LARGEST_GRAM
    arrived = sent_by(parse_run({"max-payload-mib": 1}), site_data(dimension))
    assert arrived.mixtures.family == family


def test_a_whole_covariance_above_the_limit_and_a_form_of_each_class_are_refused() -> None:
    run = parse_run({"max-payload-mib": 1})
    for family, dimension in (("gram", 725), ("diag", 8), ("spherical", 8), ("full", 8)):
        other = parse_run({"max-payload-mib": 1, "fedpft.covariance": family})
        made = make_surrogate(site_data(dimension), other).surrogate
        place = Expectation.of(run, (), "print")
        sent = Surrogate(  # the same tensors under the name of this run
            sent_by(run, site_data(dimension)).header,
            made.mixtures,  # type: ignore[union-attr]
        )
        with pytest.raises(SurrogateError):
            check_all(sent, run, place)


@pytest.mark.parametrize("defence", ["none", "harm"])
def test_a_site_may_send_less_and_is_pooled_with_whole_covariances(defence: str) -> None:
    run = parse_run({"defence": defence})
    limits = [NO_LIMITS, SiteLimits(rank=3), NO_LIMITS, NO_LIMITS]
    sent = [sent_by(run, site_data(12, f"s{row}", row), limit) for row, limit in enumerate(limits)]
    assert [each.mixtures.family for each in sent] == ["gram", "lowrank", "gram", "gram"]
    assert sent[1].mixtures.covariance.factor.shape[1] <= 3  # type: ignore[union-attr]
    for order in (sent, [sent[1], *sent[:1], *sent[2:]]):
        learned = learn(order, run, "cpu")
        assert not learned.defended.suspects
        test = site_data(12, "t", 99)
        right, tested = learned.model.accuracy(test.features, ("a", "b"), test.labels)
        assert right / tested > 0.85

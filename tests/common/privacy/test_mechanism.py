"""A mechanism follows from the settings alone, and equals the guarantee of the actual noise."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.methods.sums import class_sums_plan
from fedsurrogate.common.methods.training import first_round_shares
from fedsurrogate.common.privacy.accounting import (
    GaussianEvent,
    epsilon_spent,
    gaussian_delta,
    pld_epsilon,
)
from fedsurrogate.common.privacy.mechanism import NoisyRounds, NoisySums, check_stated
from fedsurrogate.common.privacy.shares import EM_STEPS
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.wire.surrogate_proto import pack_claim, unpack_claim


def run(**settings: object) -> Run:
    return parse_run(
        {"epsilon": 2.0, "delta": 1e-6} | {k.replace("_", "."): v for k, v in settings.items()}
    )  # type: ignore[dict-item]


@pytest.mark.parametrize("family", ["spherical", "diag", "full", "lowrank"])
@pytest.mark.parametrize("components", [1, 3])
def test_the_noise_of_all_statistics_together_keeps_the_budget(
    family: str, components: int
) -> None:
    config = run(fedpft_covariance=family, fedpft_components=components)
    claim = config.mechanism
    assert claim is not None
    steps = EM_STEPS if components > 1 else 1
    events = [
        GaussianEvent(sigma / sensitivity, count=steps)
        for sigma, sensitivity in claim.noise.values()
    ]
    assert epsilon_spent(events, 1e-6) == pytest.approx(2.0)
    assert epsilon_spent([GaussianEvent(claim.noise_multiplier)], 1e-6) == pytest.approx(2.0)


def test_claims_survive_the_wire_and_are_checked_there() -> None:
    config = run()
    claim = config.mechanism_for("patient", "0123456789abcdef")
    assert claim is not None
    due = config.mechanism_for("record", "0123456789abcdef")
    # What releases cost is not in a message.
    stated = unpack_claim(pack_claim(claim))  # type: ignore[arg-type]
    assert stated == replace(claim, releases=None)
    for each in (claim, stated):
        check_stated(each, due)
    with pytest.raises(SurrogateError, match="no privacy, this run asks for mechanism 'sums'"):
        check_stated(None, config.mechanism)
    with pytest.raises(SurrogateError, match="this run asks for mechanism 'none'"):
        check_stated(claim, parse_run({}).mechanism)
    check_stated(None, parse_run({}).mechanism)


def test_theorem_4_1_adds_more_noise_than_it_needs_until_it_adds_too_little() -> None:
    theorem = {"fedpft_privacy": "theorem-4.1", "fedpft_covariance": "diag"}
    claim = run(**theorem).mechanism
    assert claim is not None
    assert epsilon_spent([GaussianEvent(claim.noise_multiplier)], 1e-6) < 1.2
    with pytest.raises(ConfigError, match=r"keeps only epsilon 69\.\d+ at delta 1e-05"):
        _ = run(**theorem, epsilon=60.0, delta=1e-5).mechanism


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_epsilon_of_all_rounds_with_distributed_noise_is_that_of_dp_accounting(
    epsilon: float,
) -> None:
    """And with a given noise multiplier as many rounds are run as fit."""
    settings = {
        "method": "dp-fedavg",
        "secure-aggregation": True,
        "classes": "a,b",
        "epsilon": epsilon,
        "delta": 1e-5,
    }
    config = parse_run(settings)
    assert config.mechanism is not None
    (event,) = config.mechanism.events
    assert (event.sample_rate, event.count) == (1.0, config.settings.fedavg.rounds)
    found = pld_epsilon([event], 1e-5)
    # Its accountant rounds privacy losses up.
    assert epsilon * (1 - 1e-6) <= found <= epsilon * 1.01
    assert gaussian_delta(event.noise_multiplier / math.sqrt(event.count), epsilon) <= 1e-5 * (
        1 + 1e-9
    )
    given = parse_run(
        settings | {"fedavg.noise-multiplier": 1.01 * event.noise_multiplier, "fedavg.rounds": 100}
    )
    claim = given.mechanism
    assert claim is not None
    assert given.rounds == event.count
    assert 0.97 * epsilon < claim.epsilon < epsilon


# Whole batches, whose precisions add up: no accountant is needed.
ROUNDS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "dp-fedavg", "fedavg.sample-rate": 1.0, "fedavg.rounds": 4},
    "distributed": {"method": "dp-fedavg", "secure-aggregation": True, "fedavg.rounds": 4},
    "fedlap": {"method": "fedlap", "fedlap.sample-rate": 1.0, "fedlap.rounds": 3, "fedlap.batch-size": 50},
    "dpcvae": {"method": "dpcvae", "dpcvae.sample-rate": 1.0, "dpcvae.rounds": 4},
    "sizes alone": {
        "method": "dpcgan",
        "dpcvae.sample-rate": 1.0,
        "dpcvae.rounds": 3,
        "dpcvae.first-round": "counts",
    },
}  # fmt: skip


@pytest.mark.parametrize("settings", ROUNDS.values(), ids=ROUNDS)
def test_the_plan_of_a_run_is_all_its_rounds_release_and_spends_what_was_asked_for(
    settings: dict[str, Any],
) -> None:
    config = parse_run({"epsilon": 3.0, "delta": 1e-5, "classes": "a,b"} | settings)
    assert config.mechanism is not None
    rounds = [config.mechanism.event(number) for number in range(1, config.trained.rounds + 1)]
    assert config.rounds == len(rounds)
    for events in (config.mechanism.events, rounds):
        assert epsilon_spent(events, 1e-5) == pytest.approx(3.0, rel=1e-6)
    for number in range(1, len(rounds) + 1):
        assert config.mechanism.epsilon_after(number) == pytest.approx(
            epsilon_spent(rounds[:number], 1e-5), rel=1e-6
        )
    generative = config.settings.method in ("dpcvae", "dpcgan")
    assert (rounds[0] == rounds[1]) is not generative
    assert all(later == rounds[1] for later in rounds[2:])
    assert parse_run({}).mechanism is None


@pytest.mark.parametrize("settings", ROUNDS.values(), ids=ROUNDS)
def test_the_noise_that_a_claim_names_is_that_of_the_releases(settings: dict[str, Any]) -> None:
    config = parse_run({"epsilon": 3.0, "delta": 1e-5, "classes": "a,b"} | settings)
    claim = config.mechanism
    assert claim is not None
    step = claim.event(2).noise_multiplier
    sigma, sensitivity = claim.noise["gradients"]
    if config.settings.secure_aggregation:
        both = [GaussianEvent(sigma / sensitivity) for sigma, sensitivity in claim.noise.values()]
        assert set(claim.noise) == {"records", "gradients"}
        assert epsilon_spent(both, 1e-5) == pytest.approx(
            epsilon_spent([GaussianEvent(step)], 1e-5), rel=1e-6
        )
        return
    assert (claim.noise_multiplier, sigma / sensitivity) == pytest.approx((step, step))
    first_round = {name: noise for name, noise in claim.noise.items() if name != "gradients"}
    if config.settings.method not in ("dpcvae", "dpcgan"):
        assert not first_round
        return
    assert (
        set(first_round)
        == set(first_round_shares(config.settings.dpcvae))
        == ({"counts", "sums"} if config.settings.method == "dpcvae" else {"counts"})
    )
    together = epsilon_spent(
        [GaussianEvent(sigma / sensitivity) for sigma, sensitivity in first_round.values()], 1e-5
    )
    assert together == pytest.approx(epsilon_spent([claim.event(1)], 1e-5), rel=1e-6)


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "dp-em"},
        {"epsilon": 1.9},
        {"delta": 1e-5},
        {"unit": "group"},
        {"noise_multiplier": 1.0},
        {"clip": 1.0},
        {"centre": "f"},
        *(
            {"noise": noise}
            for noise in (
                {},
                {"counts": (1.0, 1.0)},
                {"sums": (1.0,)},
                {"sums": (1.0, 1.0, 1.0)},
                {"sums": 1.0},
                {"x": (1.0, 1.0)},
            )
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("unit", ["record", "patient"])
def test_a_claim_that_differs_in_anything_is_refused(changed: dict[str, Any], unit: Any) -> None:
    config = run()
    claim = config.mechanism_for(unit)
    assert claim is not None
    check_stated(claim, config.mechanism)
    if changed.get("noise"):
        changed = {"noise": dict(claim.noise) | changed["noise"]}
    (field,) = changed
    with pytest.raises(
        SurrogateError, match=f"a privacy claim with {'mechanism' if field == 'name' else field} ="
    ):
        check_stated(replace(claim, **changed), config.mechanism)


NUMBERS = ("epsilon", "delta", "noise_multiplier", "clip", "sigma", "sensitivity")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("factor", [1 + 5e-7, 1 - 5e-7, 1 + 2e-6, 1 - 2e-6])
def test_a_stated_number_may_differ_by_a_millionth(name: str, factor: float) -> None:
    due = replace(run().mechanism, clip=0.5)
    last = sorted(due.noise)[-1]
    numbers = dict(zip(NUMBERS[4:], due.noise[last], strict=True))
    if name in numbers:
        numbers[name] *= factor
        changed = replace(due, noise={**due.noise, last: tuple(numbers.values())})
    else:
        changed = replace(due, **{name: getattr(due, name) * factor})
    if abs(factor - 1) < 1e-6:
        check_stated(changed, due)
    else:
        with pytest.raises(SurrogateError, match="a privacy claim with"):
            check_stated(changed, due)


SHARES = st.dictionaries(
    st.sampled_from(["counts", "sums", "squares"]), st.floats(-0.2, 1.0) | st.just(0.0), min_size=1
)


@settings(max_examples=50, deadline=None)
@given(SHARES, st.sampled_from([0.5, 2.0]))
def test_noise_by_any_shares_spends_at_most_the_claim_or_is_refused(
    shares: dict[str, float], epsilon: float
) -> None:
    recipe = NoisySums("sums", epsilon, 1e-5, shares)
    if min(shares.values()) <= 0 or math.fsum(shares.values()) > 1 + 1e-9:
        with pytest.raises(ValueError, match="above 0, sum 1"):
            recipe.mechanism()
        return
    noise = recipe.mechanism().noise
    spent = epsilon_spent([GaussianEvent(sigma / bound) for sigma, bound in noise.values()], 1e-5)
    assert spent <= epsilon * (1 + 1e-6)


@pytest.mark.parametrize("name", ["step_shares", "first_shares"])
def test_shares_of_a_round_above_the_budget_are_refused(name: str) -> None:
    recipe = NoisyRounds(
        "distributed", 2.0, 1e-5, 1.0, 3, first_share=0.1, **{name: {"a": 0.6, "b": 0.6}}
    )
    with pytest.raises(ValueError, match="above 0, sum 1"):
        recipe.mechanism()


@pytest.mark.parametrize("names", [("counts",), ("counts", "sums", "squares")])
def test_shares_of_other_statistics_than_those_sent_are_refused(names: tuple[str, ...]) -> None:
    own = Settings(epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="counts, sums"):
        class_sums_plan(own, "a:b", shares=dict.fromkeys(names, 0.2))

"""Accounting at its limits, and against formulas and searches of its own: what is derived from a budget,
and how often an accountant that takes seconds is asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.audit.membership import Guesses, guess, p_value
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.privacy import accounting, gaussian_mechanism, shares
from fedsurrogate.common.privacy.accounting import (
    GaussianEvent,
    PrivacyFilter,
    best_order,
    calibrate,
    epsilon_spent,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    renyi_budget,
)
from fedsurrogate.common.privacy.mechanism import (
    Mechanism,
    NoisyRounds,
    NoisySums,
    Releases,
    TheoremNoise,
    relation_of,
)
from fedsurrogate.common.privacy.shares import budget_shares

few = settings(max_examples=25, deadline=None)
DELTA = 1e-5


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ((1e-300, 1.0, 1), True), ((0.5, 1e-300, 1), True), ((1.7e308, 1.0, 1), True), ((1.0, 1.0, 1), True),
        ((0.0, 1.0, 1), False), ((-1e-9, 1.0, 1), False), ((math.inf, 1.0, 1), False), ((math.nan, 1.0, 1), False),
        ((1.0, 0.0, 1), False), ((1.0, -0.1, 1), False), ((1.0, 1.0000001, 1), False), ((1.0, math.nan, 1), False),
        ((1.0, 1.0, 0), False), ((1.0, 1.0, -1), False),
    ],
)  # fmt: skip
def test_an_event_has_noise_a_rate_and_a_count(values: tuple[Any, ...], fits: bool) -> None:
    if fits:
        assert GaussianEvent(*values).noise_multiplier == values[0]
        assert GaussianEvent(values[0]) == GaussianEvent(values[0], 1.0, 1)
        return
    with pytest.raises(ConfigError, match="noise_multiplier must be positive"):
        GaussianEvent(*values)


@pytest.mark.parametrize("delta", [0.0, -1e-9, 1.0, 1.5, math.nan, 0.999, 1e-300])
@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan, 1e-3, 0.5, 5.0])
def test_a_budget_has_a_positive_epsilon_and_a_delta_between_zero_and_one(
    epsilon: float, delta: float
) -> None:
    right = 0 < delta < 1
    for call in (
        lambda: gaussian_epsilon(1.0, delta),
        lambda: epsilon_spent([], delta),
        lambda: epsilon_spent([GaussianEvent(2.0)], delta),
    ):
        if right:
            assert call() >= 0
        else:
            with pytest.raises(ConfigError, match="delta ="):
                call()
    if right and 0 < epsilon < math.inf:
        assert gaussian_noise_multiplier(epsilon, delta) > 0
    else:
        with pytest.raises(ConfigError, match="delta =" if not right else "epsilon ="):
            gaussian_noise_multiplier(epsilon, delta)


@few
@given(st.floats(0.3, 30), st.integers(1, 50), st.booleans())
def test_releases_of_all_records_cost_one_of_less_noise_and_a_replaced_record_moves_twice_as_far(
    noise: float, count: int, apart: bool
) -> None:
    events = [GaussianEvent(noise)] * count if apart else [GaussianEvent(noise, count=count)]
    one = noise / math.sqrt(count)
    assert epsilon_spent(events, DELTA) == pytest.approx(gaussian_epsilon(one, DELTA), rel=1e-9)
    assert epsilon_spent(events, DELTA, replace_one=True) == pytest.approx(
        gaussian_epsilon(one / 2, DELTA), rel=1e-9
    )


def closed(events: Sequence[GaussianEvent], delta: float, replace_one: bool = False) -> float:
    """An accountant with a closed form, in place of one that takes seconds."""
    assert not replace_one
    precision = sum(e.count * (e.sample_rate / e.noise_multiplier) ** 2 for e in events)
    return gaussian_epsilon(precision**-0.5, delta)


@few
@given(
    epsilon=st.floats(0.2, 8),
    rate=st.sampled_from([0.5, 0.05]),
    count=st.integers(1, 200),
    before=st.sampled_from([0.0, 0.3, 0.8]),
    loose=st.sampled_from([1.0, 1.3, 3.0, math.inf]),
)
def test_sampled_releases_get_the_noise_that_is_needed_whatever_the_looser_bound_says(
    epsilon: float, rate: float, count: int, before: float, loose: float
) -> None:
    exact = gaussian_noise_multiplier(epsilon, DELTA)
    spent = [GaussianEvent(exact / math.sqrt(before))] if before else []
    asked = [0]

    def tight(events: Sequence[GaussianEvent], delta: float, replace_one: bool = False) -> float:
        asked[0] += 1
        return closed(events, delta, replace_one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounting, "pld_epsilon", tight)
        patch.setattr(
            accounting, "rdp_epsilon", lambda events, delta: loose * closed(events, delta)
        )
        found = calibrate(epsilon, DELTA, rate, count, spent)
    wanted = rate * exact * math.sqrt(count / (1 - before))
    assert wanted * (1 - 1e-7) <= found <= wanted * (1 + 2e-3)
    assert asked[0] <= (40 if loose == math.inf else 25)


@few
@given(
    epsilon=st.floats(0.2, 8),
    part=st.sampled_from([0.5, 0.99, 1.001, 3.0]),
    count=st.integers(1, 9),
)
def test_what_earlier_releases_left_is_all_there_is(
    epsilon: float, part: float, count: int
) -> None:
    exact = gaussian_noise_multiplier(epsilon, DELTA)
    spent = [GaussianEvent(exact * math.sqrt(2 / part))] * 2
    if part >= 1:
        with pytest.raises(ConfigError, match=r"is spent already at delta = 1e-05"):
            calibrate(epsilon, DELTA, count=count, spent=spent)
        return
    found = calibrate(epsilon, DELTA, count=count, spent=spent)
    assert found == pytest.approx(exact * math.sqrt(count / (1 - part)), rel=1e-6)


def test_delta_is_zero_only_where_floating_point_has_no_smaller_number() -> None:
    for noise, epsilon in ((1.0, 5.0), (10.0, 0.5), (0.1, 100.0)):
        assert 0 < gaussian_delta(noise, epsilon) < 1e-2
    assert gaussian_delta(1.0, 1e6) == 0.0
    assert gaussian_delta(1.0, 0.0) == pytest.approx(math.erf(0.5 / math.sqrt(2)))


# Shares.


@few
@given(st.floats(1e-3, 1e3), st.sampled_from(["spherical", "diag", "full", "lowrank"]))
def test_shares_follow_from_the_noise(noise: float, family: str) -> None:
    squares = 0.55 / (1 + noise * noise / 4)
    wanted = {"counts": 0.07 * (1 - squares), "sums": 0.93 * (1 - squares), "squares": squares}
    if family == "spherical":
        wanted = {"counts": 0.07, "sums": 0.93}
    assert budget_shares(family, noise) == pytest.approx(wanted)
    assert budget_shares("distributed", noise) == {"counts": 0.03, "sums": 0.55, "squares": 0.42}
    assert shares.DISTRIBUTED_STEP == {"records": 0.03, "gradients": 0.97}
    assert shares.EM_STEPS == 4


# Secret numbers.


@few
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6), st.integers(0, 7))
def test_uniforms_are_the_middles_of_two_to_the_53_parts_and_normals_their_transform(
    numbers: list[int], count: int
) -> None:
    def stream(size: int) -> bytearray:
        assert size % 8 == 0
        repeated = [numbers[at % len(numbers)] for at in range(size // 8)]
        return bytearray(np.array(repeated, dtype=np.int64).tobytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian_mechanism, "secret_bytes", stream)
        found = gaussian_mechanism.system_uniforms(count)
        half = max(1, (count + 1) // 2)
        source = gaussian_mechanism.system_uniforms(2 * half).tolist()
        normals = gaussian_mechanism.system_normals((count,)).tolist()
    wanted = [((numbers[at % len(numbers)] % 2**64 // 2**11) + 0.5) / 2**53 for at in range(count)]
    assert found.tolist() == wanted
    assert all(0 < each <= 1 for each in wanted)
    radius = [math.sqrt(-2 * math.log(each)) for each in source[:half]]
    angle = [2 * math.pi * each for each in source[half:]]
    both = [
        *(r * math.cos(a) for r, a in zip(radius, angle, strict=True)),
        *(r * math.sin(a) for r, a in zip(radius, angle, strict=True)),
    ]
    assert normals == pytest.approx(both[:count], abs=1e-12)


# Mechanisms.

ONE, OTHER = GaussianEvent(8.0, count=3), GaussianEvent(4.0, 0.5, 2)


@pytest.mark.parametrize("rounds", [1, 2, 3, 10])
@pytest.mark.parametrize("same", [False, True])
def test_the_releases_of_the_first_rounds_are_one_and_the_others(rounds: int, same: bool) -> None:
    releases = Releases(OTHER if same else ONE, OTHER, 10)
    listed = [releases.first, *[releases.each] * (rounds - 1)]
    found = releases.until(rounds)
    assert len(found) == (1 if same or rounds == 1 else 2)

    def counted(events: Sequence[GaussianEvent]) -> dict[tuple[float, float], int]:
        total: dict[tuple[float, float], int] = {}
        for each in events:
            key = (each.noise_multiplier, each.sample_rate)
            total[key] = total.get(key, 0) + each.count
        return total

    assert counted(found) == counted(listed)
    mechanism = Mechanism("sums", 1.0, DELTA, "record", 1.0, 1.0, {}, "", releases)
    assert mechanism.event(rounds) == listed[-1]
    assert mechanism.rounds == 10
    assert mechanism.events == releases.until(10)


@few
@given(st.floats(0.5, 8), st.integers(1, 20), st.integers(2, 9))
def test_one_of_equal_parts_of_the_noise_promises_what_it_alone_would(
    epsilon: float, parts: int, rounds: int
) -> None:
    recipe = NoisyRounds(
        "distributed", epsilon, DELTA, 1.0, rounds, first_share=0.2, first_shares={"a": 1.0}
    )
    mechanism = recipe.mechanism()
    assert epsilon_spent(mechanism.events, DELTA) == pytest.approx(epsilon, rel=1e-6)
    less = [
        GaussianEvent(each.noise_multiplier / math.sqrt(parts), count=each.count)
        for each in mechanism.events
    ]
    assert mechanism.epsilon_of_part(parts) == pytest.approx(epsilon_spent(less, DELTA), rel=1e-9)
    first_round = mechanism.event(1).noise_multiplier
    assert first_round == pytest.approx(gaussian_noise_multiplier(epsilon, DELTA) / math.sqrt(0.2))
    assert mechanism.noise["a"] == (pytest.approx(first_round), 1.0)


@few
@given(
    steps=st.integers(1, 9),
    bound=st.sampled_from([0.5, 1.0, 3.0]),
    clip=st.sampled_from([0.0, 2.0]),
    called=st.booleans(),
)
def test_sums_in_several_equal_releases_cost_the_budget(
    steps: int, bound: float, clip: float, called: bool
) -> None:
    exact = gaussian_noise_multiplier(2.0, DELTA)
    asked: list[float] = []
    parts = {"a": 0.25, "b": 0.75}
    recipe = NoisySums(
        "sums", 2.0, DELTA, (lambda noise: asked.append(noise) or parts) if called else parts,
        clip, {"b": bound}, steps,
    )  # fmt: skip
    found = recipe.mechanism()
    assert found.clip == clip
    assert (found.name, found.epsilon, found.delta, found.unit) == ("sums", 2.0, DELTA, "record")
    assert found.noise["a"] == (pytest.approx(exact * math.sqrt(steps) * 2), 1.0)
    assert found.noise["b"] == (pytest.approx(bound * exact * math.sqrt(steps / 0.75)), bound)
    assert found.noise_multiplier == pytest.approx(exact)
    assert found.events == (GaussianEvent(found.noise_multiplier),)
    assert asked == ([pytest.approx(exact * math.sqrt(steps))] if called else [])


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_theorem_has_its_noise(epsilon: float, delta: float) -> None:
    """(4 / (n epsilon)) sqrt(5 ln(4 / delta)), for a joint sensitivity of 2 sqrt(5) / n."""
    found = TheoremNoise(epsilon, delta, 0.5).mechanism()
    n = 17
    noise = 4 / (n * epsilon) * math.sqrt(5 * math.log(4 / delta))
    assert found.noise_multiplier == pytest.approx(noise / (2 * math.sqrt(5) / n))
    assert (found.clip, found.noise, found.epsilon, found.delta) == (0.5, {}, epsilon, delta)


@few
@given(
    noise=st.floats(2.0, 60.0),
    rounds=st.integers(1, 60),
    steps=st.integers(1, 3),
    opened=st.booleans(),
)
def test_a_given_noise_runs_as_many_rounds_as_the_budget_pays_for(
    noise: float, rounds: int, steps: int, opened: bool
) -> None:
    more: dict[str, Any] = {"first_share": 0.1, "first_shares": {"a": 1.0}} if opened else {}
    recipe = NoisyRounds(
        "dp-sgd", 2.0, DELTA, 1.5, rounds + opened, steps, noise_multiplier=noise, **more
    )
    first = GaussianEvent(gaussian_noise_multiplier(2.0, DELTA) / math.sqrt(0.1))

    def cost(number: int) -> float:
        first_round = [first] if opened else []
        return epsilon_spent(
            [*first_round, *[GaussianEvent(noise, count=steps)] * (number - opened)], DELTA
        )

    fewest = 1 + opened
    if cost(fewest) > 2.0:
        with pytest.raises(ConfigError, match="one round spends epsilon"):
            recipe.mechanism()
        return
    found = recipe.mechanism()
    assert fewest <= found.rounds <= rounds + opened
    assert found.epsilon == pytest.approx(cost(found.rounds))
    assert found.epsilon <= 2.0
    assert found.rounds == rounds + opened or cost(found.rounds + 1) > 2.0
    assert found.noise["gradients"] == (pytest.approx(noise * 1.5), 1.5)


@pytest.mark.parametrize(
    ("mechanism", "units", "text"),
    [
        ("sums", set(), ""), ("sums", {"record"}, "add or remove one record"),
        ("sums", {"patient"}, "add or remove one patient"),
        ("sums", {"record", "patient"}, "add or remove one record, or one patient at the sites that protect patients"),
        ("theorem-4.1", {"record"}, "exchange one record for another of the same class"),
        ("theorem-4.1", set(), "exchange one record for another of the same class"),
    ],
)  # fmt: skip
def test_a_relation_is_said_in_words(mechanism: str, units: set[str], text: str) -> None:
    assert relation_of(mechanism, units) == text


# The filter.


@pytest.mark.parametrize("epsilon", [1e-3, 0.01, 0.3, 1.0, 4.0, 30.0, 300.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_order_is_the_best_of_those_up_to_ten_thousand(epsilon: float, delta: float) -> None:
    orders = np.arange(2, 10_001)
    budget = epsilon + (np.log(delta) + np.log(orders)) / (orders - 1) - np.log1p(-1 / orders)
    order = best_order(epsilon, delta)
    assert order == orders[np.argmax(budget / orders)]
    assert renyi_budget(epsilon, delta, order) == pytest.approx(budget[order - 2])
    assert accounting.LARGEST_ORDER == 10_000


@pytest.mark.parametrize(
    ("delta", "total", "fits"),
    [(1e-5, 1.1e-5, True), (1e-5, 0.999, True), (1e-5, 1e-5, False), (1e-5, 1.0, False), (0.0, 1e-5, False)],
)  # fmt: skip
def test_the_second_rule_has_a_part_of_delta(delta: float, total: float, fits: bool) -> None:
    if fits:
        assert PrivacyFilter(1.0, delta, total).order >= 2
        return
    with pytest.raises(ConfigError, match="delta-total"):
        PrivacyFilter(1.0, delta, total)


def test_no_share_and_all_of_it_and_more_than_any_are_epsilons() -> None:
    total = PrivacyFilter(2.0, 1e-5, 2e-5)
    assert total.of_share(0.0) == 0.0
    assert total.of_share(math.inf) == math.inf
    assert total.of_share(1.0) == pytest.approx(2.0)
    sampled = GaussianEvent(5.0, 0.5)
    assert total.gaussian_share([GaussianEvent(5.0), sampled]) == math.inf
    assert total.gaussian_share([]) == 0.0
    assert total.renyi_share([]) == 0.0
    assert total.spent([], exact=True) == 0.0
    nothing = PrivacyFilter(1e-4, 1e-6, 2e-6)
    assert nothing.renyi_share([]) == 0.0
    assert nothing.renyi_share([sampled]) == math.inf


# Audits by one run.


@few
@given(st.integers(2, 12), st.integers(0, 14), st.integers(0, 99))
def test_the_highest_scores_are_guessed_in_and_the_lowest_out(
    canaries: int, count: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(canaries, generator=random)
    included = torch.rand(canaries, generator=random) < 0.5
    half = max(1, min(count, canaries) // 2)
    order = sorted(range(canaries), key=lambda at: float(scores[at]))
    right = sum(bool(included[at]) for at in order[-half:])
    right += sum(not included[at] for at in order[:half])
    assert guess(scores, included, count) == Guesses(canaries, 2 * half, right)


@few
@given(st.integers(1, 40), st.data(), st.floats(0, 4), st.sampled_from([0.0, 1e-4, 0.05, 0.5]))
def test_a_p_value_is_the_theorem_s_and_at_most_one(
    guessed: int, data: st.DataObject, epsilon: float, delta: float
) -> None:
    right = data.draw(st.integers(0, guessed))
    canaries = guessed + data.draw(st.integers(0, 9))
    rate = 1 / (1 + math.exp(-epsilon))
    mass = [
        math.comb(guessed, k) * rate**k * (1 - rate) ** (guessed - k) for k in range(guessed + 1)
    ]
    alpha = max((sum(mass[right - i : right]) / i for i in range(1, right + 1)), default=0.0)
    wanted = min(1.0, sum(mass[right:]) + 2 * canaries * delta * alpha)
    assert p_value(Guesses(canaries, guessed, right), epsilon, delta) == pytest.approx(
        wanted, abs=1e-9
    )

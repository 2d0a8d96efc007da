"""Discrete Gaussian noise: exact probabilities, and a privacy loss that is never above the one
charged.
"""

from __future__ import annotations

import inspect
import io
import math
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedsurrogate.common.privacy import gaussian_mechanism
from fedsurrogate.common.privacy.accounting import gaussian_epsilon
from fedsurrogate.common.privacy.gaussian_mechanism import (
    BOXES,
    CONTINUOUS,
    UNSURE,
    Envelope,
    _accepted,
    discrete_gaussian,
    envelope_of,
    seeded,
)
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_aggregation import protocol
from fedsurrogate.common.secure_aggregation.protocol import site_variances
from fedsurrogate.common.secure_aggregation.rules import FixedPoint, SumRules, numbers_of
from fedsurrogate.common.secure_aggregation.secrets import words


def probabilities(variance: float) -> np.ndarray:
    """Probabilities of -m ... m with a tail below 1e-40."""
    most = math.ceil(14 * math.sqrt(variance)) + 2
    weights = np.exp(-(np.arange(-most, most + 1) ** 2) / (2 * variance))
    return weights / weights.sum()


def delta_of(pmf: np.ndarray, shift: int, epsilon: float) -> float:
    """The exact delta at epsilon of noise on data that differ by `shift`, summed up numerically."""
    here, there = np.pad(pmf, (shift, 0)), np.pad(pmf, (0, shift))
    return float(np.clip(here - math.exp(epsilon) * there, 0, None).sum())


@pytest.mark.parametrize("variance", [1, 2, 9, 300])
def test_samples_have_the_probabilities_of_the_discrete_gaussian(variance: int) -> None:
    drawn = discrete_gaussian(variance, 100_000)
    pmf = probabilities(variance)
    middle = len(pmf) // 2
    often = [k for k in range(-middle, middle + 1) if 100_000 * pmf[k + middle] > 20]
    found = [int((drawn == k).sum()) for k in often]
    expected = [100_000 * pmf[k + middle] for k in often]
    rest = 100_000 - sum(found), max(100_000 - sum(expected), 1e-9)
    if rest[1] > 20:
        found, expected = [*found, rest[0]], [*expected, rest[1]]
    scale = sum(found) / sum(expected)
    assert stats.chisquare(found, [each * scale for each in expected]).pvalue > 1e-6


@pytest.mark.slow
def test_coins_that_floating_point_cannot_decide_have_the_same_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gaussian_mechanism, "UNSURE", 2.0)
    drawn = discrete_gaussian(4, 3000)
    assert abs(drawn.mean()) < 0.2
    assert abs(drawn.var() - 4) < 0.6


def test_large_noise_has_its_variance() -> None:
    drawn = discrete_gaussian(10**10, 100_000)
    assert abs(drawn.mean() / 1e5) < 0.02
    assert abs(drawn.std() / 1e5 - 1) < 0.01
    assert stats.kstest(drawn / 1e5, "norm").pvalue > 1e-6


@pytest.mark.parametrize("sites", [1, 3, 10])
@pytest.mark.parametrize(("multiplier", "deltas"), [(0.7, 1e-5), (3.73, 1e-5), (10.0, 1e-6)])
def test_epsilon_of_the_sum_is_never_below_its_privacy_loss_and_within_one_percent(
    sites: int, multiplier: float, deltas: float
) -> None:
    """The loss of the sum of the sites' noises, convolved and summed up numerically, against the
    epsilon that is charged.
    """
    shift = 120
    each = math.ceil(((multiplier * shift) ** 2 + CONTINUOUS) / sites)
    pmf = probabilities(each)
    total = pmf
    for _ in range(sites - 1):
        total = np.convolve(total, pmf)
    claimed = gaussian_epsilon(multiplier, deltas)
    assert delta_of(total, shift, claimed) <= deltas
    assert delta_of(total, shift, claimed * 0.99) > deltas


@pytest.mark.parametrize("rows", [4, 64])
def test_a_change_spread_over_many_entries_costs_no_more(rows: int) -> None:
    """The loss of a vector is the sum of its entries' losses: convolved by dp-accounting."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    multiplier, shift = 3.73, 20
    norm = shift * math.sqrt(rows)
    variance = math.ceil((multiplier * norm) ** 2 + CONTINUOUS)
    loss = pld.from_discrete_gaussian_mechanism(
        math.sqrt(variance), shift, value_discretization_interval=1e-4
    )
    found = loss.self_compose(rows).get_epsilon_for_delta(1e-5)
    claimed = gaussian_epsilon(multiplier, 1e-5)
    # The accountant rounds losses up, by at most half an interval each in the mean.
    assert found <= claimed * 1.01
    assert found >= claimed * 0.98


# Faults in `site_variances`: a piece of its source, and what replaces it.
FAULTS = {
    "a share missing": ("/ rules.honest", "/ (rules.honest + 1)"),
    "rounding left out": ("(1 + SLACK) * math.sqrt(math.prod(shapes[name]))", "0"),
    "noise halved": ("(sigma / bound * sensitivity)", "(sigma / bound * sensitivity / 2)"),
    "discreteness left out": (" + CONTINUOUS", ""),
    "discreteness once for all sites": ("math.ceil(shared) + CONTINUOUS", "math.ceil(shared)"),
}


def variances_with(fault: str, claim: Mechanism, *given: Any) -> dict[str, int]:
    """What `site_variances` returns with this fault in its source; no fault if the name is empty."""
    source = inspect.getsource(site_variances)
    if fault:
        piece, wrong = FAULTS[fault]
        assert piece in source
        source = source.replace(piece, wrong)
    names = dict(vars(protocol))
    exec(source, names)
    found: dict[str, int] = names["site_variances"](claim, *given)
    return found


@pytest.mark.parametrize("fault", ["", "a share missing", "rounding left out", "noise halved"])
def test_the_noise_of_the_sites_keeps_the_claim_and_planted_faults_do_not(fault: str) -> None:
    """A record moves the sum by its bound and the rounding of 400 entries. The honest sites' noise
    alone hides it.
    """
    claim = run_config(epsilon=2.0, delta=1e-5).mechanism
    assert claim is not None
    claim = replace(claim, noise={"sums": claim.noise["sums"]})
    (sigma, bound), bound_in_steps, entries, rules = (
        claim.noise["sums"],
        60,
        400,
        SumRules.of(8, 1 / 3, 0.1),
    )
    numbers, shapes = (
        {"sums": FixedPoint(bound / bound_in_steps, 10**6)},
        {"sums": (4, entries // 4)},
    )
    variance = rules.honest * variances_with(fault, claim, numbers, shapes, rules)["sums"]
    charged = gaussian_epsilon(sigma / bound, 1e-5)
    shift = bound_in_steps + math.isqrt(entries)
    assert (delta_of(probabilities(variance), shift, charged) > 1e-5) == bool(fault)


def far_from_rounded_noise(sites: int, variance: int, claimed: float) -> float:
    """Logarithm of the largest difference, over all frequencies, between the quotient of the proof
    and its main part.

    variance: of each site's discrete noise. claimed: variance of the continuous Gaussian that the
    sum is charged as.
    """
    rounded = claimed + 8
    t, w = sites * variance - rounded, np.linspace(1e-3, math.pi, 4001)
    aliases = [m for m in range(-4, 5) if m]
    x = sum(np.exp(-variance * ((w + 2 * math.pi * m) ** 2 - w**2) / 2) for m in aliases)
    sinc = np.sin(w / 2) / (w / 2)
    y = sum(
        np.exp(-rounded * ((w + 2 * math.pi * m) ** 2 - w**2) / 2)
        * np.sinc((w + 2 * math.pi * m) / 2 / math.pi)
        / sinc
        for m in aliases
    )
    ratio = sites * np.log1p(x) - np.log1p(y)
    # log |exp(ratio) - 1|, for large and for small ratios.
    excess = np.where(ratio > 1, ratio, np.log(np.abs(np.expm1(np.minimum(ratio, 1))) + 1e-300))
    return float((-t * w**2 / 2 - np.log(sinc) + excess).max())


@pytest.mark.parametrize("members", [2, 10, 100, 1000])
@pytest.mark.parametrize("fault", ["", "discreteness left out", "discreteness once for all sites"])
def test_the_sum_of_many_small_noises_is_rounded_gaussian_noise_and_more(
    members: int, fault: str
) -> None:
    """The step of the proof that fails for many sites, where the noise is smallest: hardly any
    beyond CONTINUOUS.
    """
    claim = run_config(epsilon=50.0, delta=1e-5).mechanism
    assert claim is not None
    rules, shapes = SumRules.of(members, 0.0, 0.0), dict.fromkeys(claim.noise, (1,))
    numbers = {name: FixedPoint(bound, 10**6) for name, (_, bound) in claim.noise.items()}
    variances = variances_with(fault, claim, numbers, shapes, rules)
    for name, (sigma, bound) in claim.noise.items():
        claimed = (sigma / bound * 2) ** 2
        far = far_from_rounded_noise(rules.honest, variances[name], claimed)
        assert (far > math.log(1e-30)) == bool(fault)


@pytest.mark.parametrize("halved", [False, True])
def test_no_attack_on_a_hundred_thousand_sums_finds_more_than_the_claim(halved: bool) -> None:
    """An empirical lower bound of epsilon, from sums modulo 2^32 of four sites with and without one
    record.
    """
    runs, sites, delta = 100_000, 4, 1e-3
    config = run_config(epsilon=2.0, delta=delta)
    claim, rules = config.mechanism, SumRules.of(sites, 0.0, 0.0)
    assert claim is not None
    numbers = numbers_of(config.plan, config.settings, sites)
    shapes = {"counts": (1,), "sums": (1, 1), "squares": (1,)}
    variances = variances_with("noise halved" if halved else "", claim, numbers, shapes, rules)
    scores = {}
    for record in (0.0, 1.0):
        # Every statistic moves by its whole sensitivity; the likelihood ratio of Gaussians weighs
        # them by their noise.
        score = np.zeros(runs)
        for name in shapes:
            fixed, total = numbers[name], np.zeros(runs, dtype=np.uint32)
            for site in range(sites):
                value = 100.0 + (record if site == 0 else 0.0)
                drawn = discrete_gaussian(variances[name], runs)
                total = total + words(fixed.encode(torch.tensor([value])) + drawn)
            score += fixed.decode(total).numpy() / (variances[name] * fixed.step**2)
        scores[record] = score
    threshold = np.quantile(scores[0.0], 0.999)
    # Clopper & Pearson: bounds that hold with a probability of 1e-6 together.
    low = stats.beta.ppf(
        1e-6, (scores[1.0] > threshold).sum(), runs - (scores[1.0] > threshold).sum() + 1
    )
    high = stats.beta.ppf(
        1 - 1e-6, (scores[0.0] > threshold).sum() + 1, runs - (scores[0.0] > threshold).sum()
    )
    bound = math.log(max(low - delta, 1e-12) / high)
    assert (bound > config.settings.epsilon) == halved, bound


def test_a_seed_gives_every_machine_the_same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another machine's exponential function differs in its last bits."""
    first = discrete_gaussian(10**9, 5000, seeded(bytes(32)))
    assert (discrete_gaussian(10**9, 5000, seeded(bytes(32))) == first).all()
    assert (discrete_gaussian(10**9, 5000, seeded(bytes(31) + b"1")) != first).mean() > 0.99
    assert 0.9 < first.std() / math.sqrt(10**9) < 1.1
    exponential = np.exp
    monkeypatch.setattr(gaussian_mechanism.np, "exp", lambda x: exponential(x) * (1 + 2e-16))
    assert (discrete_gaussian(10**9, 5000, seeded(bytes(32))) == first).all()


def run_config(epsilon: float, delta: float) -> Run:
    return parse_run(
        {
            "secure-aggregation": True,
            "fedpft.covariance": "gram",
            "classes": "a,b",
            "epsilon": epsilon,
            "delta": delta,
        }
    )


@pytest.mark.parametrize("claimed", [0.3, 4, 100, 10**4])
def test_the_noise_of_one_release_is_rounded_gaussian_noise_and_more(claimed: float) -> None:
    """So it is computed from continuous noise, and all that holds for that holds for it: on samples,
    composed and chosen adaptively. A release adds twice CONTINUOUS.
    """
    variance = math.ceil(claimed) + 2 * CONTINUOUS
    assert far_from_rounded_noise(1, variance, claimed) < math.log(1e-30)
    assert far_from_rounded_noise(1, math.ceil(claimed) + 8, claimed) > math.log(1e-30)


VARIANCES = st.integers(1, 40) | st.integers(1, 2**112) | st.integers(0, 112).map(lambda at: 2**at)


def parts(envelope: Envelope, box: int) -> Decimal:
    """One over the widths of the boxes below this one, in all digits."""
    return sum((1 / Decimal(width) for width in envelope.widths[:box].tolist()), Decimal(0))


def curve(envelope: Envelope, size: int) -> Decimal:
    return (Decimal(-(size**2)) / (2 * envelope.variance)).exp()


@settings(max_examples=100)
@given(VARIANCES, st.integers(0, BOXES - 1), st.floats(0, 1))
def test_boxes_cover_the_curve_and_are_inside_where_they_say_so(
    variance: int, box: int, at: float
) -> None:
    envelope = envelope_of(variance)
    widths, inside = envelope.widths.tolist(), envelope.inside.tolist()
    assert widths == sorted(widths, reverse=True)
    assert (widths[0] - 1) ** 2 <= 13.01**2 * variance <= (1.01 * widths[0]) ** 2
    with localcontext() as context:
        context.prec = 120
        # The first number that the box does not hold, the last that it holds, and any.
        for size in (widths[box], widths[box] - 1, int(at * (widths[0] - 1))):
            if size < widths[0]:
                over = sum(width > size for width in widths)
                assert envelope.area * parts(envelope, over) >= curve(envelope, size)
        assert inside[box] < widths[box]
        if inside[box] >= 0:
            above = envelope.area * parts(envelope, box + 1)
            assert above <= curve(envelope, inside[box])


@dataclass(frozen=True)
class Point:
    """A box, a sign, words from which the number follows, and a height near the curve."""

    box: int
    negative: bool
    near: str
    by: int
    apart: int
    again: int

    def words(self, envelope: Envelope) -> tuple[int, ...]:
        """The word, and further ones where it lies beyond the last whole turn."""
        width = int(envelope.widths[self.box])
        start = {"edge": int(envelope.inside[self.box]), "turn": 2**64 - 2**64 % width, "any": 0}
        word = (start[self.near] + self.by) % 2**64
        if word < 2**64 - 2**64 % width:
            return (word,)
        # The largest word may lie beyond it once more.
        return word, 2**64 - 1, self.again

    def height(self, envelope: Envelope, size: int) -> int:
        """Of 2^64 in the box, as near to the curve as `apart` says."""
        share = curve(envelope, size) / envelope.area - parts(envelope, self.box)
        middle = int(min(max(share * int(envelope.widths[self.box]), Decimal(0)), 1) * 2**64)
        return min(max(middle + self.apart, 0), 2**64 - 1)


POINTS = st.builds(
    Point,
    st.integers(0, BOXES - 1),
    st.booleans(),
    st.sampled_from(["edge", "turn", "any"]),
    st.integers(-4, 4) | st.integers(0, 2**64 - 1),
    st.sampled_from([0, *(each * 2**at for at in (0, 4, 8, 11, 20, 40) for each in (-1, 1))]),
    st.integers(0, 2**32),
)


@settings(max_examples=200)
@given(VARIANCES, st.lists(POINTS, min_size=1, max_size=5), st.binary(min_size=32, max_size=32))
def test_points_count_if_they_are_below_the_curve_by_all_their_bits(
    variance: int, points: list[Point], key: bytes
) -> None:
    """Each by bytes of its own: numbers at the ends of boxes, words beyond the last whole turn, which
    are drawn again for the same box, and heights as near to the curve as floating point cannot tell
    apart.
    """
    envelope = envelope_of(variance)
    rows = [point.words(envelope) for point in points]
    # Points whose words are drawn again wait for each other.
    words = [row[at] for at in range(3) for row in rows if at < len(row)]
    sizes = [
        row[-1] % int(envelope.widths[point.box]) for row, point in zip(rows, points, strict=True)
    ]
    heights, expected = list[int](), list[int]()
    with localcontext() as context:
        context.prec = 120
        for point, size in zip(points, sizes, strict=True):
            kept = not (point.negative and size == 0)
            if kept and size > int(envelope.inside[point.box]):
                heights.append(point.height(envelope, size))
                bits = sha256(key + (len(heights) - 1).to_bytes(8, "big")).digest()[:16]
                finer = (heights[-1] << 128) + int.from_bytes(bits, "big")
                share = Decimal(finer) / 2**192 / int(envelope.widths[point.box])
                over = envelope.area * (parts(envelope, point.box) + share)
                kept = over < curve(envelope, size)
            if kept:
                expected.append(-size if point.negative else size)
    first = bytes(point.box + BOXES * point.negative for point in points)
    # Without one that needs a height, a word is read that nobody uses.
    numbers = [*words, *(heights or [0])]
    drawn = io.BytesIO(first + b"".join(each.to_bytes(8, "little") for each in numbers) + key)

    def source(count: int) -> bytes:
        found = drawn.read(count)
        assert len(found) == count, "more bytes than there are points"
        return found

    assert _accepted(envelope, len(points), source).tolist() == expected
    assert not drawn.read()


@settings(max_examples=100)
@given(VARIANCES, st.integers(0, BOXES - 1), st.floats(0, 1), st.floats(0, 1))
def test_what_floating_point_decides_is_far_beyond_its_errors(
    variance: int, box: int, at: float, share: float
) -> None:
    envelope = envelope_of(variance)
    size = int(at * (int(envelope.widths[box]) - 1))
    computed = float(envelope.floors[box] + envelope.heights[box] * share)
    computed -= float(np.exp(-np.square(np.float64(size)) / float(2 * variance)))
    with localcontext() as context:
        context.prec = 60
        own = Decimal(share) / int(envelope.widths[box])
        exact = envelope.area * (parts(envelope, box) + own) - curve(envelope, size)
        assert 50 * abs(Decimal(computed) - exact) < Decimal(UNSURE)


def test_a_variance_whose_numbers_have_more_than_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit into 64 bits"):
        envelope_of(2**120)

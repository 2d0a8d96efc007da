"""Tests of random numbers against the distribution that is claimed for them, and the correction for
their number.

A test gives a probability: that of numbers at least as odd under the claim. Tests of one battery are
corrected together (Holm 1979), so that all of them together have the stated chance of a false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Numbers = NDArray[np.float64]
# Expected counts below this are pooled for a chi-square test.
FEWEST = 10.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test.

    Attributes:
        name: of the sampler or release.
        test: what is compared.
        count: of numbers.
        p: probability of numbers at least as odd under the claim.
    """

    name: str
    test: str
    count: int
    p: float


def failed(tests: Sequence[Outcome], chance: float) -> list[Outcome]:
    """The tests that contradict their claim, with at most this chance that any true claim is among
    them.

    Args:
        tests: of one battery.
        chance: of a false alarm in the whole battery.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".

    Example:
        >>> odd, fair = Outcome("a", "", 9, 1e-6), Outcome("b", "", 9, 0.02)
        >>> [each.name for each in failed([fair, odd], 0.03)], failed([fair], 0.01)
        (['a', 'b'], [])
    """
    ordered, found = sorted(tests, key=lambda each: each.p), []
    for place, each in enumerate(ordered):
        if each.p > chance / (len(ordered) - place):
            break
        found.append(each)
    return found


def of_counts(name: str, test: str, found: Sequence[float], expected: Sequence[float]) -> Outcome:
    """A chi-square test of counts; rare outcomes are pooled.

    Args:
        name: of the sampler.
        test: what is counted.
        found: number of each outcome.
        expected: the same, under the claim; with the same sum up to outcomes that are never found.

    Raises:
        ValueError: for so few numbers that nothing is left to compare.
    """
    observed, due = np.asarray(found, dtype=float), np.asarray(expected, dtype=float)
    rare = due < FEWEST
    pooled = [np.append(each[~rare], each[rare].sum()) for each in (observed, due)]
    if pooled[1][-1] < FEWEST and pooled[0][-1] < FEWEST:
        pooled = [each[:-1] for each in pooled]
    seen, wanted = pooled
    if len(seen) < 2:
        raise ValueError(f"{name}, {test}: {observed.sum():g} numbers are too few for two outcomes")
    scaled = wanted * (seen.sum() / wanted.sum())
    return Outcome(name, test, int(observed.sum()), float(stats.chisquare(seen, scaled).pvalue))


def of_continuous(
    name: str, values: Numbers, cumulative: Callable[[Numbers], Numbers], test: str = "distribution"
) -> Outcome:
    """A Kolmogorov-Smirnov test against a distribution function."""
    return Outcome(name, test, len(values), float(stats.kstest(values, cumulative).pvalue))


def of_uniform_words(name: str, words: NDArray[np.uint64], bits: int) -> Iterator[Outcome]:
    """Tests that whole numbers of so many bits are uniform: their highest and their lowest eight
    bits, and whether each follows the one before.
    """
    for test, shift in (("highest byte", bits - 8), ("lowest byte", 0)):
        counts = np.bincount(
            ((words >> np.uint64(shift)) & np.uint64(255)).astype(int), minlength=256
        )
        yield of_counts(name, test, counts, np.full(256, len(words) / 256))
    yield _uncorrelated(name, "neighbours", words / 2.0**bits - 0.5, 12**0.5)


def of_noise(name: str, values: Numbers, sigma: float = 1.0) -> Iterator[Outcome]:
    """Tests that numbers are independent and normal, with mean zero and this standard deviation.

    Args:
        name: of the release.
        values: (runs, entries) or (n,).
        sigma: claimed.
    """
    scaled = np.atleast_2d(values) / sigma
    flat = scaled.ravel()
    count = len(flat)
    yield of_continuous(name, flat, stats.norm.cdf)
    square = float(np.square(flat).sum())
    tail = min(stats.chi2.cdf(square, count), stats.chi2.sf(square, count))
    yield Outcome(name, "standard deviation", count, float(min(1.0, 2 * tail)))
    yield Outcome(name, "bias", count, _two_sided(float(flat.mean()) * math.sqrt(count)))
    if scaled.shape[1] > 1:
        pairs = scaled[:, :-1] * scaled[:, 1:]
        yield Outcome(
            name,
            "covariance of neighbours",
            pairs.size,
            _two_sided(float(pairs.sum()) / pairs.size**0.5),
        )
    if len(scaled) > 1:
        pairs = scaled[:-1] * scaled[1:]
        yield Outcome(
            name, "covariance of runs", pairs.size, _two_sided(float(pairs.sum()) / pairs.size**0.5)
        )


def _uncorrelated(name: str, test: str, values: Numbers, inverse_sigma: float) -> Outcome:
    """A test that each number (n,), of mean zero, says nothing about the next."""
    products = values[:-1] * values[1:] * inverse_sigma**2
    return Outcome(
        name, test, len(products), _two_sided(float(products.sum()) / len(products) ** 0.5)
    )


def _two_sided(score: float) -> float:
    """The probability of a standard normal at least so far from zero."""
    return float(2 * stats.norm.sf(abs(score)))

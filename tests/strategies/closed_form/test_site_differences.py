"""Differences between the class means of sites, and the solver that follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.harness.site_data import SiteData, make_surrogate
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import AnySurrogate
from fedsurrogate.strategies.closed_form.solvers import SiteDifferences, balanced_ridge, ridge
from fedsurrogate.strategies.closed_form.statistics import Statistics, sum_of
from fedsurrogate.strategies.fedpft.strategy import by_statistics, learn
from tests.examples import statistics_of

NAMES = ("a", "b", "c")


def differences(parts: list[Statistics]) -> SiteDifferences:
    """What is found while these are added up."""
    found = SiteDifferences()
    sum_of(found.watched(parts))
    return found


def parts_of(
    sites: int, records: int, shift: float, seed: int, dimension: int = 6
) -> list[tuple[Tensor, Tensor]]:
    """Records of three classes at sites, whose class means are shifted by normals of a scale."""
    drawn = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(3, dimension, generator=drawn)
    found = []
    for _ in range(sites):
        labels = torch.randint(3, (records,), generator=drawn)
        own = means + shift * torch.randn(3, dimension, generator=drawn)
        found.append((own[labels] + torch.randn(records, dimension, generator=drawn), labels))
    return found


@given(
    sites=st.integers(1, 6),
    records=st.integers(4, 60),
    shift=st.sampled_from([0.0, 0.3, 2.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_the_ratio_is_that_of_its_definition_for_any_order(
    sites: int, records: int, shift: float, seed: int
) -> None:
    data = parts_of(sites, records, shift, seed)
    parts = [statistics_of(*each, 3) for each in data]
    whole = statistics_of(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]), 3)
    between = sum(
        float((part.counts[:, None] * (part.means - whole.means).square()).sum()) for part in parts
    )
    within = sum(part.records * float(part.covariance.diagonal().sum()) for part in parts)
    groups = sum(int((part.counts > 0).sum()) for part in parts)
    freedom = groups - int((whole.counts > 0).sum())
    found, turned = differences(parts), differences(parts[::-1])
    assert found.freedom == freedom
    if freedom and whole.records > groups:
        expected = between / freedom / (within / (whole.records - groups))
        assert found.ratio == pytest.approx(expected, rel=1e-9)
        assert turned.ratio == pytest.approx(expected, rel=1e-9)
    else:
        assert not found.found


@given(sites=st.integers(2, 8), records=st.sampled_from([30, 300, 3000]), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_chance_is_not_a_difference_and_a_real_one_is_found_at_any_size(
    sites: int, records: int, seed: int
) -> None:
    alike, other = (
        differences([statistics_of(*each, 3) for each in parts_of(sites, records, shift, seed, 32)])
        for shift in (0.0, 1.0)
    )
    assert not alike.found, alike.in_words
    assert other.found, other.in_words
    assert by_statistics(alike, 3, 64)[0] == "lda"
    assert by_statistics(other, 3, 64)[0] == "balanced-ridge"
    assert by_statistics(other, 1, 64)[0] == "lda", "least squares needs two classes"
    assert by_statistics(other, 3, 63)[0] == "lda", "few columns, where it masks classes"


def test_many_records_do_not_make_a_small_difference_a_large_one() -> None:
    parts = [statistics_of(*each, 3) for each in parts_of(4, 20_000, 0.05, 3)]
    found = differences(parts)
    assert found.ratio > 10
    assert not found.found


@given(factors=st.lists(st.floats(0.01, 1000), min_size=3, max_size=3), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_numbers_of_records_do_not_move_the_balanced_head(factors: list[float], seed: int) -> None:
    """A cap on a site, or its false counts, change class priors; means and covariance stay."""
    (each,) = parts_of(1, 90, 0.0, seed)
    statistics = statistics_of(*each, 3)
    claimed = replace(statistics, counts=statistics.counts * torch.tensor(factors).double())
    fair, moved = (balanced_ridge(table, 0.1) for table in (statistics, claimed))
    assert torch.allclose(fair.weight, moved.weight)
    assert torch.allclose(fair.bias, moved.bias)
    if max(factors) > 2 * min(factors):
        assert not torch.allclose(ridge(statistics, 0.1).bias, ridge(claimed, 0.1).bias)


def sent(shift: float, sites: int = 3, dimension: int = 64) -> list[AnySurrogate]:
    """What sites send by default."""
    run = parse_run({})
    data = parts_of(sites, 240, shift, 7, dimension)
    return [
        make_surrogate(SiteData(x, y, NAMES, "print", f"s{row}"), run).surrogate
        for row, (x, y) in enumerate(data)
    ]


@pytest.mark.parametrize(
    ("shift", "dimension", "solver"),
    [(0.0, 64, "lda"), (1.5, 64, "balanced-ridge"), (1.5, 63, "lda"), (1.5, 6, "lda")],
)
def test_the_default_solver_and_its_reason_follow_from_the_sites(
    shift: float, dimension: int, solver: str
) -> None:
    surrogates = sent(shift, dimension=dimension)
    learned = learn(surrogates, parse_run({"defence": "none"}), "cpu")
    assert learned.facts["solver"] == solver
    assert "F = " in learned.facts.get("reason", "")
    few = f"{dimension} columns, fewer than 64, are too few for least squares"
    assert (few in learned.facts.get("reason", "")) == (shift > 0 and dimension < 64)
    explicit = learn(surrogates, parse_run({"defence": "none", "head.solver": "lda"}), "cpu")
    assert (explicit.facts["solver"], explicit.facts.get("reason", "")) == ("lda", "")


def test_one_site_alone_says_nothing_of_differences() -> None:
    learned = learn(sent(0.0, 1), parse_run({}), "cpu")
    assert learned.facts["solver"] == "lda"
    assert "no class is at two sites" in learned.facts.get("reason", "")

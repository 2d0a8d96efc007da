"""Bounded influence: what one hostile site of generated federations can do to the pooled classes, and
what honest sites keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.shared_covariances import LowRank, StoredGram
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.strategies.robustness.bounded_influence import OUT, SiteClasses, bounds
from fedsurrogate.strategies.robustness.class_points import ClassPoints
from fedsurrogate.strategies.robustness.closed_form_sums import (
    defend_sums,
    gaussians,
    with_gaussians,
)
from fedsurrogate.strategies.robustness.defence import defend_surrogates
from fedsurrogate.strategies.robustness.screening import screen

QUICK = settings(max_examples=20, deadline=None)


@dataclass(frozen=True)
class Generated:
    """Means (S, C, d) and counts (S, C) of honest sites whose records have unit variance."""

    means: Tensor
    counts: Tensor

    def table(self) -> SiteClasses:
        return table_of(self.means, self.counts)


def table_of(means: Tensor, counts: Tensor) -> SiteClasses:
    def within(directions: Tensor) -> Tensor:
        return (directions.T @ directions).repeat(len(means), 1, 1)

    return SiteClasses(means, counts, 1 / counts.clamp_min(1), within=within)


@st.composite
def federations(draw: st.DrawFn, fewest: int = 3) -> Generated:
    """Sites of any number and size, whose classes are five or more deviations apart."""
    sites, classes = draw(st.integers(fewest, 9)), draw(st.integers(2, 6))
    d = draw(st.integers(classes, 16))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    turned = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
    centres = draw(st.floats(4, 12)) * turned[:classes]
    counts = torch.randint(30, draw(st.integers(31, 300)), (sites, classes), generator=generator)
    chance = torch.randn(sites, classes, d, generator=generator, dtype=torch.float64)
    return Generated(centres + chance / counts.sqrt()[..., None], counts.double())


def right(honest: Tensor, means: Tensor, counts: Tensor) -> float:
    """Share of the honest sites' records, of unit variance around their means (S, C, d), that linear
    discriminant analysis of these means and counts places right, against the nearest other class.
    """
    totals = counts.sum(0)
    pooled = (counts[..., None] * means).sum(0) / totals[:, None]
    rows = (counts.sqrt()[..., None] * (means - pooled)).flatten(0, 1)
    covariance = torch.eye(means.shape[2], dtype=means.dtype) + rows.T @ rows / totals.sum()
    weight = torch.linalg.solve(covariance, pooled.T).T
    bias = (totals / totals.sum()).log() - (weight * pooled).sum(1) / 2
    scores = honest @ weight.T + bias
    gaps = scores.diagonal(dim1=1, dim2=2)[..., None] - scores
    margins = gaps / torch.cdist(weight, weight).clamp_min(1e-9)
    margins.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return float(torch.special.ndtr(margins.amin(2)).mean())


@QUICK
@given(
    federations(),
    st.floats(0.2, 3),
    st.integers(-3, 6),
    st.floats(0.3, 3),
    st.integers(0, 2**31),
)
def test_one_hostile_site_costs_the_others_little_for_any_direction_step_and_count(
    honest: Generated, part: float, power: int, times: float, seed: int
) -> None:
    means, counts = honest.means.clone(), honest.counts.clone()
    alone = right(means[1:], means[1:], counts[1:])
    generator = torch.Generator().manual_seed(seed)
    towards = (
        means[0].roll(1, 0) - means[0]
        if seed % 2
        else torch.randn(means[0].shape, generator=generator, dtype=torch.float64)
    )
    means[0] += part * 2.0**power * towards
    counts[0] = times * counts[1:].median(0).values
    table = table_of(means, counts)
    found = bounds(table)
    kept = found.scores.amax(1) < OUT
    assert right(means[1:], (means + found.moves)[kept], counts[kept]) > alone - 0.05


@QUICK
@given(federations())
def test_honest_sites_stay_as_they_are(honest: Generated) -> None:
    found = bounds(honest.table())
    assert not found.moves.any()
    assert not found.scores.any()


@QUICK
@given(st.integers(3, 10), st.integers(2, 6), st.integers(64, 256), st.integers(0, 2**31))
def test_sites_that_have_their_classes_nearly_alone_stay_as_they_are(
    sites: int, classes: int, d: int, seed: int
) -> None:
    """Of each class one site has hundreds of records, and the others from none to three."""
    generator = torch.Generator().manual_seed(seed)
    turned = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
    counts = torch.randint(0, 4, (sites, classes), generator=generator).double()
    counts[torch.arange(classes) % sites, torch.arange(classes)] = 900.0
    chance = torch.randn(sites, classes, d, generator=generator, dtype=torch.float64)
    means = 6 * turned[:classes] + chance / counts.clamp_min(1).sqrt()[..., None]
    means[counts == 0] = 0
    found = bounds(table_of(means, counts))
    totals = counts.sum(0)[:, None]
    moved = (counts[..., None] * found.moves).sum(0) / totals
    assert float(moved.norm(dim=1).max()) < 0.2
    assert not found.scores.any()


@QUICK
@given(federations(), st.integers(0, 2**31))
def test_results_follow_the_order_of_sites_and_the_axes_of_features(
    honest: Generated, seed: int
) -> None:
    means = honest.means.clone()
    means[0] = means[0] + 2 * (means[0].roll(1, 0) - means[0])
    counts = honest.counts.clone()
    counts[0] = 2 * counts[1:].amax(0)
    found = bounds(table_of(means, counts))
    torch.manual_seed(seed)
    order, axes = torch.randperm(len(means)), torch.randperm(means.shape[2])
    signs, shift = (
        1 - 2 * torch.randint(0, 2, axes.shape).double(),
        torch.randn(axes.shape).double(),
    )
    turned = means[order][..., axes] * signs + shift
    again = bounds(table_of(turned, counts[order]))
    torch.testing.assert_close(again.scores, found.scores[order], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(
        again.moves, found.moves[order][..., axes] * signs, rtol=1e-6, atol=1e-9
    )


def surrogate(name: str, means: Tensor, counts: Tensor, covariance: LowRank) -> Surrogate:
    labels = torch.arange(len(means))
    table = Mixtures(counts.long(), labels, torch.ones(len(means)), means.float(), covariance)
    return Surrogate(Header("fedpft", "0" * 16, name, "f", tuple(map(str, labels.tolist()))), table)


@QUICK
@given(federations(4), st.floats(3, 1e3))
def test_a_covariance_that_hides_the_lines_between_classes_is_scaled_down(
    honest: Generated, times: float
) -> None:
    d = honest.means.shape[2]
    usual = LowRank(torch.zeros(d, 1), torch.ones(d))
    line = honest.means[0, 1] - honest.means[0, 0]
    wide = LowRank(times * line.float()[:, None], torch.ones(d))
    sent = [
        surrogate(str(row), means, counts, wide if row == 0 else usual)
        for row, (means, counts) in enumerate(zip(honest.means, honest.counts, strict=True))
    ]
    defended = defend_surrogates(sent, "screen", 3.0, ())
    for each in defended.kept:
        assert isinstance(each, Surrogate)
        assert isinstance(each.mixtures.covariance, LowRank)
        direction = (line / line.norm()).float()
        along = float((direction @ each.mixtures.covariance.factor).square().sum())
        assert along < 20


def class_sums(name: str, means: Tensor, counts: Tensor, covariance: Tensor) -> Parameters:
    d = means.shape[1]
    rows, columns = torch.triu_indices(d, d)
    tensors = {
        "counts": counts.float(),
        "sums": (counts[:, None] * means).float(),
        "squares": (counts.sum() * covariance)[rows, columns].float(),
    }
    header = Header("afl", "0" * 16, name, "f", tuple(map(str, range(len(means)))))
    return Parameters(header, 1, tensors, int(counts.sum()))


@QUICK
@given(federations(4), st.floats(0.2, 3), st.integers(-3, 6), st.floats(0.3, 3), st.booleans())
def test_one_hostile_site_costs_sums_little_and_honest_sums_stay_as_they_are(
    honest: Generated, part: float, power: int, times: float, wide: bool
) -> None:
    means, counts = honest.means.clone(), honest.counts.clone()
    alone = right(means[1:], means[1:], counts[1:])
    means[0] += part * 2.0**power * (means[0].roll(1, 0) - means[0])
    counts[0] = (times * counts[1:].median(0).values).round()
    unit = torch.eye(means.shape[2], dtype=torch.float64)
    sent = [
        class_sums(str(row), *each, 1e3 * unit if wide and row == 0 else unit)
        for row, each in enumerate(zip(means, counts, strict=True))
    ]
    defended = defend_sums(sent, "screen", 3.0, ())
    kept = {each.header.site: each for each in defended.kept}
    assert all(kept[each.header.site] is each for each in sent[1:])
    tables = [each.tensors for each in defended.kept]
    assert (
        right(
            means[1:],
            torch.stack([each["sums"] / each["counts"][:, None] for each in tables]).double(),
            torch.stack([each["counts"] for each in tables]).double(),
        )
        > alone - 0.05
    )
    if wide and "0" in kept:
        # The first entry is a variance.
        assert float(kept["0"].tensors["squares"][0] / kept["0"].tensors["counts"].sum()) < 20


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_what_is_changed_of_sums_is_changed_by_the_class(part: float) -> None:
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    counts = torch.tensor([10.0, 0.0, 30.0], dtype=torch.float64)
    means[1] = 0
    sent = class_sums("a", means, counts, torch.eye(4, dtype=torch.float64))
    own = gaussians(sent)
    assert own.mixtures.labels.tolist() == [0, 2]
    variances = own.mixtures.covariance.variances_per_dimension()
    torch.testing.assert_close(variances.float(), torch.ones(1, 4))
    moved = replace(
        own.mixtures,
        means=own.mixtures.means + part,
        covariance=own.mixtures.covariance.scaled(1 + part),
    )
    found = with_gaussians(sent, own, replace(own, mixtures=moved)).tensors
    change = torch.tensor([10.0, 0.0, 30.0])[:, None] * torch.full((3, 4), part)
    torch.testing.assert_close(found["sums"] - sent.tensors["sums"], change)
    ratio = (1 + part) ** 2
    torch.testing.assert_close(found["squares"], ratio * sent.tensors["squares"])
    assert found["counts"] is sent.tensors["counts"]


def test_a_stored_covariance_is_bounded_and_read_again_at_each_use() -> None:
    """A wide one ended the run: the bounded covariance could not be made."""
    reads: list[int] = []

    def read() -> Tensor:
        reads.append(1)
        return torch.eye(2)

    stored = StoredGram(read, torch.ones(1, 2)).scaled(3.0)
    assert not reads
    torch.testing.assert_close(stored.matrix, 9 * torch.eye(2))
    torch.testing.assert_close(stored.variances_per_dimension(), torch.full((1, 2), 9.0))
    assert len(reads) == 1


@QUICK
@given(st.integers(3, 15), st.integers(0, 15), st.integers(0, 2**31))
def test_the_screen_names_all_that_are_out_of_range_but_never_half(
    sites: int, odd: int, seed: int
) -> None:
    scores = torch.zeros(sites)
    scores[torch.randperm(sites, generator=torch.Generator().manual_seed(seed))[:odd]] = 2.0
    counts = torch.full((sites, 2), 100.0)
    means = torch.tensor([[[0.0, 0.0], [8.0, 0.0]]]).repeat(sites, 1, 1)
    names, none = tuple(map(str, range(sites))), torch.zeros(sites, 2)
    points = ClassPoints(
        names, ("a", "b"), means, counts, 1 / counts, none, none[:, 0], 2.0, odd=scores
    )
    named = screen(points, single_parts=True)
    assert len(named) == min(odd, sites, (sites - 1) // 2)
    assert all(float(scores[int(each.site)]) == 2.0 for each in named)


@pytest.mark.parametrize("sites", [4, 7])
def test_a_site_of_another_kind_that_harms_nobody_keeps_its_data(sites: int) -> None:
    """Its classes lie far from the others' classes in a direction of their own."""
    means = torch.zeros(sites, 3, 8, dtype=torch.float64)
    means[:, torch.arange(3), torch.arange(3)] = 8.0
    means[-1, :, 7] = 40.0
    counts = torch.full((sites, 3), 100.0, dtype=torch.float64)
    found = bounds(table_of(means, counts))
    assert not found.moves.any()
    assert math.isclose(float(found.scales.min()), 1.0)


@QUICK
@given(honest=federations(fewest=4), step=st.floats(0.2, 1.5), toward=st.booleans())
def test_a_site_of_another_scanner_is_not_accused_of_other_labels(
    honest: Generated, step: float, toward: bool
) -> None:
    """All its classes are off in one direction, be it that from one class to another. Rolled labels
    are off in several.
    """
    middle = honest.means[1:].mean(0)
    way = middle[1] - middle[0]
    if not toward:
        way = way.flip(0)
    moved, rolled = honest.means.clone(), honest.means.clone()
    moved[0] += step * way
    rolled[0] = rolled[0].roll(1, 0)
    assert float(bounds(table_of(moved, honest.counts)).scores[0].max()) < OUT

    def kinds(means: Tensor) -> set[str]:
        sites, classes = (str(i) for i in range(len(means))), map(str, range(means.shape[1]))
        nothing = torch.zeros_like(honest.counts)
        points = ClassPoints(
            tuple(sites),
            tuple(classes),
            means.float(),
            honest.counts.float(),
            (1 / honest.counts).float(),
            nothing.float(),
            nothing[:, 0].float(),
            float(means.shape[2]),
        )
        return {suspect.kind for suspect in screen(points) if suspect.site == "0"}

    assert "label" not in kinds(moved)
    assert kinds(rolled)


@QUICK
@given(
    sites=st.integers(3, 6),
    classes=st.integers(3, 8),
    seed=st.integers(0, 2**20),
    sigma=st.floats(5.0, 40.0),
)
def test_classes_that_honest_sites_do_not_have_are_noise_and_judge_nobody(
    sites: int, classes: int, seed: int, sigma: float
) -> None:
    """Noisy sums: each site has a few classes, and of all others sends noise with a count near zero,
    which divides it.
    """
    generator = torch.Generator().manual_seed(seed)
    d = 64
    centres = 8 * torch.linalg.qr(torch.randn(d, classes, generator=generator).double())[0].T
    true = 600.0 * (torch.rand(sites, classes, generator=generator) < 0.5).double()
    counts = (true + torch.randn(true.shape, generator=generator).double()).clamp_min(0)
    sums = true[..., None] * centres
    sums = sums + sigma * torch.randn(sums.shape, generator=generator, dtype=torch.float64)
    means = sums / counts.clamp_min(1)[..., None]
    noise = (sigma**2 + true) / counts.clamp_min(1).square()
    found = bounds(SiteClasses(means, counts, noise, power=2.0))
    moved = found.moves.norm(dim=2).masked_fill(true == 0, 0.0)
    assert float(moved.max()) < 1.0
    assert float(found.scores.max()) < OUT

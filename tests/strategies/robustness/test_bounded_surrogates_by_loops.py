"""What surrogates give to the bounds, and what becomes of them, for every family of covariances; and the
order in which a defence of surrogates caps, names and bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.surrogates.covariances import Diagonal, Full, Spherical
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.shared_covariances import Gram, LowRank
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, Header, SumsSurrogate, Surrogate
from fedsurrogate.strategies.base.defended import Suspect
from fedsurrogate.strategies.pooling.site_weights import scaled, shares_kept
from fedsurrogate.strategies.robustness import bounded_surrogates, defence
from fedsurrogate.strategies.robustness.bounded_influence import Bounds, SiteClasses
from fedsurrogate.strategies.robustness.bounded_surrogates import bounded, harmful
from fedsurrogate.strategies.robustness.class_points import of_sums
from fedsurrogate.strategies.robustness.defence import defend_surrogates
from fedsurrogate.strategies.robustness.reach import Moments

Array = NDArray[np.float64]
D = 3
# The last dimension hardly varies, so that its unit is a share of that of the others.
FLAT = torch.tensor([1.0, 1.0, 1e-2])
few = settings(max_examples=10, deadline=None)
FAMILIES = ["spherical", "diag", "full", "lowrank", "gram"]
CLASSES = [("9", "10"), ("10", "9", "2"), ("2", "9")]


def covariance_of(family: str, components: int, draw: torch.Generator) -> tuple[Any, Array]:
    """A table and its matrices (M, d, d), one for all in a shared family."""
    variances = torch.rand(components, D, generator=draw) + 0.5
    if family != "spherical":
        variances = variances * FLAT.square()
    if family == "spherical":
        dense = variances[:, 0, None, None] * torch.eye(D)
        return Spherical(variances[:, 0]), dense.double().numpy()
    if family == "diag":
        return Diagonal(variances), torch.diag_embed(variances).double().numpy()
    if family == "full":
        lower = 0.3 * torch.randn(components, D, D, generator=draw).tril(-1)
        factor = FLAT[:, None] * (torch.eye(D) + lower)
        return Full(factor), (factor @ factor.mT).double().numpy()
    factor = FLAT[:, None] * torch.randn(D, 2, generator=draw)
    if family == "lowrank":
        dense = factor @ factor.T + variances[0].diag()
        return LowRank(factor, variances[0]), dense.double().numpy()[None]
    matrix = factor @ factor.T + FLAT.square().diag()
    return Gram(matrix), matrix.double().numpy()[None]


def mixtures(site: int, family: str, seed: int) -> tuple[Surrogate, Array]:
    draw = torch.Generator().manual_seed(100 * seed + site)
    names = CLASSES[site % 3]
    components = torch.randint(1, 3, (len(names),), generator=draw)
    labels = torch.arange(len(names)).repeat_interleave(components)
    raw = torch.rand(len(labels), generator=draw) + 0.2
    weights = raw / torch.zeros(len(names)).index_add_(0, labels, raw)[labels]
    covariance, dense = covariance_of(family, len(labels), draw)
    counts = torch.randint(6, 60, (len(names),), generator=draw)
    means = 2 * FLAT * torch.randn(len(labels), D, generator=draw)
    table = Mixtures(counts, labels, weights, means, covariance)
    return Surrogate(Header("fedpft", "r", f"s{site}", "f", names), table), dense


def sums(site: int, seed: int) -> SumsSurrogate:
    draw = torch.Generator().manual_seed(100 * seed + site)
    counts = torch.tensor([40.0, 3.0, 0.4]) + torch.rand(3, generator=draw)
    table = counts[:, None] * torch.randn(3, D, generator=draw) / 4
    own = Sums(counts, table, None, {"counts": 1.0, "sums": 2.0})
    claim = Mechanism("sums", 1.0, 1e-5, "record", 1.0, 0.0, {})
    return SumsSurrogate(Header("fedpft", "r", f"s{site}", "f", ("2", "9", "10")), own, claim)


class Given:
    """In place of `bounds`: moves, scales and scores that a test gives, and what was asked."""

    def __init__(self, moves: Tensor, scales: Tensor, scores: Sequence[Tensor] = ()) -> None:
        self.moves, self.scales, self.scores = moves, scales, list(scores)
        self.asked: list[SiteClasses] = []

    def __call__(self, sites: SiteClasses) -> Bounds:
        self.asked.append(sites)
        shape = sites.counts.shape
        scores = self.scores.pop(0) if self.scores else torch.zeros(shape)
        nearest = torch.arange(shape[1]).expand(shape).clone()
        nearest[:, 1] = 0
        return Bounds(self.moves, self.scales, scores, nearest, torch.zeros(len(scores)))


@few
@given(st.integers(0, 9999), st.sampled_from(FAMILIES))
def test_mixtures_are_moved_and_narrowed_as_the_bounds_say(seed: int, family: str) -> None:
    made = [mixtures(site, family, seed) for site in range(4)]
    sent = [each for each, _ in made]
    draw = torch.Generator().manual_seed(seed)
    moves = torch.randn(4, 3, D, generator=draw, dtype=torch.float64)
    scales = torch.tensor([0.3, 1.0, 0.7, 1.0], dtype=torch.float64)
    moves[3] = 0
    given_ = Given(moves, scales)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_surrogates, "bounds", given_)
        found = bounded(sent)
    (asked,) = given_.asked
    order = ["2", "9", "10"]
    own = [Moments.of(each) for each in sent]
    usual = np.sort([each.usual_variances().numpy() for each in own], 0)[1]
    unit = np.sqrt(np.maximum(usual, 0.01 * usual.mean()))
    directions = torch.randn(D, 2, generator=draw, dtype=torch.float64)
    assert asked.within is not None
    inside = asked.within(directions).numpy()
    assert asked.power == 1
    for row, (each, dense) in enumerate(made):
        for column, name in enumerate(order):
            if name not in each.header.classes:
                assert float(asked.counts[row, column]) == 0
                continue
            label = each.header.classes.index(name)
            count = float(each.mixtures.counts[label])
            assert float(asked.counts[row, column]) == count
            assert float(asked.noise[row, column]) == pytest.approx(1 / count)
            mean = own[row].means[label].numpy() / unit
            np.testing.assert_allclose(asked.means[row, column], mean, rtol=1e-5)
        table = each.mixtures
        records = (table.counts[table.labels] * table.weights).double().numpy()
        shared = np.tensordot(records / records.sum(), dense, 1) if len(dense) > 1 else dense[0]
        way = directions.numpy() / unit[:, None]
        np.testing.assert_allclose(inside[row], way.T @ shared @ way, rtol=1e-4)
        changed = found[row]
        assert isinstance(changed, Surrogate)
        if row == 3:
            assert changed is each
            continue
        for at, label in enumerate(table.labels.tolist()):
            by = moves[row, order.index(each.header.classes[label])].numpy() * unit
            wanted = table.means[at].numpy() + by
            np.testing.assert_allclose(changed.mixtures.means[at], wanted, rtol=1e-4, atol=1e-5)
        assert changed.mixtures.means.dtype == torch.float32
        if scales[row] == 1:
            assert changed.mixtures.covariance is table.covariance
            continue
        variances = changed.mixtures.covariance.variances_per_dimension()
        before = table.covariance.variances_per_dimension()
        torch.testing.assert_close(variances, float(scales[row]) * before, rtol=1e-4, atol=1e-5)


@few
@given(st.integers(0, 9999))
def test_noisy_sums_are_moved_by_as_many_records_as_they_count(seed: int) -> None:
    sent = [sums(site, seed) for site in range(3)]
    draw = torch.Generator().manual_seed(seed)
    moves = torch.randn(3, 3, D, generator=draw, dtype=torch.float64)
    moves[1] = 0
    given_ = Given(moves, torch.tensor([1.0, 1.0, 0.5]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_surrogates, "bounds", given_)
        found = bounded(sent)
    (asked,) = given_.asked
    points = of_sums(sent)
    unit = (points.within / D) ** 0.5
    assert (asked.power, asked.within) == (2.0, None)
    torch.testing.assert_close(asked.means, points.means.double() / unit)
    torch.testing.assert_close(asked.counts, points.counts.double())
    torch.testing.assert_close(asked.noise, points.noise.double() / unit**2)
    assert found[1] is sent[1]
    for row in (0, 2):
        changed = found[row]
        assert isinstance(changed, SumsSurrogate)
        counts = sent[row].sums.counts.double().clamp_min(1)
        wanted = sent[row].sums.sums + moves[row] * unit * counts[:, None]
        torch.testing.assert_close(changed.sums.sums, wanted.float(), rtol=1e-4, atol=1e-5)
        assert torch.equal(changed.sums.counts, sent[row].sums.counts)


@pytest.mark.parametrize(("most", "named"), [(0, []), (1, ["s2"]), (2, ["s2", "s0"]), (3, ["s2", "s0"])])  # fmt: skip
def test_the_clearest_harmful_site_is_named_first_and_the_others_compared_again(
    monkeypatch: pytest.MonkeyPatch, most: int, named: list[str]
) -> None:
    scores = [torch.zeros(size, 3, dtype=torch.float64) for size in (5, 4, 3)]
    # At least ten times what is allowed.
    scores[0][2, 1], scores[0][0, 0] = 25.0, 24.0
    scores[1][0, 2], scores[1][3, 0] = 10.0, 9.9
    scores[2][1, 1] = 9.99
    given_ = Given(torch.zeros(()), torch.zeros(()), scores)
    monkeypatch.setattr(bounded_surrogates, "bounds", given_)
    sent = [mixtures(site, "diag", 1)[0] for site in range(5)]
    found = harmful(sent, most)
    assert [each.site for each in found] == named
    assert len(given_.asked) == min(3, most)
    assert [len(each.means) for each in given_.asked] == [5, 4, 3][: min(3, most)]
    assert len(sent) == 5
    wanted = [
        ("label", 2.5, "its class '9' lies where the other sites have class '2', not where they have '9'"),
        ("moved", 1.0, "its class '10' is farther from the same class at the other sites than these "
         "differ, and makes the model worse for them"),
    ]  # fmt: skip
    assert [(each.kind, each.score, each.reason) for each in found] == wanted[: len(found)]


def test_without_a_class_of_enough_records_nothing_is_bounded_or_named() -> None:
    loud = Sums(torch.zeros(3), torch.zeros(3, D), None, {"counts": 1.0, "sums": 2.0})
    empty: list[AnySurrogate] = [
        SumsSurrogate(sums(site, 1).header, loud, sums(site, 1).claim) for site in range(3)
    ]
    assert bounded(empty) == empty
    assert harmful(empty, 1) == []


@pytest.mark.parametrize("rule", ["screen", "none"])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("count", [2, 7])
def test_surrogates_are_capped_named_and_bounded_in_this_order(
    monkeypatch: pytest.MonkeyPatch, rule: str, noisy: bool, count: int
) -> None:
    sent: list[AnySurrogate] = [
        sums(site, 1) if noisy else mixtures(site, "diag", 1)[0] for site in range(count)
    ]
    large: Any = sent[1]
    sent[1] = scaled(large, 0.001) if not noisy else large
    calls: list[Any] = []
    power, sigma = (2.0, 1.0) if noisy else (1.0, 0.0)

    def capped(some: list[AnySurrogate]) -> tuple[list[int], dict[str, float]]:
        counts = [[max(0.0, float(n)) for n in each.counts] for each in some]
        shares = shares_kept(counts, 1.0, power, sigma)
        return [sum(scaled(each, share).counts) for each, share in zip(some, shares, strict=True)], {
            each.header.site: share for each, share in zip(some, shares, strict=True) if share < 1
        }  # fmt: skip

    def names_harmful(some: list[AnySurrogate], most: int) -> list[Suspect]:
        assert [sum(each.counts) for each in some] == capped(sent)[0]
        calls.append(("harmful", len(some), most))
        return [Suspect("s3", "moved", 2.0, "")]

    def screened(points: Any, single_parts: bool) -> list[Suspect]:
        calls.append(("screen", points.sites, single_parts))
        return [
            Suspect(name, "far", 2.0, "") for name in ("s0", "s5", "s2") if name in points.sites
        ]

    def bound(some: list[AnySurrogate]) -> list[AnySurrogate]:
        calls.append(("bounded", [each.header.site for each in some]))
        return some[::-1]

    for name, other in (("harmful", names_harmful), ("screen", screened), ("bounded", bound)):
        monkeypatch.setattr(defence, name, other)
    found = defend_surrogates(sent, rule, 1.0, ("2", "9", "10"))
    if rule == "none":
        assert calls == []
        left, suspects = sent, []
    elif count == 2:
        # Of two sites either may be wrong, so none is left out.
        assert calls == [("screen", ("s0", "s1"), False)]
        left, suspects = sent, []
    else:
        rest = ("s0", "s1", "s2", "s4", "s5", "s6")
        left = [each for each in sent if each.header.site in ("s1", "s2", "s4", "s6")]
        suspects = ["s3", "s0", "s5"]
        assert calls == [
            ("harmful", 7, 3), ("screen", rest, True), ("bounded", ["s1", "s2", "s4", "s6"]),
        ]  # fmt: skip
    numbers, shares = capped(left)
    order = -1 if rule == "screen" and count > 2 else 1
    assert [sum(each.counts) for each in found.kept][::order] == numbers
    assert found.capped == shares
    assert [each.site for each in found.suspects] == suspects

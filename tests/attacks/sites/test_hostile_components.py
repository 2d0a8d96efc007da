"""Single components of a hostile hospital do no harm, for any number of claimed records and any
class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.covariances import Diagonal
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, Surrogate
from fedsurrogate.strategies.fedpft.learn import LearnedHead, learn
from fedsurrogate.strategies.robustness.class_points import class_points
from fedsurrogate.strategies.robustness.component_screening import SHARE
from fedsurrogate.strategies.robustness.screening import screen
from tests.hostile_sites import claiming_each, digits_of, surrogate_of

CLASSES = tuple(map(str, range(10)))
QUICK: dict[str, Any] = {"head.min-steps": 60, "head.epochs": 1, "fedpft.covariance": "diag"}
Lie = Callable[[Surrogate], Surrogate]


@cache
def honest(components: int = 1) -> tuple[list[AnySurrogate], tuple[Tensor, Tensor]]:
    parts, test = digits_of(10, seed=0)
    run = parse_run(QUICK | {"fedpft.components": components})
    return [
        surrogate_of(part, CLASSES, "f" * 16, str(site), run) for site, part in enumerate(parts)
    ], test


def learned(
    sent: Sequence[AnySurrogate], components: int = 1, **settings: Any
) -> tuple[LearnedHead, float]:
    """The coordinator's head from these surrogates, and its accuracy on the ten real classes."""
    run = parse_run(QUICK | {"fedpft.components": components} | settings)
    found = learn(sent, run, "cpu")
    features, labels = honest(components)[1]
    return found, found.head.accuracy(features, CLASSES, labels)[0] / len(labels)


def attacked(
    lie: Lie, hostile: int = 2, components: int = 1, **settings: Any
) -> tuple[LearnedHead, float, float]:
    good, _ = honest(components)
    bad = [lie(each) for each in good[:hostile] if isinstance(each, Surrogate)]
    found, accuracy = learned([*bad, *good[hostile:]], components, **settings)
    return found, accuracy, learned(good[hostile:], components, **settings)[1]


def far_with_few_records(sent: Surrogate) -> Surrogate:
    """Every class has four records, and a mean of norm 100."""
    table = sent.mixtures
    direction = torch.randn(table.means.shape, generator=torch.Generator().manual_seed(1))
    means = 100 * direction / direction.norm(dim=1, keepdim=True)
    return replace(
        sent, mixtures=replace(table, counts=torch.full_like(table.counts, 4), means=means)
    )


def with_class(sent: Surrogate, mean: Tensor, count: int, name: str = "zz") -> Surrogate:
    """Add a class with one component."""
    table = sent.mixtures
    assert isinstance(table.covariance, Diagonal)
    variances = torch.cat([table.covariance.variances, table.covariance.variances[:1]])
    label = torch.tensor([len(table.counts)])
    counts, labels = (
        torch.cat([table.counts, torch.tensor([count])]),
        torch.cat([table.labels, label]),
    )
    wide = Mixtures(
        counts,
        labels,
        torch.cat([table.weights, torch.ones(1)]),
        torch.cat([table.means, mean]),
        Diagonal(variances),
    )
    return replace(
        sent, header=replace(sent.header, classes=(*sent.header.classes, name)), mixtures=wide
    )


def invented(length: float, count: int = 4) -> Lie:
    """A class that no other site has, with a mean of this norm."""
    return lambda sent: with_class(
        sent, torch.full((1, sent.dimension), length / sent.dimension**0.5), count
    )


@pytest.mark.parametrize("defence", ["screen", "median", "trimmed"])
@pytest.mark.parametrize(
    "lie",
    [far_with_few_records, invented(1e3), invented(1e6), invented(1e6, 100)],
    ids=["few", "1e3", "1e6", "1e6 of 100"],
)
def test_no_mean_reaches_training_from_beyond_what_the_others_data_reach(
    lie: Lie, defence: str
) -> None:
    found, accuracy, alone = attacked(lie, defence=defence)
    assert accuracy > alone - 0.03
    if defence == "screen":
        assert {suspect.site for suspect in found.defended.suspects} == {"0", "1"}


def test_a_class_of_its_own_that_is_anothers_is_found() -> None:
    centre = torch.stack(
        [each.mixtures.means[3] for each in honest()[0] if isinstance(each, Surrogate)]
    ).mean(0, keepdim=True)
    found, accuracy, alone = attacked(
        lambda sent: with_class(sent, centre, 1000, f"z{sent.header.site}")
    )
    assert accuracy > alone - 0.03
    assert {suspect.site for suspect in found.defended.suspects} == {"0", "1"}
    assert "class '3'" in found.defended.suspects[0].reason


def test_a_class_that_one_honest_site_alone_has_stays() -> None:
    good = [with_classes(each, {"9"} if site else set()) for site, each in enumerate(honest()[0])]
    found, _ = learned(good)
    assert found.defended.suspects == []
    assert "9" in found.head.header.classes


def with_classes(sent: AnySurrogate, dropped: set[str]) -> AnySurrogate:
    from fedsurrogate.common.surrogates.surrogates import without_classes

    kept = without_classes(sent, [name for name in sent.header.classes if name not in dropped])
    assert kept is not None
    return kept


def in_two(
    sent: Surrogate, counts: Tensor, share: Tensor, means: tuple[Tensor, Tensor]
) -> Surrogate:
    """Two components per class, with the variances of its first. counts (C,); share (C,): weight of
    the second; means: two tables (C, d).
    """
    table = sent.mixtures
    assert isinstance(table.covariance, Diagonal)
    labels = torch.arange(len(counts)).repeat_interleave(2)
    first = (table.components.cumsum(0) - table.components)[labels]
    weights, both = (
        torch.stack([1 - share, share], 1).flatten(),
        torch.stack(means, 1).flatten(0, 1),
    )
    return replace(
        sent,
        mixtures=Mixtures(
            counts, labels, weights, both, Diagonal(table.covariance.variances[first])
        ),
    )


def preserving(sent: Surrogate) -> Surrogate:
    """Two components per class: one at the next class, and one mirrored at the mean, so that the
    mean is unchanged.
    """
    table = sent.mixtures
    weights = table.weights[:, None]
    own = torch.zeros(len(table.counts), sent.dimension).index_add_(
        0, table.labels, weights * table.means
    )
    halves = torch.full((len(own),), 0.5)
    return in_two(sent, 3 * table.counts, halves, (own.roll(-1, 0), 2 * own - own.roll(-1, 0)))


def test_components_that_keep_a_classs_mean_do_not_shift_labels() -> None:
    found, accuracy, alone = attacked(preserving, components=2)
    assert accuracy > alone - 0.03
    assert {suspect.site for suspect in found.defended.suspects} == {"0", "1"}
    assert "a component of its class" in found.defended.suspects[0].reason


def test_large_sites_whose_weight_is_capped_do_not_hide_misplaced_components() -> None:
    """Two thirds of the records of each class are said to lie at the next class: few beside those
    of two large sites, but not beside what the cap leaves of these.
    """
    good, _ = honest()
    large = [
        claiming_each(each, 10 * int(each.mixtures.counts.max()))
        for each in good[2:4]
        if isinstance(each, Surrogate)
    ]

    def lie(sent: AnySurrogate) -> Surrogate:
        assert isinstance(sent, Surrogate)
        table = sent.mixtures
        misplaced = torch.full((len(table.counts),), 0.65)
        return in_two(sent, 3 * table.counts, misplaced, (table.means, table.means.roll(-1, 0)))

    sent = [*map(lie, good[:2]), *large, *good[4:]]
    assert {suspect.site for suspect in screen(class_points(sent, CLASSES))} == {"0", "1"}


def test_honest_components_are_not_suspected() -> None:
    assert screen(class_points(honest(3)[0], CLASSES)) == []


@pytest.mark.parametrize("share", [0.9, 2.0])
def test_misplaced_components_below_the_share_that_is_examined_do_little_harm(share: float) -> None:
    """Each class gets a component at the next class's mean, with `share` times SHARE of the others'
    records there.
    """
    others = [each.mixtures.counts for each in honest()[0][2:] if isinstance(each, Surrogate)]
    records = torch.stack(others).sum(0).roll(-1, 0)

    def lie(sent: Surrogate) -> Surrogate:
        table = sent.mixtures
        counts = table.counts + (share * SHARE * records).round().long()
        return in_two(
            sent, counts, 1 - table.counts / counts, (table.means, table.means.roll(-1, 0))
        )

    found, accuracy, alone = attacked(lie)
    assert accuracy > alone - 0.03
    assert {suspect.site for suspect in found.defended.suspects} == (
        set() if share < 1 else {"0", "1"}
    )


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_who_knows_the_thresholds_and_stays_below_them_does_bounded_harm(share: float) -> None:
    """Every class mean moves toward the next class by a distance below all thresholds, and counts
    stay within the cap.
    """

    def lie(sent: Surrogate) -> Surrogate:
        table = sent.mixtures
        means = table.means + 0.45 * share * (table.means.roll(-1, 0) - table.means)
        return replace(sent, mixtures=replace(table, means=means, counts=3 * table.counts))

    found, accuracy, alone = attacked(lie)
    assert accuracy > alone - 0.10
    assert {suspect.site for suspect in found.defended.suspects} <= {"0", "1"}


def test_one_of_two_sites_is_heard_whatever_the_other_claims() -> None:
    good, _ = honest()
    run = parse_run(QUICK)
    tiny = claiming_each(good[0], 1)
    found = learn([tiny, good[1]], run, "cpu")
    assert found.defended.capped == {}

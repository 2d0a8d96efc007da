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
from fedsurrogate.strategies.base.outcome import Learned
from fedsurrogate.strategies.fedpft.strategy import learn
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
) -> tuple[Learned, float]:
    """The coordinator's head from these surrogates, and its accuracy on the ten real classes."""
    run = parse_run(QUICK | {"fedpft.components": components} | settings)
    found = learn(sent, run, "cpu")
    features, labels = honest(components)[1]
    return found, found.model.accuracy(features, CLASSES, labels)[0] / len(labels)


def attacked(
    lie: Lie, hostile: int = 2, components: int = 1, **settings: Any
) -> tuple[Learned, float, float]:
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


@pytest.mark.parametrize(
    "lie",
    [far_with_few_records, invented(1e3), invented(1e6), invented(1e6, 100)],
    ids=["few", "1e3", "1e6", "1e6 of 100"],
)
def test_no_mean_reaches_training_from_beyond_what_the_others_data_reach(lie: Lie) -> None:
    _, accuracy, alone = attacked(lie)
    assert accuracy > alone - 0.03


def test_a_class_of_its_own_that_is_anothers_takes_no_records_from_it() -> None:
    centre = torch.stack(
        [each.mixtures.means[3] for each in honest()[0] if isinstance(each, Surrogate)]
    ).mean(0, keepdim=True)
    _, accuracy, alone = attacked(
        lambda sent: with_class(sent, centre, 1000, f"z{sent.header.site}")
    )
    assert accuracy > alone - 0.03


def test_a_class_that_one_honest_site_alone_has_stays() -> None:
    good = [with_classes(each, {"9"} if site else set()) for site, each in enumerate(honest()[0])]
    found, _ = learned(good)
    assert found.defended.suspects == []
    assert "9" in found.model.header.classes


def with_classes(sent: AnySurrogate, dropped: set[str]) -> AnySurrogate:
    from fedsurrogate.common.surrogates.surrogates import without_classes

    kept = without_classes(sent, [name for name in sent.header.classes if name not in dropped])
    assert kept is not None
    return kept


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

"""The screen of many sites: it holds one table of their class means, and decides as if it held
several.
"""

import pytest
import torch

from fedsurrogate.common.surrogates.covariances import Spherical
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.strategies.robustness import screening
from fedsurrogate.strategies.robustness.class_points import of_mixtures
from fedsurrogate.strategies.robustness.screening import compare, screen

CLASSES = ("a", "b", "c")


def sites(count: int = 30) -> list[Surrogate]:
    """Sites of three classes; the last one has its classes in another order."""
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(3, 8, generator=generator)
    found = []
    for site in range(count):
        means = centres + 0.3 * torch.randn(3, 8, generator=generator)
        if site == count - 1:
            means = means[[1, 2, 0]]
        mixtures = Mixtures(
            torch.full((3,), 40), torch.arange(3), torch.ones(3), means, Spherical(torch.ones(3))
        )
        found.append(Surrogate(Header("fedpft", "r", f"s{site}", "f", CLASSES), mixtures))
    return found


def test_a_table_of_class_means_leaves_the_surrogates_as_they_are() -> None:
    surrogates = sites()
    before = [surrogate.mixtures.means.clone() for surrogate in surrogates]
    points = of_mixtures(surrogates, CLASSES)
    assert points.means.shape == (30, 3, 8)
    assert all(
        torch.equal(each.mixtures.means, means)
        for each, means in zip(surrogates, before, strict=True)
    )


def test_the_number_of_sites_that_are_copied_at_a_time_changes_no_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = of_mixtures(sites(), CLASSES)
    found = []
    for together in (1, 7, 1000):
        monkeypatch.setattr(screening, "NUMBERS", 24 * together)
        compared = compare(points)
        found.append((screen(points), compared.own, compared.extent))
    assert [suspect.site for suspect in found[0][0]] == ["s29"]
    for suspects, own, extent in found[1:]:
        assert suspects == found[0][0]
        assert torch.equal(own, found[0][1])
        assert extent == found[0][2]

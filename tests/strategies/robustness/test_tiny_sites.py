"""The screen where most sites have a few records, often one a class: their variances are zero, and
say nothing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedsurrogate.common.surrogates.mixtures import MixtureSettings, fit
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.strategies.robustness.class_points import class_points
from fedsurrogate.strategies.robustness.screening import screen

CLASSES, DIMENSION, SITES = "abcdefghij", 24, 40
FAMILIES = ("spherical", "diag", "lowrank", "gram")


def federation(family: str, tiny: int) -> list[Surrogate]:
    """Sites of one data set: the first `tiny` with one record of each of three classes, the others
    with 60 of two.
    """
    generator = torch.Generator().manual_seed(tiny)
    centres = 2 * torch.randn(len(CLASSES), DIMENSION, generator=generator)
    sites = []
    for index in range(SITES):
        held, count = (3, 1) if index < tiny else (2, 60)
        classes = sorted(torch.randperm(len(CLASSES), generator=generator)[:held].tolist())
        labels = torch.arange(held).repeat_interleave(count)
        features = centres[torch.tensor(classes)][labels] + torch.randn(
            len(labels), DIMENSION, generator=generator
        )
        mixtures = fit(features, labels, held, MixtureSettings(family, rank=4), generator)
        names = tuple(CLASSES[label] for label in classes)
        sites.append(
            Surrogate(Header("fedpft", "run", f"site {index}", "backbone", names), mixtures)
        )
    return sites


@pytest.mark.parametrize("tiny", [0, 25, 35, 39, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_honest_sites_are_no_suspects_however_many_of_them_are_tiny(family: str, tiny: int) -> None:
    assert screen(class_points(federation(family, tiny), tuple(CLASSES))) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_false_mean_is_found_among_tiny_sites(family: str) -> None:
    sites = federation(family, 25)
    forged = sites[-1].mixtures
    sites[-1] = replace(sites[-1], mixtures=replace(forged, means=forged.means * 40))
    assert [suspect.site for suspect in screen(class_points(sites, tuple(CLASSES)))] == ["site 39"]


def test_a_false_mean_is_found_where_no_site_knows_a_variance() -> None:
    sites = federation("lowrank", 40)
    forged = sites[-1].mixtures
    sites[-1] = replace(sites[-1], mixtures=replace(forged, means=forged.means * 40))
    assert [suspect.site for suspect in screen(class_points(sites, tuple(CLASSES)))] == ["site 39"]

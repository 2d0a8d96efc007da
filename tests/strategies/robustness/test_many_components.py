"""The screen where a class has several components: these lie farther out than class means do, and at every site."""

from __future__ import annotations

from dataclasses import replace

import torch

from common.surrogates.mixtures import MixtureSettings, fit
from common.surrogates.surrogates import Header, Surrogate
from strategies.robustness.class_points import class_points
from strategies.robustness.screening import screen

CLASSES, DIMENSION, SITES = "abc", 24, 8


def sites() -> list[Surrogate]:
    """Sites of which a tenth of every class lies far from the rest."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(len(CLASSES), 1, DIMENSION, generator=generator)
    aside = 10 * torch.nn.functional.normalize(torch.randn(len(CLASSES), DIMENSION, generator=generator))
    found = []
    for index in range(SITES):
        features = centres + torch.randn(len(CLASSES), 100, DIMENSION, generator=generator)
        features[:, :10] += aside[:, None]
        labels = torch.arange(len(CLASSES)).repeat_interleave(100)
        mixtures = fit(features.flatten(0, 1), labels, len(CLASSES), MixtureSettings("diag", 2), generator)
        found.append(Surrogate(Header("fedpft", "run", f"site {index}", "backbone", tuple(CLASSES)), mixtures))
    return found


def test_components_far_from_their_class_are_no_reason_where_every_site_has_them() -> None:
    honest = sites()
    assert honest[0].mixtures.components.tolist() == [2, 2, 2]
    assert screen(class_points(honest, tuple(CLASSES))) == []


def test_a_component_far_beyond_those_of_the_others_is_found() -> None:
    hostile = sites()
    table = hostile[3].mixtures
    means = table.means.clone()
    means[1] *= 4 if means[1].norm() > means[0].norm() else 12
    hostile[3] = replace(hostile[3], mixtures=replace(table, means=means))
    assert [suspect.site for suspect in screen(class_points(hostile, tuple(CLASSES)))] == ["site 3"]

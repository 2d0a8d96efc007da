"""The screen where a class has several components: these lie farther out than class means do, and
at every site.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from fedsurrogate.client_app.datasets.partition import partition
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.mixtures import MixtureSettings, fit
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.strategies.robustness.class_points import Parts, class_points
from fedsurrogate.strategies.robustness.component_screening import scores_of
from fedsurrogate.strategies.robustness.screening import screen
from tests.hostile_sites import surrogate_of
from tests.samples import Samples

CLASSES, DIMENSION, SITES = "abc", 24, 8


def sites() -> list[Surrogate]:
    """Sites of which a tenth of every class lies far from the rest."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(len(CLASSES), 1, DIMENSION, generator=generator)
    aside = 10 * torch.nn.functional.normalize(
        torch.randn(len(CLASSES), DIMENSION, generator=generator)
    )
    found = []
    for index in range(SITES):
        features = centres + torch.randn(len(CLASSES), 100, DIMENSION, generator=generator)
        features[:, :10] += aside[:, None]
        labels = torch.arange(len(CLASSES)).repeat_interleave(100)
        mixtures = fit(
            features.flatten(0, 1), labels, len(CLASSES), MixtureSettings("diag", 2), generator
        )
        found.append(
            Surrogate(
                Header("fedpft", "run", f"site {index}", "backbone", tuple(CLASSES)), mixtures
            )
        )
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


@pytest.mark.parametrize(("records", "suspected"), [(6, False), (30, False), (300, True)])
def test_few_records_near_another_class_are_no_reason_and_many_are(
    records: int, suspected: bool
) -> None:
    """A component of the first of two classes, exactly at the mean of the second, which the others
    have 1,000 records of.
    """
    d = 1280
    centres = torch.zeros(2, d)
    centres[1, 0] = 10.0
    by_chance = torch.randn(d, generator=torch.Generator().manual_seed(0)) / records**0.5
    parts = Parts(
        (centres[1] + by_chance)[None], torch.tensor([0]), torch.tensor([1 / records]), ("a",)
    )
    tables = (
        torch.tensor([True, True]),
        torch.full((2,), 1e-3),
        100.0 * (1 - torch.eye(2)),
        torch.ones(2),
    )
    scores, other = scores_of(parts, centres, *tables, torch.tensor([1000.0, 1000.0]))
    assert other.tolist() == [1]
    assert (float(scores[0]) >= 1) == suspected


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 6, 8])
def test_honest_sites_with_ten_gaussians_of_real_features_stay(seed: int, samples: Samples) -> None:
    """CIFAR-10 features, Dirichlet 0.1: before their records counted, two or three of ten sites
    were suspects here.
    """
    train, classes = (
        load_file(samples("features/cifar10-train.safetensors")),
        tuple(map(str, range(10))),
    )
    features, labels = train["x"].float(), train["y"]
    spherical = {
        "fedpft.covariance": "spherical",
        "fedpft.components": 10,
        "fedpft.samples-per-component": 1,
    }
    run = parse_run({"alpha": 0.1, "seed": seed} | spherical)
    parts = partition(labels, None, run.settings, 10)
    sent = [
        surrogate_of((features[part], labels[part]), classes, "f", str(i), run)
        for i, part in enumerate(parts)
    ]
    assert screen(class_points(sent, classes)) == []

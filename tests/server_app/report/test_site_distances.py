"""The map of the sites: distances against POT, and a swapped label, inverted images and another
kind of images are seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ot.gaussian import bures_wasserstein_distance
from torch import Tensor

import fedsurrogate as fs
from fedsurrogate.server_app.report.site_distances import _scaled, site_map

DIMENSION, RECORDS = 24, 450


def records(seed: int, kind: str = "") -> tuple[Tensor, list[str]]:
    """Records of three classes. kind: "swapped" labels of two classes, "inverted" features, or
    "other" images.
    """
    shared = torch.Generator().manual_seed(0)
    means = 2.0 * torch.randn(3, DIMENSION, generator=shared)
    shift = 3.0 * torch.randn(DIMENSION, generator=shared)
    own = torch.Generator().manual_seed(seed)
    labels = torch.arange(RECORDS) % 3
    x = means[labels] + torch.randn(RECORDS, DIMENSION, generator=own)
    if kind == "inverted":
        x = -x
    if kind == "other":
        x = x + shift
    names = ["b", "a", "c"] if kind == "swapped" else ["a", "b", "c"]
    return x, [names[label] for label in labels.tolist()]


def surrogates(kinds: list[str], **settings: object) -> list[fs.Surrogate]:
    made = []
    for number, kind in enumerate(kinds):
        x, y = records(number + 1, kind)
        made.append(fs.fit(x, y, site=f"{kind or 'usual'}-{number}", **settings))  # type: ignore[arg-type]
    return made


def parsed(made: list[fs.Surrogate]) -> list[object]:
    from fedsurrogate.strategies import stored_strategy

    return [stored_strategy(each.config)(each.config).unpack(each.payload) for each in made]


KINDS = ["", "", "", "", "swapped", "inverted", "other"]
SETTINGS = [
    {"covariance": "spherical"},
    {"covariance": "lowrank", "rank": 4},
    {"covariance": "diag", "components": 2},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_swapped_inverted_and_other_sites_are_seen(settings: dict[str, object]) -> None:
    found = site_map(parsed(surrogates(KINDS, **settings)))  # type: ignore[arg-type]
    assert found is not None
    usual = [row for row, name in enumerate(found.sites) if name.startswith("usual")]
    among = found.distances[usual][:, usual].max()
    for row, name in enumerate(found.sites):
        if row not in usual:
            assert float(found.distances[row][usual].min()) > 2 * float(among), name
    assert set(found.odd) == {"swapped-4", "inverted-5", "other-6"}
    swapped = {(each.name, each.other) for each in found.resemblances if each.site == "swapped-4"}
    assert swapped == {("a", "b"), ("b", "a")}
    assert not [each for each in found.resemblances if each.site.startswith(("usual", "other"))]


def test_three_odd_sites_among_six_are_named_and_the_honest_half_is_not() -> None:
    """With medians over all other sites, half of which are odd, the site with inverted images seems
    usual.
    """
    found = site_map(
        parsed(surrogates(["", "", "", "swapped", "inverted", "other"], covariance="spherical"))
    )  # type: ignore[arg-type]
    assert found is not None
    assert set(found.odd) == {"swapped-3", "inverted-4", "other-5"}


def test_sites_alike_are_not_called_odd() -> None:
    found = site_map(parsed(surrogates(["", "", "", ""], covariance="spherical")))  # type: ignore[arg-type]
    assert found is not None
    assert (found.odd, found.resemblances) == ((), ())
    assert float(found.distances.max()) < 0.5


def test_one_odd_site_is_named() -> None:
    found = site_map(parsed(surrogates(["", "", "", "", "other"], covariance="spherical")))  # type: ignore[arg-type]
    assert found is not None
    assert found.odd == ("other-4",)


def test_in_few_dimensions_the_distance_is_that_of_pot() -> None:
    generator = torch.Generator().manual_seed(1)
    sites, moments = [], []
    for number in range(2):
        x = (
            torch.randn(4000, 3, generator=generator) @ torch.randn(3, 3, generator=generator)
            + number
        )
        x = torch.cat([x, x + 5])
        labels = ["a"] * 4000 + ["b"] * 4000
        sites.append(fs.fit(x, labels, site=f"s{number}", covariance="full"))
        moments.append([(part.mean(0), part.T.cov()) for part in (x[:4000], x[4000:])])
    found = site_map(parsed(sites))  # type: ignore[arg-type]
    assert found is not None

    def numbers(of: int, c: int) -> list[Any]:
        return [moments[k][c][of].double().numpy() for k in (0, 1)]

    wanted = [bures_wasserstein_distance(*numbers(0, c), *numbers(1, c)) for c in (0, 1)]
    traces = torch.tensor([float(moments[k][c][1].trace()) for k in (0, 1) for c in (0, 1)])
    assert float(found.distances[0, 1]) == pytest.approx(
        sum(wanted) / 2 / float(traces.median()) ** 0.5, rel=0.15
    )


def test_points_keep_distances_that_two_dimensions_can_show() -> None:
    points = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    distances = torch.cdist(points, points).double()
    drawn = _scaled(distances)
    assert torch.allclose(torch.cdist(drawn, drawn).double(), distances, atol=1e-4)


def test_one_site_has_no_map() -> None:
    assert site_map(parsed(surrogates([""], covariance="spherical"))) is None  # type: ignore[arg-type]

"""An honest site whose images are of another style than all others', with few classes and records,
keeps its weight.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import AnySurrogate
from fedsurrogate.strategies.robustness.defence import defend_surrogates
from tests.hostile_sites import surrogate_of

CLASSES, D = tuple("abcdefg"), 1280
# The correlation of photos and sketches of the same classes, measured on the images of PACS.
ALIKE = 0.09


def style(own: Tensor, common: Tensor) -> Tensor:
    return ALIKE**0.5 * common + (1 - ALIKE) ** 0.5 * own


def site(
    means: Tensor, classes: list[int], count: int, name: str, generator: torch.Generator
) -> AnySurrogate:
    labels = torch.tensor(classes).repeat_interleave(count)
    features = means[labels] + torch.randn(len(labels), D, generator=generator)
    return surrogate_of(
        (features, labels), CLASSES, "f" * 16, name, parse_run({"fedpft.covariance": "diag"})
    )


@pytest.mark.parametrize("count", [8, 15, 30, 60])
@pytest.mark.parametrize("classes", [[0, 1], [0, 1, 2], [3, 4, 5, 6]])
def test_a_site_of_another_style_keeps_its_weight(classes: list[int], count: int) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        common, photo, sketch = (
            0.5 * torch.randn(len(CLASSES), D, generator=generator) for _ in range(3)
        )
        sites = [
            site(style(photo, common), list(range(7)), 60, f"photos {i}", generator)
            for i in range(8)
        ]
        # Of another style there is little data. So chance hides most of its correlation with the
        # others.
        sites.append(site(style(sketch, common), classes, count, "sketches", generator))
        found = defend_surrogates(sites, "harm", 3.0, CLASSES)
        assert not found.suspects
        assert all(each.kept == 1 for each in found.effects.values())

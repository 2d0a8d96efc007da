"""One secure sum under privacy sees what tells generated classes apart, with few and many columns of any
scale, and says where nothing does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedsurrogate as fs

SUMMED: dict[str, Any] = {
    "secure_aggregation": True, "fedpft__covariance": "gram", "colluding": 0.0,
    "epsilon": 8.0, "delta": 1e-5, "classes": "0,1",
}  # fmt: skip
WIDTHS = (8, 64, 192, 512)
# Least accuracies, by family and number of columns. Of few columns that are clipped as they are, one sum does
# not show a level.
LEAST = {
    ("level", 64): 0.7, ("level", 192): 0.7, ("level", 512): 0.8,
    ("scale by column", 8): 0.9, ("scale by column", 64): 0.87, ("scale by column", 192): 0.83,
    ("scale by column", 512): 0.75,
}  # fmt: skip


def records(family: str, columns: int, count: int, seed: int) -> tuple[Any, Any]:
    """Two classes that differ in the level of all columns; along a direction of columns of scales from 0.1
    to 10; or in nothing.
    """
    drawn, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(77)
    labels = torch.randint(2, (count,), generator=drawn)
    x, signs = torch.randn(count, columns, generator=drawn), 2.0 * labels[:, None] - 1
    if family == "level":
        x = 5.5 + signs / 2 + x
    if family == "scale by column":
        way = torch.nn.functional.normalize(torch.randn(columns, generator=fixed), dim=0)
        x = (2 * signs * way + x) * 10 ** (2 * torch.rand(columns, generator=fixed) - 1)
    return x.numpy(), labels.numpy()


def summed(family: str, columns: int, folder: Path) -> Any:
    sites = [records(family, columns, 1000, seed) for seed in range(3)]
    test = records(family, columns, 2000, 99)
    return fs.simulate(sites, test=test, output_dir=folder, **SUMMED)


@pytest.mark.parametrize(("family", "columns"), LEAST)
def test_what_differs_is_seen_at_every_width(family: str, columns: int, tmp_path: Path) -> None:
    result = summed(family, columns, tmp_path)
    assert result.accuracy > LEAST[family, columns]
    assert result.metrics["card"]["state"] == "green"


@pytest.mark.parametrize("columns", WIDTHS)
def test_where_nothing_differs_no_card_is_green(columns: int, tmp_path: Path) -> None:
    # By chance an interval in forty lies above chance; three in a row do not.
    for number in range(3):
        result = summed("nothing", columns, tmp_path / str(number))
        # Five standard deviations of 2,000 guesses.
        assert abs(result.accuracy - 0.5) < 0.056
        if result.metrics["card"]["at_chance"]:
            break
    assert result.metrics["card"]["state"] == "amber"

"""Robust centres, capped weights and the screen of updates as plain functions: against other definitions and
false data.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import trim_mean

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.run import parse_run
from fedsurrogate.strategies.pooling.site_weights import (
    coordinate_median,
    median_weights,
    robust_tensors,
    trimmed_mean,
)


def geometric_median(points: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return median_weights(points @ points.mT, weights) @ points


def test_without_weights_the_median_and_the_trimmed_mean_are_the_textbooks() -> None:
    for count in (5, 10):
        points = torch.randn(count, 4)
        expected = torch.quantile(points, 0.5, dim=0)
        assert torch.allclose(coordinate_median(points, torch.ones(count)), expected, atol=1e-6)
        trimmed = torch.tensor(trim_mean(points.numpy(), 0.2))
        assert torch.allclose(
            trimmed_mean(points, torch.ones(count)).float(), trimmed.float(), atol=1e-5
        )


def test_a_weight_of_two_is_the_point_twice() -> None:
    points, weights = torch.randn(5, 3), torch.tensor([2.0, 1, 1, 2, 1])
    twice = torch.cat([points, points[[0, 3]]])
    for rule in (coordinate_median, trimmed_mean, geometric_median):
        assert torch.allclose(
            rule(points, weights).float(), rule(twice, torch.ones(7)).float(), atol=1e-4
        )


@pytest.mark.parametrize("rule", [coordinate_median, geometric_median])
def test_less_than_half_of_the_weight_cannot_move_a_median_far(rule: object) -> None:
    honest = torch.randn(6, 4)
    lies = torch.full((4, 4), 1e6)
    assert callable(rule)
    assert float(rule(torch.cat([honest, lies]), torch.ones(10)).abs().max()) < 10


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    points, weights = torch.randn(9, 3).double(), torch.rand(9).double()
    found = geometric_median(points, weights)

    def total(at: torch.Tensor) -> float:
        return float((weights * (points - at).norm(dim=1)).sum())

    assert all(total(found) <= total(found + 0.05 * torch.randn(3)) + 1e-6 for _ in range(50))


def test_robust_pooling_gives_each_site_one_vote_whatever_it_claims() -> None:
    honest, lies = [{"w": torch.randn(6)} for _ in range(8)], [{"w": torch.full((6,), 1e6)}] * 2
    for rule in ("median", "trimmed"):
        assert float(robust_tensors(honest + lies, rule)["w"].abs().max()) < 4


def test_the_default_measures_harm_where_it_can_and_changes_nothing_that_sites_are_asked() -> None:
    assert parse_run({"method": "fedpft"}).defence == "harm"
    assert {
        parse_run({"method": name}).defence
        for name in ("fedavg", "dsfl", "fedlap", "average", "ensemble", "dpcvae", "local")
    } == {"none"}
    assert parse_run({"fedpft.topology": "chain"}).defence == "none"
    assert parse_run({}).digest == parse_run({"defence": "none", "max-share": 7.0}).digest
    with pytest.raises(ConfigError, match="at least 1"):
        parse_run({"max-share": 0.5})

"""Robust centres, capped weights and the screen of updates as plain functions: against other definitions and
false data.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import trim_mean

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.parameters import CONTROL, Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.pooling.site_weights import (
    coordinate_median,
    median_weights,
    robust_tensors,
    shares_kept,
    trimmed_mean,
)
from fedsurrogate.strategies.robustness.defence import screen_updates

SITES, CLASSES, DIMENSION = 8, 5, 20


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


counts = st.lists(st.lists(st.floats(0, 1e8), min_size=3, max_size=3), min_size=3, max_size=9)


@given(counts, st.floats(1, 10), st.sampled_from([1.0, 2.0]))
def test_no_site_weighs_more_than_so_many_times_the_median_site(
    rows: list[list[float]], share: float, power: float
) -> None:
    kept = shares_kept(rows, share, power)
    weighed = [(sum(row) * part) ** power for row, part in zip(rows, kept, strict=True)]
    middle = sorted(sum(row) for row in rows)[(len(rows) - 1) // 2]
    assert all(0 < part <= 1 for part in kept)
    assert max(weighed) <= share * max(1.0, middle) ** power * (1 + 1e-9)


def test_sites_of_a_few_records_do_not_silence_those_that_hold_the_data() -> None:
    data = [[900.0], [500.0], *[[200.0]] * 10, [90.0]]
    assert shares_kept([*data, *[[2.0]] * 20], 3.0) == [600 / 900, *[1.0] * 32]
    # Hostile sites that are alone in having many records do not set the limit for themselves.
    for hostile, honest in ((1, 3), (3, 7), (9, 91), (24, 76)):
        kept = shares_kept([*[[1e8]] * hostile, *[[5.0]] * honest], 3.0)
        assert kept == pytest.approx([*[15 / 1e8] * hostile, *[1.0] * honest])


def test_of_two_sites_the_smaller_does_not_silence_the_larger() -> None:
    assert shares_kept([[3.0, 2.0], [500.0, 500.0]], 3.0) == [1.0, 1.0]
    assert shares_kept([[3.0], [1000.0], [1000.0]], 3.0) == [1.0, 1.0, 1.0]


def test_no_cap_means_none_and_a_usual_site_keeps_its_weight() -> None:
    assert shares_kept([[1.0], [1e8]], 0) == [1.0, 1.0]
    assert shares_kept([[5.0, 5.0], [9.0, 1.0], [20.0, 5.0]], 3.0) == [1.0, 1.0, 1.0]
    assert shares_kept([[1e8]], 3.0) == [1.0]


def update(site: int, vector: torch.Tensor) -> Parameters:
    return Parameters(Header("fedavg", "r", str(site), "f", ("a", "b")), 1, {"weight": vector})


def test_updates_that_are_far_or_trained_on_other_labels_are_found() -> None:
    common = torch.randn(50)
    updates = [update(site, common + 0.5 * torch.randn(50)) for site in range(8)]
    assert screen_updates(updates) == []
    lies = [update(8, 100 * common), update(9, torch.randn(50))]
    assert {suspect.site: suspect.kind for suspect in screen_updates(updates + lies)} == {
        "8": "far",
        "9": "opposed",
    }


def test_what_travels_next_to_an_update_is_judged_as_well() -> None:
    common = torch.randn(50)

    def reply(site: int, name: str, value: torch.Tensor) -> Parameters:
        sent = update(site, common + 0.5 * torch.randn(50))
        wide = (
            {}
            if name.startswith(CONTROL)
            else {"mean": torch.zeros(50), "deviation": torch.ones(50)}
        )
        return replace(sent, tensors={**sent.tensors, **wide, name: value})

    for name in (CONTROL + "weight", "mean", "deviation"):
        for lie in (1e12, 40.0):
            updates = [reply(site, name, 1 + 0.1 * torch.randn(50)) for site in range(7)]
            assert screen_updates(updates) == []
            found = screen_updates([*updates, reply(7, name, lie * torch.ones(50))])
            assert [(suspect.site, suspect.kind) for suspect in found] == [("7", "far")]


def test_robust_pooling_gives_each_site_one_vote_whatever_it_claims() -> None:
    honest, lies = [{"w": torch.randn(6)} for _ in range(8)], [{"w": torch.full((6,), 1e6)}] * 2
    for rule in ("median", "trimmed"):
        assert float(robust_tensors(honest + lies, rule)["w"].abs().max()) < 4


@pytest.mark.parametrize(
    "flat",
    [
        {"method": "fedlap", "defence": "median"},
        {"method": "kd", "defence": "median"},
        {"fedpft.topology": "chain", "defence": "harm"},
        {"method": "ensemble", "defence": "median"},
        {
            "fedpft.components": 2,
            "epsilon": 1.0,
            "delta": 1e-5,
            "fedpft.covariance": "spherical",
            "defence": "harm",
        },
    ],
)
def test_a_defence_that_is_not_defined_is_refused_with_what_is(
    flat: dict[str, str | float],
) -> None:
    with pytest.raises(ConfigError, match=r"is not defined for method = .*; use 'auto' or 'none'"):
        parse_run(flat)


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

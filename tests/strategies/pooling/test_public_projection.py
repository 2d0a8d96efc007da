"""The public map of secure aggregation: from public files alone, and the same at sites, coordinator and
model.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.privacy.gaussian_mechanism import public_signs, weigh_mean_over_columns
from fedsurrogate.common.privacy.shares import KEPT
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.rules import dimensions_of
from fedsurrogate.common.settings.heads import FEWEST_MAPPED
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.wire.surrogate_proto import map_digest, pack_map, unpack_map
from fedsurrogate.strategies.pooling.class_means import (
    RIDGE,
    map_with_words,
    read_map,
    whitened,
)
from tests.grid import metrics_of, run_federation, sites

SECURE: dict[str, Any] = {
    "secure-aggregation": True,
    "classes": "a,b",
    "fedpft.covariance": "gram",
    "epsilon": 1.0,
    "delta": 1e-5,
    "features.power-transform": 1,
}


# All that a user must set.
UNSET: dict[str, Any] = {
    "secure-aggregation": True,
    "classes": "a,b",
    "epsilon": 1.0,
    "delta": 1e-5,
}


def files(folder: Path, head: torch.Tensor, public: torch.Tensor) -> dict[str, Any]:
    save_file({"fc.weight": head}, folder / "head.safetensors")
    save_file({"x": public}, folder / "public.safetensors")
    return {
        "features.projection": str(folder / "head.safetensors"),
        "fedpft.public": str(folder / "public.safetensors"),
        "features.dimensions": 8,
    }


@settings(max_examples=20)
@given(
    seed=st.integers(0, 99),
    images=st.sampled_from([3, 6, 40]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_the_directions_are_those_of_the_head_for_whitened_features(
    seed: int, images: int, scale: float
) -> None:
    """With S the covariance plus a thousandth of its mean variance, rows W of a head H have W'W
    proportional to S^-1/2 (S^1/2 H'H S^1/2)^1/2 S^-1/2, also for fewer images than dimensions.
    """
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(4, 6, generator=generator).double()
    public = scale * torch.randn(images, 6, generator=generator).double() + 3 * scale
    covariance = torch.cov(public.T, correction=0)

    def root(matrix: torch.Tensor, power: float) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return (vectors * values.clamp_min(0) ** power) @ vectors.T

    wide = covariance + RIDGE * covariance.trace() / 6 * torch.eye(6)
    half, back = root(wide, 0.5), root(wide, -0.5)
    wanted = back @ root(half @ head.T @ head @ half, 0.5) @ back
    rows = whitened(head, public)
    assert float(rows.abs().max()) == pytest.approx(1)
    found = rows.T @ rows
    torch.testing.assert_close(found / found.trace(), wanted / wanted.trace(), rtol=1e-4, atol=1e-6)


def test_a_map_survives_the_wire_and_changes_its_digest() -> None:
    maps = [
        PublicMap(torch.eye(3)[:2]),
        PublicMap(None, torch.ones(3)),
        PublicMap(torch.eye(3)[:2], torch.ones(3)),
    ]
    digests = {map_digest(pack_map(each)) for each in (*maps, PublicMap())}
    assert len(digests) == 4
    assert map_digest(pack_map(PublicMap())) == b""
    features = torch.randn(5, 3)
    for each in maps:
        assert torch.equal(unpack_map(pack_map(each)).apply(features), each.apply(features))


def test_a_map_of_another_dimension_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SurrogateError, match="centre of 4"):
        PublicMap(None, torch.ones(4)).apply(torch.ones(2, 3))
    with pytest.raises(ConfigError, match="another number"):
        read_map(parse_run(SECURE | files(tmp_path, torch.randn(4, 6), torch.randn(9, 5))))


def test_dimensions_follow_from_public_numbers() -> None:
    """More for more records and a larger epsilon; as set, if they are."""

    def dimensions(**settings: Any) -> int:
        run = parse_run(SECURE | {key.replace("_", "-"): v for key, v in settings.items()})
        return dimensions_of(run.settings.features, run.settings.colluding, run.mechanism)

    by_epsilon = [dimensions(epsilon=epsilon) for epsilon in (1.0, 2.0, 4.0, 8.0)]
    assert by_epsilon == sorted(by_epsilon)
    assert 250 < by_epsilon[0] < 350
    assert dimensions(**{"features.records": 40_000}) == pytest.approx(2 * by_epsilon[0], abs=1)
    assert dimensions(colluding=0.0) > by_epsilon[0]
    assert dimensions(**{"features.dimensions": 77}) == 77
    assert dimensions(epsilon=0.0, delta=0.0) == 512


@settings(max_examples=20, deadline=None)
@given(dimension=st.integers(128, 200), seed=st.integers(0, 99), shift=st.floats(-1e3, 1e3))
def test_what_all_columns_share_is_in_one_direction_at_most_of_a_run_that_sets_nothing(
    dimension: int, seed: int, shift: float
) -> None:
    """Such as the mean of features that are never negative: it would take most of the clip."""
    run = parse_run(UNSET)
    public = read_map(run, dimension)
    rows = public.projection
    assert rows is not None
    most = dimensions_of(run.settings.features, run.settings.colluding, run.mechanism)
    assert len(rows) == min(most, dimension - 1)
    assert 0 < float(rows[-2].norm()) <= 1 + 1e-3
    assert float(torch.linalg.matrix_norm(rows[:-2], 2)) <= 1 + 5e-3
    features = torch.rand(3, dimension, generator=torch.Generator().manual_seed(seed))
    moved = public.apply(features + shift) - public.apply(features)
    others = torch.ones(len(rows), dtype=torch.bool)
    others[-2] = False
    assert float(moved[:, others].abs().max()) <= 2e-3 * abs(shift) + 1e-4
    # What sites do first bounds it by the rest of a feature, whose length in root of d becomes one.
    kept = public.apply(weigh_mean_over_columns(features + shift, KEPT))[:, -2]
    assert bool((kept.abs() <= 0.76 * dimension**0.5).all())
    again = read_map(parse_run(UNSET | {"seed": seed}), dimension).projection
    assert again is not None
    assert torch.equal(again, rows), "every coordinator draws the same"


@settings(max_examples=20, deadline=None)
@given(classes=st.sampled_from([2, 40, 300]), seed=st.integers(0, 99))
def test_a_run_that_sets_nothing_takes_the_head_of_its_backbone(classes: int, seed: int) -> None:
    """If it has as many classes as dimensions are wanted, for features of this dimension."""
    head = torch.randn(classes, 160, generator=torch.Generator().manual_seed(seed)).double()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        save_file({"features.weight": torch.ones(3), "classifier.1.weight": head.float()}, file)
        run = parse_run(UNSET | {"weights-path": str(file), "features.dimensions": 32})
        found, other = read_map(run, 160).projection, read_map(run, 150).projection
    assert found is not None
    assert other is not None
    assert other.shape == (32, 150), "a head for other features is not used"
    assert found.shape == (32, 160)
    apart = head - head.mean(0)
    apart = apart - apart.mean(1, keepdim=True)
    kept = (apart @ found.double().T).square().sum() / apart.square().sum()
    best = torch.linalg.svdvals(apart)[:30].square().sum() / apart.square().sum()
    used = bool(kept > 0.98 * best)
    assert used == (classes >= 32)
    assert torch.allclose(found[:-2].sum(1), torch.zeros(30), atol=0.05)
    # The last are the mean of all columns and the signs, as long as others leave a random direction.
    wanted = torch.full((160,), math.sqrt(32 / 160) / math.sqrt(160))
    assert torch.allclose(found[-2], wanted, rtol=1e-3)
    assert torch.allclose(found[-1], public_signs(160).float() * math.sqrt(32 / 160), rtol=1e-3)


@pytest.mark.parametrize(
    ("changed", "dimension"),
    [
        ({"features.projection": ""}, 640),
        ({"secure-aggregation": False}, 640),
        ({"epsilon": 0.0, "delta": 0.0}, 640),
        ({}, FEWEST_MAPPED - 1),
    ],
)
def test_no_map_where_it_was_not_asked_for_or_no_noise_needs_it(
    changed: dict[str, Any], dimension: int
) -> None:
    assert read_map(parse_run(UNSET | changed), dimension) == PublicMap()
    assert read_map(parse_run(UNSET), 640) != PublicMap()


def test_unreadable_weights_give_random_directions(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"no weights")
    for name in ("weights.safetensors", "none.safetensors"):
        run = parse_run(UNSET | {"weights-path": str(tmp_path / name)})
        _, words = map_with_words(run, 160)
        assert "random" in words


@given(records=st.integers(1, 10**9), most=st.sampled_from([5000, 20_000, 10**8]))
def test_a_sum_has_room_for_all_records_that_are_known(records: int, most: int) -> None:
    run = parse_run(UNSET | {"features.records": records, "secure-aggregation-records": most})
    assert run.settings.secure_aggregation_records == (
        max(records, most) if most == 20_000 else most
    )
    assert parse_run(run.settings.flat()).digest == run.digest


def test_budget_and_classes_are_all_that_a_secure_aggregation_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsurrogate.common.secure_aggregation.rules.FEWEST_MAPPED", 64)
    classes = ",".join(map(str, range(10)))
    chosen = {"secure-aggregation": True, "epsilon": 8.0, "delta": 1e-5, "classes": classes}
    metrics = metrics_of(run_federation(tmp_path, sites(3), **chosen))
    assert "63 of 64 directions: random" in metrics["learning"]["projection"]
    assert metrics["accuracy"]["model"] > 0.8

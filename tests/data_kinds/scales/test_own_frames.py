"""Methods that send once: whatever the scale and offset of a column, the model is as good as on
clean columns; and clean columns are sent as ever.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedsurrogate as fs
from fedsurrogate.client_app.features.site_features import (
    FAR_TOGETHER,
    SHARE,
    SQUARED_NORM,
    _varying,
    frame_of,
    outlier_columns,
)
from tests.data_kinds.scales.affine import DIMENSION, RECORDS, Affine, affine, oracle, records

METHODS: dict[str, dict[str, Any]] = {
    "spherical": {"covariance": "spherical"},
    "diag": {"covariance": "diag"},
    "full": {"covariance": "full", "head__solver": "lda"},
    "lowrank": {"covariance": "lowrank", "rank": 4},
    "gram": {"covariance": "gram"},
    "ridge": {"covariance": "gram", "head__solver": "ridge"},
    "average": {"method": "average"},
    "ensemble": {"method": "ensemble"},
}
# Heads that are trained, and so take longer or vary more.
TRAINED = ("spherical", "diag", "average", "ensemble")
POINT = 0.0101


def sent(features: Tensor, labels: Tensor, own: dict[str, Any]) -> list[fs.Surrogate]:
    """What three sites send that share the first half, with all classes at each."""
    parts = zip(features[:RECORDS].tensor_split(3), labels[:RECORDS].tensor_split(3), strict=True)
    return [fs.fit(x, y, site=f"site-{i}", **own) for i, (x, y) in enumerate(parts)]


def accuracy(features: Tensor, labels: Tensor, own: dict[str, Any]) -> float:
    """Of the model of three sites, on the second half."""
    model = fs.learn(sent(features, labels, own))
    wanted = [str(label) for label in labels[RECORDS:].tolist()]
    found = [str(label) for label in model.predict(features[RECORDS:]).tolist()]
    return sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted)


@cache
def lost_without_change(name: str, noisy: bool) -> float:
    """What a method loses against the oracle on clean columns, perhaps with a column of noise:
    not all methods estimate the whole covariance.
    """
    clean, labels = records()
    clean = Affine((0.0,) * DIMENSION, noise=1.0 if noisy else 0.0)(clean)
    return max(0.0, oracle(clean, labels) - accuracy(clean, labels, METHODS[name]))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in TRAINED])
@settings(max_examples=3, deadline=None)
@given(change=affine())
def test_no_change_of_columns_costs_a_point(name: str, change: Affine) -> None:
    _costs_no_point(name, change)


def _costs_no_point(name: str, change: Affine) -> None:
    clean, labels = records()
    changed, lost = change(clean), lost_without_change(name, bool(change.noise))
    # What is sampled or trained differs by a few records from draw to draw.
    least = oracle(changed, labels) - lost - (5 if name in TRAINED else 1) * POINT
    assert accuracy(changed, labels, METHODS[name]) >= least


@pytest.mark.parametrize("power", [-36, -20, -8, 6, 15, 30])
@pytest.mark.parametrize("name", ["gram", "ridge"])
def test_columns_that_are_all_tiny_or_huge_cost_nothing(name: str, power: int) -> None:
    clean, labels = records()
    changed = (clean.double() * 10.0**power).float()
    assert not outlier_columns(changed)
    assert accuracy(changed, labels, METHODS[name]) >= oracle(clean, labels) - POINT


@pytest.mark.parametrize("name", [name for name in METHODS if name not in TRAINED])
def test_clean_columns_have_no_frame_and_send_no_more_bytes(name: str) -> None:
    clean, labels = records()
    for each in sent(clean, labels, METHODS[name]):
        assert each.payload.find(b"frame") < 0
        larger = sent(clean + 1e4, labels, METHODS[name])[0]
        # Offset and scale of each column, and their length.
        assert len(larger.payload) - len(each.payload) >= 8 * DIMENSION


@settings(max_examples=30, deadline=None)
@given(change=affine())
@example(change=Affine((-5.0,) * DIMENSION))
def test_a_frame_makes_all_columns_alike(change: Affine) -> None:
    changed = change(records()[0])
    frame = frame_of(changed)
    # Columns that are all tiny are made alike too, although none is an outlier.
    if frame is None or len(frame.scale.unique()) == 1:
        assert not outlier_columns(changed)
        return
    inside = frame.apply(changed)
    assert inside.isfinite().all()
    varies = changed.double().std(0) > 0
    torch.testing.assert_close(
        inside.double().std(0, correction=0)[varies],
        torch.ones(int(varies.sum()), dtype=torch.float64),
        rtol=1e-3,
        atol=1e-3,
    )
    assert not inside[:, ~varies].any()


@settings(max_examples=30, deadline=None)
@given(
    away=st.lists(st.floats(-30, 30), min_size=DIMENSION, max_size=DIMENSION),
    power=st.integers(-2, 2),
)
def test_columns_that_are_far_from_zero_together_are_shifted_and_keep_their_scales(
    away: list[float], power: int
) -> None:
    clean = records()[0].double()
    clean = clean - clean.mean(0)
    spread = clean.var(0, correction=0).sum()
    mean = torch.tensor(away, dtype=torch.float64) * (spread / DIMENSION).sqrt()
    far = float(mean.square().sum() / spread)
    assume(abs(far - FAR_TOGETHER) > 0.1)
    changed = ((clean + mean) * 10.0**power).float()
    frame = frame_of(changed)
    assert (frame is not None) == (far > FAR_TOGETHER)
    if frame is not None:
        expected = clean * (SQUARED_NORM / spread).sqrt()
        torch.testing.assert_close(frame.apply(changed).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: torch.cat([x, torch.full((len(x), 1), 1e4)], 1),
        lambda x: x + torch.tensor([0.0, 0, 0, 1e4, 0, 0]),
        lambda x: x * torch.tensor([1.0, 1, 1, 1e20, 1, 1]),
        lambda x: x * torch.tensor([1.0, 1, 1, 1e-4, 1, 1]),
        lambda x: torch.cat([x, 1e3 * torch.randn(len(x), 1)], 1),
        lambda x: x - 500,
    ],
)
def test_odd_columns_are_found(odd: Any) -> None:
    clean = records()[0]
    assert not outlier_columns(clean)
    assert outlier_columns(odd(clean))


@settings(max_examples=80, deadline=None)
@given(
    records=st.integers(20, 80),
    values=st.sampled_from([(0.0, 1.0, 2.0), (0.0, 0.0, 1.0), (-3e4, 5.0, 5.0), (1.0, 1.0, 1.0)]),
    least=st.sampled_from([0.0, 1e-9, 0.5, 1.0, 1.5]),
)
def test_columns_vary_where_their_ranks_are_apart(
    records: int, values: tuple[float, float, float], least: float
) -> None:
    # As many of the smallest and of the largest numbers as the ranks need, one fewer, one more.
    counts = list(product(round(SHARE * (records - 1)) + torch.arange(3), repeat=2))
    columns = torch.full((records, len(counts)), values[1])
    for column, (smallest, largest) in zip(columns.T, counts, strict=True):
        column[:smallest], column[records - largest :] = values[0], values[2]
    ordered = columns.double().sort(0).values
    ends = [ordered[round(share * (records - 1))] for share in (SHARE, 1 - SHARE)]
    bounds = torch.full((len(counts),), least, dtype=torch.float64)
    assert _varying(columns, bounds).tolist() == (ends[1] - ends[0] > least).tolist()


def test_columns_that_are_mostly_zero_or_constant_are_not_odd() -> None:
    clean = records()[0]
    rare = torch.zeros(len(clean), 2)
    rare[0, 0] = 1e-5
    assert not outlier_columns(torch.cat([clean, rare], 1))
    assert not outlier_columns(clean[:1])
    assert not outlier_columns(torch.full((20, 3), 1e4))


def test_a_surrogate_in_a_frame_survives_a_file(tmp_path: Any) -> None:
    clean, labels = records()
    far = clean + 1e4
    parts = sent(far, labels, {"covariance": "gram"})
    for number, each in enumerate(parts):
        each.save(tmp_path / f"{number}.pb")
    again = [fs.load(tmp_path / f"{number}.pb", covariance="gram") for number in range(3)]
    assert [each.payload for each in again] == [each.payload for each in parts]
    model = fs.learn(again)
    model.save(tmp_path / "model.safetensors")
    loaded = fs.load(tmp_path / "model.safetensors")
    assert (model.predict_proba(far) == loaded.predict_proba(far)).all()

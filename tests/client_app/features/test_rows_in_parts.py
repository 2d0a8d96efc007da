"""Rows that are read, changed and written part by part are those of the whole table."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.features import cache, extraction
from fedsurrogate.client_app.features.cache import chunks, clipped_features, written
from fedsurrogate.client_app.features.extraction import Features
from fedsurrogate.common.privacy.gaussian_mechanism import clip

TABLES = st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 99))


def table(shape: tuple[int, int, int]) -> torch.Tensor:
    count, width, seed = shape
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@given(count=st.integers(0, 20), width=st.integers(0, 9), size=st.integers(1, 30))
def test_slices_divide_all_rows(count: int, width: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "CHUNK", size)
        found = [list(range(count))[each] for each in chunks(count, width)]
    assert [row for part in found for row in part] == list(range(count))
    rows = max(1, size // max(1, width))
    assert all(len(part) == rows for part in found[:-1])
    assert all(part for part in found)


@settings(max_examples=60, deadline=None)
@given(shape=TABLES, size=st.integers(1, 9), norm=st.sampled_from([0.5, 1.0, 2.0, 100.0]))
def test_clipped_rows_in_a_file_are_those_in_memory(
    shape: tuple[int, int, int], size: int, norm: float
) -> None:
    features = table(shape)
    expected, share = clip(2.0 * features.double(), norm)
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "CHUNK", size)
        for folder in (None, Path(place, "inner")):
            found, shortened = clipped_features(features, norm, folder, lambda rows: 2.0 * rows)
            assert found.dtype == torch.float64
            assert torch.equal(found, expected)
            if len(features):
                assert shortened == pytest.approx(share)


@settings(max_examples=40, deadline=None)
@given(shapes=st.lists(TABLES, max_size=4), double=st.booleans())
def test_a_written_table_is_all_parts_of_the_type_that_was_asked_for(
    shapes: list[tuple[int, int, int]], double: bool
) -> None:
    parts = [table((count, 3, seed)) for count, _, seed in shapes]
    kind = torch.float64 if double else torch.float32
    with TemporaryDirectory() as place:
        found = written(iter(parts), 3, Path(place), kind)
        assert not list(Path(place).iterdir())
    assert found.dtype == kind
    assert torch.equal(found, torch.cat([torch.zeros(0, 3), *parts]).to(kind))
    if not double:
        assert written(iter(parts), 3, Path(place)).dtype == torch.float32
        Path(place).rmdir()


@settings(max_examples=60, deadline=None)
@given(
    bags=st.lists(
        st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True), min_size=1, max_size=4
    ),
    ok=st.lists(st.booleans(), min_size=8, max_size=8),
    odd=st.sets(st.integers(0, 7), max_size=2),
    power=st.sampled_from([1.0, 0.5]),
    piece=st.integers(1, 20),
)
def test_the_feature_of_a_bag_is_the_mean_of_what_can_be_used(
    bags: list[list[int]], ok: list[bool], odd: set[int], power: float, piece: int
) -> None:
    x = table((8, 3, 1)).half()
    for row in odd:
        x[row, 1] = math.inf
    one = Features(x, torch.tensor(ok), "f", 0.0, cached=False)
    plain = one.of(torch.tensor([5, 2]))
    assert torch.equal(plain, x[[5, 2]].float())
    raised = one.of(torch.tensor([5, 2]), power)
    values = x[[5, 2]].float()
    torch.testing.assert_close(raised, values.sign() * values.abs() ** power)
    found = one.pooled([torch.tensor(each) for each in bags])
    assert found.ok.tolist() == [any(ok[image] for image in each) for each in bags]
    assert (found.fingerprint, found.cached) == ("f", False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extraction, "PIECE", piece)
        means = found.of(torch.arange(len(bags)).flip(0), power)
    for mean, each in zip(means, reversed(bags), strict=True):
        used = [image for image in each if ok[image] and image not in odd]
        if not used:
            assert mean.isnan().all()
            continue
        rows = x[used].double()
        rows = rows.sign() * rows.abs() ** power
        torch.testing.assert_close(mean.double(), rows.mean(0), rtol=1e-4, atol=1e-5)

"""One record, or one patient, changes each histogram of images by at most one, and all of them together by
the bound that is charged; whatever the request, the file, or the patient's number of images.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.datasets.dataset import Dataset
from fedsurrogate.client_app.features.image_cells import image_cells
from fedsurrogate.client_app.methods.counting import count_images
from fedsurrogate.common.errors import norm_of_ones
from fedsurrogate.common.image_histograms import HISTOGRAMS, Histogram
from fedsurrogate.common.privacy.gaussian_mechanism import unit_weights

ANY = st.floats(allow_nan=True, allow_infinity=True)
# Cells as a hostile request may state them: repeated, out of order, not a number, or none at all.
HOSTILE = st.one_of(
    st.builds(Histogram, st.just("x"), st.lists(ANY, max_size=5).map(tuple)),
    st.builds(
        Histogram,
        st.just("x"),
        names=st.lists(st.sampled_from(["a", "a", "PA", ""]), max_size=4).map(tuple),
        open=st.booleans(),
    ),
    st.sampled_from([*HISTOGRAMS.values()]),
)
VALUE = st.one_of(ANY, st.sampled_from(["a", "PA", "L/F", "Siemens"]), st.none())


@st.composite
def sites(draw: Any) -> tuple[dict[str, Histogram], list[dict[str, Any]], list[int]]:
    names = draw(st.lists(st.sampled_from([*HISTOGRAMS]), min_size=1, max_size=4, unique=True))
    histograms = {name: draw(HOSTILE) for name in names}
    facts = draw(
        st.lists(st.fixed_dictionaries(dict.fromkeys(names, VALUE)), min_size=1, max_size=8)
    )
    patients = [draw(st.integers(0, 3)) for _ in facts]
    return histograms, facts, patients


def counts(
    histograms: dict[str, Histogram], facts: list[dict[str, Any]], patients: list[int] | None
) -> list[Tensor]:
    """Each histogram of a site."""
    none = torch.zeros(len(facts), dtype=torch.int64)
    dataset = Dataset("x", none, ("a",), none == 0, "", describe=lambda row: facts[row])
    cells = image_cells(dataset, histograms).long()
    units = None if patients is None else tuple(map(str, patients))
    sizes = [len(each.cells) for each in histograms.values()]
    total = count_images(sizes, cells, unit_weights(units, len(facts)))
    return [*torch.split(total.value, sizes)]


@settings(deadline=None)
@given(sites(), st.booleans())
def test_one_unit_changes_each_histogram_by_at_most_one_and_all_by_the_bound(
    site: tuple[dict[str, Histogram], list[dict[str, Any]], list[int]], of_patients: bool
) -> None:
    histograms, facts, patients = site
    gone = patients[0] if of_patients else None
    rest = [at for at in range(len(facts)) if (patients[at] != gone if of_patients else at)]
    before = counts(histograms, facts, patients if of_patients else None)
    after = counts(
        histograms,
        [facts[at] for at in rest],
        [patients[at] for at in rest] if of_patients else None,
    )
    apart = [a - b for a, b in zip(before, after, strict=True)]
    for own in apart:
        assert float(own.abs().sum()) <= 1 + 1e-9
        assert float(own.min()) >= -1e-9
    assert float(torch.cat(apart).norm()) <= norm_of_ones(len(histograms)) + 1e-9


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.integers(-(2**62), 2**62), min_size=4, max_size=4),
)
def test_a_cell_that_is_none_adds_no_more_than_any_other(
    sizes: list[int], cells: list[int]
) -> None:
    row = torch.tensor([cells[: len(sizes)]])
    total = count_images(sizes, row, torch.ones(1, dtype=torch.float64)).value
    for own in torch.split(total, sizes):
        assert float(own.abs().sum()) == pytest.approx(1)


def test_a_file_that_cannot_be_read_is_unknown_and_others_do_not_change() -> None:
    def describe(row: int) -> dict[str, Any]:
        if row == 1:
            raise ValueError("broken")
        return {"size": 100.0}

    none = torch.zeros(3, dtype=torch.int64)
    dataset = Dataset("x", none, ("a",), none == 0, "", describe=describe)
    size = {"size": HISTOGRAMS["size"]}
    unknown = len(HISTOGRAMS["size"].cells) - 1
    assert image_cells(dataset, size).flatten().tolist() == [1, unknown, 1]
    assert image_cells(Dataset("x", none[:0], (), none[:0] == 0, ""), size).shape == (0, 1)

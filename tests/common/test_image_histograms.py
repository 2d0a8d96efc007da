"""Histograms of images: every value is in one cell, whatever the edges; and a run states plain ones only."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.image_histograms import (
    HISTOGRAMS,
    UNKNOWN,
    Histogram,
    histograms_of,
)
from fedsurrogate.common.run import parse_run

SURVEY: dict[str, Any] = {"counting.kind": "survey", "classes": "a,b"}
ANY = st.floats(allow_nan=True, allow_infinity=True)
VALUES = st.one_of(
    ANY, st.text(max_size=5), st.none(), st.sampled_from(["PA", "L/F", "Siemens", "8"])
)


@given(st.lists(ANY, max_size=6), st.lists(st.text(max_size=3), max_size=4), st.booleans(), VALUES)
def test_every_value_is_in_one_cell_whatever_the_cells(
    edges: list[float], names: list[str], more: bool, value: Any
) -> None:
    """Also of edges that repeat, do not ascend, or are NaN: settings cannot state them, and nothing relies
    on that.
    """
    histogram = Histogram("x", tuple(edges), tuple(names), open=more)
    assert 0 <= histogram.cell(value) < len(histogram.cells)
    assert histogram.cell(None) == len(histogram.cells) - 1
    assert histogram.cells[-1] == UNKNOWN


@given(st.sampled_from(sorted(HISTOGRAMS)), VALUES)
def test_values_of_the_usual_histograms_are_where_their_names_say(name: str, value: Any) -> None:
    histogram = HISTOGRAMS[name]
    cell = histogram.cells[histogram.cell(value)]
    number = isinstance(value, float) and not math.isnan(value)
    if histogram.edges and number:
        low, high = [
            *map(
                float,
                cell.replace("below ", "-inf to ").replace(" or more", " to inf").split(" to "),
            )
        ]
        assert low <= value < high or value == high == math.inf
    elif value in histogram.names:
        assert cell == value
    else:
        assert cell in (UNKNOWN, "other")


@pytest.mark.parametrize(
    ("bins", "reason"),
    [
        ("size: 64, 64", "must be numbers that ascend"),
        ("size: 128, 64", "must be numbers that ascend"),
        ("size: nan, 64", "must be numbers that ascend"),
        ("size: 64, inf", "must be numbers that ascend"),
        ("size:", "must be numbers that ascend"),
        ("size: " + ",".join(map(str, range(65))), "65 cells for 'size'; at most 64"),
        ("size: 1; size: 2", "each once"),
        ("bits: 8", "must begin with one of size, spacing, maker"),
        ("maker: Siemens, siemens", "names that differ"),
        ("maker: other", "without 'other'"),
        ("maker: " + "x" * 41, "at most 40 characters"),
        ("spacing: 1", "has 'spacing', which is not in counting.images"),
    ],
)
def test_cells_that_are_no_public_plain_list_are_refused(bins: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_run(SURVEY | {"counting.images": "size,maker,bits", "counting.image-bins": bins})


@pytest.mark.parametrize(
    "more",
    [
        {"counting.kind": "evaluation", "counting.digest": "a" * 64},
        {"counting.kind": "none"},
        {"secure-aggregation": True, "epsilon": 1.0, "delta": 1e-5},
    ],
)
def test_only_a_survey_that_shows_each_site_counts_images(more: dict[str, Any]) -> None:
    given = SURVEY | {"counting.images": "size"} | more
    if more == {"counting.kind": "none"}:
        # Another kind of run does not read these settings.
        assert not parse_run(given).plan.counts
        return
    with pytest.raises(ConfigError, match="compares sites in a survey"):
        parse_run(given)


@pytest.mark.parametrize("images", ["colour", "size,size"])
def test_an_unknown_or_repeated_histogram_is_refused(images: str) -> None:
    with pytest.raises(ConfigError, match=r"no histogram 'colour'|a name stands twice"):
        parse_run(SURVEY | {"counting.images": images})


def test_the_budget_is_one_and_its_split_keeps_all_noise_least() -> None:
    """Of all splits, this one has the least sum of variances of both tables; both together cost epsilon."""
    run = parse_run(SURVEY | {"counting.images": "size,maker", "epsilon": 1.0, "delta": 1e-5})
    mechanism = run.mechanism
    assert mechanism is not None
    precisions = [(bound / sigma) ** 2 for sigma, bound in mechanism.noise.values()]
    assert sum(precisions) == pytest.approx(1 / mechanism.noise_multiplier**2)
    assert len(mechanism.events) == 1
    bounds = {name: bound for name, (_, bound) in mechanism.noise.items()}
    assert bounds == {"records": 1.0, "images": pytest.approx(math.sqrt(2))}

    def variance(share: float) -> float:
        return 1 / share + 2 / (1 - share)

    share = precisions[0] / sum(precisions)
    assert variance(share) <= min(variance(each / 100) for each in range(1, 100)) + 1e-9
    assert [*histograms_of(("size", "maker"))] == ["size", "maker"]

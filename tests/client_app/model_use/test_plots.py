"""Plots show the data that they are given, all of it and nothing else: what is drawn is compared with
plain loops over generated records.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.model_use import target_metrics
from fedsurrogate.client_app.model_use.target_metrics import Observed, Predictions

few = settings(max_examples=5, deadline=None)
Points = tuple[tuple[float, ...], tuple[float, ...]]


def drawn(axes: Any) -> list[Points]:
    """The lines of a panel with two points or one, in their order: x and y of each."""
    return [(numbers(line.get_xdata()), numbers(line.get_ydata())) for line in axes.lines]


def numbers(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(float(value), 9) for value in values)


def inside(axes: Any, x: Iterable[float] = (), y: Iterable[float] = ()) -> None:
    """Everything lies within the limits of the axes."""
    for limits, values in ((axes.get_xlim(), numbers(x)), (axes.get_ylim(), numbers(y))):
        assert all(min(limits) <= value <= max(limits) for value in values), limits


def same_scale(axes: Any) -> None:
    assert axes.get_xlim() == axes.get_ylim()


@st.composite
def predictions(draw: st.DrawFn, fewest: int = 1) -> Predictions:
    count, seed = draw(st.integers(fewest, 8)), draw(st.integers(0, 999))
    generator = np.random.default_rng(seed)
    true = generator.normal(50, 10, count).round(3)
    predicted = (true + generator.normal(0, 5, count)).round(3)
    if draw(st.booleans()):
        return Predictions(true, predicted)
    return Predictions(true, predicted, predicted - 20, predicted + 30)


@few
@given(predictions(0))
def test_predictions_lie_beside_their_true_numbers_on_equal_axes(records: Predictions) -> None:
    axes = target_metrics.predicted_against_true(records, "%").axes[0]
    everything = [*records.true, *records.predicted]
    spans = axes.collections
    if records.low is None or records.high is None:
        assert not spans
    else:
        ends = [numbers(part.ravel()) for part in spans[0].get_segments()]
        assert ends == [
            numbers([true, low, true, high])
            for true, low, high in zip(records.true, records.low, records.high, strict=True)
        ]
        everything += [*records.low, *records.high]
    ends = numbers([min(everything), max(everything)] if everything else [0, 1])
    assert drawn(axes) == [(numbers(records.true), numbers(records.predicted)), (ends, ends)]
    same_scale(axes)
    inside(axes, everything, everything)
    low, high = axes.get_xlim()
    width = ends[1] - ends[0] or 30.0
    assert 0 < ends[0] - low == pytest.approx(high - ends[1])
    assert high - ends[1] <= 0.05 * width
    assert axes.get_box_aspect() == 1, "equality is the diagonal"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("true [%]", "predicted [%]")


@few
@given(predictions())
def test_differences_lie_beside_bias_and_limits_of_agreement(records: Predictions) -> None:
    axes = target_metrics.bland_altman(records).axes[0]
    apart = records.predicted - records.true
    middle = (records.true + records.predicted) / 2
    levels = {"bias": (float(np.mean(apart)), "-")}
    if len(apart) > 1:
        width = 1.96 * float(np.sqrt(((apart - apart.mean()) ** 2).sum() / (len(apart) - 1)))
        levels["upper limit"] = (levels["bias"][0] + width, "--")
        levels["lower limit"] = (levels["bias"][0] - width, "--")
    first, zero, *others = drawn(axes)
    assert first == (numbers(middle), numbers(apart))
    assert zero == ((0.0, 1.0), (0.0, 0.0))
    found = {text.get_text().split("\n")[0]: text for text in axes.texts}
    assert found.keys() == levels.keys()
    for (name, text), (_, height), line in zip(found.items(), others, axes.lines[2:], strict=True):
        value, style = levels[name]
        assert height == pytest.approx((value, value))
        assert text.get_position()[1] == pytest.approx(value)
        assert text.get_text() == f"{name}\n{value:.3g}"
        assert text.get_position()[0] > 1
        assert line.get_linestyle() == style
    assert axes.get_xlabel() == "mean of predicted and true"
    assert axes.get_ylabel() == "predicted minus true"


@st.composite
def observed(draw: st.DrawFn) -> Observed:
    count = draw(st.integers(3, 20))
    generator = np.random.default_rng(draw(st.integers(0, 999)))
    times = generator.integers(1, 12, count).astype(float)
    return Observed(times, generator.random(count) < 0.6, generator.normal(size=count))


@few
@given(observed(), st.sampled_from([12.0, 30.0]))
def test_thirds_have_the_curve_of_kaplan_and_meier_and_the_numbers_at_risk(
    records: Observed, horizon: float
) -> None:
    pytest.importorskip("lifelines")
    axes, table = target_metrics.kaplan_meier_thirds(records, horizon, "years").axes
    own = target_metrics.thirds(records.risks)
    curves = {line.get_label(): line for line in axes.lines}
    assert [line.get_label() for line in axes.lines] == [
        name for third, name in enumerate(target_metrics.THIRDS) if (own == third).any()
    ]
    assert [each.get_text() for each in axes.get_legend().get_texts()] == list(curves)
    ticks = table.get_xticks().tolist()
    assert ticks[0] == 0
    assert len(ticks) >= 3
    assert all(0 <= tick <= horizon for tick in ticks)
    assert all(np.diff(ticks) == ticks[1]), "equal steps"
    assert horizon - ticks[-1] < ticks[1]
    inside(axes, (0, horizon), (0, 1))
    assert axes.get_xlim() == (0, horizon)
    found = {text.get_position(): text.get_text() for text in table.texts}
    for third, name in enumerate(target_metrics.THIRDS):
        at = own == third
        for tick in ticks:
            assert found.pop((tick, third)) == str(int((records.times[at] >= tick).sum()))
        if not at.any():
            continue
        assert curves[name].get_drawstyle() == "steps-post"
        x, y = (numbers(part) for part in curves[name].get_data())
        assert x[-1] == horizon
        assert y[-1] == y[-2], "the curve goes on to the horizon"
        chance = 1.0
        for time, value in zip(x[:-1], y[:-1], strict=True):
            here = at & (records.times == time)
            risk = int((records.times[at] >= time).sum())
            chance *= 1 - records.events[here].sum() / max(1, risk)
            assert value == pytest.approx(chance)
        band = axes.collections[list(curves).index(name)].get_paths()[0].vertices
        assert band[:, 0].max() == horizon
        assert all(low <= value <= high for value, low, high in _bands(x, y, band))
    assert not found
    assert [each.get_text() for each in table.get_yticklabels()] == list(target_metrics.THIRDS)
    assert table.get_yticks().tolist() == [0, 1, 2]
    bottom, top = table.get_ylim()
    assert bottom > 2
    assert top < 0, "in the order of the risk"
    assert table.get_title(loc="left") == "number at risk"
    assert table.get_xlabel() == "time [years]"
    # The curves have most of the room.
    assert axes.get_position().height > 0.5


def _bands(
    x: tuple[float, ...], y: tuple[float, ...], band: np.ndarray
) -> list[tuple[float, float, float]]:
    """At each time the value, and the lowest and highest end of the interval there."""
    return [
        (value, float(here.min()) - 1e-6, float(here.max()) + 1e-6)
        for time, value in zip(x, y, strict=True)
        if len(here := band[np.isclose(band[:, 0], time), 1])
    ]

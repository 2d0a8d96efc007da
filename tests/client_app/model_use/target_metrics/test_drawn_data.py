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

from fedsurrogate.client_app.model_use.target_metrics import plots
from fedsurrogate.client_app.model_use.target_metrics.numbers import Predictions
from fedsurrogate.client_app.model_use.target_metrics.times import Observed
from fedsurrogate.common.models.intervals import Measure

few = settings(max_examples=5, deadline=None)
SHARES = st.integers(1, 99).map(lambda share: share / 100)
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
def measures(draw: st.DrawFn) -> Measure:
    low, value, high = sorted(draw(st.lists(SHARES, min_size=3, max_size=3, unique=True)))
    form = draw(st.sampled_from(["whole", "no low", "no high", "no interval", "nothing"]))
    return Measure(
        None if form == "nothing" else value,
        None if form in ("no low", "no interval", "nothing") else low,
        None if form in ("no high", "no interval", "nothing") else high,
        draw(st.integers(0, 500)),
    )


GROUPS = st.dictionaries(
    st.sampled_from(["edema", "fracture", "mass"]),
    st.dictionaries(st.sampled_from(["north", "south", "all"]), measures(), min_size=1),
    min_size=1,
)


@few
@given(GROUPS, st.sampled_from([0.5, 1.0]))
def test_a_forest_has_a_line_for_each_estimate_in_order(
    groups: dict[str, dict[str, Measure]], neutral: float
) -> None:
    axes = plots.forest(groups, "AUROC", neutral).axes[0]
    lines: list[Points] = []
    names, texts = [], []
    for group, own in groups.items():
        names.append((group, "bold"))
        for name, each in own.items():
            place = float(len(names))
            names.append((f"{name}, n = {each.support}", "normal"))
            words = "not defined"
            if each.value is not None:
                words = f"{each.value:.2f}"
                if each.low is not None and each.high is not None:
                    lines.append((numbers([each.low, each.high]), (place, place)))
                    words += f" ({each.low:.2f} to {each.high:.2f})"
                lines.append((numbers([each.value]), (place,)))
            texts.append((place, words))
    assert drawn(axes) == [*lines, ((neutral, neutral), (0.0, 1.0))]
    labels = axes.get_yticklabels()
    assert [(each.get_text(), each.get_fontweight()) for each in labels] == names
    assert axes.get_yticks().tolist() == list(range(len(names)))
    assert [(text.get_position()[1], text.get_text()) for text in axes.texts] == texts
    assert all(text.get_position()[0] > 1 for text in axes.texts), "beside the panel"
    bottom, top = axes.get_ylim()
    assert bottom > len(names) - 1
    assert top < 0, "the first group is at the top"
    assert axes.get_xscale() == "linear"


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
    axes = plots.predicted_against_true(records, "%").axes[0]
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
    axes = plots.bland_altman(records).axes[0]
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
def annotated(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Truth (n, L), some of it not annotated, and chances, some on the edge of a bin."""
    shape = draw(st.integers(1, 30)), draw(st.integers(1, 2))
    generator = np.random.default_rng(draw(st.integers(0, 999)))
    truth = generator.choice([0.0, 1.0, np.nan], shape, p=[0.4, 0.3, 0.3])
    return truth, generator.integers(0, 21, shape) / 20


@few
@given(annotated())
def test_each_label_has_its_observed_shares_by_bin(data: tuple[np.ndarray, np.ndarray]) -> None:
    truth, chance = data
    names = [f"label {index}" for index in range(truth.shape[1])]
    panels = plots.calibration(truth, chance, names).axes
    assert [axes.get_title() for axes in panels] == names
    for index, axes in enumerate(panels):
        known = ~np.isnan(truth[:, index])
        pairs = list(zip(truth[known, index], chance[known, index], strict=True))
        diagonal, *found = drawn(axes)
        assert diagonal == ((0.0, 1.0), (0.0, 1.0))
        sizes, ends_of = {}, np.linspace(0, 1, 11)
        for place in range(10):
            own = [
                pair for pair in pairs if ends_of[place] < pair[1] <= ends_of[place + 1]
                or (place == 0 and pair[1] == 0)
            ]  # fmt: skip
            if own:
                sizes[place] = len(own)
                share, mean = (float(np.mean(part)) for part in zip(*own, strict=True))
                (at, ends), (x, y), *found = found
                assert at == pytest.approx((mean, mean))
                assert 0 <= ends[0] <= share <= ends[1] <= 1
                assert ends[1] - ends[0] == pytest.approx(wilson(share, len(own)), abs=1e-6)
                assert (x, y) == (pytest.approx((mean,)), pytest.approx((share,)))
        assert not found
        assert [text.get_text() for text in axes.texts] == [str(size) for size in sizes.values()]
        for place, bar in zip(sizes, axes.patches, strict=True):
            assert bar.get_x() + bar.get_width() / 2 == pytest.approx((place + 0.5) / 10)
            assert 0.05 < bar.get_width() < 0.1
            assert bar.get_height() / 0.15 == pytest.approx(sizes[place] / max(sizes.values()))
        inside(axes, (0, 1), (0, 1))
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "observed")


def wilson(share: float, count: int) -> float:
    """Width of the 95 % interval of Wilson 1927."""
    z = 1.959963984540054
    return float(
        2 * z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    )


@few
@given(annotated())
def test_each_label_has_its_precision_at_each_recall(
    data: tuple[np.ndarray, np.ndarray],
) -> None:
    truth, chance = data
    names = [f"label {index}" for index in range(truth.shape[1])]
    for index, axes in enumerate(plots.precision_recall(truth, chance, names).axes):
        known = ~np.isnan(truth[:, index])
        own, of = truth[known, index] == 1, chance[known, index]
        inside(axes, (0, 1), (0, 1))
        assert axes.get_title() == names[index]
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("recall", "precision")
        if not own.any():
            assert not axes.lines
            continue
        (recall, precision), (_, level) = drawn(axes)
        assert axes.lines[0].get_drawstyle() == "steps-post"
        wanted = {
            (round(float(own[of >= limit].sum() / own.sum()), 9), round(float(own[of >= limit].mean()), 9))
            for limit in set(of.tolist())
        }  # fmt: skip
        assert wanted <= set(zip(recall, precision, strict=True)) <= wanted | {(0.0, 1.0)}
        assert level == pytest.approx((own.mean(), own.mean()))


@few
@given(st.integers(1, 9))
def test_panels_stand_in_rows_of_four_and_are_nearly_square(count: int) -> None:
    truth = np.ones((3, count))
    figure = plots.precision_recall(truth, truth / 2, [str(index) for index in range(count)])
    rows, columns = -(-count // 4), min(4, count)
    for index, axes in enumerate(figure.axes):
        place = axes.get_subplotspec()
        grid = place.get_gridspec()
        assert (grid.nrows, grid.ncols) == (rows, columns)
        assert (place.rowspan.start, place.colspan.start) == divmod(index, columns)
    width, height = figure.get_size_inches()
    assert 0.7 < (width / columns) / (height / rows) < 1.4


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
    axes, table = plots.kaplan_meier_thirds(records, horizon, "years").axes
    own = plots.thirds(records.risks)
    curves = {line.get_label(): line for line in axes.lines}
    assert [line.get_label() for line in axes.lines] == [
        name for third, name in enumerate(plots.THIRDS) if (own == third).any()
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
    for third, name in enumerate(plots.THIRDS):
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
    assert [each.get_text() for each in table.get_yticklabels()] == list(plots.THIRDS)
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

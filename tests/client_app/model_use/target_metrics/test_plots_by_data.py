"""Every mark of a plot is where the records say: lines, points, bars, limits and words are read back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from scipy.stats import binomtest
from sklearn.metrics import precision_recall_curve

from fedsurrogate.client_app.model_use.target_metrics import plots
from fedsurrogate.client_app.model_use.target_metrics.numbers import Predictions
from fedsurrogate.client_app.model_use.target_metrics.times import Landmark, Observed
from fedsurrogate.common.models.class_measures import Measure

QUICK = settings(max_examples=12, deadline=None)
FINITE = st.floats(0.02, 90.0)
MEASURES = st.one_of(
    st.just(Measure(None, None, None, 0)),
    st.builds(lambda value, n: Measure(value, None, None, n), FINITE, st.integers(1, 999)),
    st.builds(
        lambda value, n: Measure(value, 0.5 * value, 1.5 * value, n), FINITE, st.integers(1, 999)
    ),
    # One end alone is no interval.
    st.builds(lambda value: Measure(value, 0.5 * value, None, 3), FINITE),
    st.builds(lambda value: Measure(value, None, 1.5 * value, 3), FINITE),
)
GROUPS = st.dictionaries(
    st.sampled_from(["edema", "fracture", "mass"]),
    st.dictionaries(st.sampled_from(["north", "south", "west"]), MEASURES, min_size=1),
    min_size=1,
)


def drawn(axes: Any) -> list[tuple[list[float], list[float]]]:
    """All lines and points, in the order in which they were drawn."""
    return [(list(each.get_xdata()), list(each.get_ydata())) for each in axes.lines]


def texts(axes: Any) -> list[tuple[float, float, str]]:
    return [(*each.get_position(), each.get_text()) for each in axes.texts]


def labels(axis: Any) -> list[tuple[float, str]]:
    """Ticks of an axis: place and name."""
    names = [each.get_text() for each in axis.get_ticklabels()]
    return list(zip(axis.get_ticklocs(), names, strict=True))


def close(found: Any, expected: Any) -> None:
    """Equal lists of lines, but for rounding."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a == pytest.approx(b, rel=1e-9, abs=1e-12)


@QUICK
@given(groups=GROUPS, ratio=st.booleans(), neutral=st.sampled_from([0.5, 1.0]))
def test_a_forest_plot_has_each_estimate_in_its_own_line(
    groups: dict[str, dict[str, Measure]], ratio: bool, neutral: float
) -> None:
    axes = plots.forest(groups, "AUROC", neutral, ratio).axes[0]
    lines, stated, names = [], [], []
    for group, own in groups.items():
        names.append(group)
        for name, measure in own.items():
            place = float(len(names))
            names.append(f"{name}, n = {measure.support}")
            words = "not defined"
            if measure.value is not None:
                words = f"{measure.value:.2f}"
                if measure.low is not None and measure.high is not None:
                    lines.append(([measure.low, measure.high], [place, place]))
                    words += f" ({measure.low:.2f} to {measure.high:.2f})"
                lines.append(([measure.value], [place]))
            stated.append((1.02, place, words))
    close(drawn(axes), [*lines, ([neutral, neutral], [0, 1])])
    assert texts(axes) == stated
    # The words are in the line of the estimate, to the right of the axes.
    assert all(each.get_transform() == axes.get_yaxis_transform() for each in axes.texts)
    assert labels(axes.yaxis) == list(enumerate(names))
    bold = [each.get_fontweight() == "bold" for each in axes.get_yticklabels()]
    assert bold == [name in groups for name in names]
    assert axes.get_ylim() == (len(names) - 0.4, -0.6)
    assert axes.get_xlabel() == "AUROC with 95 % interval"
    assert axes.get_xscale() == ("log" if ratio else "linear")
    assert not axes.spines["left"].get_visible()
    assert not axes.spines["top"].get_visible()
    if ratio:
        low, high = axes.get_xlim()
        wanted = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 50, 100]
        inside = [each for each in wanted if low <= each <= high]
        assert labels(axes.xaxis) == [(each, f"{each:g}") for each in inside]
        assert isinstance(axes.xaxis.get_minor_locator(), NullLocator)


NUMBERS = st.lists(st.tuples(*[st.floats(-50, 50).map(lambda x: round(x, 3))] * 2), max_size=12)


@QUICK
@given(pairs=NUMBERS, interval=st.booleans(), unit=st.sampled_from(["", "%"]))
def test_predictions_stand_against_the_truth_on_equal_axes(
    pairs: list[tuple[float, float]], interval: bool, unit: str
) -> None:
    true, predicted = (np.array([each[at] for each in pairs]) for at in (0, 1))
    band = (predicted - 2.0, predicted + 3.0) if interval else (None, None)
    axes = plots.predicted_against_true(Predictions(true, predicted, *band), unit).axes[0]
    everything = [*true, *predicted, *(() if not interval else (*band[0], *band[1]))]  # type: ignore[misc]
    ends = [min(everything), max(everything)] if everything else [0.0, 1.0]
    close(drawn(axes), [(list(true), list(predicted)), (ends, ends)])
    margin = 0.03 * (ends[1] - ends[0]) or 1.0
    for limits in (axes.get_xlim(), axes.get_ylim()):
        assert limits == pytest.approx((ends[0] - margin, ends[1] + margin))
    if interval and pairs:
        (bars,) = axes.collections
        segments = [each.tolist() for each in bars.get_segments()]
        assert segments == [
            [[x, y - 2.0], [x, y + 3.0]] for x, y in zip(true, predicted, strict=True)
        ]
    elif not interval:
        assert not axes.collections
    assert axes.get_box_aspect() == 1
    after = f" [{unit}]" if unit else ""
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("true" + after, "predicted" + after)


@QUICK
@given(pairs=NUMBERS.filter(bool))
def test_a_bland_altman_plot_has_bias_and_limits(pairs: list[tuple[float, float]]) -> None:
    true, predicted = (np.array([each[at] for each in pairs]) for at in (0, 1))
    axes = plots.bland_altman(Predictions(true, predicted), "mm").axes[0]
    apart, bias = predicted - true, float(np.mean(predicted - true))
    lines = [([(a + b) / 2 for a, b in pairs], list(apart)), ([0, 1], [0, 0])]
    named = {"bias": bias}
    if len(pairs) > 1:
        spread = 1.96 * float(np.std(apart, ddof=1))
        named = {"upper limit": bias + spread, "bias": bias, "lower limit": bias - spread}
    found = texts(axes)
    assert [(x, text) for x, _, text in found] == [
        (1.01, f"{name}\n{value:.3g}") for name, value in named.items()
    ]
    assert [y for _, y, _ in found] == pytest.approx(list(named.values()), rel=1e-3, abs=1e-9)
    lines += [([0, 1], [y, y]) for _, y, _ in found]
    close(drawn(axes), lines)
    whole = [each.get_linestyle() for each in axes.lines[2:]]
    assert whole == ["-" if name == "bias" else "--" for name in named]
    assert axes.get_xlabel() == "mean of predicted and true [mm]"
    assert axes.get_ylabel() == "predicted minus true [mm]"


@QUICK
@given(
    sizes=st.dictionaries(
        st.sampled_from(["north", "south", "west"]), st.integers(1, 9), min_size=1
    )
)
def test_residuals_have_one_box_for_each_site(sizes: dict[str, int]) -> None:
    by_site = {
        name: Predictions(np.arange(float(n)), np.arange(float(n)) ** 2 + at)
        for at, (name, n) in enumerate(sizes.items())
    }
    axes = plots.residuals_by_site(by_site, "mm").axes[0]
    assert labels(axes.yaxis) == [
        (at + 1, f"{name}, n = {n}") for at, (name, n) in enumerate(sizes.items())
    ]
    middles = [list(each.get_xdata()) for each in axes.lines if each.get_color() == plots.ORANGE]
    expected = [float(np.median(each.predicted - each.true)) for each in by_site.values()]
    assert middles == [[each, each] for each in expected]
    assert drawn(axes)[-1] == ([0, 0], [0, 1])
    assert axes.yaxis_inverted()
    assert axes.get_xlabel() == "predicted minus true [mm]"


@QUICK
@given(
    cells=st.lists(
        st.tuples(
            st.sampled_from([0.0, 1.0, math.nan]),
            st.sampled_from([0.0, 0.05, 0.1, 0.55, 0.95, 1.0]),
        ),
        max_size=30,
    )
)
def test_bins_of_a_calibration_have_share_interval_and_size(
    cells: list[tuple[float, float]],
) -> None:
    truth, chance = (np.array([each[at] for each in cells]).reshape(-1, 1) for at in (0, 1))
    (axes,) = plots.calibration(truth, chance, ["edema"]).axes
    known = [(t == 1, c) for t, c in cells if not math.isnan(t)]
    bins: dict[int, list[tuple[bool, float]]] = {}
    for each in known:
        bins.setdefault(min(int(each[1] * 10), 9), []).append(each)
    lines = [([0, 1], [0, 1])]
    for _, own in sorted(bins.items()):
        mean = sum(c for _, c in own) / len(own)
        hits = sum(t for t, _ in own)
        limits = binomtest(hits, len(own)).proportion_ci(method="wilson")
        lines += [([mean, mean], [limits.low, limits.high]), ([mean], [hits / len(own)])]
    close(drawn(axes), lines)
    bars = [(each.get_x(), each.get_width(), each.get_height()) for each in axes.patches]
    most = max(map(len, bins.values()), default=1)
    expected = [(0.1 * k + 0.005, 0.09, 0.15 * len(bins.get(k, ())) / most) for k in range(10)]
    close(bars, expected if known else [])
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 1), (-0.02, 1.02))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "observed")
    assert axes.get_title() == "edema"


@QUICK
@given(
    cells=st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, math.nan]), st.floats(0, 1)), min_size=1, max_size=30
    )
)
def test_precision_and_recall_are_those_of_annotated_records(
    cells: list[tuple[float, float]],
) -> None:
    truth, chance = (np.array([each[at] for each in cells]).reshape(-1, 1) for at in (0, 1))
    (axes,) = plots.precision_recall(truth, chance, ["edema"]).axes
    known = [(t == 1, c) for t, c in cells if not math.isnan(t)]
    lines: list[Any] = []
    if any(t for t, _ in known):
        precision, recall, _ = precision_recall_curve(*zip(*known, strict=True))
        share = sum(t for t, _ in known) / len(known)
        lines = [(list(recall), list(precision)), ([0, 1], [share, share])]
    close(drawn(axes), lines)
    assert all(each.get_drawstyle() == "steps-post" for each in axes.lines[:1])
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 1.02), (0, 1.02))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("recall", "precision")


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_panels_stand_four_in_a_row_in_their_order(count: int) -> None:
    names = [f"label {index}" for index in range(count)]
    truth = np.stack([np.arange(12) > index for index in range(count)], 1).astype(float)
    chance = np.linspace(0, 1, 12)[:, None].repeat(count, 1)
    for plot in (plots.calibration, plots.precision_recall):
        axes = plot(truth, chance, names).axes
        assert [each.get_title() for each in axes] == names
        grids = [each.get_subplotspec().get_geometry() for each in axes]
        columns = min(4, count)
        assert grids == [(math.ceil(count / columns), columns, at, at) for at in range(count)]
    shares = [each.lines[1].get_ydata()[0] for each in axes]
    assert shares == [(11 - index) / 12 for index in range(count)]


@QUICK
@given(
    cells=st.lists(
        st.tuples(st.integers(1, 20), st.booleans(), st.integers(0, 9)), min_size=1, max_size=25
    ),
    horizon=st.sampled_from([5.0, 12.0, 20.0]),
)
def test_curves_of_thirds_are_those_of_kaplan_and_meier(
    cells: list[tuple[int, bool, int]], horizon: float
) -> None:
    from lifelines import KaplanMeierFitter

    times, events, risks = (np.array([each[at] for each in cells]) for at in range(3))
    records = Observed(times.astype(float), events, risks.astype(float))
    figure = plots.kaplan_meier_thirds(records, horizon, "months")
    axes, table = figure.axes
    third = plots.thirds(records.risks)
    ticks = [float(each) for each in table.get_xticks()]
    assert ticks[0] == 0
    assert ticks[-1] <= horizon < ticks[-1] + ticks[1]
    assert 4 <= len(ticks) <= 7
    assert texts(table) == [
        (tick, row, str(sum(t >= tick for t, k in zip(times, third, strict=True) if k == row)))
        for row in range(3)
        for tick in ticks
    ]
    lines, bands = [], []
    for row in range(3):
        if not (own := third == row).any():
            continue
        fit = KaplanMeierFitter().fit(times[own], events[own])
        values = fit.survival_function_.iloc[:, 0].tolist()
        at = [*fit.survival_function_.index, horizon]
        lines.append((at, [*values, values[-1]]))
        low, high = ([*side, side[-1]] for side in fit.confidence_interval_.to_numpy().T)
        band = Figure().add_subplot().fill_between(at, low, high, step="post")
        bands.append(band.get_paths()[0].vertices)
    close(drawn(axes), lines)
    assert [each.get_drawstyle() for each in axes.lines] == ["steps-post"] * len(lines)
    assert len(axes.collections) == len(bands)
    for band, expected in zip(axes.collections, bands, strict=True):
        found = band.get_paths()[0].vertices
        assert np.allclose(found, expected, atol=1e-9)
    names = ["low risk", "medium risk", "high risk"]
    shown = [each.get_text() for each in axes.get_legend().get_texts()]
    assert shown == [name for row, name in enumerate(names) if (third == row).any()]
    assert labels(table.yaxis) == list(enumerate(names))
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, horizon), (0, 1.02))
    assert (axes.get_ylabel(), table.get_xlabel()) == ("survival", "time [months]")
    assert table.get_ylim() == (2.6, -0.6)
    assert table.get_title(loc="left") == "number at risk"


def test_a_landmark_has_each_group_with_its_interval() -> None:
    groups = [
        Landmark(0.4, Measure(0.5, 0.3, 0.7, 20)),
        Landmark(0.8, Measure(0.7, None, None, 2)),
        Landmark(0.9, Measure(0.6, 0.1, None, 2)),
        Landmark(0.95, Measure(0.65, None, 0.9, 2)),
    ]
    axes = plots.landmark(groups, 2.5, "years").axes[0]
    close(
        drawn(axes),
        [([0, 1], [0, 1]), ([0.4, 0.4], [0.3, 0.7]), ([0.4], [0.5]), ([0.8], [0.7])]
        + [([0.9], [0.6]), ([0.95], [0.65])],
    )
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 1.02), (0, 1.02))
    assert axes.get_xlabel() == "predicted survival at 2.5 years"
    assert axes.get_ylabel() == "observed survival (Kaplan-Meier)"
    assert plots.landmark(groups, 3, "").axes[0].get_xlabel() == "predicted survival at 3"


@QUICK
@given(data=st.data(), size=st.integers(1, 4))
def test_a_confusion_matrix_has_counts_and_shares_of_rows(data: Any, size: int) -> None:
    row = st.lists(st.integers(0, 5), min_size=size, max_size=size)
    matrix = np.array(data.draw(st.lists(row, min_size=size, max_size=size)))
    ranks = [f"rank {index}" for index in range(size)]
    axes = plots.confusion(matrix, ranks).axes[0]
    shares = np.array([each / max(each.sum(), 1) for each in matrix])
    assert np.allclose(axes.images[0].get_array(), shares)
    assert axes.images[0].get_clim() == (0, 1)
    assert texts(axes) == [
        (column, line, str(matrix[line, column])) for line in range(size) for column in range(size)
    ]
    white = [to_rgb(each.get_color()) == (1, 1, 1) for each in axes.texts]
    assert white == [share > 0.5 for share in shares.flatten().tolist()]
    assert labels(axes.xaxis) == labels(axes.yaxis) == list(enumerate(ranks))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")

"""Plots are made of any records, and show what they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsurrogate.client_app.model_use.target_metrics import plots
from fedsurrogate.client_app.model_use.target_metrics.numbers import Predictions
from fedsurrogate.client_app.model_use.target_metrics.times import Observed
from fedsurrogate.common.models.intervals import Measure

TRUE = np.linspace(40.0, 60.0, 30)
PREDICTED = TRUE + np.sin(TRUE)
NUMBERS = Predictions(TRUE, PREDICTED, PREDICTED - 2, PREDICTED + 2)
TIMES = Observed(np.arange(1.0, 31.0), np.arange(30) % 3 > 0, np.arange(30.0)[::-1])
TRUTH = np.stack(
    [np.arange(30) % 2, np.where(np.arange(30) < 5, np.nan, np.arange(30) % 3 == 0)], 1
)
CHANCE = np.stack([np.linspace(0, 1, 30)] * 2, 1)


def words(figure: Any) -> str:
    """All text of a figure, once it is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    FigureCanvasAgg(figure).draw()
    return "\n".join(each.get_text() for each in figure.findobj(Text))


def test_a_forest_plot_states_every_estimate() -> None:
    rows = {
        "edema": {"north": Measure(0.81, 0.7, 0.9, 120), "south": Measure(0.75, None, None, 9)},
        "fracture": {"north": Measure(None, None, None, 0)},
    }
    shown = words(plots.forest(rows, "AUROC", 0.5))
    for text in ("0.81 (0.70 to 0.90)", "0.75", "not defined", "north, n = 120", "fracture"):
        assert text in shown
    assert "AUROC with 95 % interval" in shown


def test_plots_of_numbers_name_the_unit_bias_and_limits() -> None:
    shown = words(plots.bland_altman(NUMBERS, "%"))
    assert "bias" in shown
    assert "upper limit" in shown
    assert "predicted minus true [%]" in shown
    assert "true [%]" in words(plots.predicted_against_true(NUMBERS, "%"))
    one = Predictions(TRUE[:1], PREDICTED[:1])
    assert "lower limit" not in words(plots.bland_altman(one))
    assert "predicted" in words(plots.predicted_against_true(one))


def test_curves_have_the_numbers_at_risk_of_every_third() -> None:
    figure = plots.kaplan_meier_thirds(TIMES, 30.0, "months")
    shown = words(figure)
    for text in ("low risk", "medium risk", "high risk", "number at risk", "time [months]"):
        assert text in shown
    rows: dict[float, list[str]] = {}
    for text in figure.axes[1].texts:
        rows.setdefault(text.get_position()[1], []).append(text.get_text())
    assert [row[0] for row in rows.values()] == ["10", "10", "10"]
    # The records of low risk live longest here, so the others have left after twenty months.
    assert [row[-1] for row in rows.values()] == ["1", "0", "0"]


@pytest.mark.parametrize("draw", [plots.calibration, plots.precision_recall])
def test_every_label_has_a_panel(draw: Any) -> None:
    figure = draw(TRUTH, CHANCE, ["edema", "fracture"])
    assert len(figure.axes) == 2
    assert "fracture" in words(figure)
    nothing = draw(np.full((3, 1), np.nan), np.full((3, 1), 0.5), ["edema"])
    assert "edema" in words(nothing)

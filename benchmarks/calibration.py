"""Expected calibration error of heads on test records, with and without their slope.

    python benchmarks/calibration.py [--rounds]

One draw of each data set; nothing set but the data, or the budget and the classes: heads in closed form,
or with `--rounds` logistic heads of secure aggregation. The slope changes no decision, so there is one accuracy.
Written after every row.
"""

from typing import Any
from unittest.mock import patch

import torch

from benchmarks.defaults_beside import federation, sets
from benchmarks.harness.federation import Federation, measure
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.private_heads import logistic
from benchmarks.secure_defaults import OWN_RECORDS, nothing_set, pooled
from fedsurrogate.common.backbones.power_transform import raised
from fedsurrogate.common.run import parse_run
from fedsurrogate.strategies.closed_form import solvers as score_slope
from fedsurrogate.strategies.fedpft import logistic_rounds, private_head
from fedsurrogate.strategies.fedpft import logistic_rounds as logistic_slope

SETS = ("X-rays", "digits", "PACS, photo and sketch", "CIFAR-10, Dirichlet 0.1")
COLUMNS = ("data", "epsilon", "accuracy %", "error before", "error", "loss before", "loss")
FILE, BINS = "calibration", 15


def calibration_error(chances: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean distance of confidence and accuracy over bins of confidence.

    Args:
        chances: of the classes, (n, C).
        labels: (n,).
    """
    sure, most = chances.max(1)
    right, bins = (most == labels).double(), (sure * BINS).long().clamp_max(BINS - 1)
    sums = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, right - sure)
    return float(sums.abs().sum()) / len(labels)


def row(name: str, epsilon: float) -> tuple[Any, ...]:
    """Accuracy, and errors and log losses without the slope and with it."""
    settings, _ = sets()[name]
    power = 1.0 if epsilon else 0.5
    data = federation(name, 0, power)
    changed = {"features.power-transform": power} if "features.power-transform" in settings else {}
    own: dict[str, Any] = {"epsilon": epsilon, "delta": 1e-5} if epsilon else {}
    public = {"features.records": sum(data.sizes), "sites": len(data.sites)}
    found: list[float] = []
    learned = score_slope.slope_of

    def noted(scores: score_slope.Scores, priors: torch.Tensor) -> float:
        found.append(learned(scores, priors))
        return found[-1]

    with (
        patch.object(score_slope, "slope_of", noted),
        patch.object(private_head, "slope_of", noted),
    ):
        model = measure(settings | changed | public | {"seed": 0}, data.named(own), data).model
    assert model is not None
    scores, labels = _scores(model, data)
    return (name, f"{epsilon:g}" if epsilon else "none", *figures_of(scores, labels, found[-1]))


def row_of_rounds(name: str, epsilon: float) -> tuple[Any, ...]:
    """The same of a logistic head in rounds of secure aggregation."""
    data, sites = pooled(name), sets()["X-rays" if name == OWN_RECORDS else name][1]
    run, found = parse_run(nothing_set(data, epsilon)), list[float]()
    learned = logistic_slope.factor_of

    def noted(gaps: torch.Tensor, noise: float) -> float:
        found.append(learned(gaps, noise))
        return found[-1]

    with patch.object(logistic_rounds, "factor_of", noted):
        head = logistic(data, run, sites, 0)
    scores = head.scores(raised(data[2].float(), run.power).float()).double()
    return (name, f"{epsilon:g}", *figures_of(scores, data[3], found[-1]))


def figures_of(scores: torch.Tensor, labels: torch.Tensor, found: float) -> tuple[float, ...]:
    """Accuracy, and errors and log losses without a slope and with it.

    Args:
        scores: with the slope, (n, C).
        labels: (n,).
        found: the slope.
    """
    figures = []
    for slope in (found, 1.0):
        chances = (scores / slope).softmax(1)
        loss = -chances.gather(1, labels[:, None]).clamp_min(1e-12).log().mean()
        figures.append((round(calibration_error(chances, labels), 3), round(float(loss), 2)))
    accuracy = 100 * float((scores.argmax(1) == labels).double().mean())
    (before, cost), (error, less) = figures
    return (round(accuracy, 2), before, error, cost, less)


def _scores(model: Any, data: Federation) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (n, C) of the test records, the lowest for classes that the model lacks, and labels."""
    names = [data.classes.index(each) for each in model.header.classes]
    scores = torch.full((len(data.test.labels), len(data.classes)), -1e9, dtype=torch.float64)
    scores[:, names] = model.scores(data.test.features).double()
    return scores, data.test.labels


def main() -> None:
    """Measure every data set, and write the table."""
    options = described(__doc__)
    options.add_argument("--epsilons", type=float, nargs="+", default=[0.0, 1.0, 2.0, 8.0])
    options.add_argument(
        "--rounds", action="store_true", help="logistic heads of secure aggregation"
    )
    given = options.parse_args()
    torch.set_num_threads(1)
    rows: list[tuple[Any, ...]] = []
    file, names = ("calibration-rounds", (*SETS, OWN_RECORDS)) if given.rounds else (FILE, SETS)
    measured = row_of_rounds if given.rounds else row
    for name in names:
        for epsilon in given.epsilons:
            if epsilon or not given.rounds:
                rows.append(measured(name, epsilon))
                report(file, "Calibration on test records, one draw", COLUMNS, rows)


if __name__ == "__main__":
    main()

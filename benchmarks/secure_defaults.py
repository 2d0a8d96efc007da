"""Secure aggregation with epsilon and classes alone, beside what can be set by hand.

Records are pooled, and the noise of all sites is drawn here, as large as in a sum when none is lost.
Whole runs: `defaults_beside.py --parts secure`. With `--rounds` nothing else is set, which gives a
logistic head in rounds, beside one sum. Without it, a table of one sum with more settings. X-rays have
other shares of classes for testing than for training, so they have the area under the ROC curve too,
and rows with a fifth of the sites' own records for testing.

    python benchmarks/secure_defaults.py --draws 3
    python benchmarks/secure_defaults.py --draws 3 --rounds
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from sklearn.metrics import roc_auc_score

from benchmarks.defaults_beside import federation, sets
from benchmarks.harness.federation import joined
from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from benchmarks.harness.samples import shared
from benchmarks.private_heads import CLOSED, DELTA, Maker, accuracy, closed_form, logistic
from benchmarks.secure_aggregation_head import Data
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_aggregation.rules import projected_dimensions

SETS = ("PACS, photo and sketch", "CIFAR-10, Dirichlet 0.1", "X-rays", "digits")
EPSILONS = (1.0, 2.0, 8.0)
AREA = "area under the ROC curve"
# Its records for testing are a fifth of the sites' own.
OWN_RECORDS = "X-rays, records of the sites"
COLUMNS = ("data", "of", "epsilon", "dimensions", "nothing set", "half of them", "twice")
COLUMNS += ("true records", "no projection", "backbone's head", "head, public images")


def pooled(name: str) -> Data:
    """Features and labels of all sites, for training and for testing."""
    data = federation(name.partition(",")[0] if name == OWN_RECORDS else name, 0, 1.0)
    train = joined([site.train for site in data.sites])
    x, y = train.features.double(), train.labels
    if name != OWN_RECORDS:
        return x, y, data.test.features.double(), data.test.labels
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, rest = order[: len(x) // 5], order[len(x) // 5 :]
    return x[rest], y[rest], x[test], y[test]


def explicit(name: str, data: Data, chosen: int) -> list[dict[str, Any] | None]:
    """Settings of each column; None where a data set has no such thing.

    Args:
        name: of the data set.
        data: of the data set.
        chosen: dimensions with nothing set.
    """
    records, dimension = data[0].shape
    head = {"features.projection": str(shared("weights/mobilenet_v2-imagenet.safetensors"))}
    public = {"fedpft.public": str(shared("features/pacs-photo-train.safetensors"))}
    of_backbone, elsewhere = dimension == 1280, name.startswith("CIFAR")
    return [
        {},
        {"features.dimensions": chosen // 2},
        {"features.dimensions": 2 * chosen} if 2 * chosen < dimension else None,
        {"features.records": records},
        {"features.projection": ""},
        head if of_backbone else None,
        head | public if elsewhere else None,
    ]


def measured(
    data: Data, run: Run, sites: int, draws: int, make: Maker = closed_form
) -> tuple[float, float]:
    """Mean accuracy in % and, for two classes, area under the ROC curve."""
    heads = [make(data, run, sites, draw) for draw in range(draws)]
    area = 0.0
    if len(run.settings.classes) == 2:
        scores = [head.scores(data[2].float()) for head in heads]
        area = statistics.mean(
            float(roc_auc_score(data[3], each[:, 1] - each[:, 0])) for each in scores
        )
    return statistics.mean(accuracy(head, data, run.power) for head in heads), area


def nothing_set(data: Data, epsilon: float) -> dict[str, Any]:
    """Settings of a run with the secure aggregation, the budget and the classes alone: a logistic head in
    rounds; with CLOSED, one sum.
    """
    classes = ",".join(map(str, range(int(data[1].max()) + 1)))
    return {"secure-aggregation": True, "epsilon": epsilon, "delta": DELTA, "classes": classes}


def in_rounds(names: list[str], draws: int) -> None:
    """The table with nothing set, written after each row."""
    columns = ("data", "of", "epsilon", "dimensions", "one sum", "logistic rounds", "rounds")
    rows = kept_rows("secure-rounds", lambda row: row[0] in names)
    for name in names:
        data, sites = pooled(name), sets()["X-rays" if name == OWN_RECORDS else name][1]
        for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0):
            usual = nothing_set(data, epsilon)
            one, many = parse_run(usual | CLOSED), parse_run(usual)
            dimensions = projected_dimensions(one, data[0].shape[1])
            found = [
                measured(data, run, sites, draws, make)
                for run, make in ((one, closed_form), (many, logistic))
            ]
            for index, what in enumerate(("accuracy %", AREA)):
                if cells := [
                    round(each[index], 4 if index else 2) for each in found if each[index]
                ]:
                    rows.append((name, what, epsilon, dimensions, *cells, many.rounds))
            title = f"Nothing set but the sum, budget and classes, {draws} draws"
            report("secure-rounds", title, columns, rows, draws=draws)


def one_sum(names: list[str], draws: int) -> None:
    """The table of one sum, written after each row."""
    rows = kept_rows("secure-defaults", lambda row: row[0] in names)
    for name in names:
        data, sites = pooled(name), sets()[name][1]
        for epsilon in EPSILONS:
            usual = nothing_set(data, epsilon) | CLOSED
            chosen = projected_dimensions(parse_run(usual), data[0].shape[1])
            found = [
                None if own is None else measured(data, parse_run(usual | own), sites, draws)
                for own in explicit(name, data, chosen)
            ]
            cells = [None if each is None else round(each[0], 2) for each in found]
            rows.append((name, "accuracy %", epsilon, chosen, *cells))
            if name == "X-rays":
                areas = [None if each is None else round(each[1], 4) for each in found]
                rows.append((name, AREA, epsilon, chosen, *areas))
            title = f"Secure aggregation with nothing set, and with more, {draws} draws"
            report("secure-defaults", title, COLUMNS, rows, draws=draws)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--rounds", action="store_true", help="nothing set, beside one sum")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=(*SETS, OWN_RECORDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    usual = (*SETS, OWN_RECORDS) if options.rounds else SETS
    (in_rounds if options.rounds else one_sum)(list(options.only or usual), options.draws)


if __name__ == "__main__":
    main()

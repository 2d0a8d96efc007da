"""Targets learned in rounds, beside the closed form in the same runs' data, and pooled records.

    PYTHONPATH=. python benchmarks/targets_fedavg.py [--only number] [--sites 5 50] [--epsilons 0 4]

Every row is a whole run of a simulation with the defaults of the settings: messages or secure aggregation,
checks and the model, measured on records that no site has. Without noise, methods are `fedpft` and
`fedavg`, times in secure aggregation; with `epsilon`, `fedpft` and `dp-fedavg` with one distributed noise in secure
aggregation. Pooled peers have all records and no noise: scikit-learn's RidgeCV and
LogisticRegression, and scikit-survival's Cox model.

Features are those of MobileNetV2 for CIFAR-10, in 64 public directions. MADE UP: the sizes of
objects in metres by class, and the attributes, of which each site annotates a half. Times are
flchain's, which scikit-survival has. Records are dealt at random. One run a row: differences of a
hundredth are chance. Rows are written as they are measured, and others are kept.
"""

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedsurrogate as fs
from benchmarks._target_data import attributes, in_ball, log_sizes, timed
from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from fedsurrogate.common.models.classifiers import target_of_model
from fedsurrogate.common.targets.metrics import measured, metrics_of

NAME = "targets-fedavg"
COLUMNS = ("target", "sites", "epsilon", "score", "closed form", "in rounds", "pooled", "peer")
DIMENSION, RECORDS = 64, 10_000
# Records of each site for the tests of the run itself: few, since the rows are measured elsewhere.
TESTED = 0.02


@dataclass(frozen=True)
class Problem:
    """Records with a target, and others to measure on.

    Attributes:
        settings: of the run.
        score: the metric that is shown.
        train: features (n, d) and values (n, k).
        test: the same of other records.
        peer: name of a method for pooled records, and its score of the test records.
    """

    settings: dict[str, Any]
    score: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    peer: tuple[str, float]


def number() -> Problem:
    """Logarithms of sizes."""
    from sklearn.linear_model import RidgeCV

    x, y, test, true = log_sizes(RECORDS, DIMENSION, 0)
    pooled = RidgeCV(np.geomspace(1e-4, 1e3, 30)).fit(x, y).score(test, true)
    settings = {"task": "regression", "target_range": (-1, 2)}
    own = (x, y[:, None]), (test, true[:, None])
    return Problem(settings, "r2", *own, ("scikit-learn RidgeCV", float(pooled)))


def labels() -> Problem:
    """Sixteen attributes, of which a half is annotated in a record."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    data = attributes(5, DIMENSION, 0, uncertain=False)
    areas = []
    for at in range(len(data.names)):
        known = ~data.labels[:, at].isnan()
        model = LogisticRegression(C=100, max_iter=500).fit(
            data.features[known], data.labels[known, at]
        )
        areas.append(roc_auc_score(data.truth[:, at], model.decision_function(data.test)))
    settings = {"task": "multilabel", "label_columns": ",".join(data.names)}
    own = (data.features, data.labels), (data.test, data.truth)
    peer = ("scikit-learn LogisticRegression", float(np.mean(areas)))
    return Problem(settings, "auroc", *own, peer)


def time() -> Problem:
    """Deaths in flchain."""
    from sksurv.linear_model import CoxPHSurvivalAnalysis
    from sksurv.metrics import concordance_index_censored
    from sksurv.util import Surv

    data = timed("flchain")
    x, y = in_ball(data.features), torch.stack([data.times, data.events], 1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) * 7 // 10], order[len(order) * 7 // 10 :]
    truth = Surv.from_arrays(y[train, 1].numpy() == 1, y[train, 0].numpy())
    cox = CoxPHSurvivalAnalysis(alpha=1e-3).fit(x[train].numpy(), truth)
    risk = cox.predict(x[test].numpy())
    pooled = concordance_index_censored(y[test, 1].numpy() == 1, y[test, 0].numpy(), risk)[0]
    settings = {"task": "survival", "horizon": 5000.0}
    own = (x[train], y[train]), (x[test], y[test])
    return Problem(settings, "concordance", *own, ("scikit-survival Cox", float(pooled)))


PROBLEMS: dict[str, Callable[[], Problem]] = {"number": number, "labels": labels, "time": time}


def score_of(problem: Problem, method: str, sites: int, epsilon: float) -> float:
    """The mean score of a run's model over what it answers."""
    parts = torch.arange(len(problem.train[0])).tensor_split(sites)
    order = torch.randperm(len(problem.train[0]), generator=torch.Generator().manual_seed(1))
    x, y = problem.train
    given = [(x[order[part]].numpy(), y[order[part]].numpy()) for part in parts]
    more: dict[str, Any] = {"method": method, "test_fraction": TESTED}
    if epsilon:
        more |= {"epsilon": epsilon, "delta": 1e-5}
    if epsilon or problem.settings["task"] == "survival":
        more |= {"secure_aggregation": True}
    with tempfile.TemporaryDirectory() as folder:
        run = fs.simulate(given, output_dir=folder, **(problem.settings | more))
        assert isinstance(run.model, fs.Model)
        head = run.model.classifier
    scores = head.scores(problem.test[0].float())
    sums = measured(target_of_model(head), head.header.classes, scores, problem.test[1])
    return float(np.mean([own[problem.score] for own in metrics_of(sums).values()]))


def rows(name: str, sites: int, epsilons: list[float]) -> Iterator[tuple[Any, ...]]:
    """A row for each epsilon, of which 0 is none."""
    problem = PROBLEMS[name]()
    for epsilon in epsilons:
        methods = ("fedpft", "dp-fedavg" if epsilon else "fedavg")
        found = [round(score_of(problem, method, sites, epsilon), 4) for method in methods]
        peer, pooled = problem.peer
        yield (name, sites, epsilon or "none", problem.score, *found, round(pooled, 4), peer)


def options_of(doc: str | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = described(doc)
    parser.add_argument("--only", choices=sorted(PROBLEMS), default=None)
    parser.add_argument("--sites", type=int, nargs="+", default=[5, 50])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.0, 1.0, 2.0, 4.0, 8.0])
    return parser.parse_args()


def main() -> None:
    options = options_of(__doc__)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    title = "targets in closed form and in rounds, beside pooled records"
    for sites in options.sites:
        for name in [options.only] if options.only else PROBLEMS:
            for row in rows(name, sites, options.epsilons):
                kept = kept_rows(NAME, lambda old, row=row: tuple(old[:3]) == row[:3])
                report(NAME, title, COLUMNS, [*kept, row], records=RECORDS, dimension=DIMENSION)


if __name__ == "__main__":
    main()

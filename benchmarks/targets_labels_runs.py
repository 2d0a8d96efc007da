"""Whole runs that learn labels with missing annotations, beside each site alone and pooled records.

    python benchmarks/targets_labels_runs.py --seeds 1 --sites 5,15,50 --only exact

Every row is a run of the product: messages or secure aggregation, checks, noise, model. Records are sample
features of CIFAR-10 (MobileNetV2) in public directions. The 16 attributes, that each site annotates
half of them, the missed and false annotations and, without noise, a tenth of uncertain ones are MADE
UP from the classes. Classes are split over sites by Dirichlet 0.5. Test labels are clean and of all
attributes. Distributed noise is that of secure aggregation of which no site colludes or is lost. A label without
a head counts as AUROC 0.5.
"""

import logging
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fedsurrogate as fs
from benchmarks._target_data import Labelled, attributes
from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from fedsurrogate.common.errors import FedSurrogateError

NAME = "targets-labels-runs"
EPSILONS, DELTA = (1.0, 2.0, 4.0, 8.0), 1e-5
COLUMNS = ("sites", "d", "what", "exact", *(f"epsilon {each:g}" for each in EPSILONS), "runs")
EXACT, PRIVATE = 128, 64
SUM: dict[str, Any] = {"secure_aggregation": True, "colluding": 0.0, "dropouts": 0.0}
Row = tuple[object, ...]
Model = fs.Model


def areas(scores: Tensor, names: tuple[str, ...], data: Labelled) -> list[float]:
    """AUROC of each attribute on the test records."""
    from sklearn.metrics import roc_auc_score

    found = []
    for place, name in enumerate(data.names):
        at = names.index(name) if name in names else None
        truth = data.truth[:, place].numpy()
        found.append(0.5 if at is None else float(roc_auc_score(truth, scores[:, at].numpy())))
    return found


def of_model(model: Model, data: Labelled) -> list[float]:
    """AUROC of each attribute by a model."""
    scores = model.classifier.scores(data.test.float())
    return areas(scores, model.classifier.header.classes, data)


def settings_of(data: Labelled, sets: bool) -> dict[str, Any]:
    """Settings of a run."""
    given: dict[str, Any] = {
        "task": "multilabel",
        "label_columns": data.names,
        "test_fraction": 0.01,
    }
    if sets:
        named = [
            f"{site}={','.join(name for name, own in zip(data.names, row, strict=True) if own)}"
            for site, row in enumerate(data.members.tolist())
        ]
        given["label_sets"] = "; ".join(named)
    return given


def parts_of(data: Labelled) -> list[tuple[Any, Any]]:
    """Features and labels of each site."""
    rows = [data.site == site for site in range(len(data.members))]
    return [(data.features[r].float().numpy(), data.labels[r].numpy()) for r in rows]


def of_run(data: Labelled, sets: bool, **more: Any) -> list[float]:
    """AUROC of each attribute by the model of a run."""
    with tempfile.TemporaryDirectory() as folder:
        run = fs.simulate(parts_of(data), output_dir=folder, **settings_of(data, sets), **more)
        return of_model(run.model, data)


def alone(data: Labelled) -> float:
    """Mean AUROC of the models that each site makes of its own records, over its own labels."""
    found = []
    for site, (x, y) in enumerate(parts_of(data)):
        try:
            own = of_model(fs.learn([fs.fit(x, y, **settings_of(data, sets=False))]), data)
        except FedSurrogateError:
            own = [0.5] * len(data.names)
        found += [area for area, known in zip(own, data.members[site], strict=True) if known]
    return statistics.mean(found)


def pooled(data: Labelled) -> list[float]:
    """AUROC of logistic regressions on all annotated records together."""
    from sklearn.linear_model import LogisticRegression

    scores = []
    for place in range(len(data.names)):
        known = ~data.labels[:, place].isnan()
        x, y = data.features[known].numpy() * 10, data.labels[known, place].numpy()
        fit = LogisticRegression(C=0.05, max_iter=300).fit(x, y)
        scores.append(torch.from_numpy(fit.decision_function(data.test.numpy() * 10)))
    return areas(torch.stack(scores, 1), tuple(data.names), data)


def means_of(of: Row, runs: list[list[list[float]]], rare: bool = False) -> Row:
    """Means over runs and attributes, or over the four rare ones; columns of results."""
    chosen = slice(-4, None) if rare else slice(None)
    means: list[object] = [
        round(statistics.mean(area for run in runs for area in run[at][chosen]), 4)
        for at in range(len(runs[0]))
    ]
    return (*of, *means, *[None] * (1 + len(EPSILONS) - len(means)), len(runs))


def exact_rows(sites: int, seeds: range) -> Iterator[Row]:
    """Runs without noise."""
    data = [attributes(sites, EXACT, seed, uncertain=True) for seed in seeds]
    what: Row = (sites, EXACT)
    yield means_of((*what, "own moments"), [[of_run(each, sets=False)] for each in data])
    yield means_of((*what, "each site alone"), [[[alone(each)]] for each in data])
    yield means_of((*what, "pooled logistic regression"), [[pooled(each)] for each in data])


def private_rows(sites: int, seeds: range) -> Iterator[Row]:
    """Runs with noise."""
    data = [attributes(sites, PRIVATE, seed, uncertain=False) for seed in seeds]
    for where, distributed in (("distributed noise", SUM), ("noise at sites", {})):
        for code in ("capped", "exact"):
            runs = [
                [of_run(each, sets=True)]
                + [
                    of_run(each, sets=code == "capped", epsilon=e, delta=DELTA, **distributed)
                    for e in EPSILONS
                ]
                for each in data
            ]
            what: Row = (sites, PRIVATE, f"{where}, {code} code")
            yield means_of(what, runs)
            yield means_of((*what[:2], f"{what[2]}, four rare"), runs, rare=True)
    yield means_of(
        (sites, PRIVATE, "pooled logistic regression"), [[pooled(each)] for each in data]
    )


PARTS = {"exact": exact_rows, "private": private_rows}


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--sites", default="5,15,50")
    parser.add_argument("--only", choices=sorted(PARTS), default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    seeds = range(options.first, options.first + options.seeds)
    for sites in map(int, options.sites.split(",")):
        for part in [options.only] if options.only else list(PARTS):
            for row in PARTS[part](sites, seeds):
                kept = kept_rows(NAME, lambda old, fresh=row: tuple(old[:3]) == fresh[:3])
                title = "runs that learn labels: mean AUROC of 16 labels"
                report(NAME, title, COLUMNS, sorted([*kept, row], key=lambda each: each[:2]))


if __name__ == "__main__":
    main()

"""Accuracy at the sites with DP-CVAE's synthetic embeddings, compared with other methods that give
a shared head.

10 sites, Dirichlet 0.3, several epsilons and no privacy. Each row is a shared head. It is tested on
every site's own test records (mean over sites) and on all test records, alone and mixed with a head
from the site's own records. The weight of the own head is chosen on a fifth of the site's training
records. "local" has no shared head. FedAvg mixed is FedLambda; with privacy it is DP-FedAvg.

    python benchmarks/dpcvae_downstream.py --name mine -c 'data="safetensors" data-dir="/data"
    dataset="x"'
"""

import statistics
from collections import defaultdict
from typing import Any

from rich.progress import track

from benchmarks.harness.federation import Federation, federate, load_seed
from benchmarks.harness.options import arguments, settings_of
from benchmarks.harness.results import report
from benchmarks.harness.seeds import mean_and_deviation
from fedsurrogate.client_app.methods.dpcvae.downstream import LabelledEmbeddings, mix
from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.run import Run, parse_run

EPSILONS = (1.0, 4.0, 10.0, 0.0)
DELTA = 1e-5
CLASSES = ",".join(map(str, range(10)))
ROWS: dict[str, dict[str, Any]] = {
    "FedPFT spherical": {"fedpft.covariance": "spherical"},
    "FedPFT lowrank r=16": {"fedpft.covariance": "lowrank"},
    "FedAvg": {"method": "fedavg"},
    "DP-CVAE": {"method": "dpcvae"},
    "DP-CVAE, class sizes only": {"method": "dpcvae", "dpcvae.first-round": "counts"},
    "DP-CGAN": {"method": "dpcgan"},
}
NAMES = ("accuracy", "balanced")
# By row and epsilon, for every seed.
Scores = dict[tuple[str, float], list[dict[str, float]]]


def scores(model: Classifier, data: Federation, run: Run) -> dict[str, float]:
    """Scores of the shared head in percent, mean over sites."""
    each: dict[str, list[float]] = defaultdict(list)
    for site in data.sites:
        # No scaling here: every head scales the features to its own norm.
        own, test = (
            LabelledEmbeddings(part.features, part.labels) for part in (site.train, site.test)
        )
        reported = mix(
            own, model, run.settings.head, run.settings.seed, run.settings.baseline.validation
        ).metric_values(test)
        for key, value in reported.items():
            each[key].append(100 * value)
    return {key: statistics.mean(values) for key, values in each.items()}


def measured_scores(run: Run, data: Federation) -> dict[str, float]:
    """The scores of a run's shared head, its accuracy on all test records, and the MB that the
    sites send.
    """
    measured = federate(run, data)
    assert measured.model is not None
    own = {"all": measured.accuracy, "bytes": measured.bytes / 1e6}
    return scores(measured.model, data, run) | own


def main() -> None:
    parser = arguments(__doc__, "dpcvae-downstream")
    parser.add_argument("--sites", type=int, default=10)
    options = parser.parse_args()
    settings, message = settings_of(
        options, {"dataset": "cifar10", "alpha": 0.3, "classes": CLASSES}
    )
    every: Scores = defaultdict(list)
    for seed in range(options.seeds):
        data = load_seed(settings, options.sites, seed)
        jobs = [(name, epsilon) for epsilon in EPSILONS for name in ROWS]
        for name, epsilon in track(jobs, description=f"seed {seed}"):
            own = dict(ROWS[name])
            if epsilon and own.get("method") == "fedavg":
                own["method"] = "dp-fedavg"
            budget = {"epsilon": epsilon, "delta": DELTA} if epsilon else {}
            run = parse_run(settings | {"seed": seed} | own | budget)
            every[name, epsilon].append(measured_scores(run, data))
        # Write after every seed, because the GANs take most of an hour.
        title = (
            f"{options.sites} sites, Dirichlet 0.3, delta {DELTA:g}, {seed + 1} seeds. {message}"
        )
        write(every, title, options.name)


def write(every: Scores, title: str, name: str) -> None:
    """Print and store the table of the results so far."""

    def cells(each: list[dict[str, float]], kind: str) -> list[str]:
        return [mean_and_deviation([one[f"{n}-{kind}"] for one in each]) for n in NAMES]

    local = [one for (row, _), each in every.items() if row == "DP-CVAE" for one in each]
    rows: list[tuple[Any, ...]] = [("local", "", *cells(local, "local"), *[""] * 5)]
    for (row, epsilon), each in every.items():
        share = statistics.mean(one["share"] for one in each) / 100
        everywhere = mean_and_deviation([one["all"] for one in each])
        sent = statistics.mean(one["bytes"] for one in each)
        claim = f"{epsilon:g}" if epsilon else "none"
        rows.append(
            (row, claim, *cells(each, "synthetic"), *cells(each, "mixed"), share, everywhere, sent)
        )
    heads = ("shared head", "epsilon", "alone, %", "alone, balanced", "mixed, %", "mixed, balanced")
    heads += ("own share", "all test data, %", "MB sent")
    report(name, title, heads, rows)


if __name__ == "__main__":
    main()

"""Accuracy at the sites with DP-CVAE's synthetic embeddings, compared with other methods that give a shared head.

10 sites, Dirichlet 0.3, several epsilons and no privacy. Each row is a shared head. It is tested on every site's own test
records (mean over sites) and on all test records, alone and mixed with a head from the site's own records. The weight of
the own head is chosen on a fifth of the site's training records. "local" has no shared head. FedAvg mixed is FedLambda;
with privacy it is DP-FedAvg.

    python benchmarks/dpcvae_downstream.py --name mine -c 'data="safetensors" data-dir="/data" dataset="x"'
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "reproduce"))
from _harness import Federation, arguments, federate, load, mean_and_deviation, settings_of
from _report import report
from rich.progress import track

from client_app.methods.dpcvae.downstream import LabelledEmbeddings, mix
from common.models.classifiers import Classifier
from common.run import Run, parse_run

EPSILONS = (1.0, 4.0, 10.0, 0.0)
DELTA = 1e-5
CLASSES = ",".join(map(str, range(10)))
ROWS: dict[str, dict[str, Any]] = {
    "FedPFT spherical": {"fedpft.covariance": "spherical"},
    "FedPFT lowrank r=16": {"fedpft.covariance": "lowrank"},
    "FedAvg": {"method": "fedavg"},
    "DP-CVAE": {"method": "dpcvae"},
    "DP-CVAE, class sizes only": {"method": "dpcvae", "dpcvae.opening": "counts"},
    "DP-CGAN": {"method": "dpcgan"},
}
NAMES = ("accuracy", "balanced")
# By row and epsilon, for every seed.
Found = dict[tuple[str, float], list[dict[str, float]]]


def scores(model: Classifier, data: Federation, run: Run) -> dict[str, float]:
    """Scores of the shared head in percent, mean over sites."""
    found: dict[str, list[float]] = defaultdict(list)
    for site in data.sites:
        # No scaling here: every head scales the features to its own norm.
        own, test = (LabelledEmbeddings(part.features, part.labels) for part in (site.train, site.test))
        reported = mix(own, model, run.settings.head, run.settings.seed, run.settings.baseline.validation).measures(test)
        for key, value in reported.items():
            found[key].append(100 * value)
    return {key: statistics.mean(values) for key, values in found.items()}


def main() -> None:
    parser = arguments(__doc__, "dpcvae-downstream")
    parser.add_argument("--sites", type=int, default=10)
    options = parser.parse_args()
    settings, message = settings_of(options, {"dataset": "cifar10", "alpha": 0.3, "classes": CLASSES})
    found: Found = defaultdict(list)
    for seed in range(options.seeds):
        data = load(parse_run(settings | {"seed": seed}), options.sites)
        jobs = [(name, epsilon) for epsilon in EPSILONS for name in ROWS]
        for name, epsilon in track(jobs, description=f"seed {seed}"):
            own = dict(ROWS[name])
            if epsilon and own.get("method") == "fedavg":
                own["method"] = "dp-fedavg"
            budget = {"epsilon": epsilon, "delta": DELTA} if epsilon else {}
            run = parse_run(settings | {"seed": seed} | own | budget)
            measured = federate(run, data)
            assert measured.model is not None
            reported = scores(measured.model, data, run)
            found[name, epsilon].append(reported | {"all": measured.accuracy, "bytes": measured.bytes / 1e6})
        # Write after every seed, because the GANs take most of an hour.
        write(found, f"{options.sites} sites, Dirichlet 0.3, delta {DELTA:g}, {seed + 1} seeds. {message}", options.name)


def write(found: Found, title: str, name: str) -> None:
    """Print and store the table of the results so far."""
    rows: list[tuple[Any, ...]] = []
    local = [reported for (row, _), each in found.items() if row == "DP-CVAE" for reported in each]
    rows.append(
        (
            "local",
            "",
            *(mean_and_deviation([reported[f"{n}-local"] for reported in local]) for n in NAMES),
            "",
            "",
            "",
            "",
            "",
        )
    )
    for (row, epsilon), each in found.items():
        columns = [
            mean_and_deviation([reported[f"{n}-{kind}"] for reported in each])
            for kind in ("synthetic", "mixed")
            for n in NAMES
        ]
        share = statistics.mean(reported["share"] for reported in each) / 100
        everywhere = mean_and_deviation([reported["all"] for reported in each])
        sent = statistics.mean(reported["bytes"] for reported in each)
        rows.append((row, f"{epsilon:g}" if epsilon else "none", *columns, share, everywhere, sent))
    heads = (
        "shared head",
        "epsilon",
        "alone, %",
        "alone, balanced",
        "mixed, %",
        "mixed, balanced",
        "own share",
        "all test data, %",
        "MB sent",
    )
    report(name, title, heads, rows)


if __name__ == "__main__":
    main()

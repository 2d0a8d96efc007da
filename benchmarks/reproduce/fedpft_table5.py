"""FedPFT, table 5 and figure 4: 50 sites, Dirichlet 0.1; all one-shot methods, and the multi-round
methods as curves.

Default: the sample CIFAR-10 features next to the checkout. Example with the paper's backbone and
data:

    python benchmarks/reproduce/fedpft_table5.py --name cifar100-resnet50 \\
        -c 'data="parquet" data-dir="/data" dataset="cifar100" backbone="torchvision:resnet50"
        alpha=0.1'
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks import _closed_form_peers, _one_shot_peers
from benchmarks.harness.federation import Federation, Measured, accuracies, load_seed, measure
from benchmarks.harness.options import arguments, settings_of
from benchmarks.harness.plots import axes_of, draw
from benchmarks.harness.results import report, stored
from benchmarks.harness.seeds import mean_and_deviation, over_seeds

Pair = tuple[float, float]
# The paper allows one component per record of a class; our default is ten records per component.
PUBLISHED = {"fedpft.samples-per-component": 1}
ROUNDS: dict[str, dict[str, Any]] = {
    "FedAvg": {"method": "fedavg"},
    "FedProx": {"method": "fedprox"},
    "FedYogi": {"method": "fedyogi"},
    "DSFL": {"method": "dsfl"},
    "SCAFFOLD": {"method": "scaffold"},
    "FedLambda": {"method": "fedlambda"},
    "kNN-Per": {"method": "knn-per"},
}
PEERS = _closed_form_peers.PEERS | _one_shot_peers.PEERS
# Settings of a row. Rows of PEERS have none: they are rules of their own.
ROWS: dict[str, dict[str, Any] | None] = {
    "centralised": None,
    "local": {"method": "local"},
    "ensemble": {"method": "ensemble-max"},
    "mean of the ensemble (ours)": {"method": "ensemble"},
    "average": {"method": "average"},
    "FedKT": {},
    "FedBE": {},
    "AFL": {},
    "FedCOF": {},
    "FedCOF, 4 groups a class": {},
    "FENS": {},
    "variational mixtures (FBPFT-VI)": {},
    "FedPFT spherical K=1": {"fedpft.covariance": "spherical"},
    "FedPFT spherical K=10": PUBLISHED
    | {"fedpft.covariance": "spherical", "fedpft.components": 10},
    "FedPFT diag K=10": PUBLISHED | {"fedpft.covariance": "diag", "fedpft.components": 10},
    "FedPFT spherical K=50": PUBLISHED
    | {"fedpft.covariance": "spherical", "fedpft.components": 50},
    "FedPFT diag K=50": PUBLISHED | {"fedpft.covariance": "diag", "fedpft.components": 50},
    "FedPFT diag K=100": PUBLISHED | {"fedpft.covariance": "diag", "fedpft.components": 100},
    "FedPFT lowrank r=16 (ours)": {"fedpft.rank": 16},
    "FedPFT lowrank r=64 (ours)": {"fedpft.rank": 64},
    "FedCGS": {},
    "GH-OFL FisherMix": {},
    "GH-OFL NB-diag": {},
    "GH-OFL LDA": {"fedpft.covariance": "gram", "head.shrinkage": 0.05},
    "FedPFT gram, lda (ours)": {"fedpft.covariance": "gram"},
    "FedPFT lowrank r=64, power 0.5 (ours)": {"fedpft.rank": 64, "features.power-transform": 0.5},
    "FedPFT gram, lda, power 0.5 (ours)": {
        "fedpft.covariance": "gram",
        "features.power-transform": 0.5,
    },
    "FedPFT gram, ridge (ours)": {"fedpft.covariance": "gram", "head.solver": "ridge"},
    "FedPFT diag, naive Bayes": {"fedpft.covariance": "diag", "head.solver": "naive-bayes"},
    "FedPFT theorem 4.1, epsilon 1": {
        "fedpft.covariance": "spherical",
        "fedpft.privacy": "theorem-4.1",
    },
    "FedPFT noisy sums, epsilon 1 (ours)": {"fedpft.covariance": "spherical"},
}
# CIFAR-100 with ResNet-50.
PAPER = {
    "centralised": 73.50,
    "ensemble": 53.97,
    "average": 43.51,
    "FedKT": 51.80,
    "FedBE": 56.32,
    "FedPFT spherical K=1": 60.16,
    "FedPFT spherical K=10": 69.74,
    "FedPFT diag K=10": 69.91,
    "FedPFT spherical K=50": 71.88,
    "FedPFT diag K=50": 72.05,
    "FedPFT diag K=100": 72.29,
    "FedPFT theorem 4.1, epsilon 1": 56.96,
}


def main() -> None:
    parser = arguments(__doc__, "reproduce-fedpft-table5")
    parser.add_argument("--sites", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20)
    only = "measure rows whose name matches this; take the others from the last result"
    parser.add_argument("--only", default="", help=only)
    options = parser.parse_args()
    settings, message = settings_of(options, {"dataset": "cifar10", "alpha": 0.1})
    settings = settings | {"fedavg.rounds": options.rounds}
    chosen = {
        row: (row, own) for row, own in (ROWS | ROUNDS).items() if re.search(options.only, row)
    }
    last = {"rows": [], "curves": {}} | (stored(options.name) if options.only else {})
    load = partial(load_powers, settings, options.sites)
    results = over_seeds(options.seeds, load, chosen, partial(metric_row, settings))
    known = {row[0]: row for row in last["rows"]}
    for row, each in results.items():
        own = mean_and_deviation([one.own for one in each]) if row != "centralised" else ""
        sent = sum(one.bytes for one in each) / len(each) / 1e6
        rounds = options.rounds if row in ROUNDS else 1
        known[row] = (
            row,
            mean_and_deviation(accuracies(each)),
            own,
            sent,
            rounds,
            PAPER.get(row, ""),
        )
    rows = [known[row] for row in ROWS | ROUNDS if row in known]
    columns = (
        "row",
        "accuracy, %",
        "at sites, on their own test data",
        "MB sent, all sites",
        "rounds",
        "paper",
    )
    title = f"FedPFT table 5, {options.sites} sites, {options.seeds} seeds. {message}"
    # The global model of FedLambda and kNN-Per is FedAvg's.
    several = [row for row in list(ROUNDS)[:5] if row in results]
    curves = last["curves"] | {
        row: [_mean(step) for step in zip(*(one.curve for one in results[row]), strict=True)]
        for row in several
    }
    single = {row[0]: (row[3] * 1e6, float(row[1].split()[0])) for row in rows if row[0] in ROWS}
    report(options.name, title, columns, rows, curves=curves)
    plot(single, curves, title, options.name)


def load_powers(settings: dict[str, Any], sites: int, seed: int) -> dict[float | None, Federation]:
    """The data of a seed with features as they are, and raised to the power 0.5."""
    return {power: load_seed(settings | power_of(power), sites, seed) for power in (None, 0.5)}


def metric_row(
    settings: dict[str, Any],
    seed: int,
    loaded: dict[float | None, Federation],
    row: tuple[str, Any],
) -> Measured:
    """The result of a row, which is its name and its settings."""
    name, own = row
    data = loaded[(own or {}).get("features.power-transform")]
    if name in PEERS:
        measured = _closed_form_peers.measured(PEERS[name], data, seed)
    else:
        budget = data.named({"epsilon": 1.0, "delta": 1e-5}) if "epsilon" in name else {}
        measured = measure(settings | {"seed": seed} | budget, own, data)
    print(f"seed {seed}, {name}: {measured.accuracy:.2f} %", flush=True)
    return measured


def power_of(power: float | None) -> dict[str, Any]:
    """The setting of the features' power; none for features as they are."""
    return {} if power is None else {"features.power-transform": power}


def plot(single: dict[str, Pair], curves: dict[str, list[Pair]], title: str, name: str) -> None:
    axes = axes_of(10, 5.4)
    for index, (row, curve) in enumerate(curves.items()):
        megabytes, heights = [sent / 1e6 for sent, _ in curve], [accuracy for _, accuracy in curve]
        axes.plot(megabytes, heights, color=f"C{index}", label=f"{row}, every round")
    for index, (row, (sent, accuracy)) in enumerate(
        (row, pair) for row, pair in single.items() if pair[0]
    ):
        marker = "*" if "ours" in row else "s" if "FedPFT" in row else "o"
        colour, size = f"C{(index + len(curves)) % 10}", 13 if marker == "*" else 7
        axes.plot([sent / 1e6], [accuracy], marker, color=colour, markersize=size, label=row)
    axes.set_xscale("log")
    axes.set(xlabel="MB sent by all sites, 16-bit", ylabel="accuracy on all test data, %")
    axes.set_title(title.replace(". ", ".\n"), fontsize=10)
    draw(axes, name)


def _mean(pairs: Sequence[Pair]) -> Pair:
    first, second = zip(*pairs, strict=True)
    return sum(first) / len(first), sum(second) / len(second)


if __name__ == "__main__":
    main()

"""FedPFT, figure 6: a chain of five sites with 100 images each; accuracy of each site's head on all test data.

Default: the sample CIFAR-10 features next to the checkout. "once" is the paper's one sample per record.
"""

from collections import defaultdict
from typing import Any
from unittest.mock import patch

import torch
from _harness import Federation, arguments, centralised, federate, load, mean_and_deviation, settings_of, site
from _report import RESULTS, report
from rich.progress import track

from common.run import parse_run

SITES, RECORDS = 5, 100
ROWS: dict[str, dict[str, Any]] = {
    "lowrank r=64 (ours)": {"fedpft.rank": 64},
    "lowrank r=16 (ours)": {"fedpft.rank": 16},
    "diag K=1": {"fedpft.covariance": "diag"},
    "diag K=10, as published": {"fedpft.covariance": "diag", "fedpft.components": 10, "fedpft.samples-per-component": 1},
}


def main() -> None:
    options = arguments(__doc__, "reproduce-fedpft-figure6").parse_args()
    settings, message = settings_of(options, {"dataset": "cifar10"})
    curves: dict[str, list[list[float]]] = defaultdict(list)
    oracle = []
    for seed in range(options.seeds):
        base = settings | {"seed": seed, "fedpft.topology": "chain"}
        whole = load(parse_run(base), 1)
        (only,) = whole.sites
        order = torch.randperm(len(only.train.labels), generator=torch.Generator().manual_seed(seed))[: SITES * RECORDS]
        parts = [
            site(only.train.features[rows], only.train.labels[rows], whole.test, whole.classes, only.fingerprint)
            for rows in order.split(RECORDS)
        ]
        data = Federation(parts, whole.test)
        oracle.append(centralised(parse_run(base), data).accuracy)
        for row, own in track(ROWS.items(), description=f"seed {seed}"):
            curves[row].append([accuracy for _, accuracy in federate(parse_run(base | own), data).curve])
            with patch("client_app.methods.fedpft.chain.MOST_DRAWS", 1):
                once = federate(parse_run(base | own), data)
            curves[f"{row}, once"].append([accuracy for _, accuracy in once.curve])
    middle = sum(oracle) / len(oracle)
    rows = []
    for row, found in curves.items():
        sites = [mean_and_deviation(values) for values in zip(*found, strict=True)]
        rows.append((row, *sites, round(sum(curve[-1] for curve in found) / len(found) - middle, 2)))
    rows.append(("centralised", *[""] * (SITES - 1), mean_and_deviation(oracle), 0.0))
    columns = ("row", *(f"site {n}" for n in range(1, SITES + 1)), "last against centralised")
    title = f"FedPFT figure 6, {SITES} sites of {RECORDS} images, {options.seeds} seeds. {message}"
    report(options.name, title, columns, rows, curves=curves, centralised=oracle, paper="within 1.8 of centralised")
    plot(curves, middle, options.name)


def plot(curves: dict[str, list[list[float]]], oracle: float, name: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for index, (row, found) in enumerate(curves.items()):
        means = [sum(values) / len(values) for values in zip(*found, strict=True)]
        axes.plot(
            range(1, SITES + 1), means, ":" if row.endswith("once") else "-", marker="o", color=f"C{index // 2}", label=row
        )
    axes.axhline(oracle, color="black", linestyle="--", label="centralised")
    axes.set(xlabel="site in the chain", ylabel="accuracy of its head on all test data, %", xticks=range(1, SITES + 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(RESULTS / f"{name}.png", dpi=130)


if __name__ == "__main__":
    main()

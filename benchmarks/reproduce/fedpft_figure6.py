"""FedPFT, figure 6: a chain of five sites with 100 images each; accuracy of each site's head on all
test data.

Default: the sample CIFAR-10 features next to the checkout. "once" is the paper's one sample per
record.
"""

from typing import Any
from unittest.mock import patch

import torch

from benchmarks.harness.federation import Federation, load_seed, measure, with_rows
from benchmarks.harness.options import arguments, settings_of
from benchmarks.harness.plots import axes_of, draw
from benchmarks.harness.results import report
from benchmarks.harness.seeds import mean_and_deviation, over_seeds
from fedsurrogate.client_app.methods.fedpft.surrogate import MOST_DRAWS

SITES, RECORDS = 5, 100
ROWS: dict[str, dict[str, Any]] = {
    "lowrank r=64 (ours)": {"fedpft.rank": 64},
    "lowrank r=16 (ours)": {"fedpft.rank": 16},
    "diag K=1": {"fedpft.covariance": "diag"},
    "diag K=10, as published": {
        "fedpft.covariance": "diag",
        "fedpft.components": 10,
        "fedpft.samples-per-component": 1,
    },
}


def main() -> None:
    options = arguments(__doc__, "reproduce-fedpft-figure6").parse_args()
    settings, message = settings_of(options, {"dataset": "cifar10"})
    settings = settings | {"fedpft.topology": "chain"}

    def load(seed: int) -> Federation:
        whole = load_seed(settings, 1, seed)
        order = torch.randperm(whole.sizes[0], generator=torch.Generator().manual_seed(seed))
        parts = order[: SITES * RECORDS].split(RECORDS)
        return Federation(
            [with_rows(whole.sites[0], rows, whole.test) for rows in parts], whole.test
        )

    def curve(seed: int, data: Federation, row: tuple[dict[str, Any] | None, int]) -> list[float]:
        own, draws = row
        with patch("fedsurrogate.client_app.methods.fedpft.surrogate.MOST_DRAWS", draws):
            measured = measure(settings | {"seed": seed}, own, data)
        return [accuracy for _, accuracy in measured.curve or [(0, measured.accuracy)]]

    rows: dict[str, tuple[dict[str, Any] | None, int]] = {"centralised": (None, MOST_DRAWS)}
    for name, own in ROWS.items():
        rows |= {name: (own, MOST_DRAWS), f"{name}, once": (own, 1)}
    curves = over_seeds(options.seeds, load, rows, curve)
    oracle = [accuracy for (accuracy,) in curves.pop("centralised")]
    middle = sum(oracle) / len(oracle)
    table = []
    for name, each in curves.items():
        sites = [mean_and_deviation(values) for values in zip(*each, strict=True)]
        table.append((name, *sites, round(sum(one[-1] for one in each) / len(each) - middle, 2)))
    table.append(("centralised", *[""] * (SITES - 1), mean_and_deviation(oracle), 0.0))
    columns = ("row", *(f"site {n}" for n in range(1, SITES + 1)), "last against centralised")
    title = f"FedPFT figure 6, {SITES} sites of {RECORDS} images, {options.seeds} seeds. {message}"
    facts = {"curves": curves, "centralised": oracle, "paper": "within 1.8 of centralised"}
    report(options.name, title, columns, table, **facts)
    plot(curves, middle, options.name)


def plot(curves: dict[str, list[list[float]]], oracle: float, name: str) -> None:
    axes = axes_of(7, 4.4)
    for index, (row, each) in enumerate(curves.items()):
        means = [sum(values) / len(values) for values in zip(*each, strict=True)]
        line, colour = ":" if row.endswith("once") else "-", f"C{index // 2}"
        axes.plot(range(1, SITES + 1), means, line, marker="o", color=colour, label=row)
    axes.axhline(oracle, color="black", linestyle="--", label="centralised")
    axes.set(
        xlabel="site in the chain",
        ylabel="accuracy of its head on all test data, %",
        xticks=range(1, SITES + 1),
    )
    axes.legend(fontsize=8)
    draw(axes, name, legend=False)


if __name__ == "__main__":
    main()

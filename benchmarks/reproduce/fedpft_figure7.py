"""FedPFT, figure 7 (left): accuracy of a head on samples of Gaussian mixtures against their numbers; one
site with all features.

    python benchmarks/reproduce/fedpft_figure7.py --seeds 1

Default: the sample CIFAR-10 features next to the checkout; the paper has Caltech101 and CLIP ViT-B/32. A
mixture has as many Gaussians of a class as the row says, if the class has that many records.
"""

from typing import Any

from benchmarks.harness.federation import accuracies, load_seed, run_rows
from benchmarks.harness.options import arguments, settings_of
from benchmarks.harness.plots import axes_of, draw
from benchmarks.harness.results import report
from benchmarks.harness.seeds import mean_and_deviation

COUNTS = (1, 10, 50)
ROWS: dict[str, dict[str, Any] | None] = {"raw features": None}
ROWS |= {
    f"{family} K={count}": {
        "fedpft.covariance": family,
        "fedpft.components": count,
        "fedpft.samples-per-component": 1,
    }
    for family in ("spherical", "diag")
    for count in COUNTS
}
ROWS |= {f"lowrank r={rank} (ours)": {"fedpft.rank": rank} for rank in (16, 64)}
ROWS |= {"gram (ours)": {"fedpft.covariance": "gram"}}


def main() -> None:
    options = arguments(__doc__, "reproduce-fedpft-figure7").parse_args()
    settings, message = settings_of(options, {"dataset": "cifar10", "partition": "iid"})
    results = run_rows(settings, ROWS, options.seeds, lambda seed: load_seed(settings, 1, seed))
    best = accuracies(results["raw features"])
    rows, axes = [], axes_of(8, 4.5)
    for index, (row, each) in enumerate(results.items()):
        own = accuracies(each)
        behind = sum(a - b for a, b in zip(own, best, strict=True)) / options.seeds
        numbers = each[0].bytes / 2e3
        rows.append((row, mean_and_deviation(own), round(behind, 2), round(numbers)))
        axes.plot([numbers], [sum(own) / len(own)], "o", color=f"C{index}", label=row)
    axes.set_xscale("log")
    axes.set(xlabel="thousand numbers", ylabel="accuracy on all test data, %")
    title = f"FedPFT figure 7, one site, {options.seeds} seeds. {message}"
    columns = ("row", "accuracy, %", "against raw features", "thousand numbers")
    report(options.name, title, columns, rows)
    draw(axes, options.name)


if __name__ == "__main__":
    main()

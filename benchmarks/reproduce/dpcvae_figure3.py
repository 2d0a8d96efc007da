"""DP-CVAE, figure 3: other backbones, and more sites. Accuracy and balanced accuracy of the classifier at
each site, mean over sites, with epsilon 1 for all rounds.

    python benchmarks/reproduce/dpcvae_figure3.py
    python benchmarks/reproduce/dpcvae_figure3.py --only lite0      the others are those of the last result

The paper has OrganSMNIST with DINOv2, DINO and a supervised ViT-S. Stand-in: features of CIFAR-10, IID, by
the backbones of the sample data. "local" is a classifier of a site's own records alone.
"""

from typing import Any

from benchmarks.dpcvae_downstream import CLASSES
from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from benchmarks.harness.samples import BACKBONES, feature_settings
from benchmarks.harness.seeds import mean_and_deviation
from benchmarks.reproduce.dpcvae_tables import column

SITES = (5, 10, 20, 40)
COLUMNS = ("backbone", "sites", "accuracy, %", "balanced, %", "local: accuracy, %")


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", choices=list(BACKBONES), help="measure the rows of this backbone")
    options = parser.parse_args()
    chosen = {name: each for name, each in BACKBONES.items() if options.only in (None, name)}
    titles = {each.title for each in chosen.values()}
    rows: list[tuple[Any, ...]] = kept_rows(
        "reproduce-dpcvae-figure3", lambda row: row[0] in titles
    )
    for backbone, sample in chosen.items():
        settings = feature_settings("cifar10", backbone, partition="iid") | {"classes": CLASSES}
        for sites in SITES:
            scores = column(settings, sites, options.seeds, ["DP-CVAE"])["DP-CVAE"]
            names = ("accuracy-mixed", "balanced-mixed", "accuracy-local")
            cells = (mean_and_deviation([one[name] for one in scores]) for name in names)
            rows.append((sample.title, sites, *cells))
            title = f"DP-CVAE figure 3, features of CIFAR-10, IID, {options.seeds} seeds"
            report("reproduce-dpcvae-figure3", title, COLUMNS, rows)


if __name__ == "__main__":
    main()

"""FedPFT, figures 9 and 10: the records of each site by class, 50 sites by Dirichlet 0.1.

    python benchmarks/reproduce/fedpft_figure9.py

The paper has CIFAR-100 and Caltech101; default: the labels of CIFAR-10 and of PACS (photo) of the sample
features next to the checkout. In the picture, the area of a circle is the number of records. A row has
how many sites have a record, and of those the median number of classes, and the smallest, median and
largest number of records; and the share of records that are in the largest class of their site.
"""

from statistics import median
from typing import Any

import torch

from benchmarks.harness.federation import load_seed
from benchmarks.harness.options import described
from benchmarks.harness.results import RESULTS, report
from benchmarks.harness.samples import feature_settings

NAME, SITES, ALPHA = "reproduce-fedpft-figure9", 50, 0.1
DATA = {"CIFAR-10": "cifar10", "PACS (P)": "pacs-photo"}


def main() -> None:
    from matplotlib.figure import Figure

    described(__doc__).parse_args()
    figure = Figure(figsize=(12, 6), layout="constrained")
    rows = list[tuple[Any, ...]]()
    for axes, (title, dataset) in zip(figure.subplots(2, 1), DATA.items(), strict=True):
        data = load_seed(feature_settings(dataset, partition="dirichlet", alpha=ALPHA), SITES, 0)
        classes = len(data.classes)
        counts = torch.stack(
            [torch.bincount(s.train.labels, minlength=classes) for s in data.sites]
        )
        there = counts[counts.sum(1) > 0]
        records, kinds = there.sum(1).tolist(), (there > 0).sum(1).tolist()
        most = round(100 * float(there.amax(1).sum() / there.sum()), 1)
        rows.append((title, classes, len(there), median(kinds), min(records)))
        rows[-1] += (median(records), max(records), most)
        site, kind = counts.nonzero().T
        area = 120 * counts[site, kind] / counts.max()
        axes.scatter(site, kind, s=area, color="tab:red", alpha=0.7)
        axes.set(title=title, xlabel="site", ylabel="class", yticks=range(classes))
    columns = ("data", "classes", "sites", "classes of a site", "smallest", "median", "largest")
    columns += ("in the largest class of its site, %",)
    report(NAME, f"FedPFT figures 9 and 10, {SITES} sites, Dirichlet {ALPHA:g}", columns, rows)
    figure.savefig(RESULTS / f"{NAME}.png", dpi=110)


if __name__ == "__main__":
    main()

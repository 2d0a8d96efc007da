"""DP-CVAE, table 1: accuracy and balanced accuracy of a classifier at each site, mean over sites.

The paper's three columns are abdominal CT (OrganSMNIST) among 10 sites, IID and Dirichlet 0.3, and
Camelyon17 among five hospitals. Stand-ins, on the sample data next to the checkout: features of
CIFAR-10, IID and Dirichlet 0.3, and chest X-rays among five sites. With own data (images with a
backbone, or features), one column is printed next to a column of the paper:

    python benchmarks/reproduce/dpcvae_tables.py --column "CT IID" --sites 10 --rounds 50 \\
        -c 'data="parquet" data-dir="/data/organs" backbone="timm:vit_small_patch16_224.dino"
        partition="iid"' \\ -c 'classes="0,1,2,3,4,5,6,7,8,9,10"'

Differs from the paper: epsilon 1 holds over all rounds and with Poisson samples in each (the
paper's code accounts 20 of 250 epochs); the label histogram of the synthetic set is a noisy one of
all sites; each site chooses its own weight; FedAvg keeps its learning rate; a generator of DP-CGAN
keeps its weights between rounds; the row "local" is new.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.dpcvae_downstream import CLASSES, measured_scores
from benchmarks.dpcvae_pneumonia import NAMES, write_images
from benchmarks.harness.federation import Federation, load_seed
from benchmarks.harness.options import arguments, settings_of
from benchmarks.harness.results import report
from benchmarks.harness.samples import BACKBONES
from benchmarks.harness.seeds import mean_and_deviation, over_seeds
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import Scalar

# Settings of each run; the rows it gives, with the part of its scores.
RUNS: dict[str, dict[str, Any]] = {
    "FedAvg": {"method": "fedavg"},
    "FedProx": {"method": "fedprox"},
    "DP-CGAN": {"method": "dpcgan", "epsilon": 1.0, "delta": 1e-4},
    "DP-CVAE": {"method": "dpcvae", "epsilon": 1.0, "delta": 1e-4},
}
ROWS = {
    "local": ("DP-CVAE", "local"),
    "FedAvg": ("FedAvg", "synthetic"),
    "FedProx": ("FedProx", "synthetic"),
    "FedLambda": ("FedAvg", "mixed"),
    "DP-CGAN": ("DP-CGAN", "mixed"),
    "DP-CVAE": ("DP-CVAE", "mixed"),
}
# Accuracy and balanced accuracy; mean and deviation over sites. Camelyon17 is balanced, so the
# paper gives accuracy alone.
PAPER: dict[str, dict[str, tuple[str, str]]] = {
    "CT IID": {
        "FedAvg": ("73.33 ± 1.14", "67.00 ± 1.15"),
        "FedProx": ("73.26 ± 1.19", "66.95 ± 1.17"),
        "FedLambda": ("77.21 ± 0.80", "71.32 ± 0.91"),
        "DP-CGAN": ("77.60 ± 1.36", "71.94 ± 1.18"),
        "DP-CVAE": ("77.54 ± 0.76", "71.84 ± 0.82"),
    },
    "CT Dirichlet 0.3": {
        "FedAvg": ("64.85 ± 5.88", "58.74 ± 2.93"),
        "FedProx": ("64.76 ± 6.13", "58.66 ± 5.84"),
        "FedLambda": ("81.03 ± 3.83", "59.08 ± 2.54"),
        "DP-CGAN": ("88.84 ± 1.99", "57.49 ± 2.41"),
        "DP-CVAE": ("88.94 ± 1.35", "57.58 ± 3.33"),
    },
    "Camelyon17": {
        "FedAvg": ("90.62 ± 2.34", ""),
        "FedProx": ("90.65 ± 2.01", ""),
        "FedLambda": ("92.54 ± 1.03", ""),
        "DP-CGAN": ("93.95 ± 0.98", ""),
        "DP-CVAE": ("94.49 ± 1.28", ""),
    },
}


def column(
    settings: dict[str, Scalar], sites: int, seeds: int, runs: list[str]
) -> dict[str, list[dict[str, float]]]:
    """Scores of every run at every seed, in percent; with the same sites for all runs of a seed."""

    def one(seed: int, data: Federation, own: dict[str, Any]) -> dict[str, float]:
        return measured_scores(parse_run(settings | {"seed": seed} | own), data)

    rows = {name: RUNS[name] for name in runs}
    return over_seeds(seeds, lambda seed: load_seed(settings, sites, seed), rows, one)


def main() -> None:
    parser = arguments(__doc__, "reproduce-dpcvae-table1")
    parser.add_argument(
        "--column", choices=list(PAPER), help="of the paper, next to which own data are printed"
    )
    parser.add_argument("--sites", type=int, default=10, help="of own data")
    parser.add_argument(
        "--rounds",
        type=int,
        default=0,
        help="of FedAvg and generators (paper: 50); 0: the defaults",
    )
    parser.add_argument("--only", default=",".join(RUNS), help=f"runs, of {', '.join(RUNS)}")
    options = parser.parse_args()
    rounds: dict[str, Scalar] = {}
    if options.rounds:
        rounds = {"fedavg.rounds": options.rounds, "dpcvae.rounds": options.rounds}
    with tempfile.TemporaryDirectory() as folder:
        columns: dict[str, tuple[dict[str, Scalar], int, str]] = {}
        settings, message = settings_of(options, {"dataset": "cifar10", "classes": CLASSES})
        if options.run_config:
            columns[options.column or "CT IID"] = settings, options.sites, message
        else:
            images = write_images(Path(folder) / "xrays")
            xrays: dict[str, Scalar] = {
                "data": "imagefolder",
                "data-dir": str(images),
                "image-size": 128,
                "partition": "iid",
                "classes": ",".join(NAMES),
            } | BACKBONES[options.backbone].settings
            columns["CT IID"] = settings | {"partition": "iid"}, 10, "CIFAR-10 features"
            columns["CT Dirichlet 0.3"] = (
                settings | {"partition": "dirichlet", "alpha": 0.3},
                10,
                "CIFAR-10 features",
            )
            columns["Camelyon17"] = xrays, 5, "chest X-rays"
        rows: list[tuple[Any, ...]] = []
        for name, (chosen, sites, data) in columns.items():
            scores = column(chosen | rounds, sites, options.seeds, options.only.split(","))
            for row, (run, kind) in ROWS.items():
                if run not in scores:
                    continue
                each = scores[run]
                ours = [
                    mean_and_deviation([one[f"{n}-{kind}"] for one in each])
                    for n in ("accuracy", "balanced")
                ]
                sent = 0.0 if row == "local" else statistics.mean(one["bytes"] for one in each)
                rows.append((name, data, row, *ours, *PAPER[name].get(row, ("", "")), sent))
    heads = ("paper's column", "our data", "row", "accuracy, %", "balanced, %")
    heads += ("paper: accuracy", "paper: balanced", "MB sent")
    title = (
        f"DP-CVAE table 1, {options.seeds} seeds (ours: mean and deviation over seeds; paper: "
        "over sites)"
    )
    report(options.name, title, heads, rows, message=message, rounds=options.rounds or "defaults")


if __name__ == "__main__":
    main()

"""FedLAP on features of a frozen backbone compared with FedPFT, accuracy against bytes: ten sites,
Dirichlet 0.1.

The synthetic records are features instead of images; the model is a linear head or one with a
hidden layer of 64.
"""

from typing import Any

from benchmarks.harness.federation import load_seed, run_rows
from benchmarks.harness.options import arguments, settings_of
from benchmarks.harness.results import report
from benchmarks.harness.seeds import mean_and_deviation

# Few images: with them an annealed descent is better (benchmarks/fedlap_radius.py).
LAP = {"method": "fedlap", "fedlap.rounds": 4, "fedlap.descent": "annealed"}
LINEAR = LAP | {
    "fedlap.model": "linear",
    "fedlap.learning-rate": 30.0,
    "fedlap.image-learning-rate": 0.1,
}
MLP = LAP | {"fedlap.model": "mlp", "fedlap.width": 64, "fedlap.image-learning-rate": 20.0}
ROWS: dict[str, dict[str, Any]] = {
    "FedPFT spherical": {"fedpft.covariance": "spherical"},
    "FedPFT lowrank r=4": {"fedpft.rank": 4},
    "FedPFT lowrank r=16": {"fedpft.rank": 16},
    "FedPFT lowrank r=64": {"fedpft.rank": 64},
    "FedLAP linear, 1 a class": LINEAR | {"fedlap.images-per-class": 1},
    "FedLAP hidden layer, 1 a class": MLP | {"fedlap.images-per-class": 1},
    "FedLAP hidden layer, 2 a class": MLP | {"fedlap.images-per-class": 2},
    "FedLAP hidden layer, 4 a class": MLP | {"fedlap.images-per-class": 4},
    "FedAvg of the hidden layer": {
        "method": "fedavg",
        "fedavg.model": "mlp",
        "fedavg.width": 64,
        "fedavg.rounds": 4,
    },
}


def main() -> None:
    options = arguments(__doc__, "fedlap-on-features").parse_args()
    settings, message = settings_of(options, {"dataset": "cifar10", "alpha": 0.1})
    results = run_rows(settings, ROWS, options.seeds, lambda seed: load_seed(settings, 10, seed))
    rows = []
    for name, each in results.items():
        curves = [one.curve or [(one.bytes, one.accuracy)] for one in each]
        for number, pairs in enumerate(zip(*curves, strict=True), start=1):
            sent = sum(sent for sent, _ in pairs) / len(pairs) / 1e6
            rows.append(
                (name, number, mean_and_deviation([accuracy for _, accuracy in pairs]), sent)
            )
    columns = ("method", "round", "accuracy, %", "MB sent, all sites")
    report(
        options.name, f"10 sites, Dirichlet 0.1, {options.seeds} seeds. {message}", columns, rows
    )


if __name__ == "__main__":
    main()

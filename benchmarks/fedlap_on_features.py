"""FedLAP on features of a frozen backbone compared with FedPFT, accuracy against bytes: ten sites, Dirichlet 0.1.

The synthetic records are features instead of images; the model is a linear head or one with a hidden layer of 64.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "reproduce"))
from _harness import arguments, federate, load, mean_and_deviation, settings_of
from _report import report
from rich.progress import track

from common.run import parse_run

LAP = {"method": "fedlap", "fedlap.rounds": 4}
LINEAR = LAP | {"fedlap.model": "linear", "fedlap.learning-rate": 30.0, "fedlap.image-learning-rate": 0.1}
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
    "FedAvg of the hidden layer": {"method": "fedavg", "fedavg.model": "mlp", "fedavg.width": 64, "fedavg.rounds": 4},
}


def main() -> None:
    options = arguments(__doc__, "fedlap-on-features").parse_args()
    settings, message = settings_of(options, {"dataset": "cifar10", "alpha": 0.1})
    found: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for seed in range(options.seeds):
        data = load(parse_run(settings | {"seed": seed}), 10)
        for name, own in track(ROWS.items(), description=f"seed {seed}"):
            measured = federate(parse_run(settings | own | {"seed": seed}), data)
            for number, (sent, accuracy) in enumerate(measured.curve or [(measured.bytes, measured.accuracy)], start=1):
                found.setdefault((name, number), []).append((accuracy, sent))
    rows = [
        (name, number, mean_and_deviation([a for a, _ in pairs]), sum(sent for _, sent in pairs) / len(pairs) / 1e6)
        for (name, number), pairs in found.items()
    ]
    columns = ("method", "round", "accuracy, %", "MB sent, all sites")
    report(options.name, f"10 sites, Dirichlet 0.1, {options.seeds} seeds. {message}", columns, rows)


if __name__ == "__main__":
    main()

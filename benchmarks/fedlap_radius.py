"""What FedLAP's radius and its number of images are worth: accuracy by round where sites differ.

    python benchmarks/fedlap_radius.py --seeds 2

The digits at five sites, of two classes each or by Dirichlet 0.1, ten rounds. The radius is none
(`fixed`, ten, which no round reaches), the median or the smallest of the sites' radii; a site looks for
its own in a tenth of a round's work (annealed steps) or along all steps of the coordinator (plain, as in
the paper). FedAvg with five local epochs stands beside. A row has mean accuracy in % after rounds 1, 2, 5
and 10, the lowest after ten over seeds, the largest fall from one round to the next, and bytes of a site
and round.
"""

from itertools import pairwise
from statistics import mean
from typing import Any

from benchmarks.harness.federation import load_seed, run_rows
from benchmarks.harness.options import described
from benchmarks.harness.results import report

SITES, ROUNDS, SHOWN = 5, 10, (1, 2, 5, 10)
PARTITIONS: dict[str, dict[str, Any]] = {
    "two classes": {"partition": "classes", "classes-per-site": 2},
    "Dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
}
LAP: dict[str, Any] = {"method": "fedlap", "fedlap.rounds": ROUNDS}
RULES: dict[str, dict[str, Any]] = {
    "none": {"fedlap.rule": "fixed"},
    "median": {},
    "smallest": {"fedlap.rule": "min"},
    "plain, none": {"fedlap.rule": "fixed", "fedlap.descent": "plain"},
    "plain, median": {"fedlap.descent": "plain"},
    "plain, smallest (the paper's)": {"fedlap.rule": "min", "fedlap.descent": "plain"},
}
AVERAGED: dict[str, Any] = {
    "method": "fedavg",
    "fedavg.model": "mlp",
    "fedavg.rounds": ROUNDS,
    "fedavg.local-epochs": 5,
}


def rows_of(images: int) -> dict[str, dict[str, Any]]:
    """The rows with so many images of a class."""
    own = LAP | {"fedlap.images-per-class": images}
    return {f"{images} images, {name}": own | rule for name, rule in RULES.items()}


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--images", type=int, nargs="*", default=(10, 50))
    options = parser.parse_args()
    rows, curves = [], {}
    wanted = {"FedAvg": AVERAGED}
    for images in options.images:
        wanted |= rows_of(images)
    for partition, settings in PARTITIONS.items():
        results = run_rows(
            settings,
            wanted,
            options.seeds,
            lambda seed, own=settings: load_seed(own | {"seed": seed}, SITES, seed),
        )
        for name, seeds in results.items():
            own = [[accuracy for _, accuracy in each.curve] for each in seeds]
            falls = [max(a - b for a, b in pairwise(curve)) for curve in own]
            cells = [round(mean(curve[at - 1] for curve in own), 1) for at in SHOWN]
            lowest, fall = round(min(curve[-1] for curve in own), 1), round(max(falls), 1)
            sent = round(seeds[0].bytes / ROUNDS / SITES)
            rows.append((partition, name, *cells, lowest, fall, sent))
            curves[f"{partition}, {name}"] = own
    columns = ("partition", "radius", *(f"round {at}" for at in SHOWN))
    columns += ("lowest after ten", "largest fall", "bytes")
    title = f"FedLAP on the digits, {SITES} sites, {options.seeds} seeds, accuracy in %"
    report("fedlap-radius", title, columns, rows, curves=curves)


if __name__ == "__main__":
    main()

"""What FedLAP's radius, its descent and its number of images are worth: accuracy by round where sites
differ.

    python benchmarks/fedlap_radius.py --seeds 2
    python benchmarks/fedlap_radius.py --seeds 2 --only 'plain'       the others are those of the last result

The digits at five sites, of two classes each or by Dirichlet 0.1, ten rounds. The radius is none
(`fixed`, ten, which no round reaches), or the smallest or the median of the sites' radii. The descent is
plain, as in the paper, and a site looks for its radius along all of its steps; or annealed, and the site
looks in a tenth of a round's work. FedAvg with five local epochs stands beside.

A row has mean accuracy in % after each round, the lowest after ten over seeds, the largest fall
from one round to the next, how many of all rounds ended at the radius, the coordinator's steps in a round,
and bytes of a site and round. The picture has, for the default, the real loss of all sites and its
approximation along the coordinator's walk, were it not ended, with the radius of each site, and accuracy
by radius.
"""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from benchmarks.harness.federation import Federation, Measured, federate, joined, learn, load_seed
from benchmarks.harness.options import described
from benchmarks.harness.results import RESULTS, kept_rows, report, stored
from benchmarks.harness.seeds import over_seeds
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.loss_landscape import (
    Descent,
    LandscapeRecords,
    distance,
    total_loss,
    walk,
)
from fedsurrogate.common.models.networks import build, split_input
from fedsurrogate.common.models.training_parts import draws
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Synthetic
from fedsurrogate.strategies.base.training import Training

SITES, ROUNDS = 5, 10
NAME = "fedlap-radius"
PARTITIONS: dict[str, dict[str, Any]] = {
    "two classes": {"partition": "classes", "classes-per-site": 2},
    "Dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
}
LAP: dict[str, Any] = {"method": "fedlap", "fedlap.rounds": ROUNDS}
DEFAULT = LAP | {"fedlap.images-per-class": 50, "fedlap.descent": "plain"}
RULES = {"none": "fixed", "median": "median", "smallest": "min"}
AVERAGED: dict[str, Any] = {
    "method": "fedavg",
    "fedavg.model": "mlp",
    "fedavg.rounds": ROUNDS,
    "fedavg.local-epochs": 5,
}
# Rounds whose walk is drawn, and its steps.
DRAWN, STEPS = (1, 5), 100
Walks = list[tuple[dict[str, float], list[float]]]


def rows_of(images: int) -> dict[str, dict[str, Any]]:
    """The rows with so many images of a class."""
    own = LAP | {"fedlap.images-per-class": images}
    rows = {
        f"{images} images, plain, {name}": own | {"fedlap.descent": "plain", "fedlap.rule": rule}
        for name, rule in RULES.items()
    }
    return rows | {f"{images} images, annealed, median": own | {"fedlap.descent": "annealed"}}


def with_walks(run_settings: dict[str, Any], data: Federation) -> tuple[Measured, Walks]:
    """A run, and the walk and the sites' radii of each of its rounds."""
    walks: Walks = []

    def step(training: Training, sets: Sequence[Synthetic], device: str) -> None:
        walks.append((learn(training, sets, device), [each.radius for each in sets]))

    return federate(parse_run(run_settings), data, step), walks


def cells(results: Sequence[tuple[Measured, Walks]]) -> tuple[Any, ...]:
    """The cells of a row, of all seeds."""
    curves = [[accuracy for _, accuracy in measured.curve] for measured, _ in results]
    falls = [max(a - b for a, b in pairwise(curve)) for curve in curves]
    shown = [round(mean(step), 1) for step in zip(*curves, strict=True)]
    walked = [each for _, walks in results for each, _ in walks]
    ended: list[Any] = ["", ""]
    if walked:
        edge = sum(each["at_edge"] > 0 for each in walked)
        ended = [f"{edge} of {len(walked)}", round(mean(each["steps"] for each in walked))]
    sent = round(results[0][0].bytes / ROUNDS / SITES)
    lowest, fall = round(min(curve[-1] for curve in curves), 1), round(max(falls), 1)
    return (*shown, lowest, fall, *ended, sent)


def along(settings: dict[str, Any], data: Federation) -> list[dict[str, Any]]:
    """For each drawn round: distances from the model along the whole walk of the coordinator, the real
    and the approximated loss there, and the radii of the sites.
    """
    run, found = parse_run(settings), []
    own, train = run.settings.fedlap, joined([each.train for each in data.sites])

    def step(training: Training, sets: Sequence[Synthetic], device: str) -> None:
        if training.round + 1 in DRAWN:
            module = build(own.kind, training.inputs, len(data.classes), training.model)
            body, values = split_input(module, train.features)
            real = LandscapeRecords.evenly(values.float(), train.labels)
            images = [
                LandscapeRecords.evenly(
                    each.values.reshape(-1, *values.shape[1:]), _labels(each, data)
                )
                for each in sets
            ]
            made = LandscapeRecords.pool(images, [each.records for each in sets])
            descent = Descent(own.rate(training.round + 1, ROUNDS), STEPS, math.inf, plain=True)
            path = [training.model]
            path += [
                here
                for here, _ in walk(
                    body, training.model, made, descent, draws((), stream(0, "walk"))
                )
            ]
            found.append(
                {
                    "round": training.round + 1,
                    "distance": [round(distance(each, training.model), 4) for each in path],
                    "real": [round(total_loss(body, each, real), 4) for each in path],
                    "approximated": [round(total_loss(body, each, made), 4) for each in path],
                    "radii": [round(each.radius, 4) for each in sets],
                }
            )
        learn(training, sets, device)

    federate(run, data, step)
    return found


def _labels(synthetic: Synthetic, data: Federation) -> Any:
    from fedsurrogate.common.models.classifiers import class_indices

    return class_indices(data.classes, synthetic.header.classes)[synthetic.labels]


def plot(curves: dict[str, list[list[float]]], walks: dict[str, list[dict[str, Any]]]) -> None:
    """A line of panels for each partition: the walks, and accuracy by round and radius."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    panels = figure.subplots(len(PARTITIONS), len(DRAWN) + 1)
    for line, partition in zip(panels, PARTITIONS, strict=True):
        for panel, each in zip(line, walks[partition], strict=False):
            panel.plot(each["distance"], each["real"], "C0", label="real loss, all sites")
            panel.plot(each["distance"], each["approximated"], "C1", label="of the images")
            for index, radius in enumerate(each["radii"]):
                label = "radius of a site" if not index else None
                panel.axvline(radius, color="gray", lw=0.8, ls=":", label=label)
            panel.set(xlabel="distance from the model", title=f"{partition}, round {each['round']}")
            panel.legend(fontsize=7)
        last = line[-1]
        shown = {f"50 images, plain, {name}": f"50 images, {name}" for name in RULES}
        shown |= {f"10 images, plain, {name}": f"10 images, {name}" for name in RULES}
        shown["FedAvg"] = "FedAvg"
        for index, (row, label) in enumerate(shown.items()):
            if f"{partition}, {row}" in curves:
                seeds = curves[f"{partition}, {row}"]
                by_round = [mean(step) for step in zip(*seeds, strict=True)]
                style = "--" if row.startswith("10") else ":" if row == "FedAvg" else "-"
                last.plot(range(1, ROUNDS + 1), by_round, style, color=f"C{index % 3}", label=label)
        last.set(xlabel="round", title=f"{partition}: accuracy, %", ylim=(60, 100))
        last.legend(fontsize=7)
        last.grid(alpha=0.3)
    figure.savefig(RESULTS / f"{NAME}.png", dpi=110)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="measure rows whose name matches this")
    options = parser.parse_args()
    wanted = {
        name: own
        for name, own in (rows_of(10) | rows_of(50) | {"FedAvg": AVERAGED}).items()
        if re.search(options.only, name)
    }
    rows = kept_rows(NAME, lambda row: row[1] in wanted)
    last = {"curves": {}, "walks": {}} | stored(NAME)
    curves, walks, radii = last["curves"], last["walks"], last.get("radii", {})
    for partition, settings in PARTITIONS.items():
        results = over_seeds(
            options.seeds,
            lambda seed, own=settings: load_seed(own, SITES, seed),
            wanted,
            lambda seed, data, own, base=settings: with_walks(base | own | {"seed": seed}, data),
        )
        for name, seeds in results.items():
            rows.append((partition, name, *cells(seeds)))
            key = f"{partition}, {name}"
            curves[key] = [[accuracy for _, accuracy in each.curve] for each, _ in seeds]
            if seeds[0][1]:
                radii[key] = [[each["radius"] for each, _ in own] for _, own in seeds]
        walks[partition] = along(settings | DEFAULT | {"seed": 0}, load_seed(settings, SITES, 0))
    rows.sort(key=lambda row: (row[0], row[1]))
    columns = (
        "partition",
        "radius",
        *(f"round {at}" for at in range(1, ROUNDS + 1)),
        "lowest after ten",
    )
    columns += ("largest fall", "ended at the radius", "steps", "bytes")
    title = f"FedLAP on the digits, {SITES} sites, {options.seeds} seeds, accuracy in %"
    report(NAME, title, columns, rows, curves=curves, radii=radii, walks=walks)
    plot(curves, walks)


if __name__ == "__main__":
    main()

"""Accuracy against bytes, 0.2 to 16 MB: statistics with a closed-form head, FedPFT as published,
AFL, FedCOF, raw features.

CIFAR-10 features (of `--backbone`), 10 sites, Dirichlet 0.1, three seeds; and PACS photo and sketch,
two sites. Every row uses real payloads: packed, measured, unpacked and learned from. All rows raise
features to the power 0.5, but for FedPFT as published. AFL and FedCOF are the rules of
benchmarks/_closed_form_peers.py. Also in this run: whether
`gram` gives the same head for 100 sites and Dirichlet
0.01.

    python benchmarks/statistics_frontier.py
"""

import re
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from rich.progress import track

from benchmarks import _closed_form_peers as peers
from benchmarks.harness.federation import (
    Federation,
    Measured,
    accuracies,
    centralised,
    load_seed,
)
from benchmarks.harness.options import described, with_backbone
from benchmarks.harness.plots import axes_of, draw
from benchmarks.harness.results import report
from benchmarks.harness.samples import BACKBONES, feature_settings
from benchmarks.harness.seeds import frontier_row
from benchmarks.harness.site_data import make_surrogate
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import AnySurrogate
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from fedsurrogate.strategies.fedpft.strategy import learn

Settings = dict[str, Any]
Line = tuple[Any, ...]
RAW, GOAL = "raw features, trained head", 71.0
RANKS, BITS = (16, 32, 64, 128), (16, 8)
COLUMNS = ("released", "accuracy %", "sd", "against raw features", "uplink MB, all sites")
EXACT: Settings = {"max-share": 0.0, "defence": "none"}


@dataclass(frozen=True)
class Row:
    """One row: the settings of what sites send, those of learning, the power of features, and its
    line in the plot.
    """

    line: str
    sends: Settings | None
    learns: Settings = field(default_factory=dict)
    power: float = 0.5


def fedpft(
    line: str, family: str, power: float = 0.5, learns: Settings | None = None, **sends: Any
) -> Row:
    own = {f"fedpft.{key.replace('_', '-')}": value for key, value in sends.items()}
    return Row(line, {"fedpft.covariance": family} | own, learns or {}, power)


SAMPLED: Settings = {"head.solver": "sampled"}
PUBLISHED = fedpft(
    "FedPFT, published", "spherical", 1.0, SAMPLED, components=10, samples_per_component=1
)
ROWS: dict[str, Row] = {
    RAW: Row("raw features", None),
    f"{RAW}, power 1": Row("raw features, power 1", None, power=1.0),
    "FedPFT spherical K=10, as published": PUBLISHED,
    "spherical, lda": fedpft("spherical, lda", "spherical", learns={"head.solver": "lda"}),
    "diag, naive Bayes": fedpft("diag, naive Bayes", "diag", learns={"head.solver": "naive-bayes"}),
    **{
        f"lowrank r={rank}, {bits} bits, lda": fedpft(
            f"lowrank, {bits} bits, lda", "lowrank", rank=rank, bits=bits
        )
        for bits in BITS
        for rank in RANKS
    },
    "gram, lda": fedpft("gram, lda", "gram"),
    "gram, ridge": fedpft("gram, ridge", "gram", learns={"head.solver": "ridge"}),
    # Of peers.
    "AFL": Row("AFL", {}),
    **{name: Row("FedCOF, groups 1, 4, 20", {}) for name in peers.PEERS if "FedCOF" in name},
}


class Fits:
    """The surrogates of one federation by what decides the fit, so that rows with other bits or
    solvers share them.
    """

    def __init__(self, data: Federation) -> None:
        self.data = data
        self._made: dict[str, list[AnySurrogate]] = {}

    def of(self, run: Run) -> list[AnySurrogate]:
        key = repr(run.settings.fedpft.model_copy(update={"bits": 16}))
        if key not in self._made:
            self._made = {key: [make_surrogate(own, run).surrogate for own in self.data.given]}
        return self._made[key]

    def measured(self, run: Run) -> Measured:
        payloads = [pack_surrogate(each, run.settings.fedpft.bits) for each in self.of(run)]
        head = learn(
            [unpack_surrogate(payload) for payload in payloads], run, "cpu", self.data.classes
        ).model
        return Measured(self.data.judge(head), sum(map(len, payloads)))


def measure(name: str, run: Run, fits: Fits) -> Measured:
    if ROWS[name].sends is None:
        return centralised(run, fits.data)
    if name in peers.PEERS:
        return peers.measured(peers.PEERS[name], fits.data, run.settings.seed)
    return fits.measured(run)


def measure_all(
    base: Settings, sites: int, seeds: int, only: str = ""
) -> dict[str, list[Measured]]:
    """Every row over the seeds, or those whose name matches."""
    results: dict[str, list[Measured]] = defaultdict(list)
    for seed in range(seeds):
        own = base | {"seed": seed}
        fits = {
            power: Fits(load_seed(base | {"features.power-transform": power}, sites, seed))
            for power in (0.5, 1.0)
        }
        # Rows that share a fit follow each other.
        order = sorted(
            ((name, row) for name, row in ROWS.items() if re.search(only, name)),
            key=lambda pair: repr({**(pair[1].sends or {}), "fedpft.bits": 0}),
        )
        for name, row in track(order, description=f"{base['dataset']}, seed {seed}"):
            run = parse_run(
                own | {"features.power-transform": row.power} | (row.sends or {}) | row.learns
            )
            results[name].append(measured := measure(name, run, fits[row.power]))
            print(
                f"{name}: {measured.accuracy:.2f} % with {measured.bytes / 1e6:.3f} MB", flush=True
            )
    return results


def exact(base: Settings, seeds: int) -> dict[str, list[float]]:
    """Accuracy of `gram` for two partitions, without limits on weights: one head, whatever the
    partition.
    """
    accuracy: dict[str, list[float]] = defaultdict(list)
    for sites, alpha in ((10, 0.1), (100, 0.01)):
        for seed in range(seeds):
            own = base | {
                "seed": seed,
                "alpha": alpha,
                "features.power-transform": 0.5,
                "fedpft.covariance": "gram",
            }
            fits = Fits(load_seed(own, sites, seed))
            for text, limits in (("no limits on weights", EXACT), ("default limits", Settings())):
                right = fits.measured(parse_run(own | limits)).accuracy
                accuracy[f"{sites} sites, Dirichlet {alpha:g}, {text}"].append(round(right, 2))
    return dict(accuracy)


def table(results: dict[str, list[Measured]]) -> list[Line]:
    """The rows of accuracy against bytes; each against the head on real features of the same power."""
    oracles = {
        ROWS[name].power: statistics.mean(accuracies(each))
        for name, each in results.items()
        if ROWS[name].sends is None
    }
    return [
        frontier_row(
            name, accuracies(results[name]), oracles[row.power], [m.bytes for m in results[name]]
        )
        for name, row in ROWS.items()
        if name in results
    ]


def main() -> None:
    parser = described(__doc__)
    parser.add_argument(
        "--name", default="statistics-frontier", help="of the files in benchmarks/results"
    )
    with_backbone(parser)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    tables = ("cifar10", "gram", "pacs")
    parser.add_argument("--only", default="", choices=tables, help="one of the tables")
    parser.add_argument("--rows", default="", help="whose name matches this; raw features too")
    options = parser.parse_args()
    cifar, folder = {"dataset": "cifar10", "alpha": 0.1}, feature_settings("", options.backbone)
    of_images = f"features of {BACKBONES[options.backbone].title}"
    if options.only in ("", "cifar10"):
        results = measure_all(folder | cifar, options.sites, options.seeds, options.rows)
        rows = table(results)
        small = max((row for row in rows if row[4] <= 1.0), key=lambda row: row[1])
        print(
            f"best at 1 MB or less: {small[0]}, {small[1]} % with {small[4]} MB; the goal is "
            f"{GOAL} %"
        )
        title = (
            f"Statistics: CIFAR-10 {of_images}, {options.sites} sites, Dirichlet 0.1, "
            f"{options.seeds} seeds"
        )
        facts = {"settings": cifar, "accuracy": _each(results)}
        report(options.name, title, COLUMNS, rows, **facts)
        plot(rows, title, options.name)
    if options.only in ("", "gram"):
        title = f"Statistics: CIFAR-10 {of_images}, gram with lda, {options.seeds} seeds"
        same = exact(folder | cifar, options.seeds)
        rows_of_gram = [
            (name, round(statistics.mean(values), 2), values) for name, values in same.items()
        ]
        report(f"{options.name}-gram", title, ("sites", "accuracy %", "each seed"), rows_of_gram)
    if options.only in ("", "pacs"):
        pacs = {"dataset": "pacs-photo,pacs-sketch", "head.min-steps": 1000}
        results = measure_all(folder | pacs, 2, options.seeds, options.rows)
        title = f"Statistics: PACS photo and sketch, {of_images}, 2 sites, {options.seeds} seeds"
        facts = {"settings": pacs, "accuracy": _each(results)}
        report(f"{options.name}-pacs", title, COLUMNS, table(results), **facts)


def _each(results: dict[str, list[Measured]]) -> dict[str, list[float]]:
    return {
        name: [round(accuracy, 2) for accuracy in accuracies(each)]
        for name, each in results.items()
    }


def plot(rows: list[Line], title: str, name: str) -> None:
    axes = axes_of(9, 5)
    lines: dict[str, list[Line]] = defaultdict(list)
    for row in rows:
        lines[
            ROWS[row[0]].line if row[0] in ROWS else f"experiment: {row[0].split(',')[0]}"
        ].append(row)
    for index, (line, points) in enumerate(lines.items()):
        style = (
            "x"
            if "experiment" in line
            else "D"
            if "raw" in line
            else "o-"
            if len(points) > 1
            else "s"
        )
        megabytes, accuracy, deviation = (
            [point[column] for point in points] for column in (4, 1, 2)
        )
        axes.errorbar(
            megabytes, accuracy, deviation, fmt=style, color=f"C{index % 10}", label=line, capsize=2
        )
    axes.axhline(GOAL, color="#888", linewidth=0.8, linestyle="--")
    axes.axvline(1.0, color="#888", linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.set_xticks([0.2, 0.5, 1, 2, 4, 8, 16], ["0.2", "0.5", "1", "2", "4", "8", "16"])
    axes.minorticks_off()
    axes.set(xlabel="uplink of all sites, MB", ylabel="test accuracy, %")
    axes.set_title(title, fontsize=10)
    draw(axes, name)


if __name__ == "__main__":
    main()

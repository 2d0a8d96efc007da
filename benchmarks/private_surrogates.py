"""Accuracy against epsilon of every private surrogate, compared with no privacy and with the
paper's mechanism.

Every row uses real payloads: each site's surrogate is packed, measured, unpacked and used for
learning. Default: CIFAR-10 features, 10 sites, Dirichlet 0.1, delta 1e-5, three seeds. Two rows use
the noisy sums of the spherical family but learn from them differently: by training on samples, and
by pooling all sites' sums with equal weights. The public mean is the mean of the features of
other images, PACS photos.

The file of results is written after every seed; `--from-seed` continues it after a break.

    python benchmarks/private_surrogates.py --name mine --sites 5 -c 'data="safetensors"
    data-dir="/data" dataset="x"'
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.progress import track

from benchmarks.accuracy_against_bytes import judge, payloads_of, received
from benchmarks.harness.federation import Federation, load_seed
from benchmarks.harness.options import arguments, settings_of, without_paths
from benchmarks.harness.plots import axes_of, draw
from benchmarks.harness.results import report, stored
from benchmarks.harness.samples import features_folder
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.class_sums import PRESENT, as_mixtures
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate, Surrogate
from fedsurrogate.common.wire.records import unpack_surrogate
from fedsurrogate.strategies.fedpft.strategy import learn, learn_from_samples
from fedsurrogate.strategies.pooling.class_means import read_centre

DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
CENTRED = "sums lowrank r=64, public mean"
SAMPLED, EQUAL = "sums spherical, head on samples", "sums spherical, equal weights"
ROWS: dict[str, dict[str, Any]] = {
    "sums spherical": {"fedpft.covariance": "spherical"},
    "sums diag": {"fedpft.covariance": "diag"},
    "sums lowrank r=64": {"fedpft.covariance": "lowrank", "fedpft.rank": 64},
    CENTRED: {"fedpft.covariance": "lowrank", "fedpft.rank": 64},
    "sums full": {"fedpft.covariance": "full"},
    SAMPLED: {"fedpft.covariance": "spherical"},
    EQUAL: {"fedpft.covariance": "spherical"},
    "DP-EM K=2": {"fedpft.covariance": "spherical", "fedpft.components": 2},
    "DP-EM K=5": {"fedpft.covariance": "spherical", "fedpft.components": 5},
    "theorem 4.1 spherical": {"fedpft.covariance": "spherical", "fedpft.privacy": "theorem-4.1"},
    "theorem 4.1 diag": {"fedpft.covariance": "diag", "fedpft.privacy": "theorem-4.1"},
}
OPEN = {"spherical": 1, "diag": 1, "lowrank": 64}


Accuracies = dict[tuple[str, str], list[float]]


def federate(
    run: Run, data: Federation, row: str, centre: torch.Tensor | None = None
) -> tuple[Head, int]:
    """The head of a row, and the bytes of all sites. centre: the public mean of features (d,)."""
    payloads = payloads_of(run, data, centre)
    surrogates = [unpack_surrogate(payload) for payload in payloads]
    if row == SAMPLED:
        mixtures = [_mixture(surrogate) for surrogate in surrogates]
        claim = mixtures[0].claim
        assert claim is not None
        head = replace(
            learn_from_samples(mixtures, run.settings.head, run.settings.seed, data.classes),
            clip=claim.clip,
        )
    else:
        surrogates = [_equal(surrogates)] if row == EQUAL else surrogates
        learned = learn(surrogates, run, "cpu", data.classes, centre).model
        assert isinstance(learned, Head)
        head = learned
    return received(head), sum(map(len, payloads))


def _sums(surrogates: Sequence[AnySurrogate]) -> list[SumsSurrogate]:
    return [surrogate for surrogate in surrogates if isinstance(surrogate, SumsSurrogate)]


def _equal(surrogates: Sequence[AnySurrogate]) -> SumsSurrogate:
    """One surrogate with the sums of all sites: every class holds the noise of every site."""
    every = _sums(surrogates)
    first = every[0].sums
    sigmas = {name: sigma * len(every) ** 0.5 for name, sigma in first.sigmas.items()}
    counts, sums = (
        torch.stack([getattr(s.sums, name) for s in every]).sum(0) for name in ("counts", "sums")
    )
    return replace(every[0], sums=replace(first, counts=counts, sums=sums, sigmas=sigmas))


def _mixture(surrogate: AnySurrogate) -> Surrogate:
    """One spherical Gaussian for each class that stands out from the noise at this site, for
    sampling as without privacy.
    """
    (own,) = _sums([surrogate])
    made = as_mixtures(own.sums)
    if made is None:
        largest = int(own.sums.counts.argmax())
        sure = replace(
            own.sums,
            sigmas=own.sums.sigmas | {"counts": float(own.sums.counts[largest]) / PRESENT - 1e-3},
        )
        made = as_mixtures(sure)
    assert made is not None
    table, kept = made
    return Surrogate(
        replace(own.header, classes=tuple(own.header.classes[index] for index in kept)),
        table,
        own.claim,
    )


def main() -> None:
    parser = arguments(__doc__, "private-cifar10")
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument(
        "--from-seed", type=int, default=0, help="take earlier seeds from the file of results"
    )
    parser.add_argument(
        "--power-transform", type=float, default=1.0, help="of the default features"
    )
    parser.add_argument(
        "--public", default="", help="features of public images, for the row with a public mean"
    )
    parser.add_argument("--only", default="", help="rows whose name matches this")
    options = parser.parse_args()
    # The power that "auto" takes for the backbone of these features is 1 under privacy, and 0.5
    # without.
    stand_in = {"dataset": "cifar10", "alpha": 0.1, "features.power-transform": options.power}
    settings, _ = settings_of(options, stand_in)
    if not options.run_config:
        folder = features_folder(options.backbone)
        options.public = options.public or str(folder / "pacs-photo-train.safetensors")
    public = read_centre(options.public, parse_run(settings).power)
    accuracy, size = earlier(options.name, options.from_seed)
    for seed in range(options.from_seed, options.seeds):
        base = settings | {"seed": seed}
        data = load_seed(settings, options.sites, seed)
        for family, rank in OPEN.items():
            run = parse_run(base | {"fedpft.covariance": family, "fedpft.rank": rank})
            head, _ = federate(run, data, "")
            accuracy[family, "none"].append(100 * judge(head, run, options.sites)["accuracy.model"])
        rows = [name for name in ROWS if name != CENTRED or public is not None]
        rows = [name for name in rows if re.search(options.only, name)]
        work = [(name, epsilon) for name in rows for epsilon in EPSILONS]
        for name, epsilon in track(work, description=f"seed {seed}"):
            run = parse_run(base | ROWS[name] | {"epsilon": epsilon, "delta": DELTA})
            head, count = federate(run, data, name, public if name == CENTRED else None)
            right = 100 * judge(head, run, options.sites)["accuracy.model"]
            accuracy[name, f"{epsilon:g}"].append(right)
            size[name].append(count)
            print(f"seed {seed}, {name}, epsilon {epsilon:g}: {right:.2f} %", flush=True)
        title = (
            f"{options.name}: {options.sites} sites, {seed + 1} seeds, delta {DELTA:g}, "
            "accuracy % at epsilon"
        )
        write(options.name, title, settings, accuracy, size)


def earlier(name: str, seeds: int) -> tuple[Accuracies, dict[str, list[int]]]:
    """Accuracies and bytes of the first seeds in the file of results; empty ones for no seeds."""
    accuracy: Accuracies = defaultdict(list)
    size: dict[str, list[int]] = defaultdict(list)
    if seeds:
        last = stored(name)
        for key, values in last["accuracy"].items():
            row, _, column = key.rpartition(" @ ")
            accuracy[row, column] = values[:seeds]
        size |= {row: values[: seeds * len(EPSILONS)] for row, values in last["bytes"].items()}
    return accuracy, size


def write(
    name: str,
    title: str,
    settings: dict[str, Any],
    accuracy: Accuracies,
    size: dict[str, list[int]],
) -> None:
    """Write and draw the table of the seeds so far."""
    columns = [f"{epsilon:g}" for epsilon in EPSILONS]
    rows = []
    for row in (row for row in ROWS if row in size):
        each = [accuracy[row, column] for column in columns]
        means = [round(statistics.mean(values), 2) for values in each]
        without = accuracy.get((str(ROWS[row]["fedpft.covariance"]), "none"))
        plain = round(statistics.mean(without), 2) if without else ""
        spread = round(statistics.mean(map(statistics.pstdev, each)), 2)
        rows.append((row, *means, plain, spread, round(statistics.mean(size[row]) / 1e6, 3)))
    every = {f"{row} @ {epsilon}": values for (row, epsilon), values in accuracy.items()}
    heads = ("released", *columns, "same family, no privacy", "mean sd", "uplink MB, all sites")
    report(name, title, heads, rows, settings=without_paths(settings), accuracy=every, bytes=size)
    plot(rows, title, name)


def plot(rows: list[tuple[Any, ...]], title: str, name: str) -> None:
    axes = axes_of(8, 4.6)
    for index, (row, *values) in enumerate(rows):
        style = (
            ":"
            if row.startswith("theorem")
            else "--"
            if row.startswith("DP-EM") or "," in row
            else "-"
        )
        axes.plot(
            EPSILONS, values[: len(EPSILONS)], style, marker="o", color=f"C{index}", label=row
        )
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="epsilon of every site",
        ylabel="test accuracy, %",
        title=title.replace(", accuracy % at epsilon", ""),
    )
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    draw(axes, name)


if __name__ == "__main__":
    main()

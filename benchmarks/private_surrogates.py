"""Accuracy against epsilon of every private surrogate, compared with no privacy and with the paper's mechanism.

Every row uses real payloads: each site's surrogate is packed, measured, unpacked and used for learning. Default: CIFAR-10
features, 10 sites, Dirichlet 0.1, delta 1e-5, three seeds. Two rows use the noisy sums of the spherical family but learn
from them differently: by training on samples, and by pooling all sites' sums with equal weights. The public centre is the
mean of the features of other images, PACS photos.

The file of results is written after every seed; `--from-seed` continues it after a break.

    python benchmarks/private_surrogates.py --name mine --sites 5 -c 'data="safetensors" data-dir="/data" dataset="x"'
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from _report import RESULTS, described, draw, report, shared
from accuracy_against_bytes import Data, judge, load
from rich.progress import track

from client_app.methods.fedpft.surrogate import SiteData, make_surrogate
from common.models.classifiers import Head
from common.run import Run, parse_run
from common.settings.flat import parse_overrides
from common.surrogates.class_sums import PRESENT, as_mixtures
from common.surrogates.surrogates import AnySurrogate, SumsSurrogate, Surrogate
from common.wire.model_proto import pack_classifier, unpack_classifier
from common.wire.records import pack_surrogate, unpack_surrogate
from strategies.fedpft import sampling
from strategies.fedpft.learn import learn
from strategies.pooling.public_mean import read_centre

DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
CENTRED = "sums lowrank r=64, public centre"
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


def federate(run: Run, data: Data, row: str, centre: torch.Tensor | None = None) -> tuple[Head, int]:
    payloads = [
        pack_surrogate(
            make_surrogate(SiteData(features, labels, classes, data.fingerprint, str(site)), run, centre=centre).surrogate
        )
        for site, (features, labels, classes) in enumerate(data.parts)
    ]
    surrogates = [unpack_surrogate(payload) for payload in payloads]
    if row == EQUAL:
        surrogates = [_equal(surrogates)]
    elif row == SAMPLED:
        mixtures = [_mixture(surrogate) for surrogate in surrogates]
        claim = mixtures[0].claim
        assert claim is not None
        head = replace(sampling.learn(mixtures, run.settings.head, run.settings.seed, data.parts[0][2]), clip=claim.clip)
        return unpack_classifier(pack_classifier(head)), sum(map(len, payloads))
    found = learn(surrogates, run, "cpu", data.parts[0][2], centre).head
    assert isinstance(found, Head)
    return unpack_classifier(pack_classifier(found)), sum(map(len, payloads))


def _sums(surrogates: Sequence[AnySurrogate]) -> list[SumsSurrogate]:
    return [surrogate for surrogate in surrogates if isinstance(surrogate, SumsSurrogate)]


def _equal(surrogates: Sequence[AnySurrogate]) -> SumsSurrogate:
    """One surrogate with the sums of all sites: every class holds the noise of every site."""
    every = _sums(surrogates)
    first = every[0].sums
    sigmas = {name: sigma * len(every) ** 0.5 for name, sigma in first.sigmas.items()}
    counts, sums = (torch.stack([getattr(s.sums, name) for s in every]).sum(0) for name in ("counts", "sums"))
    return replace(every[0], sums=replace(first, counts=counts, sums=sums, sigmas=sigmas))


def _mixture(surrogate: AnySurrogate) -> Surrogate:
    """One spherical Gaussian for each class that stands out from the noise at this site, for sampling as without privacy."""
    (own,) = _sums([surrogate])
    found = as_mixtures(own.sums)
    if found is None:
        largest = int(own.sums.counts.argmax())
        sure = replace(own.sums, sigmas=own.sums.sigmas | {"counts": float(own.sums.counts[largest]) / PRESENT - 1e-3})
        found = as_mixtures(sure)
    assert found is not None
    table, kept = found
    return Surrogate(replace(own.header, classes=tuple(own.header.classes[index] for index in kept)), table, own.claim)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--name", default="private-cifar10", help="of the files in benchmarks/results")
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--from-seed", type=int, default=0, help="take earlier seeds from the file of results")
    parser.add_argument("--power", type=float, default=1.0, help="of the default features")
    parser.add_argument("--public", default="", help="features of public images, for the row with a public centre")
    parser.add_argument("-c", "--run-config", action="append", default=[], metavar="'key=value ...'")
    options = parser.parse_args()
    settings = parse_overrides(options.run_config)
    if not settings:
        folder = str(shared("features/cifar10-train.safetensors").parent)
        # The power that "auto" takes for the backbone of these features is 1 under privacy, and 0.5 without.
        settings = {"data": "safetensors", "data-dir": folder, "dataset": "cifar10", "alpha": 0.1}
        settings["features.power"] = options.power
        options.public = options.public or str(shared("features/pacs-photo-train.safetensors"))
    public = read_centre(options.public, parse_run(settings).power)
    accuracy: dict[tuple[str, str], list[float]] = defaultdict(list)
    size: dict[str, list[int]] = defaultdict(list)
    if options.from_seed:
        last = json.loads((RESULTS / f"{options.name}.json").read_text())
        for key, values in last["accuracy"].items():
            name, _, column = key.rpartition(" @ ")
            accuracy[name, column] = values[: options.from_seed]
        size |= {name: values[: options.from_seed * len(EPSILONS)] for name, values in last["bytes"].items()}
    for seed in range(options.from_seed, options.seeds):
        base = settings | {"seed": seed}
        data = load(parse_run(base), options.sites)
        for family, rank in OPEN.items():
            run = parse_run(base | {"fedpft.covariance": family, "fedpft.rank": rank})
            head, _ = federate(run, data, "")
            accuracy[family, "none"].append(100 * judge(head, run, options.sites)["accuracy.model"])
        work = [(name, epsilon) for name in ROWS for epsilon in EPSILONS]
        for name, epsilon in track(work, description=f"seed {seed}"):
            if name == CENTRED and public is None:
                continue
            run = parse_run(base | ROWS[name] | {"epsilon": epsilon, "delta": DELTA})
            head, count = federate(run, data, name, public if name == CENTRED else None)
            accuracy[name, f"{epsilon:g}"].append(100 * judge(head, run, options.sites)["accuracy.model"])
            size[name].append(count)
            print(f"seed {seed}, {name}, epsilon {epsilon:g}: {accuracy[name, f'{epsilon:g}'][-1]:.2f} %", flush=True)
        write(options, settings, seed + 1, accuracy, size)


def write(
    options: argparse.Namespace,
    settings: dict[str, Any],
    seeds: int,
    accuracy: dict[tuple[str, str], list[float]],
    size: dict[str, list[int]],
) -> None:
    """Write and draw the table of the seeds so far."""
    columns = [f"{epsilon:g}" for epsilon in EPSILONS]
    rows = []
    for name, row in ROWS.items():
        if name not in size:
            continue
        means = [statistics.mean(accuracy[name, column]) for column in columns]
        spread = statistics.mean(statistics.pstdev(accuracy[name, column]) for column in columns)
        without = accuracy.get((str(row["fedpft.covariance"]), "none"))
        rows.append(
            (
                name,
                *(round(mean, 2) for mean in means),
                round(statistics.mean(without), 2) if without else "",
                round(spread, 2),
                round(statistics.mean(size[name]) / 1e6, 3),
            )
        )
    title = f"{options.name}: {options.sites} sites, {seeds} seeds, delta {DELTA:g}, accuracy % at epsilon"
    kept = {key: value for key, value in settings.items() if key not in ("data-dir", "weights-path")}
    every = {f"{name} @ {epsilon}": values for (name, epsilon), values in accuracy.items()}
    heads = ("released", *columns, "same family, no privacy", "mean sd", "uplink MB, all sites")
    report(options.name, title, heads, rows, settings=kept, accuracy=every, bytes=size)
    plot(rows, title, options.name)


def plot(rows: list[tuple[Any, ...]], title: str, name: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    for index, (row, *values) in enumerate(rows):
        style = ":" if row.startswith("theorem") else "--" if row.startswith("DP-EM") or "," in row else "-"
        axes.plot(EPSILONS, values[: len(EPSILONS)], style, marker="o", color=f"C{index}", label=row)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="epsilon of every site", ylabel="test accuracy, %", title=title.replace(", accuracy % at epsilon", ""))
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    draw(axes, name)


if __name__ == "__main__":
    main()

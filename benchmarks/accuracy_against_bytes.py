"""Accuracy against bytes of every surrogate, compared with oracle, ensemble and average of heads.

Every row uses real payloads: each site's surrogate is packed, measured, unpacked and used for learning. Default: CIFAR-10
features, 10 sites, Dirichlet 0.1, three seeds. For other data give settings as for `coordinator simulate`.

    python benchmarks/accuracy_against_bytes.py --name mine --sites 5 -c 'data="safetensors" data-dir="/data" dataset="x"'
"""

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _report import RESULTS, described, report, shared
from rich.progress import track

from client_app.datasets.partition import share
from client_app.features.site_features import dataset_features, usable
from client_app.methods.fedpft.surrogate import SiteData, make_surrogate
from client_app.methods.pooled_baselines import compare
from client_app.node_config import NodeConfig
from common.models.classifiers import Head
from common.run import Run, parse_run
from common.settings.flat import parse_overrides
from common.wire.model_proto import pack_classifier, unpack_classifier
from common.wire.records import pack_surrogate, unpack_surrogate
from strategies.fedpft.learn import learn

ROWS: dict[str, dict[str, Any]] = {
    "spherical K=1": {"fedpft.covariance": "spherical"},
    "diag K=1": {"fedpft.covariance": "diag"},
    "diag K=10": {"fedpft.covariance": "diag", "fedpft.components": 10},
    "lowrank r=16": {"fedpft.covariance": "lowrank", "fedpft.rank": 16},
    "lowrank r=64": {"fedpft.covariance": "lowrank", "fedpft.rank": 64},
    "lowrank r=64 K=5": {"fedpft.covariance": "lowrank", "fedpft.rank": 64, "fedpft.components": 5},
}


@dataclass
class Data:
    """Training features of every site of one partition."""

    parts: list[tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]]
    fingerprint: str


def load(run: Run, sites: int) -> Data:
    parts, fingerprint = [], ""
    for site in range(sites):
        node = NodeConfig(partition_id=site, num_partitions=sites)
        own = share(run, node, in_simulation=True)
        found = dataset_features(own.dataset, run, node)
        train = usable(own.dataset, found, own.train, run.power)
        parts.append((train.features, train.labels, own.dataset.classes))
        fingerprint = found.fingerprint
    return Data(parts, fingerprint)


def federate(run: Run, data: Data) -> tuple[Head, int]:
    payloads = []
    for site, (features, labels, classes) in enumerate(data.parts):
        payloads.append(
            pack_surrogate(make_surrogate(SiteData(features, labels, classes, data.fingerprint, str(site)), run).surrogate)
        )
    head = learn([unpack_surrogate(payload) for payload in payloads], run, "cpu").head
    return unpack_classifier(pack_classifier(head)), sum(map(len, payloads))


def judge(head: Head, run: Run, sites: int) -> dict[str, Any]:
    """The comparison with baselines that a site makes in a simulation."""
    import client_app.methods.pooled_baselines as room

    room.in_simulation = lambda: True  # type: ignore[assignment]
    return dict(compare(head, run, NodeConfig(partition_id=0, num_partitions=sites)))


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--name", default="cifar10", help="of the files in benchmarks/results")
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("-c", "--run-config", action="append", default=[], metavar="'key=value ...'")
    options = parser.parse_args()
    settings = parse_overrides(options.run_config)
    if not settings:
        folder = str(shared("features/cifar10-train.safetensors").parent)
        settings = {"data": "safetensors", "data-dir": folder, "dataset": "cifar10", "alpha": 0.1}
    accuracy: dict[str, list[float]] = defaultdict(list)
    size: dict[str, list[int]] = defaultdict(list)
    for seed in range(options.seeds):
        base = settings | {"seed": seed}
        data = load(parse_run(base), options.sites)
        for name, row in track(ROWS.items(), description=f"seed {seed}"):
            first = name == next(iter(ROWS))
            run = parse_run(base | row | {"compare": first})
            head, count = federate(run, data)
            judged = judge(head, run, options.sites)
            accuracy[name].append(judged["accuracy.model"])
            size[name].append(count)
            for baseline in ("oracle", "ensemble", "average") if first else ():
                accuracy[baseline].append(judged[f"accuracy.{baseline}"])
                size[baseline].append(judged[f"bytes.{baseline}"])
    order = ["oracle", "ensemble", "average", *ROWS]
    oracle = statistics.mean(accuracy["oracle"])
    rows = [
        (
            name,
            round(100 * statistics.mean(accuracy[name]), 2),
            round(100 * statistics.pstdev(accuracy[name]), 2),
            round(100 * (statistics.mean(accuracy[name]) - oracle), 2),
            round(statistics.mean(size[name]) / 1e6, 3),
        )
        for name in order
    ]
    columns = ("released", "accuracy %", "sd", "against oracle", "uplink MB, all sites")
    title = f"{options.name}: {options.sites} sites, {options.seeds} seeds"
    kept = {key: value for key, value in settings.items() if key not in ("data-dir", "weights-path")}
    report(options.name, title, columns, rows, settings=kept, accuracy=accuracy, bytes=size)
    plot(rows, title, RESULTS / f"{options.name}.png")


def plot(rows: list[tuple[Any, ...]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, accuracy, deviation, _, megabytes in rows:
        baseline = name in ("oracle", "ensemble", "average")
        axes.errorbar(megabytes, accuracy, deviation, fmt="D" if baseline else "o", color="#888" if baseline else "#0072b2")
        # The lower of two neighbours has its name below its point, so that names do not overlap.
        crowded = any(abs(math.log10(other[4] / megabytes)) < 0.4 and 0 < other[1] - accuracy < 3 for other in rows)
        offset = (6, -12 if crowded else 5)
        axes.annotate(name, (megabytes, accuracy), textcoords="offset points", xytext=offset, fontsize=8)
    axes.set(xscale="log", xlabel="uplink of all sites, MB", ylabel="test accuracy, %", title=title)
    axes.grid(alpha=0.3)
    axes.margins(x=0.18)
    figure.savefig(path, dpi=130)
    print(f"drawn to benchmarks/results/{path.name}")


if __name__ == "__main__":
    main()

"""Accuracy against bytes of every surrogate, compared with a centralized head, ensemble and average of heads.

Every row uses real payloads: each site's surrogate is packed, measured, unpacked and used for
learning. Default: CIFAR-10 features, 10 sites, Dirichlet 0.1, three seeds. For other data give
settings as for `coordinator simulate`.

    python benchmarks/accuracy_against_bytes.py --name mine --sites 5 -c 'data="safetensors"
    data-dir="/data" dataset="x"'
"""

import math
import statistics
from collections import defaultdict
from typing import Any

from rich.progress import track
from torch import Tensor

from benchmarks.harness.federation import Federation, load_seed
from benchmarks.harness.options import arguments, settings_of, without_paths
from benchmarks.harness.plots import axes_of, draw
from benchmarks.harness.results import report
from benchmarks.harness.seeds import frontier_row
from benchmarks.harness.site_data import make_surrogate
from fedsurrogate.client_app.methods.evaluation import compare
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from fedsurrogate.strategies.fedpft.strategy import learn

ROWS: dict[str, dict[str, Any]] = {
    "spherical K=1": {"fedpft.covariance": "spherical"},
    "diag K=1": {"fedpft.covariance": "diag"},
    "diag K=10": {"fedpft.covariance": "diag", "fedpft.components": 10},
    "lowrank r=16": {"fedpft.covariance": "lowrank", "fedpft.rank": 16},
    "lowrank r=64": {"fedpft.covariance": "lowrank", "fedpft.rank": 64},
    "lowrank r=64 K=5": {"fedpft.covariance": "lowrank", "fedpft.rank": 64, "fedpft.components": 5},
}


BASELINES = ("centralized", "ensemble", "average")


def payloads_of(run: Run, data: Federation, centre: Tensor | None = None) -> list[bytes]:
    """What each site sends. centre: the public mean of features, of norm at most one (d,)."""
    return [pack_surrogate(make_surrogate(own, run, centre=centre).surrogate) for own in data.given]


def received(head: Head) -> Head:
    """The head as the sites receive it."""
    return unpack_classifier(pack_classifier(head))


def federate(run: Run, data: Federation) -> tuple[Head, int]:
    """The head that the coordinator learns, and the bytes of all sites."""
    payloads = payloads_of(run, data)
    head = learn([unpack_surrogate(payload) for payload in payloads], run, "cpu").model
    return received(head), sum(map(len, payloads))


def judge(head: Head, run: Run, sites: int) -> dict[str, Any]:
    """The comparison with baselines that a site makes in a simulation."""
    import fedsurrogate.client_app.methods.evaluation as room

    room.in_simulation = lambda: True  # type: ignore[attr-defined]
    return dict(
        compare(head, run, NodeConfig(partition_id=0, num_partitions=sites), baselines=True)
    )


def main() -> None:
    parser = arguments(__doc__, "cifar10")
    parser.add_argument("--sites", type=int, default=10)
    options = parser.parse_args()
    settings, _ = settings_of(options, {"dataset": "cifar10", "alpha": 0.1})
    accuracy: dict[str, list[float]] = defaultdict(list)
    size: dict[str, list[int]] = defaultdict(list)
    for seed in range(options.seeds):
        data = load_seed(settings, options.sites, seed)
        for name, row in track(ROWS.items(), description=f"seed {seed}"):
            first = name == next(iter(ROWS))
            run = parse_run(settings | {"seed": seed} | row | {"compare": first})
            head, count = federate(run, data)
            judged = judge(head, run, options.sites)
            accuracy[name].append(judged["accuracy.model"])
            size[name].append(count)
            for baseline in BASELINES if first else ():
                accuracy[baseline].append(judged[f"accuracy.{baseline}"])
                size[baseline].append(judged[f"bytes.{baseline}"])
    oracle = statistics.mean(accuracy["centralized"])
    order = (*BASELINES, *ROWS)
    rows = [frontier_row(name, accuracy[name], oracle, size[name], scale=100) for name in order]
    columns = ("released", "accuracy %", "sd", "against centralized", "uplink MB, all sites")
    title = f"{options.name}: {options.sites} sites, {options.seeds} seeds"
    facts = {"settings": without_paths(settings), "accuracy": accuracy, "bytes": size}
    report(options.name, title, columns, rows, **facts)
    plot(rows, title, options.name)


def plot(rows: list[tuple[Any, ...]], title: str, name: str) -> None:
    axes = axes_of(7, 4.2)
    for label, accuracy, deviation, _, megabytes in rows:
        marker, colour = ("D", "#888") if label in BASELINES else ("o", "#0072b2")
        axes.errorbar(megabytes, accuracy, deviation, fmt=marker, color=colour)
        # The lower of two neighbours has its name below its point, so that names do not overlap.
        crowded = any(
            abs(math.log10(other[4] / megabytes)) < 0.4 and 0 < other[1] - accuracy < 3
            for other in rows
        )
        place = {"textcoords": "offset points", "xytext": (6, -12 if crowded else 5), "fontsize": 8}
        axes.annotate(label, (megabytes, accuracy), **place)
    axes.set(xscale="log", xlabel="uplink of all sites, MB", ylabel="test accuracy, %", title=title)
    axes.margins(x=0.18)
    draw(axes, name, legend=False)


if __name__ == "__main__":
    main()

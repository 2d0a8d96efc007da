"""10 to 10,000 hospitals with data, policy and ledger of their own, in one run through real
messages.

Every hospital answers as in production: it reads its files, asks its policy, charges its ledger,
and sends its second moment (`fedpft.covariance="gram"`) as a message, which the coordinator checks,
stores and learns from. Hospitals and coordinator share this process, one after the other. Claim:
time is at most linear in the number of hospitals, memory hardly grows, and the head is that of all
records in one place.

With --target, records have labels, or times whose cells are summed, in place of classes.

    python benchmarks/many_sites.py --sites 10 100 1000 10000
    python benchmarks/many_sites.py --target labels
"""

import argparse
import json
import logging
import resource
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedsurrogate.client_app.requests
from benchmarks.harness.commands import result_of, start_child
from benchmarks.harness.options import described
from benchmarks.harness.plots import draw_growth
from benchmarks.harness.results import report
from benchmarks.harness.timing import peak
from fedsurrogate.client_app.governance.gate import open_ledger
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.deployment.local_engine import run_here
from fedsurrogate.strategies.counting.strategy import read_model
from fedsurrogate.strategies.targets.number import Annotated, label_heads
from fedsurrogate.strategies.targets.time import risk_head
from tests.coded import coded, exact_code

CLASSES, DIMENSION, RECORDS, TESTED = 10, 128, 40, 4
SHRINKAGE = 0.1
POLICY = "without-dp = true\nsmallest-class = 1\nexact-sums-at-models = true\n"
COLUMNS = (
    "sites",
    "used",
    "seconds",
    "CPU s",
    "of it in the system, s",
    "CPU ms a site",
    "peak GB",
)
COLUMNS += ("before the run, GB", "stored MB", "head apart from pooled records")


# By target: settings of the run. Times have two bins, so that every cell has several records.
TARGETS: dict[str, dict[str, object]] = {
    "class": {"classes": ",".join(map(str, range(CLASSES))), "features.power-transform": 1.0},
    "labels": {"task": "multilabel", "label-columns": "a,b,c"},
    "time": {"task": "survival", "horizon": 2.0, "bins": 2, "time-head": "cells"},
}


def records(
    target: str, rows: int, centres: torch.Tensor, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Features x (n, d), half precision, of three classes drawn for this site, and their target: the
    class y (n,), labels a, b and c, or time and event.
    """
    y = torch.randperm(CLASSES, generator=generator)[:3][torch.arange(rows) % 3]
    x = (centres[y] + torch.randn(rows, DIMENSION, generator=generator)).half()
    if target == "class":
        return {"x": x, "y": y}
    if target == "labels":
        return {"x": x} | {name: (x[:, at] > 0).float() for at, name in enumerate("abc")}
    # In each cell of time and event as many records, with events earlier where x is larger; without one
    # they are nearest to the edge before.
    cell = (x[:, 0].float().argsort(descending=True).argsort() * 5) // rows
    return {
        "x": x,
        "time": torch.tensor([0.5, 1.5, 0.1, 1.1, 3.0])[cell],
        "event": torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])[cell],
    }


def one(sites: int, target: str) -> tuple[object, ...]:
    """The row of one run, in a process of its own."""
    logging.disable(logging.CRITICAL)
    # A site's own log belongs to its process; here ten thousand of them would be open in one.
    fedsurrogate.client_app.requests._open_log = lambda node: None
    generator = torch.Generator().manual_seed(sites)
    centres = 0.3 * torch.randn(CLASSES, DIMENSION, generator=generator)
    common = {"data": "safetensors", "dataset": "own"}
    with tempfile.TemporaryDirectory() as folder:
        nodes = []
        for index in range(sites):
            own = Path(folder) / str(index)
            own.mkdir()
            (own / "policy.toml").write_text(POLICY)
            for part, rows in (("train", RECORDS), ("test", TESTED)):
                save_file(
                    records(target, rows, centres, generator), own / f"own-{part}.safetensors"
                )
            node = common | {
                "data-dir": str(own),
                "policy": str(own / "policy.toml"),
                "state-dir": str(own / "state"),
            }
            if target != "class":
                node["target-columns"] = "a,b,c" if target == "labels" else "time,event"
            open_ledger(parse_node_config(node))
            nodes.append(node)
        settings = {"fedpft.covariance": "gram", "max-share": 0.0, "defence": "none"}
        settings |= {"output-dir": folder} | TARGETS[target]
        if target == "class":
            settings |= {"head.shrinkage": SHRINKAGE, "head.solver": "lda"}
        before, began, used = peak(), time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        run = run_here(nodes, parse_run(settings), settings, lambda event: None, report=False)
        seconds, spent, after = (
            time.perf_counter() - began,
            resource.getrusage(resource.RUSAGE_SELF),
            peak(),
        )
        system = spent.ru_stime - used.ru_stime
        cpu = system + spent.ru_utime - used.ru_utime
        metrics = json.loads((run / "metrics.json").read_text())
        stored = sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) / 1e6
        compared = head_apart if target == "class" else target_apart
        apart = compared(run / "model.safetensors", Path(folder), sites)
    return (
        sites,
        metrics["sites"]["used"],
        seconds,
        cpu,
        system,
        1000 * cpu / sites,
        after,
        before,
        stored,
        apart,
    )


def head_apart(model: Path, folder: Path, sites: int) -> float:
    """Difference of the run's weights from the discriminant of all records together, in double
    precision.
    """
    head = read_model(model)
    assert isinstance(head, Head)
    counts, sums = (
        torch.zeros(CLASSES, dtype=torch.float64),
        torch.zeros(CLASSES, DIMENSION, dtype=torch.float64),
    )
    squares = torch.zeros(DIMENSION, DIMENSION, dtype=torch.float64)
    for index in range(sites):
        own = load_file(folder / str(index) / "own-train.safetensors")
        x, y = own["x"].double(), own["y"]
        counts += torch.bincount(y, minlength=CLASSES)
        sums.index_add_(0, y, x)
        squares += x.T @ x
    means = sums / counts[:, None]
    within = (squares - (counts[:, None] * means).T @ means) / counts.sum()
    within = (1 - SHRINKAGE) * within + SHRINKAGE * within.diagonal().mean() * torch.eye(DIMENSION)
    truth, weight = torch.linalg.solve(within, means.T).T, head.weight.double()
    truth, weight = truth - truth.mean(0), weight - weight.mean(0)
    return apart(weight, truth)


def target_apart(model: Path, folder: Path, sites: int) -> float:
    """Difference of the run's weights from those of the sums of all records together."""
    head = read_model(model)
    assert isinstance(head, Head)
    tables = [load_file(folder / str(index) / "own-train.safetensors") for index in range(sites)]
    x = torch.cat([each["x"] for each in tables]).double()
    if "a" in tables[0]:
        labels = torch.stack([torch.cat([each[name] for each in tables]) for name in "abc"], 1)
        sums = coded(exact_code(labels), x)
        weight = label_heads(sums, Annotated.exact(sums, 3), list("abc"), calibrated=True).weight
    else:
        bins = torch.cat([each["time"] for each in tables]).long().clamp_max(2)
        event = torch.cat([each["event"] for each in tables])
        cell = torch.where(bins == 2, 4, bins + 2 * (event == 0).long())
        weight = risk_head(coded(torch.nn.functional.one_hot(cell, 5).double(), x)).weight[None]
    return apart(head.weight.double(), weight)


def apart(weight: Tensor, truth: Tensor) -> float:
    """The relative difference of weights up to a common factor, by which a run calibrates its scores."""
    truth = truth * ((weight * truth).sum() / truth.square().sum())
    return float((weight - truth).norm() / truth.norm())


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--sites", type=int, nargs="*", default=[10, 100, 1000, 10_000])
    parser.add_argument("--target", choices=list(TARGETS), default="class")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.target)))
        return
    rows = []
    name = "many_sites" if options.target == "class" else f"many_sites_{options.target}"
    for sites in options.sites:
        child = start_child(__file__, "--one", str(sites), "--target", options.target)
        rows.append(result_of(child))
        what = f"{CLASSES} classes" if options.target == "class" else options.target
        title = f"one run, {RECORDS} records a hospital, {what}, d = {DIMENSION}"
        report(name, title, COLUMNS, rows)
    sites, cpu, system, memory = ([row[column] for row in rows] for column in (0, 3, 4, 6))
    outside = [whole - part for whole, part in zip(cpu, system, strict=True)]
    spent = {"all hospitals and the coordinator": cpu, "of it outside the system": outside}
    draw_growth(name, sites, spent, memory)


if __name__ == "__main__":
    main()

"""Processor time of a FedLAP round at a site by part, and its ratio to that of FedAvg's local
epochs.

Two cases. The default (one exact gradient, 40 image steps) against FedAvg with five epochs. The
paper's loop (five batches of 256 CIFAR-10 images, width 128) against FedAvg with the same number of
batches. The paper makes forty times as many of both, which keeps the ratio. It reports a ratio of
5; its formula gives 11; its code needs about 20. Wrong: the length of the difference between the gradients of the
synthetic and of all real records, as a share of the latter's; and one minus the cosine of the two.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness.federation import Federation, load, with_rows
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import cifar_images
from fedsurrogate.client_app.governance.release import site_function
from fedsurrogate.client_app.methods.job import Job, MethodOutput
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.models.loss_landscape import LandscapeRecords, gradient
from fedsurrogate.common.models.networks import build, split_input
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.model_proto import unpack_synthetic
from fedsurrogate.strategies.base.training import Training

DIGITS: dict[str, Any] = {"image-size": 16, "partition": "classes"}
CIFAR: dict[str, Any] = {
    "data": "parquet",
    "backbone": "pixels:rgb",
    "image-size": 32,
    "partition": "classes",
}
PAPER: dict[str, Any] = {"fedlap.width": 128, "fedlap.images-per-class": 50}
PAPER |= {"fedlap.loops": 5, "fedlap.batch-size": 256}
VARIANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "now": nullcontext,
    "now, in bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
}
PARTS = ("real-gradients", "image-steps", "radius-search")


def work(
    settings: dict[str, Any], data: Federation, records: int
) -> tuple[MethodOutput, float, Training]:
    """The first site's output in the first round, its seconds of processor time, and the model that
    it received.
    """
    run, site = parse_run(settings), with_rows(data.sites[0], slice(records))
    training = Training.begin(run, site.classes, site.fingerprint, site.train.features.shape[1])
    with tempfile.TemporaryDirectory() as folder:
        job = Job(run, NodeConfig(state_dir=folder), "0", site, payload=training.payload())
        job = replace(job, info={"round": 1, "lineage": "cost"})
        started = time.process_time()
        made = site_function(run.plan.combination)(job)
        return made, time.process_time() - started, training


def wrong(
    made: MethodOutput, training: Training, data: Federation, records: int
) -> tuple[float, float]:
    """Error of the synthetic records' gradient: relative length of the difference, and one minus
    the cosine.
    """
    sent, train = unpack_synthetic(made.payload), data.sites[0].train
    features, labels = train.features[:records], train.labels[:records]
    whole = build("convnet", features.shape[1], len(data.classes), training.model)
    body, values = split_input(whole, features)
    own = torch.unique(labels)[sent.labels]
    flat = []
    for images, of in ((sent.values.reshape(-1, *values.shape[1:]), own), (values, labels)):
        slopes = gradient(body, training.model, LandscapeRecords.evenly(images, of))
        flat.append(torch.cat([slope.flatten() for slope in slopes.values()]))
    mine, real = flat
    return float((mine - real).norm() / real.norm()), float(
        1 - torch.cosine_similarity(mine, real, dim=0)
    )


# Settings of data, of FedLAP, and of FedLAP now where they differ; FedAvg's batch and epochs;
# records used.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int, int, int]] = {
    "digits": (DIGITS, {}, {}, 64, 5, 10_000),
    "paper": (CIFAR, PAPER | {"fedlap.image-steps": 5}, {"fedlap.image-steps": 2}, 256, 1, 5 * 256),
}


def measure(name: str) -> None:
    """FedLAP's round in one case, with FedAvg's before and after each."""
    base, own, fewer, batch, epochs, records = CASES[name]
    if base is CIFAR:
        base = CIFAR | cifar_images()
    data = load(parse_run(base), 5)
    average = {
        "method": "fedavg",
        "fedavg.model": "convnet",
        "fedavg.width": own.get("fedlap.width", 32),
    }
    average |= {"fedavg.batch-size": batch, "fedavg.local-epochs": epochs}
    work(base | average, data, records)  # the first call of a process includes lazy loading
    peers = [work(base | average, data, records)[1]]
    rows: list[list[Any]] = []
    for variant, changed in VARIANTS.items():
        with changed():
            made, seconds, training = work(base | {"method": "fedlap"} | own | fewer, data, records)
        peers.append(work(base | average, data, records)[1])
        parts = [float(made.answer[f"{part}-seconds"]) for part in PARTS]
        shares = [f"{100 * part / sum(parts):.0f} %" for part in parts]
        rows.append([variant, seconds, *shares, *wrong(made, training, data, records)])
    peer = sum(peers) / len(peers)
    rows = [[*row, peer, row[1] / peer] for row in rows]
    columns = (
        "FedLAP",
        "s",
        "real gradients",
        "image steps",
        "radius search",
        "wrong",
        "1 - cosine",
        "FedAvg, s",
        "ratio",
    )
    report(
        f"fedlap-cost-{name}", f"{name}: a site's round, seconds of one processor", columns, rows
    )


def main() -> None:
    torch.set_num_threads(1)
    parser = described(__doc__)
    parser.add_argument("case", nargs="*", choices=[*CASES, []], default=[])
    for name in parser.parse_args().case or CASES:
        measure(name)


if __name__ == "__main__":
    main()

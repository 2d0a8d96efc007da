"""What a site sends in each method of sums, with a stream of noise that is always the same: its message,
or the whole numbers of its part of secure aggregation before the masks.

Features are ones of both signs, and the number of records is a power of two, so that norms, means, sums
and products of what is around a mean are exact on any processor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fedsurrogate.client_app import secure_aggregation
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy import gaussian_mechanism
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_aggregation.protocol import SumState, begin
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_classifier
from fedsurrogate.common.wire.surrogate_proto import map_digest, pack_delivery, pack_map
from fedsurrogate.strategies.base.training import Training
from tests.examples import class_sums_run

COUNT, D, CLASSES = 2**5, 16, ("a", "b", "c", "e")
LABELS = torch.arange(COUNT) * 7 % 4
PATIENTS = tuple(f"patient {row // 2}" for row in range(COUNT))
NAMED = {"classes": ",".join(CLASSES)}
SUM, NOISE = {"secure-aggregation": True, "dropouts": 0.25}, {"epsilon": 4.0, "delta": 1e-5}
WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "noisy": NOISE,
    "summed": SUM,
    "summed with noise": SUM | NOISE,
}
TIMES = {"task": "survival", "horizon": 4.0, "bins": 4}
RANGES = {"features.ranges": "-2,2"}
SETS = "a=u,v; b=u,v; c=u,v; e=u,v; f=u; g=u; h=u; i=u"
TARGETS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "number": ({"task": "regression", "target-range": "-4,4"}, LABELS[:, None] - 2.0),
    "labels": (
        {"task": "multilabel", "label-columns": "u,v"},
        torch.stack([LABELS % 2, LABELS // 2], 1).double(),
    ),
    "cells": (TIMES | {"time-head": "cells"}, torch.stack([LABELS + 0.5, LABELS % 2], 1)),
    "residuals": (TIMES | {"time-head": "residuals"}, torch.stack([LABELS + 0.5, LABELS % 2], 1)),
}


def features() -> Tensor:
    """Ones of both signs without a pattern (n, d), and of the same norm."""
    at = torch.arange(COUNT * D).reshape(COUNT, D)
    return torch.where(at * at % 11 * 5 % 7 < 3, -1.0, 1.0)


def messages() -> Iterator[tuple[str, bytes]]:
    """By name: of every method of sums, in every way."""
    for name, job in _tasks():
        drawn = Drawn(name)
        # The tests replace the first; a script has the second everywhere.
        with patch.object(gaussian_mechanism.os, "urandom", drawn), patch("os.urandom", drawn):
            yield f"site: {name}", (_part if job.run.settings.secure_aggregation else _message)(job)


class Drawn:
    """Random bytes that follow from a name, and from how many were drawn before."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0

    def __call__(self, count: int) -> bytes:
        self.count += 1
        return hashlib.shake_256(f"{self.name} {self.count}".encode()).digest(count)


def _message(job: Job) -> bytes:
    payload: bytes = load(job.run.plan.combination.site)(job).payload
    return payload


def _part(job: Job) -> bytes:
    """The vector of a site of three, without the masks."""
    seen = []
    members = tuple(
        begin(name, bytes([number]) * 32, b"context")[1] for number, name in enumerate(CLASSES[:3])
    )
    state, _ = begin("a", bytes(32), b"context")
    state = replace(state, members=members, phase="shares", public=map_digest(job.payload or b""))

    def mask(state: SumState, delivered: Any, rules: Any, vector: Any) -> Any:
        seen.append(vector)
        return state, vector.astype("uint32")

    asked = replace(job, payload=pack_delivery([], "sum", job.payload or b""))
    asked = replace(asked, info={**job.info, "sum": "0" * 32})
    with (
        patch.object(secure_aggregation.protocol, "mask", mask),
        patch.object(secure_aggregation, "read_state", lambda *_: state),
    ):
        secure_aggregation.masked_sum(asked)
    vector: bytes = seen[0].astype("<i8").tobytes()
    return vector


def _tasks() -> Iterator[tuple[str, Job]]:
    for way, given in WAYS.items():
        yield f"class sums, {way}", _job(class_sums_run(**NAMED, **given), pack_map(PublicMap()))
        for (name, (own, values)), (words, ranges) in product(
            TARGETS.items(), (("", {}), (" in ranges", RANGES))
        ):
            sets = {"label-sets": SETS} if name == "labels" and way == "summed" else {}
            run = parse_run(own | given | ranges | sets)
            for round in (1, 2)[: 1 + (name == "residuals")]:
                job = _job(run, _asked(run), values.double(), round)
                yield f"{name}{words}, {way}, round {round}", job
        for kind in ("survey", "evaluation"):
            header = Header("fedpft", "0" * 16, "coordinator", "f" * 16, CLASSES)
            model = pack_classifier(Head(header, torch.zeros(4, D), torch.zeros(4)))
            digest = hashlib.sha256(model).hexdigest() if kind == "evaluation" else ""
            own = {"counting.kind": kind, "counting.digest": digest, **NAMED}
            yield f"{kind}, {way}", _job(parse_run(own | given), model)
    for way in ("noisy", "summed with noise"):
        run = parse_run({"head.solver": "logistic", "features.projection": ""} | NAMED | WAYS[way])
        training = Training.begin(run, CLASSES, "f" * 16, D)
        for round in (1, 2):
            yield f"logistic, {way}, round {round}", _job(run, training.payload(), None, round)
    for covariance in ("spherical", "diag", "gram"):
        run = parse_run(NOISE | NAMED | {"fedpft.covariance": covariance})
        yield f"fedpft, {covariance}, noisy", _job(run, None)
    for way in ("summed", "summed with noise"):
        run = parse_run({"fedpft.covariance": "gram", **RANGES} | NAMED | WAYS[way])
        yield f"fedpft in ranges, {way}", _job(run, pack_map(PublicMap()))


def _asked(run: Run) -> bytes:
    """What sites receive: a map in a sum of one round; the value of each cell in rounds."""
    if run.plan.kind != "rounds":
        return pack_map(PublicMap())
    assert run.target is not None
    rows = run.target.rows
    training = Training.begin(run, rows, "f" * 16, D, run.public_frame(D))
    training.model = {"values": torch.linspace(-1, 1, len(rows))}
    return training.payload()


def _job(run: Run, payload: bytes | None, values: Tensor | None = None, round: int = 1) -> Job:
    labels = LABELS if values is None else torch.zeros(COUNT, dtype=torch.int64)
    patients = PATIENTS if run.private else None
    part = LabelledFeatures(features(), labels, patients, values=values)
    names = CLASSES if run.target is None else run.target.rows
    site = SiteFeatures(part, part, names, "f" * 16, 0.0, simulated=False)
    limits = SiteLimits(smallest_class=2, smallest_cell=2)
    return Job(run, NodeConfig(site="a"), "a", site, limits, payload=payload, info={"round": round})

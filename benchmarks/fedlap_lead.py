"""What keeps FedLAP's lead over FedAvg after round 5: one change at a time, at the same work of a
site.

    python benchmarks/fedlap_lead.py --seeds 1
    python benchmarks/fedlap_lead.py --only nothing --only memory

Case cifar10 of fedlap_against_fedavg.py, on sample data next to the checkout. The script continues:
rows and seeds that are in the results are not computed again; remove them to compute all anew.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from rich.progress import track
from torch import Tensor, nn

from benchmarks.fedlap_against_fedavg import CASES, SITES, base_of, fewer
from benchmarks.harness.federation import load_seed, measure
from benchmarks.harness.options import described
from benchmarks.harness.results import report, stored
from benchmarks.harness.seeds import mean_and_deviation
from fedsurrogate.client_app.methods.fedlap import approximation
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.common.models import loss_landscape
from fedsurrogate.common.models.loss_landscape import Descent, LandscapeRecords, distance, gradient
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.models.training_parts import Change
from fedsurrogate.common.settings import FedLAPSettings
from fedsurrogate.strategies import fedlap

NAME = "fedlap-lead-cifar10"
Step = tuple[dict[str, Tensor], bool]


def momentum(lasting: bool, share: float = 0.9) -> AbstractContextManager[Any]:
    """Momentum in the coordinator's steps, at the same length of a step; `lasting` from one round
    to the next.
    """
    last: dict[str, Tensor] = {}

    def walk(
        body: nn.Module,
        start: Tensors,
        records: LandscapeRecords,
        descent: Descent,
        changes: Iterator[Change],
    ) -> Iterator[Step]:
        rate, steps, radius, here = descent.rate, descent.steps, descent.radius, dict(start)
        speed = (
            last
            if lasting and last
            else {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        )
        for step in range(steps):
            length = (1 - share) * rate * (1 + math.cos(math.pi * step / steps)) / 2
            slope = gradient(body, here, records, next(changes))
            speed = {name: share * speed[name] + slope[name] for name in here}
            here = {name: here[name] - length * speed[name] for name in here}
            far = distance(here, start)
            if far > radius:
                here = {
                    name: start[name] + (tensor - start[name]) * (radius / far)
                    for name, tensor in here.items()
                }
            yield here, far > radius
        last.update(speed)

    return patch.object(fedlap, "walk", walk)


def averaged() -> AbstractContextManager[Any]:
    """The round's model is the mean over the second half of the coordinator's steps."""

    def walk(
        body: nn.Module,
        start: Tensors,
        records: LandscapeRecords,
        *rest: Any,
    ) -> Iterator[Step]:
        path = list(loss_landscape.walk(body, start, records, *rest))
        tail = [here for here, _ in path[len(path) // 2 :]]
        yield {name: torch.stack([here[name] for here in tail]).mean(0) for name in start}, False

    return patch.object(fedlap, "walk", walk)


def curvature(times: float) -> AbstractContextManager[Any]:
    """The radius is some times the way down the gradient g to the minimum of the parabola along it:
    |g|^3 / (g · H g).
    """

    def walk(
        body: nn.Module,
        start: Tensors,
        records: LandscapeRecords,
        descent: Descent,
        changes: Iterator[Change],
    ) -> Iterator[Step]:
        slope = gradient(body, start, records)
        length = math.sqrt(sum(float(part.square().sum()) for part in slope.values()))
        move = 1e-2 / length
        after = gradient(body, {name: start[name] - move * slope[name] for name in start}, records)
        bend = sum(
            float(((slope[name] - after[name]) / move * slope[name]).sum()) for name in start
        )
        radius = min(descent.radius, times * length**3 / max(abs(bend), 1e-9))
        descent = replace(descent, radius=radius)
        yield from loss_landscape.walk(body, start, records, descent, changes)

    return patch.object(fedlap, "walk", walk)


def scaled_images() -> AbstractContextManager[Any]:
    """Images start a round at deviation one. GroupNorm makes the loss independent of it, and steps
    count for more.
    """
    usual = approximation._begin

    def begin(job: Job, *rest: Any) -> LandscapeRecords:
        start = usual(job, *rest)
        flat = start.values.flatten(1)
        values = (flat / flat.std(1, keepdim=True)).reshape(start.values.shape)
        return LandscapeRecords.evenly(values, start.labels)

    return patch.object(approximation, "_begin", begin)


def relative_error() -> AbstractContextManager[Any]:
    """The squared error counts as a share of the real gradient's squared length."""

    def mismatch(synthetic: Any, real: Any, weight: float, noise: float = 0.0) -> Tensor:
        return loss_landscape.mismatch(
            synthetic, real, weight / sum(float(r.square().sum()) for r in real), noise
        )

    return patch.object(approximation, "mismatch", mismatch)


def falling(power: float) -> AbstractContextManager[Any]:
    """The model's learning rate is divided by this power of the round; `fedlap.cosine` stays as it
    is.
    """
    usual = FedLAPSettings.rate

    def rate(settings: FedLAPSettings, round: int, rounds: int) -> float:
        if settings.cosine:
            return usual(settings, round, rounds)
        return settings.learning_rate / round**power

    return patch.object(FedLAPSettings, "rate", rate)


MEMORY: dict[str, Any] = {"fedlap.memory": 0.33}
SLOW: dict[str, Any] = {"fedlap.learning-rate": 0.03}
# Settings of a row, and what is replaced while it runs. Without `falling` the rate is the same in
# all rounds.
ROWS: dict[str, tuple[dict[str, Any], Callable[[], AbstractContextManager[Any]]]] = {
    "nothing": ({}, nullcontext),
    "memory and rate / sqrt(round)": (MEMORY, lambda: falling(0.5)),
    "memory": (MEMORY, nullcontext),
    "memory of one half": ({"fedlap.memory": 0.5}, nullcontext),
    "rate / sqrt(round)": ({}, lambda: falling(0.5)),
    "cosine": ({"fedlap.cosine": True}, nullcontext),
    "rate 0.03": (SLOW, nullcontext),
    "momentum": ({}, lambda: momentum(lasting=False)),
    "momentum, carried over rounds": ({}, lambda: momentum(lasting=True)),
    "mean over steps": ({}, averaged),
    "fixed radius 0.5": ({"fedlap.rule": "fixed", "fedlap.trust-radius": 0.5}, nullcontext),
    "memory, radius from curvature": (MEMORY, lambda: curvature(3.0)),
    "images scaled": ({}, scaled_images),
    "memory, rate 0.03, relative error": (MEMORY | SLOW, relative_error),
    "images from noise": ({"fedlap.start": "noise"}, nullcontext),
}


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--only", action="append", default=[], choices=ROWS, help="a row, by its name"
    )
    options = parser.parse_args()
    _, most, rounds = CASES["cifar10"]
    base = base_of("cifar10") | {"method": "fedlap", "fedlap.rounds": rounds, "fedlap.memory": 0.0}
    curves: dict[str, Any] = stored(NAME).get("curves", {})
    for seed in range(options.seeds):
        data = None
        for name in track(options.only or list(ROWS), description=f"seed {seed}"):
            if str(seed) in curves.get(name, {}):
                continue
            data = data or fewer(load_seed(base, SITES, seed), most)
            own, replaced = ROWS[name]
            with falling(0.0), replaced():
                measured = measure(base | {"seed": seed}, own, data)
            curves.setdefault(name, {})[str(seed)] = [accuracy for _, accuracy in measured.curve]
            write(curves, rounds)


def write(curves: dict[str, Any], rounds: int) -> None:
    table = []
    for name in (name for name in ROWS if name in curves):
        each = list(curves[name].values())
        cells = (mean_and_deviation([curve[number] for curve in each]) for number in range(rounds))
        table.append([name, len(each), *cells])
    columns = ["change", "seeds", *(f"round {number + 1}, %" for number in range(rounds))]
    report(
        NAME,
        f"FedLAP on cifar10, {SITES} sites of 2 classes, one change at a time",
        columns,
        table,
        curves=curves,
    )


if __name__ == "__main__":
    main()

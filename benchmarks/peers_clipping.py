"""A private step of a linear head at a site, beside Opacus's ghost clipping: a step of DP-SGD with all
records, with noise at the site or, as in secure aggregation, without.

Ours adds exactly on an integer grid, and draws discrete noise exactly from secret bytes; Opacus adds
in single precision, with normals of torch's generator. Times are of the processor, nine of each, in
turn.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.timing import in_turn, ratio
from fedsurrogate.client_app.methods.dp.record_gradients import (
    UnitRecords,
    Units,
    clipped_gradients,
    train_privately,
)
from fedsurrogate.common.models.networks import linear

DIMENSION, CLASSES, CLIP, REPEATS = 1280, 10, 1.0, 9


def opacus_step(x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """A step of Opacus's ghost clipping, as its documentation has it."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    module = GradSampleModuleFastGradientClipping(
        linear(DIMENSION, CLASSES),
        max_grad_norm=CLIP,
        use_ghost_clipping=True,
        loss_reduction="sum",
    )
    optimiser = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=CLIP,
        expected_batch_size=len(y),
        loss_reduction="sum",
    )
    losses = DPLossFastGradientClipping(
        module, optimiser, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum"
    )

    def step() -> None:
        optimiser.zero_grad()
        losses(module(x), y).backward()
        optimiser.step()

    return step


def steps(records: int, patients: int) -> dict[str, Callable[[], Any]]:
    """Pieces of work by name.

    Args:
        records: number of records.
        patients: records of each patient.
    """
    random = torch.Generator().manual_seed(0)
    x = nn.functional.normalize(torch.randn(records, DIMENSION, generator=random))
    y = torch.randint(0, CLASSES, (records,), generator=random)
    module = linear(DIMENSION, CLASSES)
    settings: Any = SimpleNamespace(private_steps=1, sample_rate=1.0, batch_size=records)
    claim: Any = SimpleNamespace(clip=CLIP, noise_multiplier=1.0)
    owners = [str(row // patients) for row in range(records)]

    def ours(units: Units) -> Callable[[], None]:
        data = UnitRecords(x, y, units)
        return lambda: cast(None, train_privately(module, data, settings, claim, 0.1))

    return {
        "Opacus, ghost clipping": opacus_step(x, y),
        "ours, noise at the site": ours(Units.of(None, records)),
        "ours, distributed noise": lambda: clipped_gradients(module, x, y, CLIP),
        f"ours, {patients} records a patient": ours(Units.of(owners, records)),
    }


def main() -> None:
    parser: argparse.ArgumentParser = described(__doc__)
    parser.add_argument("--records", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--wall", action="store_true", help="wall time, on an idle machine")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    clock = time.perf_counter if options.wall else time.process_time
    rows = []
    for records in options.records:
        works = steps(records, 8)
        times = in_turn(works, REPEATS, warm=2, clock=clock)
        theirs = times["Opacus, ghost clipping"]
        for name, seconds in times.items():
            three = (min(seconds), statistics.median(seconds), max(seconds))
            rows.append((records, name, *(1000 * each for each in three), ratio(seconds, theirs)))
    columns = ("records", "step", "least ms", "median", "most", "over Opacus")
    title = f"A private step of a linear head, {DIMENSION} features, {CLASSES} classes"
    report("peers-clipping", title, columns, rows)


if __name__ == "__main__":
    main()

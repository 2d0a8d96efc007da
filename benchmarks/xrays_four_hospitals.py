"""Real chest X-rays at four hospitals with nothing set: the first commands of the README, on the
sample images, by MobileNetV2 or `--backbone`.

The images (28 x 28 pixels, 3,882 to train and 624 to test, in the files' own split) are written as a
folder of PNG files, dealt to four sites at random, and each run is a whole simulation. The file is
written after every row, and keeps those of other epsilons.
"""

import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness.options import described, named, with_backbone
from benchmarks.harness.results import kept_rows, report
from benchmarks.harness.samples import BACKBONES, shared
from fedsurrogate.common.files import read_json
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.server_app.deployment.local_engine import simulate_here
from fedsurrogate.server_app.runs.state import METRICS

COLUMNS = (
    *("epsilon", "majority baseline", "accuracy", "balanced accuracy", "AUROC"),
    *("sensitivity", "specificity", "kB sent by all sites"),
)
SITES, CLASSES, DELTA = 4, ("normal", "pneumonia"), 1e-5
METRIC_VALUES = ("accuracy", "balanced_accuracy", "macro_auroc")


def write_folder(folder: Path) -> None:
    """The images as train/CLASS and test/CLASS."""
    archive = np.load(shared("data/pneumonia/pneumonia-28px.npz"))
    for part in ("train", "test"):
        labels = archive[f"{part}_labels"].ravel().astype(int)
        for number, (image, label) in enumerate(
            zip(archive[f"{part}_images"], labels, strict=True)
        ):
            file = folder / part / CLASSES[label] / f"{number:05}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.astype(np.uint8)).save(file)


def measured(settings: dict[str, Scalar]) -> dict[str, Any]:
    """Metrics of a run."""
    return read_json(simulate_here(SITES, settings, lambda event: None, report=False), METRICS)


def row_of(epsilon: float, runs: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Means over the seeds: the majority baseline, metrics in %, sensitivity and specificity for the
    finding, and kB of all sites.
    """
    quality = [run["quality"] for run in runs]
    finding = [each["per_class"][1]["metric_values"] for each in quality]
    values = [
        *([each["averages"][name]["value"] for each in quality] for name in METRIC_VALUES),
        *([each[name]["value"] for each in finding] for name in ("sensitivity", "specificity")),
    ]
    percent = (round(100 * statistics.mean(each), 1) for each in values)
    sent = round(statistics.mean(run["bytes"]["up"] for run in runs) / 1000, 1)
    majority = round(100 * quality[0]["majority"], 1)
    return (epsilon or "none", majority, *percent, sent)


def _least_private(row: Sequence[Any]) -> float:
    """Order of rows: without privacy first, then from the largest epsilon down."""
    return -math.inf if row[0] == "none" else -row[0]


def main() -> None:
    parser = with_backbone(described(__doc__))
    parser.add_argument("--epsilons", type=float, nargs="*", default=[0.0, 8.0, 4.0, 2.0, 1.0])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    backbone = BACKBONES[options.backbone]
    name = named("xrays-four-hospitals", options.backbone)
    title = f"X-rays at {SITES} sites, nothing set, {backbone.title}: in %, delta {DELTA:g}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_folder(folder / "xrays")
        common: dict[str, Scalar] = {
            "data": "imagefolder",
            "data-dir": str(folder / "xrays"),
            "partition": "iid",
            "output-dir": str(folder / "runs"),
        } | backbone.settings
        for epsilon in options.epsilons:
            private: dict[str, Scalar] = (
                {"epsilon": epsilon, "delta": DELTA, "classes": ",".join(CLASSES)}
                if epsilon
                else {}
            )
            runs = [measured(common | private | {"seed": seed}) for seed in range(options.seeds)]
            row = row_of(epsilon, runs)
            rows = sorted(
                [*kept_rows(name, lambda old, new=row: old[0] == new[0]), row], key=_least_private
            )
            report(name, title, COLUMNS, rows, seeds=options.seeds)


if __name__ == "__main__":
    main()

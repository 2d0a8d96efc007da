"""Images a second and memory of `site predict` against bare feature extraction, on small images.

    python benchmarks/predict_rate.py 20000

The backbone `pixels` on images of 28 x 28 px is the hardest case: an image takes a tenth of a
millisecond, so what `site predict` adds counts most. Rates of the features alone and of
predictions, their ratio by the clock and by processor time, which other work on the machine changes
less, and peak memory after 1,000 and after all images.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.timing import peak
from fedsurrogate.client_app.features.device_processes import in_parts
from fedsurrogate.client_app.model_use.calibration import Calibration
from fedsurrogate.client_app.model_use.inputs import find_inputs
from fedsurrogate.client_app.model_use.prediction import BATCH, Predictor, predict
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.gaussians import fit_gaussians
from fedsurrogate.common.signed_models.signed_model import make_signed_model
from fedsurrogate.common.surrogates.surrogates import Header

SIDE, TURNS = 28, 5
# MiB of a gigabyte in `peak`.
MIB = 1e6 / 1024


def main(count: int) -> None:
    """Write the images, and measure."""
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as home:
        for number in range(count):
            file = Path(home) / "images" / f"{number // 1000:03}" / f"{number:06}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 255, (SIDE, SIDE), dtype=np.uint8)).save(file)
        backbone = load_backbone("pixels", "", SIDE, "cpu")
        header = Header("fedpft", "run", "coordinator", backbone.fingerprint, ("no", "yes"))
        head = Head(header, torch.randn(2, backbone.dim), torch.zeros(2))
        model = make_signed_model(head, parse_run({"image-size": SIDE}), None, "1", 2, bytes(32))
        gaussians = fit_gaussians(torch.rand(2000, backbone.dim), torch.arange(2000) % 2)
        predictor = Predictor(model.classifier, Calibration(), gaussians)
        inputs = find_inputs(f"{home}/images")

        def alone() -> None:
            for _ in in_parts(
                inputs.dataset(range(len(inputs))).open_image, [range(len(inputs))], backbone, BATCH
            ):
                pass

        def timed(work: Callable[[], object]) -> tuple[float, float]:
            started, used = time.perf_counter(), time.process_time()
            work()
            return time.perf_counter() - started, time.process_time() - used

        predict(
            model, predictor, find_inputs(f"{home}/images/000"), backbone, Path(home) / "first.csv"
        )
        first, rows = peak(), []
        # In turn, because other work on the machine changes the rates.
        for turn in range(TURNS):
            bare = timed(alone)
            whole = timed(
                partial(predict, model, predictor, inputs, backbone, Path(home) / f"{turn}.csv")
            )
            by_clock, by_processor = (
                before / after for before, after in zip(bare, whole, strict=True)
            )
            rows.append((turn + 1, count / bare[0], count / whole[0], by_clock, by_processor))
        last = peak()
    columns = (
        "turn",
        "features alone, images/s",
        "predictions, images/s",
        "ratio by the clock",
        "ratio by processor time",
    )
    medians = {
        name: statistics.median(row[place] for row in rows)
        for place, name in enumerate(columns)
        if place
    }
    memory = {"after 1,000 images": round(first * MIB), "after all images": round(last * MIB)}
    title = f"site predict on {count} images of {SIDE} x {SIDE} px, backbone 'pixels'"
    report(
        "predict-rate", title, columns, rows, images=count, medians=medians, peak_memory_mib=memory
    )
    print(f"medians: {medians}; peak memory, MiB: {memory}")


if __name__ == "__main__":
    parser = described(__doc__)
    parser.add_argument("images", nargs="?", type=int, default=20_000)
    main(parser.parse_args().images)

"""DP-CVAE on chest X-rays of five hospitals, from image files to a classifier at each, with the
commands of a user.

Writes the sample X-rays as PNG files, runs `coordinator simulate`, then `site generator synthesize` and `site
generator classify` for every hospital, with epsilon and without. Prints every command, then a table of the
results.
"""

import json
import shlex
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness.commands import run_command
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import shared

SITES = 5
NAMES = ("normal", "pneumonia")


def write_images(folder: Path) -> Path:
    archive = np.load(shared("data/pneumonia/pneumonia-28px.npz"))
    for part, sources in (("train", ("train", "val")), ("test", ("test",))):
        images = np.concatenate([archive[f"{source}_images"] for source in sources])
        labels = np.concatenate([archive[f"{source}_labels"] for source in sources]).ravel()
        for name in NAMES:
            (folder / part / name).mkdir(parents=True, exist_ok=True)
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            Image.fromarray(image).save(folder / part / NAMES[label] / f"{index:05d}.png")
    return folder


def typed(command: str, *words: str) -> str:
    """Print and run a command of the project as users do, and return its output."""
    print(f"$ {command} {shlex.join(words)}", flush=True)
    return run_command(command, *words)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--name", default="dpcvae-pneumonia")
    parser.add_argument("--epsilons", type=float, nargs="*", default=[0.0, 4.0, 1.0])
    options = parser.parse_args()
    weights = shared("weights/mobilenet_v2-imagenet.safetensors")
    rows: list[tuple[Any, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        images = write_images(place / "xrays")
        kind = 'backbone="torchvision:mobilenet_v2" image-size=128 partition="dirichlet" alpha=1.0'
        data = f'data="imagefolder" data-dir="{images}" weights-path="{weights}" {kind}'
        for epsilon in options.epsilons:
            output = place / f"runs-{epsilon:g}"
            budget = f" epsilon={epsilon:g} delta=1e-5" if epsilon else ""
            run = f'method="dpcvae" {data}{budget} output-dir="{output}"'
            started = time.perf_counter()
            typed("coordinator", "simulate", "--sites", str(SITES), "-c", run)
            seconds = time.perf_counter() - started
            (kept,) = output.iterdir()
            metrics = json.loads((kept / "metrics.json").read_text())
            made = str(place / f"synthetic-{epsilon:g}.safetensors")
            typed(
                "site", "generator", "synthesize", str(kept), "--per-class", "1000", "--out", made
            )
            reported = []
            for site in range(SITES):
                node = f'data="imagefolder" data-dir="{images}" weights-path="{weights}"'
                node += f" partition-id={site} num-partitions={SITES}"
                reported.append(
                    json.loads(
                        typed(
                            "site",
                            "generator",
                            "classify",
                            made,
                            "--node-config",
                            node,
                            "-c",
                            kind,
                            "--json",
                        )
                    )
                )
            scores = [
                f"{100 * statistics.mean(each['scores'][source][kind] for each in reported):.1f}"
                for source in ("local", "synthetic", "mixed")
                for kind in ("accuracy", "balanced")
            ]
            share = statistics.mean(each["share"] for each in reported)
            everywhere, sent = 100 * metrics["accuracy"]["model"], metrics["bytes"]["up"] / 1e6
            rows.append(
                (f"{epsilon:g}" if epsilon else "none", *scores, share, everywhere, sent, seconds)
            )
    heads = [
        f"{source}{kind}"
        for source in ("own", "synthetic", "both")
        for kind in (", %", ", balanced")
    ]
    columns = (
        "epsilon",
        *heads,
        "own share",
        "synthetic, all test data, %",
        "MB sent",
        "s of the run",
    )
    title = f"Chest X-rays, {SITES} sites, Dirichlet 1, MobileNetV2, own test data, mean of sites"
    report(options.name, title, columns, rows)


if __name__ == "__main__":
    main()

"""Statistics and mixtures through the command that users call: `coordinator sweep`, CIFAR-10
features of MobileNetV2 or `--backbone`, 10 sites, 3 seeds.

Every row is a whole run: messages, checks, the default screen and limits on weights, evaluation at
the sites. `--only pacs` starts from image files, PACS photos at one site and sketches at another,
next to a head on all their real features.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from benchmarks.harness.commands import json_of, text_of
from benchmarks.harness.options import described, named, with_backbone
from benchmarks.harness.results import report
from benchmarks.harness.samples import BACKBONES, feature_settings, shared
from fedsurrogate.server_app.refit import refit

# The options of each sweep, beyond those of the data: what varies, and what is fixed.
SWEEPS = (
    (
        "fedpft.bits=[16, 8]",
        'features.power-transform=0.5 fedpft.covariance="lowrank" fedpft.rank=64',
    ),
    ('fedpft.covariance=["gram"]', "features.power-transform=0.5"),
    ('fedpft.covariance=["spherical", "diag"]', ""),
)


PACS = ('fedpft.covariance=["gram", "lowrank", "spherical", "diag"]', "fedpft.rank=64 compare=true")
# Kinds of statistics of which a site is taken out.
LEFT = (
    ("gram", {"fedpft.covariance": "gram"}),
    ("lowrank r=64, 8 bits", {"fedpft.rank": 64, "fedpft.bits": 8}),
)


def main() -> None:
    parser = with_backbone(described(__doc__))
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--only", default="", choices=("sweep", "refit", "pacs"), help="one of the tables"
    )
    options = parser.parse_args()
    data = feature_settings("cifar10", options.backbone, alpha=0.1)
    backbone = BACKBONES[options.backbone]
    with tempfile.TemporaryDirectory() as output:
        fixed = data | {"output-dir": output}
        if options.only in ("", "sweep"):
            columns = ("settings", "accuracy %", "sd", "uplink MB, all sites", "runs")
            title = (
                f"coordinator sweep: CIFAR-10 features of {backbone.title}, {options.sites} sites, "
                f"Dirichlet 0.1, {options.seeds} seeds"
            )
            rows = [
                row
                for varied, own in SWEEPS
                for row in sweep(options.sites, options.seeds, varied, own, fixed)
            ]
            report(named("statistics-runs", options.backbone), title, columns, rows)
        if options.only in ("", "refit"):
            columns = ("released", "s", "processor s")
            title = f"coordinator refit RUN --without 3, CIFAR-10 features of {backbone.title}, {options.sites} sites"
            report(
                named("statistics-refit", options.backbone),
                title,
                columns,
                charge_and_release(options.sites, fixed),
            )
        if options.only in ("", "pacs"):
            images: dict[str, Any] = {
                "data": "parquet",
                "data-dir": str(shared("data/pacs")),
                "dataset": "photo,sketch",
            }
            images |= {**backbone.settings, "output-dir": output}
            columns = (
                "settings",
                "accuracy %",
                "sd",
                "uplink MB, all sites",
                "runs",
                "head on all real features %",
            )
            title = (
                f"coordinator sweep: PACS image files, photo and sketch, {backbone.title}, 2 sites, "
                f"{options.seeds} seeds"
            )
            name = named("statistics-runs-pacs", options.backbone)
            report(name, title, columns, sweep(2, options.seeds, *PACS, images))


def sweep(
    sites: int, seeds: int, varied: str, own: str, fixed: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """A row of the table for every value that the sweep varies."""
    words = (
        "--seeds",
        str(seeds),
        "--sites",
        str(sites),
        "-g",
        varied,
        "-c",
        f"{text_of(fixed)} {own}",
    )
    runs = json_of("coordinator", "sweep", *words)
    key, rows = varied.split("=")[0], []
    for value in dict.fromkeys(each[key] for each in runs):
        same = [each for each in runs if each[key] == value]
        accuracy = [100 * each["accuracy"] for each in same]
        spread, sent = (
            statistics.pstdev(accuracy),
            statistics.mean(each["bytes"] for each in same) / 1e6,
        )
        name = f"{key}={value} {own}".strip()
        row = (
            name,
            round(statistics.mean(accuracy), 2),
            round(spread, 2),
            round(sent, 3),
            len(same),
        )
        compared = [
            json.loads((Path(each["folder"]) / "metrics.json").read_text())["accuracy"]
            for each in same
        ]
        real = [100 * each["centralized"] for each in compared if "centralized" in each]
        rows.append((*row, round(statistics.mean(real), 2)) if real else row)
    return rows


def charge_and_release(sites: int, fixed: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Seconds to learn the head again without a site: files, checks and arithmetic, in a process
    that has learned before.
    """
    rows = []
    for name, own in LEFT:
        settings = text_of({**fixed, "features.power-transform": 0.5, **own})
        words = ("--engine", "local", "--sites", str(sites), "-c", settings)
        run = Path(json_of("coordinator", "simulate", *words)["folder"])
        refit(run)
        began, used = perf_counter(), process_time()
        refit(run, without=["3"])
        rows.append((name, round(perf_counter() - began, 3), round(process_time() - used, 3)))
    return rows


if __name__ == "__main__":
    main()

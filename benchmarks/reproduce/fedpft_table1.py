"""FedPFT, table 1: data sets and foundation models. Accuracy of the heads on each pair that you
have, at 50 sites.

The paper's table 1 lists the pairs without figures. This script prints it, and next to each pair
the accuracy of one head on all real features, of FedPFT as published, and of our families, among
the sites of one run (Dirichlet 0.1). A pair is named with its settings; `data-dir` and
`weights-path` are files of yours:

    python benchmarks/reproduce/fedpft_table1.py \\
        --pair 'Oxford Pets' 'data="imagefolder" data-dir="/data/pets" backbone="open_clip:ViT-B-32/openai"' \\
        --pair 'CIFAR100' 'data="parquet" data-dir="/data/cifar100" backbone="torchvision:resnet50"'

Without a pair: features of CIFAR-10 and PACS by MobileNetV2, or `--backbone`, of the sample images
next to the checkout.
"""

import re
from functools import lru_cache
from typing import Any

from benchmarks.harness.federation import accuracies, load_seed, run_rows
from benchmarks.harness.options import arguments, settings_of
from benchmarks.harness.results import report, stored
from benchmarks.harness.samples import BACKBONES
from benchmarks.harness.seeds import mean_and_deviation
from fedsurrogate.common.settings.base import Scalar, parse_overrides

# Training images, classes, foundation model.
PAPER: dict[str, tuple[int, int, str]] = {
    "CIFAR10": (50_000, 10, "ResNet-50"),
    "CIFAR100": (50_000, 100, "ResNet-50"),
    "PACS (P)": (1_336, 7, "ViT-B/16"),
    "PACS (S)": (3_144, 7, "ViT-B/16"),
    "Office Home (C)": (3_492, 65, "ViT-B/16"),
    "Office Home (P)": (3_551, 65, "ViT-B/16"),
    "Caltech101": (6_084, 101, "CLIP, ViT-B/32"),
    "Stanford Cars": (12_948, 196, "CLIP, ViT-B/32"),
    "Oxford Pets": (3_680, 37, "CLIP, ViT-B/32"),
    "Food101": (75_750, 101, "CLIP, ViT-B/32"),
}
ROWS: dict[str, dict[str, Any] | None] = {
    "all real features": None,
    "ensemble": {"method": "ensemble-max"},
    "mean of the ensemble (ours)": {"method": "ensemble"},
    "FedPFT diag K=10": {"fedpft.covariance": "diag", "fedpft.components": 10},
    "FedPFT spherical K=1": {"fedpft.covariance": "spherical"},
    "lowrank r=64 (ours)": {"fedpft.rank": 64},
    "gram (ours)": {"fedpft.covariance": "gram"},
}
DIVIDED: dict[str, Scalar] = {"alpha": 0.1}
STAND_INS = {"CIFAR10": "cifar10", "PACS (P)": "pacs-photo", "PACS (S)": "pacs-sketch"}


def main() -> None:
    parser = arguments(__doc__, "reproduce-fedpft-table1")
    parser.add_argument(
        "--pair", nargs=2, action="append", default=[], metavar=("NAME", "'key=value ...'")
    )
    parser.add_argument("--sites", type=int, default=50)
    only = "measure columns whose name matches this; take the others from the last result"
    parser.add_argument("--only", default="", help=only)
    options = parser.parse_args()
    pairs: dict[str, dict[str, Scalar]] = {
        name: DIVIDED | parse_overrides([text]) for name, text in options.pair
    }
    if not pairs:
        pairs = {
            name: DIVIDED | settings_of(options, {"dataset": file})[0]
            for name, file in STAND_INS.items()
        }
    chosen = {row: own for row, own in ROWS.items() if re.search(options.only, row)}
    last = stored(options.name) if options.only else {}
    before = {row[0]: dict(zip(last["columns"], row, strict=True)) for row in last.get("rows", [])}
    measured: dict[str, list[Any]] = {}
    megabytes: dict[str, float] = last.get("megabytes", {})
    for name, settings in pairs.items():
        load = lru_cache(1)(lambda seed, own=settings: load_seed(own, options.sites, seed))
        results = run_rows(settings, chosen, options.seeds, load)
        data = load(options.seeds - 1)
        cells = [
            mean_and_deviation(accuracies(results[row]))
            if row in results
            else before.get(name, {}).get(row, "")
            for row in ROWS
        ]
        sizes = sum(data.sizes), len(data.classes), data.test.features.shape[1]
        measured[name] = [
            str(settings.get("backbone", BACKBONES[options.backbone].title)),
            *sizes,
            *cells,
        ]
        megabytes |= {f"{name}, {row}": each[0].bytes / 1e6 for row, each in results.items()}
    rows = [
        (name, *PAPER.get(name, ("", "", "")), *measured.get(name, [""] * (4 + len(ROWS))))
        for name in dict.fromkeys([*PAPER, *pairs])
    ]
    columns = ["data", *(f"paper: {what}" for what in ("images", "classes", "model"))]
    columns += ["ours: model", "images", "classes", "dimensions", *ROWS]
    alphas = " and ".join(sorted({str(each["alpha"]) for each in pairs.values()}))
    title = (
        f"FedPFT table 1, {options.sites} sites, Dirichlet {alphas}, {options.seeds} seeds, "
        "accuracy in %"
    )
    report(options.name, title, columns, rows, megabytes=megabytes)


if __name__ == "__main__":
    main()

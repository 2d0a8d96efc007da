"""Features of the sample images by another backbone than MobileNetV2, whose features are among the
sample data. The scripts with `--backbone` take them.

    python benchmarks/sample_features.py ../shared --backbone lite0

CIFAR-10 at 128 pixels (the rows of the sample features: 10,000 to train, 2,500 to test), PACS and
chest X-rays at 224, by the weights of the sample data. Files that are there stay. A processor core
takes about ten minutes; the rows of CIFAR-10 are found first, by the features of MobileNetV2 of all
60,000 images, in about as long again.
"""

import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.harness.options import described
from benchmarks.harness.samples import (
    BACKBONES,
    made_features,
    shared,
    stored_features,
    stored_images,
)
from fedsurrogate.common.backbones.backbones import Backbone

PARTS = ("train", "test")
PACS = ("pacs-photo", "pacs-sketch")
BATCH = 32
# Distance of the features of one image, computed here and stored at 16 bits: at most 5, where those of
# another image are 20 away.
SAME = 10.0


def decoded(files: Sequence[bytes]) -> list[Image.Image]:
    """The images of these files, in RGB."""
    return [Image.open(io.BytesIO(file)).convert("RGB") for file in files]


def computed(backbone: Backbone, images: Sequence[Image.Image], name: str) -> Tensor:
    """Features (n, d) of images, single precision."""
    starts = track(range(0, len(images), BATCH), description=name)
    batches = (images[start : start + BATCH] for start in starts)
    return torch.cat(
        [backbone.forward(torch.stack(list(map(backbone.preprocess, batch)))) for batch in batches]
    ).float()


def rows_of_samples(part: str, folder: Path) -> list[int]:
    """The row in the table of CIFAR-10 of each record of the sample features, kept in a file.

    Args:
        part: "train" or "test".
        folder: for the file.

    Raises:
        ValueError: where a record of the sample features is no image of the table.
    """
    file = folder / f"cifar10-{part}-rows.json"
    if not file.exists():
        files, labels = stored_images(f"data/cifar10/{part}.parquet")
        stored, classes = stored_features("cifar10", part)
        x = computed(BACKBONES["mobilenet_v2"].loaded(128), decoded(files), f"rows, {part}")
        rows = torch.full((len(classes),), -1)
        for label in classes.unique():
            here, there = (classes == label).nonzero()[:, 0], torch.tensor(labels) == label
            nearest = torch.cdist(stored[here], x[there]).min(1)
            if float(nearest.values.max()) > SAME:
                raise ValueError(f"sample features of {part} have records that no image makes")
            rows[here] = there.nonzero()[:, 0][nearest.indices]
        file.write_text(json.dumps(rows.tolist()))
    found: list[int] = json.loads(file.read_text())
    return found


def xrays(part: str) -> tuple[list[Image.Image], list[int]]:
    """Chest X-rays of 28 x 28 pixels, and their labels."""
    archive = np.load(shared("data/pneumonia/pneumonia-28px.npz"))
    images = [Image.fromarray(image).convert("RGB") for image in archive[f"{part}_images"]]
    return images, archive[f"{part}_labels"].ravel().astype(int).tolist()


def sets(folder: Path) -> Iterator[tuple[str, int, list[Image.Image], list[int]]]:
    """Name, size, images and labels of each file that is not in the folder."""
    for part in PARTS:
        for name in PACS:
            if not (folder / f"{name}-{part}.safetensors").exists():
                files, labels = stored_images(f"data/pacs/{name.partition('-')[2]}-{part}.parquet")
                yield f"{name}-{part}", 224, decoded(files), labels
        if not (folder / f"xrays-{part}.safetensors").exists():
            yield f"xrays-{part}", 224, *xrays(part)
    # The training images last: where they are, all are.
    for part in reversed(PARTS):
        if not (folder / f"cifar10-{part}.safetensors").exists():
            files, labels = stored_images(f"data/cifar10/{part}.parquet")
            rows = rows_of_samples(part, folder)
            images = decoded([files[row] for row in rows])
            yield f"cifar10-{part}", 128, images, [labels[row] for row in rows]


def main() -> None:
    """Write the files that are not there."""
    parser = described(__doc__)
    parser.add_argument("samples", nargs="?", type=Path, help="the folder of sample data")
    others = [name for name, each in BACKBONES.items() if not each.stored]
    parser.add_argument("--backbone", choices=others, default=others[0])
    options = parser.parse_args()
    if options.samples:
        os.environ["FEDSURROGATE_SAMPLES"] = str(options.samples)
    backbone = BACKBONES[options.backbone]
    folder = made_features(options.backbone)
    folder.mkdir(parents=True, exist_ok=True)
    for name, size, images, labels in sets(folder):
        x = computed(backbone.loaded(size), images, name)
        save_file({"x": x.half(), "y": torch.tensor(labels)}, folder / f"{name}.safetensors")
    print(f"features of {backbone.title}: {folder}")


if __name__ == "__main__":
    main()

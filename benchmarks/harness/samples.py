"""The optional sample data: real features, images and weights, which a checkout does not hold."""

import os
import sys
from pathlib import Path

from torch import Tensor

from fedsurrogate.common.settings.base import Scalar

ROOT = Path(__file__).resolve().parents[2]


def sample_folder() -> Path:
    """The folder that FEDSURROGATE_SAMPLES names; without it, 'shared' next to the checkout."""
    return Path(os.environ.get("FEDSURROGATE_SAMPLES") or ROOT.parent / "shared")


def shared(path: str) -> Path:
    """A file or folder of the sample data; without it, the script prints a note and exits with 0.

    Args:
        path: below the folder of sample data, such as "features/cifar10-train.safetensors".

    Returns:
        The whole path.

    Raises:
        SystemExit: where there is no such file, with code 0.

    Example:
        >>> shared("no/such/file")
        Traceback (most recent call last):
        SystemExit: 0
    """
    file = sample_folder() / path
    if not file.exists():
        place = "the folder that FEDSURROGATE_SAMPLES names, or 'shared' next to the checkout"
        print(f"skipped: needs {path} in {place}")
        sys.exit(0)
    return file


def stored_features(name: str, part: str = "train") -> tuple[Tensor, Tensor]:
    """Features of MobileNetV2 of a sample data set.

    Args:
        name: "cifar10", "pacs-photo" or "pacs-sketch".
        part: "train" or "test".

    Returns:
        Features (n, d) in single precision, and labels (n,).
    """
    from safetensors.torch import load_file

    tables = load_file(shared(f"features/{name}-{part}.safetensors"))
    return tables["x"].float(), tables["y"].long()


def stored_images(path: str, most: int | None = None) -> tuple[list[bytes], list[int]]:
    """Encoded images and their labels from a sample table (parquet).

    Args:
        path: of the table, below the folder of sample data.
        most: how many of its first rows; None takes all.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(shared(path), columns=["image", "label"]).slice(0, most)
    images = [row["bytes"] for row in table.column("image").to_pylist()]
    return images, table.column("label").to_pylist()


def feature_settings(dataset: str, **more: Scalar) -> dict[str, Scalar]:
    """Settings of a run on sample features.

    Args:
        dataset: as the setting `dataset`; several names are separated by commas.
        more: further settings whose names have no dash or dot, such as `alpha`.
    """
    folder = shared("features/cifar10-train.safetensors").parent
    return {"data": "safetensors", "data-dir": str(folder), "dataset": dataset} | more


def cifar_images() -> dict[str, Scalar]:
    """The setting of the folder with the images of CIFAR-10."""
    return {"data-dir": str(shared("data/cifar10/train.parquet").parent)}

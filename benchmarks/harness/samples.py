"""The optional sample data: real features, images and weights, which a checkout does not hold."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedsurrogate.common.backbones.backbones import Backbone, load_backbone
from fedsurrogate.common.machine import CACHE, user_folder
from fedsurrogate.common.settings.base import Scalar

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class SampleBackbone:
    """A backbone whose weights are among the sample data.

    Attributes:
        title: in tables.
        name: as the setting `backbone`.
        stored: whether its features are among the sample data too; benchmarks/sample_features.py
            makes those of the others.
    """

    title: str
    name: str
    stored: bool = False

    @property
    def weights(self) -> Path:
        """The file of its weights."""
        return shared(f"weights/{self.name.partition(':')[2]}-imagenet.safetensors")

    @property
    def settings(self) -> dict[str, Scalar]:
        """Settings of a run on images."""
        return {"backbone": self.name, "weights-path": str(self.weights)}

    def loaded(self, size: int) -> Backbone:
        """The backbone on the processor, for images of so many pixels a side."""
        return load_backbone(self.name, str(self.weights), size, "cpu")


MOBILENET = "mobilenet_v2"
BACKBONES = {
    MOBILENET: SampleBackbone("MobileNetV2", "torchvision:mobilenet_v2", stored=True),
    "lite0": SampleBackbone("EfficientNet-Lite0", "timm:tf_efficientnet_lite0"),
}


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


def made_features(backbone: str) -> Path:
    """The folder for features of a backbone that benchmarks/sample_features.py computes.

    Args:
        backbone: of BACKBONES.
    """
    return user_folder(CACHE) / "sample-features" / backbone


def features_folder(backbone: str = MOBILENET) -> Path:
    """The folder with a backbone's features of the sample images; without them, the script prints a
    note and exits with 0.

    Args:
        backbone: of BACKBONES.

    Raises:
        SystemExit: where they are not there, with code 0.
    """
    if BACKBONES[backbone].stored:
        return shared("features/cifar10-train.safetensors").parent
    folder = made_features(backbone)
    if not (folder / "cifar10-train.safetensors").exists():
        print(f"skipped: first benchmarks/sample_features.py --backbone {backbone}, in minutes")
        sys.exit(0)
    return folder


def stored_features(
    name: str, part: str = "train", backbone: str = MOBILENET
) -> tuple[Tensor, Tensor]:
    """A backbone's features of a sample data set.

    Args:
        name: "cifar10", "pacs-photo" or "pacs-sketch"; "xrays" of other backbones than MobileNetV2.
        part: "train" or "test".
        backbone: of BACKBONES.

    Returns:
        Features (n, d) in single precision, and labels (n,).
    """
    from safetensors.torch import load_file

    tables = load_file(features_folder(backbone) / f"{name}-{part}.safetensors")
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


def feature_settings(dataset: str, backbone: str = MOBILENET, **more: Scalar) -> dict[str, Scalar]:
    """Settings of a run on sample features.

    Args:
        dataset: as the setting `dataset`; several names are separated by commas.
        backbone: of BACKBONES.
        more: further settings whose names have no dash or dot, such as `alpha`.
    """
    folder = features_folder(backbone)
    return {"data": "safetensors", "data-dir": str(folder), "dataset": dataset} | more


def cifar_images() -> dict[str, Scalar]:
    """The setting of the folder with the images of CIFAR-10."""
    return {"data-dir": str(shared("data/cifar10/train.parquet").parent)}

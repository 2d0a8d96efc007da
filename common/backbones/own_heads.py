"""The weight of a backbone's own classification head, where its weights are on this machine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fedsurrogate.common.backbones.backbones import published_weights, read_weights
from fedsurrogate.common.errors import BackboneError, PackageError

# Names that classification heads have in the weights of torchvision and timm models.
HEADS = (
    "fc.weight",
    "classifier.1.weight",
    "classifier.weight",
    "head.weight",
    "heads.head.weight",
    "head.fc.weight",
)


def own_head(backbone: str, weights_path: str, dimension: int) -> Tensor | None:
    """The weight of the classification head with which a backbone was trained.

    Nothing is downloaded.

    Args:
        backbone: its name.
        weights_path: file of its weights; empty for those that torchvision has stored here.
        dimension: of its features.

    Returns:
        The weight (C, d), float64; None where no readable file here has a head for features of this
        dimension.
    """
    file = Path(weights_path).expanduser() if weights_path else _stored(backbone)
    if file is None or not file.is_file():
        return None
    try:
        content = read_weights(file)
    except BackboneError:
        return None
    for name in HEADS:
        weight = content.get(name, content.get(f"module.{name}"))
        if weight is not None and weight.ndim == 2 and weight.shape[1] == dimension:
            return weight.double() if bool(weight.isfinite().all()) else None
    return None


def _stored(backbone: str) -> Path | None:
    """The file of a backbone's published weights among torchvision's downloads; None for another
    library.
    """
    library, _, name = backbone.partition(":")
    if library == "torchvision":
        try:
            url = published_weights(name).url
        except (PackageError, ValueError, KeyError):
            return None
        return Path(torch.hub.get_dir()) / "checkpoints" / Path(url).name
    return None

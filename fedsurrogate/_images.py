"""Features of images, by a backbone of the product or of the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from common.backbones.backbones import Backbone, load_backbone
from common.backbones.own_backbones import OwnModule, Transform, own_backbone
from common.backbones.preprocessing import Preprocessing
from common.errors import ConfigError, DataError
from fedsurrogate._data import Images, is_labelled, label_of, picture, records_of, tensor_of
from fedsurrogate._inputs import as_features, as_labels

_own: dict[str, OwnModule] = {}
NamedRecords = tuple[Tensor, list[str]]
Take = Callable[[Any, int], Tensor]


def register_backbone(name: str, module: nn.Module, transform: Transform | None = None) -> None:
    """Let `features` and `simulate` find a module of your own under a name.

    module: takes a batch of what `transform` returns and gives features (n, d). transform: takes one image, or one row of an
    array, and returns a tensor; None for records that the module takes as they are. Raises ConfigError for a name that the
    product uses.
    """
    if name in ("pixels", "own", "") or ":" in name:
        raise ConfigError(f"backbone {name!r} is a name of the product; use one without a colon, such as 'mine'")
    _own[name] = module, transform


def is_own(backbone: object) -> bool:
    """Whether a backbone is the user's: a module, a registered name, or a function in Python."""
    return isinstance(backbone, nn.Module) or (
        isinstance(backbone, str) and (backbone in _own or backbone.startswith("python:"))
    )


def features(
    images: Images,
    backbone: str | nn.Module = "pixels",
    *,
    weights_path: str = "",
    image_size: int = 0,
    device: str = "auto",
    batch_size: int = 64,
) -> Tensor:
    """Features (n, d), float32, of images.

    images: PIL images, paths of files, arrays or tensors (8 bits, or floating point in 0 to 1), as a list, as one array of
    shape (n, ...), or as a data set with `__len__` and `__getitem__`, which may give pairs (image, label).
    backbone: a name as in the settings ("pixels", "torchvision:resnet18"); or your own: "python:package.module:function", as
    at a site; a module or a registered name, which may take records that are no images.
    Raises DataError, BackboneError, ConfigError.
    """
    take, forward = _parts(backbone, weights_path, image_size, device)
    return _computed(images, take, forward, batch_size)[0]


def labelled_features(
    data: Images,
    backbone: str | nn.Module = "pixels",
    *,
    weights_path: str = "",
    image_size: int = 0,
    device: str = "auto",
    batch_size: int = 64,
) -> tuple[Tensor, list[str]]:
    """Features (n, d) and class names (n,) of a data set whose items are pairs (image, label), in one pass.

    The rest is as in `features`.
    """
    take, forward = _parts(backbone, weights_path, image_size, device)
    found, labels = _computed(data, take, forward, batch_size)
    return found, as_labels([label_of(label, number) for number, label in enumerate(labels)], len(labels))


def records_for(entry: Any, backbone: str | nn.Module | None, options: dict[str, Any]) -> NamedRecords:
    """Features (n, d) and class names (n,) of an entry: a pair of arrays, or a data set of pairs (image, label).

    backbone: None takes an array (n, d) as features, and computes pixels of anything else.
    """
    if isinstance(entry, tuple | list) and len(entry) == 2 and not is_labelled(entry[0]):
        values, labels = entry
        found = as_features(values) if backbone is None and are_features(values) else None
        if found is None:
            found = features(values, backbone or "pixels", **options)
        return found, as_labels(labels, len(found))
    return labelled_features(entry, backbone or "pixels", **options)


def are_features(values: Any) -> bool:
    """Whether values are an array (n, d), or could be meant as one, and not images."""
    if isinstance(values, list | tuple):
        return not values or (not isinstance(values[0], str | Path | Image.Image) and np.ndim(values[0]) <= 1)
    return hasattr(values, "shape") and len(values.shape) <= 2


def _parts(
    backbone: str | nn.Module, weights_path: str, image_size: int, device: str
) -> tuple[Take, Callable[[Tensor], Tensor]]:
    """What a record becomes, and what a batch of these becomes."""
    if isinstance(backbone, nn.Module):
        return _of_module((backbone, None), image_size)
    if backbone in _own:
        return _of_module(_own[backbone], image_size)
    return _of_backbone(backbone_of(backbone, weights_path, image_size, device))


def backbone_of(name: str, weights_path: str = "", image_size: int = 0, device: str = "auto") -> Backbone:
    """A backbone of the product by its name, or "python:package.module:function". Raises BackboneError, ConfigError."""
    if is_own(name):
        return own_backbone(name, image_size, device)
    return load_backbone(name, weights_path, image_size, device)


def computed(images: Images, backbone: Backbone, batch_size: int = 64) -> Tensor:
    """Features (n, d) of images by a backbone that is loaded."""
    return _computed(images, *_of_backbone(backbone), batch_size)[0]


def _of_backbone(loaded: Backbone) -> tuple[Take, Callable[[Tensor], Tensor]]:
    return lambda image, number: loaded.preprocess(picture(image, number)), loaded.forward


def _of_module(own: OwnModule, image_size: int) -> tuple[Take, Callable[[Tensor], Tensor]]:
    module, transform = own
    resized = Preprocessing(image_size, image_size)

    def take(value: Any, number: int) -> Tensor:
        if transform is not None:
            found = transform(picture(value, number) if isinstance(value, str | Path) else value)
            if not isinstance(found, Tensor):
                raise DataError(f"the transform returns {type(found).__name__} for record {number}; it must return a tensor")
            return found
        return resized(picture(value, number)) if image_size else tensor_of(value, number)

    def forward(batch: Tensor) -> Tensor:
        training = module.training
        try:
            place = next((tensor.device for tensor in module.parameters()), batch.device)
            with torch.no_grad():
                found = module.eval()(batch.to(place))
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            raise DataError(f"the module cannot take a batch of shape {tuple(batch.shape)}: {reason}") from error
        finally:
            module.train(training)
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(batch):
            what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise DataError(f"the module returns {what} for {len(batch)} records; it must be (n, d)")
        return found

    return take, forward


def _computed(data: Images, take: Take, forward: Callable[[Tensor], Tensor], batch_size: int) -> tuple[Tensor, list[Any]]:
    """Features of all records, and their labels, None where there is none."""
    found: list[Tensor] = []
    labels: list[Any] = []
    batch: list[Tensor] = []
    shape: torch.Size | None = None
    for number, image, label in records_of(data):
        taken = take(image, number)
        shape = shape or taken.shape
        if taken.shape != shape:
            raise DataError(
                f"record 0 has shape {tuple(shape)} and record {number} {tuple(taken.shape)}; set image_size, or resize them"
            )
        labels.append(label)
        batch.append(taken)
        if len(batch) == batch_size:
            found.append(forward(torch.stack(batch)).cpu().float())
            batch = []
    if batch:
        found.append(forward(torch.stack(batch)).cpu().float())
    if not found:
        raise DataError("no record to compute features of; give at least one")
    return torch.cat(found), labels

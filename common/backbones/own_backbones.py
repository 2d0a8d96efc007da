"""Backbones of the user's own: a Python function that returns a module, with a fingerprint and
checks of its features.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import BackboneError, ConfigError, PackageError
from ..models.devices import pick_device
from .backbone_names import OWN_BACKBONE
from .backbones import ON_CPU, ON_GPU, Backbone, dimension_of, fingerprint_of, frozen_forward
from .libraries import published_weights
from .preprocessing import OwnTransform, Preprocessing
from .weight_files import kept_weights, read_weights

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


Transform = Callable[[Any], Any]
# A module, and a transform of one image; without a transform the module takes RGB images as (3, h,
# w) in [0, 1].
OwnModule = tuple[nn.Module, Transform | None]

FORM = "python:PACKAGE.MODULE:FUNCTION"
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def load_own_module(reference: str) -> OwnModule:
    """Call the function that a reference names.

    The function takes no arguments. Random weights are drawn from seed 0, so they are the same at
    every call.

    Args:
        reference: "python:package.module:function". Only a site's own settings, or the user of this
            process, may give it: this runs code.

    Returns:
        The module and the transform that the function returns.

    Raises:
        BackboneError: if the function does not exist, fails, or returns something else.
    """
    _, _, place = reference.partition(":")
    module_name, _, function = place.partition(":")
    if not reference.startswith("python:") or not module_name or not function:
        raise BackboneError(f"backbone = {reference!r} is no function in Python; write {FORM}")
    try:
        build = getattr(import_module(module_name), function)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = build()
    except Exception as error:
        raise BackboneError(
            f"backbone = {reference!r} cannot be made ({type(error).__name__}: {error})"
        ) from error
    module, transform = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (transform is None or callable(transform)):
        raise BackboneError(
            f"backbone = {reference!r} returns {type(made).__name__}; it must return a "
            "torch.nn.Module, or a pair of a module and a function from an image to a tensor "
            "(channels, height, width)"
        )
    return module, transform


def own_backbone(reference: str, image_size: int = 0, device: str = "auto") -> Backbone:
    """The backbone that a function in Python makes, see `load_own_module`.

    Args:
        reference: as in `load_own_module`.
        image_size: side to which images are resized if there is no transform; 0 with a transform.
        device: that computes.

    Returns:
        The backbone, frozen, in evaluation mode. Its fingerprint is that of reference, weights,
        structure, dimension, and the Python files of the function's package (or its one file).
        Versions of other packages are not part of it.

    Raises:
        BackboneError: if it cannot be made; if the features of an image depend on other images or
            on earlier calls, which no privacy guarantee would cover; or if their dimension depends
            on the size of the image, which it would disclose.
        ConfigError: for a device that does not exist.
    """
    target = torch.device(pick_device(device))
    module, transform = load_own_module(reference)
    preprocess = _preprocessing(reference, transform, image_size)
    try:
        network = module.eval().requires_grad_(False)
        weights = _weights(network)
        identity = (reference, _digest_of_sources(reference), ADDRESS.sub("", repr(network)))
        forward = frozen_forward(network.to(memory_format=torch.channels_last).to(target), target)
        dim = dimension_of(
            reference, forward, preprocess, ON_CPU if target.type == "cpu" else ON_GPU
        )
        seen = preprocess if isinstance(preprocess, Preprocessing) else "own transform"
        return Backbone(
            OWN_BACKBONE,
            dim,
            fingerprint_of(identity, seen, dim, weights),
            preprocess,
            forward,
            target,
        )
    except (BackboneError, ConfigError):
        raise
    except Exception as error:
        raise BackboneError(
            f"backbone = {reference!r} does not work on an RGB image ({type(error).__name__}: "
            f"{error})"
        ) from error


def _preprocessing(
    reference: str, transform: Transform | None, image_size: int
) -> Preprocessing | OwnTransform:
    if transform is None:
        if not image_size:
            raise BackboneError(
                f"backbone = {reference!r} has no transform; return one with the module, or set "
                "image-size"
            )
        return Preprocessing(image_size, image_size)
    if image_size:
        raise BackboneError(
            f"image-size = {image_size}: the transform of {reference!r} decides the size; set it "
            "to 0"
        )
    return OwnTransform(transform)


def _weights(network: nn.Module) -> dict[str, Tensor]:
    """All tensors that decide the features: the state dict, other buffers, and plain attributes
    (arrays too).
    """
    tensors = dict(kept_weights(network.state_dict())) | dict(
        kept_weights(dict(network.named_buffers()))
    )
    for name, part in network.named_modules():
        plain = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, Tensor | np.ndarray)
        }
        tensors |= {
            f"{name}.{key}".lstrip("."): torch.as_tensor(value) for key, value in plain.items()
        }
    return tensors


def _digest_of_sources(reference: str) -> str:
    """Digest of the Python files of the package that contains the function, with their places in
    it.
    """
    top = import_module(reference.split(":")[1].partition(".")[0])
    roots = [Path(folder) for folder in getattr(top, "__path__", ())]
    files = [
        (file.relative_to(root).as_posix(), file) for root in roots for file in root.rglob("*.py")
    ]
    if not roots and getattr(top, "__file__", None):
        files = [("", Path(str(top.__file__)))]
    if not files:
        raise BackboneError(
            f"backbone = {reference!r}: its Python file cannot be found, so it has no fingerprint"
        )
    digest = hashlib.sha256()
    for place, file in sorted(files):
        digest.update(f"{place} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()

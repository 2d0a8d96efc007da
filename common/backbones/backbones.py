"""Frozen feature extractors (backbones) by name, each with a fingerprint that identifies it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..errors import BackboneError
from ..extras import BUILT_BY, check_installed
from ..models.devices import pick_device
from .backbone_names import FORMS
from .hugging_face import hugging_face_network
from .libraries import open_clip_network, stored_files, timm_network, torchvision_network
from .networks import USUAL, BackboneOptions, LoadedNetwork, NetworkRequest, Pooled
from .onnx_graphs import onnx_network
from .preprocessing import OwnTransform, Preprocessing
from .weight_files import files_of, first_sentence, kept_weights, load_weights, read_weights

# On a CPU, the activations of eight images fit into its caches: 2 to 3 times the measured rate of
# batches of 64.
CPU_BATCH = 8


# Width and height of the images that an own backbone is tried with.
PROBES = ((96, 64), (50, 120))
# Largest relative change of a feature by another image in the batch: rounding on a CPU, and in
# bfloat16 on a GPU.
ON_CPU, ON_GPU = 1e-4, 5e-2


@dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen feature extractor: `preprocess` returns (c, h, w), `forward` maps (b, c, h, w) to
    (b, dim) float32.

    fingerprint: hash of name, weights, preprocessing and output dimension; independent of device,
    file and precision of the stored weights. dim: 0 for pixels of images that keep their size; the
    images then determine it, and `fingerprint_at` tells images of one size from those of another.
    built: the network and its pooling, where files decide them. weights_path, options: of `load_backbone`.
    """

    name: str
    dim: int
    fingerprint: str
    preprocess: Preprocessing | OwnTransform
    forward: Callable[[Tensor], Tensor]
    device: torch.device
    built: str = ""
    weights_path: str = ""
    options: BackboneOptions = USUAL

    @property
    def in_words(self) -> str:
        """What was built, the preprocessing of its images, and the dimension of its features."""
        own = self.preprocess
        if not isinstance(own, Preprocessing) or not own.crop:
            return self.built
        mean, std = (",".join(f"{each:g}" for each in values) for values in (own.mean, own.std))
        return (
            f"{self.built}images of {own.crop} px ({own.interpolation}, mean {mean}, std {std}), "
            f"{self.dim} features, "
        )

    def fingerprint_at(self, dimension: int) -> str:
        """The fingerprint of features of this dimension."""
        return self.fingerprint if self.dim else fingerprint_of(self.fingerprint, "", dimension, {})


def load_backbone(
    name: str,
    weights_path: str = "",
    image_size: int = 0,
    device: str = "auto",
    options: BackboneOptions = USUAL,
) -> Backbone:
    """Build a frozen backbone in evaluation mode.

    Args:
        name: `pixels` (grey levels / 255, flattened), `pixels:rgb`, `torchvision:MODEL` (what enters the
            last linear layer), `open_clip:MODEL/TAG` (projected image features, not normalised),
            `timm:MODEL` (pooled features); `hf-hub:OWNER/NAME` or `local-dir:FOLDER` behind `timm:` and
            `open_clip:`, `hf:OWNER/NAME`, `hf:local-dir:FOLDER`: what the configuration there describes;
            `onnx:FILE`.
        weights_path: safetensors, a torch file of plain tensors, a folder with one and a
            configuration, or an ONNX file; empty to take what the name says.
        image_size: 0 for the model's own preprocessing. Otherwise the shorter side of the whole image
            is resized to it (bicubic) and the centre square kept, without the margin that published
            presets cut off.
        device: that computes.
        options: what no file says, and whether files may be fetched.

    Raises:
        BackboneError: for an unknown name, missing or unsuitable files, or an unsupported image size.
        PackageError: for a library that is not installed.
        ConfigError: for a device that does not exist.
    """
    target = torch.device(pick_device(device))
    if name in ("pixels", "pixels:rgb"):
        return _pixels(name, image_size, target)
    network = load_network(name, weights_path, image_size, options)
    model, preprocessing = network.model, network.preprocessing
    fingerprint_weights = dict(kept_weights(model.state_dict()))
    try:
        forward = frozen_forward(model.to(memory_format=torch.channels_last).to(target), target)
        dim = _probe(name, forward, preprocessing.crop)
        if name.startswith("onnx:"):
            # A graph may be anything; networks of libraries look at each image alone.
            dimension_of(name, forward, preprocessing)
    except torch.OutOfMemoryError as error:
        raise BackboneError(
            f"backbone {name!r} does not fit into the free memory of the GPU "
            f"({first_sentence(error)}); free memory on it, or set device to another GPU or 'cpu'"
        ) from error
    identity = network.identity or name
    return Backbone(
        name,
        dim,
        fingerprint_of(identity, preprocessing, dim, fingerprint_weights),
        preprocessing,
        forward,
        target,
        _built(network),
        weights_path,
        options,
    )


def _built(network: LoadedNetwork) -> str:
    """The network that files describe, in words; empty where the name says all."""
    if not isinstance(network.identity, tuple):
        return ""
    pooling = network.pooling or getattr(network.model, "global_pool", "")
    return f"{network.identity[0]}, {f'pooling {pooling}, ' if pooling else ''}"


def load_network(
    name: str,
    weights_path: str = "",
    image_size: int = 0,
    options: BackboneOptions = USUAL,
) -> LoadedNetwork:
    """The module of a backbone from a library, frozen, and its preprocessing; arguments as in
    `load_backbone`. Raises BackboneError, PackageError.
    """
    library, _, model_name = name.partition(":")
    if library not in _LIBRARIES or not model_name:
        raise BackboneError(f"backbone = {name!r} is unknown; use {FORMS}")
    check_installed(BUILT_BY.get(library, library), f"backbone = {name!r}")
    files = files_of(name, weights_path, options.download)
    if files.weights is None and not options.download:
        files = stored_files(name)
    weights = {} if files.weights is None or library == "onnx" else read_weights(files.weights)
    request = NetworkRequest(model_name, files, weights, image_size, options)
    try:
        network = _LIBRARIES[library](request)
    except ImportError as error:
        raise BackboneError(
            f"backbone = {name!r} needs a package that is not installed here: {error}"
        ) from error
    if weights and files.weights is not None:
        shown = name, files.weights
        load_weights(network.model, weights, shown, network.head, network.convert)
    model, preprocessing = network.model, network.preprocessing
    if network.pooling:
        model = Pooled(model, network.pooling, network.tokens)
    elif options.pooling and library in ("torchvision", "open_clip"):
        raise BackboneError(
            f"features.pooling = {options.pooling!r}: {name!r} pools by itself; leave it out"
        )
    if image_size:
        preprocessing = replace(
            preprocessing, resize=image_size, crop=image_size, interpolation="bicubic"
        )
    preprocessing = replace(
        preprocessing,
        mean=options.mean or preprocessing.mean,
        std=options.std or preprocessing.std,
    )
    return replace(network, model=model.eval().requires_grad_(False), preprocessing=preprocessing)


def _pixels(name: str, image_size: int, device: torch.device) -> Backbone:
    grey = name == "pixels"
    preprocessing = Preprocessing(resize=image_size, crop=image_size, grey=grey)
    dim = image_size * image_size * (1 if grey else 3)

    def forward(batch: Tensor) -> Tensor:
        return (batch[:, :1] if grey else batch).flatten(1)

    return Backbone(
        name, dim, fingerprint_of(name, preprocessing, dim, {}), preprocessing, forward, device
    )


def frozen_forward(model: nn.Module, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function that computes features without gradients, on a CPU a few images at a time."""

    def run(batch: Tensor) -> Tensor:
        batch = batch.to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)
        output = model(batch)
        # CoCa's image tower also returns its tokens.
        features: Tensor = output[0] if isinstance(output, tuple) else output
        return features.float()

    def forward(batch: Tensor) -> Tensor:
        with torch.inference_mode():
            if device.type == "cuda":
                with torch.autocast("cuda", torch.bfloat16):
                    features = run(batch)
            else:
                features = torch.cat([run(part) for part in torch.split(batch, CPU_BATCH)])
        # A clone outside inference mode is a normal tensor; a tensor from inference mode cannot be
        # used in training.
        return features.clone()

    return forward


def _probe(name: str, forward: Callable[[Tensor], Tensor], size: int) -> int:
    try:
        features = forward(torch.zeros(1, 3, size, size))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, ValueError) as error:
        raise BackboneError(
            f"backbone {name!r} cannot take images of {size} px ({error}); set image-size to 0"
        ) from error
    if features.ndim == 3:
        raise BackboneError(
            f"backbone {name!r} returns {features.shape[1]} tokens of {features.shape[2]} numbers for an "
            "image, and no file says how to pool them; set features.pooling to 'cls' for the class token, "
            "'mean' for the mean of the patches, or 'both'"
        )
    if features.ndim != 2:
        raise BackboneError(
            f"backbone {name!r} returns shape {tuple(features.shape)} for one image, not (1, d)"
        )
    return features.shape[1]


def dimension_of(
    reference: str,
    forward: Callable[[Tensor], Tensor],
    preprocess: Callable[[Image.Image], Tensor],
    tolerance: float = ON_CPU,
) -> int:
    """The dimension of the features, from two images of noise.

    Args:
        reference: name of the backbone.
        forward: computes features.
        preprocess: makes its input of an image.
        tolerance: largest relative change of a feature by another image in the batch.

    Raises:
        BackboneError: if the features of an image depend on other images or on earlier calls, or if
            their dimension depends on the size of the image.
    """
    random = np.random.default_rng(0)
    images = [
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for width, height in PROBES
    ]
    inputs = [preprocess(image) for image in images]
    if inputs[0].shape != inputs[1].shape:
        raise BackboneError(
            f"backbone = {reference!r}: its transform returns {tuple(inputs[0].shape)} and "
            f"{tuple(inputs[1].shape)} for images of two sizes; it must resize all images to one "
            "size"
        )
    alone, together, again = (
        forward(inputs[0][None]),
        forward(torch.stack(inputs)),
        forward(inputs[0][None]),
    )
    if alone.ndim != 2 or together.shape != (2, alone.shape[1]):
        raise BackboneError(
            f"backbone = {reference!r} returns shape {tuple(together.shape)} for two images; it "
            "must be (2, d)"
        )
    size = float(alone.norm()) + 1e-12
    if max(float((other - alone).norm()) for other in (together[:1], again)) > tolerance * size:
        raise BackboneError(
            f"backbone = {reference!r}: the features of an image change with the other images or "
            "from call to call; they must depend on that image alone"
        )
    return alone.shape[1]


def fingerprint_of(
    name: object, preprocessing: object, dim: int, weights: Mapping[str, Tensor]
) -> str:
    """Hash of what decides features: `repr` of name and preprocessing, dimension, and the weights
    as 32-bit numbers.
    """
    digest = hashlib.sha256(repr((name, preprocessing, dim)).encode())
    for key in sorted(weights):
        value = weights[key].detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{key} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).numpy().data)
    return digest.hexdigest()


_LIBRARIES = {
    "torchvision": torchvision_network,
    "open_clip": open_clip_network,
    "timm": timm_network,
    "hf": hugging_face_network,
    "onnx": onnx_network,
}

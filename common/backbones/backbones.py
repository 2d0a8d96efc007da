"""Frozen feature extractors (backbones) by name, each with a fingerprint that identifies it."""

from __future__ import annotations

import difflib
import hashlib
import logging
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BackboneError
from ..extras import needed_for
from ..models.devices import pick_device
from .backbone_names import FORMS
from .preprocessing import OwnTransform, Preprocessing

# On a CPU, the activations of eight images fit into its caches: 2 to 3 times the measured rate of
# batches of 64.
CPU_BATCH = 8


@dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen feature extractor: `preprocess` returns (c, h, w), `forward` maps (b, c, h, w) to
    (b, dim) float32.

    fingerprint: hash of name, weights, preprocessing and output dimension; independent of device,
    file and precision of the stored weights. dim: 0 for pixels of images that keep their size; the
    images then determine it, and `fingerprint_at` tells images of one size from those of another.
    """

    name: str
    dim: int
    fingerprint: str
    preprocess: Preprocessing | OwnTransform
    forward: Callable[[Tensor], Tensor]
    device: torch.device

    def fingerprint_at(self, dimension: int) -> str:
        """The fingerprint of features of this dimension."""
        return self.fingerprint if self.dim else fingerprint_of(self.fingerprint, "", dimension, {})


@dataclass(frozen=True, eq=False)
class LoadedNetwork:
    """A model without its classifier, its preprocessing, and name prefixes to select its weights in
    a file.
    """

    model: nn.Module
    preprocessing: Preprocessing
    head: tuple[str, ...] = ()
    prefix: str = ""


def load_backbone(
    name: str, weights_path: str = "", image_size: int = 0, device: str = "auto"
) -> Backbone:
    """Build a frozen backbone in evaluation mode.

    name: `pixels` (grey levels / 255, flattened), `pixels:rgb`, `torchvision:MODEL` (what enters
        the last linear layer), `open_clip:MODEL/TAG` (projected image features, not normalised) or
        `timm:MODEL` (pooled features).
    weights_path: safetensors, or a torch file of plain tensors; empty to download the weights for
    the name. image_size: 0 for the model's own preprocessing. Otherwise the shorter side of the
    whole image is resized to it
        (bicubic) and the centre square kept, without the margin that published presets cut off.

    Raises BackboneError for an unknown name, missing or unsuitable weights, or an unsupported image
    size; PackageError for a library that is not installed; ConfigError for a device that does not
    exist.
    """
    target = torch.device(pick_device(device))
    if name in ("pixels", "pixels:rgb"):
        return _pixels(name, image_size, target)
    network = load_network(name, weights_path, image_size)
    model, preprocessing = network.model, network.preprocessing
    fingerprint_weights = dict(kept_weights(model.state_dict()))
    try:
        forward = frozen_forward(model.to(memory_format=torch.channels_last).to(target), target)
        dim = _probe(name, forward, preprocessing.crop)
    except torch.OutOfMemoryError as error:
        raise BackboneError(
            f"backbone {name!r} does not fit into the free memory of the GPU "
            f"({_first_sentence(error)}); free memory on it, or set device to another GPU or 'cpu'"
        ) from error
    return Backbone(
        name,
        dim,
        fingerprint_of(name, preprocessing, dim, fingerprint_weights),
        preprocessing,
        forward,
        target,
    )


def load_network(name: str, weights_path: str = "", image_size: int = 0) -> LoadedNetwork:
    """The module of a backbone from a library, frozen, and its preprocessing. Raises BackboneError,
    PackageError.
    """
    library, _, model_name = name.partition(":")
    if library not in _LIBRARIES or not model_name:
        raise BackboneError(f"backbone = {name!r} is unknown; use {FORMS}")
    try:
        network = _LIBRARIES[library](model_name, pretrained=not weights_path)
    except ImportError as error:
        raise BackboneError(
            f"backbone = {name!r} needs a package that is not installed here: {error}"
        ) from error
    if weights_path:
        _load_weights(network, name, Path(weights_path).expanduser())
    preprocessing = network.preprocessing
    if image_size:
        preprocessing = replace(
            preprocessing, resize=image_size, crop=image_size, interpolation="bicubic"
        )
    return replace(
        network, model=network.model.eval().requires_grad_(False), preprocessing=preprocessing
    )


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
    if features.ndim != 2:
        raise BackboneError(
            f"backbone {name!r} returns shape {tuple(features.shape)} for one image, not (1, d)"
        )
    return features.shape[1]


def kept_weights(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Drop the entries that only training uses."""
    return {key: value for key, value in weights.items() if not key.endswith("num_batches_tracked")}


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


def _load_weights(network: LoadedNetwork, name: str, path: Path) -> None:
    given = read_weights(path)
    for prefix in ("module.", network.prefix):
        stripped = {
            key.removeprefix(prefix): value
            for key, value in given.items()
            if key.startswith(prefix)
        }
        given = stripped or given
    given = {
        key: value for key, value in kept_weights(given).items() if not key.startswith(network.head)
    }
    expected = kept_weights(network.model.state_dict())
    shared = sorted(expected.keys() & given.keys())
    # Numbers are looked at where the shape fits: another one may state any number of them.
    fit = [key for key in shared if expected[key].shape == given[key].shape]
    problems = {
        "missing": sorted(expected.keys() - given.keys()),
        "unexpected": sorted(given.keys() - expected.keys()),
        "of another shape": [key for key in shared if key not in fit],
        "without plain, finite numbers": [key for key in fit if not _is_plain(given[key])],
    }
    mismatches = [
        f"{len(keys)} {what} ({', '.join(keys[:3])})" for what, keys in problems.items() if keys
    ]
    if mismatches:
        raise BackboneError(
            f"the weights in '{path}' do not fit {name!r}: {'; '.join(mismatches)}; give its own "
            "file"
        )
    # Some modules convert weights of earlier versions of themselves. These have the names and shapes
    # of the current one, and safetensors keep no versions.
    versioned = OrderedDict(given)
    versioned._metadata = getattr(network.model.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
    network.model.load_state_dict(versioned, strict=False)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has plain finite numbers: not sparse, quantised or without memory."""
    plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_meta)
    return plain and not tensor.is_complex() and bool(tensor.isfinite().all())


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of weights, by name. Raises BackboneError for a file without them."""
    if not path.is_file():
        raise BackboneError(
            f"weights-path = '{path}': no such file; give a .safetensors file or a torch state dict"
        )
    content: object
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content = load_file(path)
        else:
            _check_archive(path)
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # By its name: nothing here may unpickle, so nothing imports pickle.
        if type(error).__name__ == "UnpicklingError":
            raise BackboneError(
                f"weights-path = '{path}' is a pickle of more than tensors, or none at all, and "
                "reading it could run any code; load it where you trust it, and save "
                "model.state_dict() with torch.save, or as safetensors"
            ) from error
        raise BackboneError(
            f"weights-path = '{path}' is no readable safetensors or torch file: "
            f"{_first_sentence(error)}"
        ) from error
    if isinstance(content, dict):
        content = content.get("state_dict", content)
    if not isinstance(content, dict) or not all(
        isinstance(value, Tensor) for value in content.values()
    ):
        raise BackboneError(
            f"weights-path = '{path}' holds no state dict; save model.state_dict() into it"
        )
    return content


def _check_archive(path: Path) -> None:
    """Raise ValueError for a torch file that takes more memory than it has bytes.

    torch.save stores its members as they are, but torch.load also unpacks compressed ones, and reads
    one that is listed twice, twice.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    stored = all(each.compress_type == zipfile.ZIP_STORED for each in members)
    if not stored or sum(each.file_size for each in members) > path.stat().st_size:
        raise ValueError("its tensors are packed and larger than the file; save it by torch.save")


def _first_sentence(error: Exception) -> str:
    """The first whole sentence of an error in one line, which may go over several in its text."""
    return " ".join(str(error).split()).partition(". ")[0].rstrip(".")


def _no_download(name: str, error: Exception) -> BackboneError:
    return BackboneError(
        f"cannot fetch the weights of {name!r} ({_first_sentence(error)}); on a machine without internet "
        "put them in a file and name it in weights-path; a hospital names it in its node-config"
    )


def published_weights(model_name: str) -> Any:
    """The weights of a torchvision model that are used here, as torchvision describes them.

    Raises PackageError without torchvision, ValueError for a model that it does not have.
    """
    with needed_for(f"backbone = 'torchvision:{model_name}'"):
        from torchvision import models

    published = models.get_model_weights(model_name)
    first = "IMAGENET1K_V1"
    return published[first] if first in published.__members__ else published.DEFAULT


def _torchvision(model_name: str, *, pretrained: bool) -> LoadedNetwork:
    with needed_for(f"backbone = 'torchvision:{model_name}'"):
        from torchvision import models

    known = models.list_models(module=models)
    if model_name not in known:
        raise BackboneError(
            f"torchvision has no classification model {model_name!r}; it has {', '.join(known)}"
        )
    weights = published_weights(model_name)
    try:
        model: nn.Module = models.get_model(model_name, weights=weights if pretrained else None)
    except (OSError, RuntimeError) as error:
        raise _no_download(f"torchvision:{model_name}", error) from error
    head = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not head:
        raise BackboneError(
            f"torchvision model {model_name!r} has no linear layer at its end; choose another"
        )
    model.set_submodule(head[-1], nn.Identity())
    preset = weights.transforms()
    preprocessing = Preprocessing(
        max(preset.resize_size[0], preset.crop_size[0]),
        preset.crop_size[0],
        preset.interpolation.value,
        tuple(preset.mean),
        tuple(preset.std),
    )
    return LoadedNetwork(model, preprocessing, head=(head[-1] + ".",))


def _open_clip(model_name: str, *, pretrained: bool) -> LoadedNetwork:
    with needed_for(f"backbone = 'open_clip:{model_name}'"):
        import open_clip

    architecture, _, tag = model_name.partition("/")
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    if architecture not in open_clip.list_models() or tag not in tags:
        known = (
            f"its tags are {', '.join(tags)}"
            if tags
            else f"models are {', '.join(open_clip.list_models())}"
        )
        raise BackboneError(
            f"open_clip has no {model_name!r}; write MODEL/TAG, such as ViT-B-32/openai; {known}"
        )
    published = open_clip.get_pretrained_cfg(architecture, tag)
    # open_clip warns about random weights; the file's weights replace them right after.
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        clip = open_clip.create_model(
            architecture,
            pretrained=tag if pretrained else None,
            force_quick_gelu=bool(published.get("quick_gelu", False)),
            force_preprocess_cfg={
                k: published[k]
                for k in ("mean", "std", "interpolation", "resize_mode")
                if k in published
            },
            pretrained_text=False,
        )
    except (OSError, RuntimeError) as error:
        raise _no_download(f"open_clip:{model_name}", error) from error
    finally:
        logging.disable(level)
    config = open_clip.get_model_preprocess_cfg(clip)
    size = config["size"] if isinstance(config["size"], int) else config["size"][0]
    squash = config["resize_mode"] == "squash"
    preprocessing = Preprocessing(
        size, size, config["interpolation"], tuple(config["mean"]), tuple(config["std"]), squash
    )
    return LoadedNetwork(clip.visual, preprocessing, prefix="visual.")


def _timm(model_name: str, *, pretrained: bool) -> LoadedNetwork:
    with needed_for(f"backbone = 'timm:{model_name}'"):
        import timm

    if not timm.is_model(model_name):
        close = difflib.get_close_matches(model_name, timm.list_models(), n=5, cutoff=0.3)
        raise BackboneError(
            f"timm has no model {model_name!r}; similar names: {', '.join(close) or 'none'}"
        )
    try:
        model: nn.Module = timm.create_model(model_name, pretrained=pretrained, num_classes=0)
    except (OSError, RuntimeError) as error:
        raise _no_download(f"timm:{model_name}", error) from error
    config = timm.data.resolve_model_data_config(model)
    crop = config["input_size"][-1]
    resize = max(crop, int(crop / config["crop_pct"]))
    squash = config.get("crop_mode") == "squash"
    preprocessing = Preprocessing(
        resize, crop, config["interpolation"], tuple(config["mean"]), tuple(config["std"]), squash
    )
    classifier = getattr(model, "default_cfg", {}).get("classifier") or ()
    heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    return LoadedNetwork(model, preprocessing, head=tuple(head + "." for head in heads))


_LIBRARIES = {"torchvision": _torchvision, "open_clip": _open_clip, "timm": _timm}

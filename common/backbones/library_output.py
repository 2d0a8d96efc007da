"""The features that a backbone's own library computes from the same files: what `site doctor` compares
with.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BackboneError
from ..extras import needed_for
from ..machine import available_memory
from .backbones import ON_CPU, ON_GPU, Backbone
from .libraries import quiet
from .networks import BackboneOptions
from .weight_files import Files, files_of, first_sentence

# A second copy of the weights, and what a library needs to read it.
COPIES = 3
LIBRARIES = {"timm": "timm", "open_clip": "open_clip", "hf": "transformers"}


def compare_with_library(backbone: Backbone, pixels: Tensor) -> tuple[str, bool | None] | None:
    """Compare a backbone's features with those of its own library, from the same files and pixels.

    Args:
        backbone: that is loaded.
        pixels: of one image, as the backbone prepares them, (c, h, w).

    Returns:
        The comparison in words, or why there is none, and whether features differ by no more than
        rounding, None where they were not compared. None for a backbone that no library describes by
        files.
    """
    kind = backbone.name.partition(":")[0]
    library = LIBRARIES.get(kind, "")
    try:
        files = (
            files_of(backbone.name, backbone.weights_path, download=False) if library else Files()
        )
    except BackboneError:
        return None
    if files.folder is None or files.weights is None or not backbone.built:
        return None
    if why := _obstacle(library, files.weights, backbone.options):
        return f"not compared with {library}: {why}", None
    try:
        with torch.inference_mode(), quiet(), _offline():
            wanted = _OF_LIBRARY[kind](files.folder)(pixels[None]).float().flatten()
    # Libraries raise almost anything for files that need arguments which no file states.
    except Exception as error:
        why = f"it does not load these files by itself ({type(error).__name__}: {first_sentence(error)})"
        return f"not compared with {library}: {why[:200]}", None
    found = backbone.forward(pixels[None].to(backbone.device)).float().cpu().flatten()
    if found.shape != wanted.shape:
        return f"{library} computes {len(wanted)} features of an image", False
    apart = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))
    allowed = ON_GPU if backbone.device.type == "cuda" else ON_CPU
    words = f"features of an image differ from those of {library} by {apart:.1g} of the largest"
    return words, apart <= allowed


@contextmanager
def _offline() -> Iterator[None]:
    """The hub is not asked for what a configuration names besides its own files, such as a text tower."""
    with needed_for("a comparison with a library"):
        from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _obstacle(library: str, weights: Path, options: BackboneOptions) -> str:
    if options.pooling:
        return f"features.pooling = {options.pooling!r} is the run's own"
    try:
        importlib.import_module(library)
    except ImportError:
        return "it is not installed here"
    if COPIES * weights.stat().st_size > available_memory():
        return f"{COPIES} copies of the weights do not fit into the free memory"
    return ""


def _of_timm(folder: Path) -> Callable[[Tensor], Tensor]:
    with needed_for("a comparison with timm"):
        import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0).eval()
    return partial(_called, model)


def _of_open_clip(folder: Path) -> Callable[[Tensor], Tensor]:
    with needed_for("a comparison with open_clip"):
        import open_clip

    model = open_clip.create_model(f"local-dir:{folder}", pretrained_hf=False)
    return partial(_called, model.eval().visual)


def _called(model: Any, pixels: Tensor) -> Tensor:
    output = model(pixels)
    features: Tensor = output[0] if isinstance(output, tuple) else output
    return features


def _of_transformers(folder: Path) -> Callable[[Tensor], Tensor]:
    # It is no dependency: `_obstacle` has imported it where it is installed.
    transformers: Any = sys.modules[LIBRARIES["hf"]]
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    # Of a model with a text tower, the image tower.
    tower = getattr(model, "vision_model", model)

    def features(pixels: Tensor) -> Tensor:
        output = tower(pixels)
        of_tower: Tensor = (
            output.pooler_output
            if "siglip" in str(model.config.model_type)
            else output.last_hidden_state[:, 0]
        )
        return of_tower

    return features


_OF_LIBRARY: dict[str, Callable[[Path], Callable[[Tensor], Tensor]]] = {
    "timm": _of_timm,
    "open_clip": _of_open_clip,
    "hf": _of_transformers,
}

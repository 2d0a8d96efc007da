"""Safetensors files of a learned generator and of its synthetic embeddings, each with a manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, FedSurrogateError, SurrogateError
from ..identity import distinct_names
from ..models.generators import Generator
from ..privacy.mechanism import NOT_COVERED
from ..run import stored_run
from ..settings.base import Scalar
from ..surrogates.surrogates import Header

FORMAT = 1
NORMALISATION = (
    "every embedding x of a real image is divided by its norm |x|; synthetic "
    "embeddings imitate these"
)


def pack_generator(generator: Generator, rounds: int = 0) -> bytes:
    """A generator as a 32-bit safetensors file.

    Args:
        generator: that was learned.
        rounds: the number of requested rounds, if not all; 0 for all.

    Returns:
        The content of the file.
    """
    from safetensors.torch import save

    # The settings that determine the shape and the privacy claim, as a flat run-config.
    chosen = ("method", "seed", "epsilon", "delta", "dpcvae.")
    settings = {
        key: value for key, value in generator.run.settings.flat().items() if key.startswith(chosen)
    }
    manifest = manifest_of(generator, rounds) | {
        "format": FORMAT,
        "kind": "generator",
        "settings": settings,
    }
    tensors = {name: tensor.float().contiguous() for name, tensor in generator.tensors.items()}
    content: bytes = save(tensors, {"manifest": json.dumps(manifest)})
    return content


def read_generator(file: Path) -> Generator:
    """Read a file of `pack_generator`.

    Raises:
        DataError: for any other file.
    """
    manifest = _manifest(file, "generator")
    try:
        run = stored_run(_settings_in(manifest))
        header = Header(
            run.settings.method,
            _text(manifest, "run"),
            "coordinator",
            _text(manifest, "fingerprint"),
            _classes(manifest),
        )
        return Generator(header, run, _tensors(file)).checked()
    except (FedSurrogateError, ValueError) as error:
        raise DataError(f"{file} holds no generator that this version can use ({error})") from None


def manifest_of(generator: Generator, rounds: int = 0) -> dict[str, Any]:
    """The manifest for all output of a generator: its origin and its differential privacy.

    Args:
        generator: that was learned.
        rounds: as in `pack_generator`.
    """
    run = generator.run
    claim = run.mechanism
    privacy = None
    if claim is not None:
        privacy = {
            "epsilon": claim.epsilon_after(rounds) if rounds else claim.epsilon,
            "delta": claim.delta,
            "unit": claim.unit,
            "relation": "add or remove one record of one site's training data",
            "mechanism": claim.name,
            "not_covered": list(NOT_COVERED),
        }
    return {
        "method": run.settings.method,
        "run": run.digest,
        "fingerprint": generator.header.fingerprint,
        "classes": list(generator.header.classes),
        "normalisation": NORMALISATION,
        "privacy": privacy,
    }


@dataclass(frozen=True)
class SyntheticSet:
    """Synthetic embeddings.

    Attributes:
        features: embeddings (n, d) of norm about one.
        labels: (n,), indices into `classes`.
        classes: class names.
        fingerprint: of the backbone.
        manifest: of the file.
    """

    features: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    fingerprint: str
    manifest: dict[str, Any]


def write_synthetic_set(
    file: Path, generator: Generator, labels: Tensor, seed: int, manifest: dict[str, Any]
) -> Tensor:
    """Draw embeddings for labels and write both, embeddings at 16 bits.

    Args:
        file: that is written.
        generator: that was learned.
        labels: (n,).
        seed: of the draws.
        manifest: of the generator, see `manifest_of`.

    Returns:
        The embeddings (n, d).
    """
    from safetensors.torch import save_file

    features = generator.draw(labels, torch.Generator().manual_seed(seed))
    counts = torch.bincount(labels, minlength=len(generator.header.classes)).tolist()
    described = manifest | {
        "format": FORMAT,
        "kind": "synthetic embeddings",
        "seed": seed,
        "records": dict(zip(generator.header.classes, counts, strict=True)),
    }
    metadata = {"manifest": json.dumps(described), "fingerprint": generator.header.fingerprint}
    metadata["classes"] = ",".join(generator.header.classes)
    save_file({"x": features.half().contiguous(), "y": labels.contiguous()}, file, metadata)
    return features


def read_synthetic_set(file: Path) -> SyntheticSet:
    """Read a file of `write_synthetic_set`.

    Raises:
        DataError: for any other file.
    """
    manifest, tensors = _manifest(file, "synthetic embeddings"), _tensors(file)
    try:
        classes, fingerprint = _classes(manifest), _text(manifest, "fingerprint")
    except ValueError as error:
        raise DataError(f"{file} holds no synthetic embeddings ({error})") from None
    if {"x": torch.float16, "y": torch.int64} != {n: each.dtype for n, each in tensors.items()}:
        raise DataError(f"{file}: x must hold numbers of 16 bits, and y whole numbers of 64 bits")
    features, labels = tensors["x"].float(), tensors["y"]
    if features.ndim != 2 or labels.shape != features.shape[:1] or not features.isfinite().all():
        raise DataError(
            f"{file}: x of shape {tuple(features.shape)} and y of {tuple(labels.shape)}; must be "
            "(n, d), finite, and (n,)"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise DataError(f"{file}: labels beyond its {len(classes)} classes")
    return SyntheticSet(features, labels, classes, fingerprint, manifest)


def read_manifest(file: Path) -> dict[str, Any]:
    """The manifest of a generator's file. Raises DataError."""
    return _manifest(file, "generator")


def _manifest(file: Path, kind: str) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as content:
            manifest: dict[str, Any] = json.loads((content.metadata() or {})["manifest"])
        if not isinstance(manifest, dict):
            raise ValueError("not an object")
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is no file of a {kind} ({type(error).__name__})") from None
    if (manifest.get("format"), manifest.get("kind")) != (FORMAT, kind):
        raise DataError(
            f"{file} holds {str(manifest.get('kind'))[:40]!r} of format "
            f"{str(manifest.get('format'))[:20]}, not a {kind}"
        )
    try:
        _classes(manifest)
    except (SurrogateError, ValueError) as error:
        raise DataError(f"{file} is no file of a {kind} ({error})") from None
    return manifest


def _tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a file. Raises DataError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(file)
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (OSError, RuntimeError, TypeError, SafetensorError) as error:
        raise DataError(f"{file} holds tensors that cannot be read ({str(error)[:60]})") from None
    return tensors


def _settings_in(manifest: dict[str, Any]) -> dict[str, Scalar]:
    """The settings in a manifest. Raises ValueError for others than texts and numbers."""
    settings = manifest.get("settings")
    if not isinstance(settings, dict) or not all(isinstance(v, Scalar) for v in settings.values()):
        raise ValueError("its settings are no texts and numbers by key")
    return settings


def _text(manifest: dict[str, Any], key: str) -> str:
    """A text in a manifest. Raises ValueError."""
    if not isinstance(text := manifest.get(key), str):
        raise ValueError(f"its manifest has no text {key!r}")
    return text


def _classes(manifest: dict[str, Any]) -> tuple[str, ...]:
    """The class names in a manifest. Raises ValueError or SurrogateError."""
    classes = manifest.get("classes")
    if not isinstance(classes, list) or not classes:
        raise ValueError("its classes are no list of names")
    return distinct_names(classes, "class")

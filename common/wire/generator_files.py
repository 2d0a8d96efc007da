"""Safetensors files of a learned generator and of its synthetic embeddings, each with a manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import DataError, FedSurrogateError
from common.models.generators import Generator
from common.privacy.mechanism import NOT_COVERED
from common.run import Run, parse_run
from common.surrogates.surrogates import Header

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

    manifest = manifest_of(generator, rounds) | {
        "format": FORMAT,
        "kind": "generator",
        "settings": _settings(generator.run),
    }
    tensors = {name: tensor.float().contiguous() for name, tensor in generator.tensors.items()}
    content: bytes = save(tensors, {"manifest": json.dumps(manifest)})
    return content


def read_generator(file: Path) -> Generator:
    """Read a file of `pack_generator`.

    Raises:
        DataError: for any other file.
    """
    from safetensors.torch import load_file

    manifest = _manifest(file, "generator")
    try:
        run = parse_run(manifest["settings"])
        header = Header(
            run.settings.method,
            manifest["run"],
            "coordinator",
            manifest["fingerprint"],
            tuple(manifest["classes"]),
        )
        return Generator(header, run, load_file(file)).checked()
    except (FedSurrogateError, KeyError, TypeError) as error:
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
    from safetensors.torch import load_file

    manifest, tensors = _manifest(file, "synthetic embeddings"), load_file(file)
    features, labels, classes = tensors["x"].float(), tensors["y"], tuple(manifest["classes"])
    if features.ndim != 2 or labels.shape != features.shape[:1] or not features.isfinite().all():
        raise DataError(
            f"{file}: x of shape {tuple(features.shape)} and y of {tuple(labels.shape)}; must be "
            "(n, d), finite, and (n,)"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise DataError(f"{file}: labels beyond its {len(classes)} classes")
    return SyntheticSet(features, labels, classes, manifest["fingerprint"], manifest)


def read_manifest(file: Path) -> dict[str, Any]:
    """The manifest of a generator's file. Raises DataError."""
    return _manifest(file, "generator")


def _manifest(file: Path, kind: str) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as content:
            manifest: dict[str, Any] = json.loads((content.metadata() or {})["manifest"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"{file} is no file of a {kind} ({type(error).__name__})") from None
    if (manifest.get("format"), manifest.get("kind")) != (FORMAT, kind):
        raise DataError(
            f"{file} holds {manifest.get('kind')!r} of format {manifest.get('format')}, not a "
            f"{kind}"
        )
    return manifest


def _settings(run: Run) -> dict[str, Any]:
    """The settings that determine a generator's shape and privacy claim, as a flat run-config."""
    section = run.settings.dpcvae.model_dump(by_alias=True)
    return {
        "method": run.settings.method,
        "seed": run.settings.seed,
        "epsilon": run.settings.epsilon,
        "delta": run.settings.delta,
    } | {f"dpcvae.{key}": value for key, value in section.items()}

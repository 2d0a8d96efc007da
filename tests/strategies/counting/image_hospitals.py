"""Hospitals with X-rays as DICOM files: upright, on their side, inverted, or empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.dicom_files import image, save

Array = np.ndarray[Any, np.dtype[Any]]
CLASSES = ("normal", "pneumonia")
MAKERS = ("Philips Medical Systems", "SIEMENS", "FUJIFILM Corporation", "Acme Imaging")
POLICY = "epsilon-per-run = 8.0\nepsilon-total = 80.0\n"


def drawn(count: int, seed: int) -> Array:
    """Drawings of a chest: two dark lungs beside a bright spine, with differences from one to the next.

    Args:
        count: n.
        seed: of the differences.

    Returns:
        (n, 48, 48) uint8.
    """
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[-1:1:48j, -1:1:48j]
    chests = []
    for _ in range(count):
        wide, high, top = generator.normal((0.3, 0.65, 0.1), 0.03)
        lungs = sum(
            np.exp(-(((x - s) / wide) ** 2 + ((y + top) / high) ** 4)) for s in (-0.45, 0.45)
        )
        shade = 185 + generator.normal(0, 12) - 110 * lungs + 25 * (y > 0.7)
        chests.append(shade + generator.normal(0, 4, shade.shape))
    return np.clip(np.stack(chests), 0, 255).astype(np.uint8)


def write_dicom(folder: Path, pixels: Array, labels: Array, **tags: Any) -> Path:
    """Images as DICOM files in folders of classes, each of its own patient."""
    for number, (own, label) in enumerate(zip(pixels, labels, strict=True)):
        stated = {"PatientID": f"{folder.name}{number}", "Modality": "DX"} | tags
        save(
            folder / CLASSES[label] / f"{number:04}.dcm", image(np.ascontiguousarray(own), **stated)
        )
    return folder


def hospitals(home: Path, chests: Array, labels: Array, side: int = 96) -> list[dict[str, Any]]:
    """Node-configs of four hospitals: north and west as they should be, south with images on their
    side, east with images whose header says the opposite of their black and white.

    Args:
        home: folder for all files.
        chests: upright images, (n, h, w) uint8.
        labels: of these, 0 or 1, (n,).
        side: pixels of the images in the files of most hospitals.
    """
    nodes = []
    for number, name in enumerate(("north", "south", "east", "west")):
        wide = side if name != "west" else 2 * side
        own = np.stack([Image.fromarray(each).resize((wide, wide)) for each in chests[number::4]])
        tags: dict[str, Any] = {
            "Manufacturer": MAKERS[number],
            "PixelSpacing": [0.143, 0.143],
            "ViewPosition": "PA" if number % 2 else "AP",
            "PatientOrientation": ["L", "F"],
        }
        if name == "south":
            # A quarter to the right: what was at the left of a row is at the top now.
            own, tags["PatientOrientation"] = np.rot90(own, -1, (1, 2)), ["H", "L"]
        if name == "east":
            tags["PhotometricInterpretation"] = "MONOCHROME1"
        if name == "west":
            own = own.astype(np.uint16) * 16
            tags |= {"BitsStored": 12, "WindowCenter": 2048, "WindowWidth": 4096}
        (home / f"{name}.toml").write_text(POLICY)
        nodes.append(
            {
                "site": name,
                "data": "dicom",
                "data-dir": str(write_dicom(home / name, own, labels[number::4], **tags)),
                "policy": str(home / f"{name}.toml"),
                "state-dir": str(home / f"{name}-state"),
                "cache-dir": str(home / f"{name}-cache"),
                "check-log-dir": str(home / f"{name}-witness"),
            }
        )
    return nodes

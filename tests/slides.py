"""Folders of slides as CLAM, TRIDENT and STAMP write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch

TOOLS = ("clam", "clam-pt", "trident", "stamp")
MODEL = "uni_v1"


@dataclass(frozen=True)
class Slide:
    """A slide with the features of its patches, (n, d)."""

    name: str
    label: str
    patient: str
    patches: np.ndarray


def slides(count: int, seed: int, dimension: int = 6, prefix: str = "s") -> list[Slide]:
    """Slides of two classes, two of each patient, whose patches differ in their mean."""
    draw = np.random.default_rng(seed)
    found = []
    for at in range(count):
        label = at // 2 % 2
        patches = draw.normal(size=(int(draw.integers(1, 12)), dimension)).astype(np.float32)
        patches[:, label] += 2
        name = f"{prefix}-{at:03}.A"
        found.append(Slide(name, ("benign", "tumour")[label], f"{prefix}-p{at // 2}", patches))
    return found


def write(folder: Path, tool: str, found: Sequence[Slide], model: str = MODEL) -> None:
    """Write the files of a tool and a table beside them, with the tool's own names of columns."""
    folder.mkdir(parents=True, exist_ok=True)
    key = {"trident": "slide", "stamp": "FILENAME"}.get(tool, "slide_id")
    rows = [f"{key},label,case"]
    for slide in found:
        write_one(folder, tool, slide, model)
        # A list of TRIDENT has the names of scans.
        end = {"trident": ".svs", "stamp": ".h5"}.get(tool, "")
        rows.append(f"{slide.name}{end},{slide.label},{slide.patient}")
    (folder / "cases.csv").write_text("\n".join(rows) + "\n")


def write_one(folder: Path, tool: str, slide: Slide, model: str = MODEL) -> Path:
    x, n = slide.patches, len(slide.patches)
    coords = np.zeros((n, 2), np.int64)
    below = {"clam": "h5_files", "clam-pt": "pt_files", "trident": f"features_{model}"}.get(tool)
    file = folder / (below or ".") / f"{slide.name}.{'pt' if tool == 'clam-pt' else 'h5'}"
    file.parent.mkdir(exist_ok=True)
    if tool == "clam-pt":
        torch.save(torch.from_numpy(x), file)
        return file
    with h5py.File(file, "w") as content:
        if tool == "clam":
            # It appends batch by batch.
            own = content.create_dataset(
                "features", x.shape, "f4", maxshape=(None, x.shape[1]), chunks=(1, x.shape[1])
            )
            own[...] = x
            content["coords"] = coords
        elif tool == "trident":
            content["features"] = x[None]
            content["features"].attrs["name"] = model
            content["coords"] = coords[None]
        else:
            content["feats"] = x.astype(np.float16)
            content["coords"] = coords
            content.attrs["extractor"] = model
    return file

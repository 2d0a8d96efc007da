"""New images without labels: a folder at any depth, a table of paths, or DICOM files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from PIL import Image

from fedsurrogate.client_app.datasets.dataset import Dataset
from fedsurrogate.client_app.datasets.dicom_files import is_dicom_file
from fedsurrogate.client_app.datasets.image_folders import IMAGE_SUFFIXES, find_table
from fedsurrogate.client_app.datasets.images import open_rgb
from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.names import name_or_blank
from fedsurrogate.client_app.datasets.one_record import attempt, is_file
from fedsurrogate.client_app.datasets.readers import listing, require_columns
from fedsurrogate.client_app.datasets.tables import read_table
from fedsurrogate.client_app.node_config import Frames
from fedsurrogate.common.errors import DataError

Kind = Literal["auto", "imagefolder", "dicom"]
PATIENT, ISSUER = "patient", "issuer"


@dataclass(frozen=True, eq=False)
class Inputs:
    """Images to classify.

    Attributes:
        root: folder of the images.
        dicom: whether they are DICOM files.
        names: the path of each below `root`.
        columns: other facts of each, such as its patient.
        frames: of each DICOM file, the image that is taken; -1 for a file of several images that
            the site refuses.
    """

    root: Path
    dicom: bool
    names: Sequence[str]
    columns: Mapping[str, Sequence[str]]
    frames: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.names)

    def dataset(self, rows: Sequence[int]) -> Dataset:
        """These rows, for feature extraction."""
        none = torch.full((len(rows),), -1)

        def opened(index: int, shortest: int) -> Image.Image:
            return self._open(rows[index], shortest)

        return Dataset(
            "predict", none, (), none >= 0, "", opener=opened, place=lambda i: self.names[rows[i]]
        )

    def _open(self, row: int, shortest: int) -> Image.Image:
        file = self.root / self.names[row]
        if not self.dicom:
            return open_rgb(file, shortest)
        from fedsurrogate.client_app.datasets.dicom_pixels import open_dicom

        if self.frames[row] < 0:
            raise DataError(
                'it holds several images; set dicom-frames in the node-config to "first" or '
                '"middle", to take one of them'
            )
        return open_dicom(file, self.frames[row])


def find_inputs(
    folder: str, kind: Kind = "auto", patient_column: str = "", frames: Frames = "refuse"
) -> Inputs:
    """The images below a folder.

    Args:
        folder: with the images.
        kind: "auto" takes a table or image files if there are any, otherwise DICOM files.
        patient_column: of a table; empty for none.
        frames: which frame of a DICOM file with several.

    Raises:
        DataError: when there is none.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise DataError(f"--data-dir {folder!r}: no such folder; give the folder of the new images")
    if kind != "dicom":
        inputs = _from_table(root, patient_column) or _from_folder(root)
        if len(inputs) or kind == "imagefolder":
            return _some(inputs, "images")
    return _some(_from_dicom(root, frames), "DICOM images")


def _some(inputs: Inputs, what: str) -> Inputs:
    if not len(inputs):
        raise DataError(f"no {what} in '{inputs.root}'; it has {listing(inputs.root)}")
    return inputs


def _from_table(root: Path, patient_column: str) -> Inputs | None:
    _, table = find_table(root, "")
    if table is None:
        return None
    columns = read_table(table, ("path", patient_column), LeftOut())
    if "path" not in columns and not patient_column:
        return None
    require_columns(table, [name for name in ("path", patient_column) if name], list(columns))
    for row, path in enumerate(columns["path"]):
        if (
            not isinstance(path, str)
            or not path
            or Path(path).is_absolute()
            or ".." in Path(path).parts
        ):
            raise DataError(
                f"row {row + 1} of '{table}' has no path inside '{root}'; correct it or remove it"
            )
    names = list(dict.fromkeys(columns["path"]))
    if not patient_column:
        return Inputs(root, False, names, {})
    patients = dict(zip(columns["path"], map(name_or_blank, columns[patient_column]), strict=True))
    return Inputs(root, False, names, {PATIENT: [patients[name] for name in names]})


def _from_folder(root: Path) -> Inputs:
    """Image files, and the DICOM files among them: these have rows that say why they are not read."""
    files = [path for path in root.rglob("*") if is_file(path)]
    images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
    if images:
        others = set(files).difference(images)
        images += [path for path in others if attempt(partial(is_dicom_file, path)) is True]
    return Inputs(root, False, sorted(path.relative_to(root).as_posix() for path in images), {})


def _from_dicom(root: Path, frames: Frames) -> Inputs:
    from fedsurrogate.client_app.datasets.dicom import scan_images

    images = scan_images(root, sorted(path for path in root.rglob("*") if is_file(path)), LeftOut())
    columns = {
        key: [image.keys[key] for image in images] for key in ("SOPInstanceUID", "StudyInstanceUID")
    }
    columns[PATIENT] = [image.keys["PatientID"] for image in images]
    columns[ISSUER] = [image.issuer for image in images]
    taken = [
        0
        if image.frames == 1 or frames == "first"
        else image.frames // 2
        if frames == "middle"
        else -1
        for image in images
    ]
    return Inputs(root, True, [image.keys["path"] for image in images], columns, taken)

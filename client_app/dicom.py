"""DICOM studies as records: headers, read once without pixels, tell labels and patients; pixels are read when asked for."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from client_app.dicom_pixels import open_dicom
from client_app.image_folders import find_table, in_class_folders, read_table, split_of
from client_app.readers import (
    Records,
    content_key,
    listing,
    patient_names,
    refuse_columns,
    require_columns,
    some,
)
from client_app.settings import Frames
from common.errors import DataError

LOG = logging.getLogger("fedsurrogate.site")
# By which a table may name images, the most specific first.
KEYS = ("path", "SOPInstanceUID", "StudyInstanceUID", "AccessionNumber", "PatientID")
TAGS = (*KEYS[1:], "IssuerOfPatientID", "Rows", "Columns", "NumberOfFrames", "BurnedInAnnotation")
# The extra "dicom" of this project.
DECODERS = "pip install pylibjpeg pylibjpeg-libjpeg pylibjpeg-openjpeg"
# Where Pillow takes an image for a decompression bomb.
MOST_PIXELS = 178_956_970


@dataclass(frozen=True, repr=False)
class _Image:
    """A file that holds an image, and what its header says. Without repr, because it names the patient."""

    path: Path
    keys: dict[str, str]
    issuer: str
    frames: int
    syntax: str
    burned_in: bool


def read_dicom(
    folder: Path, name: str, label_column: str, site_column: str, patient_column: str = "", frames: Frames = "refuse"
) -> Records:
    """Read a folder of DICOM files, at any depth and of any name, with a table of labels or one folder per class.

    The table has one of KEYS, or several, of which the most specific counts. Files it does not name and rows without a
    file are left out and counted in the log. The privacy unit is the patient of the headers, or of `patient_column`.
    Raises DataError.
    """
    root, table = find_table(folder, name)
    if table:
        images, records = _by_table(root, table, label_column, site_column, patient_column)
    else:
        refuse_columns(f"'{root}' has no table with columns; put one beside the images", site_column, patient_column)
        images, records = _by_folder(root, label_column)
    _refuse_frames(images, frames)
    decoders = _decoders(images)
    if burned_in := sum(image.burned_in for image in images):
        LOG.warning("%d of %d DICOM images say that text is burned into their pixels", burned_in, len(images))
    patients = records.patients or _patients(images)
    if not table:
        _refuse_folders_of_patients(root, records.labels, patients)
    # Nothing that lasts holds a header.
    places = [(image.path, image.frames // 2 if frames == "middle" else 0) for image in images]
    # Another decoder may show an image that was broken before.
    files = content_key(root, [path for path, _ in places])
    key = hashlib.sha256(repr(("dicom", files, frames, decoders)).encode()).hexdigest()
    return replace(records, key=key, opener=lambda i, _: open_dicom(*places[i]), patients=patients, burned_in=burned_in)


def _by_folder(root: Path, label_column: str) -> tuple[list[_Image], Records]:
    found, is_train = in_class_folders(root, Path.is_file)
    if not found:
        raise DataError(
            f"'{root}' has no files in class folders; it has {listing(root)}; put a table with the column {label_column!r} "
            f"and one of {', '.join(KEYS)} beside them, or make one folder per class"
        )
    images = _scan(root, [path for path, _ in found])
    position = {path: index for index, (path, _) in enumerate(found)}
    kept = [position[image.path] for image in images]
    return images, Records([found[i][1] for i in kept], "", None if is_train is None else is_train[kept])


def _by_table(
    root: Path, table: Path, label_column: str, site_column: str, patient_column: str
) -> tuple[list[_Image], Records]:
    columns = read_table(table, (label_column, patient_column, *KEYS))
    told = [column for column in (label_column, site_column, patient_column) if column]
    require_columns(table, told, list(columns))
    key = next((key for key in KEYS if key in columns), None)
    if key is None:
        raise DataError(f"'{table}' names no images; it has {some(columns)}; add one of the columns {', '.join(KEYS)}")
    rows = _rows(table, columns, key, told + ["split"] * ("split" in columns))
    scanned = _scan(root, sorted(path for path in root.rglob("*") if path.is_file() and path != table))
    images = [image for image in scanned if image.keys[key] in rows]
    if not images:
        raise DataError(
            f"none of the {len(scanned)} DICOM images in '{root}' is named by the column {key!r} of '{table}'; correct it"
        )
    found = [rows[image.keys[key]] for image in images]
    if left := len(scanned) - len(images):
        LOG.warning("%d of %d DICOM images are left out, '%s' has no label for them", left, len(scanned), table)
    if unmatched := sorted(set(rows.values()) - set(found)):
        LOG.warning("%d rows of '%s' name no DICOM image, such as row %d", len(unmatched), table, unmatched[0] + 1)
    is_train = split_of(columns, table)
    return images, Records(
        [str(columns[label_column][row]) for row in found],
        "",
        None if is_train is None else is_train[found],
        tuple(str(columns[site_column][row]) for row in found) if site_column else None,
        patients=patient_names([columns[patient_column][row] for row in found], patient_column) if patient_column else None,
    )


def _rows(table: Path, columns: dict[str, list[Any]], key: str, told: Sequence[str]) -> dict[str, int]:
    """Index of the row for every value of the key. Rows are named by number in errors, never by what is in them."""
    rows: dict[str, int] = {}
    for row, (value, label) in enumerate(zip(columns[key], columns[told[0]], strict=True)):
        text = "" if value is None else str(value).strip()
        if not text or label in (None, ""):
            raise DataError(f"row {row + 1} of '{table}' has no {key} or no {told[0]}; fill it in or remove it")
        first = rows.setdefault(Path(text).as_posix() if key == "path" else text, row)
        if differing := [name for name in told if columns[name][first] != columns[name][row]]:
            raise DataError(
                f"rows {first + 1} and {row + 1} of '{table}' name the same {key} but differ in {differing[0]!r}; keep one, "
                "or name images by a more specific column"
            )
    return rows


def _scan(root: Path, files: Sequence[Path]) -> list[_Image]:
    """Read the headers of those files that are DICOM images; say once how many are not."""
    from pydicom import config
    from pydicom.errors import InvalidDicomError

    # pydicom warns of malformed values by showing them, and a value may be a patient's.
    config.settings.reading_validation_mode = config.IGNORE
    images: list[_Image] = []
    strangers = without = 0
    broken: list[str] = []
    for file in files:
        try:
            image = _read_header(root, file)
        except InvalidDicomError:
            strangers += 1
        except Exception as error:  # pydicom raises nearly anything on a damaged file.
            broken.append(f"'{file}' ({error if isinstance(error, DataError | OSError) else type(error).__name__})")
        else:
            if image:
                images.append(image)
            else:
                without += 1
    said = f"{strangers} files are no DICOM, {without} hold no image (DICOMDIR, reports), {len(broken)} are broken"
    said += f", such as {broken[0]}" if broken else ""
    if not images:
        raise DataError(f"no DICOM image among {len(files)} files in '{root}': {said}; see data-dir and who may read them")
    if len(images) < len(files):
        LOG.log(logging.WARNING if broken else logging.INFO, "'%s': %d DICOM images; %s", root, len(images), said)
    return images


def _read_header(root: Path, file: Path) -> _Image | None:
    from pydicom import dcmread

    header = dcmread(file, stop_before_pixels=True, specific_tags=list(TAGS))
    if "Rows" not in header:
        return None
    if header.Rows * header.Columns > MOST_PIXELS:
        raise DataError(f"{header.Columns} x {header.Rows} pixels, where {MOST_PIXELS} are the most")
    texts = {tag: str(header.get(tag) or "").strip() for tag in (*KEYS[1:], "IssuerOfPatientID")}
    return _Image(
        file,
        texts | {"path": file.relative_to(root).as_posix()},
        texts["IssuerOfPatientID"],
        int(header.get("NumberOfFrames") or 1),
        str(header.file_meta.TransferSyntaxUID),
        header.get("BurnedInAnnotation") == "YES",
    )


def _patients(images: Sequence[_Image]) -> tuple[str, ...]:
    """A number for every patient, in order of appearance: an ID, or a hash of it, which trying all IDs undoes, would last.

    A file may leave out who issued its ID where others tell. Raises DataError for images of nobody, which may be anybody's.
    """
    issuers: dict[str, set[str]] = defaultdict(set)
    for image in images:
        issuers[image.keys["PatientID"]] |= {image.issuer} - {""}
    numbers: dict[tuple[str, str], int] = {}
    found: list[str] = []
    nameless: list[Path] = []
    for image in images:
        patient = image.keys["PatientID"]
        possible = {image.issuer} if image.issuer else issuers[patient] or {""}
        if not patient or len(possible) > 1:
            nameless.append(image.path)
        else:
            found.append(str(numbers.setdefault((patient, next(iter(possible))), len(numbers))))
    if nameless:
        raise DataError(
            f"{len(nameless)} of {len(images)} DICOM images do not tell whose they are, such as '{nameless[0]}': PatientID "
            "is empty, or issued by several; fill in PatientID and IssuerOfPatientID, leave these images out, or name a "
            "column of the table in patient-column"
        )
    return tuple(found)


def _refuse_folders_of_patients(root: Path, labels: Sequence[str], patients: Sequence[str]) -> None:
    """Folders of studies are no classes, and the names of classes may leave the site."""
    owners: dict[str, set[str]] = defaultdict(set)
    for label, patient in zip(labels, patients, strict=True):
        owners[label].add(patient)
    if len(owners) > 1 and all(len(own) == 1 for own in owners.values()):
        raise DataError(
            f"each of the {len(owners)} folders in '{root}' holds one patient alone, so they are no classes; put a table of "
            "labels beside them"
        )


def _refuse_frames(images: Iterable[_Image], frames: Frames) -> None:
    several = [image for image in images if image.frames > 1]
    if several and frames == "refuse":
        raise DataError(
            f"{len(several)} DICOM files hold several images, such as '{several[0].path}' with {several[0].frames}; leave "
            'them out, or set dicom-frames in the node-config to "first" or "middle", which takes one of each'
        )


def _decoders(images: Iterable[_Image]) -> list[tuple[str, tuple[str, ...]]]:
    """The decoders at hand for every transfer syntax. Raises DataError where one has none."""
    from pydicom.pixels.decoders.base import get_decoder
    from pydicom.uid import UID, DeflatedExplicitVRLittleEndian

    by_syntax: dict[str, list[_Image]] = defaultdict(list)
    for image in images:
        by_syntax[image.syntax].append(image)
    found: list[tuple[str, tuple[str, ...]]] = []
    for syntax, those in sorted(by_syntax.items()):
        remedy = "leave them out"
        # A deflated file cannot be read frame by frame, and may inflate to anything.
        with suppress(NotImplementedError):
            decoder = get_decoder(UID(syntax))
            if decoder.is_available and syntax != DeflatedExplicitVRLittleEndian:
                found.append((syntax, decoder.available_plugins))
                continue
            remedy = remedy if decoder.is_available else DECODERS
        raise DataError(
            f"{len(those)} DICOM images, such as '{those[0].path}', have the transfer syntax {UID(syntax).name} ({syntax}), "
            f"which nothing here decodes; {remedy}, or export them uncompressed (Explicit VR Little Endian)"
        )
    return found

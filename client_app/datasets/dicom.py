"""DICOM studies as records: headers, read once without pixels, give labels and patients; pixels are
read on demand.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import LOG, DataError
from fedsurrogate.common.extras import DECODERS, install_command, needed_for
from fedsurrogate.common.identity import normal

from ..node_config import Frames
from . import dicom_files
from .image_folders import files_below, folder_bags, in_class_folders, note_depth, table_of
from .images import of_dicom, remembered, same_files
from .left_out import LeftOut, SourceError, attempt, described, is_file, open_regular, printable
from .readers import content_key
from .records import OF_FOLDER, Records, only, records_of, select, without
from .source import DataSource, listing, require_columns, some
from .tables import name_or_blank, names_in, read_table

# Images of a file of which each is taken: a header may state any number.
MOST_FRAMES = 10_000


@dataclass(frozen=True, repr=False)
class DicomImage:
    """An image file and values of its header. Without repr, because the header contains the
    patient's ID.

    Attributes:
        path: of the file.
        keys: values by which a table may name the image, see KEYS, or its bag.
        issuer: of the patient's ID; empty if the header has none.
        frames: number of images in the file.
        syntax: UID of the transfer syntax.
        deep: whether more than 8 bits are stored.
        burned_in: whether text is burned into the pixels, as the header states.
    """

    path: Path
    keys: dict[str, str]
    issuer: str
    frames: int
    syntax: str
    deep: bool
    burned_in: bool


def opened(
    root: Path,
    images: Sequence[DicomImage],
    frames: Frames,
    decoders: Sequence[tuple[str, tuple[str, ...]]],
) -> Records:
    """Records of files, of each one image.

    Args:
        root: folder of the files.
        images: of the files.
        frames: which frame of a file with several.
        decoders: the available ones for every transfer syntax.
    """
    # No object that lasts keeps a header.
    places = [(image.path, image.frames // 2 if frames == "middle" else 0) for image in images]
    paths = [path for path, _ in places]
    # The key includes decoders: a new decoder may read an image that was broken before.
    content = repr(("dicom", content_key(root, paths), frames, decoders))
    key = hashlib.sha256(content.encode()).hexdigest()
    return Records(
        [""] * len(paths),
        key,
        opener=partial(dicom_files.open_place, places),
        describe=partial(of_dicom, places),
        same=partial(remembered, key, partial(same_files, paths)),
        place=lambda i: str(paths[i]),
    )


def each_frame(records: Records, images: Sequence[DicomImage]) -> Records:
    """Records of all images in the files of records.

    Args:
        records: of files.
        images: of all files that were found, among which these are.
    """
    # A header may state any number, of which none are taken beyond a limit.
    counts = [max(1, each.frames) if each.frames <= MOST_FRAMES else 1 for each in images]
    if sum(counts) == len(counts):
        return records
    owners = [file for file, count in enumerate(counts) for _ in range(count)]
    starts = [0, *accumulate(counts)]
    places = [(images[file].path, at - starts[file]) for at, file in enumerate(owners)]
    whole = records if records.found is None else records.found[0]
    files = range(len(images)) if records.found is None else records.found[1].tolist()
    rows = [at for at, file in enumerate(files) for _ in range(counts[file])]
    every = Records(
        [""] * len(places),
        _key(whole, owners),
        opener=partial(dicom_files.open_place, places),
        describe=partial(of_dicom, places),
        place=lambda i: f"{places[i][0]} (image {places[i][1] + 1})",
    )
    own = select(every, [at for file in files for at in range(starts[file], starts[file + 1])])
    return _as_opened(replace(select(records, rows), key=_key(records, rows)), own)


def _as_opened(records: Records, own: Records) -> Records:
    """Records whose images are those of others."""
    shared = {name: getattr(own, name) for name in ("opener", "describe", "place", "found")}
    return replace(records, **shared)


def _key(records: Records, rows: Sequence[int]) -> str:
    return hashlib.sha256(repr((records.key, rows)).encode()).hexdigest()


# Columns by which a table may identify images, the most specific first.
KEYS = ("path", "SOPInstanceUID", "StudyInstanceUID", "AccessionNumber", "PatientID")
OF_ONE_IMAGE = KEYS[:2]
# Values of headers that name bags, by bag-column.
OF_HEADERS = {"series": "SeriesInstanceUID", "study": "StudyInstanceUID", "patient": "PatientID"}
TEXTS = (*KEYS[1:], "SeriesInstanceUID", "IssuerOfPatientID")
TAGS = (*TEXTS, *("Rows", "Columns", "NumberOfFrames", "BitsStored", "BurnedInAnnotation"))


def read_dicom(source: DataSource, name: str, left: LeftOut) -> Records:
    """Read a folder of DICOM files, at any depth and of any name.

    It has a table of labels or one folder per class. The table has one or several of the columns
    KEYS; the most specific counts. Files without a row and rows without a file are left out and
    counted in the log. The privacy unit is the patient in the headers, or in the patient column.

    Args:
        source: of the data.
        name: of a sub-folder or table; empty for none.
        left: collects unusable records.

    Raises:
        DataError: for unusable data.
    """
    root, table = table_of(source, name, OF_HEADERS)
    if table:
        found, rows, records = _by_table(root, table, source, left)
    else:
        found, records = _by_folder(root, source, left)
        rows = list(range(len(found)))
    images = [found[row] for row in rows]
    _refuse_frames(images, source, left)
    _decoders(images, left)
    if burned_in := sum(image.burned_in for image in images):
        LOG.warning(
            "%d of %d DICOM images have text burned into their pixels (see headers)",
            burned_in,
            len(images),
        )
    patients = records.patients or _patients(images, left)
    if not (table or left.one_by_one):
        _refuse_folders_of_patients(root, records.labels, patients)
    # Which labels a run reads decides which rows of a table count; features are those of all.
    every = opened(root, found, source.frames, _decoders(found, LeftOut(one_by_one=True)))
    own = every if len(rows) == len(found) else only(every, rows)
    noted = replace(records, key=own.key, patients=patients, burned_in=burned_in, same=own.same)
    readable = _as_opened(noted, own)
    several = source.frames == "all"
    if source.bags or several:
        readable = replace(readable, bags=_bags(images, readable, source, left))
    kept = without(readable, left)
    return each_frame(kept, found) if several and source.bags is not None else kept


def _bags(
    images: Sequence[DicomImage], records: Records, source: DataSource, left: LeftOut
) -> tuple[str, ...] | None:
    """The bag of each file: by a value of its header, by folder or table, or itself."""
    if source.bags is None or records.bags is not None:
        return records.bags
    if source.bags == "patient":
        return records.patients
    if tag := OF_HEADERS.get(source.bags):
        what = f"bag (bag-column = {source.bags!r})"
        return names_in([image.keys[tag] for image in images], what, left)
    return tuple(image.keys["path"] for image in images)


def _by_folder(root: Path, source: DataSource, left: LeftOut) -> tuple[list[DicomImage], Records]:
    files, is_train = in_class_folders(root, is_file, left, source)
    if not files and not left.one_by_one:
        raise DataError(
            f"'{root}' has no files in class folders; it has {listing(root)}; put a table with the "
            f"column {source.label_column!r} and one of {', '.join(KEYS)} next to them, or make one "
            "folder per class"
        )
    note_depth(root, files, left, None)
    images = scan_images(root, [path for path, _ in files], left)
    position = {path: index for index, (path, _) in enumerate(files)}
    kept = [position[image.path] for image in images]
    return images, Records(
        [files[i][1] for i in kept],
        "",
        None if is_train is None else is_train[kept],
        bags=folder_bags(root, [files[i] for i in kept]) if source.bags == OF_FOLDER else None,
    )


def _by_table(
    root: Path, file: Path, source: DataSource, left: LeftOut
) -> tuple[list[DicomImage], list[int], Records]:
    """The images that a table names, the places of those that it labels, and their records."""
    if source.bags in OF_HEADERS:
        source = replace(source, bags="")
    wanted, label = source.named, source.label_column
    columns = read_table(file, (*wanted, *KEYS), left, label, source.target)
    require_columns(file, wanted, columns)
    key = key_of(file, list(columns))
    # Two ways to write one name do not differ.
    columns |= {
        name: [name_or_blank(cell, source.classes) for cell in columns[name]] for name in wanted
    }
    names = [_named(cell, key) for cell in columns[key]]
    compared = {name: columns[name] for name in (*wanted, "split") if name in columns}
    rows = _rows(file, names, key, compared, "" if source.target else label, left)
    files = [path for path in files_below(root, is_file, left) if path != file]
    scanned = scan_images(root, files, left)
    known = {*names} - {""}
    found = [image for image in scanned if image.keys[key] in known]
    places = [at for at, image in enumerate(found) if image.keys[key] in rows]
    matched = [rows[found[at].keys[key]] for at in places]
    if not matched and not left.one_by_one:
        raise DataError(
            f"none of the {len(scanned)} DICOM images in '{root}' is named by the column {key!r} "
            f"of '{file}'; correct it"
        )
    missing = len(scanned) - len(matched)
    left.skip(
        missing,
        f"{missing} of {len(scanned)} DICOM images are left out, '{file}' has no label for them",
    )
    if unmatched := sorted(set(rows.values()) - set(matched)):
        left.warnings.append(
            f"{len(unmatched)} rows of '{file}' name no DICOM image, such as {left.where(unmatched)}"
        )
    # From here on, each row belongs to an image.
    place = left.place
    left.place = lambda at: place(matched[at])
    of_rows = {name: [own[row] for row in matched] for name, own in columns.items()}
    return found, places, records_of(file, of_rows, source, left)


def key_of(table: Path, columns: Sequence[str]) -> str:
    """The column by which a table identifies images.

    Args:
        table: its file.
        columns: names of its columns.

    Raises:
        DataError: if there is none.
    """
    key = next((key for key in KEYS if key in columns), None)
    if key is None:
        raise SourceError(
            f"'{table}' names no images; it has {some(columns)}; add one of the columns "
            f"{', '.join(KEYS)}"
        )
    return key


def _rows(
    table: Path,
    names: Sequence[str],
    key: str,
    compared: Mapping[str, Sequence[Any]],
    label: str,
    left: LeftOut,
) -> dict[str, int]:
    """Index of the row for every value of the key. Errors give the number of a row, never its
    content.
    """
    rows: dict[str, int] = {}
    torn: set[str] = set()
    for row, name in enumerate(names):
        if not name or (label and not compared[label][row]):
            left.warn(
                f"{left.place(row)} of '{table}' has no {key} or no {label or 'name'}; fill it in or "
                "remove it"
            )
            continue
        first = rows.setdefault(name, row)
        if differing := [each for each, own in compared.items() if own[first] != own[row]]:
            left.warn(
                f"{left.place(first)} and {left.place(row)} of '{table}' name the same {key} but differ in "
                f"{differing[0]!r}; keep one, or name images by a more specific column"
            )
            torn.add(name)
    return {name: row for name, row in rows.items() if name not in torn}


def _named(value: Any, key: str) -> str:
    """The name of an image in a table; empty for none."""
    if key != "path":
        return name_or_blank(value)
    text = normal(str(value or ""))
    return Path(text).as_posix() if text else ""


def scan_images(root: Path, files: Sequence[Path], left: LeftOut) -> list[DicomImage]:
    """Read the headers of all files that are DICOM images; log once the number of others.

    Args:
        root: folder of the files.
        files: to read.
        left: whether records are left out one by one; otherwise no image at all is an error.

    Raises:
        DataError: without any image.
    """
    with needed_for(dicom_files.DICOM):
        from pydicom.errors import InvalidDicomError

    dicom_files.without_warnings()
    images: list[DicomImage] = []
    foreign = without = 0
    broken: list[str] = []
    for file in files:
        image = attempt(partial(_read_header, root, file))
        if isinstance(image, InvalidDicomError):
            foreign += 1
        elif isinstance(image, BaseException):
            # Other errors may contain values of the header, which identify a patient.
            known = isinstance(image, DataError | OSError)
            why = described(image) if known else type(image).__name__
            broken.append(printable(f"'{file}' ({why})"))
        elif image is None:
            without += 1
        else:
            images.append(image)
    summary = (
        f"{foreign} files are not DICOM, {without} have no image (DICOMDIR, reports), "
        f"{len(broken)} are broken"
    )
    summary += f", such as {broken[0]}" if broken else ""
    if not images and not left.one_by_one:
        raise DataError(
            f"no DICOM image among {len(files)} files in '{root}': {summary}; check data-dir and "
            "the rights to read it"
        )
    if len(images) < len(files):
        left.skip(len(files) - len(images), f"of {len(files)} files in '{root}' {summary}")
    return images


def _read_header(root: Path, file: Path) -> DicomImage | None:
    with open_regular(file) as stream:
        header = dicom_files.read_header(stream, TAGS, dicom_files.encoding_of(stream))
    if "Rows" not in header:
        return None
    if header.Rows * header.Columns > dicom_files.LARGEST_PIXELS:
        raise DataError(
            f"{header.Columns} x {header.Rows} pixels, more than the limit of {dicom_files.LARGEST_PIXELS}"
        )
    texts = {tag: name_or_blank(str(header.get(tag) or "")) for tag in TEXTS}
    return DicomImage(
        file,
        texts | {"path": file.relative_to(root).as_posix()},
        texts["IssuerOfPatientID"],
        int(header.get("NumberOfFrames") or 1),
        str(header.file_meta.TransferSyntaxUID),
        int(header.get("BitsStored") or 0) > 8,
        header.get("BurnedInAnnotation") == "YES",
    )


def _patients(images: Sequence[DicomImage], left: LeftOut) -> tuple[str, ...]:
    """A number for every image's patient, in order of appearance. IDs are not kept, nor their
    hashes, which trying all IDs would reverse.

    A file without the issuer of its ID gets that of other files, if there is one. Images without a
    patient ID are left out or refused: they may belong to any patient. In a private run an ID is
    one patient for all issuers: otherwise another patient's file would decide to whom this image
    belongs.
    """
    issuers: dict[str, set[str]] = defaultdict(set)
    for image in images:
        issuers[image.keys["PatientID"]] |= {image.issuer} - {""}
    numbers: dict[tuple[str, str], int] = {}
    names: list[str] = []
    nameless: list[int] = []
    for row, image in enumerate(images):
        patient = image.keys["PatientID"]
        possible = {""}
        if not left.one_by_one:
            possible = {image.issuer} if image.issuer else issuers[patient] or {""}
        if not patient or len(possible) > 1:
            nameless.append(row)
            names.append("")
        else:
            names.append(str(numbers.setdefault((patient, next(iter(possible))), len(numbers))))
    first = images[nameless[0]].path if nameless else ""
    left.note(
        nameless,
        f"{len(nameless)} of {len(images)} DICOM images do not identify a patient, such as "
        f"'{first}': PatientID is empty, or has several issuers; fill in PatientID and "
        "IssuerOfPatientID, leave these images out, or set patient-column to a column of the "
        "table",
    )
    return tuple(names)


def _refuse_folders_of_patients(root: Path, labels: Sequence[str], patients: Sequence[str]) -> None:
    """Raise DataError if folders are patients, not classes: names of classes may leave the site."""
    owners: dict[str, set[str]] = defaultdict(set)
    for label, patient in zip(labels, patients, strict=True):
        owners[label].add(patient)
    if len(owners) > 1 and all(len(own) == 1 for own in owners.values()):
        raise DataError(
            f"each of the {len(owners)} folders in '{root}' has images of one patient only, so "
            "they are not classes; put a table of labels next to them"
        )


def _refuse_frames(images: Sequence[DicomImage], source: DataSource, left: LeftOut) -> None:
    """Leave out or refuse files of several images, unless one of each is taken, or all into a bag."""
    all_ = 1 if source.bags is None else MOST_FRAMES
    most = {"first": None, "middle": None, "all": all_}.get(source.frames, 1)
    several = [row for row, image in enumerate(images) if most and not image.frames <= most]
    first = images[several[0]] if several else None
    remedy = 'set dicom-frames in the node-config to "first" or "middle", to take one image of each'
    left.note(
        several,
        f"{len(several)} DICOM files hold several images, such as '{first and first.path}' with "
        f"{first and first.frames}; leave them out, or {remedy}, or to 'all' for a run that pools "
        f"bags (features.bag), which takes {MOST_FRAMES} at most",
    )


def _decoders(images: Sequence[DicomImage], left: LeftOut) -> list[tuple[str, tuple[str, ...]]]:
    """The available decoders for every transfer syntax. Images without a decoder are left out or
    refused.
    """
    with needed_for(dicom_files.DICOM):
        from pydicom.uid import UID

    kinds: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for row, image in enumerate(images):
        kinds[image.syntax, image.deep].append(row)
    decoders: dict[str, tuple[str, ...]] = {}
    for (syntax, deep), those in sorted(kinds.items()):
        # A file may name anything as its syntax.
        plugins = attempt(partial(dicom_files.plugins_for, syntax, deep))
        if not isinstance(plugins, BaseException) and plugins is not None:
            decoders[syntax] = (*decoders.get(syntax, ()), *plugins)
            continue
        known = not isinstance(plugins, BaseException)
        left.note(
            those,
            f"{len(those)} DICOM images, such as '{images[those[0]].path}', have the transfer "
            f"syntax {UID(syntax).name} ({syntax}), for which there is no decoder; "
            f"{f'run {install_command(DECODERS)}' if known else 'leave them out'}, "
            "or export them uncompressed (Explicit VR Little Endian)",
        )
    return list(decoders.items())

"""Readers of a site's data: one function for each kind of file; all return `Records`."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedsurrogate.client_app.datasets.bags import bag_names
from fedsurrogate.client_app.datasets.duplicates import remembered, same_bytes
from fedsurrogate.client_app.datasets.images import open_rgb
from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.names import column_names, names_in, patient_names
from fedsurrogate.client_app.datasets.records import Records, without
from fedsurrogate.client_app.datasets.tables import (
    ParquetImages,
    check_cells,
    values_of,
    with_labels,
)
from fedsurrogate.client_app.datasets.target_values import columns_of, texts_of, values_in
from fedsurrogate.client_app.datasets.whole_site import SourceError
from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.common.identity import name_of, normal
from fedsurrogate.common.targets.target import Target

PARQUET = "data = 'parquet'"
OF_FEATURES = "store each image as bytes in it; features are read with data = 'safetensors'"


def read_digits() -> Records:
    """Read scikit-learn's 1,797 digits: 8x8 pixels with 17 grey levels, mapped to distinct 8-bit
    levels.
    """
    _, labels = _digits()
    key = hashlib.sha256(f"digits {version('scikit-learn')}".encode()).hexdigest()
    return Records(list(labels), key, opener=_open_digit)


def _open_digit(index: int, _: int) -> Image.Image:
    return Image.fromarray(_digits()[0][index]).convert("RGB")


@cache
def _digits() -> tuple[np.ndarray, tuple[str, ...]]:
    """Grey levels (1797, 8, 8) and labels; read once, because every request of a simulation needs
    them.
    """
    package = find_spec("sklearn")
    assert package
    assert package.origin
    # The file that `sklearn.datasets.load_digits` reads; the import of scikit-learn takes longer
    # than a small run.
    table = np.loadtxt(
        Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz",
        delimiter=",",
        dtype=np.uint8,
    )
    grey = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return grey, tuple(map(str, table[:, -1].tolist()))


def read_parquet(
    folder: Path,
    name: str,
    label_column: str,
    site_column: str,
    patient_column: str = "",
    left: LeftOut | None = None,
) -> Records:
    """Read images stored as bytes in parquet files, in Hugging Face's layout. Nothing is decoded
    here.

    Args:
        folder: of the data.
        name: of the data set; may be empty.
        label_column: column of labels.
        site_column: column of sites; empty for none.
        patient_column: column of patients; empty for none.
        left: collects unusable records; None refuses them.

    Raises:
        DataError: for unusable data.
    """
    left = left or LeftOut()
    with needed_for(PARQUET):
        import pyarrow as pa
        import pyarrow.parquet as pq

    files = split_files(folder, name, ".parquet")
    try:
        whole = partial(with_labels, label_column=label_column, target=left.target)
        schemas = [whole(pq.read_schema(file).empty_table()).schema for file in files]
        schema = schemas[0]
        of_target = columns_of(label_column, left.target)
        wanted = named_columns(label_column, left.target, site_column, patient_column, left.bags)
        tables = []
        for file, each in zip(files, schemas, strict=True):
            images_in = {normal(image_column(schema)): OF_FEATURES}
            require_columns(file, wanted | images_in, column_names(file, each.names))
            check_cells(file, each, wanted)
            read = {*wanted, label_column}
            table = pq.read_table(
                file, columns=[x for x in pq.read_schema(file).names if normal(x) in read]
            )
            tables.append(whole(table.rename_columns(list(map(normal, table.column_names)))))
    except pa.ArrowException as error:
        raise SourceError(
            f"parquet data in '{folder}' cannot be read ({error}); write the files again"
        ) from error

    def column(name: str) -> list[Any]:
        return [value for table in tables for value in values_of(table.column(name), left)]

    values, classes, labels = _labels_of(tables, files, schemas, of_target, left)
    origin = (
        names_in(
            column(site_column),
            f"site ({site_column!r} of '{files[0]}')",
            left,
        )
        if site_column
        else None
    )
    images = ParquetImages(files, image_column(schema))
    key = content_key(folder, files)
    records = Records(
        labels,
        key,
        split_by_size([len(table) for table in tables]),
        origin,
        classes=classes or None,
        opener=partial(_open_bytes, images),
        patients=patient_names(column(patient_column), patient_column, left)
        if patient_column
        else None,
        same=lambda: remembered(key, lambda: same_bytes(images.read, len(labels))),
        values=values,
        bags=bag_names(column(left.bags), left) if left.bags else None,
    )
    return without(records, left)


def _labels_of(
    tables: Sequence[Any],
    files: Sequence[Path],
    schemas: Sequence[Any],
    of_target: tuple[str, ...],
    left: LeftOut,
) -> tuple[Tensor | None, tuple[str, ...], list[str]]:
    """Values (n, k) of another target than classes, the classes that the files declare, and a name
    or text of each row.
    """
    file = files[0]
    columns = {
        name: [cell for table in tables for cell in values_of(table.column(name), left)]
        for name in of_target
    }
    if left.target is not None:
        return (
            values_in(columns, left.target, file, left),
            (),
            texts_of(columns, left.target),
        )
    (column,) = of_target
    declared = [
        declared_classes(own, _class_label_names(schema.metadata, column))
        for own, schema in zip(files, schemas, strict=True)
    ]
    given = names_in(columns[column], f"label ({column!r} of '{file}')", left, left.classes)
    mixed = [
        each if isinstance(each, int) else own
        for each, own in zip(columns[column], given, strict=True)
    ]
    ends = list(accumulate(map(len, tables), initial=0))
    parts = [mixed[start:end] for start, end in pairwise(ends)]
    labels, classes = names_by_file(files, declared, parts, left)
    return None, classes, labels


def _open_bytes(images: ParquetImages, index: int, shortest: int) -> Image.Image:
    return open_rgb(io.BytesIO(images.read(index)), shortest)


def split_files(folder: Path, name: str, suffix: str) -> list[Path]:
    """The files [train, test] of a data set, or [all] if there is no split.

    Args:
        folder: of the data.
        name: of the data set; may be empty.
        suffix: of the files.

    Raises:
        DataError: if there are no such files.
    """
    stem = name.removesuffix(suffix)
    train, test = (
        folder / f"{stem}-{part}{suffix}" if stem else folder / f"{part}{suffix}"
        for part in ("train", "test")
    )
    if train.is_file() and test.is_file():
        return [train, test]
    alone = [folder / f"{stem}{suffix}"] if stem else sorted(folder.glob(f"*{suffix}"))
    if len(alone) == 1 and alone[0].is_file():
        return alone
    wanted = f"'{train.name}' and '{test.name}', or one " + (
        f"'{stem}{suffix}'" if stem else f"{suffix} file"
    )
    raise SourceError(
        f"dataset = {name!r}: '{folder}' lacks {wanted}; it has {listing(folder)}; name one of its "
        "data sets"
    )


def names_by_file(
    files: Sequence[Path],
    declared: Sequence[tuple[str, ...]],
    numbers: Sequence[Sequence[int | str]],
    left: LeftOut,
) -> tuple[list[str], tuple[str, ...]]:
    """The class of each record by the list of its own file; a file without a list has that of the
    other.

    Args:
        files: one, or those of a split.
        declared: classes that each file declares.
        numbers: of each file's records, or their names.
        left: collects unusable records.

    Returns:
        A name for each record, and the longest of the lists.

    Raises:
        DataError: for lists of which none has all classes of the other.
    """
    longest = max(declared, key=len)
    for file, own in zip(files, declared, strict=True):
        if set(own) - set(longest):
            other = files[declared.index(longest)]
            raise SourceError(
                f"'{file}' names the classes {some(own)}, and '{other}' names {some(longest)}; write "
                "both with the same names"
            )
    labels: list[str] = []
    for file, classes, given in zip(files, declared, numbers, strict=True):
        labels += _name_labels(given, classes or longest, file, left, len(labels))
    return labels, longest


def _name_labels(
    labels: Sequence[int | str], classes: tuple[str, ...], file: Path, left: LeftOut, first_row: int
) -> list[str]:
    if not classes:
        return [name_of(label, (str(label),)) or "" for label in labels]
    wrong = [
        row
        for row, label in enumerate(labels, first_row)
        if isinstance(label, int) and not 0 <= label < len(classes)
    ]
    first = labels[wrong[0] - first_row] if wrong else ""
    left.note(
        wrong,
        f"'{file}' names {len(classes)} classes but has the label {first}; labels go from 0 to "
        "that number - 1",
    )
    gone = left.rows
    return [
        classes[label] if isinstance(label, int) and row not in gone else str(label)
        for row, label in enumerate(labels, first_row)
    ]


def declared_classes(file: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Classes that a file declares, in their normal form. Raises DataError for one named twice."""
    classes = tuple(name for each in names if (name := name_of(each, (normal(each),))))
    if len(set(classes)) < len(classes):
        raise SourceError(f"'{file}' names a class twice ({some(classes)}); write it again")
    return classes


def _class_label_names(metadata: dict[bytes, bytes] | None, column: str) -> tuple[str, ...]:
    try:
        feature = json.loads((metadata or {})[b"huggingface"])["info"]["features"][column]
        return tuple(str(name) for name in feature["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def image_column(schema: Any) -> str:
    """Return "image", or the only other column that can hold images."""
    with needed_for(PARQUET):
        import pyarrow as pa

    def holds_bytes(kind: Any) -> bool:
        return bool(
            pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_struct(kind)
        )

    candidates = [field.name for field in schema if holds_bytes(field.type)]
    return candidates[0] if len(candidates) == 1 else "image"


def named_columns(
    label_column: str,
    target: Target | None,
    site_column: str = "",
    patient_column: str = "",
    bag_column: str | None = None,
) -> dict[str, str]:
    """The columns of a table that settings name, each with the setting.

    Args:
        label_column: of classes.
        target: of the run; None for classes.
        site_column: empty for none.
        patient_column: empty for none.
        bag_column: empty, or None, for none.
    """
    own = "label-column" if target is None else f"the columns of target = {target.name!r}"
    named = dict.fromkeys(columns_of(label_column, target), own)
    named |= {site_column: "site-column", patient_column: "patient-column"}
    named[bag_column or ""] = "bag-column"
    return {name: f"correct {setting}" for name, setting in named.items() if name}


def require_columns(file: Path, wanted: Mapping[str, str], present: Sequence[str]) -> None:
    """Refuse a table that lacks a column.

    Args:
        file: the table.
        wanted: names of columns, each with what helps besides another name in the table; empty if
            nothing else does.
        present: names of its columns.

    Raises:
        DataError: unless all wanted columns are present.
    """
    if missing := [column for column in wanted if column not in present]:
        others = "".join(f", or {todo}" for todo in {wanted[name]: 0 for name in missing} if todo)
        raise SourceError(
            f"'{file}' lacks the columns {some(missing)}; it has {some(present)}; rename them{others}"
        )


def refuse_columns(
    why: str, site_column: str, patient_column: str, bag_column: str | None = None
) -> None:
    """Refuse settings of columns for data without columns.

    Args:
        why: the data have none, and what to do.
        site_column: empty for none.
        patient_column: empty for none.
        bag_column: empty, or None, for none.

    Raises:
        DataError: if a column is set.
    """
    columns = {
        "site-column": site_column,
        "patient-column": patient_column,
        "bag-column": bag_column,
    }
    for key, column in columns.items():
        if column:
            raise SourceError(f"{key} = {column!r}: {why}")


def split_by_size(sizes: Sequence[int]) -> Tensor | None:
    """Return (n,) bool, True for the records of the first of two files; None for one file, which
    makes no split.
    """
    return None if len(sizes) == 1 else torch.arange(sum(sizes)) < sizes[0]


def content_key(root: Path, files: Iterable[Path]) -> str:
    """Hash of paths, sizes and modification times of files: equal keys mean equal content and
    order.

    Args:
        root: folder of the files.
        files: in order.
    """
    digest = hashlib.sha256(os.fsencode(root.resolve()))
    for file in files:
        name = str(file.relative_to(root)).encode(errors="surrogatepass")
        try:
            status = file.stat()
            seen = f"{status.st_size}\0{status.st_mtime_ns}"
        except (OSError, ValueError):
            seen = "missing"
        # Names with the characters that separate them are quoted: no name may look like two.
        quoted = repr(name).encode() if b"\0" in name or b"\n" in name else name
        digest.update(b"\n" + quoted + f"\0{seen}".encode())
    return digest.hexdigest()


def listing(folder: Path) -> str:
    """Quote the first five names in a folder."""
    return some(sorted(path.name for path in folder.iterdir()))


def some(names: Iterable[str]) -> str:
    """Quote the first five names."""
    listed = list(names)
    return (", ".join(repr(name) for name in listed[:5]) or "nothing") + (
        ", ..." if len(listed) > 5 else ""
    )

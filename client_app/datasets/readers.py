"""Readers of a site's data: one function for each kind of file; all return `Records`."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Sequence
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedsurrogate.client_app.datasets.bags import bag_names
from fedsurrogate.client_app.datasets.duplicates import remembered, same_bytes, same_rows
from fedsurrogate.client_app.datasets.images import open_rgb
from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.names import column_names, names_in, patient_names
from fedsurrogate.client_app.datasets.records import Records, without
from fedsurrogate.client_app.datasets.tables import ParquetImages, values_of
from fedsurrogate.client_app.datasets.target_values import checked, columns_of, texts_of, values_in
from fedsurrogate.client_app.datasets.whole_site import SourceError
from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.common.identity import name_of, normal

# Rows of features that are checked at a time, and bytes of a file that is not copied to memory.
CHECKED, LARGE = 8192, 2**26
PARQUET = "data = 'parquet'"


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


def read_safetensors(
    folder: Path, name: str, patient_column: str = "", left: LeftOut | None = None
) -> Records:
    """Read features.

    A file has `x` (n, d) floating point, `y` (n,) integer; optional: metadata `fingerprint` and
    `classes`, and tensors (n,) of integers named `patient_column`, and as the bags of `left`.

    Args:
        folder: of the data.
        name: of the data set; may be empty.
        patient_column: name of the tensor of patients; empty for none.
        left: collects unusable records; None refuses them.

    Raises:
        DataError: for unusable data.
    """
    left = left or LeftOut()
    from safetensors import SafetensorError, safe_open

    files = split_files(folder, name, ".safetensors")
    tensors: list[tuple[Tensor, Tensor]] = []
    metadata: list[dict[str, str]] = []
    given = [name for name in (patient_column, left.bags) if name]
    owners: dict[str, list[int]] = {name: [] for name in given}
    for file in files:
        try:
            with safe_open(file, "pt") as content:
                of_target = columns_of("y", left.target)
                wanted_names = {"x", *of_target, *given}
                if missing := sorted(wanted_names - set(content.keys())):
                    wanted = f"x (n, d) and {' (n,), '.join((*of_target, *given))} (n,)"
                    raise SourceError(
                        f"'{file}' lacks the tensors {missing}; it has {some(content.keys())}; "
                        f"store {wanted}"
                    )
                tensors.append((content.get_tensor("x"), _of_target(content, file, left)))
                metadata.append(content.metadata() or {})
                for name in owners:
                    numbers = content.get_tensor(name)
                    _check_features(file, tensors[-1][0], numbers, name)
                    owners[name] += numbers.tolist()
        # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
        except (SafetensorError, RuntimeError, TypeError) as error:
            raise SourceError(
                f"'{file}' is not a readable safetensors file ({error}); write it again"
            ) from error
        _check_features(file, *tensors[-1], valued=left.target is not None)
    if (
        len({x.shape[1] for x, _ in tensors}) > 1
        or len({m.get("fingerprint", "") for m in metadata}) > 1
    ):
        raise SourceError(
            f"'{files[0]}' and '{files[1]}' hold features of different backbones; compute both "
            "with one"
        )
    # A large file stays mapped: a copy would fill the memory of the site.
    x = tensors[0][0]
    if len(tensors) > 1 or x.nbytes < LARGE:
        x = torch.cat([x for x, _ in tensors])
    y = torch.cat([y if left.target is not None else y.long() for _, y in tensors])
    finite = [torch.isfinite(rows).all(dim=1) for rows in torch.split(x, CHECKED)]
    # Of a bag, only the images that can be used are in its mean.
    broken = [] if left.bags is not None else (~torch.cat(finite)).nonzero().flatten().tolist()
    left.note(
        broken,
        f"x in '{files[0]}' has NaN or infinity in {len(broken)} of {len(x)} rows, first in row "
        f"{min(broken, default=0)}; remove those rows or compute them again",
    )
    values = None
    if left.target is None:
        classes = _declared(files[0], metadata[0].get("classes", "").split(","))
        labels = _name_labels(y.tolist(), classes, files[0], left)
    else:
        values, classes = checked(y, left.target, str(files[0]), left), ()
        labels = [str(row) for row in values.tolist()]
    records = Records(
        labels,
        content_key(folder, files),
        split_by_size([len(y) for _, y in tensors]),
        classes=classes or None,
        features=x,
        fingerprint=metadata[0].get("fingerprint", ""),
        patients=_texts(owners.get(patient_column)),
        same=lambda: same_rows(x),
        values=values,
        bags=_texts(owners.get(left.bags or "")),
    )
    return without(records, left)


def _texts(numbers: Sequence[int] | None) -> tuple[str, ...] | None:
    return None if numbers is None else tuple(map(str, numbers))


def _of_target(content: Any, file: Path, left: LeftOut) -> Tensor:
    """The tensor y (n,); or (n, k), float64, one column for each of the target's tensors."""
    names = columns_of("y", left.target)
    found = [content.get_tensor(name) for name in names]
    if left.target is None:
        own: Tensor = found[0]
        return own
    for name, each in zip(names, found, strict=True):
        if each.ndim != 1 or each.is_complex() or len(each) != len(found[0]):
            raise SourceError(
                f"{name} in '{file}' is {each.dtype} of shape {tuple(each.shape)}; it must be real "
                "numbers of shape (n,)"
            )
    return torch.stack([each.double() for each in found], 1)


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
        schemas = [pq.read_schema(file) for file in files]
        schema = schemas[0]
        of_target = columns_of(label_column, left.target)
        named = (*of_target, site_column, patient_column, left.bags)
        wanted = [name for name in dict.fromkeys(named) if name]
        tables = []
        for file, each in zip(files, schemas, strict=True):
            require_columns(
                file, [*wanted, normal(image_column(schema))], column_names(file, each.names)
            )
            table = pq.read_table(file, columns=[x for x in each.names if normal(x) in wanted])
            tables.append(table.rename_columns(list(map(normal, table.column_names))))
    except pa.ArrowException as error:
        raise SourceError(
            f"parquet data in '{folder}' cannot be read ({error}); write the files again"
        ) from error

    def column(name: str) -> list[Any]:
        return [value for table in tables for value in values_of(table.column(name), left)]

    values, classes, labels = _labels_of(tables, files[0], schema, of_target, left)
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
    tables: Sequence[Any], file: Path, schema: Any, of_target: tuple[str, ...], left: LeftOut
) -> tuple[Tensor | None, tuple[str, ...], list[str]]:
    """Values (n, k) of another target than classes, the classes that the file declares, and a name
    or text of each row.
    """
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
    classes = _declared(file, _class_label_names(schema.metadata, column))
    given = names_in(columns[column], f"label ({column!r} of '{file}')", left, left.classes)
    mixed = [
        each if isinstance(each, int) else own
        for each, own in zip(columns[column], given, strict=True)
    ]
    return None, classes, _name_labels(mixed, classes, file, left)


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


def _check_features(
    file: Path, x: Tensor, y: Tensor, name: str = "y", valued: bool = False
) -> None:
    if x.ndim != 2 or not x.is_floating_point():
        raise SourceError(
            f"x in '{file}' is {x.dtype} of shape {tuple(x.shape)}; it must be floating point of "
            "shape (n, d)"
        )
    wrong = y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool
    if wrong and not valued:
        raise SourceError(
            f"{name} in '{file}' is {y.dtype} of shape {tuple(y.shape)}; it must be integers of "
            "shape (n,)"
        )
    if len(x) != len(y):
        raise SourceError(
            f"'{file}' has {len(x)} rows of x but {len(y)} of {name}; the numbers must be equal"
        )


def _name_labels(
    labels: Sequence[int | str], classes: tuple[str, ...], file: Path, left: LeftOut
) -> list[str]:
    if not classes:
        return [name_of(label, (str(label),)) or "" for label in labels]
    wrong = [
        row
        for row, label in enumerate(labels)
        if isinstance(label, int) and not 0 <= label < len(classes)
    ]
    first = labels[wrong[0]] if wrong else ""
    left.note(
        wrong,
        f"'{file}' names {len(classes)} classes but has the label {first}; labels go from 0 to "
        "that number - 1",
    )
    gone = left.rows
    return [
        classes[label] if isinstance(label, int) and row not in gone else str(label)
        for row, label in enumerate(labels)
    ]


def _declared(file: Path, names: Iterable[str]) -> tuple[str, ...]:
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


def require_columns(file: Path, wanted: Iterable[str], present: Sequence[str]) -> None:
    """Refuse a table that lacks a column.

    Args:
        file: the table.
        wanted: names of columns.
        present: names of its columns.

    Raises:
        DataError: unless all wanted columns are present.
    """
    if missing := [column for column in wanted if column not in present]:
        raise SourceError(
            f"'{file}' lacks the columns {some(missing)}; it has {some(present)}; rename them, or "
            "correct label-column, site-column or patient-column"
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

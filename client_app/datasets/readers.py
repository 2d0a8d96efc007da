"""Readers of a site's data: one function for each kind of file; all return `Records`."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.identity import normal

from .images import of_bytes, open_rgb, remembered, same_bytes
from .left_out import LeftOut, SourceError
from .records import Records, records_of, with_declared, without
from .source import DataSource, folder_of
from .source import listing as listing
from .source import require_columns as require_columns
from .tables import ParquetImages, parquet_table, values_of

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
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    grey = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return grey, tuple(map(str, table[:, -1].tolist()))


def read_parquet(source: DataSource, name: str, left: LeftOut) -> Records:
    """Read images stored as bytes in parquet files, in Hugging Face's layout. Nothing is decoded
    here.

    Args:
        source: of the data.
        name: of the data set; may be empty.
        left: collects unusable records.

    Raises:
        DataError: for unusable data.
    """
    folder = folder_of(source, name)
    files, column, parts = parquet_files(source, folder, name, {*source.named, source.label_column})
    tables = [table for _, _, table in parts]
    columns = {
        each: [cell for table in tables for cell in values_of(table.column(each), left)]
        for each in source.named
    }
    records = records_of(files[0], columns, source, left)
    label = source.label_column
    declared = [
        _class_label_names(schema.metadata, label) if source.target is None else ()
        for schema, _, _ in parts
    ]
    numbers = columns.get(label, ())
    records = with_declared(records, numbers, files, list(map(len, tables)), declared, left)
    images, key = ParquetImages(files, column), content_key(folder, files)
    own = replace(
        records,
        key=key,
        opener=partial(_open_bytes, images),
        describe=partial(of_bytes, images.read),
        same=lambda: remembered(key, lambda: same_bytes(images.read, len(records.labels))),
    )
    return without(own, left)


def parquet_files(
    source: DataSource, folder: Path, name: str, read: Iterable[str] = ()
) -> tuple[list[Path], str, list[tuple[Any, list[str], Any]]]:
    """The files of a data set with images, whose columns are there and can be read.

    Args:
        source: of the data.
        folder: that holds them.
        name: of the data set; may be empty.
        read: columns that are read.

    Returns:
        One file, or those for training and test; the column of their images; and of each what
        `parquet_table` returns.

    Raises:
        DataError: for a file that cannot be read, or lacks a column.
    """
    files = split_files(folder, name, ".parquet")
    wanted, parts, column = source.named, [], ""
    for file in files:
        part = parquet_table(file, wanted, source.label_column, source.target, {*read})
        column = column or _image_column(part[0])
        require_columns(file, wanted | {normal(column): OF_FEATURES}, part[1])
        parts.append(part)
    return files, column, parts


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


def _class_label_names(metadata: dict[bytes, bytes] | None, column: str) -> tuple[str, ...]:
    try:
        feature = json.loads((metadata or {})[b"huggingface"])["info"]["features"][column]
        return tuple(str(name) for name in feature["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def _image_column(schema: Any) -> str:
    """Return "image", or the only other column that can hold images."""
    with needed_for(PARQUET):
        import pyarrow as pa

    def holds_bytes(kind: Any) -> bool:
        return bool(
            pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_struct(kind)
        )

    candidates = [field.name for field in schema if holds_bytes(field.type)]
    return candidates[0] if len(candidates) == 1 else "image"


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

"""Images as files: one folder per class, or a table of paths and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from client_app.readers import (
    Records,
    content_key,
    listing,
    open_rgb,
    patient_names,
    refuse_columns,
    require_columns,
    some,
    split_by_size,
)
from common.errors import DataError

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


def read_imagefolder(folder: Path, name: str, label_column: str, site_column: str, patient_column: str = "") -> Records:
    """Read a folder of one folder per class, or a CSV or parquet table of paths and labels that lies in the folder."""
    if not name:
        root, tables = folder, sorted(p for p in folder.iterdir() if p.suffix in (".csv", ".parquet"))
    elif (folder / name).is_dir():
        return read_imagefolder(folder / name, "", label_column, site_column, patient_column)
    else:
        root, tables = folder, [p for p in (folder / f"{name}{s}" for s in ("", ".csv", ".parquet")) if p.is_file()]
        if not tables:
            raise DataError(f"dataset = {name!r}: '{folder}' has no such sub-folder or table; it has {listing(folder)}")
    if len(tables) > 1:
        raise DataError(f"'{folder}' has several tables ({some(p.name for p in tables)}); name one of them in dataset")
    if tables:
        return _read_path_table(root, tables[0], label_column, site_column, patient_column)
    refuse_columns(f"'{folder}' has no table with columns; put one beside the images", site_column, patient_column)
    splits = [root / "train", root / "test"]
    found: list[tuple[Path, str]] = []
    sizes: list[int] = []
    for top in splits if all(s.is_dir() for s in splits) else [root]:
        before = len(found)
        for class_folder in sorted(p for p in top.iterdir() if p.is_dir() and not p.name.startswith(".")):
            images = sorted(p for p in class_folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
            found += [(image, class_folder.name) for image in images]
        sizes.append(len(found) - before)
    if not found:
        raise DataError(
            f"'{root}' has no images in class folders; it has {listing(root)}; make one folder per class "
            f"with images in it, or put a table with the columns 'path' and {label_column!r} beside them"
        )
    return _files([path for path, _ in found], [label for _, label in found], root, split_by_size(sizes), None)


def _read_path_table(root: Path, file: Path, label_column: str, site_column: str, patient_column: str) -> Records:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    try:
        table = (
            pq.read_table(file)
            if file.suffix == ".parquet"
            else pyarrow.csv.read_csv(
                file,
                # Class names and patients stay as they are written: 07 is not 7.
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types={name: pa.string() for name in (label_column, "path", patient_column) if name}
                ),
            )
        )
    except pa.ArrowException as error:
        raise DataError(f"table '{file}' cannot be read ({error}); write it again") from error
    require_columns(file, [name for name in ("path", label_column, site_column, patient_column) if name], table.column_names)
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    paths: list[Path] = []
    for row, (path, label) in enumerate(zip(columns["path"], columns[label_column], strict=True), start=1):
        if path in (None, "") or label in (None, ""):
            raise DataError(f"row {row} of '{file}' has no path or no label; fill it in or remove it")
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise DataError(f"row {row} of '{file}': path {path!r} leaves '{root}'; paths must lie inside that folder")
        paths.append(root / path)
    is_train = None
    if "split" in columns:
        if unknown := sorted({str(s) for s in columns["split"]} - {"train", "test"}):
            raise DataError(f"column 'split' of '{file}' holds {some(unknown)}; allowed are 'train' and 'test'")
        is_train = torch.tensor([s == "train" for s in columns["split"]], dtype=torch.bool)
    origin = tuple(str(value) for value in columns[site_column]) if site_column else None
    if paths and not any(path.is_file() for path in paths):
        raise DataError(f"none of the {len(paths)} files in '{file}' exists, such as '{paths[0]}'; paths start at '{root}'")
    records = _files(paths, [str(label) for label in columns[label_column]], root, is_train, origin)
    return replace(records, patients=patient_names(columns[patient_column], patient_column)) if patient_column else records


def _files(
    paths: Sequence[Path], labels: list[str], root: Path, is_train: Tensor | None, origin: tuple[str, ...] | None
) -> Records:
    key = content_key(root, paths)
    return Records(labels, key, is_train, origin, opener=lambda i, shortest: open_rgb(paths[i], shortest))

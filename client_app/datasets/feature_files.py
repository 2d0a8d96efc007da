"""Reader of precomputed features in safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedsurrogate.common.backbones.backbone_names import in_column_order, shown, with_columns
from fedsurrogate.common.errors import DataError

from .images import same_rows
from .left_out import LeftOut, SourceError
from .readers import content_key, split_files
from .records import Records, without
from .source import DataSource, folder_of, some
from .table_records import SourceTable, with_declared

# Rows that are checked at a time, and bytes of a file that is not copied to memory.
CHECKED, LARGE = 8192, 2**26
# Types of tensors: of features; of numbers that are learned; and of classes, patients and bags.
FLOATING = frozenset({"F64", "F32", "F16", "BF16"})
WHOLE = frozenset({"I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64"})
REAL = FLOATING | WHOLE | {"BOOL"}


@dataclass(frozen=True)
class FeatureHeader:
    """What the header of a file of features says.

    Attributes:
        dimension: of the features.
        fingerprint: of their backbone, with the names of their columns.
        order: in which columns are read.
        classes: that the file declares, with commas.
    """

    dimension: int
    fingerprint: str
    order: list[int]
    classes: str


def read_safetensors(source: DataSource, name: str, left: LeftOut) -> Records:
    """Read features.

    A file has `x` (n, d) floating point, `y` (n,) integer; optional: metadata `fingerprint`,
    `classes` and `columns` (a JSON list of d names), and tensors (n,) of integers named as the
    patient and the bag column of the source. The metadata of a file are about this file alone.

    Args:
        source: of the data.
        name: of the data set; may be empty.
        left: collects unusable records.

    Raises:
        DataError: for unusable data.
    """
    folder = folder_of(source, name)
    replace(source, patient_column="", bags=None).refuse_columns(
        "safetensors files have no columns; use another partition"
    )
    source = replace(source, label_column="y")
    files = split_files(folder, name, ".safetensors")
    headers = feature_headers(files, source)
    tensors: dict[str, list[torch.Tensor]] = {each: [] for each in ("x", *source.named)}
    for file, header in zip(files, headers, strict=True):
        with _opened(file) as content:
            read = {each: content.get_tensor(each) for each in tensors}
        for each, tensor in read.items():
            if len(tensor) != len(read["x"]):
                raise SourceError(
                    f"'{file}' has {len(read['x'])} rows of x but {len(tensor)} of {each}; the "
                    "numbers must be equal"
                )
            tensors[each].append(tensor)
        if header.order != sorted(header.order):
            tensors["x"][-1] = read["x"][:, header.order]
    parts = tensors.pop("x")
    # A large file stays mapped: a copy would fill the memory of the site.
    x = parts[0] if len(parts) == 1 and parts[0].nbytes >= LARGE else torch.cat(parts)
    finite = torch.cat([torch.isfinite(rows).all(dim=1) for rows in torch.split(x, CHECKED)])
    # Of a bag, only the images that can be used are in its mean.
    broken = [] if source.bags is not None else (~finite).nonzero().flatten().tolist()
    left.note(
        broken,
        f"x in '{files[0]}' has NaN or infinity in {len(broken)} of {len(x)} rows, first in row "
        f"{min(broken, default=0)}; remove those rows or compute them again",
    )
    columns = {
        each: [cell for own in all_ for cell in own.tolist()] for each, all_ in tensors.items()
    }
    records = SourceTable(files[0], columns).records(source, left)
    declared = [header.classes.split(",") if source.target is None else () for header in headers]
    sizes = list(map(len, parts))
    records = with_declared(records, columns.get("y", ()), files, sizes, declared, left)
    records = replace(
        records,
        key=content_key(folder, files),
        features=x,
        fingerprint=headers[0].fingerprint,
        same=lambda: same_rows(x),
    )
    return without(records, left)


def feature_headers(files: Sequence[Path], source: DataSource) -> list[FeatureHeader]:
    """The headers of files of features, whose tensors are there and of their types; no record is
    read.

    Args:
        files: of one data set.
        source: of the data, with the label column "y".

    Raises:
        DataError: for a file that is none, a tensor that is missing or of another type, or two files
            of different backbones.
    """
    headers = []
    for file in files:
        with _opened(file) as content:
            if missing := sorted({"x", *source.named} - {*content.keys()}):
                raise SourceError(
                    f"'{file}' lacks the tensors {missing}; it has {some(content.keys())}; store x "
                    f"(n, d) and {' (n,), '.join(source.named)} (n,)"
                )
            for each in ("x", *source.named):
                own = content.get_slice(each)
                shape, kind = own.get_shape(), own.get_dtype()
                kinds, what = WHOLE, "integers of shape (n,)"
                if each == "x":
                    kinds, what = FLOATING, "floating point of shape (n, d)"
                elif source.target is not None and each in source.target_columns:
                    kinds, what = REAL, "real numbers of shape (n,)"
                if kind not in kinds or len(shape) != 1 + (each == "x") or 0 in shape[1:]:
                    raise SourceError(
                        f"{each} in '{file}' is {kind} of shape {tuple(shape)}; it must be {what}"
                    )
            metadata, dimension = content.metadata() or {}, content.get_slice("x").get_shape()[1]
        fingerprint, order = _stored_fingerprint(file, metadata, dimension)
        headers.append(FeatureHeader(dimension, fingerprint, order, metadata.get("classes", "")))
    if len({(each.dimension, each.fingerprint) for each in headers}) > 1:
        first, second = (shown(each.fingerprint) for each in headers)
        raise SourceError(
            f"'{files[0]}' and '{files[1]}' hold features of different backbones or columns, "
            f"{first} and {second}; compute both with one"
        )
    return headers


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as content:
            yield content
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (SafetensorError, RuntimeError, TypeError) as error:
        raise SourceError(
            f"'{file}' is not a readable safetensors file ({error}); write it again"
        ) from error


def _stored_fingerprint(
    file: Path, metadata: Mapping[str, str], dimension: int
) -> tuple[str, list[int]]:
    """The fingerprint of the features of a safetensors file, with the names of its columns.

    Args:
        file: for errors.
        metadata: of the file.
        dimension: d of the features.

    Returns:
        The fingerprint, and the order in which columns are read.

    Raises:
        DataError: for names that are no list of d different texts.
    """
    fingerprint = metadata.get("fingerprint", "") or f"features-{dimension}"
    try:
        names = json.loads(metadata.get("columns") or "[]")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("no list of texts")
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"the metadata 'columns' of '{file}' is no JSON list of names ({error}); write it again"
        ) from None
    if not names:
        return fingerprint, list(range(dimension))
    if len(names) != dimension:
        raise SourceError(
            f"the metadata 'columns' of '{file}' has {len(names)} names for {dimension} columns of x; "
            "write one for each"
        )
    try:
        found, order = in_column_order(names)
        return with_columns(fingerprint, found), order
    except DataError as error:
        raise SourceError(f"'{file}': {error}") from None

"""Reader of precomputed features in safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.client_app.datasets.duplicates import same_rows
from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.readers import (
    content_key,
    declared_classes,
    names_by_file,
    some,
    split_by_size,
    split_files,
)
from fedsurrogate.client_app.datasets.records import Records, without
from fedsurrogate.client_app.datasets.target_values import checked, columns_of
from fedsurrogate.client_app.datasets.whole_site import SourceError
from fedsurrogate.common.backbones.column_names import in_column_order, shown, with_columns
from fedsurrogate.common.errors import DataError

# Rows that are checked at a time, and bytes of a file that is not copied to memory.
CHECKED, LARGE = 8192, 2**26


def read_safetensors(
    folder: Path, name: str, patient_column: str = "", left: LeftOut | None = None
) -> Records:
    """Read features.

    A file has `x` (n, d) floating point, `y` (n,) integer; optional: metadata `fingerprint`,
    `classes` and `columns` (a JSON list of d names), and tensors (n,) of integers named
    `patient_column`, and as the bags of `left`. The metadata of a file are about this file alone.

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
    prints: list[str] = []
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
                metadata.append(content.metadata() or {})
                tensors.append((content.get_tensor("x"), _of_target(content, file, left)))
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
        x, y = tensors[-1]
        fingerprint, order = stored_fingerprint(file, metadata[-1], x.shape[1])
        prints.append(fingerprint)
        if order != sorted(order):
            tensors[-1] = x[:, order], y
    check_one_backbone(files, prints, [x.shape[1] for x, _ in tensors])
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
        lists = [each.get("classes", "").split(",") for each in metadata]
        declared = [declared_classes(file, own) for file, own in zip(files, lists, strict=True)]
        labels, classes = names_by_file(files, declared, [own.tolist() for _, own in tensors], left)
    else:
        values, classes = checked(y, left.target, str(files[0]), left), ()
        labels = [str(row) for row in values.tolist()]
    records = Records(
        labels,
        content_key(folder, files),
        split_by_size([len(y) for _, y in tensors]),
        classes=classes or None,
        features=x,
        fingerprint=prints[0],
        patients=_texts(owners.get(patient_column)),
        same=lambda: same_rows(x),
        values=values,
        bags=_texts(owners.get(left.bags or "")),
    )
    return without(records, left)


def stored_fingerprint(
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


def check_one_backbone(
    files: Sequence[Path], fingerprints: Sequence[str], dimensions: Sequence[int]
) -> None:
    """Refuse two files with features of different backbones, dimensions or columns.

    Raises:
        DataError: with both.
    """
    if len({*zip(fingerprints, dimensions, strict=True)}) > 1:
        first, second = map(shown, fingerprints)
        raise SourceError(
            f"'{files[0]}' and '{files[1]}' hold features of different backbones or columns, "
            f"{first} and {second}; compute both with one"
        )


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

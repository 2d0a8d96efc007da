"""A first look at a site's data before it joins: columns and folders, without labels and images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fedsurrogate.client_app.datasets.dataset import DataSource, folder_of, load_all
from fedsurrogate.client_app.datasets.image_folders import (
    IMAGE_SUFFIXES,
    find_table,
    in_class_folders,
    note_depth,
)
from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.one_record import is_file
from fedsurrogate.client_app.datasets.schema import read_schema
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.extras.needed import OF_DATA
from fedsurrogate.common.extras.packages import check_installed
from fedsurrogate.common.targets.number import Number


def check_files(node: NodeConfig) -> list[str]:
    """Check the data that a node-config names.

    Whether the site joins must not depend on its records, because the coordinator sees it. So
    warnings do not stop the site.

    Args:
        node: the site's settings.

    Returns:
        Warnings about folders without images, or not of classes.

    Raises:
        DataError: for a wrong file, column or type.
        PackageError: for a kind of data whose optional package is not installed.
    """
    if not node.data or node.data == "digits":
        return []
    if node.data in OF_DATA:
        check_installed(OF_DATA[node.data], f"data = {node.data!r} in the node-config")
    warnings: list[str] = []
    for name in node.dataset or ("",):
        source = _source(node, name)
        read_schema(source)
        if node.data in ("imagefolder", "dicom"):
            warnings += _of_folders(source, name)
    return warnings


def check_enough(node: NodeConfig, smallest_site: int) -> None:
    """Check that the site's folder is not empty, or not mounted, before the site joins.

    Only then: an answer to a request must not depend on it. A folder that empties later gives noise.

    Args:
        node: the site's settings.
        smallest_site: of its policy; 0: no look is taken.

    Raises:
        DataError: for fewer records than that.
    """
    if not smallest_site or not node.data or node.data == "digits":
        return
    found = 0
    for name in node.dataset or ("",):
        source = _source(node, name)
        found += _records(source, name)
    if found < smallest_site:
        raise DataError(
            f"data-dir = {node.data_dir!r} has {found or 'no'} records of kind {node.data!r}, and the "
            f"policy's smallest-site is {smallest_site}; is the disk mounted, and the folder the right "
            "one? To join all the same, set smallest-site in the policy, 0 for none"
        )


@dataclass(frozen=True)
class _Columns(Number):
    """Columns that runs may learn, of which no run has said yet what they mean."""

    gaps = True


def _source(node: NodeConfig, name: str) -> DataSource:
    """A data set of the site. Where the node-config names columns that runs may learn, its records
    need these, and no class.
    """
    assert node.data
    columns = node.target_columns
    target = _Columns(columns, ((-1.0, 1.0),) * len(columns)) if columns else None
    return DataSource(
        node.data,
        node.data_dir,
        (name,),
        node.label_column,
        "",
        node.patient_column,
        classes=() if target is None else target.rows,
        target=target,
    )


def _records(source: DataSource, name: str) -> int:
    """Records of a data set, without a look into images; those that its files list."""
    if source.kind in ("imagefolder", "dicom"):
        try:
            root, table = find_table(folder_of(source, name), name)
            if table is None:
                return len(in_class_folders(root, _wanted(source.kind), LeftOut())[0])
        except (DataError, OSError):
            return 0
    return sum(map(len, load_all(replace(source, one_by_one=True), 0)))


def _wanted(kind: str) -> Callable[[Path], bool]:
    """Which files of class folders are records."""
    if kind == "dicom":
        return is_file
    return lambda path: path.suffix.lower() in IMAGE_SUFFIXES


def _of_folders(source: DataSource, name: str) -> list[str]:
    root, table = find_table(folder_of(source, name), name)
    if table is not None:
        return []
    images = source.kind == "imagefolder"
    try:
        files, _ = in_class_folders(root, _wanted(source.kind), LeftOut())
        if not files:
            return [
                f"'{root}' has no {'images' if images else 'files'} in class folders; make one "
                "folder per class, or a table"
            ]
        note_depth(root, files, LeftOut(), () if images else None)
    except DataError as error:
        return [str(error)]
    return []

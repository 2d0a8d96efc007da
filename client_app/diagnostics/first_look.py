"""A first look at a site's data before it joins: columns and folders, without labels and images."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.extras import OF_DATA, check_installed
from fedsurrogate.common.targets.number import Number

from ..datasets.dataset import DataSource, folder_of, load_all
from ..datasets.image_folders import IMAGE_SUFFIXES, find_table, in_class_folders, note_depth
from ..datasets.left_out import LeftOut, is_file
from ..datasets.schema import check_named, read_schema
from ..datasets.source import some
from ..node_config import NodeConfig

# Classes that a person reads before confirming them.
MOST_LISTED = 20


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
    for source in _sources(node):
        read_schema(source)
        try:
            found = _in_folders(source)
            if found is not None and not found[1]:
                images = "images" if source.kind == "imagefolder" else "files"
                what = f"'{found[0]}' has no {images} in class folders"
                warnings.append(f"{what}; make one folder per class, or a table")
            elif found is not None:
                note_depth(*found, LeftOut(), () if source.kind == "imagefolder" else None)
        except DataError as error:
            warnings.append(str(error))
    return warnings


def check_enough(node: NodeConfig, smallest_site: int) -> None:
    """Check that the site's folder is not empty, or not mounted, before the site joins.

    Only then: an answer to a request must not depend on records. A folder without any later gives noise;
    one with nothing in it is refused.

    Args:
        node: the site's settings.
        smallest_site: of its policy; 0: no look is taken.

    Raises:
        DataError: for fewer records than that.
    """
    if not smallest_site or not node.data or node.data == "digits":
        return
    found = sum(map(_records, _sources(node)))
    if found < smallest_site:
        raise DataError(
            f"data-dir = {node.data_dir!r} has {found or 'no'} records of kind {node.data!r}, and the "
            f"policy's smallest-site is {smallest_site}; is the disk mounted, and the folder the right "
            "one? To join all the same, set smallest-site in the policy, 0 for none"
        )


def classes_found(node: NodeConfig) -> list[str]:
    """The classes of which this site has a record, sorted.

    Args:
        node: the site's settings.

    Raises:
        DataError: the data cannot be read.
    """
    found = set[str]()
    for source in _sources(node.model_copy(update={"target_columns": ()})):
        folders = _in_folders(source)
        if folders is not None:
            found |= {name for _, name in folders[1]}
            continue
        for data in load_all(replace(source, one_by_one=True), 0):
            found |= {data.classes[label] for label in set(data.labels.tolist())}
    return sorted(found)


def check_classes(node: NodeConfig, found: Collection[str] | None = None) -> list[str]:
    """Check that this site has a record of each class that its own settings name, before it joins.

    Only then, as in `check_enough`. Of a folder of classes each request asks again whether it is
    there, with a record or without.

    Args:
        node: the site's settings.
        found: classes with a record, where the data have been read; else they are read.

    Returns:
        What to write into the settings where they name no class.

    Raises:
        DataError: for a class without a record.
    """
    if not node.data or node.data == "digits" or (node.target_columns and not node.classes):
        return []
    try:
        found = sorted(classes_found(node) if found is None else found)
    except (DataError, OSError):
        if node.classes:
            raise
        return []  # Other checks report it.
    if node.classes:
        check_named(node, found, "record")
        return []
    if not found or len(found) > MOST_LISTED or set(",\"'") & set("".join(found)):
        return []
    return [
        f"classes is not set in the node-config. The data have {some(found)}; if these are all, add "
        f'classes="{",".join(found)}", and this site stays away when one of them is gone'
    ]


@dataclass(frozen=True)
class _Columns(Number):
    """Columns that runs may learn, of which no run has said yet what they mean."""

    gaps = True


def _sources(node: NodeConfig) -> Iterator[DataSource]:
    """The data sets of the site. Where the node-config names columns that runs may learn, their records
    need these, and no class.
    """
    assert node.data
    columns = node.target_columns
    target = _Columns(columns, ((-1.0, 1.0),) * len(columns)) if columns else None
    classes = () if target is None else target.rows
    for name in node.dataset or ("",):
        where = (node.data, node.data_dir, (name,), node.label_column, "", node.patient_column)
        yield DataSource(*where, classes=classes, target=target)


def _records(source: DataSource) -> int:
    """Records of a data set, without a look into images; those that its files list."""
    try:
        found = _in_folders(source)
    except (DataError, OSError):
        return 0
    if found is not None:
        return len(found[1])
    return sum(map(len, load_all(replace(source, one_by_one=True), 0)))


def _in_folders(source: DataSource) -> tuple[Path, Sequence[tuple[Path, str]]] | None:
    """The folder of a data set without a table, and the files in its class folders; None for others."""
    if source.kind not in ("imagefolder", "dicom"):
        return None
    (name,) = source.names
    root, table = find_table(folder_of(source, name), name)
    wanted = is_file if source.kind == "dicom" else _is_image
    return None if table is not None else (root, in_class_folders(root, wanted, LeftOut())[0])


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES

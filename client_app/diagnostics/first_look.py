"""A first look at a site's data before it joins: columns and folders, without labels and images."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.extras import OF_DATA, check_installed
from fedsurrogate.common.targets.number import Number

from ..datasets.dataset import DataSource, check_named, folder_of, load_all, read_schema
from ..datasets.image_folders import find_table, in_class_folders, is_image, note_depth
from ..datasets.left_out import LeftOut, is_file
from ..datasets.source import some
from ..node_config import NodeConfig

# Classes that a person reads before confirming them.
MOST_LISTED = 20


def first_look(node: NodeConfig, smallest_site: int) -> list[str]:
    """Look at the data that a node-config names, before the site joins: they are listed once.

    Whether the site joins must not depend on a single record, because the coordinator sees it. So
    warnings do not stop the site. Nor may an answer to a request depend on it: a folder that empties
    later gives noise.

    Args:
        node: the site's settings.
        smallest_site: records that the site must have; 0: whatever is there.

    Returns:
        Warnings about folders without images, or not of classes; and what to write into the settings
        where they name no class.

    Raises:
        DataError: for a wrong file, column or type, for fewer records, such as in a folder that is not
            mounted, or for a class without a record.
        PackageError: for a kind of data whose optional package is not installed.
    """
    if not node.data or node.data == "digits":
        return []
    if node.data in OF_DATA:
        check_installed(OF_DATA[node.data], f"data = {node.data!r} in the node-config")
    found = list_data(node, needed=bool(smallest_site or node.classes))
    if found.records < smallest_site:
        raise DataError(
            f"data-dir = {node.data_dir!r} has {found.records or 'no'} records of kind {node.data!r}, and "
            f"the policy's smallest-site is {smallest_site}; is the disk mounted, and the folder the right "
            "one? To join all the same, set smallest-site in the policy, 0 for none"
        )
    return [*found.warnings, *check_classes(node, found.classes)]


@dataclass
class Listed:
    """What a site's folders and tables hold.

    Attributes:
        records: their number, as files list them, without a look into images.
        classes: with a record.
        warnings: about folders without images, or not of classes.
    """

    records: int = 0
    classes: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)


def list_data(node: NodeConfig, needed: bool = True) -> Listed:
    """List a site's data once.

    Args:
        node: the site's settings, with data of its own.
        needed: whether tables that cannot be read are an error; a wrong column is one in any case.

    Raises:
        DataError: for a wrong file, column or type.
    """
    listed = Listed()
    for source in _sources(node):
        read_schema(source)
        try:
            found = _in_folders(source)
        except (DataError, OSError) as error:
            listed.warnings.append(str(error))
            continue
        if found is None:
            try:
                for data in load_all(replace(source, one_by_one=True), 0):
                    listed.records += len(data)
                    listed.classes |= {data.classes[label] for label in set(data.labels.tolist())}
            except (DataError, OSError):
                if needed:
                    raise
            continue
        listed.records += len(found[1])
        listed.classes |= {name for _, name in found[1]}
        try:
            if not found[1]:
                images = "images" if source.kind == "imagefolder" else "files"
                what = f"'{found[0]}' has no {images} in class folders"
                listed.warnings.append(f"{what}; make one folder per class, or a table")
            else:
                note_depth(*found, LeftOut(), () if source.kind == "imagefolder" else None)
        except DataError as error:
            listed.warnings.append(str(error))
    if node.target_columns and node.classes:
        of_classes = list_data(node.model_copy(update={"target_columns": ()}))
        listed.classes = of_classes.classes
    return listed


def classes_to_confirm(node: NodeConfig, found: Collection[str]) -> list[str]:
    """Classes that a person can confirm as all that the site has; none where the settings name them,
    where runs learn other targets, or for names that cannot stand in settings.

    Args:
        node: the site's settings.
        found: classes with a record.
    """
    if node.classes or node.target_columns or len(found) > MOST_LISTED:
        return []
    return [] if set(",\"'$\\#") & set("".join(found)) else sorted(found)


def check_classes(node: NodeConfig, found: Collection[str]) -> list[str]:
    """Check that this site has a record of each class that its own settings name, before it joins.

    Only then. Of a folder of classes each request asks again whether it is there, with a record or
    without.

    Args:
        node: the site's settings.
        found: classes with a record.

    Returns:
        What to write into the settings where they name no class.

    Raises:
        DataError: for a class without a record.
    """
    if not node.data or node.data == "digits":
        return []
    if node.classes:
        check_named(node, sorted(found), "record")
    names = classes_to_confirm(node, found)
    line = ",".join(names)
    return [
        f"classes is not set in the node-config. The data have {some(names)}; if these are all, add "
        f'classes="{line}" (CLASSES={line} in the .env of a kit), and this site stays away when one of them '
        "is gone"
    ][: bool(names)]


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


def _in_folders(source: DataSource) -> tuple[Path, Sequence[tuple[Path, str]]] | None:
    """The folder of a data set without a table, and the files in its class folders; None for others."""
    if source.kind not in ("imagefolder", "dicom"):
        return None
    (name,) = source.names
    root, table = find_table(folder_of(source, name), name)
    wanted = is_file if source.kind == "dicom" else is_image
    return None if table is not None else (root, in_class_folders(root, wanted, LeftOut())[0])

"""Schema of a site's data: columns, types and dimension, read from headers without any record."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from fedsurrogate.common.errors import DataError

from ..node_config import NodeConfig
from .dicom import KEYS, OF_HEADERS, OF_ONE_IMAGE, key_of
from .feature_files import feature_headers, read_slides
from .image_folders import class_folders, find_table, table_of
from .left_out import LeftOut, SourceError
from .readers import parquet_files, split_files
from .source import DataSource, folder_of, require_columns, some
from .tables import csv_header, is_parquet, of_lists, parquet_table


def read_schema(source: DataSource) -> tuple[int, str]:
    """The schema of a source of one data set.

    Args:
        source: of the data.

    Returns:
        Dimension and fingerprint of stored features; zero and empty for images, whose backbone decides them.

    Raises:
        DataError: for a wrong folder, file, column or type; one record more or less changes none of
            these.
    """
    name = source.names[0] if source.names else ""
    folder = folder_of(source, name)
    try:
        if source.kind == "safetensors":
            files = split_files(folder, name, ".safetensors")
            header = feature_headers(files, replace(source, site_column="", label_column="y"))[0]
            return header.dimension, header.fingerprint
        if source.kind == "slides":
            found = read_slides(source, name, LeftOut(one_by_one=True))
            assert found.features is not None
            return found.features.shape[1], found.fingerprint
        if source.kind == "parquet":
            parquet_files(source, folder, name)
            return 0, ""
        dicom = source.kind == "dicom"
        _, table = table_of(source, name, OF_HEADERS if dicom else ())
        if table is None:
            return 0, ""
        in_header = dicom and source.bags in OF_HEADERS
        wanted = (replace(source, bags="") if in_header else source).named
        if is_parquet(table):
            columns = parquet_table(table, wanted, source.label_column, source.target, ())[1]
        else:
            columns = csv_header(table)[0]
            if source.target and of_lists(columns, source.label_column, source.target):
                columns += source.target.columns
        if dicom:
            _check_key(key_of(table, columns), source, table)
        require_columns(table, ({} if dicom else {"path": ""}) | wanted, columns)
    except OSError as error:
        raise DataError(
            f"data in '{folder}' cannot be read ({error}); check the files and who may read them"
        ) from error
    return 0, ""


def check_class_folders(node: NodeConfig) -> None:
    """Refuse data without a folder of a class that the site's own settings name. An empty folder
    counts, so no record decides this.

    Args:
        node: the site's settings.

    Raises:
        DataError: for a class without a folder; nothing for tables and files, which have none.
    """
    if not node.classes or node.data not in ("imagefolder", "dicom"):
        return
    there = set[str]()
    for name in node.dataset or ("",):
        root, table = find_table(folder_of(DataSource(node.data, node.data_dir), name), name)
        if table is not None:
            return
        there |= class_folders(root)
    check_named(node, there, "folder")


def check_run_classes(node: NodeConfig, wanted: Collection[str]) -> None:
    """Refuse a run that writes classes otherwise than the site's own settings: the records of such
    a class would be left out, and only noise would be charged for it.

    A site may lack classes of a run, and a run may leave classes of a site out. Where both is so,
    a name is wrong. No record decides this.

    Args:
        node: the site's settings.
        wanted: the classes of the run; empty if it names none.

    Raises:
        DataError: that names the classes.
    """
    unknown = [name for name in wanted if name not in node.classes]
    unused = [name for name in node.classes if name not in wanted]
    if wanted and unknown and unused:
        raise SourceError(
            f"the run has classes {some(unknown)}, which this site's settings do not name, and lacks "
            f"{some(unused)}, which they do (classes = {','.join(node.classes)!r}). The coordinator and all "
            "sites need the same names: rename the folders or labels, and classes in this site's settings "
            "(CLASSES in the .env of a kit); if the run means to leave yours out, remove classes there"
        )


def check_named(node: NodeConfig, there: Collection[str], what: str) -> None:
    """Refuse data that lack a class of the site's own settings.

    Args:
        node: the site's settings.
        there: the classes that the data have.
        what: of a class is missing.

    Raises:
        DataError: that names the class.
    """
    if gone := [name for name in node.classes if name not in there]:
        raise SourceError(
            f"classes = {','.join(node.classes)!r} in the node-config, but data-dir = "
            f"{node.data_dir!r} has no {what} of {some(gone)}; it has {some(sorted(there))}. Was it "
            "renamed, or not mounted? If the class is gone for good, correct classes"
        )


def _check_key(key: str, source: DataSource, table: Path) -> None:
    """Where single images are protected, refuse a table whose rows are about many images.

    One more image with a row of its own may contradict the row of a patient, and all images of that
    patient would be left out.
    """
    of_one_bag = {"study": KEYS[:3], "patient": KEYS}.get(source.bags or "", OF_ONE_IMAGE)
    if source.one_by_one and not source.patients_protected and key not in of_one_bag:
        raise DataError(
            f"'{table}' names images by {key!r}, so one row decides about many, but this site "
            f"protects single images; add one of the columns {', '.join(OF_ONE_IMAGE)}, or protect "
            "patients (unit in the node-config)"
        )

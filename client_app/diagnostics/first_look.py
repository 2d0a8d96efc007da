"""A first look at a site's data before it joins: columns and folders, without labels and images."""

from __future__ import annotations

from client_app.datasets.dataset import DataSource, folder_of
from client_app.datasets.image_folders import (
    IMAGE_SUFFIXES,
    find_table,
    in_class_folders,
    note_depth,
)
from client_app.datasets.left_out import LeftOut
from client_app.datasets.one_record import is_file
from client_app.datasets.schema import read_schema
from client_app.node_config import NodeConfig
from common.errors import DataError
from common.extras.needed import OF_DATA
from common.extras.packages import check_installed


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
        source = DataSource(
            node.data, node.data_dir, (name,), node.label_column, "", node.patient_column
        )
        read_schema(source)
        if node.data in ("imagefolder", "dicom"):
            warnings += _of_folders(source, name)
    return warnings


def _of_folders(source: DataSource, name: str) -> list[str]:
    root, table = find_table(folder_of(source, name), name)
    if table is not None:
        return []
    images = source.kind == "imagefolder"
    wanted = (lambda path: path.suffix.lower() in IMAGE_SUFFIXES) if images else is_file
    try:
        files, _ = in_class_folders(root, wanted, LeftOut())
        if not files:
            return [
                f"'{root}' has no {'images' if images else 'files'} in class folders; make one "
                "folder per class, or a table"
            ]
        note_depth(root, files, LeftOut(), () if images else None)
    except DataError as error:
        return [str(error)]
    return []

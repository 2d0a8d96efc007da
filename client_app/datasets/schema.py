"""Schema of a site's data: columns, types and dimension, read from headers without any record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedsurrogate.client_app.datasets.bags import OF_FOLDER
from fedsurrogate.client_app.datasets.dataset import DataSource, folder_of
from fedsurrogate.client_app.datasets.dicom import KEYS, OF_HEADERS, OF_ONE_IMAGE, key_of
from fedsurrogate.client_app.datasets.feature_files import check_one_backbone, stored_fingerprint
from fedsurrogate.client_app.datasets.image_folders import find_table
from fedsurrogate.client_app.datasets.names import column_names
from fedsurrogate.client_app.datasets.readers import (
    OF_FEATURES,
    image_column,
    named_columns,
    refuse_columns,
    require_columns,
    some,
    split_files,
)
from fedsurrogate.client_app.datasets.tables import check_cells, csv_header, is_parquet, with_labels
from fedsurrogate.client_app.datasets.target_values import check_table, columns_of
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.common.identity import normal

# Types of tensors.
WHOLE, FLOATING = ("I64", "I32", "I16", "I8", "U8"), ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Schema:
    """What the headers of a site's data show.

    Attributes:
        dimension: of stored features; zero for images, where the backbone decides it.
        fingerprint: of stored features; empty for images.
    """

    dimension: int = 0
    fingerprint: str = ""


def read_schema(source: DataSource) -> Schema:
    """The schema of a source of one data set.

    Args:
        source: of the data.

    Raises:
        DataError: for a wrong folder, file, column or type; one record more or less changes none of
            these.
    """
    name = source.names[0] if source.names else ""
    folder = folder_of(source, name)
    try:
        if source.kind == "safetensors":
            return _features(split_files(folder, name, ".safetensors"), source)
        bags = "" if source.kind == "dicom" and source.bags in OF_HEADERS else source.bags
        wanted = named_columns(source.label_column, source.target, "", source.patient_column, bags)
        if source.kind == "parquet":
            for file in split_files(folder, name, ".parquet"):
                columns, images = _parquet_columns(file, wanted, source)
                require_columns(file, wanted | {images: OF_FEATURES}, columns)
            return Schema()
        root, table = find_table(folder, name)
        if table is None:
            check_table(root, source.target)
            refuse_columns(
                f"'{root}' has no table with columns; put one next to the images",
                "",
                source.patient_column,
                None if bags == OF_FOLDER else bags,
            )
            return Schema()
        of_parquet = is_parquet(table)
        columns = _parquet_columns(table, wanted, source)[0] if of_parquet else _csv_columns(table)
        if source.kind == "dicom":
            _check_key(key_of(table, columns), source, table)
        paths = {} if source.kind == "dicom" else {"path": ""}
        require_columns(table, paths | wanted, columns)
    except OSError as error:
        raise DataError(
            f"data in '{folder}' cannot be read ({error}); check the files and who may read them"
        ) from error
    return Schema()


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


def _features(files: list[Path], source: DataSource) -> Schema:
    from safetensors import SafetensorError, safe_open

    of_target = columns_of("y", source.target)
    given = [name for name in (source.patient_column, source.bags) if name]
    schemas: list[Schema] = []
    for file in files:
        try:
            with safe_open(file, "pt") as content:
                if missing := sorted({"x", *of_target, *given} - set(content.keys())):
                    raise DataError(
                        f"'{file}' lacks the tensors {missing}; it has {some(content.keys())}"
                    )
                x = content.get_slice("x")
                shape, kind = x.get_shape(), x.get_dtype()
                if len(shape) != 2 or not shape[1] or kind not in FLOATING:
                    raise DataError(
                        f"x in '{file}' is {kind}, {len(shape)}-dimensional; it must be floating "
                        "point (n, d)"
                    )
                for name in (*of_target, *given):
                    each = content.get_slice(name)
                    valued = source.target is not None and name not in given
                    kinds = (*WHOLE, *FLOATING, "BOOL") if valued else WHOLE
                    if len(each.get_shape()) != 1 or each.get_dtype() not in kinds:
                        raise DataError(
                            f"{name} in '{file}' is {each.get_dtype()}; it must be "
                            f"{'numbers' if valued else 'integers'} of shape (n,)"
                        )
                fingerprint, _ = stored_fingerprint(file, content.metadata() or {}, shape[1])
                schemas.append(Schema(shape[1], fingerprint))
        except SafetensorError as error:
            raise DataError(
                f"'{file}' is not a readable safetensors file ({error}); write it again"
            ) from error
    check_one_backbone(
        files, [each.fingerprint for each in schemas], [each.dimension for each in schemas]
    )
    return schemas[0]


def _parquet_columns(
    file: Path, wanted: Iterable[str], source: DataSource
) -> tuple[list[str], str]:
    """All columns, of which those that are wanted hold cells that can be read, and that of images."""
    with needed_for(f"the file '{file}'"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file)
    except pa.ArrowException as error:
        raise DataError(
            f"'{file}' is not a readable parquet file ({error}); write it again"
        ) from error
    schema = with_labels(schema.empty_table(), source.label_column, source.target).schema
    check_cells(file, schema, wanted)
    return column_names(file, schema.names), normal(image_column(schema))


def _csv_columns(file: Path) -> list[str]:
    """The columns in the first line; no other line is read."""
    columns, _ = csv_header(file)
    if not columns:
        raise DataError(f"table '{file}' is empty; its first line must name the columns")
    return columns

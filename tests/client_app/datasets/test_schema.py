"""Headers say what a site's data are: what is missing or of another type is named, and so is a disk
that cannot be read.
"""

import errno
import itertools
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedsurrogate.client_app.datasets import dataset
from fedsurrogate.client_app.datasets.dataset import DataSource, load, read_schema
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.targets.target import Target


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOENT, errno.ESTALE])
@pytest.mark.parametrize("kind", ["safetensors", "parquet", "imagefolder"])
def test_headers_that_cannot_be_read_name_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, code: int
) -> None:
    def fails(*_: object) -> object:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(dataset, "split_files", fails)
    monkeypatch.setattr(dataset, "parquet_files", fails)
    monkeypatch.setattr(dataset, "table_of", fails)
    with pytest.raises(DataError, match=f"{tmp_path.name}.* cannot be read"):
        read_schema(DataSource(kind, str(tmp_path)))  # type: ignore[arg-type]


def number() -> Target:
    """A run's target that is a number."""
    settings_: dict[str, Any] = {
        "task": "regression",
        "value-columns": "age",
        "target-range": "0,99",
    }
    target = parse_run(settings_).target
    assert target is not None
    return target


# Of each side and type, one that a site may not have.
KINDS_OF_X = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool)
KINDS_OF_COLUMN = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float16,
    torch.float32, torch.float64,
)  # fmt: skip
SHAPES = ((3, 4), (0, 2), (3, 1), (3,), (3, 0), (3, 2, 2))
X = st.one_of(
    st.none(),
    st.sampled_from(SHAPES).map(torch.zeros),
    st.sampled_from(KINDS_OF_X).map(lambda kind: torch.zeros(3, 4, dtype=kind)),
)
COLUMN = st.one_of(
    st.none(),
    st.sampled_from(KINDS_OF_COLUMN).map(lambda kind: torch.zeros(3, dtype=kind)),
    st.sampled_from([(3, 1), ()]).map(lambda shape: torch.zeros(shape, dtype=torch.int64)),
)
KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
WHOLE = ("I64", "I32", "I16", "I8", "U8")
NUMBERS = (*WHOLE, "F64", "F32", "F16", "BF16")


@settings(max_examples=200, deadline=None)
@given(
    x=X,
    label=COLUMN,
    who=COLUMN,
    slide=COLUMN,
    patients=st.booleans(),
    bags=st.sampled_from([None, "", "slide"]),
    fingerprint=st.sampled_from(["", "abc"]),
    valued=st.booleans(),
)
def test_each_tensor_that_a_run_needs_is_there_and_of_its_type(
    x: Any, label: Any, who: Any, slide: Any, patients: bool, bags: str | None,
    fingerprint: str, valued: bool,
) -> None:  # fmt: skip
    tensors = {"x": x, "age" if valued else "y": label, "who": who, "slide": slide}
    tensors = {name: each.clone() for name, each in tensors.items() if each is not None}
    given_ = [name for name in ("who" if patients else "", bags) if name]
    learned = "age" if valued else "y"
    with TemporaryDirectory() as name:
        file = Path(name) / "own.safetensors"
        save_file(tensors or {"z": torch.zeros(1)}, file, {"fingerprint": fingerprint})
        source = DataSource(
            "safetensors", name, patient_column="who" if patients else "", bags=bags,
            target=number() if valued else None,
        )  # fmt: skip
        expected = ""
        missing = sorted({"x", learned, *given_} - tensors.keys())
        if missing:
            expected = f"'{file}' lacks the tensors {missing}; it has "
        elif x.ndim != 2 or not x.shape[1] or not x.is_floating_point():
            expected = (
                f"x in '{file}' is {KINDS[x.dtype]} of shape {tuple(x.shape)}; it must be floating "
                "point of shape (n, d)"
            )
        else:
            for column in (learned, *given_):
                kind, found = KINDS[tensors[column].dtype], tensors[column]
                number_ = valued and column == learned
                allowed = (*NUMBERS, "BOOL") if number_ else WHOLE
                if found.ndim != 1 or kind not in allowed:
                    expected = (
                        f"{column} in '{file}' is {kind} of shape {tuple(found.shape)}; it must be "
                        f"{'real numbers' if number_ else 'integers'} of shape (n,)"
                    )
                    break
        if not expected:
            assert read_schema(source) == (x.shape[1], fingerprint or f"features-{x.shape[1]}")
            return
        # Whoever reads the records finds the same.
        for read in (lambda: read_schema(source), lambda: load(source, 0)):
            with pytest.raises(DataError) as error:
                read()
            assert str(error.value).startswith(expected)


@pytest.mark.parametrize("sizes", itertools.product([3, 4], [3, 4]))
@pytest.mark.parametrize("prints", [("a", "a"), ("a", "b"), ("", ""), ("", "a")])
def test_two_files_are_features_of_one_backbone(
    tmp_path: Path, sizes: tuple[int, int], prints: tuple[str, str]
) -> None:
    for part, size, own in zip(("train", "test"), sizes, prints, strict=True):
        content = {"x": torch.zeros(2, size), "y": torch.zeros(2).long()}
        save_file(content, tmp_path / f"own-{part}.safetensors", {"fingerprint": own})
    for names in (("own",), ("own", "other")):
        source = DataSource("safetensors", str(tmp_path), names)
        if sizes[0] != sizes[1] or prints[0] != prints[1]:
            with pytest.raises(DataError, match=r"own-train.*own-test.*of different backbones"):
                read_schema(source)
        else:
            assert read_schema(source) == (sizes[0], prints[0] or f"features-{sizes[0]}")


def test_files_that_are_no_safetensors_and_no_parquet_are_named(tmp_path: Path) -> None:
    for kind, suffix in (("safetensors", "safetensors"), ("parquet", "parquet")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / f"own.{suffix}").write_bytes(b"no such file" * 10)
        with pytest.raises(DataError, match=f"own.{suffix}' is not a readable {kind} file"):
            read_schema(DataSource(kind, str(tmp_path / kind)))  # type: ignore[arg-type]


COLUMNS = st.sets(st.sampled_from(["label", "who", "slide", "path", "image", "SOPInstanceUID"]))


@settings(max_examples=150, deadline=None)
@given(
    present=COLUMNS,
    kind=st.sampled_from(["parquet", "imagefolder", "dicom"]),
    suffix=st.sampled_from([".csv", ".parquet"]),
    patients=st.booleans(),
    bags=st.sampled_from([None, "", "slide", "series", "folder"]),
)
def test_each_column_that_a_run_needs_is_in_the_table(
    present: set[str], kind: Any, suffix: str, patients: bool, bags: str | None
) -> None:
    """A header of DICOM files names bags itself; a class stands in the table."""
    if kind == "parquet":
        suffix = ".parquet"
    columns = sorted(present)
    wanted = ["label", *(["who"] if patients else [])]
    if bags and not (kind == "dicom" and bags == "series"):
        wanted.append(bags)
    with TemporaryDirectory() as name:
        file = Path(name) / f"own{suffix}"
        if suffix == ".csv":
            file.write_text(",".join(columns) + "\n")
        else:
            kinds = {"image": pa.binary()}
            fields = [pa.array([], kinds.get(each, pa.string())) for each in columns]
            pq.write_table(pa.table(dict(zip(columns, fields, strict=True))), file)
        source = DataSource(kind, name, patient_column="who" if patients else "", bags=bags)
        wanted += {"parquet": ["image"], "imagefolder": ["path"], "dicom": []}[kind]
        missing = set(wanted) - present
        unnamed = kind == "dicom" and not present & {"path", "SOPInstanceUID"}
        if (suffix == ".csv" and not columns) or missing or unnamed:
            with pytest.raises(DataError) as error:
                read_schema(source)
            if missing and columns and not unnamed:
                assert all(repr(each) in str(error.value) for each in missing)
        else:
            assert read_schema(source) == (0, "")


@pytest.mark.parametrize("patients", [False, True])
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("bags", [None, "series", "study", "patient"])
@pytest.mark.parametrize(
    "key", ["path", "SOPInstanceUID", "StudyInstanceUID", "AccessionNumber", "PatientID"]
)
def test_where_images_are_protected_no_row_is_about_many_of_them(
    tmp_path: Path, key: str, bags: str | None, one_by_one: bool, patients: bool
) -> None:
    (tmp_path / "own.csv").write_text(f"{key},label\n")
    source = DataSource(
        "dicom", str(tmp_path), bags=bags, one_by_one=one_by_one, patients_protected=patients
    )
    of_one = {
        "study": ("path", "SOPInstanceUID", "StudyInstanceUID"),
        "patient": ("path", "SOPInstanceUID", "StudyInstanceUID", "AccessionNumber", "PatientID"),
    }.get(bags or "", ("path", "SOPInstanceUID"))
    if one_by_one and not patients and key not in of_one:
        with pytest.raises(DataError, match=f"names images by '{key}', so one row decides"):
            read_schema(source)
    else:
        assert read_schema(source) == (0, "")


@pytest.mark.parametrize("kind", ["imagefolder", "dicom"])
@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, ""),
        ({"patient_column": "who"}, "patient-column = 'who'"),
        ({"bags": "slide"}, "bag-column = 'slide'"),
        ({"bags": "folder"}, ""),
        ({"bags": ""}, ""),
    ],
)
def test_columns_need_a_table(tmp_path: Path, kind: Any, more: dict[str, Any], names: str) -> None:
    (tmp_path / "cat").mkdir()
    source = DataSource(kind, str(tmp_path), **more)
    if names:
        with pytest.raises(DataError, match=f"^{names}: .*has no table with columns"):
            read_schema(source)
    else:
        assert read_schema(source) == (0, "")
    valued = DataSource(kind, str(tmp_path), target=number())
    with pytest.raises(DataError, match="has no table, and task = 'regression' needs one"):
        read_schema(valued)

"""Data sets of every kind with one outlier record: bytes, types, lengths, encodings, sizes, dates, and
things that are no file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from tests import dicom_files
from tests.attacks.privacy.neighbours import DIMENSION, FINGERPRINT

SIDE = 4
Odd = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Ordinary records, (class, patient, grey level) each; an outlier one; and the form of the files.

    Attributes:
        kind: of data, see WRITERS.
        records: the ordinary ones.
        odd: attributes of the outlier record, by kind.
        place: of the outlier record among the others.
        form: of the columns in a parquet file; or the folder of the ordinary records.
    """

    kind: str
    records: tuple[tuple[str, str, int], ...]
    odd: Odd = field(default_factory=dict)
    place: int = 0
    form: str = ""


NAMES = (
    b"", b" ", b"a", b"b", b"1", b"1.0", b"nan", b"None", b"\xff", b"\xfe", b"a\0", b"\0", b"/", b"..", b"../0.png",
    b"./0.png", b"0.png", b"0.png\0", b"/dev/zero", b"/etc/passwd", b"x" * 300, b"x" * 70000, b"train", b"test", b"path",
    b"caf\xc3\xa9", b"cafe\xcc\x81", b"\xe2\x80\xae", b"\x1b[31m", b"\r", b"a\rb", b'"', b'"a', b"'", b"=1+1", b"-0",
    b"\xef\xbb\xbf", b"\xed\xa0\x80", b"1" * 5000,
)  # fmt: skip
texts = st.one_of(st.sampled_from(NAMES), st.binary(max_size=12))


def picture(mode: str = "L", size: tuple[int, int] = (SIDE, SIDE), form: str = "PNG") -> bytes:
    """An image file."""
    file = io.BytesIO()
    Image.new(mode, size, 77 if mode in ("L", "I;16", "P", "F") else None).save(file, form)
    return file.getvalue()


def giant(width: int, height: int) -> bytes:
    """A PNG file whose header states this size."""
    import struct
    import zlib

    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = b"IDAT" + zlib.compress(b"\0" * 64)
    chunks = [
        struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each))
        for each in (head, body, b"IEND")
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


PICTURES = (
    picture(), picture("RGBA"), picture("I;16"), picture("CMYK", form="JPEG"), picture("P", form="GIF"),
    picture("F", form="TIFF"), picture("L", (1, 3000)), picture("L", (3000, 1)), picture("1", (1, 1)), b"",
    picture()[:40], picture("RGB", form="JPEG")[:-20], giant(2**31 - 1, 2**31 - 1), giant(60000, 60000), giant(0, 5),
    b"II*\0\xff\xff\xff\xff", b"GIF89a", b"\xff\xd8\xff\xe0", b"P5 99999999999 1 255 ", b"<svg/>", b"\0" * 200,
)  # fmt: skip
pictures = st.one_of(st.sampled_from(PICTURES), st.binary(max_size=80))
# What stands in the place of a file, and at which step it vanishes.
THINGS = ("file", "file", "file", "pipe", "folder", "nowhere", "loop", "zeros", "forbidden")
VANISHES = ("", "", "after listing", "after copies")

# A patient ID whose bytes are no text; a number stands for it where an ID is one.
NO_TEXT, INSTEAD = "\udcfe", "4"
ordinary = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(("1", "2", "3", NO_TEXT))), max_size=4
).map(lambda found: tuple((*each, 20 + 40 * i) for i, each in enumerate(found)))
file_of = {
    "content": pictures,
    "thing": st.sampled_from(THINGS),
    "vanishes": st.sampled_from(VANISHES),
}
UIDS = ("", "x", "1.2.840.10008.1.2", "1.2.840.10008.1.2.1.99", "1.2.3", "9" * 70, "\xff", "1..2")
numbers_as_text = st.sampled_from(["", "0", "-1", "nan", "1e999", "abc", "1e-320", "1\\2", "1e308"])
TAGS = {
    "PatientID": st.sampled_from(["", "1", "9", "9 ", "9\\8", "\xff", "x" * 100, "\0"]),
    "Rows": st.sampled_from([0, 1, 3, 65535]),
    "Columns": st.sampled_from([0, 1, 5, 65535]),
    "NumberOfFrames": st.sampled_from(["0", "1", "2", "-1", "2147483647"]),
    "BitsStored": st.sampled_from([0, 1, 8, 16, 99]),
    "BitsAllocated": st.sampled_from([0, 1, 8, 16, 64]),
    "SamplesPerPixel": st.sampled_from([0, 1, 3, 4]),
    "PixelRepresentation": st.sampled_from([0, 1, 7]),
    "PhotometricInterpretation": st.sampled_from(["", "RGB", "MONOCHROME1", "PALETTE COLOR", "X"]),
    "WindowCenter": numbers_as_text,
    "WindowWidth": numbers_as_text,
    "RescaleSlope": numbers_as_text,
    "RescaleIntercept": numbers_as_text,
    "VOILUTFunction": st.sampled_from(["SIGMOID", "LINEAR_EXACT", "X"]),
    "SpecificCharacterSet": st.sampled_from(["ISO_IR 192", "X", "\\ISO 2022 IR 87", "\xff"]),
    "PixelData": st.sampled_from([b"", b"\0", b"\0" * 10**4]),
    "BurnedInAnnotation": st.sampled_from(["YES", "X", ""]),
    "StudyDate": st.sampled_from(["99999999", "x", "20230230"]),
}
tags = st.fixed_dictionaries({}, optional=TAGS)
cut = st.one_of(st.none(), st.integers(0, 900))
SYNTAXES = st.sampled_from([*UIDS, "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.1"])
# Columns of one type: those of the ordinary records must fit as well.
COLUMNS = ("string", "large", "dictionary", "whole", "real", "pandas")
# Ordinary records are below the root, or all in a folder of training records.
FORMS = {
    "folder": ("", "train"),
    "dicom": ("", "train"),
    "parquet": COLUMNS,
    "parquet table": COLUMNS,
}
ODD: dict[str, st.SearchStrategy[Odd]] = {
    "folder": st.fixed_dictionaries(
        {
            "folder": st.sampled_from(
                [b"a", b"b", b"train", b"test", b"train/a", b"test/b", b"\xff", b"a.csv", b".x",
                 b"caf\xc3\xa9", b"cafe\xcc\x81", b"a/deep/er", b"x\ny", b"validation", b"test/test"]
            ),
            "name": st.sampled_from([b"odd.png", b"\xff.png", b"x\ny.png", b".png", b"o.PNG", b"o.tiff", b"o.csv"]),
            **file_of,
        }
    ),
    "table": st.fixed_dictionaries({"line": st.one_of(
        st.tuples(st.one_of(st.just(b"odd.png"), texts), st.one_of(st.just(b"a"), texts), texts).map(b",".join),
        st.binary(max_size=30),
    ).map(lambda line: line.replace(b"\n", b"")), **file_of}),
    "parquet table": st.fixed_dictionaries(
        {"path": st.one_of(st.none(), st.just(b"odd.png"), texts), "label": st.one_of(st.none(), texts),
         "who": st.one_of(st.none(), texts), "number": st.sampled_from([None, -1, 1, 2**53 + 1, 2**63 - 1]),
         "real": st.sampled_from([None, float("nan"), float("inf"), 0.5, 1.0, 1e300]),
         "date": st.sampled_from([None, 0, 2**31 - 1, -(2**31)]), "extra": texts, **file_of}
    ),
    "features": st.fixed_dictionaries(
        {"values": st.lists(st.sampled_from([0.0, -0.0, 1.0, 3.4e38, -3.4e38, 1e-45, float("nan"), float("inf"),
                                             65504.0, 1e5]), min_size=DIMENSION, max_size=DIMENSION),
         "label": st.sampled_from([0, 1, 2, -1, 99, 2**63 - 1, -(2**63)]),
         "who": st.sampled_from([0, 1, 9, -1, 2**63 - 1, -(2**63)])}
    ),
    "parquet": st.fixed_dictionaries(
        {"content": st.one_of(st.none(), pictures), "file": st.one_of(st.none(), texts),
         "label": st.one_of(st.none(), texts), "who": st.one_of(st.none(), texts),
         "number": st.sampled_from([None, -1, 0, 1, 9, 2**63 - 1]),
         "real": st.sampled_from([None, float("nan"), float("inf"), 0.5, 1.0, 1e300]),
         "null": st.booleans()}
    ),
    "dicom": st.fixed_dictionaries(
        {"tags": tags, "missing": st.sets(st.sampled_from(sorted(TAGS)), max_size=3), "syntax": SYNTAXES, "cut": cut,
         "folder": st.sampled_from([b"a", b"b", b"test", b"\xff", b"train/a"]), **file_of}
    ),
    "dicom table": st.fixed_dictionaries(
        {"tags": tags, "missing": st.sets(st.sampled_from(sorted(TAGS)), max_size=3), "syntax": SYNTAXES, "cut": cut,
         "line": st.one_of(st.just(b"odd.dcm,a"), st.binary(max_size=20),
                           st.tuples(texts, texts).map(b",".join)).map(lambda line: line.replace(b"\n", b"")),
         **file_of}
    ),
}  # fmt: skip
KINDS = tuple(ODD)


def cases(kind: str) -> st.SearchStrategy[Case]:
    """Data sets of a kind, with an outlier record."""
    return st.builds(
        Case,
        st.just(kind),
        ordinary,
        ODD[kind],
        st.integers(0, 4),
        st.sampled_from(FORMS.get(kind, ("",))),
    )


def write(case: Case, folder: Path, odd: bool) -> tuple[dict[str, Any], Callable[[], None]]:
    """Write a data set with or without the outlier record.

    Returns:
        Its node-config, and a function that removes the outlier record's file.
    """
    folder.mkdir(parents=True)
    file = WRITERS[case.kind](case, folder, odd)
    kinds = {"folder": "imagefolder", "table": "imagefolder", "parquet table": "imagefolder"}
    kind = kinds.get(case.kind, case.kind.split()[0])
    settings: dict[str, Any] = {
        "data": "safetensors" if kind == "features" else kind,
        "data-dir": str(folder),
    }
    if case.kind not in ("folder", "dicom", "dicom table"):
        settings["patient-column"] = "who"

    def vanish() -> None:
        if file is not None and file.is_file():
            file.unlink()

    return settings, vanish


def _put(folder: Path, name: bytes, odd: Odd, content: bytes) -> Path:
    """Put the odd thing in the place of a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / os.fsdecode(name)
    match odd["thing"]:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "nowhere" | "loop" | "zeros":
            targets = {"nowhere": "gone", "loop": path.name, "zeros": "/dev/zero"}
            path.symlink_to(targets[odd["thing"]])
        case _:
            path.write_bytes(content)
            if odd["thing"] == "forbidden":
                path.chmod(0)
    return path


def _grey(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (SIDE, SIDE), level).save(file, "PNG")
    return file.getvalue()


def _inserted(rows: list[Any], case: Case, odd: Any) -> list[Any]:
    place = min(case.place, len(rows))
    return [*rows[:place], odd, *rows[place:]]


def _folder(case: Case, folder: Path, odd: bool) -> Path | None:
    for number, (label, _, level) in enumerate(case.records):
        place = folder / case.form / label
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(_grey(level))
    if not odd:
        return None
    # Beside the other records, never in the place of one.
    name = b"%d-%s" % (min(case.place, 9), case.odd["name"])
    return _put(folder / os.fsdecode(case.odd["folder"]), name, case.odd, case.odd["content"])


def _with_images(case: Case, folder: Path, odd: bool) -> Path | None:
    for number, (_, _, level) in enumerate(case.records):
        (folder / f"{number}.png").write_bytes(_grey(level))
    return _put(folder, b"odd.png", case.odd, case.odd["content"]) if odd else None


def _table(case: Case, folder: Path, odd: bool) -> Path | None:
    lines = [
        f"{number}.png,{label},{who}".encode(errors="surrogateescape")
        for number, (label, who, _) in enumerate(case.records)
    ]
    if odd:
        lines = _inserted(lines, case, case.odd["line"])
    (folder / "t.csv").write_bytes(b"\n".join([b"path,label,who", *lines]) + b"\n")
    return _with_images(case, folder, odd)


def _bytes_of(case: Case) -> list[Any]:
    return [who.encode(errors="surrogateescape") for _, who, _ in case.records]


def _id(who: str) -> str:
    return who.replace(NO_TEXT, INSTEAD)


def _column(form: str, values: list[Any]) -> Any:
    """A column of texts (bytes), which need not be text."""
    whole = pa.array(values, pa.large_binary() if form == "large" else pa.binary())
    column = whole.view(pa.large_string() if form == "large" else pa.string())
    return column.dictionary_encode() if form == "dictionary" else column


def _numbers(form: str, values: list[Any]) -> Any:
    """A column of numbers; pandas makes one of floating point where there is a gap."""
    if form == "real" or (form == "pandas" and None in values):
        return pa.array([None if each is None else float(each) for each in values], pa.float64())
    return pa.array(values, pa.int64())


def _labels(case: Case, odd: bool, ordinary_: list[Any]) -> Any:
    """A column of classes "a" and "b", or of numbers."""
    if case.form in ("whole", "real", "pandas"):
        values: list[Any] = ["ab".index(each) for each in ordinary_]
        name = "real" if case.form == "real" else "number"
        return _numbers(case.form, _inserted(values, case, case.odd[name]) if odd else values)
    values = [each.encode() for each in ordinary_]
    return _column(case.form, _inserted(values, case, case.odd["label"]) if odd else values)


def _parquet_table(case: Case, folder: Path, odd: bool) -> Path | None:
    def column(values: list[Any], name: str) -> list[Any]:
        return _inserted(values, case, case.odd[name]) if odd else values

    count = len(case.records)
    columns = {
        "path": _column(case.form, column([b"%d.png" % i for i in range(count)], "path")),
        "label": _labels(case, odd, [label for label, _, _ in case.records]),
        "who": _column(case.form, column(_bytes_of(case), "who")),
        "date": pa.array(column([0] * count, "date"), pa.int32()).view(pa.date32()),
        "extra": _column(case.form, column([b""] * count, "extra")),
    }
    pq.write_table(pa.table(columns), folder / "t.parquet")
    return _with_images(case, folder, odd)


def _features(case: Case, folder: Path, odd: bool) -> Path | None:
    rows = [[level / 255] * DIMENSION for _, _, level in case.records]
    labels = ["ab".index(label) for label, _, _ in case.records]
    who = [int(_id(each)) for _, each, _ in case.records]
    if odd:
        rows = _inserted(rows, case, case.odd["values"])
        labels = _inserted(labels, case, case.odd["label"])
        who = _inserted(who, case, case.odd["who"])
    content = {
        "x": torch.tensor(rows, dtype=torch.float32).reshape(len(rows), DIMENSION),
        "y": torch.tensor(labels, dtype=torch.int64),
        "who": torch.tensor(who, dtype=torch.int64),
    }
    save_file(content, folder / "f.safetensors", {"classes": "a,b,c", "fingerprint": FINGERPRINT})
    return None


def _parquet(case: Case, folder: Path, odd: bool) -> Path | None:
    contents: list[Any] = [_grey(level) for _, _, level in case.records]
    paths: list[Any] = [b"%d.png" % i for i in range(len(contents))]
    who = _bytes_of(case)
    nothing = [False] * len(contents)
    if odd:
        contents, paths = (
            _inserted(contents, case, case.odd["content"]),
            _inserted(paths, case, case.odd["file"]),
        )
        who = _inserted(who, case, case.odd["who"])
        nothing = _inserted(nothing, case, case.odd["null"])
    images = pa.StructArray.from_arrays(
        [pa.array(contents, pa.binary()), _column("", paths)],
        names=["bytes", "path"],
        mask=pa.array(nothing, pa.bool_()),
    )
    labels = _labels(case, odd, [label for label, _, _ in case.records])
    columns = {"image": images, "label": labels, "who": _column(case.form, who)}
    pq.write_table(pa.table(columns), folder / "all.parquet", row_group_size=3)
    return None


def _dicom_bytes(odd: Odd) -> bytes:
    from pydicom import config

    checks = config.settings.writing_validation_mode
    config.settings.writing_validation_mode = config.IGNORE
    try:
        file = io.BytesIO()
        dataset = dicom_files.image(np.full((SIDE, SIDE), 77, np.uint8), PatientID="9")
        for name, value in odd["tags"].items():
            setattr(dataset, name, value)
        for name in odd["missing"]:
            if name in dataset:
                delattr(dataset, name)
        dataset.save_as(file, enforce_file_format=True)
        content = file.getvalue().replace(
            b"1.2.840.10008.1.2.1\0", odd["syntax"].encode("latin-1")[:20].ljust(20, b"\0"), 1
        )
        return content[: odd["cut"]]
    # What pydicom does not write, it need not read.
    except Exception:
        return odd["content"] if isinstance(odd["content"], bytes) else b""
    finally:
        config.settings.writing_validation_mode = checks


def _dicom(case: Case, folder: Path, odd: bool) -> Path | None:
    for number, (label, who, level) in enumerate(case.records):
        image = dicom_files.image(np.full((SIDE, SIDE), level, np.uint8), PatientID=_id(who))
        dicom_files.save(folder / case.form / label / f"{number}.dcm", image)
    if not odd:
        return None
    place = folder / os.fsdecode(case.odd["folder"])
    name = b"%d\xff.dcm" % min(case.place, 9)
    return _put(place, name, case.odd, _dicom_bytes(case.odd))


def _dicom_table(case: Case, folder: Path, odd: bool) -> Path | None:
    lines = []
    for number, (label, who, level) in enumerate(case.records):
        image = dicom_files.image(np.full((SIDE, SIDE), level, np.uint8), PatientID=_id(who))
        dicom_files.save(folder / f"{number}.dcm", image)
        lines.append(f"{number}.dcm,{label}".encode())
    if odd:
        lines = _inserted(lines, case, case.odd["line"])
    (folder / "t.csv").write_bytes(b"\n".join([b"path,label", *lines]) + b"\n")
    return _put(folder, b"odd.dcm", case.odd, _dicom_bytes(case.odd)) if odd else None


WRITERS: dict[str, Callable[[Case, Path, bool], Path | None]] = {
    "folder": _folder,
    "table": _table,
    "parquet table": _parquet_table,
    "features": _features,
    "parquet": _parquet,
    "dicom": _dicom,
    "dicom table": _dicom_table,
}

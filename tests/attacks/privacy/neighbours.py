"""Neighbouring data sets of every supported kind: one record more, one less, one unusable."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.uid import MPEG2MPML
from safetensors.torch import save_file

from tests import dicom_files

DIMENSION = 16
FINGERPRINT = "f" * 16
# Possible faults of a record, by kind of data. "": no fault.
FAULTS: dict[str, tuple[str, ...]] = {
    "folder": ("", "broken", "empty file"),
    "table": (
        "",
        "broken",
        "missing",
        "no path",
        "no label",
        "outside",
        "no patient",
        "uneven",
        "split",
        "quote",
        "not utf-8",
        "long",
    ),
    "features": ("", "nan", "infinite", "label"),
    "parquet": ("", "broken", "no image", "no label", "no patient"),
    "dicom": ("", "broken", "no patient", "several frames", "syntax", "not dicom"),
    "dicom table": ("", "broken", "no patient", "several frames", "no label", "conflict"),
}
KINDS = tuple(FAULTS)
# Classes of records; no run requests the last class.
LABELS = ("a", "b", "x", "other")
SIZES = (4, 5, 7)


@dataclass(frozen=True)
class Record:
    """One image or row: its class, its patient, the side of the image, a grey level, and its fault."""

    label: str = "a"
    patient: str = "1"
    size: int = 4
    grey: int = 100
    fault: str = ""


Data = tuple[Record, ...]


@st.composite
def pairs(draw: st.DrawFn, kind: str) -> tuple[Data, Data]:
    """Two neighbours: one has more records of one patient, or one record is replaced."""
    record = st.builds(
        Record,
        st.sampled_from(LABELS),
        st.sampled_from(("1", "2", "3")),
        st.sampled_from(SIZES),
        st.integers(0, 255),
        st.sampled_from(FAULTS[kind]),
    )
    base = tuple(draw(st.lists(record, max_size=3)))
    place = draw(st.integers(0, len(base)))
    added = tuple(
        replace(each, patient="9") for each in draw(st.lists(record, min_size=1, max_size=2))
    )
    rest = base[place + draw(st.integers(0, 1)) :]
    pair = base, base[:place] + added + rest
    return pair if draw(st.booleans()) else pair[::-1]


def write(kind: str, folder: Path, records: Data) -> dict[str, Any]:
    """Write a data set; return its node-config, which is the same for all data sets of a kind."""
    folder.mkdir(parents=True)
    WRITERS[kind](folder, records)
    settings: dict[str, Any] = {"data": kind.split()[0], "data-dir": str(folder)}
    if kind in ("folder", "table"):
        settings["data"] = "imagefolder"
    if kind == "features":
        settings["data"] = "safetensors"
    return settings | (
        {} if kind in ("folder", "dicom", "dicom table") else {"patient-column": "who"}
    )


def png(record: Record) -> bytes:
    """An image file, or an invalid file that looks like one."""
    if record.fault in ("broken", "empty file"):
        return b"\x89PNG\r\n\x1a\n broken" if record.fault == "broken" else b""
    file = io.BytesIO()
    Image.new("L", (record.size, record.size), record.grey).save(file, "PNG")
    return file.getvalue()


def _folder(folder: Path, records: Data) -> None:
    for number, record in enumerate(records):
        (folder / record.label).mkdir(exist_ok=True)
        (folder / record.label / f"{number}.png").write_bytes(png(record))


def _table(folder: Path, records: Data) -> None:
    lines = ["path,label,who,split,age,edema,time,event"]
    for number, record in enumerate(records):
        if record.fault != "missing":
            (folder / f"{number}.png").write_bytes(png(record))
        path = {"no path": "", "outside": f"../{number}.png"}.get(record.fault, f"{number}.png")
        label, who = ("" if record.fault == f"no {what}" else value for what, value in _of(record))
        values = [str(each) for each in targets(record)] if label else ["", "", "soon", ""]
        part = "neither" if record.fault == "split" else "train"
        line = ",".join((path, label, who, part, *values))
        line = {"quote": f'"{line}', "not utf-8": f"\udcff{line}", "long": line + "x" * 2**20}.get(
            record.fault, line
        )
        lines.append(line + ",too,many" * (record.fault == "uneven"))
    (folder / "table.csv").write_text("\n".join(lines) + "\n", errors="surrogateescape")


def targets(record: Record) -> tuple[float, float, float, float]:
    """Age, edema, time and event of a record; those of class "x" are no such values."""
    edema = {"a": 1.0, "b": 0.0, "x": 3.0}.get(record.label, float("nan"))
    event = 2.0 if record.label == "x" else float(record.label == "a")
    return record.grey / 2, edema, record.size - 4.5 if record.label == "x" else record.size, event


def _of(record: Record) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("label", record.label), ("patient", record.patient)


def _features(folder: Path, records: Data) -> None:
    x = torch.zeros(len(records), DIMENSION)
    for row, record in enumerate(records):
        x[row, record.size :] = record.grey / 255
        if record.fault in ("nan", "infinite"):
            x[row, 0] = float("nan" if record.fault == "nan" else "inf")
    y = torch.tensor(
        [9 if r.fault == "label" else LABELS.index(r.label) for r in records], dtype=torch.int64
    )
    who = torch.tensor([int(r.patient) for r in records], dtype=torch.int64)
    rows = [
        targets(r) if r.fault != "label" else (float("inf"), 0.5, -1.0, float("nan"))
        for r in records
    ]
    columns = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4).T.contiguous()
    content = {"x": x, "y": y, "who": who}
    content |= dict(zip(("age", "edema", "time", "event"), columns.clone(), strict=True))
    save_file(
        content, folder / "f.safetensors", {"classes": ",".join(LABELS), "fingerprint": FINGERPRINT}
    )


def _parquet(folder: Path, records: Data) -> None:
    columns = {
        "image": pa.array(
            [None if r.fault == "no image" else png(r) for r in records], pa.binary()
        ),
        "label": pa.array(
            [None if r.fault == "no label" else r.label for r in records], pa.string()
        ),
        "who": pa.array(
            [None if r.fault == "no patient" else r.patient for r in records], pa.string()
        ),
    }
    pq.write_table(pa.table(columns), folder / "all.parquet")


def _dicom(folder: Path, records: Data) -> None:
    for number, record in enumerate(records):
        _write_dicom(folder / record.label / f"{number}.dcm", record)


def _dicom_table(folder: Path, records: Data) -> None:
    lines = ["path,label"]
    for number, record in enumerate(records):
        _write_dicom(folder / "studies" / f"{number}.dcm", record)
        lines.append(f"studies/{number}.dcm,{'' if record.fault == 'no label' else record.label}")
        if record.fault == "conflict":
            lines.append(f"studies/{number}.dcm,another")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")


def _write_dicom(file: Path, record: Record) -> None:
    shape = (
        (3, record.size, record.size)
        if record.fault == "several frames"
        else (record.size, record.size)
    )
    dataset = dicom_files.image(np.full(shape, record.grey, np.uint8), PatientID=record.patient)
    if record.fault == "no patient":
        dataset.PatientID = ""
    if record.fault == "syntax":
        # A video, for which no decoder is installed.
        dataset.file_meta.TransferSyntaxUID = MPEG2MPML
        dataset["PixelData"].is_undefined_length = True
        dataset.PixelData = encapsulate([dataset.PixelData])
    dicom_files.save(file, dataset)
    content = file.read_bytes()
    if record.fault == "broken":
        file.write_bytes(content[: len(content) - record.size])
    if record.fault == "not dicom":
        file.write_bytes(b"a letter")


WRITERS = {
    "folder": _folder,
    "table": _table,
    "features": _features,
    "parquet": _parquet,
    "dicom": _dicom,
    "dicom table": _dicom_table,
}

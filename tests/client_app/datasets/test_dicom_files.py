"""DICOM by its bytes: what is a file of it, how it says that it is encoded and how it is, and values
that are no pixels.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.errors import InvalidDicomError
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
)

from fedsurrogate.client_app.datasets.dicom_files import (
    Encoding,
    encoding_of,
    is_dicom,
    is_dicom_file,
    plugins_for,
)
from fedsurrogate.client_app.datasets.dicom_pixels import open_dicom, open_single
from fedsurrogate.common.errors import DataError
from tests.dicom_files import image, save

EXPLICIT = b"CS"


def element(group: bytes, length: bytes, kind: bytes = EXPLICIT) -> bytes:
    """The beginning of a file without a preamble: its first element."""
    return group + b"\x05\x00" + kind + length + b"rest"


@pytest.mark.parametrize(
    ("content", "known"),
    [
        (bytes(128) + b"DICM", True),
        (b"x" * 128 + b"DICM" + b"y", True),
        (bytes(127) + b"DICM", False),
        (bytes(129) + b"DICM", False),
        (bytes(128) + b"DICN", False),
        # Explicit: a length of two bytes, in either byte order, of at most 1024.
        (element(b"\x08\x00", b"\x0a\x00"), True),
        (element(b"\x02\x00", b"\x0a\x00"), True),
        (element(b"\x00\x08", b"\x00\x0a"), True),
        (element(b"\x08\x00", b"\x00\x04"), True),
        (element(b"\x08\x00", b"\x01\x04"), False),
        (element(b"\x00\x08", b"\x04\x00"), True),
        (element(b"\x00\x08", b"\x04\x01"), False),
        (element(b"\x10\x00", b"\x0a\x00"), False),
        (element(b"\x08\x00", b"\x0a\x00", b"cs"), False),
        (element(b"\x08\x00", b"\x0a\x00", b"C1"), False),
        # Implicit: a length of four bytes, little endian.
        (element(b"\x08\x00", b"\x00\x00", b"\x0a\x00"), True),
        (element(b"\x08\x00", b"\x00\x00", b"\x00\x04"), True),
        (element(b"\x08\x00", b"\x00\x00", b"\x01\x04"), False),
        (element(b"\x08\x00", b"\x01\x00", b"\x0a\x00"), False),
        (element(b"\x08\x00", b"\x00\x01", b"\x0a\x00"), False),
        (element(b"\x00\x08", b"\x00\x00", b"\x0a\x00"), False),
        # Too short to say.
        (b"\x08\x00\x05\x00\x0a\x00\x00\x00", True),
        (b"\x08\x00\x05\x00\x0a\x00\x00", False),
        (b"\x08\x00\x05\x00CS\x0a", False),
        (b"", False),
        (b"\x89PNG\r\n\x1a\n" + bytes(200), False),
    ],
)
def test_a_file_is_dicom_by_its_mark_or_by_its_first_element(
    tmp_path: Path, content: bytes, known: bool
) -> None:
    stream = io.BytesIO(content)
    stream.seek(min(3, len(content)))
    assert is_dicom(stream) is known
    assert stream.tell() == 0
    (tmp_path / "x").write_bytes(content)
    assert is_dicom_file(tmp_path / "x") is known


def written(stated: Any, implicit: bool, little: bool, meta: bool = True) -> io.BytesIO:
    """A small data set that is encoded so, and states this transfer syntax."""
    dataset = Dataset()
    dataset.SOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    dataset.Modality = "OT"
    stream = io.BytesIO()
    if meta:
        dataset.file_meta = FileMetaDataset()
        whole = io.BytesIO()
        dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID
        dataset.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
        dataset.file_meta.TransferSyntaxUID = stated
        pydicom.filewriter.write_file_meta_info(whole, dataset.file_meta)
        stream.write(bytes(128) + b"DICM" + whole.getvalue())
    body = pydicom.filebase.DicomBytesIO()
    body.is_little_endian, body.is_implicit_VR = little, implicit
    pydicom.filewriter.write_dataset(body, dataset)
    stream.write(body.getvalue())
    stream.seek(0)
    return stream


def test_a_file_without_data_is_as_it_states_and_a_deflated_one_is_refused() -> None:
    whole = written(ExplicitVRLittleEndian, False, True).getvalue()
    end = whole.index(b"\x08\x00\x16\x00UI")
    for cut in (0, 5):
        own = encoding_of(io.BytesIO(whole[: end + cut]))
        assert own == Encoding(ExplicitVRLittleEndian, "")  # type: ignore[arg-type]
        assert own.follows
    with pytest.raises(DataError, match="it is deflated as a whole; export it uncompressed"):
        encoding_of(written(DeflatedExplicitVRLittleEndian, False, True))
    with pytest.raises(InvalidDicomError, match="neither the mark of DICOM nor a first element"):
        encoding_of(io.BytesIO(b"no image"))


def test_pixels_that_are_not_compressed_need_no_decoder_and_others_one_that_can() -> None:
    assert plugins_for(ExplicitVRLittleEndian, False) == ()
    twelve = "1.2.840.10008.1.2.4.51"
    assert "pillow" in (plugins_for(twelve, False) or ())
    assert "pillow" not in (plugins_for(twelve, True) or ())
    with pytest.raises(NotImplementedError):
        plugins_for("1.2.3", False)


LEVELS = np.arange(16, dtype=np.uint8).reshape(4, 4)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"HighBit": 6}, "its High Bit is 6 with 8 bits stored; DICOM allows 7 only"),
        ({"HighBit": 8}, "its High Bit is 8 with 8 bits stored; DICOM allows 7 only"),
        ({"PhotometricInterpretation": "HSV"}, "Interpretation 'HSV' is retired and cannot be"),
        ({"PhotometricInterpretation": "ARGB"}, "Interpretation 'ARGB' is retired and cannot be"),
        ({"PhotometricInterpretation": "CMYK"}, "Interpretation 'CMYK' is retired and cannot be"),
        ({"RescaleSlope": 0, "RescaleIntercept": 1}, "its Rescale Slope is 0, which makes all"),
        ({"Rows": 8193, "Columns": 8192}, "an image of 8193 x 8192 pixels; at most 67108864"),
    ],
)
def test_an_image_that_cannot_be_shown_is_named_with_the_reason(
    tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    dataset = image(LEVELS)
    assert (
        np.asarray(open_dicom(save(tmp_path / "good", dataset)))[..., 0].tolist() == LEVELS.tolist()
    )
    for name, value in changed.items():
        setattr(dataset, name, value)
    with pytest.raises(DataError, match=f"bad' cannot be shown .*{why}"):
        open_dicom(save(tmp_path / "bad", dataset))


def test_a_file_of_one_image_is_opened_and_of_several_refused(tmp_path: Path) -> None:
    assert open_single(save(tmp_path / "one", image(LEVELS))).size == (4, 4)
    several = image(LEVELS)
    several.NumberOfFrames = 2
    several.PixelData = LEVELS.tobytes() * 2
    with pytest.raises(DataError, match="it holds 2 images; give each as a file or an array"):
        open_single(save(tmp_path / "two", several))
    report = image(LEVELS)
    del report.Rows
    with pytest.raises(DataError, match="it holds no image, as a report or a plan"):
        open_dicom(save(tmp_path / "report", report))

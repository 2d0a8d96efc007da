"""DICOM as hospitals have it: padding, encodings, tables, gaps, decoders, patients. pydicom's own
functions are the oracle.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.filewriter import write_file_meta_info
from pydicom.pixels import apply_modality_lut, apply_voi_lut
from pydicom.sequence import Sequence
from pydicom.uid import (
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEGExtended12Bit,
    JPEGLSLossless,
)

import fedsurrogate as fs
from fedsurrogate._images import picture
from fedsurrogate.client_app.datasets.dataset import DataSource, load
from fedsurrogate.client_app.datasets.dicom_files import open_dicom
from fedsurrogate.common.errors import DataError
from tests.data_kinds.images.predictions import predicted
from tests.dicom_files import Array, image, lookup, save

SHIPPED = Path(pydicom.__file__).parent / "data" / "test_files"
# Tissue between 200 and 455 of 12 bits.
TISSUE = (np.arange(256, dtype=np.uint16) + 200).reshape(16, 16)
LEVELS = np.arange(256, dtype=np.uint8).reshape(16, 16)


def shown(path: Path) -> Array:
    """Grey levels (rows, columns), equal at a site, in `site predict` and in Python."""
    found = np.asarray(open_dicom(path))
    x = fs.features([path], "pixels:rgb")
    own = (x[0].reshape(3, *found.shape[:2]).permute(1, 2, 0) * 255).round().numpy()
    assert np.array_equal(found, own)
    assert (found == found[..., :1]).all()
    return found[..., 0]


def padded(kind: type, value: float, bits: int = 12) -> tuple[Array, Array]:
    """Tissue with the left column of padding; and which are pixels."""
    values = TISSUE.astype(kind)
    if np.issubdtype(kind, np.signedinteger):
        values -= 300
    values[:, 0] = value
    pixels = np.ones(values.shape, bool)
    pixels[:, 0] = False
    return values, pixels


def stretched(values: Array, pixels: Array) -> Array:
    """The closed form: least to greatest pixel, padding black."""
    low, high = values[pixels].min(), values[pixels].max()
    levels = np.rint((values.astype(float) - low) * (255 / (high - low)))
    return np.where(pixels, levels, 0).clip(0, 255).astype(np.uint8)


PADDINGS: list[tuple[str, type, dict[str, Any], float]] = [
    ("below", np.uint16, {"PixelPaddingValue": 0}, 0),
    ("above", np.uint16, {"PixelPaddingValue": 4095}, 4095),
    ("signed", np.int16, {"PixelPaddingValue": -2000}, -2000),
    ("rescaled", np.int16, {"PixelPaddingValue": -2000, "RescaleSlope": 2, "RescaleIntercept": 5}, -2000),
    ("range", np.uint16, {"PixelPaddingValue": 3000, "PixelPaddingRangeLimit": 4000}, 3500),
    ("range down", np.int16, {"PixelPaddingValue": -900, "PixelPaddingRangeLimit": -2000}, -1000),
    ("unsigned for signed", np.int16, {"PixelPaddingValue": 63536}, -2000),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "tags", "value"), PADDINGS, ids=[p[0] for p in PADDINGS])
@pytest.mark.parametrize("inverse", [False, True])
def test_padding_is_no_pixel(
    tmp_path: Path, name: str, kind: type, tags: dict[str, Any], value: float, inverse: bool
) -> None:
    values, pixels = padded(kind, value)
    bits = {"BitsStored": 16 if kind is np.int16 else 12}
    interpretation = {"PhotometricInterpretation": "MONOCHROME1"} if inverse else {}
    stated = dict(tags)
    if name == "unsigned for signed":
        # Written as the other type, as devices do.
        stated.pop("PixelPaddingValue")
    dataset = image(values, **bits, **stated, **interpretation)
    if name == "unsigned for signed":
        dataset.add_new(0x00280120, "US", 63536)
    levels = stretched(values, pixels)
    expected = np.where(pixels, 255 - levels, 0) if inverse else levels
    found = shown(save(tmp_path / "x", dataset))
    assert np.array_equal(found, expected)
    assert len(np.unique(found[pixels])) > 200


@pytest.mark.parametrize("end", [None, 5000.0])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_padding_of_floating_point_is_no_pixel(
    tmp_path: Path, kind: type, end: float | None
) -> None:
    values, pixels = padded(kind, 4000)
    name = "Float" if kind is np.float32 else "DoubleFloat"
    tags = {f"{name}PixelPaddingValue": 4000.0}
    tags |= {f"{name}PixelPaddingRangeLimit": end} if end else {}
    assert np.array_equal(shown(floating(tmp_path, values, **tags)), stretched(values, pixels))


def test_padding_changes_nothing_where_the_header_states_a_range(tmp_path: Path) -> None:
    values, _ = padded(np.uint16, 0)
    window = {"BitsStored": 12, "WindowCenter": 300, "WindowWidth": 100}
    plain = shown(save(tmp_path / "plain", image(values, **window)))
    with_padding = image(values, PixelPaddingValue=0, **window)
    assert np.array_equal(shown(save(tmp_path / "padded", with_padding)), plain)
    shallow = image(LEVELS, PixelPaddingValue=7)
    assert np.array_equal(shown(save(tmp_path / "shallow", shallow)), LEVELS)
    all_padding = image(np.full((4, 4), 9, np.uint16), PixelPaddingValue=9)
    assert not shown(save(tmp_path / "all", all_padding)).any()


def floating(folder: Path, values: Array, **tags: Any) -> Path:
    """A file of Float or Double Float Pixel Data."""
    dataset = image(np.zeros(values.shape, np.uint16), **tags)
    del dataset.PixelData, dataset.BitsStored, dataset.HighBit, dataset.PixelRepresentation
    dataset.BitsAllocated = 8 * values.dtype.itemsize
    name = "FloatPixelData" if values.dtype == np.float32 else "DoubleFloatPixelData"
    setattr(dataset, name, values.tobytes())
    return save(folder / "floating", dataset)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("window", [{}, {"WindowCenter": 300.0, "WindowWidth": 300.0}])
@pytest.mark.parametrize("holes", [[0], [255], [7, 8, 9], list(range(200)), list(range(0, 256, 2))])
def test_a_pixel_that_is_no_number_is_black_alone(
    tmp_path: Path, kind: type, window: dict[str, Any], holes: list[int]
) -> None:
    values = TISSUE.astype(kind)
    values.ravel()[holes] = np.nan
    pixels = ~np.isnan(values)
    found = shown(floating(tmp_path, values, **window))
    if window:
        whole = shown(floating(tmp_path, TISSUE.astype(kind), **window))
        assert np.array_equal(found, np.where(pixels, whole, 0))
    else:
        assert np.array_equal(found, stretched(np.nan_to_num(values), pixels))


def test_infinite_pixels_are_the_ends(tmp_path: Path) -> None:
    values = TISSUE.astype(np.float32)
    values[0, 0], values[0, 1] = np.inf, -np.inf
    found = shown(floating(tmp_path, values))
    pixels = np.isfinite(values)
    assert (found[0, 0], found[0, 1]) == (255, 0)
    assert np.array_equal(found[pixels], stretched(np.where(pixels, values, 0), pixels)[pixels])


ENCODINGS = {
    "implicit": ImplicitVRLittleEndian,
    "explicit": ExplicitVRLittleEndian,
    "big": ExplicitVRBigEndian,
}


def encoded(path: Path, data: str, header: str) -> Path:
    """A file whose data are encoded in one way, and whose header states another; "" for a file
    without a header.
    """
    dataset = image(TISSUE, BitsStored=12)
    dataset.file_meta.TransferSyntaxUID = ENCODINGS[data]
    if data == "big":
        dataset.PixelData = TISSUE.astype(">u2").tobytes()
    dataset["PixelData"].VR = "OW"
    content = save(path, dataset).read_bytes()
    body, meta = content[144 + _group_length(content) :], io.BytesIO()
    if header:
        facts = pydicom.dcmread(io.BytesIO(content)).file_meta
        facts.TransferSyntaxUID = ENCODINGS[header]
        write_file_meta_info(meta, facts)
        body = bytes(128) + b"DICM" + meta.getvalue() + body
    path.write_bytes(body)
    return path


def _group_length(content: bytes) -> int:
    return int(pydicom.dcmread(io.BytesIO(content)).file_meta.FileMetaInformationGroupLength)


@pytest.mark.parametrize(
    ("data", "header"),
    [
        ("implicit", "explicit"), ("explicit", "implicit"), ("implicit", "implicit"),
        ("explicit", "explicit"), ("big", "big"), ("implicit", ""), ("explicit", ""), ("big", ""),
    ],
)  # fmt: skip
def test_data_are_read_as_they_are_encoded_whatever_the_header_states(
    tmp_path: Path, data: str, header: str
) -> None:
    file = encoded(tmp_path / "x", data, header)
    wanted = shown(save(tmp_path / "plain", image(TISSUE, BitsStored=12)))
    assert np.array_equal(shown(file), wanted)
    if header:
        assert np.array_equal(pydicom.dcmread(file).pixel_array, TISSUE)
    (tmp_path / "site" / "a").mkdir(parents=True)
    (tmp_path / "site" / "a" / "x").write_bytes(file.read_bytes())
    dataset = load(DataSource("dicom", str(tmp_path / "site"), one_by_one=True), seed=0)
    assert np.array_equal(np.asarray(dataset.open_image(0))[..., 0], wanted)


@pytest.mark.parametrize(
    ("data", "header"), [("implicit", "big"), ("explicit", "big"), ("big", "explicit"), ("big", "implicit")]
)  # fmt: skip
def test_the_other_byte_order_is_refused(tmp_path: Path, data: str, header: str) -> None:
    with pytest.raises(DataError, match="and its data have the other byte order"):
        open_dicom(encoded(tmp_path / "x", data, header))


def test_compressed_pixels_without_a_transfer_syntax_are_refused(tmp_path: Path) -> None:
    whole = (SHIPPED / "MR_small_RLE.dcm").read_bytes()
    (tmp_path / "x").write_bytes(whole[144 + _group_length(whole) :])
    with pytest.raises(DataError, match="compressed, and it states no transfer syntax"):
        open_dicom(tmp_path / "x")


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
@pytest.mark.parametrize("stated", [10, 12, 14, 16])
@pytest.mark.parametrize("first", [0, -128])
def test_a_voi_lut_is_scaled_by_its_entries(
    tmp_path: Path, bits: int, stated: int, first: int
) -> None:
    """Devices state 16 bits for entries of fewer; pydicom gives the entries."""
    entries = np.linspace(0, 2**bits - 1, 256).astype(np.uint16)
    item = lookup(entries, first)
    item.LUTDescriptor = [256, first, stated]
    pixels = LEVELS.astype(np.int16) + first if first else LEVELS.astype(np.uint16)
    dataset = image(pixels, BitsStored=16, VOILUTSequence=Sequence([item]))
    found = shown(save(tmp_path / "x", dataset))
    own = apply_voi_lut(apply_modality_lut(pixels, dataset), dataset)
    assert np.array_equal(own.ravel(), entries)
    top = 2 ** min(bits, stated) - 1
    assert np.array_equal(found, np.rint(own * (255 / top)).clip(0, 255))
    if bits <= stated:
        assert (found.min(), found.max()) == (0, 255)


def test_a_dark_table_of_8_bits_stays_dark(tmp_path: Path) -> None:
    item = lookup(np.arange(256, dtype=np.uint16) // 4)
    item.LUTDescriptor = [256, 0, 8]
    found = shown(save(tmp_path / "x", image(LEVELS, VOILUTSequence=Sequence([item]))))
    assert np.array_equal(found, LEVELS // 4)


def test_a_voi_lut_without_entries_gives_way_to_the_window(tmp_path: Path) -> None:
    item = Dataset()
    item.LUTDescriptor = [256, 0, 16]
    window = {"BitsStored": 12, "WindowCenter": 300, "WindowWidth": 100}
    wanted = shown(save(tmp_path / "plain", image(TISSUE, **window)))
    dataset = image(TISSUE, VOILUTSequence=Sequence([item]), **window)
    assert np.array_equal(shown(save(tmp_path / "x", dataset)), wanted)


def test_twelve_bits_of_jpeg_name_the_package_that_decodes_them(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.dcm").write_bytes((SHIPPED / "JPGExtended.dcm").read_bytes())
    pip = r"run pip install 'fedsurrogate\[dicom-decoders\]', or export"
    with pytest.raises(DataError, match=rf"for which there is no decoder; {pip}"):
        load(DataSource("dicom", str(tmp_path)), seed=0)
    with pytest.raises(DataError, match=pip):
        open_dicom(tmp_path / "a" / "x.dcm")
    rows = predicted(tmp_path / "a", tmp_path / "p.csv")
    assert "pip install 'fedsurrogate[dicom-decoders]'" in rows[0]["problem"]
    with pytest.raises(DataError, match=pip):
        fs.features([tmp_path / "a" / "x.dcm"])


@pytest.mark.parametrize("deep", [False, True])
def test_eight_bits_of_extended_jpeg_need_no_package(tmp_path: Path, deep: bool) -> None:
    """One image without a decoder takes no other with it."""
    stream = io.BytesIO()
    Image.fromarray(LEVELS).save(stream, "JPEG", quality=100)
    dataset = image(LEVELS)
    dataset.file_meta.TransferSyntaxUID = JPEGExtended12Bit
    dataset.PixelData = encapsulate([stream.getvalue()])
    save(tmp_path / "a" / "1", dataset)
    if deep:
        (tmp_path / "a" / "2").write_bytes((SHIPPED / "JPGExtended.dcm").read_bytes())
    found = load(DataSource("dicom", str(tmp_path), one_by_one=True), seed=0)
    assert len(found) == 1
    assert np.array_equal(
        np.asarray(found.open_image(0)), np.asarray(Image.open(stream).convert("RGB"))
    )
    assert len(found.left_out) == deep


def test_other_compressions_without_a_decoder_name_the_package(tmp_path: Path) -> None:
    dataset = image(LEVELS)
    dataset.file_meta.TransferSyntaxUID = JPEGLSLossless
    dataset.PixelData = encapsulate([b"\xff\xd8"])
    with pytest.raises(DataError, match=r"run pip install 'fedsurrogate\[dicom-decoders\]'"):
        open_dicom(save(tmp_path / "x", dataset))
    with pytest.raises(DataError, match=r"\); export it again"):
        open_dicom(save(tmp_path / "y", image(LEVELS, Rows=0)))


@pytest.mark.parametrize(
    ("tags", "why"),
    [
        ({"BitsStored": 12, "HighBit": 15}, "High Bit is 15 with 12 bits stored"),
        ({"BitsStored": 8, "HighBit": 15}, "High Bit is 15 with 8 bits stored"),
        ({"BitsStored": 12, "HighBit": 7}, "High Bit is 7"),
        ({"RescaleSlope": 0, "RescaleIntercept": 5}, "Rescale Slope is 0"),
        ({"PhotometricInterpretation": "HSV"}, "'HSV' is retired"),
        ({"PhotometricInterpretation": "ARGB"}, "'ARGB' is retired"),
    ],
)
def test_a_header_that_would_change_the_pixels_in_silence_is_refused(
    tags: dict[str, Any], why: str, tmp_path: Path
) -> None:
    pixels = (np.arange(256, dtype=np.uint16) << 4).reshape(16, 16)
    dataset = image(pixels)
    dataset.update(tags)
    save(tmp_path / "x.dcm", dataset)
    for entrance in (open_dicom, lambda file: picture(file, 0)):
        with pytest.raises(DataError, match=why):
            entrance(tmp_path / "x.dcm")


# Reasons for which files of pydicom are not shown; nothing else is refused.
REASONS = (
    "it holds no image, as a report or a plan",
    "it is deflated as a whole",
    r"run pip install 'fedsurrogate\[dicom-decoders\]'",
    "neither the mark of DICOM nor a first element of it",
    # Shortened or damaged on purpose.
    "cannot reshape array of size 4065",
    "no pixel data to decode",
    "invalid literal for int",
)


def oracle(file: Path) -> Array | None:
    """What pydicom's own functions give for the first image, before 8 bits; None for an error."""
    try:
        dataset = pydicom.dcmread(file)
        values = dataset.pixel_array
        if int(dataset.get("NumberOfFrames") or 1) > 1:
            values = values[0]
        if values.ndim == 3 or dataset.PhotometricInterpretation == "PALETTE COLOR":
            return values
        return apply_voi_lut(apply_modality_lut(values, dataset), dataset)
    except Exception:
        return None


FILES = sorted(SHIPPED.rglob("*.dcm"))
DEFLATED = "image_dfl.dcm"


def refusal(file: Path) -> str:
    """Why a file is not shown; empty if it is."""
    try:
        open_dicom(file)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_of_pydicom_are_shown_as_its_functions_give_them_or_refused(file: Path) -> None:
    """Whatever pydicom can decode here is shown, but for what is deflated."""
    wanted, why = oracle(file), refusal(file)
    assert (wanted is None or file.name == DEFLATED) == bool(why)
    if why or wanted is None:
        assert any(re.search(reason, why) for reason in REASONS), why
        return
    found, kind = np.asarray(open_dicom(file)), str(pydicom.dcmread(file).PhotometricInterpretation)
    if wanted.ndim == 3:
        bits = 8 * wanted.dtype.itemsize
        assert np.array_equal(found, np.rint(wanted * (255 / (2**bits - 1))))
    elif kind != "PALETTE COLOR":
        levels = 255.0 - found[..., 0] if kind == "MONOCHROME1" else found[..., 0].astype(float)
        # An affine map of pydicom's values to 256 levels, clipped at its ends, and rounded.
        inside = (levels > 0) & (levels < 255)
        if not inside.any():
            assert np.array_equal(levels == 255, wanted == wanted.max())
            return
        slope, start = np.polyfit(wanted[inside].astype(float), levels[inside], 1)
        assert slope > 0
        assert np.abs(slope * wanted[inside] + start - levels[inside]).max() <= 1

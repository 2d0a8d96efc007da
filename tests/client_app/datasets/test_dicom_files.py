"""DICOM by its bytes: what is a file of it, how it says that it is encoded and how it is, and values
that are no pixels.
"""

from __future__ import annotations

import io
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pydicom
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.errors import InvalidDicomError
from pydicom.pixels import apply_modality_lut, apply_voi_lut
from pydicom.sequence import Sequence
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    RLELossless,
)

from fedsurrogate.client_app.datasets import dicom_files
from fedsurrogate.client_app.datasets.dicom_files import (
    Encoding,
    encoding_of,
    is_dicom,
    is_dicom_file,
    open_dicom,
    open_single,
)
from fedsurrogate.common.errors import DataError
from tests.dicom_files import Array, image, lookup, save

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


RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)


def shown(path: Path, dataset: Dataset, frame: int = 0) -> Array:
    """Grey levels of a written image (rows, columns); equal in all three channels."""
    picture = open_dicom(save(path / "x", dataset), frame)
    assert picture.mode == "RGB"
    pixels = np.asarray(picture)
    assert (pixels == pixels[..., :1]).all()
    return pixels[..., 0]


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_8_bits_without_a_window_stay_as_they_are(tmp_path: Path, kind: type) -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    pixels = levels if kind is np.uint8 else (levels.astype(np.int16) - 128).astype(np.int8)
    assert (shown(tmp_path, image(pixels)) == levels).all()
    dark = (pixels // 4).astype(kind)
    assert shown(tmp_path, image(dark)).max() < 255, (
        "one image is not stretched where another is not"
    )
    assert (shown(tmp_path, image(levels, RescaleSlope=3, RescaleIntercept=-7)) == levels).all()


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", [12, 16])
def test_deeper_images_without_a_window_run_from_their_least_to_their_greatest(
    tmp_path: Path, bits: int, signed: bool
) -> None:
    pixels = RAMP.astype(np.int16) - 2048 if signed else RAMP
    found = shown(tmp_path, image(pixels, BitsStored=bits))
    assert (found == np.rint(RAMP * (255 / 4095))).all()
    assert (
        shown(tmp_path, image(pixels, BitsStored=bits, RescaleSlope=2, RescaleIntercept=-1024))
        == found
    ).all()


def test_a_window_of_hounsfield_units_is_black_at_its_lower_end_and_white_at_its_upper(
    tmp_path: Path,
) -> None:
    tags = {
        "BitsStored": 12,
        "RescaleIntercept": -1024,
        "RescaleSlope": 1,
        "WindowCenter": [40, 500],
        "WindowWidth": [400, 9],
    }
    found = shown(tmp_path, image(RAMP, **tags))
    units = RAMP.astype(float) - 1024
    assert (found[units <= -160] == 0).all()
    assert (found[units >= 239] == 255).all()
    expected = (units - 39.5) / 399 + 0.5
    assert np.abs(found / 255 - expected.clip(0, 1)).max() <= 0.5 / 255 + 1e-9
    dataset = image(RAMP, **tags)
    own = apply_voi_lut(apply_modality_lut(RAMP, dataset), dataset)
    assert (found == np.rint((own + 1024) * (255 / 4095))).all()


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize("slope", [1, -1])
def test_every_window_function_is_pydicoms_and_brighter_upwards(
    tmp_path: Path, function: str, slope: int
) -> None:
    tags = {
        "BitsStored": 12,
        "RescaleIntercept": 0,
        "RescaleSlope": slope,
        "VOILUTFunction": function,
    }
    dataset = image(RAMP, **tags, WindowCenter=2000 * slope, WindowWidth=1000)
    values = apply_modality_lut(RAMP, dataset)
    own = apply_voi_lut(values, dataset)
    found = shown(tmp_path, dataset)
    assert (
        found == np.rint(own / slope * (255 / 4095) if slope > 0 else own * (-255 / 4095))
    ).all()
    assert (np.diff(found.ravel()[::slope].astype(int)) >= 0).all()
    assert (found.min(), found.max()) == (0, 255)


def test_monochrome1_is_inverted_after_its_window(tmp_path: Path) -> None:
    tags = {"BitsStored": 12, "WindowCenter": 1000, "WindowWidth": 500}
    inverse = shown(
        tmp_path,
        image(
            RAMP, PhotometricInterpretation="MONOCHROME1", PresentationLUTShape="INVERSE", **tags
        ),
    )
    assert (inverse == 255 - shown(tmp_path, image(RAMP, **tags))).all()


def test_a_voi_lut_counts_before_a_window_and_fills_the_range_of_its_bits(tmp_path: Path) -> None:
    table = (np.sqrt(np.arange(4096) / 4095) * 65535).astype(np.uint16)
    tags = {"BitsStored": 12, "VOILUTSequence": Sequence([lookup(table)])}
    found = shown(tmp_path, image(RAMP, **tags))
    assert (found == np.rint(table[RAMP] / 257)).all()
    assert (shown(tmp_path, image(RAMP, WindowCenter=5, WindowWidth=2, **tags)) == found).all()


def test_a_modality_lut_comes_before_the_window(tmp_path: Path) -> None:
    table = np.arange(4095, -1, -1, dtype=np.uint16) * 8
    modality = {"BitsStored": 12, "ModalityLUTSequence": Sequence([lookup(table)])}
    found = shown(tmp_path, image(RAMP, WindowCenter=16000, WindowWidth=8000, **modality))
    expected = ((table[RAMP].astype(float) - 15999.5) / 7999 + 0.5).clip(0, 1)
    assert np.abs(found / 255 - expected).max() <= 0.5 / 255 + 1e-9
    few = RAMP[:4, :].astype(np.uint8)
    shallow = {"ModalityLUTSequence": Sequence([lookup(np.arange(256, dtype=np.uint16) * 100)])}
    assert (shown(tmp_path, image(few, **shallow)) == few).all()


def test_colours_are_rgb_whatever_they_are_stored_as(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    assert (np.asarray(open_dicom(save(tmp_path / "rgb", image(pixels)))) == pixels).all()
    deep = image(pixels.astype(np.uint16) * 257)
    assert (np.asarray(open_dicom(save(tmp_path / "deep", deep))) == pixels).all()
    ybr = np.asarray(Image.fromarray(pixels).convert("YCbCr"))
    stored = save(tmp_path / "ybr", image(ybr, PhotometricInterpretation="YBR_FULL"))
    assert np.abs(np.asarray(open_dicom(stored)).astype(int) - pixels).max() <= 3


def test_a_palette_is_looked_up(tmp_path: Path) -> None:
    dataset = image(np.array([[0, 1], [2, 1]], np.uint8), PhotometricInterpretation="PALETTE COLOR")
    for name, levels in (("Red", [0, 65535, 257]), ("Green", [0, 0, 257]), ("Blue", [0, 257, 0])):
        setattr(dataset, f"{name}PaletteColorLookupTableDescriptor", [3, 0, 16])
        setattr(
            dataset, f"{name}PaletteColorLookupTableData", np.array(levels, np.uint16).tobytes()
        )
    found = np.asarray(open_dicom(save(tmp_path / "x", dataset)))
    assert found.tolist() == [[[0, 0, 0], [255, 0, 1]], [[1, 1, 0], [255, 0, 1]]]


def test_compression_without_loss_changes_nothing(tmp_path: Path) -> None:
    plain = shown(tmp_path, image(RAMP, BitsStored=12))
    packed = image(RAMP, BitsStored=12)
    packed.compress(RLELossless)
    assert (shown(tmp_path, packed) == plain).all()
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    stream = io.BytesIO()
    Image.fromarray(levels).save(stream, "JPEG2000", no_jp2=True, irreversible=False)
    jpeg = image(levels)
    jpeg.file_meta.TransferSyntaxUID = JPEG2000Lossless
    jpeg.PixelData = encapsulate([stream.getvalue()])
    assert (shown(tmp_path, jpeg) == levels).all()


# Where a value may stand: in the header, in the groups that frames share, in those of a frame. The
# first that has it counts, from the last to the first of these.
PLACES = ("header", "shared", "own")
somewhere = st.dictionaries(st.sampled_from(PLACES), st.integers(0, 40), min_size=1)


@settings(max_examples=25, deadline=None)
@given(rescale=somewhere, window=somewhere, frame=st.integers(0, 2), kept=st.booleans())
def test_what_a_frame_has_of_its_own_counts_before_what_frames_share_and_that_before_the_header(
    rescale: dict[str, int], window: dict[str, int], frame: int, kept: bool
) -> None:
    """As a file of that frame alone is shown, with the values that count in its header."""

    def intercept(place: str, into: Dataset) -> None:
        if place in rescale:
            into.RescaleIntercept, into.RescaleSlope = -50 * rescale[place], 1
            into.RescaleType = "HU"

    def centre(place: str, into: Dataset) -> None:
        if place in window:
            into.WindowCenter, into.WindowWidth = 100 * window[place], 700

    def groups(place: str) -> Dataset:
        group, inner, view = Dataset(), Dataset(), Dataset()
        intercept(place, inner)
        centre(place, view)
        if inner or kept:
            group.PixelValueTransformationSequence = Sequence([inner] if inner else [])
        if view or kept:
            group.FrameVOILUTSequence = Sequence([view] if view else [])
        return group

    several = image(np.stack([RAMP] * 3), BitsStored=12)
    intercept("header", several)
    centre("header", several)
    several.SharedFunctionalGroupsSequence = Sequence([groups("shared")])
    several.PerFrameFunctionalGroupsSequence = Sequence(
        [groups("own" if each == frame else "") for each in range(3)]
    )
    alone = image(RAMP, BitsStored=12)
    intercept(next(place for place in reversed(PLACES) if place in rescale), alone)
    centre(next(place for place in reversed(PLACES) if place in window), alone)
    with TemporaryDirectory() as folder:
        expected = shown(Path(folder) / "alone", alone)
        assert (shown(Path(folder) / "several", several, frame) == expected).all()


def test_an_even_image_is_black(tmp_path: Path) -> None:
    assert not shown(tmp_path, image(np.full((4, 4), 900, np.uint16))).any()


@pytest.mark.parametrize("error", [SystemExit(1), GeneratorExit(), RecursionError()], ids=repr)
def test_whatever_a_decoder_raises_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def raises(*_: object) -> None:
        raise error

    monkeypatch.setattr(dicom_files, "_grey", raises)
    with pytest.raises(DataError, match=rf"x' cannot be shown \({type(error).__name__}"):
        open_dicom(save(tmp_path / "x", image(RAMP)))


def test_what_other_programs_wrote_looks_alike_in_every_transfer_syntax() -> None:
    files = Path(pydicom.__file__).parent / "data" / "test_files"
    reference = np.asarray(open_dicom(files / "MR_small.dcm"))
    for name in ("RLE", "bigendian", "expb", "implicit", "jp2klossless", "padded"):
        assert (np.asarray(open_dicom(files / f"MR_small_{name}.dcm")) == reference).all(), name

"""What a survey reads of images: headers of DICOM, sizes, depths and turns of image files, and pixels."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedsurrogate.client_app.datasets.images import of_bytes, of_dicom, of_file, of_pixels
from fedsurrogate.common.image_histograms import AXES, TURNED, UPRIGHT
from tests.dicom_files import image, save
from tests.strategies.counting.image_hospitals import drawn

GREY = np.zeros((6, 9), np.uint8)


def stated(tmp_path: Path, **tags: Any) -> dict[str, Any]:
    return of_dicom([(save(tmp_path / "x.dcm", image(GREY, **tags)), 0)], 0)


def test_a_header_states_what_it_has_and_the_rest_is_unknown(tmp_path: Path) -> None:
    assert stated(tmp_path) == {
        "size": 6, "spacing": None, "bits": "8", "orientation": None, "view": None, "maker": None,
    }  # fmt: skip
    full = stated(
        tmp_path,
        Manufacturer=" Acme ",
        ViewPosition="pa",
        PatientOrientation=["L", "FA"],
        ImagerPixelSpacing=[0.2, 0.2],
    )
    assert full == {
        "size": 6, "spacing": 0.2, "bits": "8", "orientation": "L/F", "view": "PA", "maker": "Acme",
    }  # fmt: skip
    assert (
        stated(tmp_path, PixelSpacing=[0.1, 0.1], ImagerPixelSpacing=[0.2, 0.2])["spacing"] == 0.1
    )


@pytest.mark.parametrize(
    ("cosines", "direction"),
    [
        ([1, 0, 0, 0, 1, 0], "L/P"),
        ([-1, 0, 0, 0, 0, -1], "R/F"),
        ([0, 0.99, 0.1, 0, 0.1, -0.99], "P/F"),
        ([0, 0, 1, 0, -1, 0], "H/A"),
    ],
)
def test_cosines_are_directions_where_the_header_has_no_letters(
    tmp_path: Path, cosines: list[float], direction: str
) -> None:
    assert stated(tmp_path, ImageOrientationPatient=cosines)["orientation"] == direction


def test_no_value_of_a_header_stops_the_others(tmp_path: Path) -> None:
    file = save(tmp_path / "x.dcm", image(GREY, PixelSpacing=[0.1, 0.1], Manufacturer="Acme"))
    content, spacing = file.read_bytes(), rb"0.1\0.1"
    assert spacing in content
    file.write_bytes(content.replace(spacing, rb"a.b\c.d"))
    facts = of_dicom([(file, 0)], 0)
    assert (facts["spacing"], facts["maker"], facts["size"]) == (None, "Acme", 6)


def as_bytes(picture: Image.Image, form: str, **more: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, form, **more)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("picture", "form", "bits"),
    [
        (Image.new("L", (9, 6)), "PNG", "8"),
        (Image.new("RGB", (9, 6)), "JPEG", "8"),
        (Image.new("1", (9, 6)), "PNG", "1"),
        (Image.fromarray(np.full((6, 9), 60_000, np.uint16)), "PNG", "16"),
        (Image.fromarray(np.full((6, 9), 60_000, np.uint16)), "TIFF", "16"),
        (Image.new("F", (9, 6)), "TIFF", "32"),
    ],
)
def test_image_files_state_size_and_bits(
    tmp_path: Path, picture: Image.Image, form: str, bits: str
) -> None:
    content = as_bytes(picture, form)
    (tmp_path / "x").write_bytes(content)
    found = of_file([tmp_path / "x"], 0)
    assert found == {"size": 6, "bits": bits, "orientation": None}
    assert of_bytes(lambda row: content, 0) == found


@pytest.mark.parametrize(("turn", "words"), [(1, UPRIGHT), (6, TURNED), (3, TURNED)])
def test_a_photograph_states_whether_it_was_turned(turn: int, words: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    content = as_bytes(Image.new("RGB", (9, 6)), "JPEG", exif=exif)
    assert of_bytes(lambda row: content, 0)["orientation"] == words


def test_pixels_say_brightness_contrast_and_which_sides_mirror_each_other() -> None:
    for own in drawn(10, 3):
        upright, lying = Image.fromarray(own), Image.fromarray(np.rot90(own))
        up, down = of_pixels(upright), of_pixels(lying)
        assert up["mirror"] == AXES[0]
        assert down["mirror"] == AXES[2]
        assert up["brightness"] == pytest.approx(down["brightness"])
        assert up["brightness"] == pytest.approx(own.mean() / 255, abs=0.01)
        inverted = of_pixels(Image.fromarray(255 - own))
        assert float(inverted["brightness"]) == pytest.approx(1 - float(up["brightness"]), abs=0.01)  # type: ignore[arg-type]
        assert inverted["mirror"] == up["mirror"]
        large = of_pixels(upright.resize((480, 480), Image.Resampling.NEAREST))
        assert large["contrast"] == pytest.approx(up["contrast"], abs=0.01)
    assert of_pixels(Image.new("L", (5, 5), 7))["mirror"] is None

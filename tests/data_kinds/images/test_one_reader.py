"""One reader of images: every kind of file, through every entrance, gives the same bits, or the same
refusal.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

import fedsurrogate as fs
from fedsurrogate._images import picture
from fedsurrogate._model import ImageModel
from fedsurrogate.client_app.datasets.dataset import DataSource, load
from fedsurrogate.client_app.datasets.dicom import scan_images
from fedsurrogate.client_app.datasets.dicom_files import open_dicom
from fedsurrogate.client_app.datasets.image_folders import IMAGE_SUFFIXES
from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.features import extraction
from fedsurrogate.client_app.features.device_processes import in_parts
from fedsurrogate.client_app.features.extraction import extract
from fedsurrogate.client_app.model_use.calibration import Calibration
from fedsurrogate.client_app.model_use.inputs import find_inputs
from fedsurrogate.client_app.model_use.prediction import Predictor, predict
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.errors import DataError, FedSurrogateError
from tests.attacks.sites.test_hostile_names import model_of
from tests.data_kinds.images.corpus import (
    COLOURS,
    DEEP,
    LEVELS,
    SHARES,
    Array,
    Kind,
    deep_kinds,
    grey,
    refused_kinds,
    shallow_kinds,
    written,
)
from tests.dicom_files import image, save

READ, REFUSED = [*deep_kinds(), *shallow_kinds()], refused_kinds()
# A way to an image: the folder of one file, its name -> (height, width, 3).
Entrance = Callable[[Path, str], Array]


def _site(folder: Path, _: str) -> Array:
    return np.asarray(load(DataSource("imagefolder", str(folder)), seed=0).open_image(0))


def _table(folder: Path, name: str) -> Array:
    (folder / "list.csv").write_text(f"path,label\nclass/{name},a\n")
    return _site(folder, name)


def _parquet(folder: Path, name: str) -> Array:
    content = (folder / "class" / name).read_bytes()
    pq.write_table(pa.table({"image": [content], "label": ["a"]}), folder / "all.parquet")
    return np.asarray(load(DataSource("parquet", str(folder)), seed=0).open_image(0))


def _site_predict(folder: Path, _: str) -> Array:
    return np.asarray(find_inputs(str(folder)).dataset([0]).open_image(0))


def _python_path(folder: Path, name: str) -> Array:
    return _of_features(fs.features([str(folder / "class" / name)], "pixels:rgb"))


def _python_image(folder: Path, name: str) -> Array:
    with Image.open(folder / "class" / name) as opened:
        return _of_features(fs.features([opened], "pixels:rgb"))


def _python_pairs(folder: Path, name: str) -> Array:
    """A data set of pairs, as `fedsurrogate.simulate` and `sweep` read it."""
    pairs = [(folder / "class" / name, "a")]
    return _of_features(fs.labelled_features(pairs, "pixels:rgb")[0])


def _python_module(folder: Path, name: str) -> Array:
    return _of_features(fs.features([folder / "class" / name], torch.nn.Flatten()))


def _own_transform(folder: Path, name: str) -> Array:
    fs.register_backbone("flat", torch.nn.Flatten(), lambda each: torch.tensor(np.array(each)))
    with Image.open(folder / "class" / name) as opened:
        row = fs.features([opened], "flat")[0]
    return row.reshape(16, 16, 3).numpy().astype(np.uint8)


def _of_features(x: torch.Tensor) -> Array:
    return (x[0].reshape(3, 16, 16).permute(1, 2, 0) * 255).round().numpy().astype(np.uint8)


ENTRANCES: dict[str, Entrance] = {
    "site": _site, "table": _table, "parquet": _parquet, "site predict": _site_predict,
    "path": _python_path, "PIL image": _python_image, "data set": _python_pairs,
    "module": _python_module, "own transform": _own_transform,
}  # fmt: skip


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.name)
def test_every_kind_gives_the_same_bits_through_every_entrance(tmp_path: Path, kind: Kind) -> None:
    assert kind.expected is not None
    for way, entrance in ENTRANCES.items():
        folder = tmp_path / way
        (folder / "class").mkdir(parents=True)
        (folder / "class" / kind.name).write_bytes(kind.content)
        found = entrance(folder, kind.name)
        assert np.array_equal(found, kind.expected), way
    if not kind.stated:
        # A copy in memory has no file any more.
        with Image.open(io.BytesIO(kind.content)) as opened:
            assert np.array_equal(np.asarray(picture(opened.copy(), 0)), kind.expected)


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.name)
def test_what_is_ambiguous_is_refused_with_a_reason_by_every_entrance(
    tmp_path: Path, kind: Kind
) -> None:
    for way, entrance in ENTRANCES.items():
        folder = tmp_path / way
        (folder / "class").mkdir(parents=True)
        (folder / "class" / kind.name).write_bytes(kind.content)
        with pytest.raises(DataError, match=kind.why):
            entrance(folder, kind.name)
    if not kind.stated:
        with (
            Image.open(io.BytesIO(kind.content)) as opened,
            pytest.raises(DataError, match=f"record 7 cannot be read: .*{kind.why}"),
        ):
            picture(opened.copy(), 7)
    with pytest.raises(DataError, match=kind.name):
        picture(tmp_path / "site" / "class" / kind.name, 0)


MODES = ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "LA", "PA", "RGBX", "RGBa")


@pytest.mark.parametrize("mode", [*MODES, "La", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"])
def test_every_mode_of_pillow_is_read_in_memory(mode: str) -> None:
    plain = Image.fromarray(LEVELS)
    if mode.startswith("I;16"):
        values = DEEP.astype(">u2" if mode == "I;16B" else "<u2")
        made = Image.frombuffer(mode, (16, 16), values.tobytes(), "raw", mode, 0, 1)
        expected = grey(LEVELS)
    elif mode in ("I", "F"):
        made = Image.fromarray(DEEP.astype(np.int32) if mode == "I" else SHARES)
        expected = grey(LEVELS)
    elif mode == "La":
        # All is opaque, so premultiplied grey is grey.
        made, expected = plain.convert("LA").convert("La"), grey(LEVELS)
    else:
        source = Image.fromarray(COLOURS)
        made = {
            "RGBa": lambda: source.convert("RGBA").convert("RGBa"),
            "LAB": lambda: Image.merge("LAB", source.split()),
            "PA": lambda: source.convert("P").convert("PA"),
        }.get(mode, lambda: source.convert(mode))()
        expected = np.asarray(made.convert("RGB"))
    assert made.mode == mode
    assert np.array_equal(np.asarray(picture(made, 0)), expected)
    x = fs.features([made, made], "pixels:rgb")
    assert np.array_equal(_of_features(x), expected)


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.integers(-(2**31), 2**31 - 1),
        st.integers(0, 2**16 - 1),
        st.sampled_from([2**14 - 1, 2**14, 2**16 - 1, 2**16]),
    ),
    st.integers(0, 15),
)
def test_a_grey_level_is_the_high_byte_or_the_image_is_refused(highest: int, less: int) -> None:
    """Any highest value: the closed form of the rule, and never a clipped or wrapped level."""
    values = np.array([[0, highest >> less, highest]], np.int32)
    images = [Image.fromarray(values)]
    if 0 <= highest < 2**16:
        images.append(Image.fromarray(values.astype(np.uint16)))
    for deep in images:
        if highest == 0 or 2**14 <= highest < 2**16:
            assert np.array_equal(np.asarray(picture(deep, 0))[..., 0], values >> 8)
        else:
            with pytest.raises(DataError, match="scale the values to the full range"):
                picture(deep, 0)


@pytest.mark.parametrize("entrance", ["path", "site predict"])
def test_large_jpegs_give_the_same_features_at_sites_and_in_python(
    tmp_path: Path, entrance: str
) -> None:
    """A site decodes them smaller; Python must do the same to a path."""
    (tmp_path / "class").mkdir()
    noise = np.random.default_rng(1).integers(0, 256, (400, 300, 3), dtype=np.uint8)
    file = tmp_path / "class" / "x.jpg"
    file.write_bytes(written(Image.fromarray(noise).resize((1500, 2000)), "JPEG"))
    backbone = load_backbone("pixels:rgb", image_size=16)
    dataset = load(DataSource("imagefolder", str(tmp_path)), seed=0)
    (wanted,) = in_parts(dataset.open_image, [range(1)], backbone, 8)
    assert wanted.features is not None
    if entrance == "path":
        found = fs.features([file], "pixels:rgb", image_size=16).half()
    else:
        opener = find_inputs(str(tmp_path)).dataset([0]).open_image
        (part,) = in_parts(opener, [range(1)], backbone, 8)
        assert part.features is not None
        found = part.features
    assert torch.equal(found, wanted.features)
    assert dataset.open_image(0, 16).size != (1500, 2000)


def test_a_model_in_python_and_at_a_site_say_the_same_of_every_kind(tmp_path: Path) -> None:
    """`Model.predict` and `site predict`: equal probabilities, and no row for what is refused."""
    signed = model_of(["a", "b", "c"])
    folder = tmp_path / "new"
    folder.mkdir()
    for kind in [*READ, *REFUSED]:
        (folder / kind.name).write_bytes(kind.content)
    predictor = Predictor(signed.classifier, Calibration())
    inputs = find_inputs(str(folder))
    assert len(inputs) == len(READ) + len(REFUSED)
    backbone = load_backbone("pixels", image_size=8)
    predict(signed, predictor, inputs, backbone, tmp_path / "p.csv")
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    model = ImageModel(signed)
    read = {kind.name for kind in READ}
    for row in rows:
        if row["file"] in read:
            own = model.predict_proba([folder / row["file"]])[0]
            assert [float(row[f"p_{name}"]) for name in "abc"] == pytest.approx(
                own.tolist(), abs=1e-6
            )
        else:
            (kind,) = (kind for kind in REFUSED if kind.name == row["file"])
            assert (row["decision"], row["p_a"]) == ("", "")
            assert row["problem"].startswith("cannot be read: ")
            assert (
                np.char.count(row["problem"], kind.why.replace(".", "(", 1).replace(".", ")")) == 1
            )


@pytest.mark.parametrize("small", [0, 1, 2])
def test_the_page_that_is_no_smaller_copy_is_read_wherever_it_is(
    tmp_path: Path, small: int
) -> None:
    pages = [Image.fromarray(LEVELS[:4, :4]) for _ in range(3)]
    pages[small] = Image.fromarray(COLOURS)
    for number, page in enumerate(pages):
        page.encoderinfo = {"tiffinfo": {254: int(number != small)}}
    stream = io.BytesIO()
    pages[0].save(
        stream, "TIFF", save_all=True, append_images=pages[1:], tiffinfo={254: int(small != 0)}
    )
    (tmp_path / "x.tif").write_bytes(stream.getvalue())
    assert np.array_equal(np.asarray(picture(tmp_path / "x.tif", 0)), COLOURS)


@pytest.mark.parametrize("suffix", sorted(IMAGE_SUFFIXES))
def test_no_suffix_is_lost(tmp_path: Path, suffix: str) -> None:
    """Whatever it is called, in either case: an image counts at a site and has a row."""
    (tmp_path / "a").mkdir()
    content = written(Image.fromarray(COLOURS), "PNG")
    for name in (f"x{suffix}", f"y{suffix.upper()}"):
        (tmp_path / "a" / name).write_bytes(content)
    assert len(load(DataSource("imagefolder", str(tmp_path)), seed=0)) == 2
    assert len(find_inputs(str(tmp_path))) == 2
    assert suffix in Image.registered_extensions()


@pytest.mark.parametrize("name", ["x.dcm", "x", "IM0001", "x.IMA", "x.txt"])
@pytest.mark.parametrize("preamble", [True, False])
def test_dicom_beside_images_is_counted_by_reason(
    tmp_path: Path, name: str, preamble: bool
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(written(Image.fromarray(LEVELS), "PNG"))
    (tmp_path / "a" / "notes.txt").write_text("of the physician")
    content = save(tmp_path / "x", image(LEVELS)).read_bytes()
    (tmp_path / "x").unlink()
    (tmp_path / "a" / name).write_bytes(content if preamble else content[132:])
    source = DataSource("imagefolder", str(tmp_path))
    with pytest.raises(DataError, match=rf"1 files in the class folders are DICOM, .*{name}"):
        load(source, seed=0)
    alone = load(DataSource("imagefolder", str(tmp_path), one_by_one=True, noisy=True), seed=0)
    assert len(alone) == 1
    assert [each.count for each in alone.left_out if "are DICOM" in each.why] == [1]
    inputs = find_inputs(str(tmp_path))
    assert sorted(inputs.names) == sorted(["a/1.png", f"a/{name}"])
    with pytest.raises(DataError, match="it is a DICOM file among image files"):
        inputs.dataset([list(inputs.names).index(f"a/{name}")]).open_image(0)


def test_dicom_called_png_is_named_and_python_reads_it(tmp_path: Path) -> None:
    save(tmp_path / "a" / "x.png", image(LEVELS))
    with pytest.raises(DataError, match="it is a DICOM file among image files"):
        load(DataSource("imagefolder", str(tmp_path)), seed=0).open_image(0)
    assert np.array_equal(np.asarray(picture(tmp_path / "a" / "x.png", 0)), grey(LEVELS))


def test_one_ambiguous_image_is_left_out_alone(tmp_path: Path) -> None:
    """The features of the others have the same bits with and without it."""
    (tmp_path / "a").mkdir()
    for number in range(5):
        content = written(Image.fromarray(np.roll(DEEP, number)), "PNG")
        (tmp_path / "a" / f"{number}.png").write_bytes(content)
    backbone = load_backbone("pixels", image_size=16)
    parts = []
    for extra in (None, *REFUSED):
        place = tmp_path / "a" / ("2x" + (extra.name if extra else ""))
        if extra:
            place.write_bytes(extra.content)
        dataset = load(DataSource("imagefolder", str(tmp_path), one_by_one=True), seed=0)
        (part,) = in_parts(dataset.open_image, [range(len(dataset))], backbone, 64)
        parts.append(part)
        place.unlink(missing_ok=True)
    for part in parts[1:]:
        assert [row for row, _ in part.broken] == [3]
        assert part.features is not None
        assert torch.equal(part.features, parts[0].features)


def test_features_of_an_earlier_reader_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "x.png").write_bytes(READ[0].content)
    dataset = load(DataSource("imagefolder", str(tmp_path / "data")), seed=0)
    backbone = load_backbone("pixels", image_size=8)
    first, second = (extract(dataset, backbone, tmp_path / "cache") for _ in range(2))
    assert (first.cached, second.cached) == (False, True)
    monkeypatch.setattr(extraction, "READER", extraction.READER + 1)
    assert not extract(dataset, backbone, tmp_path / "cache").cached


def outcome(work: Callable[[], Any]) -> str:
    """What a reader does: it returns, or refuses with one error of the product."""
    try:
        work()
    except FedSurrogateError as error:
        # It can be written to a terminal.
        str(error).encode()
        return "refused"
    return "read"


# Whole files with a few bytes changed, and bytes that look like a beginning.
beginnings = st.sampled_from([kind.content for kind in [*READ, *REFUSED]])
damaged = st.tuples(beginnings, st.integers(0, 400), st.binary(max_size=8)).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + len(parts[2]) :]
)
contents = st.one_of(st.binary(max_size=200), damaged, beginnings.map(lambda content: content[:99]))


@settings(max_examples=150, deadline=None)
@given(contents, st.sampled_from(sorted(IMAGE_SUFFIXES)))
def test_any_bytes_are_an_image_or_one_refusal(content: bytes, suffix: str) -> None:
    with TemporaryDirectory() as home:
        file = Path(home) / f"x{suffix}"
        file.write_bytes(content)
        assert outcome(lambda: picture(file, 0)) in ("read", "refused")
        (Path(home) / "a").mkdir()
        file.rename(Path(home) / "a" / file.name)
        dataset = load(DataSource("imagefolder", home), seed=0)
        (part,) = in_parts(dataset.open_image, [range(1)], load_backbone("pixels", image_size=8), 8)
        assert len(part) == 1


names = st.binary(min_size=1, max_size=12).filter(lambda name: not set(name) & set(b"/\0"))


# A name with a byte that is not UTF-8, and names that look like its escaped form.
ESCAPED = [b"\xe9", b"\\udce9", b"\\\\udce9", b"\\xe9", b"\\\xe9", b"\xc3\xa9", b"C:\\x"]


@settings(max_examples=40, deadline=None)
@given(st.lists(names, min_size=1, max_size=4, unique=True))
@example(ESCAPED)
def test_any_file_name_has_a_row_of_its_own_and_is_predicted_once(found: list[bytes]) -> None:
    signed, backbone = model_of(["a", "b"]), load_backbone("pixels", image_size=8)
    predictor = Predictor(signed.classifier, Calibration())
    with TemporaryDirectory() as home:
        folder, out = Path(home) / "new", Path(home) / "p.csv"
        folder.mkdir()
        for name in found:
            (folder / os.fsdecode(name + b".png")).write_bytes(READ[0].content)
        assert predict(signed, predictor, find_inputs(str(folder)), backbone, out).written == len(
            found
        )
        rows = list(csv.reader(out.open(encoding="utf-8", newline="")))
        assert len({row[0] for row in rows}) == len(found) + 1
        assert {row[-1] for row in rows[1:]} == {""}
        if found == ESCAPED:
            assert {"\\udce9.png", "é.png", "C:\\x.png"} <= {row[0] for row in rows}
        assert predict(signed, predictor, find_inputs(str(folder)), backbone, out).written == 0


def test_bytes_of_no_text_reach_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A log that cannot be written ends with a traceback on the terminal."""
    good = save(tmp_path / "good", image(LEVELS))
    odd = save(tmp_path / "odd", image(LEVELS, Rows=65535, Columns=65535))
    odd = odd.rename(tmp_path / os.fsdecode(b"\xe9.dcm"))
    left = LeftOut()
    assert len(scan_images(tmp_path, [good, odd], left)) == 1
    assert any("broken" in each.why for each in left.reasons)
    caplog.text.encode()
    str(left.reasons).encode()
    with pytest.raises(DataError) as refusal:
        scan_images(tmp_path, [odd], LeftOut())
    str(refusal.value).encode()
    with pytest.raises(DataError) as refusal:
        open_dicom(odd)
    str(refusal.value).encode()

"""A few foreign bytes take little memory and time, and end no run.

Every attack here took gigabytes or minutes, or raised an exception that nobody expects.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image, UnidentifiedImageError
from pydicom.encaps import encapsulate
from pydicom.uid import (
    JPEG2000,
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    JPEGBaseline8Bit,
    RLELossless,
)
from safetensors.torch import save
from torch import Tensor

from benchmarks._fuzz_limits import ACCEPTED, MEMORY, REFUSED, outcome
from fedsurrogate.client_app.datasets.dicom import scan_images
from fedsurrogate.client_app.datasets.dicom_files import LARGEST_PIXELS, open_dicom, open_single
from fedsurrogate.client_app.datasets.images import open_rgb
from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.offline.answers import is_message
from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import (
    ConfigError,
    DataError,
    FedSurrogateError,
    RunError,
    SealError,
    SurrogateError,
)
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.signed_models.signed_model import (
    digest_of,
    read_signed_model,
    received_model,
    save_signed_model,
    signed_values,
    unpack_gaussians,
)
from fedsurrogate.common.wire.generator_files import read_generator
from fedsurrogate.common.wire.model_proto import load_model, unpack_classifier, unpack_parameters
from fedsurrogate.common.wire.records import unpack_public_mean
from fedsurrogate.common.wire.tensors import pack
from fedsurrogate.server_app.exchange import _read as stored_bytes
from fedsurrogate.strategies.base.training import Training
from tests.common.signed_models.test_signed_model import KEY, model
from tests.dicom_files import image
from tests.dicom_files import save as save_dicom

Attack = tuple[Callable[[bytes], object], type[FedSurrogateError], bytes]
HUGE = 2**24 - 1
MODELS = "fedsurrogate.common.signed_models.signed_model"
HEADER = pb.Header(schema=1, classes=["a", "b", "c"] + [str(number) for number in range(60)])


def of_file(read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of files as a reader of bytes."""

    def parse(content: bytes) -> object:
        descriptor, name = tempfile.mkstemp()
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
            return read(Path(name))
        finally:
            Path(name).unlink()

    return parse


def network(kind: str, inputs: int, **tensors: Tensor) -> bytes:
    packed = [
        pb.Tensor(name=name.replace("__", "."), values=pack(tensor))
        for name, tensor in tensors.items()
    ]
    message = pb.Network(header=HEADER, kind=kind, inputs=inputs, tensors=packed)
    return pb.Classifier(network=message).SerializeToString()


def centre(*shape: int) -> pb.Centre:
    halves = pb.Halves(shape=shape, scale=1.0, data=bytes(2 * math.prod(shape)))
    return pb.Centre(mean=halves)


def head_with_centre(*shape: int) -> bytes:
    head = pb.Head(header=HEADER, weight=pack(torch.ones(63, 1)), bias=pack(torch.ones(63)))
    head.centre.CopyFrom(centre(*shape))
    return pb.Classifier(head=head).SerializeToString()


def many_sides() -> bytes:
    """The product of so many sides is a number of millions of digits."""
    values = pb.Halves(shape=[2**32 - 1] * 400_000, scale=1.0)
    tensor = pb.Tensor(name="w", values=values)
    return pb.Parameters(header=HEADER, tensors=[tensor]).SerializeToString()


def model_file(tensors: dict[str, Tensor], **form: str) -> bytes:
    return save(tensors, {"classes": json.dumps(list(HEADER.classes)), **form})


def signed_file(tensors: dict[str, Tensor], form: dict[str, str], signed: bool = True) -> bytes:
    """A model file with these parts of a classifier, under a valid signature or without one."""
    made = model()
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    changes: dict[str, Any] = {"form": form, "gaussians": "none", "tensors": digest_of(named)}
    facts = made.manifest.model_copy(update=changes)
    signature = bytes(64)
    if signed:
        from fedsurrogate.common.security.sealing import sign
        from fedsurrogate.common.signed_models.signed_model import PURPOSE

        signature = sign(facts.signed_bytes(), KEY, PURPOSE)
    metadata = {
        "format": "1",
        "manifest": facts.signed_bytes().decode(),
        "signature": signature.hex(),
        "key": public_key(KEY).hex(),
    }
    content: bytes = save(named, metadata)
    return content


def gaussians_of(**changes: Tensor) -> bytes:
    found = model().gaussians
    assert found is not None
    tensors = found.tensors() | {name.replace("__", "."): each for name, each in changes.items()}
    return base64.b64encode(save({name: each.contiguous() for name, each in tensors.items()}))


def generator_file(tensors: dict[str, Tensor], **settings: object) -> bytes:
    manifest = {
        "format": 1,
        "kind": "generator",
        "settings": {"method": "dpcvae", **settings},
        "run": "r",
        "fingerprint": "f",
        "classes": ["a", "b"],
    }
    return save(tensors, {"manifest": json.dumps(manifest)})


EMPTY = {"weight": torch.zeros(1), "bias": torch.zeros(1)}


def read_gaussians(text: bytes) -> object:
    return unpack_gaussians(text.decode())


WIRE: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "a linear network of many inputs": (unpack_classifier, network("linear", HUGE)),
    "the same as a site's own head": (
        lambda payload: unpack_classifier(payload, most=0),
        network("linear", HUGE),
    ),
    "a wide network of many inputs": (
        unpack_classifier,
        network("mlp", HUGE, hidden__weight=torch.ones(1024, 1)),
    ),
    "a convolutional network of large images": (
        unpack_classifier,
        network("convnet", 4094 * 4094, convolution1__weight=torch.ones(1024, 1)),
    ),
    "a centre without a dimension, in a head": (unpack_classifier, head_with_centre()),
    "a centre of two dimensions, in a head": (unpack_classifier, head_with_centre(1, 1)),
    "a centre without a dimension, in a request": (
        unpack_public_mean,
        centre().SerializeToString(),
    ),
    "a tensor of 400,000 dimensions": (unpack_parameters, many_sides()),
    "Gaussians whose variances have no dimension": (
        read_gaussians,
        gaussians_of(within__variances=torch.tensor(1.0)),
    ),
    "Gaussians without a dimension": (
        read_gaussians,
        gaussians_of(mean=torch.tensor(1.0), means=torch.tensor(1.0)),
    ),
}
MODEL_FILES: dict[str, bytes] = {
    "a network of many inputs": model_file(EMPTY, kind="linear", inputs=str(2**40)),
    "a network of more inputs than torch counts": model_file(
        EMPTY, kind="linear", inputs="9" * 100
    ),
    "a network with few weights": model_file(EMPTY, kind="linear", inputs=str(HUGE)),
    "a wide network": model_file(
        {"hidden.weight": torch.ones(1024, 1)}, kind="mlp", inputs=str(HUGE)
    ),
    "a head whose weights have one dimension": model_file(EMPTY),
    "a head without a dimension": model_file(
        {"weight": torch.tensor(1.0), "bias": torch.tensor(1.0)}
    ),
    "a head with a centre of another rank": model_file(
        {"weight": torch.ones(63, 2), "bias": torch.ones(63), "centre": torch.ones(1, 1, 2)}
    ),
    "a head of whole numbers": model_file(
        {"weight": torch.ones(63, 2, dtype=torch.int64), "bias": torch.ones(63)}
    ),
    "discriminants without dimensions": model_file(
        {"means": torch.tensor(1.0), "whiteners": torch.tensor(1.0), "bias": torch.tensor(1.0)}
    ),
    "discriminants of wrong ranks": model_file(
        {
            "means": torch.ones(63, 2),
            "whiteners": torch.ones(63, 2, 2, 1),
            "bias": torch.ones(63),
        }
    ),
    "classes that are a number": save(EMPTY, {"classes": "3"}),
    "classes in ten thousand brackets": save(EMPTY, {"classes": "[" * 100_000}),
}
GENERATORS: dict[str, bytes] = {
    "a generator without means": generator_file({"x": torch.ones(1)}),
    "means without a dimension": generator_file({"means": torch.tensor(1.0)}),
    "means of a large dimension": generator_file(
        {"means": torch.ones(1, 2**20)}, **{"dpcvae.hidden": 4096}
    ),
}


ATTACKS: dict[str, Attack] = {
    **{f"message: {n}": (read, SurrogateError, content) for n, (read, content) in WIRE.items()},
    **{f"model: {n}": (of_file(load_model), SurrogateError, c) for n, c in MODEL_FILES.items()},
    **{f"generator: {n}": (of_file(read_generator), DataError, c) for n, c in GENERATORS.items()},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_message_or_file_is_refused(name: str) -> None:
    parse, error, content = ATTACKS[name]
    assert outcome(parse, (error,), content) == REFUSED


SIGNED: dict[str, tuple[dict[str, Tensor], dict[str, str]]] = {
    "a network of many inputs": (EMPTY, {"kind": "linear", "inputs": str(HUGE)}),
    "a head of one dimension": (EMPTY, {}),
    "a head for other classes": ({"weight": torch.ones(2, 6), "bias": torch.ones(2)}, {}),
}


@pytest.mark.parametrize("parts", SIGNED.values(), ids=SIGNED)
@pytest.mark.parametrize("signed", [False, True])
def test_a_signed_model_file(parts: tuple[dict[str, Tensor], dict[str, str]], signed: bool) -> None:
    allowed = SurrogateError if signed else SealError
    content = signed_file(*parts, signed=signed)
    trusted = frozenset({public_key(KEY)})
    assert outcome(of_file(lambda file: read_signed_model(file, trusted)), (allowed,), content) == (
        REFUSED
    )


def test_a_sound_file_is_accepted_under_the_same_limits() -> None:
    content = save_signed_model(model())
    assert outcome(of_file(read_signed_model), (), content) == ACCEPTED


@pytest.mark.parametrize("content", [bytes(64).hex(), "", "no digits", "00"])
def test_nothing_is_built_before_the_signature_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
) -> None:
    def built(*_: object) -> None:
        pytest.fail("parsed before its signature was checked")

    made = model()
    file = tmp_path / "model.fedsurrogate"
    file.write_bytes(save_signed_model(replace(made, signature=bytes(64))))
    values = signed_values(made) | {"signature": content}
    for name in ("classifier_of", "unpack_classifier", "unpack_gaussians"):
        monkeypatch.setattr(f"{MODELS}.{name}", built)
    monkeypatch.setattr(f"{MODELS}.Manifest.model_validate_json", built)
    with pytest.raises(SealError):
        read_signed_model(file)
    with pytest.raises((SealError, SurrogateError)):
        received_model(b"payload", values)


def test_a_file_of_an_unknown_signer_is_not_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "model.fedsurrogate"
    file.write_bytes(save_signed_model(model()))
    monkeypatch.setattr(f"{MODELS}.classifier_of", lambda *_: pytest.fail("built"))
    with pytest.raises(SealError, match="not a coordinator's key that this site knows"):
        read_signed_model(file, frozenset({bytes(64)}))


def test_the_limit_notices_memory_that_is_asked_for_and_hidden() -> None:
    """A parser that makes its own exception of a failed allocation is found all the same."""

    def hides(content: bytes) -> None:
        try:
            torch.zeros(2**30)
        except RuntimeError:
            raise SurrogateError("not valid") from None

    assert outcome(hides, (SurrogateError,), b"few") == MEMORY
    assert outcome(lambda _: bytes(2**27), (SurrogateError,), b"few") == MEMORY
    assert outcome(lambda _: bytes(2**27), (), bytes(2**22)) == ACCEPTED
    assert "KeyError" in outcome(lambda _: {}["x"], (SurrogateError,), b"few")


def test_sizes_that_sites_state_take_no_memory_at_the_coordinator() -> None:
    """2^24 features and 10,000 classes, a few bytes each, were 671 GB of a first model."""
    run = parse_run({"method": "fedavg", "fedavg.model": "linear"})
    classes = tuple(str(number) for number in range(10_000))

    def begins(_: bytes) -> None:
        Training.begin(run, classes, "f" * 16, 2**24)

    assert outcome(begins, (RunError,), b"few") == REFUSED


def test_many_unknown_settings_are_refused_in_time() -> None:
    """For each of 400,000 unknown keys a similar one was looked for, in minutes."""
    settings = {f"fedpft.component{number}": 1 for number in range(400_000)}
    assert outcome(lambda _: parse_run(settings), (ConfigError,), bytes(2**23)) == REFUSED


@pytest.mark.parametrize(
    "syntax", [ExplicitVRLittleEndian, RLELossless, JPEG2000, JPEGBaseline8Bit]
)
def test_a_dicom_file_that_states_a_huge_image(tmp_path: Path, syntax: UID) -> None:
    """65,535 x 65,535 pixels, in a hundred bytes."""
    fragment = encapsulate([b"\xff\xd8\xff\xd9" * 20])
    content = bytes(64) if syntax == ExplicitVRLittleEndian else fragment
    huge = {"Rows": 65535, "Columns": 65535, "PixelData": content}
    made = image(np.zeros((8, 8), np.uint16), **huge)
    made.file_meta.TransferSyntaxUID = syntax
    file = save_dicom(tmp_path / "x.dcm", made)
    small = save_dicom(tmp_path / "small.dcm", image(np.zeros((8, 8), np.uint16)))
    open_dicom(small)
    assert outcome(lambda _: open_dicom(file), (DataError,), file.read_bytes()) == REFUSED


# Of each, the form and mode of an image whose decoder takes memory by the size that a file states.
PICTURES = [
    *(("PNG", mode) for mode in ("1", "L", "P", "RGB", "RGBA", "I;16")),
    *(("TIFF", mode) for mode in ("1", "L", "RGB", "F")),
    *(("GIF", "P"), ("BMP", "L"), ("JPEG", "L"), ("JPEG2000", "L"), ("PPM", "1"), ("WEBP", "RGB")),
]


def blank(form: str, mode: str, side: int) -> bytes:
    packed: dict[str, Any] = {
        "TIFF": {"compression": "tiff_adobe_deflate"},
        "WEBP": {"lossless": True, "method": 0, "quality": 0},
    }.get(form, {})
    made = io.BytesIO()
    Image.new(mode, (side, side)).save(made, form, **packed)
    return made.getvalue()


@pytest.mark.parametrize(("form", "mode"), PICTURES)
def test_a_small_image_file_of_a_huge_image_is_refused_before_it_is_decoded(
    form: str, mode: str
) -> None:
    """13,300 x 13,300 pixels in 22 kB took 844 MB, and those of a WebP file 2.7 GB."""
    large = blank(form, mode, math.isqrt(LARGEST_PIXELS) + 1)
    assert open_rgb(io.BytesIO(blank(form, mode, 9)), 0).size == (9, 9)
    with pytest.raises(DataError, match=r"8193 x 8193 pixels; at most .* save it smaller"):
        open_rgb(io.BytesIO(large), 0)
    if form != "WEBP":  # Its library sets memory aside, and does not use it.
        parse = lambda content: open_rgb(io.BytesIO(content), 0)  # noqa: E731
        assert outcome(parse, (DataError,), large[: 2**20]) == REFUSED
    if form == "JPEG":  # It is decoded smaller where fewer pixels are needed.
        assert open_rgb(io.BytesIO(large), 224).width == 1025


def pages(kinds: Sequence[int]) -> bytes:
    """A TIFF with pages of one pixel; each states what it is in SubfileType."""
    made = [b"II*\0" + struct.pack("<I", 10) + b"\7\0"]
    for at, kind in enumerate(kinds, 1):
        sized = [(256, 1), (257, 1), (258, 8), (259, 1), (262, 1), (273, 8), (278, 1), (279, 1)]
        tags = [(254, kind), *sized]
        following = 10 + at * (6 + 12 * len(tags)) if at < len(kinds) else 0
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        made.append(struct.pack("<H", len(tags)) + entries + struct.pack("<I", following))
    return b"".join(made)


@settings(max_examples=40, deadline=None)
@given(kinds=st.lists(st.sampled_from([0, 1, 2, 4, 5]), min_size=1, max_size=9))
def test_the_one_page_of_a_tiff_that_is_no_copy_counts(kinds: list[int]) -> None:
    whole = [kind for kind in kinds if not kind & 5]
    if len(whole) > 1:
        with pytest.raises(DataError, match=f"holds {len(whole)} images"):
            open_rgb(io.BytesIO(pages(kinds)), 0)
    else:
        assert open_rgb(io.BytesIO(pages(kinds)), 0).size == (1, 1)


def test_a_tiff_of_many_pages_is_refused_before_all_are_read() -> None:
    """20,000 took 9 s, and the time grew with the square of their number."""
    assert open_rgb(io.BytesIO(pages([0, *[1] * 900])), 0).size == (1, 1)
    parse = lambda content: open_rgb(io.BytesIO(content), 0)  # noqa: E731
    assert outcome(parse, (DataError,), pages([0, *[1] * 100_000])) == REFUSED


@pytest.mark.parametrize("named", [True, False])
def test_no_image_starts_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Pillow hands PostScript to Ghostscript, whatever the file is named."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\necho >> {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    # What Pillow has found out before counts otherwise.
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n{} loop\n%%EOF\n"
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(UnidentifiedImageError):
        open_rgb(tmp_path / "x.png" if named else io.BytesIO(content), 0)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("form", sorted({"ICO", "PCX", "TGA", "SGI", "PDF", "EPS", "IM", "MSP"}))
def test_a_format_without_a_suffix_of_images_is_not_decoded(form: str) -> None:
    """Rare decoders are the least tested ones."""
    made = io.BytesIO()
    Image.new("1" if form == "MSP" else "RGB", (16, 16)).save(made, form)
    with pytest.raises(UnidentifiedImageError):
        open_rgb(made, 0)


ENTRANCES: dict[str, Callable[[Path], object]] = {
    "a folder": lambda file: scan_images(file.parent, [file], LeftOut()),
    "a prediction": open_dicom,
    "a notebook": open_single,
}


@cache
def deflated(inside: int, tag: bool) -> tuple[bytes, bytes]:
    """A sound file, and one whose deflated part has so many bytes."""
    big: dict[str, Any] = {"EncapsulatedDocument" if tag else "PixelData": bytes(inside)}
    sound, made = image(np.zeros((8, 8), np.uint8)), image(np.zeros((8, 8), np.uint8), **big)
    made.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    with tempfile.TemporaryDirectory() as folder:
        small, content = (
            save_dicom(Path(folder) / "x.dcm", each).read_bytes() for each in (sound, made)
        )
    return small, content


@pytest.mark.parametrize("entrance", ENTRANCES)
@settings(max_examples=6, deadline=None)
@given(inside=st.sampled_from([1, 2**20, 2**27, 2**28]), tag=st.booleans(), preamble=st.booleans())
def test_a_deflated_dicom_file_is_refused_before_it_is_inflated(
    entrance: str, inside: int, tag: bool, preamble: bool
) -> None:
    """600 MB in 600 kB took twice that when its header was read."""
    small, content = deflated(inside, tag)
    read = of_file(ENTRANCES[entrance])
    # What reads DICOM is imported here, not under the limit.
    read(small)
    assert outcome(read, (DataError,), content if preamble else content[132:]) == REFUSED


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_what_is_no_file_is_not_read_for_ever(tmp_path: Path, kind: str) -> None:
    """A link to a device had all the memory that a file may need; a pipe never ended."""
    place = tmp_path / "north.bundle"
    if kind == "device":
        place.symlink_to("/dev/zero")
    else:
        os.mkfifo(place)
    for read, refusal in ((stored_bytes, SurrogateError), (is_message, ConfigError)):
        assert outcome(lambda _, read=read: read(place), (refusal,), b"few") == REFUSED  # type: ignore[misc]

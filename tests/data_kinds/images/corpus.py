"""Image files of every kind, made here, each with the levels that a reader must give, or the reason
for which it must be refused.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

Array = np.ndarray[Any, np.dtype[Any]]
SIDE = 16
GENERATOR = np.random.default_rng(0)
# 16 x 16 levels from 0 to 255, and some colours.
LEVELS = GENERATOR.permutation(256).reshape(SIDE, SIDE).astype(np.uint8)
COLOURS = GENERATOR.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
# The same levels with more bits: the high byte is the level.
DEEP = (LEVELS.astype(np.uint16) << 8) | GENERATOR.integers(0, 256, (SIDE, SIDE), np.uint16)
TWELVE = DEEP >> 4
SHARES = (LEVELS / np.float32(255)).astype(np.float32)


@dataclass(frozen=True)
class Kind:
    """A file: its name, content, and what a reader must give.

    Attributes:
        expected: (height, width, 3) uint8; None if it must be refused.
        why: part of the reason for which it must be refused.
        stated: whether the file says more about its values than a PIL image in memory keeps.
    """

    name: str
    content: bytes
    expected: Array | None = None
    why: str = ""
    stated: bool = False


def written(image: Image.Image, form: str, **options: Any) -> bytes:
    """A file as Pillow writes it."""
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def tiff(values: Array, order: str = "<", bits: int = 0, white_is_zero: bool = False) -> bytes:
    """An uncompressed grey TIFF of any type, written by its specification (TIFF 6.0)."""
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    depth = bits or 8 * values.dtype.itemsize
    if depth == 12:
        pairs = values.astype(np.uint32).reshape(-1, 2)
        packed = (pairs[:, 0] << 12) | pairs[:, 1]
        data = b"".join(int(each).to_bytes(3, "big") for each in packed)
    else:
        data = values.astype(values.dtype.newbyteorder(order)).tobytes()  # type: ignore[arg-type]
    height, width = values.shape
    facts = {256: width, 257: height, 258: depth, 259: 1, 262: int(not white_is_zero)}
    facts |= {273: 8, 277: 1, 278: height, 279: len(data), 339: kind}
    directory = struct.pack(order + "H", len(facts)) + b"".join(
        struct.pack(order + "HHII", tag, 4, 1, value)
        if tag in (256, 257, 273, 278, 279)
        else struct.pack(order + "HHIHH", tag, 3, 1, value, 0)
        for tag, value in sorted(facts.items())
    )
    mark = b"II*\0" if order == "<" else b"MM\0*"
    return mark + struct.pack(order + "I", 8 + len(data)) + data + directory + bytes(4)


def pgm(values: Array, highest: int) -> bytes:
    """A binary grey map with 16 bits."""
    head = f"P5 {values.shape[1]} {values.shape[0]} {highest}\n".encode()
    return head + values.astype(">u2").tobytes()


def png(values: Array, colour: int) -> bytes:
    """A PNG of 16 bits with any number of channels, by its specification."""
    import zlib

    rows = values.astype(">u2").reshape(values.shape[0], -1)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    head = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, colour, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def grey(levels: Array) -> Array:
    """Grey levels in three channels."""
    return np.repeat(levels.astype(np.uint8)[:, :, None], 3, axis=2)


def as_pillow(content: bytes) -> Array:
    """What Pillow's own conversion gives, the oracle for 8 bits."""
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def _with_hole() -> Array:
    values = SHARES.copy()
    values[3, 4] = np.nan
    return values


def _holed(levels: Array) -> Array:
    levels = levels.copy()
    levels[3, 4] = 0
    return grey(levels)


def deep_kinds() -> list[Kind]:
    """Greys and colours deeper than 8 bits with a range that is known."""
    unsigned = DEEP.astype(np.uint32) << 16
    opaque = np.full((SIDE, SIDE, 1), 65535, np.uint16)
    colours = (COLOURS.astype(np.uint16) << 8) | 7
    pair = np.concatenate([DEEP[:, :, None], opaque], axis=2)
    half = np.concatenate([colours, opaque // 2], axis=2)
    j2k = written(Image.fromarray(DEEP), "JPEG2000", irreversible=False)
    return [
        Kind("png16.png", written(Image.fromarray(DEEP), "PNG"), grey(LEVELS)),
        Kind("png16own.png", png(DEEP[:, :, None], 0), grey(LEVELS)),
        Kind("pgm16.pgm", pgm(DEEP, 65535), grey(LEVELS)),
        # Pillow scales by the maximum that the file states.
        Kind("pgm12.pgm", pgm(TWELVE, 4095), grey(_scaled(TWELVE)), stated=True),
        Kind("pgmdark.pgm", pgm(DEEP >> 4, 65535), grey(LEVELS >> 4), stated=True),
        *(Kind(f"tif16{o}.tif", tiff(DEEP, order), grey(LEVELS)) for o, order in ORDERS),
        *(
            Kind(f"tif16white{o}.tif", tiff(DEEP, order, 0, True), grey(255 - LEVELS), stated=True)
            for o, order in ORDERS
            if o == "le"
        ),
        Kind("tif12.tif", tiff(TWELVE, "<", 12), grey(LEVELS), stated=True),
        Kind("tifu32.tif", tiff(unsigned), grey(LEVELS), stated=True),
        Kind("tifs32.tif", tiff(DEEP.astype(np.int32)), grey(LEVELS)),
        Kind("tifs32be.tif", tiff(DEEP.astype(np.int32), ">"), grey(LEVELS)),
        *(Kind(f"float{o}.tiff", tiff(SHARES, order), grey(LEVELS)) for o, order in ORDERS),
        Kind("floatwhite.tiff", tiff(SHARES, "<", 0, True), grey(255 - LEVELS), stated=True),
        Kind("floatnan.tiff", tiff(_with_hole()), _holed(LEVELS)),
        Kind(
            "floatnanwhite.tiff", tiff(_with_hole(), "<", 0, True), _holed(255 - LEVELS), "", True
        ),
        Kind("black16.png", written(Image.fromarray(DEEP * 0), "PNG"), grey(LEVELS * 0)),
        Kind("blackfloat.tif", tiff(SHARES * 0), grey(LEVELS * 0)),
        Kind("deep.jp2", j2k, grey(LEVELS), stated=True),
        Kind("rgb16.png", png(colours, 2), COLOURS),
        Kind("rgba16.png", png(half, 6), COLOURS),
        Kind("la16.png", png(pair, 4), grey(LEVELS)),
    ]


def _scaled(values: Array) -> Array:
    return (np.rint(values.astype(float) * 65535 / 4095)).astype(np.uint32) >> 8


ORDERS = (("le", "<"), ("be", ">"))


def shallow_kinds() -> list[Kind]:
    """Eight bits in every mode and form: as Pillow converts them."""
    colour, plain = Image.fromarray(COLOURS), Image.fromarray(LEVELS)
    forms: list[tuple[str, Image.Image, str, dict[str, Any]]] = [
        ("l.png", plain, "PNG", {}),
        ("rgb.png", colour, "PNG", {}),
        ("rgba.png", colour.convert("RGBA"), "PNG", {}),
        ("p.png", colour.convert("P"), "PNG", {}),
        ("la.png", plain.convert("LA"), "PNG", {}),
        ("bit.png", plain.convert("1"), "PNG", {}),
        ("bit.pbm", plain.convert("1"), "PPM", {}),
        ("one.gif", colour.convert("P"), "GIF", {}),
        ("x.bmp", colour, "BMP", {}),
        ("x.dib", colour, "DIB", {}),
        ("x.webp", colour, "WEBP", {"lossless": True}),
        ("x.jpg", colour, "JPEG", {}),
        ("x.jpe", colour, "JPEG", {}),
        ("x.jfif", plain, "JPEG", {}),
        ("cmyk.jpg", colour.convert("CMYK"), "JPEG", {}),
        ("x.jp2", colour, "JPEG2000", {"irreversible": False}),
        ("x.j2k", plain, "JPEG2000", {"no_jp2": True, "irreversible": False}),
        ("ycc.tif", colour.convert("YCbCr"), "TIFF", {}),
        ("x.pnm", colour, "PPM", {}),
    ]
    made = [(name, written(image, form, **options)) for name, image, form, options in forms]
    made.append(("white.tif", tiff(LEVELS, "<", 0, True)))
    return [Kind(name, content, as_pillow(content)) for name, content in made] + turned_kinds()


def turned_kinds() -> list[Kind]:
    """Files that say how they are to be turned: as Pillow's own function turns them."""
    kinds = []
    for orientation in range(1, 9):
        facts = Image.Exif()
        facts[0x0112] = orientation
        for name, image, form, options in (
            ("rgb.png", Image.fromarray(COLOURS), "PNG", {}),
            ("deep.png", Image.fromarray(DEEP), "PNG", {}),
            ("x.jpg", Image.fromarray(COLOURS), "JPEG", {}),
            ("x.webp", Image.fromarray(COLOURS), "WEBP", {"lossless": True}),
            ("x.tif", Image.fromarray(LEVELS), "TIFF", {}),
        ):
            content = written(image, form, exif=facts.tobytes(), **options)
            with Image.open(io.BytesIO(content)) as opened:
                upright = np.asarray(ImageOps.exif_transpose(opened))
            expected = np.asarray(Image.fromarray(upright).convert("RGB"))
            if form == "PNG" and image.mode.startswith("I;16"):
                expected = grey((upright >> 8).astype(np.uint8))
            # An image in memory has lost what a TIFF said, which Pillow has obeyed.
            kinds.append(Kind(f"turned{orientation}{name}", content, expected))
    return kinds


def refused_kinds() -> list[Kind]:
    """Files whose black and white, or whose image, is a guess."""
    plain = Image.fromarray(LEVELS)
    infinite = SHARES.copy()
    infinite[0, 0] = np.inf
    several: Callable[[str], bytes] = lambda form: written(  # noqa: E731
        plain.convert("RGB"),
        form,
        save_all=True,
        append_images=[Image.fromarray(255 - LEVELS).convert("RGB")],
    )
    dark = "it is dark, or holds fewer bits"
    ends = "does not state which are black and white"
    return [
        *(
            Kind(
                f"png{bits}in16.png",
                written(Image.fromarray(DEEP >> (16 - bits)), "PNG"),
                None,
                dark,
            )
            for bits in (8, 10, 12, 14)
        ),
        Kind("tif12in16.tif", tiff(TWELVE), None, dark),
        Kind("tif12in16be.tif", tiff(TWELVE, ">"), None, dark),
        Kind("tif12in16white.tif", tiff(TWELVE, "<", 0, True), None, dark, True),
        Kind("tif12ins32.tif", tiff(TWELVE.astype(np.int32)), None, dark),
        Kind("rgb12in16.png", png((COLOURS.astype(np.uint16) << 4), 2), None, dark, True),
        Kind("rgb8in16.png", png(COLOURS.astype(np.uint16), 2), None, dark, True),
        Kind("tifs8.tif", tiff(LEVELS.astype(np.int8)), None, ends, True),
        Kind("tifs8plus.tif", tiff((LEVELS >> 1).astype(np.int8), ">"), None, ends, True),
        Kind("tifs16.tif", tiff(DEEP.astype(np.int16)), None, ends),
        Kind("tifs16plus.tif", tiff((DEEP >> 1).astype(np.int16)), None, ends, True),
        Kind("tifs32minus.tif", tiff(DEEP.astype(np.int32) - 1000), None, ends),
        Kind("tifs32large.tif", tiff(DEEP.astype(np.int32) * 30000), None, ends),
        Kind("tifu32some.tif", tiff(DEEP.astype(np.uint32) << 4), None, dark, True),
        Kind("float255.tif", tiff(SHARES * 255), None, "must lie in 0 .black. to 1"),
        Kind("floatminus.tif", tiff(SHARES - 0.5), None, "must lie in 0 .black. to 1"),
        Kind("floatinf.tif", tiff(infinite), None, "must lie in 0 .black. to 1"),
        Kind("floatnone.tif", tiff(SHARES * np.nan), None, "all NaN"),
        Kind("pages.tif", several("TIFF"), None, "holds 2 images", True),
        Kind("frames.gif", several("GIF"), None, "holds 2 images", True),
        Kind("frames.png", several("PNG"), None, "holds 2 images", True),
        Kind("frames.apng", several("PNG"), None, "holds 2 images", True),
        Kind("frames.webp", several("WEBP"), None, "holds 2 images", True),
    ]

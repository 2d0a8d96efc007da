"""Headers, noisy sums, privacy claims and public centres as protobuf messages."""

from __future__ import annotations

import hashlib
import math
from typing import cast

from torch import Tensor

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.identity import distinct_names
from fedsurrogate.common.privacy.accounting import Unit
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.safe_parsing import canonical, read_message
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.surrogates.columns import Frame
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.tensors import pack, unpack

SCHEMA = 1
# Of a header with a frame. A program that knows no frames must not read its tables as features.
FRAMED = 2

Framed = (
    pb.Surrogate
    | pb.Head
    | pb.Parameters
    | pb.Network
    | pb.Synthetic
    | pb.MaskedSum
    | pb.SumTotal
    | pb.Counts
)


def pack_sums(sums: Sums) -> pb.Sums:
    """Noisy sums at 16 bits: rounding to a 2,000th is small compared with the noise."""
    squares = None if sums.squares is None else pack(sums.squares)
    return pb.Sums(counts=pack(sums.counts), sums=pack(sums.sums), squares=squares)


def unpack_sums(body: pb.Sums, classes: int, claim: Mechanism) -> Sums:
    """Parse a message of `pack_sums`.

    Args:
        body: the message.
        classes: number of classes.
        claim: of the message, which gives their noise.

    Raises:
        SurrogateError: for sums that do not fit together, or to the claim.
    """
    shape = tuple(body.sums.shape)
    wanted = {"counts", "sums"} | ({"squares"} if body.HasField("squares") else set())
    if not classes or len(shape) != 2 or shape[1] < 1:
        raise SurrogateError(f"class sums of shape {shape[:4]} for {classes} classes")
    if claim.noise.keys() != wanted:
        raise SurrogateError(
            f"noise is claimed for {[name[:40] for name in sorted(claim.noise)[:5]]}; the "
            f"statistics are {sorted(wanted)}"
        )
    squares = None
    if body.HasField("squares"):
        length = (
            shape[1] if list(body.squares.shape) == [shape[1]] else shape[1] * (shape[1] + 1) // 2
        )
        squares = unpack(body.squares, "second moments", (length,))
    counts = unpack(body.counts, "counts", (classes,))
    sums = unpack(body.sums, "class sums", (classes, shape[1]))
    return Sums(counts, sums, squares, {name: sigma for name, (sigma, _) in claim.noise.items()})


def pack_centre(mean: Tensor) -> pb.Centre:
    """A public centre (d,) at 16 bits."""
    return pb.Centre(mean=pack(mean))


def unpack_centre(centre: pb.Centre) -> Tensor:
    """Parse a message of `pack_centre`.

    Returns:
        The centre (d,).

    Raises:
        SurrogateError: for one that is empty, of another rank, or not finite.
    """
    shape = tuple(centre.mean.shape)
    if len(shape) != 1 or not shape[0]:
        raise SurrogateError(f"a public centre of shape {shape[:4]}; (d,) is expected")
    mean = unpack(centre.mean, "public centre", shape)
    if not mean.isfinite().all():
        raise SurrogateError("the public centre holds a number that is not finite")
    return mean


def centre_digest(mean: Tensor | None) -> str:
    """The digest of a centre in a claim; empty without a centre."""
    if mean is None:
        return ""
    return hashlib.sha256(canonical(pack_centre(mean))).hexdigest()[:16]


def pack_claim(claim: Mechanism | None) -> pb.Claim | None:
    """A privacy claim as a message; None without privacy."""
    if claim is None:
        return None
    return pb.Claim(
        mechanism=claim.name,
        epsilon=claim.epsilon,
        delta=claim.delta,
        unit=claim.unit,
        noise_multiplier=claim.noise_multiplier,
        clip=claim.clip,
        noise=[
            pb.Noise(statistic=name, sigma=sigma, sensitivity=sensitivity)
            for name, (sigma, sensitivity) in sorted(claim.noise.items())
        ],
        centre=claim.centre,
    )


def unpack_claim(claim: pb.Claim) -> Mechanism:
    """Parse a message of `pack_claim`. Raises SurrogateError for an unknown unit, or noise that is
    not positive.
    """
    names = distinct_names([entry.statistic for entry in claim.noise], "statistic")
    noise = {name: (e.sigma, e.sensitivity) for name, e in zip(names, claim.noise, strict=True)}
    if claim.unit not in ("record", "patient"):
        raise SurrogateError(
            f"a privacy claim for unit {claim.unit[:20]!r}; 'record' or 'patient' is expected"
        )
    if not all(0 < number < math.inf for pair in noise.values() for number in pair):
        raise SurrogateError("a privacy claim with noise that is not a positive number")
    unit = cast(Unit, claim.unit)
    return Mechanism(
        claim.mechanism,
        claim.epsilon,
        claim.delta,
        unit,
        claim.noise_multiplier,
        claim.clip,
        noise,
        claim.centre,
    )


def parse(message: Framed, payload: bytes) -> None:
    """Fill a message from bytes. Raises SurrogateError for invalid bytes, or another schema
    version.
    """
    read_message(message, payload, type(message).__name__.lower())
    _check_version(message.header)


def _check_version(header: pb.Header) -> None:
    if header.schema != (FRAMED if header.frame else SCHEMA):
        raise SurrogateError(
            f"schema version {header.schema}; this program reads version {SCHEMA}, and {FRAMED} "
            "with a frame of columns"
        )


def pack_header(header: Header) -> pb.Header:
    """A header as a message, with the schema version."""
    return pb.Header(
        schema=FRAMED if header.frame else SCHEMA,
        method=header.method,
        run=header.run,
        site=header.site,
        fingerprint=header.fingerprint,
        classes=header.classes,
        frame=header.frame,
    )


def unpack_header(header: pb.Header) -> Header:
    """Parse a message of `pack_header`. Raises SurrogateError for another schema version, names of
    classes that are no names or stand twice, or bytes that are no frame.
    """
    # Heads inside a model have headers of their own.
    _check_version(header)
    if header.frame:
        Frame.of(header.frame)
    names = distinct_names(header.classes, "class")
    return Header(
        header.method, header.run, header.site, header.fingerprint, names, bytes(header.frame)
    )


def unpack_projection(message: pb.Halves, rows: int = 0) -> Tensor:
    """A projection (k, d) with k <= d. rows: k, if known. Raises SurrogateError for another shape
    or wrong numbers.
    """
    shape = tuple(message.shape)
    if len(shape) != 2 or not 1 <= shape[0] <= shape[1] or rows not in (0, shape[0]):
        raise SurrogateError(
            f"a projection of shape {shape[:4]}; (k, d) with k from 1 to d is expected"
        )
    projection = unpack(message, "projection", (shape[0], shape[1]))
    if not projection.isfinite().all():
        raise SurrogateError("the projection holds a number that is not finite")
    return projection

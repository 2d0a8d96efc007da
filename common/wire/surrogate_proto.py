"""Headers, noisy sums, privacy claims, public means, tables of counts and messages of secure aggregation
as protobuf messages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from .. import surrogate_pb2 as pb
from ..errors import StateError, SurrogateError
from ..identity import distinct_names
from ..methods.method import check_fields
from ..privacy.accounting import Unit
from ..privacy.mechanism import Mechanism, check_stated
from ..run import Run
from ..safe_parsing import canonical, read_message
from ..secure_aggregation.protocol import PHASES, SumState
from ..secure_aggregation.secrets import Dealt, Member, Secrets, Words, pack_words, unpack_words
from ..security.sealing import SEED_BYTES
from ..surrogates.class_sums import Sums
from ..surrogates.mixtures import Frame, PublicMap
from ..surrogates.surrogates import Header
from .tensors import Expectation, check_header, pack, unpack

SCHEMA = 1
# Of a header with a frame. A program that knows no frames must not read its tables as features.
FRAMED = 2

F = TypeVar("F", pb.Surrogate, pb.Parameters, pb.Synthetic, pb.MaskedSum, pb.Counts)


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
    return Sums(counts, sums, squares, claim.sigmas)


def pack_centre(mean: Tensor) -> pb.Centre:
    """A public mean (d,) at 16 bits."""
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
        raise SurrogateError(f"a public mean of shape {shape[:4]}; (d,) is expected")
    mean = unpack(centre.mean, "public mean", shape)
    if not mean.isfinite().all():
        raise SurrogateError("the public mean holds a number that is not finite")
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


def parse(kind: type[F], payload: bytes) -> F:
    """Parse a message with a header. Raises SurrogateError for invalid bytes, or another schema
    version.
    """
    message = read_message(kind, payload, kind.__name__.lower())
    _check_version(message.header)
    return message


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


Revealed = dict[str, dict[str, bytes]]


def pack_member(member: Member) -> bytes:
    """One site's keys."""
    return canonical(_member(member))


def unpack_member(payload: bytes) -> Member:
    """Parse keys. Raises SurrogateError."""
    message = read_message(pb.SumMember, payload, "keys of secure aggregation")
    return _unpack_member(message)


def pack_members(members: Iterable[Member], public: bytes = b"") -> bytes:
    """A key list.

    Args:
        members: the entries.
        public: digest of the public map.
    """
    return canonical(pb.SumMembers(members=map(_member, members), map=public))


def unpack_members(payload: bytes) -> tuple[tuple[Member, ...], bytes]:
    """Parse a key list, and the digest of the public map. Raises SurrogateError."""
    message = read_message(pb.SumMembers, payload, "key list")
    distinct_names([each.site for each in message.members], "site")
    return tuple(map(_unpack_member, message.members)), message.map


def pack_dealt(dealt: Dealt) -> bytes:
    """The shares that a site deals to all others."""
    return canonical(_dealt(dealt, dealt.content))


def unpack_dealt(payload: bytes) -> Dealt:
    """Parse shares. Raises SurrogateError."""
    message = read_message(pb.SumDealt, payload, "shares of secure aggregation")
    return _unpack_dealt(message)


def pack_delivery(dealt: Iterable[Dealt], reader: str, public: bytes = b"") -> bytes:
    """The shares of all sites for one reader, and the run's public map.

    Args:
        dealt: by all sites.
        reader: name of the site that they are for.
        public: bytes of `pack_map`.
    """
    message = pb.SumDelivery(dealt=[_dealt(each, [reader]) for each in dealt], map=public)
    return canonical(message)


def unpack_delivery(payload: bytes | None) -> tuple[tuple[Dealt, ...], bytes]:
    """Parse delivered shares.

    Args:
        payload: bytes of `pack_delivery`; None counts as no bytes.

    Returns:
        The shares, and the map, which stays in bytes, because its digest must be checked first.

    Raises:
        SurrogateError: for bytes of no delivery.
    """
    message = read_message(pb.SumDelivery, payload or b"", "delivery of shares")
    return tuple(map(_unpack_dealt, message.dealt)), message.map


def pack_map(public: PublicMap) -> bytes:
    """A public map; no bytes for one that changes nothing."""
    projection = None if public.projection is None else pack(public.projection)
    centre = None if public.centre is None else pack_centre(public.centre)
    return canonical(pb.PublicMap(projection=projection, centre=centre))


def unpack_map(payload: bytes) -> PublicMap:
    """Parse a map of `pack_map`. Raises SurrogateError."""
    message = read_message(pb.PublicMap, payload, "public map")
    projection = unpack_projection(message.projection) if message.HasField("projection") else None
    return PublicMap(
        projection, unpack_centre(message.centre) if message.HasField("centre") else None
    )


def map_digest(payload: bytes) -> bytes:
    """The digest of a packed map; empty for one that changes nothing."""
    return hashlib.sha256(payload).digest() if payload else b""


def public_digest(public: PublicMap) -> str:
    """The digests of a projection and of a centre, as settings have them. Rows and centres of zeros
    change nothing, and count as none.
    """
    rows, centre = public.projection, public.centre
    rows = None if rows is None or not rows.any() else rows[rows.any(1)]
    centre = None if centre is None or not centre.any() else centre
    parts = PublicMap(projection=rows), PublicMap(centre=centre)
    return "".join(hashlib.sha256(pack_map(part)).hexdigest() for part in parts)


def pack_masked(header: Header, numbers: Words, claim: Mechanism | None) -> bytes:
    """A masked vector.

    Args:
        header: origin.
        numbers: the vector, modulo 2^32.
        claim: what the message states of its differential privacy; None without privacy.
    """
    message = pb.MaskedSum(
        header=pack_header(header), numbers=pack_words(numbers), claim=pack_claim(claim)
    )
    return canonical(message)


def unpack_masked(payload: bytes, count: int) -> tuple[Header, Words, Mechanism | None]:
    """Parse a masked vector.

    Args:
        payload: bytes of `pack_masked`.
        count: of numbers.

    Returns:
        Header, vector and claim.

    Raises:
        SurrogateError: for bytes of no masked vector, or another number of numbers.
    """
    message = parse(pb.MaskedSum, payload)
    if len(message.numbers) != 4 * count:
        raise SurrogateError(
            f"a masked vector of {len(message.numbers)} bytes; {4 * count} are expected"
        )
    claim = unpack_claim(message.claim) if message.HasField("claim") else None
    return unpack_header(message.header), unpack_words(message.numbers), claim


def pack_total(
    header: Header, sites: Sequence[str], numbers: Words, claim: Mechanism | None
) -> bytes:
    """The sum of all sites, for the run folder.

    Args:
        header: origin.
        sites: in the sum.
        numbers: the sum, modulo 2^32.
        claim: of the differential privacy; None without privacy.
    """
    message = pb.SumTotal(
        header=pack_header(header),
        sites=sites,
        numbers=pack_words(numbers),
        claim=pack_claim(claim),
    )
    return canonical(message)


def pack_list(summed: Iterable[str], signatures: Mapping[str, bytes] | None = None) -> bytes:
    """The sites in a sum, and signatures of this list.

    Args:
        summed: names of the sites.
        signatures: of the list, by site; None before any site has signed.
    """
    signed = [
        pb.SumBytes(site=site, value=value) for site, value in sorted((signatures or {}).items())
    ]
    return canonical(pb.SumList(summed=sorted(summed), signatures=signed))


def unpack_list(payload: bytes | None) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """Parse such a list. Raises SurrogateError."""
    message = read_message(pb.SumList, payload or b"", "list of summed sites")
    return distinct_names(message.summed, "site"), _named(message.signatures)


def pack_revealed(revealed: Mapping[str, Mapping[str, bytes]], spare: bytes = b"") -> bytes:
    """Revealed shares.

    Args:
        revealed: shares by kind and site.
        spare: seed of the noise for lost sites; empty if it stays.
    """
    message = _revealed(revealed["blind"], revealed["masking"])
    message.spare = spare
    return canonical(message)


def unpack_spare(payload: bytes) -> bytes:
    """The seed in `pack_revealed`. Raises SurrogateError."""
    message = read_message(pb.SumRevealed, payload, "revealed shares")
    if len(message.spare) not in (0, SEED_BYTES):
        raise SurrogateError(f"a seed of {len(message.spare)} bytes, not {SEED_BYTES}")
    return message.spare


def unpack_revealed(payload: bytes) -> Revealed:
    """Parse revealed shares. Raises SurrogateError."""
    message = read_message(pb.SumRevealed, payload, "revealed shares")
    return {"blind": _named(message.blind), "masking": _named(message.masking)}


def pack_state(state: SumState) -> bytes:
    """A site's state."""
    blind, masking = (
        {site: both[kind] for site, both in state.shares.items()} for kind in ("blind", "masking")
    )
    message = pb.SumState(
        site=state.site,
        context=state.context,
        phase=state.phase,
        masking=state.secrets.masking,
        sharing=state.secrets.sharing,
        blind=state.secrets.blind,
        members=map(_member, state.members),
        shares=_revealed(blind, masking),
        summed=state.summed,
        map=state.public,
        spare=state.spare,
        pairs=state.pairs,
    )
    return canonical(message)


def unpack_state(payload: bytes) -> SumState:
    """Parse a site's state, which this site has written. Raises StateError for a damaged one."""
    try:
        message = pb.SumState.FromString(payload)
        blind, masking = _named(message.shares.blind), _named(message.shares.masking)
        pairs = SEED_BYTES * len(message.members) if message.phase == "shares" else 0
        if message.phase not in PHASES or blind.keys() != masking.keys():
            raise SurrogateError("unknown phase")
        if len(message.pairs) != pairs:
            raise SurrogateError(f"secrets of pairs of {len(message.pairs)} bytes, not {pairs}")
    except (SurrogateError, DecodeError) as error:
        raise StateError(
            f"this site's state of the secure aggregation is damaged: {error}"
        ) from None
    return SumState(
        site=message.site,
        context=message.context,
        phase=message.phase,
        secrets=Secrets(message.masking, message.sharing, message.blind),
        members=tuple(map(_unpack_member, message.members)),
        shares={site: {"blind": blind[site], "masking": masking[site]} for site in blind},
        summed=tuple(message.summed),
        public=message.map,
        spare=message.spare,
        pairs=message.pairs,
    )


def _member(member: Member) -> pb.SumMember:
    return pb.SumMember(**vars(member))


def _unpack_member(message: pb.SumMember) -> Member:
    return Member(message.site, message.public, message.masking, message.sharing, message.signature)


def _dealt(dealt: Dealt, readers: Iterable[str]) -> pb.SumDealt:
    shares = [
        pb.SumDealt.Share(reader=reader, content=dealt.content[reader], **dealt.digests[reader])
        for reader in sorted(readers)
    ]
    return pb.SumDealt(site=dealt.site, shares=shares, members=dealt.digest, **dealt.checks)


def _unpack_dealt(message: pb.SumDealt) -> Dealt:
    distinct_names([share.reader for share in message.shares], "site")
    content = {share.reader: share.content for share in message.shares}
    digests = {
        share.reader: {"blind": share.blind, "masking": share.masking} for share in message.shares
    }
    checks = {"blind": message.blind, "masking": message.masking}
    return Dealt(message.site, content, digests, checks, message.members)


def _revealed(blind: Mapping[str, bytes], masking: Mapping[str, bytes]) -> pb.SumRevealed:
    shares = [
        [pb.SumBytes(site=site, value=value) for site, value in sorted(each.items())]
        for each in (blind, masking)
    ]
    return pb.SumRevealed(blind=shares[0], masking=shares[1])


def _named(entries: Iterable[pb.SumBytes]) -> dict[str, bytes]:
    chosen = list(entries)
    names = distinct_names([entry.site for entry in chosen], "site")
    return dict(zip(names, (entry.value for entry in chosen), strict=True))


@dataclass(frozen=True)
class Counts:
    """Tables of whole numbers. Noise is rounded to whole numbers.

    Attributes:
        header: origin.
        tables: int64, by name, see `fedsurrogate.common.methods.counting.tables_of`.
        claim: what the message states of its differential privacy; None for exact counts.
    """

    header: Header
    tables: Mapping[str, Tensor]
    claim: Mechanism | None = None

    def variance(self, name: str) -> float:
        """Variance of the noise in each cell of a table, rounding included; zero for exact counts."""
        return 0.0 if self.claim is None else self.claim.noise[name][0] ** 2 + 1 / 12


# An honest value differs from what it must be by more than this many standard deviations once in a
# hundred million.
DEVIATIONS = 6.0
# A site with a record has a hundred steps or more, and rounds to half a step.
ROUNDED = 0.005


def pack_counts(counts: Counts) -> bytes:
    """Canonical bytes: the same counts always give the same bytes."""
    message = pb.Counts(header=pack_header(counts.header), claim=pack_claim(counts.claim))
    for name, table in sorted(counts.tables.items()):
        message.tables.add(
            name=name, shape=list(table.shape), data=table.numpy().astype("<i4").tobytes()
        )
    return canonical(message)


def unpack_counts(payload: bytes) -> Counts:
    """Parse bytes of `pack_counts`. `check_counts` checks if they fit a run.

    Raises:
        SurrogateError: for bytes of no counts.
    """
    message = parse(pb.Counts, payload)
    tables: dict[str, Tensor] = {}
    names = distinct_names([table.name for table in message.tables], "table")
    for name, table in zip(names, message.tables, strict=True):
        shape = tuple(table.shape)
        if len(shape) > 3 or 4 * math.prod(shape) != len(table.data) or 0 in shape:
            raise SurrogateError(f"a table of shape {shape[:4]} with {len(table.data)} bytes")
        numbers = np.frombuffer(table.data, "<i4").astype(np.int64)
        tables[name] = torch.from_numpy(numbers).reshape(shape)
    claim = unpack_claim(message.claim) if message.HasField("claim") else None
    return Counts(unpack_header(message.header), tables, claim)


def check_counts(counts: Counts, config: Run, fingerprint: str) -> None:
    """Check that counts belong to this run, and are what some records and honest noise can give.

    Args:
        counts: of one site.
        config: of the run.
        fingerprint: of the backbone.

    Raises:
        SurrogateError: if they are not.
    """
    check_header(counts.header, Expectation.of(config, config.settings.classes, fingerprint))
    if counts.header.classes != config.settings.classes:
        raise SurrogateError("counts of other classes than the run's, or in another order")
    if counts.claim is not None or config.settings.epsilon:
        check_stated(counts.claim, config.mechanism)
    messages, classes = config.plan.messages, len(config.settings.classes)
    check_fields(messages.sends, counts.tables, messages.sizes(classes, 1, 1))
    check_tables(counts.tables, {name: counts.variance(name) for name in counts.tables})


def check_tables(tables: Mapping[str, Tensor], variances: Mapping[str, float]) -> None:
    """Check that some records and honest noise can give these tables.

    Args:
        tables: of counts, by name.
        variances: of the noise in a cell, by table.

    Raises:
        SurrogateError: if they cannot.
    """
    for name, table in tables.items():
        if float(table.min()) < -DEVIATIONS * variances[name] ** 0.5:
            raise SurrogateError(
                f"{name}: a count of {int(table.min())}; below zero by more than the noise can "
                "explain"
            )
    if "errors" in tables:
        records, others = tables["errors"][:, :1].double(), tables["errors"][:, 1:].double()
        # Exact sums are rounded to whole steps at each site.
        room = DEVIATIONS * (2 * variances["errors"]) ** 0.5 + ROUNDED * float(records.max())
        if float((others - records).max()) > room + 1:
            raise SurrogateError("errors: a sum beyond its number of records")
    if "scores" not in tables:
        return
    decisions, scores = tables["decisions"], tables["scores"]
    room = variances["decisions"] * decisions.numel() + variances["scores"] * scores[0].numel()
    apart = (scores.sum((1, 2)) - decisions.sum()).abs().max()
    if float(apart) > DEVIATIONS * room**0.5:
        raise SurrogateError(
            f"decisions and scores differ by {int(apart)} records; each record is in both"
        )

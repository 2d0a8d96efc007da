"""Surrogates as canonical bytes, alone and in bundles, and these bytes as one array of a Flower
record. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .. import surrogate_pb2 as pb
from ..errors import LARGEST_COUNT, SITE_NAME, SealError, SurrogateError
from ..safe_parsing import canonical, read_message
from ..security.documents import Request, json_object, open_file, pack_file
from ..surrogates.mixtures import Mixtures
from ..surrogates.surrogates import AnySurrogate, SumsSurrogate, Surrogate
from . import surrogate_proto
from .tensors import pack, pack_covariance, unpack, unpack_covariance

if TYPE_CHECKING:
    from flwr.app import RecordDict

    # Alias for modules that use records but do not import Flower, which takes longer than many a
    # fit: so do functions here.
    Record = RecordDict

Info = dict[str, str | int | float | bool | list[int] | list[float]]

PAYLOAD = "payload"
INFO = "info"
# In a refusal: places in the key list of secure aggregation, of the sites that the refusing site has a
# dispute with.
DISPUTED = "disputed"
STORED_AS = "fedsurrogate.protobuf"
# Limits on the values next to a payload: enough for the names of ten thousand classes, or the
# points of a figure.
MOST_VALUES, LARGEST_INFO = 256, 2**22


def pack_surrogate(surrogate: AnySurrogate, bits: int = 16) -> bytes:
    """Canonical bytes: the same surrogate always gives the same bytes.

    Args:
        surrogate: of a site.
        bits: of a loading, 16 or 8.
    """
    header = surrogate_proto.pack_header(surrogate.header)
    claim = surrogate_proto.pack_claim(surrogate.claim)
    if isinstance(surrogate, SumsSurrogate):
        sums = surrogate_proto.pack_sums(surrogate.sums)
        return canonical(pb.Surrogate(header=header, claim=claim, sums=sums))
    mixtures = _pack_mixtures(surrogate.mixtures, bits)
    return canonical(pb.Surrogate(header=header, claim=claim, mixtures=mixtures))


def _pack_mixtures(mixtures: Mixtures, bits: int) -> pb.Mixtures:
    spread, levels = pack_covariance(mixtures.covariance, bits)
    return pb.Mixtures(
        covariance=mixtures.family,
        counts=mixtures.counts.tolist(),
        components=mixtures.components.tolist(),
        weights=pack(mixtures.weights),
        means=pack(mixtures.means),
        spread=spread,
        levels=levels,
    )


def unpack_surrogate(payload: bytes) -> AnySurrogate:
    """Parse a surrogate and check its structure. `check_surrogate` checks if it fits a run.

    Args:
        payload: bytes of `pack_surrogate`.

    Raises:
        SurrogateError: for bytes of no valid surrogate.
    """
    message = surrogate_proto.parse(pb.Surrogate, payload)
    header, classes = surrogate_proto.unpack_header(message.header), len(message.header.classes)
    claim = surrogate_proto.unpack_claim(message.claim) if message.HasField("claim") else None
    if message.HasField("sums"):
        if claim is None:
            raise SurrogateError("noisy sums without a privacy claim, which must state their noise")
        return SumsSurrogate(
            header, surrogate_proto.unpack_sums(message.sums, classes, claim), claim
        )
    return Surrogate(header, _unpack_mixtures(message.mixtures, classes), claim)


def _unpack_mixtures(body: pb.Mixtures, classes: int) -> Mixtures:
    counts, components = list(body.counts), list(body.components)
    if not classes or len(counts) != classes or len(components) != classes:
        raise SurrogateError(
            f"{classes} classes with {len(counts)} counts and {len(components)} numbers of "
            "components"
        )
    if wrong := [count for count in counts if not 1 <= count <= LARGEST_COUNT]:
        raise SurrogateError(f"a class of {wrong[0]} records; 1 to {LARGEST_COUNT} are allowed")
    total = sum(components)
    if min(components) < 1 or len(body.means.shape) != 2 or body.means.shape[1] < 1:
        raise SurrogateError(f"means of shape {tuple(body.means.shape)[:4]} for {total} components")
    dimension = body.means.shape[1]
    weights = unpack(body.weights, "mixture weights", (total,))
    means = unpack(body.means, "means", (total, dimension))
    labels = torch.arange(classes).repeat_interleave(torch.tensor(components))
    totals = torch.zeros(classes).index_add_(0, labels, weights)
    # Only rounding by half precision is corrected here; `check_surrogate` refuses sums farther from
    # one.
    totals = torch.where((totals - 1).abs() < 0.01, totals, 1.0)
    return Mixtures(
        counts=torch.tensor(counts),
        labels=labels,
        weights=weights / totals[labels],
        means=means,
        covariance=unpack_covariance(body, total, dimension),
    )


def pack_public_mean(centre: Tensor | None) -> bytes | None:
    """The payload of a request.

    Args:
        centre: the public mean of this run, (d,), if there is one.

    Returns:
        Canonical bytes; None without a centre.
    """
    return None if centre is None else canonical(surrogate_proto.pack_centre(centre))


def unpack_public_mean(payload: bytes | None) -> Tensor | None:
    """Parse bytes of `pack_public_mean`.

    Args:
        payload: the bytes; None without a centre.

    Returns:
        The centre (d,), if there is one.

    Raises:
        SurrogateError: for bytes of no centre.
    """
    if payload is None:
        return None
    message = read_message(pb.Centre, payload, "public mean")
    return surrogate_proto.unpack_centre(message)


def to_record(payload: bytes | None, info: Info) -> RecordDict:
    """A Flower record.

    Args:
        payload: canonical bytes, or none.
        info: a few values. Empty ones are left out: these break Flower's counters.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    record = RecordDict(
        {INFO: ConfigRecord({key: value for key, value in info.items() if value not in ("", [])})}
    )
    if payload is not None:
        record[PAYLOAD] = ArrayRecord(
            {PAYLOAD: Array("uint8", (len(payload),), STORED_AS, payload)}
        )
    return record


def check_form(record: RecordDict) -> None:
    """Check that a record has exactly the form of `to_record`.

    Checks only the first few of too many entries: a hostile record must not cost much time.

    Raises:
        SurrogateError: for another form.
    """
    from flwr.app import ArrayRecord, ConfigRecord

    if not set(islice(record, 3)) <= {INFO, PAYLOAD}:
        raise SurrogateError(f"{len(record)} records; only {INFO!r} and {PAYLOAD!r} are allowed")
    info, arrays = record.get(INFO, ConfigRecord()), record.get(PAYLOAD, ArrayRecord())
    if not (isinstance(info, ConfigRecord) and isinstance(arrays, ArrayRecord)):
        raise SurrogateError(
            f"records of the wrong types {type(info).__name__} and {type(arrays).__name__}"
        )
    if not set(islice(arrays, 2)) <= {PAYLOAD}:
        raise SurrogateError(f"{len(arrays)} arrays; only {PAYLOAD!r} is allowed")
    for array in arrays.values():
        form = (array.dtype, tuple(array.shape), array.stype)
        if form != ("uint8", (len(array.data),), STORED_AS):
            raise SurrogateError(
                "the array does not have the dtype, shape and storage type of a payload"
            )
    if len(info) > MOST_VALUES:
        raise SurrogateError(
            f"{len(info)} values next to the payload; at most {MOST_VALUES} are allowed"
        )
    if sum(len(key) + _size(value) for key, value in info.items()) > LARGEST_INFO:
        raise SurrogateError(f"values next to the payload of more than {LARGEST_INFO} bytes")


def _size(value: object) -> int:
    """Size of a value in bytes. Raises SurrogateError for an empty value, which Flower cannot
    count.
    """
    if isinstance(value, list) and value and isinstance(value[0], str | bytes):
        return sum(map(len, value))
    if isinstance(value, str | bytes | list):
        if not value:
            raise SurrogateError("a reply with empty values, which cannot be counted")
        return len(value) * (8 if isinstance(value, list) else 1)
    return 8


def from_record(record: RecordDict, largest: int) -> tuple[bytes | None, Info]:
    """Read a record of `to_record`.

    Args:
        record: of a message.
        largest: bytes of a payload.

    Returns:
        Payload and values.

    Raises:
        SurrogateError: for another form, or a payload larger than `largest` or of another size than
            announced.
    """
    from flwr.app import ConfigRecord

    check_form(record)
    info = cast(Info, dict(record.config_records.get(INFO, ConfigRecord())))
    arrays = record.array_records.get(PAYLOAD)
    payload = arrays[PAYLOAD].data if arrays else None
    if payload is not None:
        announced = info.get("bytes")
        if len(payload) > largest:
            raise SurrogateError(
                f"a payload of {len(payload)} bytes; at most {largest} are allowed"
            )
        if not isinstance(announced, int) or announced != len(payload):
            raise SurrogateError(
                f"a payload of {len(payload)} bytes where {repr(announced)[:40]} were announced"
            )
    return payload, info


def record_bytes(record: RecordDict) -> int:
    """Size of a record in messages in bytes, headers included."""
    return sum(array_record.count_bytes() for array_record in record.array_records.values()) + sum(
        config.count_bytes() for config in record.config_records.values()
    )


VERSION = 2
PURPOSE = b"bundle"
LARGEST_BUNDLE, LARGEST_MANIFEST = 2**30, 2**20


@dataclass(frozen=True)
class Bundle:
    """A surrogate with its manifest.

    Attributes:
        manifest: of the site, which describes the surrogate, its request and its ledger entry.
        payload: the surrogate's bytes.
    """

    manifest: Mapping[str, Any]
    payload: bytes

    @property
    def site(self) -> str:
        """The site that made the bundle."""
        return str(self.manifest["site"])


def pack_bundle(
    request: Request, site: str, payload: bytes, ledger: Mapping[str, object], private: bytes
) -> bytes:
    """Sign a surrogate for a request.

    Args:
        request: that the surrogate answers.
        site: its name.
        payload: the surrogate's bytes.
        ledger: the site's ledger entry for this release, without its private parts.
        private: the site's key.

    Returns:
        The content of a bundle.
    """
    manifest = {
        "version": VERSION,
        "request": request.id,
        "request-sha256": request.digest(),
        "run": request.run().digest,
        "site": site,
        "bytes": len(payload),
        "sha256": hashlib.sha256(payload).hexdigest(),
        "ledger": dict(ledger),
    }
    return pack_file(manifest, payload, private, PURPOSE)


def unpack_bundle(content: bytes, request: Request, keys: Mapping[str, bytes]) -> Bundle:
    """Parse and check a bundle.

    Args:
        content: of the file.
        request: that the bundle must answer.
        keys: public keys by site.

    Raises:
        SurrogateError: if it was changed, is not for this request, or was not signed by the site
            that it names.
    """
    try:
        signed = open_file(content, LARGEST_MANIFEST)
        manifest = json_object(signed.text)
        site = manifest["site"]
        if manifest["version"] != VERSION:
            raise ValueError(f"its version is {str(manifest['version'])[:20]!r}, not {VERSION}")
    except (SurrogateError, ValueError, TypeError, LookupError) as error:
        raise SurrogateError(f"no bundle of `site offline release` ({str(error)[:120]})") from None
    if not isinstance(site, str) or not SITE_NAME.fullmatch(site):
        raise SurrogateError(f"a bundle of site {str(site)[:64]!r}, which is not a valid site name")
    if site not in keys:
        raise SurrogateError(
            f"a bundle of site {site!r}, whose key is unknown here; `site offline key` at the site prints "
            "it"
        )
    try:
        signed.verify(keys[site], PURPOSE)
    except SealError:
        raise SurrogateError(
            f"a bundle that was changed on its way, or that site {site!r} has not signed"
        ) from None
    if manifest.get("request") != request.id:
        raise SurrogateError(
            f"a bundle for request {str(manifest.get('request'))[:40]!r}, this is request "
            f"{request.id!r}"
        )
    if manifest.get("request-sha256") != request.digest():
        raise SurrogateError(
            f"the site has answered request {request.id!r} with other settings than this file holds"
        )
    return Bundle(manifest, bytes(signed.payload))

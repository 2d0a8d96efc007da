"""Documents that people and machines sign, with one form and one canonical text: requests, the days until
which they hold, proposals of runs, and messages by file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, field, fields
from datetime import UTC, date, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, dataclass_transform

from cryptography.hazmat.primitives import hashes, serialization
from google.protobuf.message import DecodeError
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from ..errors import SITE_NAME, ConfigError, SealError, SurrogateError
from ..renamed import of_today
from ..run import Run, parse_run
from ..safe_parsing import canonical, varint
from ..settings.base import Scalar
from ..settings.heads import AUTO
from ..surrogate_pb2 import Bundle
from .sealing import PUBLIC_BYTES, SEED_BYTES, public_key, sign, verify

# How many hexadecimal digits of a fingerprint people compare: 128 bits.
COMPARED = 32


def key_fingerprint(public: bytes) -> str:
    """SHA-256 of a public key (one line, as ssh writes it), hex."""
    key = serialization.load_ssh_public_key(public)
    digest = hashes.Hash(hashes.SHA256())
    digest.update(
        key.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return digest.finalize().hex()


def in_groups(fingerprint: str) -> str:
    """What people compare of a fingerprint, in groups of four.

    Example:
        >>> in_groups("0123456789abcdef" * 4)
        '0123 4567 89ab cdef 0123 4567 89ab cdef'
    """
    digits = fingerprint[:COMPARED]
    return " ".join(digits[at : at + 4] for at in range(0, len(digits), 4))


def is_fingerprint(text: str, fingerprint: str) -> bool:
    """Whether a text that a person has typed is this fingerprint: its first 32 digits at least.

    Example:
        >>> is_fingerprint("0123 4567 89AB cdef 0123 4567 89ab cdef", "0123456789abcdef" * 4)
        True
        >>> is_fingerprint("0123 4567", "0123456789abcdef" * 4)
        False
    """
    digits = re.sub(r"[\s:]", "", text).lower()
    return len(digits) >= COMPARED and fingerprint.startswith(digits)


T = TypeVar("T")
# Bytes of a signature at most; one that is longer fits nothing.
MOST_SIGNED = 1024


def _day(text: str) -> str:
    """A date as it is written. Raises ValueError."""
    with suppress(ValueError):
        if date.fromisoformat(text).isoformat() == text:
            return text
    raise ValueError("must be a date such as 2026-03-31")


def hexadecimal(digits: int) -> Any:
    """The check of a text of so many hexadecimal digits."""

    form = re.compile(rf"[0-9a-f]{{{digits}}}")

    def check(text: object) -> object:
        if not (isinstance(text, str) and form.fullmatch(text)):
            raise ValueError(f"must be {digits} hexadecimal digits")
        return text

    return BeforeValidator(check)


def _scalar(value: object) -> object:
    if not isinstance(value, Scalar):
        raise ValueError("must be texts, numbers, true or false")
    return value


# Settings of a run.
Flat = dict[str, Annotated[Scalar, BeforeValidator(_scalar)]]
Day = Annotated[str, AfterValidator(_day)]
SiteName = Annotated[str, Field(pattern=f"^(?:{SITE_NAME.pattern})$")]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def document(kind: type[T]) -> type[T]:
    """A kind of document: a frozen dataclass whose values have exactly the types of its fields. Another
    value raises ConfigError with its name.
    """
    made: Any = dataclass(kind, frozen=True, config=ConfigDict(strict=True, extra="forbid"))
    checked = made.__init__

    @wraps(checked)
    def init(self: Any, *given: Any, **named: Any) -> None:
        try:
            checked(self, *given, **named)
        except ValidationError as error:
            first = error.errors()[0]
            # Of a value without its name, the place among all.
            name = first["loc"][0] if first["loc"] else ""
            name = fields(made)[name].name if isinstance(name, int) else name
            text = first["msg"].removeprefix("Value error, ").replace("should", "must")
            raise ConfigError(f"{name} = {repr(first['input'])[:80]}: {text}") from None

    made.__init__ = init
    kinds: type[T] = made
    return kinds


def canonical_json(values: Mapping[str, object]) -> bytes:
    """A JSON object as people sign it: equal ones give equal bytes."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def json_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object whose names differ: of equal ones people may read one, and programs another.

    Raises:
        ValueError: for any other text.
    """
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    return found


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name that stands twice")
    return found


def read_at_most(file: Path, most: int) -> bytes:
    """The content of a file.

    Args:
        file: that another organisation may have written.
        most: bytes that it may have.

    Raises:
        ConfigError: it cannot be read, is no file, or is larger.
    """
    if file.exists() and not file.is_file():
        # A pipe or a device, also behind a link: reading it may have no end.
        raise ConfigError(f"{file} cannot be read: it is no file")
    try:
        with file.open("rb") as stream:
            content = stream.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from None
    if len(content) > most:
        raise ConfigError(f"{file} is larger than the limit of {most} bytes")
    return content


class SignedFile(NamedTuple):
    """A signed file, of which nothing is unpacked yet.

    Attributes:
        text: its values, JSON.
        payload: next to them; not copied, because nobody has signed it yet.
        signature: of both.
    """

    text: bytes
    payload: memoryview
    signature: bytes

    def verify(self, public: bytes, purpose: bytes) -> None:
        """Raise SealError unless this key has signed the file for this purpose."""
        verify(_covered(self.text, self.payload), self.signature, public, purpose)


def pack_file(
    values: Mapping[str, object], payload: bytes, private: bytes, purpose: bytes
) -> bytes:
    """The content of a signed file.

    Args:
        values: of JSON.
        payload: next to them; empty for none.
        private: the signer's key.
        purpose: the signature is valid only for it.
    """
    text = json.dumps(values, sort_keys=True).encode()
    signature = sign(_covered(text, payload), private, purpose)
    return canonical(Bundle(manifest=text, payload=payload, signature=signature))


def open_file(content: bytes, most: int) -> SignedFile:
    """The parts of a signed file.

    Args:
        content: of the file, in canonical form: another one might be signed too, and be read anew.
        most: bytes of its values.

    Raises:
        SurrogateError: for other content.
    """
    whole, at, parts = memoryview(content), 0, dict[int, memoryview]()
    with suppress(IndexError, DecodeError):
        while at < len(content):
            start = at
            tag, at = varint(content, at)
            length, at = varint(content, at)
            # In order and each once, not empty, with numbers as short as they can be.
            if tag & 7 != 2 or tag >> 3 in parts or tag >> 3 < max(parts, default=1) or not length:
                break
            if at - start != 1 + max(1, (length.bit_length() + 6) // 7) or at + length > len(
                content
            ):
                break
            parts[tag >> 3], at = whole[at : at + length], at + length
        else:
            text, signature = parts.get(1, whole[:0]), parts.get(3, whole[:0])
            if parts.keys() <= {1, 2, 3} and len(text) <= most and len(signature) <= MOST_SIGNED:
                return SignedFile(bytes(text), parts.get(2, whole[:0]), bytes(signature))
    raise SurrogateError(
        f"{len(content)} bytes that are no signed file in canonical form, or have a manifest of more "
        f"than {most} bytes"
    )


def _covered(text: bytes, payload: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    return len(text).to_bytes(8, "big"), text, payload


VERSION = 2
PURPOSE = b"request"
# A setting whose default has changed.
PROJECTION = "features.projection"
# Enough for a public mean (a few bytes per dimension) and ten thousand class names (two million
# characters).
LARGEST_REQUEST, MOST_SETTINGS = 2**23, 1000
FIRST_LINE = f"fedsurrogate-request {VERSION} "
SIGNATURE = re.compile(r"[0-9a-f]{128}")


@document
class Request:
    """A request to sites.

    Attributes:
        id: 16 hexadecimal digits, new for each request.
        settings: the run's settings, flat.
        centre: bytes of the public mean, if the run has one.
        expires: the last day, in UTC, on which a site replies (YYYY-MM-DD); empty for no limit.
        receipts: the latest receipts of the sites' ledgers, by site.

    Raises:
        ConfigError: for invalid values.
    """

    id: Annotated[str, hexadecimal(16)]
    settings: Annotated[Flat, Field(max_length=MOST_SETTINGS)]
    centre: bytes | None
    expires: Day | Literal[""] = ""
    receipts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def fresh(
        cls,
        settings: Mapping[str, Scalar],
        centre: bytes | None,
        days: int = 0,
        receipts: Mapping[str, str] | None = None,
    ) -> Request:
        """A new request.

        Args:
            settings: of the run, flat.
            centre: bytes of the public mean, if the run has one.
            days: after which the request expires; 0: never.
            receipts: the latest receipts of the sites' ledgers, by site.

        Raises:
            ConfigError: if a file cannot answer the settings.
        """
        expires = f"{datetime.now(UTC).date() + timedelta(days):%Y-%m-%d}" if days else ""
        written = dict(settings)
        if parse_run(written).plan.mean_over_columns:
            # Requests of earlier versions, which meant another value, do not say it.
            written.setdefault(PROJECTION, AUTO)
        elif written.get(PROJECTION) == "":
            # What requests of earlier versions meant; sites of these can answer.
            del written[PROJECTION]
        request = cls(secrets.token_hex(8), written, centre, expires, dict(receipts or {}))
        request.run()
        return request

    def flat(self) -> dict[str, Scalar]:
        """The run's settings, with what they meant where an earlier version wrote them."""
        flat = of_today(self.settings)
        earlier = PROJECTION not in flat and parse_run(flat).plan.mean_over_columns
        return flat | {PROJECTION: ""} if earlier else flat

    def run(self) -> Run:
        """The run's settings. Raises ConfigError."""
        config = parse_run(self.flat())
        if not config.plan.answers_files:
            raise ConfigError(
                f"method = {config.settings.method!r}, fedpft.topology = "
                f"{config.settings.fedpft.topology!r}, secure-aggregation = "
                f"{str(config.settings.secure_aggregation).lower()}: a request needs a run in which every "
                "site replies once and alone; use `coordinator offline exchange`, which carries every "
                "message as a file"
            )
        return config

    def body(self) -> bytes:
        """The signed bytes. The same request always gives the same bytes."""
        centre = None if self.centre is None else base64.b64encode(self.centre).decode()
        return (
            json.dumps(asdict(self) | {"centre": centre}, indent=2, sort_keys=True) + "\n"
        ).encode()

    def digest(self) -> str:
        """SHA-256 of the body, hex."""
        return hashlib.sha256(self.body()).hexdigest()

    def signed(self, private: bytes) -> bytes:
        """The content of a request file.

        Args:
            private: the coordinator's key.

        Raises:
            ConfigError: if it is too large for sites.
        """
        body = self.body()
        content = FIRST_LINE.encode() + sign(body, private, PURPOSE).hex().encode() + b"\n" + body
        if len(content) > LARGEST_REQUEST:
            raise ConfigError(
                f"a request of {len(content)} bytes; sites read at most {LARGEST_REQUEST}"
            )
        return content


def read_request(file: Path, public: bytes | None) -> Request:
    """Read a signed request.

    Args:
        file: of `coordinator offline request`.
        public: the coordinator's public key; None skips the check, as the coordinator reads its own
            file.

    Raises:
        ConfigError: for a file that is no request or has expired.
        SealError: if the signature does not fit.
    """
    content = read_at_most(file, LARGEST_REQUEST)
    first, _, body = content.partition(b"\n")
    signature = first.decode("ascii", "replace").removeprefix(FIRST_LINE)
    if not first.startswith(FIRST_LINE.encode()) or not SIGNATURE.fullmatch(signature):
        raise ConfigError(
            f"{file} is no request of `coordinator offline request`: its first line is not {FIRST_LINE!r} "
            "followed by a signature"
        )
    if public is not None:
        try:
            verify(body, bytes.fromhex(signature), public, PURPOSE)
        except SealError:
            raise SealError(
                f"{file} was changed on its way, or another coordinator has made it: its signature "
                "does not fit the coordinator's key that this site has pinned; get the file "
                "again, and compare the key with the output of `coordinator sites key` there"
            ) from None
    request = _parsed(file, body)
    expired = request.expires and datetime.now(UTC).date() > date.fromisoformat(request.expires)
    if public is not None and expired:
        raise ConfigError(
            f"{file}: request {request.id} expired on {request.expires}; ask the coordinator for a "
            "new one"
        )
    return request


def _parsed(file: Path, body: bytes) -> Request:
    try:
        content = json_object(body)
        if (centre := content["centre"]) is not None:
            centre = base64.b64decode(centre, validate=True)
        request = Request(**(content | {"centre": centre}))
        # The signed bytes must be exactly the parsed content: no duplicate names, other order or
        # other number formats.
        if request.body() != body:
            raise ValueError("it is not in canonical form")
        return request
    except (ValueError, TypeError, KeyError, ConfigError) as error:
        raise ConfigError(
            f"{file} is no request of `coordinator offline request` ({str(error)[:200]})"
        ) from None


Action = Literal["run", "register", "unregister"]
# What the signatures are for; a signature of anything else does not fit.
FOR = b"fedsurrogate proposal 1"
SIGNATURE_BYTES = 64
LONGEST_PURPOSE, MOST_VALUES, MOST_SIGNATURES = 500, 400, 50
# It travels with a run, as one of its settings.
LARGEST = 65_536


@document
class Proposal:
    """What is to be done, and why.

    Attributes:
        id: 32 hexadecimal digits.
        action: "run"; "register" or "unregister" for keys of sites.
        content: settings of a run, flat; else fingerprints of keys by site.
        purpose: in words, for the people who decide.
        expires: the last day on which it may start.

    Raises:
        ConfigError: for a value that is not allowed.
    """

    id: Annotated[str, hexadecimal(32)]
    action: Action
    content: Annotated[Flat, Field(min_length=1, max_length=MOST_VALUES)]
    purpose: str
    expires: Day

    def __post_init__(self) -> None:
        plain = all(
            unicodedata.category(each)[0] not in "CZ" or each == " " for each in self.purpose
        )
        if not (self.purpose.strip() and plain and len(self.purpose) <= LONGEST_PURPOSE):
            raise ConfigError(
                f"purpose: must be one line of 1 to {LONGEST_PURPOSE} characters, which says to "
                "the people who decide what the run is for"
            )

    @classmethod
    def fresh(
        cls, action: Action, content: Mapping[str, Scalar], purpose: str, days: int
    ) -> Proposal:
        """A new proposal.

        Args:
            action: see the attribute.
            content: see the attribute.
            purpose: see the attribute.
            days: for which it may be started.
        """
        last = datetime.now(UTC).date() + timedelta(days)
        return cls(secrets.token_hex(16), action, dict(content), purpose, last.isoformat())

    def body(self) -> bytes:
        """The signed bytes. The same proposal always gives the same bytes."""
        return canonical_json(asdict(self))

    def text_digest(self) -> str:
        """SHA-256 of all that people read, with the purpose and the last day."""
        return hashlib.sha256(self.body()).hexdigest()

    def run(self) -> Run:
        """The run that it proposes. Raises ConfigError."""
        return parse_run(self.content)

    def digest(self) -> str:
        """What is allowed: the digest of a run's document, else that of the content."""
        if self.action == "run":
            return self.run().full_digest
        return hashlib.sha256(json.dumps(dict(self.content), sort_keys=True).encode()).hexdigest()


@document
class SignedProposal:
    """A proposal with the signatures that it has so far.

    Attributes:
        proposal: what is to be done.
        signatures: hexadecimal, by the signer's public key in the same form.
    """

    proposal: Proposal
    signatures: Annotated[
        dict[
            Annotated[str, hexadecimal(2 * PUBLIC_BYTES)],
            Annotated[str, hexadecimal(2 * SIGNATURE_BYTES)],
        ],
        Field(max_length=MOST_SIGNATURES),
    ] = field(default_factory=dict)

    def sign(self, private: bytes) -> SignedProposal:
        """The same, also signed with this key."""
        made = {public_key(private).hex(): sign(self.proposal.body(), private, FOR).hex()}
        return SignedProposal(self.proposal, {**self.signatures, **made})

    def signers(self, known: Mapping[str, bytes]) -> list[str]:
        """Who of these people has signed; a signature that does not fit counts as none.

        Args:
            known: public keys by name.
        """
        return [name for name, public in known.items() if self._fits(public)]

    def _fits(self, public: bytes) -> bool:
        try:
            signature = bytes.fromhex(self.signatures.get(public.hex(), ""))
            verify(self.proposal.body(), signature, public, FOR)
        except SealError:
            return False
        return True

    def setting(self) -> str:
        """As a run's setting `approval` has it: base64, because Flower allows no quotes there."""
        return base64.b64encode(self.text().encode()).decode()

    def text(self) -> str:
        """As a file has it."""
        return json.dumps(asdict(self.proposal) | {"signatures": self.signatures}, sort_keys=True)


def read_signed(text: str) -> SignedProposal:
    """A proposal from its text.

    Args:
        text: of `SignedProposal.text`, or the same with other blanks.

    Raises:
        ConfigError: for another text.

    Example:
        >>> proposal = Proposal.fresh("run", {"method": "fedpft"}, "first test", days=30)
        >>> read_signed(SignedProposal(proposal).text()).proposal == proposal
        True
    """
    if len(text) > LARGEST:
        raise ConfigError(
            f"no proposal of `coordinator approval propose`: over {LARGEST} characters"
        )
    try:
        content = json_object(text)
        signatures = content.pop("signatures")
        return SignedProposal(Proposal(**content), signatures)
    except (ValueError, KeyError, ConfigError) as error:
        raise ConfigError(
            f"no proposal of `coordinator approval propose` ({str(error)[:300]})"
        ) from None


def read_proposal(file: Path) -> SignedProposal:
    """A file of `coordinator approval propose`.

    Raises:
        ConfigError: it cannot be read, or is no proposal.
    """
    content = read_at_most(file, 4 * LARGEST)
    try:
        return read_signed(content.decode())
    except ValueError:
        raise ConfigError(f"{file} cannot be read (it is no text)") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def read_approver_key(file: Path) -> bytes:
    """The private key of a person, as `coordinator approval key` makes it.

    Raises:
        ConfigError: it cannot be read, or is no such key.
    """
    try:
        key = file.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from None
    if len(key) != SEED_BYTES:
        raise ConfigError(f"{file} is no key of `coordinator approval key`")
    return key


def read_setting(text: str) -> SignedProposal:
    """A proposal from a run's setting `approval`.

    Args:
        text: of `SignedProposal.setting`.

    Raises:
        ConfigError: for another text.
    """
    try:
        if len(text) > 2 * LARGEST:
            raise ValueError
        content = base64.b64decode(text, validate=True).decode()
    except ValueError:
        raise ConfigError(
            "approval: must be a proposal of `coordinator approval propose`"
        ) from None
    return read_signed(content)


def check_signed(
    signed: SignedProposal, digest: str, known: Mapping[str, bytes], fewest: int, today: date
) -> list[str]:
    """Who has allowed something, if they are enough.

    Args:
        signed: the proposal and its signatures.
        digest: of what is about to be done, as `Proposal.digest` computes it.
        known: public keys of the people who may allow it, by name.
        fewest: how many of them have to.
        today: the day.

    Returns:
        Their names.

    Raises:
        ConfigError: for other content, a proposal that has expired, or too few signatures.
    """
    proposal = signed.proposal
    if proposal.digest() != digest:
        raise ConfigError(
            f"proposal {proposal.id[:8]} allows something else than what is about to be done; "
            "start it as proposed, or propose it anew"
        )
    if today > date.fromisoformat(proposal.expires):
        raise ConfigError(f"proposal {proposal.id[:8]} expired on {proposal.expires}")
    names = signed.signers(known)
    if len(names) < fewest:
        raise ConfigError(
            f"proposal {proposal.id[:8]} has {len(names)} signatures of the {len(known)} people "
            f"who may allow it, and needs {fewest}"
        )
    return names

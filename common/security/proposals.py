"""What a coordinator wants to do, written down before it starts, and signed by people who allow it.

A proposal of a run holds the settings: whoever checks a signature resolves the run from them and
computes the digest of its document, so a signature allows this run alone. Whom it asks, and how
long it waits, the document leaves out (`UNSIGNED` in common/run.py).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Literal, get_args

from fedsurrogate.common.errors import ConfigError, SealError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.security.sealing import PUBLIC_BYTES, SEED_BYTES, public_key, sign, verify
from fedsurrogate.common.settings.flat import Scalar

Action = Literal["run", "register", "unregister"]
# What the signatures are for; a signature of anything else does not fit.
FOR = b"fedsurrogate proposal 1"
ID = re.compile(r"[0-9a-f]{32}")
HEX = re.compile(r"(?:[0-9a-f]{2})+")
SIGNATURE_BYTES = 64
LONGEST_PURPOSE, MOST_VALUES, MOST_SIGNATURES = 500, 400, 50
# It travels with a run, as one of its settings.
LARGEST = 65_536
FIELDS = {"id", "action", "content", "purpose", "expires"}


@dataclass(frozen=True)
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

    id: str
    action: Action
    content: Mapping[str, Scalar]
    purpose: str
    expires: str

    def __post_init__(self) -> None:
        texts = (self.id, self.action, self.purpose, self.expires)
        if not all(isinstance(each, str) for each in texts) or not ID.fullmatch(self.id):
            raise ConfigError("a proposal has an id of 32 hexadecimal digits")
        if self.action not in get_args(Action):
            raise ConfigError(f"action = {self.action[:40]!r}: must be run, register or unregister")
        flat = isinstance(self.content, Mapping) and 0 < len(self.content) <= MOST_VALUES
        if not flat or not all(
            isinstance(key, str) and isinstance(value, Scalar)
            for key, value in self.content.items()
        ):
            raise ConfigError(f"content: must be 1 to {MOST_VALUES} texts, numbers, true or false")
        plain = all(
            unicodedata.category(each)[0] not in "CZ" or each == " " for each in self.purpose
        )
        if not (self.purpose.strip() and plain and len(self.purpose) <= LONGEST_PURPOSE):
            raise ConfigError(
                f"purpose: must be one line of 1 to {LONGEST_PURPOSE} characters, which says to "
                "the people who decide what the run is for"
            )
        try:
            if date.fromisoformat(self.expires).isoformat() != self.expires:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"expires = {self.expires[:40]!r}: must be a date such as 2026-03-31"
            ) from None

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
        return json.dumps(self._fields(), sort_keys=True, separators=(",", ":")).encode()

    def text_digest(self) -> str:
        """SHA-256 of all that people read, with the purpose and the last day."""
        return hashlib.sha256(self.body()).hexdigest()

    def _fields(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in FIELDS} | {"content": dict(self.content)}

    def run(self) -> Run:
        """The run that it proposes. Raises ConfigError."""
        return parse_run(self.content)

    def digest(self) -> str:
        """What is allowed: the digest of a run's document, else that of the content."""
        if self.action == "run":
            return self.run().full_digest
        return hashlib.sha256(json.dumps(dict(self.content), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class SignedProposal:
    """A proposal with the signatures that it has so far.

    Attributes:
        proposal: what is to be done.
        signatures: hexadecimal, by the signer's public key in the same form.
    """

    proposal: Proposal
    signatures: Mapping[str, str] = field(default_factory=dict)

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
        return json.dumps(
            self.proposal._fields() | {"signatures": dict(self.signatures)}, sort_keys=True
        )


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
        raise ConfigError(f"no proposal of `coordinator propose`: over {LARGEST} characters")
    try:
        content = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"no proposal of `coordinator propose` ({type(error).__name__})"
        ) from None
    if not isinstance(content, dict) or set(content) != FIELDS | {"signatures"}:
        raise ConfigError(
            "no proposal of `coordinator propose`: its fields must be exactly "
            f"{', '.join(sorted(FIELDS))} and signatures"
        )
    signatures = content.pop("signatures")
    if not _are_signatures(signatures):
        raise ConfigError(
            f"signatures: must be at most {MOST_SIGNATURES} of `coordinator approve`, by key"
        )
    return SignedProposal(Proposal(**content), signatures)


def read_proposal(file: Path) -> SignedProposal:
    """A file of `coordinator propose`.

    Raises:
        ConfigError: it cannot be read, or is no proposal.
    """
    try:
        with file.open() as stream:
            return read_signed(stream.read(LARGEST + 1))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({type(error).__name__})") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def read_approver_key(file: Path) -> bytes:
    """The private key of a person, as `coordinator approver` makes it.

    Raises:
        ConfigError: it cannot be read, or is no such key.
    """
    try:
        key = file.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from None
    if len(key) != SEED_BYTES:
        raise ConfigError(f"{file} is no key of `coordinator approver`")
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
        raise ConfigError("approval: must be a proposal of `coordinator propose`") from None
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


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object whose keys differ: of equal ones people may read one, and programs another."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key that stands twice")
    return found


def _are_signatures(found: object) -> bool:
    return (
        isinstance(found, dict)
        and len(found) <= MOST_SIGNATURES
        and all(_is_hex(key, PUBLIC_BYTES) for key in found)
        and all(_is_hex(each, SIGNATURE_BYTES) for each in found.values())
    )


def _is_hex(text: object, size: int) -> bool:
    return isinstance(text, str) and len(text) == 2 * size and bool(HEX.fullmatch(text))

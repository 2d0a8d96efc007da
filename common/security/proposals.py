"""What a coordinator wants to do, written down before it starts, and signed by people who allow it.

A proposal of a run holds the settings: whoever checks a signature resolves the run from them and
computes the digest of its document, so a signature allows this run alone. Whom it asks, and how
long it waits, the document leaves out (`UNSIGNED` in common/run.py).
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ..errors import ConfigError, SealError
from ..run import Run, parse_run
from ..settings.base import Scalar
from .documents import Day, Flat, canonical_json, document, hexadecimal, json_object, read_at_most
from .sealing import PUBLIC_BYTES, SEED_BYTES, public_key, sign, verify

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

"""Guard for the SuperLink's Fleet API: a message is accepted only from the node that it names as
its sender.

Flower checks that the node id of a request belongs to the key that signed the request. It does not
check the sender of the message inside (`PushMessages`), or the key to be activated
(`ActivateNode`). So a registered site could activate another site's node and learn its node id. It
could then reply as that site, or send it requests as if it were the coordinator.

Nor does Flower know that a key is valid for some time only, or remember a revoked key without its
database, or limit how many parts a message has.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.interface import HAS_EXPIRED, FleetRequest
from fedsurrogate.common.security.documents import key_fingerprint
from fedsurrogate.common.security.registrations import (
    REVOKED,
    Registration,
    read_revoked,
    read_table,
)

EXPIRED = f"The certificate of this site {HAS_EXPIRED}; it has to enrol again"
TAKEN_BACK = "The key of this site was revoked; it needs a new key"


def refusal(request: FleetRequest) -> str:
    """Why the SuperLink refuses a request whose signature it has checked.

    Returns:
        Empty for a request that is accepted.

    Example:
        >>> refusal(FleetRequest(b"key of north", key=b"key of south"))
        "Another node's public key"
        >>> refusal(FleetRequest(b"key of north", node=7, senders=(7,)))
        ''
    """
    if request.key is not None and request.key != request.signed_by:
        return "Another node's public key"
    if any(sender != request.node for sender in request.senders):
        return "A message whose sender is another node"
    return request.fault


class Validity:
    """Which keys are still valid: the table of registered sites and the list of revoked keys next to
    it, each read again when it was changed. A key that was in the list once stays revoked.

    Args:
        file: the table; None: every registered key is valid.

    Raises:
        RunError: the list is there and cannot be read.
    """

    def __init__(self, file: Path | None) -> None:
        self._file, self._read, self._read_list = file, 0, 0
        self._by_key: Mapping[bytes, Registration] = {}
        self._revoked = read_revoked(file.with_name(REVOKED)) if file else frozenset[str]()

    def refusal(self, request: FleetRequest) -> str:
        """As `refusal`, also for a key that was revoked, or whose time is over."""
        self._read_again()
        if self._revoked and fingerprint_of(request.signed_by) in self._revoked:
            return TAKEN_BACK
        registered = self._by_key.get(request.signed_by)
        if registered is not None and registered.expired(datetime.now(UTC)):
            return EXPIRED
        return refusal(request)

    def _read_again(self) -> None:
        if self._file is None:
            return
        # A line that another process is writing may be torn.
        with suppress(OSError, RunError):
            listed = self._file.with_name(REVOKED)
            if (appended := listed.stat().st_mtime_ns) != self._read_list:
                self._revoked |= read_revoked(listed)
                self._read_list = appended
        try:
            changed = self._file.stat().st_mtime_ns
            if changed != self._read:
                self._by_key = {
                    key_bytes(each.key): each for each in read_table(self._file).values()
                }
                self._read = changed
        except (OSError, RunError, ValueError):
            # Without a table no run begins; what was read before still holds.
            return


def key_bytes(line: str) -> bytes:
    """A public key as Flower's requests have it.

    Args:
        line: type and key, as ssh writes them.

    Raises:
        ValueError: it is no key.
    """
    return flower().key_bytes(load_ssh_public_key(line.encode()))  # type: ignore[arg-type]


@lru_cache(1024)
def fingerprint_of(public: bytes) -> str:
    """SHA-256 of a public key as Flower's requests have it, as `coordinator sites certs` shows it."""
    key = flower().read_key(public)
    return key_fingerprint(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))

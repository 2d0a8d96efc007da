"""A hospital that has made its own key takes part: its request is looked at, then accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.security import enrolment
from fedsurrogate.common.security.documents import COMPARED, is_fingerprint, read_at_most
from fedsurrogate.common.security.enrolment import PUBLIC as SITE_PUBLIC

from .certificates import PUBLIC, REQUEST, certify, site_fingerprints
from .supernodes import check_not_revoked

Standing = Literal["new", "renewal", "other key"]


def request_in(file: Path) -> tuple[enrolment.Enrolment, bytes]:
    """Who asks in a file of `site enrol`, and its content.

    Raises:
        ConfigError: it cannot be read, or is no such request.
    """
    content = read_at_most(file, enrolment.LARGEST_REQUEST)
    try:
        return enrolment.read_request(content), content
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def standing(folder: Path, asks: enrolment.Enrolment) -> Standing:
    """What accepting a request would mean.

    Args:
        folder: of the certificates and keys.
        asks: the site and its key.

    Returns:
        "new": the federation does not know this site; "renewal": it knows it with this key; "other
        key": it knows it with another.

    Raises:
        ConfigError: the key was revoked; another site has it, or a name that looks like this one; or a
            certificate in the folder cannot be read.
        RunError: a list of revoked keys cannot be read.
    """
    check_not_revoked(folder, asks.site, asks.line())
    known, fingerprint = site_fingerprints(folder), asks.fingerprint()
    if others := [
        name for name, each in known.items() if each == fingerprint and name != asks.site
    ]:
        raise ConfigError(
            f"site {others[0]!r} has the key of this request of {asks.site!r}; each site needs a "
            "key of its own"
        )
    if alike := [name for name in known if name != asks.site and _seen(name) == _seen(asks.site)]:
        raise ConfigError(
            f"site {alike[0]!r} is known, and {asks.site!r} differs from it only in capitals, or in "
            "characters that look alike; the hospital asks again with another name"
        )
    if asks.site not in known:
        return "new"
    return "renewal" if known[asks.site] == fingerprint else "other key"


def _seen(name: str) -> str:
    """What people see of a site's name: 0 and O, 1, I and l look alike, and so do . _ and -."""
    return name.casefold().translate(str.maketrans("01i._", "oll--"))


def check_typed(asks: enrolment.Enrolment, typed: str) -> None:
    """Check what a hospital has said.

    Args:
        asks: the site and its key.
        typed: the key's fingerprint, as the hospital has said it on another way.

    Raises:
        ConfigError: it is the fingerprint of another key.
    """
    if not is_fingerprint(typed, asks.fingerprint()):
        raise ConfigError(
            f"fingerprint {typed[:80]!r}: not the {COMPARED} digits of the key in this request; if the "
            "hospital has read out these, the request was changed on its way"
        )


def accept(folder: Path, asks: enrolment.Enrolment, content: bytes, days: int) -> None:
    """Put a site's public key and its certificate into the folder, where `coordinator sites register`
    takes them.

    Args:
        folder: of the certificates and keys, with the authority's key.
        asks: the site, of `request_in`; its fingerprint was compared.
        content: of its request.
        days: for which its certificate is valid.

    Raises:
        ConfigError: before anything is written.
    """
    standing(folder, asks)
    certificate, site = certify(folder, asks, days), folder / "sites" / asks.site
    # Last, what makes the site one of the federation.
    for name, each in (
        ("ca.crt", (folder / "ca.crt").read_bytes()),
        (REQUEST, content),
        (enrolment.CERTIFICATE, certificate),
        (SITE_PUBLIC, asks.line().encode()),
    ):
        replace_file(site / name, each, mode=PUBLIC)
    # Of a key that the coordinator had made for this site.
    (site / enrolment.KEY).unlink(missing_ok=True)

"""Certificates and keys of a federation: its own authority, the coordinator's certificate, and a
key for every site.

One folder holds them all. `ca.key` signs; the coordinator's machine does not need it. A site needs
`ca.crt` and its own key.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsurrogate.common.errors import SITE_NAME, ConfigError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.security import enrolment
from fedsurrogate.common.security.documents import key_fingerprint
from fedsurrogate.common.security.enrolment import PUBLIC as SITE_PUBLIC

from . import SERVER_DAYS
from .request_key import make_request_key

# Mode of certificates and public keys.
PUBLIC = 0o644
AUTHORITY_DAYS = 3650
# Clocks at hospitals can be wrong by minutes. A clock that is slow would refuse a certificate that
# is valid from now on.
BEFORE = datetime.timedelta(days=1)
SOON = datetime.timedelta(days=30)
# The request of a site that has made its own key, next to its public key; and all files that belong
# to a key.
REQUEST = "site.csr"
OF_A_KEY = (SITE_PUBLIC, enrolment.KEY, REQUEST, enrolment.CERTIFICATE)
HOST_NAME = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)


@dataclass(frozen=True)
class Credential:
    """A certificate or a site's key.

    Attributes:
        kind: "authority", "server" or "site".
        name: common name of the authority, hosts of the server, or name of the site.
        file: the certificate or the public key.
        fingerprint: SHA-256, hex.
        expires: end of a certificate's validity; None for keys without one, which do not expire.
    """

    kind: str
    name: str
    file: Path
    fingerprint: str
    expires: datetime.datetime | None = None

    def state(self, now: datetime.datetime) -> str:
        """ "ok", "expires soon" (within 30 days) or "expired"."""
        if self.expires is None or self.expires > now + SOON:
            return "ok"
        return "expires soon" if self.expires > now else "expired"


def issue(
    folder: Path,
    hosts: Sequence[str],
    sites: Sequence[str],
    renew: bool = False,
    days: int = SERVER_DAYS,
) -> None:
    """Make the missing files in a folder: the authority, the coordinator's certificate, its key for
    signing requests, keys of sites.

    Existing files are kept, so sites need nothing new. A missing server key is replaced.

    Args:
        folder: of the certificates and keys.
        hosts: names and addresses of the coordinator's machine, as sites reach it.
        sites: names of sites.
        renew: whether the coordinator's certificate is signed again, for its old hosts and `hosts`.
        days: for which a new certificate of the coordinator is valid, at most until the authority's
            ends.

    Raises:
        ConfigError: before anything is written.
    """
    for host in hosts:
        _alternative(host)
    for site in sites:
        enrolment.check_site_name(site)
    has, had = (folder / "server.crt").is_file(), hosts_of(folder)
    if not (has or hosts):
        raise ConfigError(
            f"{folder} has no server.crt yet; name the machine with --host, as sites reach it"
        )
    if has and not renew and (new := [host for host in hosts if host not in had]):
        raise ConfigError(
            f"host {new[0]!r} is not in server.crt, which is for {', '.join(had)}; add it with "
            "--renew"
        )
    known = (folder / "ca.crt").is_file()
    if not known and (has or any((folder / "sites").glob("*/ca.crt"))):
        raise ConfigError(
            f"{folder / 'ca.crt'} is missing, and sites trust it; restore it, or use another folder"
        )
    signer = _signer(folder) if known and (renew or not has) else None
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not known:
        signer = _make_authority(folder)
    if signer is not None:
        # Also the local names, because the coordinator's machine uses them for the Control API.
        _make_server(
            folder, signer, tuple(dict.fromkeys((*had, *hosts, "localhost", "127.0.0.1"))), days
        )
    make_request_key(folder)
    for site in sites:
        _make_site(folder / "sites" / site, (folder / "ca.crt").read_bytes())


def certify(folder: Path, asks: enrolment.Enrolment, days: int) -> bytes:
    """A certificate for the key of a site, signed by the federation's authority.

    Args:
        folder: of the certificates and keys.
        asks: the site and its key.
        days: for which it is valid, at most until the authority's ends.

    Returns:
        The certificate, PEM.

    Raises:
        ConfigError: the authority's key is missing, or not that of its certificate.
    """
    authority = _certificate(folder / "ca.crt")
    use = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    subject, days = asks.subject(), _at_most(days, authority)
    return _signed(subject, authority.subject, asks.key, days, _signer(folder), use)


def expiry(file: Path) -> datetime.datetime | None:
    """When a certificate ends; None if there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    return _certificate(file).not_valid_after_utc if file.is_file() else None


def valid_until(site: Path) -> str:
    """When a site's certificate ends, ISO 8601; empty if it has none, and never.

    Args:
        site: its folder.

    Raises:
        ConfigError: the certificate cannot be read.
    """
    ends = expiry(site / enrolment.CERTIFICATE)
    return "" if ends is None else ends.isoformat(timespec="seconds")


def drop_site_keys(folder: Path, sites: Sequence[str]) -> None:
    """Remove the keys of sites, so that `issue` makes new ones.

    Args:
        folder: of the certificates and keys.
        sites: names of sites.

    Raises:
        ConfigError: for a site without a key.
    """
    for site in sites:
        files = [folder / "sites" / site / name for name in OF_A_KEY]
        if not (SITE_NAME.fullmatch(site) and files[0].is_file()):
            raise ConfigError(
                f"site {site[:80]!r} has no key in {folder} that could be replaced; leave "
                "--new-key out"
            )
        for file in files:
            file.unlink(missing_ok=True)


def credentials(folder: Path) -> list[Credential]:
    """Certificates and keys in a folder.

    Args:
        folder: of the certificates and keys.

    Returns:
        The authority, the server, and each site's key.

    Raises:
        ConfigError: for an unreadable certificate, or one of another authority.
    """
    authority, server = _certificate(folder / "ca.crt"), _certificate(folder / "server.crt")
    try:
        server.verify_directly_issued_by(authority)
    except Exception as error:  # The type depends on the problem with the signature.
        raise ConfigError(
            f"{folder / 'server.crt'} is not signed by {folder / 'ca.crt'} "
            f"({type(error).__name__}); use --renew"
        ) from None
    if (folder / "server.key").is_file() and _private(
        folder / "server.key"
    ).public_key() != server.public_key():
        raise ConfigError(f"{folder / 'server.key'} is not the key of server.crt; use --renew")
    subject = authority.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    listed = [
        Credential(kind, name, folder / file, _digest(each), each.not_valid_after_utc)
        for kind, name, file, each in (
            ("authority", str(subject), "ca.crt", authority),
            ("server", ", ".join(hosts_of(folder)), "server.crt", server),
        )
    ]
    for file in sorted((folder / "sites").glob("*/site.pub")):
        fingerprint, site = key_fingerprint(file.read_bytes()), file.parent
        expires = expiry(site / enrolment.CERTIFICATE)
        listed.append(Credential("site", site.name, file, fingerprint, expires))
    return listed


def site_fingerprints(folder: Path) -> dict[str, str]:
    """Fingerprints of the keys of all sites in a folder, by site. Raises ConfigError as `credentials`."""
    return {each.name: each.fingerprint for each in credentials(folder) if each.kind == "site"}


def hosts_of(folder: Path) -> tuple[str, ...]:
    """Hosts in the folder's server certificate; none without a certificate."""
    if not (folder / "server.crt").is_file():
        return ()
    names = (
        _certificate(folder / "server.crt")
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value
    )
    return (
        *names.get_values_for_type(x509.DNSName),
        *map(str, names.get_values_for_type(x509.IPAddress)),
    )


def _make_authority(folder: Path) -> ec.EllipticCurvePrivateKey:
    key, name = (
        ec.generate_private_key(ec.SECP384R1()),
        _name(f"fedsurrogate {os.urandom(4).hex()}"),
    )
    replace_file(folder / "ca.key", _pem(key))
    certificate = _signed(name, name, key.public_key(), AUTHORITY_DAYS, key)
    replace_file(folder / "ca.crt", certificate, mode=PUBLIC)
    return key


def _signer(folder: Path) -> ec.EllipticCurvePrivateKey:
    key = _private(folder / "ca.key")
    if key.public_key() != _certificate(folder / "ca.crt").public_key():
        raise ConfigError(f"{folder / 'ca.key'} is not the key of ca.crt; restore the right one")
    return key


def _private(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{file} cannot be read as a private key ({type(error).__name__}); restore it"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{file} is not an elliptic-curve key; restore the right one")
    return key


def _make_server(
    folder: Path, signer: ec.EllipticCurvePrivateKey, hosts: Sequence[str], days: int
) -> None:
    authority = _certificate(folder / "ca.crt")
    if not (folder / "server.key").is_file():
        replace_file(folder / "server.key", _pem(ec.generate_private_key(ec.SECP384R1())))
    key = _private(folder / "server.key")
    certificate = _signed(
        _name("fedsurrogate coordinator"),
        authority.subject,
        key.public_key(),
        _at_most(days, authority),
        signer,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName([_alternative(host) for host in hosts]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
    )
    replace_file(folder / "server.crt", certificate, mode=PUBLIC)


def _make_site(folder: Path, authority: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(folder / "ca.crt", authority, mode=PUBLIC)
    # The key of a site that has made its own is not here.
    if not (folder / REQUEST).is_file():
        enrolment.new_node_key(folder, folder.name)


def _at_most(days: int, authority: x509.Certificate) -> int:
    """Days of a certificate that does not outlive its authority's."""
    return min(days, (authority.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days)


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: int,
    signer: ec.EllipticCurvePrivateKey,
    *uses: x509.ExtensionType,
) -> bytes:
    """A certificate, PEM; of an authority, which signs others, if it names no use."""
    now, signs = datetime.datetime.now(datetime.UTC), not uses
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    builder = builder.not_valid_before(now - BEFORE)
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    # Signatures, and of an authority those of certificates and of their lists; none of the others.
    usage = x509.KeyUsage(not signs, False, False, False, False, signs, signs, False, False)
    for extension, critical in (
        (x509.SubjectKeyIdentifier.from_public_key(key), False),
        (x509.BasicConstraints(ca=signs, path_length=0 if signs else None), True),
        (usage, True),
        *((each, False) for each in uses),
    ):
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not HOST_NAME.fullmatch(host) or re.fullmatch(r"[0-9.]+", host):
            raise ConfigError(
                f"host {host[:80]!r}: must be a name or an address, without https:// and without a "
                "port"
            ) from None
        return x509.DNSName(host)


def _certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError, x509.InvalidVersion) as error:
        raise ConfigError(
            f"{file} cannot be read as a certificate ({type(error).__name__})"
        ) from None


def _digest(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

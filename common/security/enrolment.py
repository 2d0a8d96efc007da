"""The request of a hospital to take part, made where its private key stays: PKCS #10, signed by
that key.

Any tool reads it: `openssl req -in north.csr -noout -text`. The signature proves that who made the
request holds the key, not who that is: the coordinator compares the key's fingerprint with what the
hospital says on another way, such as by telephone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ..errors import SITE_NAME, ConfigError
from ..files import create_file, replace_file
from ..identity import unclear
from .documents import key_fingerprint

# File names of a site's key, as its kit has them too.
KEY, PUBLIC, CERTIFICATE = "site.key", "site.pub", "site.crt"
READABLE = 0o644
CURVE = ec.SECP384R1
# A request has about a thousand bytes.
LARGEST_REQUEST = 16_384
# X.520 allows an organization 64 characters, and RFC 5280 an address 255.
LONGEST_NAME, LONGEST_CONTACT = 64, 255
CONTACT = re.compile(r"[A-Za-z0-9.!#$%'*+/=?^_{|}~-]+@[A-Za-z0-9.-]+")


@dataclass(frozen=True)
class Enrolment:
    """Who asks to take part in a federation, and with which key.

    Attributes:
        site: its name in the federation.
        hospital: its name in words.
        contact: an e-mail address.
        key: its public key, of NIST's curve P-384.

    Raises:
        ConfigError: for a value that is not allowed.
    """

    site: str
    hospital: str
    contact: str
    key: ec.EllipticCurvePublicKey

    def __post_init__(self) -> None:
        check_site_name(self.site)
        reason = unclear(self.hospital)
        if reason or len(self.hospital) > LONGEST_NAME:
            raise ConfigError(
                f"hospital {self.hospital[:80]!a}: must be 1 to {LONGEST_NAME} letters of one "
                f"script, digits and signs; this has {reason or len(self.hospital)}"
            )
        if not CONTACT.fullmatch(self.contact) or len(self.contact) > LONGEST_CONTACT:
            raise ConfigError(
                f"contact {self.contact[:80]!r}: must be an e-mail address of at most "
                f"{LONGEST_CONTACT} characters, such as it@hospital.example"
            )
        if not isinstance(self.key, ec.EllipticCurvePublicKey) or not isinstance(
            self.key.curve, CURVE
        ):
            raise ConfigError("key: must be of the elliptic curve P-384; `site enrol` makes one")

    def subject(self) -> x509.Name:
        """The site as X.509 names it."""
        return x509.Name(
            [
                x509.NameAttribute(NameOID.COMMON_NAME, self.site),
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, self.hospital),
                x509.NameAttribute(NameOID.EMAIL_ADDRESS, self.contact),
            ]
        )

    def line(self) -> str:
        """The public key in one line, as `site.pub` has it."""
        return public_line(self.key, self.site)

    def fingerprint(self) -> str:
        """SHA-256 of the public key, hex."""
        return key_fingerprint(self.line().encode())


def check_site_name(name: str) -> None:
    """Raise ConfigError for a name that a site cannot have, such as a path."""
    if not SITE_NAME.fullmatch(name):
        raise ConfigError(
            f"site {name[:80]!r}: must be 1 to 64 letters, digits and . _ -, and begin with a "
            "letter or a digit"
        )


def new_node_key(folder: Path, site: str) -> None:
    """Make the key by which a site's SuperNode is known, `site.key` and `site.pub`, if there is
    none.

    Args:
        folder: for both; it is created.
        site: its name, the comment of `site.pub`.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / KEY).is_file():
        secret = ec.generate_private_key(CURVE()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
        (folder / PUBLIC).unlink(missing_ok=True)
        create_file(folder / KEY, secret)
    if not (folder / PUBLIC).is_file():
        public = read_node_key(folder / KEY).public_key()
        replace_file(folder / PUBLIC, public_line(public, site).encode(), mode=READABLE)


def read_node_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """The private key of a site.

    Args:
        file: as `new_node_key` writes it.

    Raises:
        ConfigError: it cannot be read as one.
    """
    try:
        key = serialization.load_ssh_private_key(file.expanduser().read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{file} cannot be read as a private key in OpenSSH format ({type(error).__name__})"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"{file} is not a key on a NIST curve; `site enrol` makes one, and so does "
            "`ssh-keygen -t ecdsa -b 384`"
        )
    return key


def new_request(site: str, hospital: str, contact: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    """A request, PEM.

    Args:
        site: its name in the federation.
        hospital: its name in words.
        contact: an e-mail address.
        key: that signs the request, and whose public half the coordinator registers.

    Raises:
        ConfigError: for a value that is not allowed.

    Source:
        RFC 2986.

    Example:
        >>> key = ec.generate_private_key(ec.SECP384R1())
        >>> request = new_request("north", "St. Mary", "it@mary.example", key)
        >>> read_request(request).hospital
        'St. Mary'
    """
    asks = Enrolment(site, hospital, contact, key.public_key())
    builder = x509.CertificateSigningRequestBuilder().subject_name(asks.subject())
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def read_request(content: bytes) -> Enrolment:
    """Who asks, from a request whose signature fits its key.

    Args:
        content: PEM.

    Raises:
        ConfigError: for content that is no such request.
    """
    if len(content) > LARGEST_REQUEST:
        raise ConfigError(f"no request of `site enrol`: it has more than {LARGEST_REQUEST} bytes")
    try:
        request = x509.load_pem_x509_csr(content)
        sound = request.is_signature_valid
        named = [
            [str(each.value) for each in request.subject.get_attributes_for_oid(which)]
            for which in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME, NameOID.EMAIL_ADDRESS)
        ]
        key = request.public_key()
    # KeyError: for a kind of text that the library does not know.
    except (ValueError, TypeError, KeyError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise ConfigError(f"no request of `site enrol` ({type(error).__name__})") from None
    if not sound:
        raise ConfigError("its signature does not fit its key; ask the hospital for it again")
    if any(len(values) != 1 for values in named):
        raise ConfigError(
            "no request of `site enrol`: it needs one name, one organization and one e-mail address"
        )
    (site,), (hospital,), (contact,) = named
    return Enrolment(site, hospital, contact, key)  # type: ignore[arg-type]


def public_line(key: ec.EllipticCurvePublicKey, comment: str) -> str:
    """A public key in one line, with its end."""
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return f"{key.public_bytes(*form).decode()} {comment}\n"

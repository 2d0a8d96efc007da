"""A request to take part says who asks with which key, and nothing else is taken for one."""

from __future__ import annotations

import base64
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.identity import unclear
from fedsurrogate.common.security.documents import (
    COMPARED,
    in_groups,
    is_fingerprint,
    key_fingerprint,
)
from fedsurrogate.common.security.enrolment import (
    Enrolment,
    new_node_key,
    new_request,
    read_node_key,
    read_request,
)

KEY = ec.derive_private_key(20261126, ec.SECP384R1())
HONEST = ("north", "St. Mary", "it@mary.example")
# Made once: the length of a signature varies.
MADE = new_request(*HONEST, KEY)
SITES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
HOSPITALS = st.from_regex(r"\A[A-Za-zÄöü0-9.,'&()-]{1,64}\Z").filter(lambda name: not unclear(name))
CONTACTS = st.from_regex(r"\A[a-z.+]{1,20}@[a-z.-]{1,40}\Z")


def request_of(subject: list[tuple[x509.ObjectIdentifier, str]], key: object = KEY) -> bytes:
    """A request that another tool has made."""
    names = [x509.NameAttribute(which, value) for which, value in subject]
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(names))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)  # type: ignore[arg-type]


@given(SITES, HOSPITALS, CONTACTS)
def test_a_request_says_who_asks_and_with_which_key(site: str, hospital: str, contact: str) -> None:
    asks = read_request(new_request(site, hospital, contact, KEY))
    assert (asks.site, asks.hospital, asks.contact) == (site, hospital, contact)
    assert asks.key == KEY.public_key()
    assert asks.fingerprint() == key_fingerprint(asks.line().encode())


DER = x509.load_pem_x509_csr(MADE).public_bytes(serialization.Encoding.DER)


def in_pem(der: bytes) -> bytes:
    mark = "CERTIFICATE REQUEST-----"
    return f"-----BEGIN {mark}\n{base64.encodebytes(der).decode()}-----END {mark}\n".encode()


@pytest.mark.parametrize("at", range(24))
def test_no_value_of_a_byte_at_the_head_is_more_than_refused(at: int) -> None:
    """Lengths, kinds and the version, which the library refuses with an error of its own."""
    for value in set(range(256)) - {DER[at]}:
        with pytest.raises(ConfigError):
            read_request(in_pem(DER[:at] + bytes([value]) + DER[at + 1 :]))


@settings(max_examples=300)
@given(st.data())
def test_changed_bytes_are_refused_or_ask_the_same(data: st.DataObject) -> None:
    """What the signature covers cannot be changed; the rest, as line ends, says nothing."""
    content = bytearray(MADE)
    honest = read_request(bytes(content))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_request(bytes(content))
    except ConfigError:
        return
    assert (found.line(), found.subject()) == (honest.line(), honest.subject())


@pytest.mark.parametrize("name", HONEST)
def test_a_name_in_any_kind_of_text_is_read_or_refused(name: str) -> None:
    """Another kind of text changes what the signature covers, so none is accepted."""
    at = DER.index(name.encode()) - 2
    for kind in set(range(256)) - {DER[at]}:
        with pytest.raises(ConfigError, match=r"no request of `site enrol`|does not fit its key"):
            read_request(in_pem(DER[:at] + bytes([kind]) + DER[at + 1 :]))


def test_a_signature_of_another_key_is_refused() -> None:
    """An observer who puts the hospital's public key into a request of his own."""
    der = x509.load_pem_x509_csr(new_request(*HONEST, KEY)).public_bytes(serialization.Encoding.DER)
    other = ec.derive_private_key(7, ec.SECP384R1()).public_key()
    form = serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    swapped = der.replace(KEY.public_key().public_bytes(*form), other.public_bytes(*form))
    assert swapped != der
    pem = x509.load_der_x509_csr(swapped).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(ConfigError, match="signature does not fit"):
        read_request(pem)


NAME, ORGANIZATION, MAIL = (
    (NameOID.COMMON_NAME, "north"),
    (NameOID.ORGANIZATION_NAME, "St. Mary"),
    (NameOID.EMAIL_ADDRESS, "it@mary.example"),
)


@pytest.mark.parametrize(
    ("subject", "key", "reason"),
    [
        ([NAME, ORGANIZATION], KEY, "one name, one organization and one e-mail"),
        ([NAME, NAME, ORGANIZATION, MAIL], KEY, "one name, one organization and one e-mail"),
        ([(NAME[0], "../north"), ORGANIZATION, MAIL], KEY, "letters, digits"),
        ([NAME, (ORGANIZATION[0], "St.\x1b[31m Mary"), MAIL], KEY, "hospital"),
        ([NAME, (ORGANIZATION[0], "St.\u202e Mary"), MAIL], KEY, "hospital"),
        ([NAME, ORGANIZATION, (MAIL[0], "mary")], KEY, "e-mail address"),
        ([NAME, ORGANIZATION, MAIL], ec.derive_private_key(7, ec.SECP256R1()), "P-384"),
        ([NAME, ORGANIZATION, MAIL], rsa.generate_private_key(65537, 2048), "P-384"),
    ],
)
def test_what_another_tool_made_is_refused_with_a_reason(
    subject: list[tuple[x509.ObjectIdentifier, str]], key: object, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_request(request_of(subject, key))


@pytest.mark.parametrize("content", [b"", b"x" * 20_000, b"-----BEGIN CERTIFICATE REQUEST-----\n"])
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match="no request of `site enrol`"):
        read_request(content)


def test_openssl_reads_the_request_and_finds_its_signature_good(tmp_path: Path) -> None:
    (tmp_path / "north.csr").write_bytes(new_request(*HONEST, KEY))
    command = ["openssl", "req", "-in", "north.csr", "-noout", "-verify", "-subject"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "verify OK" in done.stdout + done.stderr
    assert "St. Mary" in done.stdout


def test_a_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    new_node_key(tmp_path, "north")
    secret, public = (tmp_path / "site.key").read_bytes(), (tmp_path / "site.pub").read_text()
    assert stat.S_IMODE((tmp_path / "site.key").stat().st_mode) == 0o600
    (tmp_path / "site.pub").unlink()
    new_node_key(tmp_path, "north")
    assert (tmp_path / "site.key").read_bytes() == secret
    assert (tmp_path / "site.pub").read_text() == public
    asks = Enrolment(*HONEST, read_node_key(tmp_path / "site.key").public_key())
    assert asks.line() == public


@given(st.binary(min_size=32, max_size=32), st.integers(0, 63), st.integers(0, 15))
def test_a_fingerprint_is_compared_by_its_first_digits(
    digest: bytes, place: int, digit: int
) -> None:
    fingerprint = digest.hex()
    assert is_fingerprint(in_groups(fingerprint), fingerprint)
    assert is_fingerprint(fingerprint.upper(), fingerprint)
    assert not is_fingerprint(fingerprint[: COMPARED - 1], fingerprint)
    other = f"{fingerprint[:place]}{digit:x}{fingerprint[place + 1 :]}"
    assert is_fingerprint(other, fingerprint) == (other == fingerprint)

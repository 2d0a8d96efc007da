"""Whose certificate a server shows: another authority's is named, and bytes that are none name nobody."""

from __future__ import annotations

import datetime
from functools import cache
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.client_app.diagnostics.connection_checks import inspector

KEY = ec.derive_private_key(20261127, ec.SECP384R1())
COMPANY = "Proxy Company"


@cache
def certificate(common: str, organization: str) -> x509.Certificate:
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, common),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization),
        ]
    )
    begin = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    builder = x509.CertificateBuilder(name, name, KEY.public_key(), 1, begin, begin)
    return builder.sign(KEY, hashes.SHA256())


DER = certificate("inspection", COMPANY).public_bytes(serialization.Encoding.DER)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("authority") / "ca.crt"
    own = certificate("fedsurrogate 1", "St. Mary")
    file.write_bytes(own.public_bytes(serialization.Encoding.PEM))
    return file


def test_another_authority_is_named_and_a_federations_is_not(authority: Path) -> None:
    assert inspector(DER, authority) == f"inspection, {COMPANY}"
    for name in ("fedsurrogate 1", "fedsurrogate 2"):
        own = certificate(name, "St. Mary").public_bytes(serialization.Encoding.DER)
        assert inspector(own, authority) == ""


def test_a_name_in_any_kind_of_text_raises_nothing(authority: Path) -> None:
    at = DER.index(COMPANY.encode()) - 2
    for kind in range(256):
        assert inspector(DER[:at] + bytes([kind]) + DER[at + 1 :], authority) in (
            "",
            f"inspection, {COMPANY}",
            "inspection",
        ), kind


@pytest.mark.parametrize("at", range(24))
def test_no_value_of_a_byte_at_the_head_raises_anything(authority: Path, at: int) -> None:
    """Lengths, kinds and the version, for which the library has an error of its own."""
    for value in range(256):
        changed = DER[:at] + bytes([value]) + DER[at + 1 :]
        assert inspector(changed, authority) in ("", f"inspection, {COMPANY}")


@given(changes=st.lists(st.tuples(st.integers(0, len(DER) - 1), st.integers(0, 255)), min_size=1))
def test_changed_bytes_raise_nothing(authority: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(DER)
    for at, value in changes:
        content[at] = value
    assert isinstance(inspector(bytes(content), authority), str)

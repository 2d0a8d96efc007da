"""Requests to take part and proposals, at the last value that is allowed and the first that is not."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.security import enrolment
from fedsurrogate.common.security.documents import (
    Proposal,
    SignedProposal,
    check_signed,
    in_groups,
    is_fingerprint,
    read_approver_key,
    read_proposal,
    read_setting,
    read_signed,
)
from fedsurrogate.common.security.enrolment import (
    Enrolment,
    new_node_key,
    new_request,
    read_node_key,
    read_request,
)
from fedsurrogate.common.security.sealing import public_key

KEY = ec.derive_private_key(20261126, ec.SECP384R1())
RIGHT: dict[str, Any] = {
    "id": "0f" * 16, "action": "run", "content": {"seed": 1}, "purpose": "a test", "expires": "2026-03-31",
}  # fmt: skip
ADA = bytes(32)


@pytest.mark.parametrize(
    ("hospital", "fits"),
    [
        ("x" * 64, True), ("x" * 65, False), ("", False), ("   ", False), (" x ", False), ("a b", True),
        ("a\u00a0b", False), ("a\tb", False), ("a\x00", False), ("\u202ea", False), ("ü", True), ("ü€", False),
    ],
)  # fmt: skip
def test_a_hospital_has_a_name_that_prints(hospital: str, fits: bool) -> None:
    if fits:
        assert read_request(new_request("north", hospital, "a@b", KEY)).hospital == hospital
        return
    with pytest.raises(ConfigError, match="hospital"):
        Enrolment("north", hospital, "a@b", KEY.public_key())


@pytest.mark.parametrize(
    ("contact", "fits"),
    [
        ("a@b", True), (f"{'a' * 253}@b", True), (f"{'a' * 254}@b", False), ("a", False), ("@b", False), ("a@", False),
        ("a b@c", False), ("a@b@c", False), ("", False), ("a@b\n", False),
    ],
)  # fmt: skip
def test_a_contact_is_an_address_of_255_characters_at_most(contact: str, fits: bool) -> None:
    if fits:
        assert Enrolment("north", "x", contact, KEY.public_key()).contact == contact
        return
    with pytest.raises(ConfigError, match="contact"):
        Enrolment("north", "x", contact, KEY.public_key())


def test_a_request_has_16384_bytes_at_most() -> None:
    whole = new_request("north", "x", "a@b", KEY)
    full = whole + b"\n" * (16_384 - len(whole))
    assert read_request(full).site == "north"
    with pytest.raises(ConfigError, match="more than 16384 bytes"):
        read_request(full + b"\n")


def test_a_key_that_was_deleted_is_replaced_with_its_public_half(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "kit"
    before = os.umask(0)
    try:
        new_node_key(folder, "north")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "site.pub").stat().st_mode) == 0o644
        first = (folder / "site.pub").read_text()
        (folder / "site.key").unlink()
        new_node_key(folder, "north")
    finally:
        os.umask(before)
    second = (folder / "site.pub").read_text()
    assert second != first
    assert second == enrolment.public_line(read_node_key(folder / "site.key").public_key(), "north")


def test_what_is_no_private_key_on_a_nist_curve_is_refused(tmp_path: Path) -> None:
    file, form = tmp_path / "site.key", serialization.PrivateFormat.OpenSSH
    plain = serialization.NoEncryption()
    other = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, form, plain
    )
    raw = KEY.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )

    def locked(cipher: bytes) -> bytes:
        """A key with a password, as ssh-keygen writes it."""

        def part(content: bytes) -> bytes:
            return len(content).to_bytes(4, "big") + content

        derived = part(part(bytes(16)) + (16).to_bytes(4, "big"))
        head = b"openssh-key-v1\0" + part(cipher) + part(b"bcrypt") + derived
        whole = (
            head + (1).to_bytes(4, "big") + part(base64.b64decode(raw.split()[1])) + part(bytes(64))
        )
        mark = b"OPENSSH PRIVATE KEY-----\n"
        return b"-----BEGIN " + mark + base64.encodebytes(whole) + b"-----END " + mark

    for content, reason in (
        (other, "is not a key on a NIST curve"),
        (locked(b"aes256-ctr"), "TypeError"),
        (locked(b"aes999-ctr"), "UnsupportedAlgorithm"),
        (b"", "cannot be read as a private key"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----", "cannot be read as a private key"),
        (None, "cannot be read as a private key"),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=reason):
            read_node_key(file)


@given(st.text("0123456789abcdef", min_size=64, max_size=64), st.integers(0, 64))
def test_people_compare_32_digits_in_groups_of_four(fingerprint: str, typed: int) -> None:
    groups = in_groups(fingerprint)
    assert groups.split(" ") == [fingerprint[at : at + 4] for at in range(0, 32, 4)]
    text = ":".join(fingerprint[:typed]).upper()
    assert is_fingerprint(text, fingerprint) == (typed >= 32)


# Proposals.


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({"purpose": "x" * 500}, True), ({"purpose": "x" * 501}, False), ({"purpose": ""}, False),
        ({"purpose": "  "}, False), ({"purpose": "a\nb"}, False), ({"purpose": "a b"}, True), ({"purpose": 3}, False),
        ({"content": {f"{at}": at for at in range(400)}}, True), ({"content": {}}, False),
        ({"content": {f"{at}": at for at in range(401)}}, False), ({"content": []}, False), ({"content": {1: 1}}, False),
        ({"content": {"a": None}}, False), ({"content": {"a": 1, "b": [1]}}, False), ({"content": {"a": True}}, True),
        ({"id": "0" * 31}, False), ({"id": "0" * 33}, False), ({"id": "A" * 32}, False), ({"id": 7}, False),
        ({"action": "stop"}, False), ({"action": None}, False), ({"action": "register"}, True),
        ({"action": "unregister"}, True), ({"expires": "20260331"}, False), ({"expires": "2026-02-30"}, False),
        ({"expires": ""}, False), ({"expires": None}, False), ({"expires": "2026-W14-2"}, False),
    ],
)  # fmt: skip
def test_a_proposal_has_values_that_are_allowed(change: dict[str, Any], fits: bool) -> None:
    if fits:
        proposal = Proposal(**(RIGHT | change))
        assert read_signed(SignedProposal(proposal).text()).proposal == proposal
        return
    with pytest.raises(ConfigError):
        Proposal(**(RIGHT | change))


def test_a_text_has_65536_characters_and_50_signatures_at_most() -> None:
    proposal = Proposal(**RIGHT)
    text = SignedProposal(proposal).text()
    full = text + " " * (65_536 - len(text))
    assert read_signed(full).proposal == proposal
    with pytest.raises(ConfigError, match="over 65536 characters"):
        read_signed(full + " ")
    many = {bytes([at]).hex() * 64: "0f" * 64 for at in range(50)}
    signed = SignedProposal(proposal, many)
    assert read_signed(signed.text()) == signed
    for signatures in (
        many | {"ff" * 64: "0f" * 64}, {"0f" * 63: "0f" * 64}, {"0f" * 65: "0f" * 64}, {"0F" * 64: "0f" * 64},
        {"0f" * 64: "0f" * 63}, {"0f" * 64: "0f" * 65}, {"0f" * 64: 3}, {"0f" * 64: "0F" * 64}, [], None,
    ):  # fmt: skip
        content = json.loads(text) | {"signatures": signatures}
        with pytest.raises(ConfigError, match="signatures = "):
            read_signed(json.dumps(content))
    twice = text.replace('"id"', '"id": "0", "id"')
    for other in (twice, "[" * 60_000, "{", "3", "[]", json.dumps(json.loads(text) | {"more": 1})):
        with pytest.raises(ConfigError, match="no proposal of `coordinator approval propose`"):
            read_signed(other)


def test_a_setting_has_twice_as_many_characters_at_most() -> None:
    signed = SignedProposal(Proposal(**RIGHT))
    assert read_setting(signed.setting()) == signed
    # Base64 of the longest text has fewer characters than the limit.
    longest = signed.text() + " " * (65_536 - len(signed.text()))
    assert read_setting(base64.b64encode(longest.encode()).decode()) == signed
    for text, reason in (
        ("A" * 2 * 65_536, "over 65536|no proposal"),
        ("A" * (2 * 65_536 + 4), "approval: must be a proposal"),
        ("A", "approval: must be a proposal"),
        ("//8=", "approval: must be a proposal"),
        ("e30 =", "approval: must be a proposal"),
        ("é", "approval: must be a proposal"),
        ("", "no proposal of"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read_setting(text)


def test_files_of_proposals_and_keys_are_read_whole_or_refused_by_name(tmp_path: Path) -> None:
    signed = SignedProposal(Proposal(**RIGHT)).sign(ADA)
    file = tmp_path / "proposal.json"
    file.write_text(signed.text() + " " * (65_536 - len(signed.text())))
    assert read_proposal(file) == signed
    for content, reason in (
        (file.read_bytes() + b" ", "over 65536"),
        (b"\xff", "cannot be read"),
        (b"{}", "no proposal"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"proposal\.json.*{reason}"):
            read_proposal(file)
    with pytest.raises(ConfigError, match="missing cannot be read"):
        read_proposal(tmp_path / "missing")
    for size in (0, 31, 32, 33):
        file.write_bytes(bytes(size))
        if size == 32:
            assert read_approver_key(file) == bytes(32)
            continue
        with pytest.raises(ConfigError, match=r"proposal\.json is no key of"):
            read_approver_key(file)
    with pytest.raises(ConfigError, match="missing cannot be read"):
        read_approver_key(tmp_path / "missing")


@settings(max_examples=30)
@given(
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), min_size=1, max_size=3), st.booleans()
)
def test_keys_of_sites_are_allowed_by_their_names_and_fingerprints_only(
    content: dict[str, str], turned: bool
) -> None:
    proposal = Proposal(**(RIGHT | {"action": "register", "content": content}))
    own = dict(reversed(content.items())) if turned else content
    other = replace(proposal, id="1" * 32, purpose="else", content=own)
    wanted = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    assert proposal.digest() == other.digest() == wanted
    assert proposal.text_digest() == hashlib.sha256(proposal.body()).hexdigest()
    assert proposal.text_digest() != other.text_digest()
    assert json.loads(proposal.body()) == RIGHT | {"action": "register", "content": content}


@pytest.mark.parametrize("days", [1, 30])
def test_a_fresh_proposal_lasts_so_many_days(days: int) -> None:
    first = datetime.now(UTC).date()
    proposal = Proposal.fresh("run", {"seed": 1}, "a test", days)
    last = datetime.now(UTC).date()
    assert proposal.expires in {(day + timedelta(days)).isoformat() for day in (first, last)}
    assert proposal.id != Proposal.fresh("run", {"seed": 1}, "a test", days).id
    signed = SignedProposal(proposal).sign(ADA)
    known = {"Ada": public_key(ADA)}
    assert check_signed(signed, proposal.digest(), known, 1, first + timedelta(days)) == ["Ada"]

"""A hospital that has made its own key takes part when its fingerprint was compared, and for as
long as its certificate lasts.
"""

from __future__ import annotations

import os
import re
import shlex
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.client_app.diagnostics import connection_checks
from fedsurrogate.common.flower.interface import FleetRequest
from fedsurrogate.common.security.registrations import Registration, read_table, write_table
from fedsurrogate.server_app.cli.control import again
from fedsurrogate.server_app.deployment.audit_log import NAME, entries
from fedsurrogate.server_app.deployment.certificates import credentials, issue
from fedsurrogate.server_app.deployment.fleet_guard import EXPIRED, Validity, key_bytes
from fedsurrogate.server_app.deployment.supernodes import _keys
from tests.commands import coordinator, site

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    issue(tmp_path / "fed", ("fl.example.org",), ("east",))
    return tmp_path / "fed"


class Commands:
    """The two command lines, in a folder of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, captured: Captured) -> None:
        self._patch, self._captured = monkeypatch, captured

    def coordinator(self, *arguments: str) -> int:
        """Its exit code."""
        return coordinator(self._patch, *arguments)

    def asked(self, name: str) -> str:
        """The fingerprint that a hospital reads out after `site enrol`."""
        known = ["--hospital", f"Hospital of {name}", "--contact", f"it@{name}.example"]
        assert site(self._patch, "enrol", name, *known) == 0
        found = re.search(r"fingerprint +([0-9a-f ]{39})", self.printed())
        assert found
        return found.group(1)

    def accepted(self, request: str, fingerprint: str, *more: str) -> int:
        """The exit code of accepting a request."""
        return self.coordinator(
            "sites", "accept", request, "--folder", "fed", "--fingerprint", fingerprint, *more
        )

    def printed(self) -> str:
        """What was printed since it was last asked."""
        return "".join(self._captured.readouterr())


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> Commands:
    return Commands(monkeypatch, capsys)


def listed(folder: Path) -> dict[str, datetime | None]:
    return {
        credential.name: credential.expires
        for credential in credentials(folder)
        if credential.kind == "site"
    }


def test_the_kit_of_a_site_that_enrolled_holds_no_secret(folder: Path, commands: Commands) -> None:
    fingerprint = commands.asked("north")
    secret = Path("north/certificates/site.key").read_bytes()
    assert (
        commands.accepted("north/north.csr", fingerprint, "--coordinator", "fl.example.org:9092")
        == 0
    )
    assert "north.tar.gz; it holds no secret" in commands.printed()
    with tarfile.open("north.tar.gz") as kit:
        contents = [kit.extractfile(each).read() for each in kit if each.isfile()]  # type: ignore[union-attr]
        names = kit.getnames()
    assert "north/certificates/site.crt" in names
    assert "north/certificates/site.key" not in names
    everywhere = [each.read_bytes() for each in folder.rglob("*") if each.is_file()]
    assert all(secret not in content for content in [*contents, *everywhere])
    assert set(_keys(folder)) == {"east", "north"}
    # What the coordinator makes for other sites leaves this one as it is.
    assert commands.coordinator("sites", "certs", "fed", "--site", "north") == 0
    assert not (folder / "sites" / "north" / "site.key").exists()


def test_the_authority_signs_the_certificate_of_the_sites_own_key(
    folder: Path, commands: Commands
) -> None:
    fingerprint = commands.asked("north")
    assert commands.accepted("north/north.csr", fingerprint, "--days", "90") == 0
    certificate = x509.load_pem_x509_certificate((folder / "sites/north/site.crt").read_bytes())
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    line = certificate.public_key().public_bytes(*form).decode()
    assert Path("north/certificates/site.pub").read_text() == f"{line} north\n"
    left = certificate.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(89) < left <= timedelta(90)


@pytest.mark.parametrize("wrong", ["", "864c", "0" * 32])
def test_without_the_fingerprint_nothing_changes(
    folder: Path, commands: Commands, wrong: str
) -> None:
    fingerprint = commands.asked("north")
    before = listed(folder)
    if wrong:
        assert commands.accepted("north/north.csr", wrong) == 1
        assert fingerprint not in commands.printed()
    else:
        assert commands.coordinator("sites", "accept", "north/north.csr", "--folder", "fed") == 0
        assert fingerprint in commands.printed()
    assert listed(folder) == before
    assert not (folder / "sites" / "north").exists()


def test_a_renewal_keeps_the_key_and_moves_the_end(folder: Path, commands: Commands) -> None:
    """And its kit replaces that of the first time; a file that a person names is not replaced."""
    fingerprint, here = commands.asked("north"), ("--coordinator", "fl.example.org:9092")
    commands.accepted("north/north.csr", fingerprint, "--days", "20", *here)
    first, kit = listed(folder)["north"], Path("north.tar.gz").read_bytes()
    assert commands.asked("north") == fingerprint
    commands.coordinator("sites", "accept", "north/north.csr", "--folder", "fed")
    assert "its certificate is made anew" in commands.printed()
    taken = ("--out", "north/north.csr", "--days", "300", *here)
    assert commands.accepted("north/north.csr", fingerprint, *taken) == 1
    assert listed(folder)["north"] == first
    assert commands.accepted("north/north.csr", fingerprint, "--days", "300", *here) == 0
    assert Path("north.tar.gz").read_bytes() != kit
    assert first is not None
    assert listed(folder)["north"] - first > timedelta(279)  # type: ignore[operator]


def test_who_made_a_revoked_key_makes_the_next_one(folder: Path, commands: Commands) -> None:
    commands.accepted("north/north.csr", commands.asked("north"))
    at_hospital, here, *_ = again(folder, "north", "register")
    assert "rm north/certificates/site.key; site enrol north" in at_hospital
    assert f"coordinator sites accept north.csr --folder {folder}" in here
    assert "--site east --new-key" in again(folder, "east", "register")[0]


def test_a_federation_that_is_there_keeps_its_address_and_says_so(
    tmp_path: Path, commands: Commands
) -> None:
    new = ("init", str(tmp_path / "new"), "--host", "127.0.0.1")
    assert commands.coordinator(*new) == 0
    assert "COORDINATOR" not in commands.printed()
    assert commands.coordinator(*new, "--port", "9999") == 0
    assert "stays, with COORDINATOR=127.0.0.1:9092. To move" in commands.printed()
    assert "9999" not in (tmp_path / "new" / ".env").read_text()


def test_another_key_for_a_known_name_is_shown_as_such(folder: Path, commands: Commands) -> None:
    """Who asks for the name of a hospital that is in: only its fingerprint, read out, lets him."""
    fingerprint = commands.asked("east")
    commands.coordinator("sites", "accept", "east/east.csr", "--folder", "fed")
    assert "ANOTHER KEY" in commands.printed()
    assert (folder / "sites" / "east" / "site.key").exists()
    commands.accepted("east/east.csr", fingerprint)
    assert not (folder / "sites" / "east" / "site.key").exists()


def test_two_sites_cannot_have_one_key(folder: Path, commands: Commands) -> None:
    fingerprint = commands.asked("north")
    commands.accepted("north/north.csr", fingerprint)
    Path("west/certificates").mkdir(parents=True)
    Path("north/certificates/site.key").rename("west/certificates/site.key")
    assert commands.asked("west") == fingerprint
    assert commands.accepted("west/west.csr", fingerprint) == 1
    assert "'north' has the key of this request of 'west'" in commands.printed()
    assert "west" not in listed(folder)


def test_a_name_that_differs_from_a_known_one_only_in_capitals_is_refused(
    folder: Path, commands: Commands
) -> None:
    fingerprint = commands.asked("East")
    assert commands.accepted("East/East.csr", fingerprint) == 1
    assert "differs from it only in capitals" in commands.printed()
    assert set(listed(folder)) == {"east"}


def test_the_audit_log_has_what_was_accepted_and_no_more(folder: Path, commands: Commands) -> None:
    """A request whose fingerprint was not the one that the hospital said was not accepted."""
    fingerprint = commands.asked("north")
    assert commands.accepted("north/north.csr", "0" * 32) == 1
    assert not (folder / NAME).exists()
    assert commands.accepted("north/north.csr", fingerprint) == 0
    ((entry, _),) = entries(folder / NAME)
    assert (entry["action"], entry["facts"]["site"]) == ("accept", "north")


def test_the_command_that_lets_a_site_in_later_can_be_typed(
    folder: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder with a blank, in another folder, with the SuperLink's address."""
    folder = folder.rename(folder.with_name("our federation"))
    fingerprint, control = commands.asked("north"), f"unix:{folder.parent}/c k:9093"
    words = ["sites", "accept", "north/north.csr", "--folder", folder.name]
    where = ["--control", control, "--root-certificates", f"{folder.name}/ca.crt"]
    assert commands.coordinator(*words, "--fingerprint", fingerprint, *where) == 0
    (line,) = re.findall(r"let it in when it runs: (.*)", commands.printed())
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    program, *typed = shlex.split(line)
    assert program == "coordinator"
    # It reaches for the SuperLink, which does not run here.
    assert commands.coordinator(*typed) == 1
    assert control in commands.printed()


def test_a_request_that_is_replayed_lets_in_nobody_else(folder: Path, commands: Commands) -> None:
    """Its certificate is for the key of the hospital. That a revoked key stays out, however often
    it is certified, is the SuperLink's memory: tests/e2e/test_tls.py.
    """
    fingerprint = commands.asked("north")
    for _ in range(2):
        assert commands.accepted("north/north.csr", fingerprint) == 0
    assert set(_keys(folder)) == {"east", "north"}


NOW = datetime.now(UTC)
TIMES = st.sampled_from([timedelta(days) for days in (-400, -1, 1, 29, 31, 400)]) | st.none()


# Seconds by which a file is newer than the one before it: one from a backup is older.
AGES = st.sampled_from([-(10**9), -3600, -1, 1, 3600])


@given(st.lists(st.tuples(st.lists(TIMES, min_size=3, max_size=3), AGES), min_size=2, max_size=4))
def test_a_key_is_heard_until_its_end_in_the_table_that_is_there_now(
    tmp_path_factory: pytest.TempPathFactory, tables: list[tuple[list[timedelta | None], int]]
) -> None:
    home = tmp_path_factory.mktemp("table")
    issue(home, ("fl.example.org",), ("0", "1", "2"))
    keys = _keys(home)
    guard = Validity(home / "registered.json")

    def of(name: str) -> FleetRequest:
        return FleetRequest(key_bytes(keys[name]), node=int(name), senders=(int(name),))

    # Without a table, and with one that cannot be read, what was known holds.
    assert [guard.refusal(of(name)) for name in keys] == ["", "", ""]
    written = NOW.timestamp()
    for number, (ends, newer) in enumerate(tables):
        table = {
            name: Registration(key, int(name), (NOW + left).isoformat() if left else "")
            for (name, key), left in zip(keys.items(), ends, strict=True)
        }
        write_table(home / "registered.json", table)
        written += newer
        os.utime(home / "registered.json", (written, written))
        assert read_table(home / "registered.json") == table
        expected = [EXPIRED if left and left < timedelta(0) else "" for left in ends]
        assert [guard.refusal(of(name)) for name in keys] == expected, number
        # A valid key does not make a message of another's valid.
        wrong = FleetRequest(key_bytes(keys["0"]), node=0, senders=(1,))
        assert guard.refusal(wrong)
    (home / "registered.json").write_text("{")
    assert [guard.refusal(of(name)) for name in keys] == expected


def test_the_doctor_warns_a_month_before_the_end(folder: Path, commands: Commands) -> None:
    fingerprint = commands.asked("north")
    key = Path("north/certificates/site.key")
    assert connection_checks.check_certificate(key) is None
    for days, state in ((29, "WARN"), (32, "PASS")):
        commands.accepted("north/north.csr", fingerprint, "--days", str(days))
        key.with_name("site.crt").write_bytes((folder / "sites/north/site.crt").read_bytes())
        found = connection_checks.check_certificate(key)
        assert found
        assert found.state == state
    key.with_name("site.crt").write_text("no certificate")
    found = connection_checks.check_certificate(key)
    assert found
    assert found.state == "FAIL"

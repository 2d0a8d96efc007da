"""Certificates and keys, tested with Python's TLS and with Flower's loading of a SuperNode's key."""

import datetime
import json
import socket
import ssl
import stat
import sys
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.server_app.cli import main as cli
from fedsurrogate.server_app.deployment.certificates import credentials, hosts_of, issue

Captured = pytest.CaptureFixture[str]
HOSTS = ("fl.example.org", "10.0.0.5", "localhost")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    issue(tmp_path / "certificates", HOSTS, ("north", "south"))
    return tmp_path / "certificates"


def greet(certificates_of_server: Path, authority: Path, host: str) -> str:
    """Make a TLS handshake as a site would; return "ok", or the site's error."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(
        certificates_of_server / "server.crt", certificates_of_server / "server.key"
    )
    client = ssl.create_default_context(cafile=str(authority))
    one, other = socket.socketpair()

    def answer() -> None:
        try:
            server.wrap_socket(other, server_side=True).close()
        except OSError:
            other.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        client.wrap_socket(one, server_hostname=host).close()
        return "ok"
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    finally:
        one.close()
        thread.join()


def test_a_site_accepts_the_coordinator_by_every_host_and_by_no_other(folder: Path) -> None:
    for host in HOSTS:
        assert greet(folder, folder / "sites" / "north" / "ca.crt", host) == "ok"
    assert "Hostname mismatch" in greet(folder, folder / "ca.crt", "evil.example.org")
    assert "IP address mismatch" in greet(folder, folder / "ca.crt", "10.0.0.6")


def test_another_authority_and_an_expired_certificate_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    issue(tmp_path / "other", ("localhost",), ())
    assert greet(folder, tmp_path / "other" / "ca.crt", "localhost") != "ok"
    issue(folder, (), (), renew=True, days=0)
    assert "expired" in greet(folder, folder / "ca.crt", "localhost")
    issue(folder, (), (), renew=True)
    assert greet(folder, folder / "ca.crt", "localhost") == "ok"


def test_flower_reads_the_keys_and_only_their_owner_can(folder: Path) -> None:
    public = set()
    for name in ("north", "south"):
        kit = folder / "sites" / name
        key = load_ssh_private_key((kit / "site.key").read_bytes(), None)
        assert key.public_key() == load_ssh_public_key((kit / "site.pub").read_bytes())
        public.add((kit / "site.pub").read_bytes())
        assert {file.name for file in kit.iterdir()} == {"ca.crt", "site.key", "site.pub"}
    assert len(public) == 2
    secret = [folder / "ca.key", folder / "server.key", folder / "sites" / "north" / "site.key"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in secret] == [0o600] * 3


def test_nothing_that_exists_is_made_again(folder: Path) -> None:
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    issue(folder, ("localhost",), ("north", "west"))
    after = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert before.items() <= after.items()
    assert {file.parent.name for file in after.keys() - before.keys()} == {"west"}


def test_renewing_adds_hosts_and_leaves_the_sites_alone(folder: Path) -> None:
    kits = {file: file.read_bytes() for file in (folder / "sites").rglob("*") if file.is_file()}
    with pytest.raises(
        ConfigError, match=r"host 'new.example.org' is not in server.crt, .*--renew"
    ):
        issue(folder, ("new.example.org",), ())
    issue(folder, ("new.example.org",), (), renew=True)
    assert set(hosts_of(folder)) == {*HOSTS, "127.0.0.1", "new.example.org"}
    assert greet(folder, folder / "ca.crt", "new.example.org") == "ok"
    assert kits == {
        file: file.read_bytes() for file in (folder / "sites").rglob("*") if file.is_file()
    }


@pytest.mark.parametrize(
    ("hosts", "sites", "message"),
    [
        (("https://fl.example.org",), (), "host 'https://fl.example.org'"),
        (("fl.example.org:9092",), (), "without a port"),
        (("10.0.0.256",), (), "host '10.0.0.256'"),
        (("*.example.org",), (), "host '"),
        ((), (), "name the machine with --host"),
        (("a",), ("../x",), "site '../x'"),
        (("a",), ("n" * 65,), "must be 1 to 64"),
    ],
)
def test_what_cannot_be_certified_is_refused_before_anything_is_written(
    tmp_path: Path, hosts: tuple[str, ...], sites: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        issue(tmp_path / "certificates", hosts, sites)
    assert message in str(refused.value)
    assert not (tmp_path / "certificates").exists()


def test_a_folder_that_does_not_fit_together_is_named(folder: Path, tmp_path: Path) -> None:
    issue(tmp_path / "other", ("localhost",), ())
    kept = (folder / "server.key").read_bytes()
    (folder / "server.key").write_bytes((tmp_path / "other" / "server.key").read_bytes())
    with pytest.raises(ConfigError, match=r"server.key is not the key of server.crt"):
        credentials(folder)
    (folder / "server.key").write_bytes(kept)
    own = (folder / "ca.crt").read_bytes()
    (folder / "ca.crt").write_bytes((tmp_path / "other" / "ca.crt").read_bytes())
    with pytest.raises(ConfigError, match="is not signed by"):
        credentials(folder)
    with pytest.raises(ConfigError, match=r"ca.key is not the key of ca.crt"):
        issue(folder, (), (), renew=True)
    (folder / "ca.crt").unlink()
    with pytest.raises(ConfigError, match="sites trust it"):
        issue(folder, (), ("west",))
    (folder / "ca.crt").write_bytes(own)
    (folder / "ca.key").unlink()
    with pytest.raises(ConfigError, match="restore it"):
        issue(folder, (), (), renew=True)
    issue(folder, (), ("west",))


def certs(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["coordinator", "sites", "certs", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command_tells_what_expires_when_and_exits_with_one_when_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    where = str(tmp_path / "certificates")
    assert certs(monkeypatch, where, "--host", "localhost", "--site", "north", "--json") == 0
    rows = {row["kind"]: row for row in json.loads(capsys.readouterr().out)}
    assert {kind: row["state"] for kind, row in rows.items()} == {
        "authority": "ok",
        "server": "ok",
        "site": "ok",
    }
    until = datetime.datetime.fromisoformat(rows["server"]["expires"]) - datetime.datetime.now(
        datetime.UTC
    )
    assert 395 < until.days < 398
    assert rows["site"]["expires"] is None
    assert certs(monkeypatch, where, "--renew", "--days", "20") == 0
    shown = capsys.readouterr().out
    assert "expires soon" in shown
    assert f"coordinator sites certs {where} --renew" in shown.replace("\n", "")
    issue(Path(where), (), (), renew=True, days=0)
    assert certs(monkeypatch, where) == 1
    assert "expired" in capsys.readouterr().out
    assert certs(monkeypatch, str(tmp_path / "nowhere")) == 1
    assert capsys.readouterr().err.startswith("error: ")

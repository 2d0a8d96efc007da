"""A key that was revoked stays out, whatever the SuperLink's database still knows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.processes.own_account import own_folder
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.flower.interface import FleetRequest, FlowerNode
from fedsurrogate.common.security.documents import key_fingerprint
from fedsurrogate.common.security.enrolment import new_request, read_node_key, read_request
from fedsurrogate.common.security.registrations import (
    REVOKED,
    TABLE,
    VARIABLE,
    Registration,
    read_table,
    revoke,
)
from fedsurrogate.server_app.deployment import supernodes
from fedsurrogate.server_app.deployment.certificates import drop_site_keys, issue
from fedsurrogate.server_app.deployment.enrolment import accept, standing
from fedsurrogate.server_app.deployment.fleet_guard import Validity, key_bytes
from fedsurrogate.server_app.deployment.kit import pack_kit
from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from fedsurrogate.server_app.deployment.supernodes import forget, not_registered, register
from tests.commands import coordinator
from tests.e2e.processes import free_ports

SITES = ("east", "west")


class Link:
    """What a SuperLink remembers of keys; a new one has forgotten all of it."""

    def __init__(self) -> None:
        self.known: dict[bytes, FlowerNode] = {}

    def nodes(self, wait: float = 0.0) -> list[FlowerNode]:
        """All of them."""
        return list(self.known.values())

    def register(self, key: bytes) -> int:
        """As Flower: a key that it has known is refused."""
        assert key not in self.known
        self.known[key] = FlowerNode(len(self.known) + 1, key, online=False, revoked=False)
        return len(self.known)

    def unregister(self, node: int) -> None:
        """For ever."""
        (found,) = [each for each in self.known.values() if each.id == node]
        self.known[found.key] = FlowerNode(node, found.key, online=False, revoked=True)

    def hears(self, guard: Validity, line: str) -> bool:
        """Whether a call that this key has signed is answered."""
        node = self.known.get(key_bytes(line))
        listens = node is not None and not node.revoked
        return listens and not guard.refusal(FleetRequest(key_bytes(line)))


def line_of(folder: Path, site: str) -> str:
    return " ".join((folder / "sites" / site / "site.pub").read_text().split()[:2])


class Federation:
    """A folder of certificates, a SuperLink and its guard; each step happens to one of the sites."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.link, self.guard = folder, Link(), Validity(folder / TABLE)
        self.revoked = set[str]()
        self._databases: list[dict[bytes, FlowerNode]] = [{}]
        self._tables = [b'{"sites": {}}']

    def control(self, *_: object, **__: object) -> AbstractContextManager[object]:
        """In place of the connection to a SuperLink."""
        return nullcontext((self.link, {node.key: node for node in self.link.nodes()}))

    def table(self) -> dict[str, Registration]:
        """What is registered, by the table."""
        return read_table(self.folder / TABLE) if (self.folder / TABLE).exists() else {}

    def register(self, _: str) -> None:
        """Every key is let in but the revoked ones."""
        before, states = self.table(), register(self.folder, "", None)
        assert not_registered(self.folder) == {}, "there is nothing that it would let in"
        self.revoked |= {before[name].key for name in SITES if states[name] == "replaced"}
        for name in SITES:
            out = line_of(self.folder, name) in self.revoked
            assert (states[name] == "taken back") == out
            assert (name in self.table()) != out
            assert self.link.hears(self.guard, line_of(self.folder, name)) != out
        found = map(self.link.known.get, map(key_bytes, self.revoked))
        assert all(node.revoked for node in found if node), "by the SuperLink, too"
        self._databases.append(dict(self.link.known))
        self._tables.append((self.folder / TABLE).read_bytes())

    def revoke(self, site: str) -> None:
        """The keys that its folder and the table have."""
        self.revoked |= {line_of(self.folder, site)}
        self.revoked |= {each.key for name, each in self.table().items() if name == site}
        forget(self.folder, site, "", None)

    def new_key(self, site: str) -> None:
        """As `coordinator sites certs --new-key`."""
        drop_site_keys(self.folder, [site])
        issue(self.folder, (), [site])

    def lose_database(self, _: str) -> None:
        self.link = Link()

    def restore_database(self, _: str) -> None:
        self.link.known = dict(self._databases[len(self._databases) // 2])

    def restore_table(self, _: str) -> None:
        (self.folder / TABLE).write_bytes(self._tables[len(self._tables) // 2])

    def restart(self, _: str) -> None:
        self.guard = Validity(self.folder / TABLE)


STEPS = [each for each, of in vars(Federation).items() if callable(of) and each[0] != "_"]
STEPS = [each for each in STEPS if each not in ("control", "table")]


@given(st.lists(st.sampled_from(STEPS), min_size=8, max_size=16))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_order_of_events_lets_a_revoked_key_in_again(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    """Databases are lost, databases and tables restored, at any time; every other key is heard."""
    folder = tmp_path_factory.mktemp("fed")
    issue(folder, ("fl.example.org",), SITES)
    fed = Federation(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supernodes, "_control", fed.control)
        for step in [*steps, "register"]:
            getattr(fed, step)("east")
            for key in fed.revoked:
                assert not fed.link.hears(fed.guard, key)
                assert not fed.link.hears(Validity(folder / TABLE), key)


def test_a_key_that_an_earlier_version_revoked_is_put_on_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue(tmp_path, ("fl.example.org",), SITES)
    fed = Federation(tmp_path)
    monkeypatch.setattr(supernodes, "_control", fed.control)
    fed.register("")
    fed.link.unregister(fed.table()["east"].node)
    fed.revoked.add(line_of(tmp_path, "east"))
    fed.register("")
    fed.lose_database("")
    fed.register("")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    issue(tmp_path / "fed", ("fl.example.org",), SITES)
    return tmp_path / "fed"


def test_neither_a_request_nor_a_kit_brings_a_revoked_key_back(folder: Path) -> None:
    secret = read_node_key(folder / "sites" / "east" / "site.key")
    revoke(folder / REVOKED, {key_fingerprint(line_of(folder, "east").encode()): "east"})
    # Under its name, and under another one.
    for name in ("east", "north"):
        request = new_request(name, "Hospital", "it@east.example", secret)
        for door in (
            lambda asks: standing(folder, asks),
            lambda asks, content=request: accept(folder, asks, content, 30),
        ):
            with pytest.raises(ConfigError, match=r"was revoked.*never .*again.*a new key"):
                door(read_request(request))
    assert not (folder / "sites" / "north").exists()
    (folder / "coordinator.pub").touch()
    with pytest.raises(ConfigError, match=r"was revoked.*--new-key"):
        pack_kit(folder, "east", "h:1", "image", folder / "east.tar.gz")
    assert pack_kit(folder, "west", "h:1", "image", folder / "west.tar.gz")


def test_the_list_is_read_beside_the_certificates_and_beside_the_table(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers keep the table in a folder of its own; the certificates may be on another machine."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "registered" / TABLE))
    (tmp_path / "registered").mkdir()
    east, west = (key_fingerprint(line_of(folder, name).encode()) for name in SITES)
    revoke(folder / REVOKED, {east: "east"})
    assert set(not_registered(folder)) == {"west"}
    revoke(tmp_path / "registered" / REVOKED, {west: "west"})
    assert not_registered(folder) == {}


@pytest.mark.parametrize("torn", [b"00", b"0" * 64, b"\xff\n", b"east\n", b"\n"])
def test_a_list_that_cannot_be_read_lets_nobody_in(folder: Path, torn: bytes) -> None:
    """A guard that is at work goes on with the keys that it knows to be revoked."""
    east, west = (line_of(folder, name) for name in SITES)
    revoke(folder / REVOKED, {key_fingerprint(east.encode()): "east"})
    guard = Validity(folder / TABLE)
    with (folder / REVOKED).open("ab") as stream:
        stream.write(torn)
    for _ in range(2):
        assert guard.refusal(FleetRequest(key_bytes(east)))
        assert not guard.refusal(FleetRequest(key_bytes(west)))
        with pytest.raises(RunError, match=r"revoked.*line 2"):
            Validity(folder / TABLE)
        with pytest.raises(RunError, match=r"revoked.*line 2"):
            not_registered(folder)
    for change in (lambda: (folder / REVOKED).write_bytes(b""), (folder / REVOKED).unlink):
        change()
        assert guard.refusal(FleetRequest(key_bytes(east))), "it does not forget"


def test_a_list_that_an_older_file_replaces_is_read(folder: Path) -> None:
    """As from a backup, with the time at which it was written."""
    east, west = (line_of(folder, name) for name in SITES)
    revoke(folder / REVOKED, {key_fingerprint(east.encode()): "east"})
    guard = Validity(folder / TABLE)
    assert not guard.refusal(FleetRequest(key_bytes(west)))
    (folder / REVOKED).unlink()
    revoke(folder / REVOKED, {key_fingerprint(west.encode()): "west"})
    os.utime(folder / REVOKED, (1, 1))
    for line in (east, west):
        assert guard.refusal(FleetRequest(key_bytes(line)))


@pytest.mark.slow
def test_a_superlink_that_lost_its_database_hears_no_revoked_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the documentation says to do after the loss; Helm does it every five minutes."""
    (fleet,) = free_ports(1)
    with own_folder() as sockets:
        _loses_its_database(folder, fleet, sockets, monkeypatch, capsys)


def _loses_its_database(
    folder: Path,
    fleet: int,
    sockets: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    link = ["--control", f"unix:{sockets}/control:9093"]
    link += ["--root-certificates", str(folder / "ca.crt")]

    def run(*words: str) -> str:
        assert coordinator(monkeypatch, *words, str(folder), *link) == 0
        return capsys.readouterr().out

    with superlink(folder, fleet, sockets):
        run("sites", "register", "--wait", "60")
        assert coordinator(monkeypatch, "sites", "unregister", str(folder), "east", *link) == 0
        assert "stays barred" in capsys.readouterr().err
    (folder / "state.db").unlink()
    with superlink(folder, fleet, sockets):
        printed = run("sites", "register", "--wait", "60")
        assert "registered west" in printed
        assert "taken back east" in printed
        assert "--site east --new-key" in printed
        assert set(read_table(folder / TABLE)) == {"west"}


@contextmanager
def superlink(folder: Path, fleet: int, sockets: str) -> Iterator[None]:
    """`coordinator superlink` with its database in the folder."""
    addresses = {
        "fleet": f"127.0.0.1:{fleet}",
        "control": f"unix:{sockets}/control:9093",
        "serverappio": f"unix:{sockets}/app:9091",
    }
    flags = [f"--{name}-api-address={address}" for name, address in addresses.items()]
    credentials = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
    flags += [f"--ssl-{name}={folder / file}" for name, file in credentials.items()]
    flags += ["--enable-supernode-auth", "--isolation=process", f"--database={folder / 'state.db'}"]
    command = [sys.executable, "-m", "fedsurrogate.server_app.cli.main", "superlink", *flags]
    log = (folder / "superlink.log").open("a")
    settings = os.environ | {"PYTHONPATH": str(APP_FOLDER), "FLWR_HOME": str(folder / "flwr")}
    with subprocess.Popen(command, env=settings, stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)

"""A backup of a site: what is in it, that it comes back, and that an older one brings no budget back."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from fedsurrogate.client_app.backup import restore_backup
from fedsurrogate.client_app.cli.join import prepare
from fedsurrogate.client_app.kit import read_kit
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.settings.base import parse_overrides, settings_text
from tests.attacks.ledger.test_ledger_rollback import ANSWERED, BUDGET, LEDGER, Hospital
from tests.client_app.cli.test_first_join import edit, kit
from tests.commands import site

__all__ = ["kit"]
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    """A site without a kit, whose policy allows one run of epsilon 1."""
    return Hospital(tmp_path)


def back_up(patch: Patch, hospital: Hospital) -> Path:
    file = hospital.home / "north.backup"
    assert site(patch, "backup", file, "--node-config", settings_text(hospital.node)) == 0
    return file


def reopen(patch: Patch, hospital: Hospital, epsilon: float, *more: object) -> int:
    given = ("--node-config", settings_text(hospital.node), "--reason", "restored")
    return site(patch, "ledger", "reopen", *given, "--epsilon-spent", epsilon, "--keep", *more)


@pytest.mark.parametrize("check_log", ["kept", "lost"])
def test_an_older_backup_brings_no_budget_back(
    hospital: Hospital, check_log: str, monkeypatch: Patch, capsys: Captured
) -> None:
    """The attack: spend little, back up, spend all, restore, spend again."""
    assert hospital.run(epsilon=1e-3) == ANSWERED
    file = back_up(monkeypatch, hospital)
    assert hospital.run() == ANSWERED
    seen = len(hospital.ledger.entries()) + 1
    shutil.rmtree(hospital.state)
    if check_log == "lost":
        shutil.rmtree(hospital.check_log)
    assert site(monkeypatch, "restore", file) == 1
    words = "has seen" if check_log == "kept" else "is missing, the ledger is not"
    assert words in (said := capsys.readouterr().err)
    assert "type `site ledger reopen --keep`" in said
    assert hospital.run() == LEDGER
    # That nothing is missing is believed by nobody who has seen more: the check log, or the coordinator.
    assert reopen(monkeypatch, hospital, 0) == int(check_log == "kept")
    assert hospital.run() == LEDGER
    capsys.readouterr()
    assert reopen(monkeypatch, hospital, 0, "--seen", seen) == 1
    assert "entries are missing, and epsilon 0" in capsys.readouterr().err
    assert reopen(monkeypatch, hospital, 1.0, "--seen", seen) == 0
    assert hospital.run() == BUDGET
    assert hospital.run(epsilon=1e-3) == ANSWERED


def test_the_newest_backup_goes_on_where_the_site_was(
    hospital: Hospital, monkeypatch: Patch, capsys: Captured
) -> None:
    assert hospital.run(epsilon=1e-3) == ANSWERED
    before, file = hospital.ledger.entries(), back_up(monkeypatch, hospital)
    shutil.rmtree(hospital.state)
    Path(str(hospital.node["policy"])).unlink()
    assert site(monkeypatch, "restore", file) == 0
    assert "the ledger agrees with its check log" in capsys.readouterr().out
    assert hospital.ledger.entries() == before
    assert [hospital.run(), hospital.run()] == [ANSWERED, BUDGET]


def test_a_ledger_that_cannot_be_trusted_is_not_backed_up(
    hospital: Hospital, monkeypatch: Patch
) -> None:
    assert hospital.run(epsilon=1e-3) == ANSWERED
    hospital.ledger.head.write_text("1 0\n")
    file = hospital.home / "north.backup"
    assert site(monkeypatch, "backup", file, "--node-config", settings_text(hospital.node)) == 1
    assert not file.exists()


def test_a_lost_ledger_is_neither_backed_up_nor_said_to_agree(
    hospital: Hospital, monkeypatch: Patch, capsys: Captured
) -> None:
    """The check log knows what the empty state folder does not."""
    settings, file = settings_text(hospital.node), hospital.home / "unopened.backup"
    assert site(monkeypatch, "backup", file, "--node-config", settings) == 0
    assert hospital.run(epsilon=1e-3) == ANSWERED
    shutil.rmtree(hospital.state)
    lost = hospital.home / "lost.backup"
    assert site(monkeypatch, "backup", lost, "--node-config", settings) == 1
    assert "has seen" in capsys.readouterr().err
    assert not lost.exists()
    assert site(monkeypatch, "restore", file) == 1
    assert "agrees" not in capsys.readouterr().out


@pytest.fixture
def lived_in(kit: Path) -> Path:
    """A kit that has joined: an open ledger, a key, a cache, a received model."""
    edit(kit, "DATA=\n", f"DATA={kit / 'data'}\n")
    prepare(kit, yes=True)
    private_key(parse_node_config(parse_overrides([read_kit(kit).node_config()])), "north")
    (kit / "state/models/one").mkdir(parents=True)
    (kit / "state/models/one/model.fedsurrogate").write_bytes(b"weights")
    (kit / "cache/features").mkdir(parents=True, exist_ok=True)
    (kit / "cache/features/x").write_bytes(b"features")
    Image.new("L", (8, 8)).save(kit / "state/seen.png")
    return kit


@pytest.mark.slow
def test_a_kit_comes_back_on_another_machine_without_images_caches_or_witness(
    lived_in: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    kit, home = lived_in, lived_in.parent
    assert site(monkeypatch, "backup", home / "b", kit) == 0
    assert (home / "b").stat().st_mode & 0o777 == 0o600
    assert (b"weights" in (home / "b").read_bytes()) is False
    assert site(monkeypatch, "backup", home / "b", kit) == 1, "it exists"
    # The disk with kit and check log is lost; the data are mounted where they were.
    kept = {
        each.relative_to(kit): each.read_bytes()
        for each in kit.rglob("*")
        if each.is_file() and each.suffix != ".lock"
    }
    (kit / "data").rename(home / "data")
    shutil.rmtree(kit)
    assert site(monkeypatch, "restore", home / "b") == 1
    assert "is no folder on this machine; is the file system mounted?" in capsys.readouterr().err
    assert not list((kit / "state").glob("*"))
    (home / "data").rename(kit / "data")
    assert site(monkeypatch, "restore", home / "b") == 1, "the check log is lost"
    capsys.readouterr()
    back = {
        each.relative_to(kit): each.read_bytes()
        for each in kit.rglob("*")
        if each.is_file() and each.suffix != ".lock"
    }
    lost = {str(each) for each in kept.keys() - back.keys()}
    assert not back.keys() - kept.keys()
    assert {each.partition("/")[0] for each in lost} <= {"cache", "check-log", "north.csr", "state"}
    assert {each for each in lost if each.startswith("state/")} <= {
        "state/seen.png",
        "state/site.log",
    }
    assert all(back[each] == kept[each] for each in back)
    assert (kit / "state/models/one/model.fedsurrogate").read_bytes() == b"weights"
    assert (kit / "certificates/site.key").stat().st_mode & 0o077 == 0
    given = ("--node-config", kit, "--reason", "disk", "--epsilon-spent", 0, "--keep")
    assert site(monkeypatch, "ledger", "reopen", *given) == 0
    assert site(monkeypatch, "ledger", "show", "--node-config", kit) == 0
    # A second time it would replace what may be newer.
    assert site(monkeypatch, "restore", home / "b") == 1
    assert "into an empty state folder only" in capsys.readouterr().err


@pytest.mark.slow
def test_a_backup_is_not_restored_beside_other_data_or_damaged(
    lived_in: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    kit, home = lived_in, lived_in.parent
    assert site(monkeypatch, "backup", home / "plain", kit) == 0
    shutil.rmtree(kit / "state")
    plain = (home / "plain").read_bytes()
    for cut in (0, 5, len(plain) // 2, len(plain) - 9):
        (home / "plain").write_bytes(plain[:cut])
        with pytest.raises(ConfigError, match="no whole backup"):
            restore_backup(home / "plain", None)
    (home / "plain").write_bytes(plain)
    # The same images elsewhere would begin a new budget.
    shutil.copytree(kit / "data", home / "elsewhere")
    edit(kit, f"DATA={kit / 'data'}", f"DATA={home / 'elsewhere'}")
    with pytest.raises(ConfigError, match="another path or kind would begin a new budget"):
        restore_backup(home / "plain", None)
    assert not (kit / "state").exists()
    edit(kit, f"DATA={home / 'elsewhere'}", f"DATA={kit / 'data'}")
    assert restore_backup(home / "plain", None)[3] == []


@pytest.mark.parametrize(
    "name",
    ["state/../../x", "kit/run.sh", "/etc/x", "state/other", "x", "kit/certificates/../../x"],
)
def test_nothing_is_written_from_a_file_that_is_no_backup(tmp_path: Path, name: str) -> None:
    file = tmp_path / "b"
    with tarfile.open(file, "w:gz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(ConfigError, match="is nothing of a backup"):
        restore_backup(file, tmp_path / "north")
    link = tarfile.TarInfo("state/keys/x")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(file, "w:gz") as archive:
        archive.addfile(link)
    with pytest.raises(ConfigError, match="is nothing of a backup"):
        restore_backup(file, tmp_path / "north")
    assert list(tmp_path.iterdir()) == [file]

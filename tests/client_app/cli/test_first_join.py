"""`site join` with a kit: what it asks, what it writes, and what it never does by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
from PIL import Image

from fedsurrogate.client_app.cli.join import prepare
from fedsurrogate.client_app.kit import read_kit
from fedsurrogate.common.errors import ConfigError, LedgerError
from tests.commands import site
from tests.deploy.test_compose import settings_of_a_kit


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A kit that was unpacked, with a few images in its folder of data."""
    settings_of_a_kit(tmp_path)
    for place, name in enumerate(("no", "yes")):
        (tmp_path / "north" / "data" / name).mkdir()
        for number in range(6):
            image = Image.new("L", (8, 8), 20 * number + 10 * place)
            image.save(tmp_path / "north" / "data" / name / f"{number}.png")
    return tmp_path / "north"


def edit(kit: Path, old: str, new: str) -> None:
    text = (kit / ".env").read_text()
    assert old in text
    (kit / ".env").write_text(text.replace(old, new))


def test_without_a_terminal_what_is_missing_is_named_and_nothing_is_asked(kit: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.env: DATA is empty; set it there"):
        prepare(kit, yes=True)
    edit(kit, "DATA=\n", "DATA=./nowhere\n")
    with pytest.raises(ConfigError, match=r"DATA=\./nowhere is no folder on this machine"):
        prepare(kit, yes=True)


@pytest.mark.slow
def test_only_a_person_or_yes_opens_a_ledger_and_a_lost_one_is_not_begun_anew(kit: Path) -> None:
    """A service that starts again has neither: it must not begin a new budget."""
    edit(kit, "DATA=\n", "DATA=./data\n")
    with pytest.raises(LedgerError, match="was never opened"):
        prepare(kit, yes=False)
    prepare(kit, yes=True)
    assert list((kit / "state" / "ledgers").glob("*.jsonl"))
    assert read_kit(kit).values["CLASSES"] == "no,yes"
    prepare(kit, yes=False)
    shutil.rmtree(kit / "state" / "ledgers")
    for yes in (False, True):
        # The doctor fails, because the check log knows more.
        with pytest.raises(typer.Exit):
            prepare(kit, yes)
    assert not list((kit / "state").rglob("*.jsonl"))


def test_a_looser_policy_is_in_force_once_a_person_has_confirmed_it(
    kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was in force at the next request, and the site said nothing before."""
    edit(kit, "DATA=\n", "DATA=./data\n")
    policy, own = kit / "policy" / "policy.toml", ("--node-config", kit)
    run = ("check", *own, "-c", "epsilon=1 delta=1e-5 classes=no,yes image-size=8")

    def typed(*words: object) -> tuple[int, str]:
        code, shown = site(monkeypatch, *words), capsys.readouterr()
        return code, shown.out + shown.err

    assert typed("ledger", "open", *own)[0] == 0
    assert typed(*run)[0] == 0
    before = policy.read_text()
    policy.write_text(
        before.replace("total = 4.0", "total = 8.0").replace("dp = false", "dp = true")
    )
    more = "without-dp = true (was false); epsilon-total = 8 (was 4)"
    for words in (run, ("doctor", kit), ("join", kit)):
        code, shown = typed(*words)
        assert (code, more in shown or more.replace("; ", "\n  ") in shown) == (1, True), shown
    code, shown = typed("policy", *own)
    assert code == 1
    assert "This cannot be taken back: without-dp = true lets releases leave" in shown
    assert "nobody has confirmed it" in shown
    assert typed(*run)[0] == 1, "to have read it is not enough"
    assert typed("policy", *own, "--yes")[0] == 0
    assert typed(*run)[0] == 0
    # A stricter one needs nobody.
    policy.write_text(before.replace("total = 4.0", "total = 3.0"))
    code, shown = typed(*run)
    assert (code, "epsilon total    │ 3" in shown) == (0, True)


@pytest.mark.parametrize(
    "line", ["NOT_A_SETTING=1", "POLICY=/other.toml", "BACKBONE=python:a:b", "x"]
)
def test_a_line_that_is_no_setting_of_a_kit_is_named(kit: Path, line: str) -> None:
    edit(kit, "WEIGHTS=\n", f"WEIGHTS=\n{line}\n")
    with pytest.raises(ConfigError, match=f"{line.partition('=')[0]}.*is no setting; there are"):
        read_kit(kit)


def test_a_folder_without_a_kit_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the folder into which the site's kit was unpacked"):
        read_kit(tmp_path)


def test_a_kit_excludes_the_options_that_it_replaces(
    kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site(monkeypatch, "join", kit, "--superlink", "fl.example.org:9092") == 1
    assert "leave the other options out" in capsys.readouterr().err
    assert site(monkeypatch, "join") == 1
    assert "site join north/" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["north", "a b", 'a"b', "50%", "$HOME"])
def test_the_service_joins_with_this_kit(
    kit: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """systemd reads the folder as it is, and the service opens no ledger."""
    from fedsurrogate.client_app.cli.join import installed

    monkeypatch.setenv("XDG_CONFIG_HOME", str(kit.parent / "config"))
    moved = read_kit(kit.rename(kit.parent / name))
    lines = installed(moved)
    unit = kit.parent / "config/systemd/user/fedsurrogate-north.service"
    assert str(unit) in lines[0]
    (command,) = (line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    words = command.replace("%%", "%").replace("$$", "$").replace('\\"', "\0")
    assert words.split('"')[-2].replace("\0", '"') == str(moved.folder)
    assert "--yes" not in command
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "--user", "verify", str(unit)],
            capture_output=True, text=True, check=False, env=os.environ | {"XDG_RUNTIME_DIR": str(kit.parent)},
        )  # fmt: skip
        assert "fedsurrogate" not in done.stderr, done.stderr

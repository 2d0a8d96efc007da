"""Other code that has the names of our rooms: files in the folder of a user, and other packages."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from tests.e2e.test_wheel import environment_with, run
from tests.e2e.test_wheel import source as source  # fixtures
from tests.e2e.test_wheel import wheel as wheel

ROOMS = ("common", "client_app", "server_app", "strategies", "deploy")
RAISES = "raise RuntimeError('a stranger was imported')\n"
SETTINGS = 'test-fraction=0.8 head.min-steps=100 fedpft.rank=4 output-dir="runs"'


def stranger(folder: Path) -> Path:
    """A wheel of another project, with packages that have our rooms' names."""
    file, info = folder / "stranger-1-py3-none-any.whl", "stranger-1.dist-info"
    texts = {f"{room}/{name}.py": RAISES for room in ROOMS for name in ("__init__", "run", "app")}
    texts |= {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: stranger\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    texts[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*texts, f"{info}/RECORD"))
    with zipfile.ZipFile(file, "w") as content:
        for name, text in texts.items():
            content.writestr(name, text)
    return file


def check_all(programs: Path, folder: Path, *engines: str) -> None:
    """Import, commands, and engines of simulations, in a folder with files of our rooms' names."""
    for room in ROOMS:
        (folder / f"{room}.py").write_text(RAISES)
    (folder / "policy.toml").write_text("epsilon-per-run = 1.0\n")
    run(programs / "python", "-c", "import fedsurrogate as fs; fs.simulate", folder=folder)
    assert "is fine" in run(programs / "site", "policy", "policy.toml", folder=folder)
    for engine in engines:
        words = ("simulate", "--engine", engine, "--sites", 2, "-c", SETTINGS, "--json")
        found = json.loads(run(programs / "coordinator", *words, folder=folder))
        assert found["accuracy"]["model"] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_another_package_with_our_rooms_names_and_ours_leave_each_other_whole(
    wheel: Path, tmp_path: Path, order: str
) -> None:
    other, place = stranger(tmp_path), tmp_path / "environment"
    both = (other, wheel) if order == "before" else (wheel, other)
    programs = environment_with(place, *both)
    for command in Path(sys.executable).parent.glob("fl*w*r*"):
        _, _, rest = command.read_text().partition("\n")
        (programs / command.name).write_text(f"#!{programs / 'python'}\n{rest}")
        (programs / command.name).chmod(0o755)
    (tmp_path / "user").mkdir()
    check_all(programs, tmp_path / "user", *(("local",) if order == "before" else ("flower",)))
    (packages,) = place.glob("lib/python*/site-packages")
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "uninstall", "-y")
    gone = ("stranger", "fedsurrogate") if order == "before" else ("fedsurrogate", "stranger")
    run(*pip, "--quiet", gone[0], folder=place)
    if gone[0] == "stranger":
        assert not (packages / "common").exists()
        run(programs / "coordinator", "--help", folder=tmp_path / "user")
    else:
        assert not (packages / "fedsurrogate").exists()
        assert all((packages / room / "app.py").is_file() for room in ROOMS)

"""The built wheel holds all that the commands need: installed into an empty environment, away from
the checkout, it runs.

The environment is new and has nothing but the wheel. The libraries (torch and the others are
gigabytes) are borrowed from the environment of the tests by a `.pth` file, which adds their folder
to the path behind the new environment's own. It does not run the other `.pth` files of that folder,
so an editable installation of the checkout there has no effect. What is not tested here is
therefore that pip finds the dependencies; `make setup` in a clean checkout shows that.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from fedsurrogate.common.version import own_version
from tests.children import ran
from tests.documents import README, ROOT
from tests.imports import OWN

# Folders of the checkout that the build does not need; copying them takes longer than the build.
NOT_NEEDED = {"tests", "docs", "benchmarks", "examples", "runs", "site", "build"}
PACKAGES = ("common", "client_app", "server_app", "strategies", "fedsurrogate")
NAMES = (OWN, *(f"{OWN}.{package}" for package in PACKAGES if package != OWN))


def not_needed(folder: str, names: list[str]) -> set[str]:
    """What a copy of the checkout leaves out."""
    unfit = {
        name
        for name in names
        if name.startswith(".") or name.endswith(".egg-info") or name == "__pycache__"
    }
    return unfit | (NOT_NEEDED & set(names) if Path(folder) == ROOT else set())


def run(*words: object, folder: Path, expected: int = 0) -> str:
    """Run a command outside of the checkout, without its path; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HOME": str(folder), "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    done = ran([str(word) for word in words], cwd=folder, env=environment)
    assert done.returncode == expected, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that the build leaves nothing in it."""
    return Path(
        shutil.copytree(
            ROOT,
            tmp_path_factory.mktemp("wheel") / "source",
            symlinks=True,
            ignore=not_needed,
        )
    )


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """The built wheel."""
    words = (
        "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir",
        source.parent, source,
    )  # fmt: skip
    run(sys.executable, "-m", "pip", *words, folder=source.parent)
    (found,) = source.parent.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has the wheel, and borrows the libraries; see above."""
    return environment_with(tmp_path_factory.mktemp("environment"), wheel)


def environment_with(folder: Path, *wheels: Path) -> Path:
    """The `bin` of a new environment, with wheels in this order and borrowed libraries."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (own,) = folder.glob("lib/python*/site-packages")
    paths = sorted({sysconfig.get_paths()[name] for name in ("purelib", "platlib")})
    (own / "borrowed.pth").write_text("\n".join(paths) + "\n")
    for wheel in wheels:
        install = ("install", "--no-deps", "--no-index", "--quiet", wheel)
        run(sys.executable, "-m", "pip", "--python", python, *install, folder=folder)
    return folder / "bin"


def in_wheel(path: Path) -> str:
    """Where a file of the checkout is in the wheel, and in site-packages."""
    return path.as_posix() if path.parts[0] == OWN else f"{OWN}/{path.as_posix()}"


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    wanted = {
        in_wheel(path.relative_to(source))
        for folder in (*PACKAGES, "deploy/kit")
        for path in (source / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {
        "fedsurrogate/common/surrogate.proto",
        "fedsurrogate/server_app/preset_files/fedlap.toml",
        "fedsurrogate/deploy/kit/policy.toml",
    } <= wanted
    assert wanted - names == set()
    # One name in site-packages: nothing of ours can hide another package, or be hidden by one.
    assert {name.partition("/")[0] for name in names} == {
        "fedsurrogate",
        f"fedsurrogate-{own_version()}.dist-info",
        f"fedsurrogate-{own_version()}.data",
    }
    assert {name.split("/")[1] for name in names if name.count("/") > 1} & {
        "tests",
        "benchmarks",
        "docs",
        "examples",
    } == set()


def test_building_leaves_nothing_behind_and_warns_of_nothing(source: Path) -> None:
    before = {path.relative_to(source) for path in source.rglob("*")}
    words = [
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index",
        "-v",
    ]  # fmt: skip
    done = ran([*words, "-w", source.parent / "again", source], check=True)
    assert "deprecat" not in (done.stdout + done.stderr).lower()
    assert {path.relative_to(source) for path in source.rglob("*")} == before


def test_the_source_archive_can_be_set_up_tested_and_built_into_an_image(tmp_path: Path) -> None:
    """Of a clone, as a release is made: files that git ignores are no part of it."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a repository")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "sdist",
        "-d",
        tmp_path,
        folder=tmp_path / "clone",
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    tracked = ran(["git", "ls-files"], cwd=tmp_path / "clone", check=True)
    links = {f"{OWN}/{package}" for package in PACKAGES}
    assert set(tracked.stdout.splitlines()) - names == links - {f"{OWN}/{OWN}"}
    assert {"Makefile", "requirements.lock", "deploy/Dockerfile", "PKG-INFO"} <= names


def test_the_version_of_python_that_the_package_needs_is_the_one_that_is_tested() -> None:
    """No classifier promises a version of Python or a platform that no test has run on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = [
        line
        for line in project.get("classifiers", [])
        if re.search(r"Python :: 3\.\d|Operating System", line)
    ]
    assert set(promised) <= {
        "Programming Language :: Python :: 3.11",
        "Operating System :: POSIX :: Linux",
    }
    assert "Tested on Linux with Python 3.11" in README.read_text()


def test_the_package_is_imported_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = f"import {', '.join(NAMES)}, sys; print(*(sys.modules[n].__file__ for n in {NAMES!r}))"
    places = run(installed / "python", "-c", code, folder=tmp_path).split()
    assert len(places) == len(NAMES)
    assert all(Path(place).is_relative_to(installed.parent) for place in places)


def test_the_commands_run(installed: Path, tmp_path: Path) -> None:
    assert "simulate" in run(installed / "coordinator", "--help", folder=tmp_path)
    assert "join" in run(installed / "site", "--help", folder=tmp_path)
    assert "digits" in run(
        installed / "coordinator", "settings", "--preset", "all", folder=tmp_path
    )
    (tmp_path / "policy.toml").write_text("epsilon-per-run = 1.0\n")
    assert "is fine" in run(installed / "site", "policy", "policy.toml", folder=tmp_path)


def test_a_simulation_runs_and_is_drawn(installed: Path, tmp_path: Path) -> None:
    settings = 'test-fraction=0.8 head.min-steps=100 fedpft.rank=4 output-dir="runs"'
    words = ("simulate", "--engine", "local", "--sites", 2, "-c", settings, "--json")
    found = json.loads(run(installed / "coordinator", *words, folder=tmp_path))
    assert found["accuracy"]["model"] > 0.5
    assert (Path(found["folder"]) / "report.html").stat().st_size > 20_000


def test_the_app_that_flower_packs_is_complete_without_a_checkout(
    installed: Path, tmp_path: Path
) -> None:
    code = """
import shutil, subprocess, sys
from fedsurrogate.server_app.deployment.submit import APP_FOLDER, app_folder
assert not (APP_FOLDER / "pyproject.toml").exists()
with app_folder() as app:
    subprocess.run([sys.executable, "-m", "flwr.cli.app", "build", "--app", str(app)], check=True)
"""
    run(installed / "python", "-c", code, folder=tmp_path)
    (bundle,) = tmp_path.glob("*.fab")
    with zipfile.ZipFile(bundle) as content:
        packed = set(content.namelist())
    assert {
        "pyproject.toml",
        "LICENSE",
        "common/methods/method.py",
        "server_app/app.py",
        "client_app/app.py",
    } <= packed


def test_a_kit_for_a_hospital_is_packed(installed: Path, tmp_path: Path) -> None:
    run(
        installed / "coordinator",
        "sites",
        "certs",
        "pki",
        "--host",
        "localhost",
        "--site",
        "a",
        folder=tmp_path,
    )
    listed = run(
        installed / "coordinator",
        "sites",
        "kit",
        "pki",
        "a",
        "--coordinator",
        "localhost:9092",
        folder=tmp_path,
    )
    assert "policy.toml" in listed
    assert (tmp_path / "a.tar.gz").stat().st_size > 1000

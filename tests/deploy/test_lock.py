"""The lock holds what pyproject.toml asks for, at fitting versions, each file by its hash; pip and
the setup keep to it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.markers import Marker
from packaging.requirements import Requirement

from deploy import environment, lock
from tests.children import ran
from tests.deploy.test_compose import DEPLOY
from tests.deploy.wheels import wheel
from tests.documents import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = lock.read()
EXTRAS = {lock.CORE: PROJECT["dependencies"]} | PROJECT["optional-dependencies"]


def here(name: str) -> str:
    """The version of a package that the lock gives this Python; empty if none."""
    found = [
        number
        for number, marker in lock.versions_of(LOCKED.entries[name])
        if not marker or Marker(marker).evaluate()
    ]
    return found[0] if found else ""


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_lock_has_every_requirement_of_every_extra_at_a_version_that_it_allows(
    extra: str,
) -> None:
    names = LOCKED.names([extra])
    for line in EXTRAS[extra]:
        wanted = Requirement(line)
        if lock.normal(wanted.name) == "fedsurrogate":
            assert LOCKED.names(sorted(wanted.extras)) <= names
            continue
        assert lock.normal(wanted.name) in names, f"make lock: {line} is not in the lock"
        assert wanted.specifier.contains(here(lock.normal(wanted.name))), (
            f"make lock: the lock does not fit {line}"
        )


def test_the_lock_is_closed_under_what_its_packages_need() -> None:
    """By the metadata of what is installed here: nothing that a locked package needs is missing."""
    names = LOCKED.names(["dev"])
    for each in distributions():
        if lock.normal(each.name) in names and here(lock.normal(each.name)) == each.version:
            for line in each.requires or ():
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                    found = (
                        here(lock.normal(needed.name))
                        if lock.normal(needed.name) in names
                        else "nothing"
                    )
                    assert needed.specifier.contains(found), (
                        f"{each.name} needs {line}, the lock has {found}"
                    )


def test_every_file_has_a_hash_and_nothing_is_named_by_an_address() -> None:
    for name, lines in LOCKED.entries.items():
        for line in lines:
            assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", line), name
            assert "://" not in line
    assert "pylibjpeg-libjpeg" not in LOCKED.names(["dev"]), (
        "a decoder under the GPL is nobody's default"
    )
    assert all(disk > download > 100 for download, disk in LOCKED.sizes.values())


@given(st.sets(st.sampled_from(sorted(LOCKED.sets)), min_size=1))
def test_a_part_of_the_lock_has_the_packages_of_its_extras_and_no_other(extras: set[str]) -> None:
    names = LOCKED.names(extras)
    assert LOCKED.names([lock.CORE]) <= names | LOCKED.names([lock.CORE])
    text = LOCKED.part(names)
    listed = {
        lock.normal(found) for found in re.findall(r"^([A-Za-z0-9][\w.-]*)==", text, re.MULTILINE)
    }
    assert listed == names
    small = lock.without_gpu(names)
    assert not [
        name
        for name in small
        if name.startswith(("nvidia-", "cuda-", "triton")) or name in lock.TORCH
    ]
    pins = lock.torch_pins(LOCKED, names)
    assert {pin.partition("==")[0] for pin in pins} == set(lock.TORCH) & names
    # Without "+cpu", pip would take a build for GPUs from another index, and leave out its
    # libraries.
    assert all(pin.endswith("+cpu") for pin in pins)


def test_a_part_is_printed_for_a_machine_that_has_only_python(tmp_path: Path) -> None:
    """An image is built with two files and the Python of its base."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(DEPLOY / "lock.py", tmp_path / "deploy")
    shutil.copy(lock.LOCK, tmp_path)
    command = [sys.executable, "-I", "-S", str(tmp_path / "deploy" / "lock.py"), "print", "core"]
    done = ran(command, check=True)
    assert "flwr==" in done.stdout
    wrong = ran([*command, "nothing"])
    assert (wrong.returncode, "no extra nothing" in wrong.stderr) == (1, True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has no package"),
        ("a==1\n    # via b\n", "a has no hash"),
        ("# extra core: a\n", "no package"),
    ],
)
def test_a_lock_without_packages_or_hashes_is_refused(
    content: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "lock").write_text(content)
    with pytest.raises(ValueError, match=reason):
        lock.read(tmp_path / "lock")


def test_pip_refuses_a_file_that_is_not_the_locked_one(tmp_path: Path) -> None:
    (tmp_path / "x-3-py3-none-any.whl").write_bytes(b"another file")
    (tmp_path / "lock").write_text(f"x==3 --hash=sha256:{hashlib.sha256(b'x').hexdigest()}\n")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index"]
    command += ["--find-links", str(tmp_path), "--require-hashes", "--no-deps"]
    command += ["-r", str(tmp_path / "lock")]
    done = ran(command)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


def copy_scripts(root: Path) -> None:
    (root / "deploy").mkdir()
    for name in ("lock.py", "environment.py"):
        shutil.copy(DEPLOY / name, root / "deploy")


def make(tmp_path: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call the script that `make setup` calls, for an environment that is not there."""
    command = [sys.executable, str(DEPLOY / "environment.py"), str(tmp_path / "env"), *words]
    return ran(command, env={"PATH": "/usr/bin:/bin"} | variables)


def test_an_old_python_can_read_the_script() -> None:
    """Nothing newer than Python 3.8 before the check of the version, or a syntax error would be all
    that a user sees.
    """
    import ast

    ast.parse((DEPLOY / "environment.py").read_text(), feature_version=(3, 8))


@pytest.mark.parametrize("name", ["lock", "environment"])
def test_the_scripts_need_nothing_but_python_to_be_imported(name: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(DEPLOY)!r}); import {name}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


@given(st.integers(0, 99))
def test_a_lock_that_was_cut_off_is_refused(percent: int) -> None:
    """An image installs with `--no-deps`: what a damaged lock does not name would be missing
    without a word.
    """
    text = lock.LOCK.read_text()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requirements.lock"
        file.write_text(text[: len(text) * percent // 100])
        with pytest.raises(ValueError, match=r"damaged|no package|no hash"):
            lock.read(file)


# A build backend of a few lines, so that the test does not depend on one.
BUILDER = """
import os, zipfile

def build_editable(folder, settings=None, metadata=None):
    name, info = "fedsurrogate-1-py3-none-any.whl", "fedsurrogate-1.dist-info"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as out:
        out.writestr("own.pth", os.getcwd())
        out.writestr(info + "/METADATA", "Metadata-Version: 2.1\\nName: fedsurrogate\\nVersion: 1\\n")
        out.writestr(info + "/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        out.writestr(info + "/RECORD", "")
    return name
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with the real scripts and a lock of small packages that lie next to it; no network
    is needed.
    """
    root, wheels = tmp_path / "checkout", tmp_path / "wheels"
    for package in ("server_app", "client_app"):
        (root / package / "cli").mkdir(parents=True)
        (root / package / "cli" / "main.py").touch()
    (root / "fedsurrogate").mkdir()
    shutil.copy(ROOT / "fedsurrogate" / "__init__.py", root / "fedsurrogate")
    for name in ("flwr.py", "torch.py"):
        (root / name).touch()
    for name in ("common/__init__.py", "common/machine.py", "common/errors.py"):
        (root / "common").mkdir(exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    copy_scripts(root)
    wheels.mkdir()
    hashes = {
        name: wheel(wheels, name, "1", body=code)
        for name, code in (("small", ""), ("torch", ""), ("builder", BUILDER))
    }
    entries = "".join(
        f"{name}==1 \\\n    --hash=sha256:{value}\n" for name, value in sorted(hashes.items())
    )
    sizes = "".join(f"# size {kind}: 1 MB to download, 1 MB on disk\n" for kind in ("gpu", "cpu"))
    (root / "requirements.lock").write_text(
        f"# extra dev: builder small torch\n{sizes}{entries}{lock.END}"
    )
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "builder"\n'
        '[project]\nname = "fedsurrogate"\nversion = "1"\nscripts = {}\n'
    )
    return root


def refused(done: subprocess.CompletedProcess[str], why: str) -> None:
    """It ended with this reason, and no trace."""
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert why in done.stderr


def set_up(root: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Call the real script of a small project."""
    command = [sys.executable, str(root / "deploy" / "environment.py"), str(folder), *words]
    wheels = str(root.parent / "wheels")
    variables = {"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": wheels}
    return ran(command, env=variables, cwd=root)


@pytest.mark.slow
def test_a_whole_set_up_says_what_it_does_and_the_next_one_nothing(
    project: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "env"
    first = set_up(project, folder)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "3 packages at the versions of requirements.lock" in first.stdout
    assert "every version and import checked" in first.stdout
    again = set_up(project, folder)
    assert (again.returncode, again.stdout) == (0, "")
    # A package that is gone is found and mended.
    shutil.rmtree(next(folder.glob("lib/python*/site-packages/small-1.dist-info")))
    assert "Done in" in set_up(project, folder).stdout
    # So are a checkout that moved, and, at once, a set-up that was interrupted in an environment
    # without pip, as uv makes them.
    moved = project.rename(tmp_path / "moved")
    assert "Done in" in set_up(moved, folder).stdout
    assert next(folder.glob("lib/python*/site-packages/own.pth")).read_text() == str(moved)
    stamp = folder / environment.STAMP
    stamp.write_text(stamp.read_text().replace("true", "false"))
    for pip in folder.glob("lib/python*/site-packages/pip*"):
        shutil.rmtree(pip)
    assert "Done in" in set_up(moved, folder).stdout


@pytest.mark.slow
def test_a_set_up_that_does_not_work_in_the_end_is_not_taken_for_complete(
    project: Path, tmp_path: Path
) -> None:
    (project / "torch.py").write_text("raise ImportError('libcudart is missing')")
    # A link to a folder is as good as one.
    (tmp_path / "big").mkdir()
    (tmp_path / "env").symlink_to(tmp_path / "big")
    for _ in range(2):
        done = set_up(project, tmp_path / "env")
        assert done.returncode == 1
        assert "libcudart is missing" in done.stderr
    assert (tmp_path / "big" / "pyvenv.cfg").exists()


@pytest.mark.slow
def test_torch_for_processors_comes_from_an_index_that_has_it_or_not_at_all(
    project: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "env"
    for words in (("--torch", "cpu"), ()):
        # What was begun for processors goes on for them.
        done = set_up(project, folder, *words)
        assert done.returncode == 1
        assert "torch==1+cpu" in done.stderr
        assert "TORCH_INDEX" in done.stderr
    wheels = project.parent / "wheels"
    wheel(wheels, "torch", "1+cpu")
    assert "Done in" in set_up(project, folder).stdout
    assert set_up(project, folder).stdout == ""
    # Another build is asked for: it is installed in place of this one, and back.
    cpu = wheels / "torch-1+cpu-py3-none-any.whl"
    for kind, build in (("gpu", "1"), ("cpu", "1+cpu")):
        # Each build has its own index.
        cpu.unlink() if kind == "gpu" else wheel(wheels, "torch", "1+cpu")
        assert "Done in" in set_up(project, folder, "--torch", kind).stdout
        (found,) = folder.glob("lib/python*/site-packages/torch-*.dist-info")
        assert found.name == f"torch-{build}.dist-info"


@pytest.mark.parametrize("content", ["requirements.txt", "bin/python"])
def test_a_folder_that_is_no_environment_stays_as_it_is(
    content: str, project: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine" / content
    mine.parent.mkdir(parents=True)
    mine.write_text("my own")
    done = set_up(project, tmp_path / "mine")
    refused(done, "is not empty, and no Python environment")
    assert [path for path in (tmp_path / "mine").rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "my own"

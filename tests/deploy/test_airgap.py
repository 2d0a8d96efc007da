"""The archive for machines without internet: packed, checked and installed with the network cut."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from deploy import airgap, airgap_docs
from fedsurrogate.common import extras
from tests.children import ok, ran, refused
from tests.deploy.test_compose import DEPLOY, ROOT
from tests.deploy.wheels import wheel

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
# As sites are: no network but the loopback, and that is down.
CUT = ["unshare", "--net", "--map-root-user"]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an archive of two small packages, of which one has the commands, and its key."""
    folder = tmp_path_factory.mktemp("airgap") / "pack" / "archive"
    (folder / "wheels").mkdir(parents=True)
    commands = "site = fedsurrogate:main\ncoordinator = fedsurrogate:main"
    prints = "def main():\n    print('fedsurrogate 1.0')\n"
    wheel(folder / "wheels", "fedsurrogate", needs="helper", script=commands, body=prints)
    wheel(folder / "wheels", "helper", body="\n")
    airgap.finish(folder, folder.parent / "release.key")
    return folder.parent


@pytest.fixture
def packed(pack: Path, tmp_path: Path) -> Path:
    """A copy of the archive that a test may change."""
    shutil.copytree(pack, tmp_path / "pack")
    (archive,) = (tmp_path / "pack").glob("archive.*")
    return archive


@pytest.fixture
def received(packed: Path, tmp_path: Path) -> Path:
    """The archive, unpacked at the other side."""
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "there", filter="data")
    shutil.copy(packed.parent / "release.pub", tmp_path / "there")
    return tmp_path / "there" / "archive"


def install(
    place: Path, *words: str, cut: bool = True, python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Type the command of the README, where no index can be reached."""
    isolated = (
        cut and subprocess.run([*CUT, "true"], capture_output=True, check=False).returncode == 0
    )
    if cut and not isolated:
        pytest.skip("needs a network namespace: unshare")
    command = [*(CUT if cut else []), "sh", "install.sh", "--key", "../release.pub", *words]
    known = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return ran(command, cwd=place, env=known | {"PYTHON": str(python)})


def test_an_archive_installs_with_the_network_cut(received: Path, tmp_path: Path) -> None:
    done = ok(install(received, "--into", str(tmp_path / "env")))
    assert "installing 2 packages, 0.0 GB on disk" in done.stdout
    typed = ran([tmp_path / "env" / "bin" / "coordinator"], check=True, env={})
    assert typed.stdout == "fedsurrogate 1.0\n"
    refused(install(received, "--into", str(tmp_path / "env")), "exists")


def test_wheels_of_another_python_are_named_before_an_environment_is_made(
    packed: Path, tmp_path: Path
) -> None:
    folder = packed.with_suffix("")
    whole = folder / "wheels" / "helper-1.0-py3-none-any.whl"
    whole.rename(whole.with_name("helper-1.0-cp399-cp399-linux_x86_64.whl"))
    airgap.write_sums(folder)
    airgap.sign(folder, packed.parent / "release.key")
    refused(install(folder, "--into", str(tmp_path / "env"), cut=False), "the wheels are for cp399")
    assert not (tmp_path / "env").exists()


@pytest.mark.slow
def test_backbones_that_cannot_be_loaded_are_found_at_the_installation(tmp_path: Path) -> None:
    """As torchvision of another build than torch: pip finds nothing wrong."""
    folder = tmp_path / "archive"
    (folder / "wheels").mkdir(parents=True)
    own = {"needs": "torchvision", "script": "site = fedsurrogate:main"}
    wheel(folder / "wheels", "fedsurrogate", body="\n", **own)
    wheel(folder / "wheels", "torchvision", body="raise RuntimeError('no operator nms')")
    airgap.finish(folder, tmp_path / "release.key")
    refused(install(folder, "--into", str(tmp_path / "env"), cut=False), "not of one build")
    assert not (tmp_path / "env").exists()


BUILDS = ("", "+cpu", "+cu126")


@pytest.mark.parametrize("torch", BUILDS)
@pytest.mark.parametrize("vision", BUILDS)
def test_torch_and_torchvision_are_packed_of_one_build_only(
    tmp_path: Path, torch: str, vision: str
) -> None:
    for name, build in (("torch", torch), ("torchvision", vision)):
        with zipfile.ZipFile(tmp_path / f"{name}-2.0-py3-none-any.whl", "w") as content:
            content.writestr(f"{name}/version.py", f"__version__ = '2.0{build}'\n")
    if torch == vision:
        airgap.check_builds(tmp_path)
    else:
        with pytest.raises(SystemExit, match="of one build"):
            airgap.check_builds(tmp_path)


def test_the_archive_lists_its_software_with_licences(received: Path) -> None:
    found = json.loads((received / "sbom.cdx.json").read_text())
    assert found["metadata"]["component"]["purl"] == "pkg:pypi/fedsurrogate@1.0"
    assert [each["purl"] for each in found["components"]] == ["pkg:pypi/helper@1.0"]
    assert found["dependencies"][0]["dependsOn"] == ["pkg:pypi/helper@1.0"]
    assert (received / "licences" / "helper-1.0" / "LICENSE.txt").read_text() == "MIT"
    assert not list(received.rglob("*.key")), "the private key stays"


def changed(place: Path, what: str) -> None:
    """Do to the archive what an attacker on its way could."""
    target = place / "wheels" / "helper-1.0-py3-none-any.whl"
    if what == "wheel":
        target.write_bytes(target.read_bytes() + b"\0")
    elif what == "wheel and sums":
        target.write_bytes(target.read_bytes() + b"\0")
        airgap.write_sums(place)
    elif what == "added":
        (place / "wheels" / "helper-2.0-py3-none-any.whl").touch()
    elif what == "link":
        (place / "docs").symlink_to("/etc")
    elif what == "removed":
        target.unlink()
    elif what == "signed by another":
        airgap.sign(place, place.parent / "other.key")
    elif what == "no signature":
        (place / "SHA256SUMS.sig").unlink()


@pytest.mark.parametrize(
    "what",
    ["wheel", "wheel and sums", "added", "link", "removed", "signed by another", "no signature"],
)
def test_an_archive_that_was_changed_is_not_used(received: Path, tmp_path: Path, what: str) -> None:
    assert install(received, "--check", cut=False).returncode == 0
    changed(received, what)
    refused(
        install(received, "--into", str(tmp_path / "env"), cut=False), "Do not use this archive"
    )
    assert not (tmp_path / "env").exists()


def test_a_key_that_came_with_the_archive_proves_nothing(received: Path) -> None:
    shutil.copy(received.parent / "release.pub", received / "release.pub")
    refused(
        ran(["sh", "install.sh", "--key", "release.pub", "--check"], cwd=received),
        "another channel",
    )


def test_all_that_is_copied_is_there_and_the_other_side_has_what_its_readme_names() -> None:
    for each in airgap.COPIED:
        assert (ROOT / each).exists(), each
    text = (DEPLOY / "airgap.md").read_text()
    for name in ("deploy/kit/README.md", "deploy/cluster", "docs/deployment/connections.md"):
        assert name in text
        assert name.startswith(airgap.COPIED)


def test_every_link_of_the_copied_documentation_leads_to_a_file_of_the_archive(
    tmp_path: Path,
) -> None:
    for each in airgap.COPIED:
        airgap.copy(ROOT / each, tmp_path / each)
    before = {target for target, _ in airgap_docs.dead_links(tmp_path)}
    assert "pyproject.toml" in before, "what links of a clone name in place of a generated page"
    airgap_docs.complete(tmp_path)
    assert not list(airgap_docs.dead_links(tmp_path))
    assert before <= {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*")}
    assert "head.epochs" in (tmp_path / "docs" / "reference" / "settings.md").read_text()


@pytest.mark.parametrize("link", ["gone.md", "../../outside.md", "/etc/hostname", "docs/none/"])
def test_a_link_that_leads_to_nothing_ends_the_packing(tmp_path: Path, link: str) -> None:
    folder = tmp_path / "archive"
    (folder / "docs").mkdir(parents=True)
    (tmp_path / "outside.md").write_text("not of the checkout")
    (folder / "docs" / "page.md").write_text(f"See [this]({link}), and [that](https://a.org/b.md).")
    with pytest.raises(SystemExit, match=Path(link).name):
        airgap_docs.complete(folder)


@pytest.mark.slow
def test_an_installed_archive_names_the_command_that_packs_what_is_missing(
    received: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for pip cannot be followed without an index."""
    (received / airgap.PACKED).write_text("image backbones\n")
    airgap.write_sums(received)
    airgap.sign(received, tmp_path / "pack" / "release.key")
    assert install(received, "--into", str(tmp_path / "env"), cut=False).returncode == 0
    assert "pip install" in extras.install_command("simulation")
    monkeypatch.setattr(extras, "PACKED", tmp_path / "env" / extras.PACKED.name)
    printed = extras.install_command("simulation")
    assert "pip" not in printed
    words = shlex.split(printed)[:3]
    assert words == ["make", "airgap", "EXTRAS=image backbones simulation"]
    typed = ran(["make", "-n", "-o", "setup", *words[1:]], cwd=ROOT, check=True)
    assert "--extras image backbones simulation" in typed.stdout


@pytest.mark.parametrize("script", ["install.sh", "demo.sh", "cluster/site.sbatch"])
def test_scripts_have_the_syntax_of_their_shell(script: str) -> None:
    file = DEPLOY / script
    shell = "bash" if "bash" in file.read_text().splitlines()[0] else "sh"
    assert subprocess.run([shell, "-n", str(file)], check=False).returncode == 0
    if shutil.which("shellcheck"):
        ok(ran(["shellcheck", "--severity=error", str(file)]))

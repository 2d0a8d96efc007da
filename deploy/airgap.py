"""Pack all that a machine without internet needs into one signed archive: `make airgap`.

    python3 deploy/airgap.py build/airgap --key release.key    # wheels of the lock, for processors
    python3 deploy/airgap.py build/airgap --key release.key --image fedsurrogate    # and an image

The archive has wheels with their hashes, the list of software (SBOM) and its licences, the compose
files, the chart, the documentation, and with Docker or Podman the image and its base. `install.sh` in
it checks the signature and every file, and installs without a network. The private key stays here;
hospitals need its public half, over another channel than the archive.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from deploy import airgap_docs, lock, sbom  # noqa: E402

EXTRAS = ("image", "backbones")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Of the checkout: what a hospital and a coordinator use besides the program.
COPIED = (
    "deploy/compose.coordinator.yml", "deploy/compose.hospital.yml", "deploy/compose.gpu.yml",
    "deploy/compose.monitoring.yml", "deploy/monitoring", "deploy/kit", "deploy/helm",
    "deploy/cluster", "deploy/README.md", "docs", "README.md", "LICENSE", "CHANGELOG.md",
    "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md",
)  # fmt: skip
SUMS, SIGNATURE, REQUIREMENTS = "SHA256SUMS", "SHA256SUMS.sig", "requirements.txt"
# Names of the extras, which an installation shows where a package is missing.
PACKED = "packed-extras.txt"
LICENCE_NAMES = ("license", "licence", "copying", "notice", "authors")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the folder to make; the archive is next to it")
    parser.add_argument(
        "--key", type=Path, required=True, help="signs; it is made if it is not there"
    )
    parser.add_argument("--extras", nargs="+", default=list(EXTRAS), metavar="EXTRA")
    parser.add_argument("--torch", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--torch-index", default=TORCH_INDEX, metavar="URL")
    parser.add_argument(
        "--torch-pins", nargs="+", default=[], metavar="PIN",
        help="in place of torch and torchvision at the lock's versions, such as torch==2.13.0+cpu",
    )  # fmt: skip
    parser.add_argument("--image", default="", help="an image of Docker or Podman to pack as well")
    parser.add_argument("--base", default="", help="its base image, for builds at the other side")
    asked = parser.parse_args(arguments)
    if asked.out.exists():
        sys.exit(f"{asked.out} exists; name another folder, or remove it")
    wheels = asked.out / "wheels"
    wheels.mkdir(parents=True)
    try:
        wanted = lock.read().names(asked.extras)
    except ValueError as error:
        sys.exit(str(error))
    print(f"collecting {len(wanted)} packages; with torch for {asked.torch}", flush=True)
    pins = asked.torch_pins or lock.torch_pins(lock.read(), wanted)
    fetch(wheels, wanted, pins if asked.torch == "cpu" else (), asked.torch_index)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT))
    images = asked.out / "images"
    for name in filter(None, (asked.image, asked.base)):
        save_image(name, images)
    for each in COPIED:
        copy(ROOT / each, asked.out / each)
    airgap_docs.complete(asked.out)
    (asked.out / PACKED).write_text(" ".join(asked.extras) + "\n")
    check_builds(wheels)
    archive = finish(asked.out, asked.key)
    size = archive.stat().st_size / 1e6
    print(f"{archive}: {size:,.0f} MB, {len(list(wheels.iterdir()))} wheels", end="")
    print(f", images: {', '.join(each.name for each in sorted(images.glob('*'))) or 'none'}")
    print(f"give {public_key(asked.key)} to each hospital, over another channel than the archive")


def fetch(wheels: Path, names: frozenset[str], torch: Sequence[str], index: str) -> None:
    """Download the wheels of the lock, each by its hash.

    Args:
        wheels: the folder.
        names: of the packages.
        torch: builds of torch for processors, which the lock has no hash of; empty: those of the lock.
        index: that has them.
    """
    locked = lock.read()
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "lines.txt")
        lines.write_text(locked.part(lock.without_gpu(names) if torch else names))
        common = ("download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels))
        # First, because not every index has them, and all the others take minutes.
        if torch:
            _pip(*common, "--extra-index-url", index, *torch)
        _pip(*common, "--require-hashes", "-r", str(lines))


def check_builds(wheels: Path) -> None:
    """End unless torch and torchvision are of one build: with another, no backbone loads.

    A wheel for GPUs often has no build in its name, as on the ordinary index.
    """
    builds = {}
    for name in ("torch", "torchvision"):
        for wheel in wheels.glob(f"{name}-*.whl"):
            with zipfile.ZipFile(wheel) as content:
                text = content.read(f"{name}/version.py").decode()
            found = re.search(r"__version__(?:: str)? = ['\"][^'\"+]*\+?([^'\"]*)", text)
            builds[wheel.name] = found[1] if found else ""
    if len(set(builds.values())) > 1:
        named = ", ".join(f"{name} is {build or 'of none'}" for name, build in builds.items())
        sys.exit(
            f"torch and torchvision must be of one build, and here {named}; "
            "name both with --torch-pins, such as torch==2.13.0+cpu torchvision==0.28.0+cpu"
        )


def finish(folder: Path, key: Path) -> Path:
    """Add requirements, list of software, licences, README, sums and signature; make the archive.

    Args:
        folder: with wheels/ and whatever else belongs to it.
        key: PEM file of an elliptic-curve private key; made if it is not there.

    Returns:
        The archive, next to the folder.
    """
    shutil.copy(ROOT / "deploy" / "install.sh", folder / "install.sh")
    shutil.copy(ROOT / "deploy" / "airgap.md", folder / "README-FIRST.md")
    wheels = sorted((folder / "wheels").glob("*.whl"))
    head = f"# on disk: {unpacked_size(wheels) / 1e9:.1f} GB\n"
    (folder / REQUIREMENTS).write_text(head + "".join(map(requirement, wheels)))
    with tempfile.TemporaryDirectory() as unpacked:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as content:
                _unpack_facts(content, Path(unpacked))
        found = list(distributions(path=[unpacked]))
        (folder / "sbom.cdx.json").write_text(
            json.dumps(sbom.bom(Path("none"), found), indent=1) + "\n"
        )
        for package in found:
            _copy_licences(package, folder / "licences")
    write_sums(folder)
    sign(folder, key)
    archive = folder.with_name(f"{folder.name}.tar")
    with tarfile.open(archive, "w") as packed:
        packed.add(folder, folder.name)
    return archive


def requirement(wheel: Path) -> str:
    """The line that installs this file and no other."""
    name, version = wheel.name.split("-")[:2]
    return f"{lock.normal(name)}=={version} --hash=sha256:{_digest(wheel)}\n"


def unpacked_size(wheels: Iterable[Path]) -> int:
    """Bytes of all files in the wheels."""
    total = 0
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as content:
            total += sum(each.file_size for each in content.infolist())
    return total


def write_sums(folder: Path) -> None:
    """The hash of every file, as `sha256sum --check` reads it."""
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    lines = [
        f"{_digest(each)}  ./{each.relative_to(folder)}\n"
        for each in files
        if each.name not in (SUMS, SIGNATURE) or each.parent != folder
    ]
    (folder / SUMS).write_text("".join(lines))


def sign(folder: Path, key: Path) -> None:
    """Sign the sums, so that `openssl` alone can check them."""
    if not key.exists():
        key.touch(0o600)
        _openssl("genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out", str(key))
        print(f"made {key}: keep it, and copy it to no other machine")
    _openssl("pkey -pubout -in", str(key), "-out", str(public_key(key)))
    signature = str(folder / SIGNATURE)
    _openssl("dgst -sha256 -sign", str(key), "-out", signature, str(folder / SUMS))


def public_key(key: Path) -> Path:
    """The file of the public half, next to the private one."""
    return key.with_suffix(".pub")


def copy(source: Path, target: Path) -> None:
    """Copy a file or a folder, without what Python compiled."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "data"))
    else:
        shutil.copy(source, target)


def save_image(name: str, folder: Path) -> None:
    """Save an image of the engine that runs here."""
    for engine in filter(shutil.which, ("docker", "podman")):
        if not _run(engine, "image", "inspect", name).returncode:
            folder.mkdir(exist_ok=True)
            file = folder / f"{name.replace('/', '-').replace(':', '-')}.tar"
            if _run(engine, "save", "--output", str(file), name).returncode:
                sys.exit(f"{engine} could not save the image {name}")
            return
    sys.exit(f"no engine here has the image {name}: docker build -f deploy/Dockerfile -t {name} .")


def _unpack_facts(wheel: zipfile.ZipFile, folder: Path) -> None:
    """Unpack what a wheel says of itself, which names its needs and has its licences."""
    for name in wheel.namelist():
        if name.partition("/")[0].endswith(".dist-info") and ".." not in name.split("/"):
            wheel.extract(name, folder)


def _copy_licences(package: Distribution, folder: Path) -> None:
    root = Path(str(package.locate_file("")))
    target = folder / f"{lock.normal(package.name)}-{package.version}"
    for path in root.glob(f"{package.name.replace('-', '_')}-*.dist-info/**/*"):
        if path.is_file() and path.name.lower().startswith(LICENCE_NAMES):
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / path.name)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", words[0], "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*command, *words[1:]], check=False).returncode:
        sys.exit(
            "pip failed; its reason stands above. It reads PIP_INDEX_URL, PIP_FIND_LINKS, PIP_CERT and "
            "HTTPS_PROXY. --torch-index names an index with builds of torch for processors, and "
            "--torch-pins other versions of them: make airgap TORCH_INDEX=URL TORCH_PINS='torch==...'"
        )


def _openssl(command: str, *words: str) -> None:
    done = _run("openssl", *command.split(), *words)
    if done.returncode:
        sys.exit(f"openssl {command.split()[0]} failed: {done.stderr.strip()}")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()

"""The list of software of an image, and the lock of its dependencies by hash."""

import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_compose import DEPLOY

STATUS = """Package: zlib1g
Status: install ok installed
Architecture: amd64
Version: 1:1.2.13

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""


def printed(script: str, *words: object) -> str:
    command = [sys.executable, str(DEPLOY / script), *map(str, words)]
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def bom(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    status = tmp_path_factory.mktemp("dpkg") / "status"
    status.write_text(STATUS)
    first, second = (printed("sbom.py", status) for _ in range(2))
    assert first == second
    return dict(json.loads(first))


def test_the_list_has_every_package_with_its_version_and_the_debian_ones(bom: dict[str, Any]) -> None:
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.5")
    versions = {each["name"]: each["version"] for each in bom["components"]}
    assert {name: versions[name] for name in ("flwr", "torch", "pydantic", "cryptography")} == {
        name: version(name) for name in ("flwr", "torch", "pydantic", "cryptography")
    }
    assert versions["zlib1g"] == "1:1.2.13"
    assert "gone" not in versions
    assert all(each["purl"].startswith(("pkg:pypi/", "pkg:deb/")) for each in bom["components"])


def test_every_reference_in_the_list_is_one_of_its_components(bom: dict[str, Any]) -> None:
    references = [each["bom-ref"] for each in [*bom["components"], bom["metadata"]["component"]] if "bom-ref" in each]
    assert len(set(references)) == len(references)
    for each in bom["dependencies"]:
        assert {each["ref"], *each["dependsOn"]} <= set(references)
    flower = next(each for each in bom["dependencies"] if each["ref"].startswith("pkg:pypi/flwr@"))
    assert any(needed.startswith("pkg:pypi/grpcio@") for needed in flower["dependsOn"])


def test_a_lock_has_the_hash_of_every_wheel_and_pip_reads_it(tmp_path: Path) -> None:
    wheels = {"Some_Package-1.2-py3-none-any.whl": b"one", "some.package-1.2-cp311-linux.whl": b"two", "x-3-py3.whl": b"x"}
    for name, content in wheels.items():
        (tmp_path / name).write_bytes(content)
    some, other = printed("lock.py", tmp_path).splitlines()
    assert some.startswith("some-package==1.2 --hash=sha256:")
    assert all(hashlib.sha256(content).hexdigest() in some for content in (b"one", b"two"))
    assert other == f"x==3 --hash=sha256:{hashlib.sha256(b'x').hexdigest()}"
    (tmp_path / "x-4-py3.whl").write_bytes(b"y")
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "lock.py"), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "several versions of x" in done.stderr


def test_pip_refuses_a_wheel_that_is_not_the_locked_one(tmp_path: Path) -> None:
    (tmp_path / "x-3-py3-none-any.whl").write_bytes(b"another file")
    (tmp_path / "lock").write_text(f"x==3 --hash=sha256:{hashlib.sha256(b'x').hexdigest()}\n")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--find-links", str(tmp_path)]
    command += ["--require-hashes", "--no-deps", "-r", str(tmp_path / "lock")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_an_image_has_its_labels_and_its_list() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert "org.opencontainers.image.version=${VERSION}" in text
    assert "sbom.py > /opt/fedsurrogate/sbom.cdx.json" in text
    assert "--require-hashes" in text

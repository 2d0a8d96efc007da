"""The list of software of an image."""

import json
import os
import sys
from importlib.metadata import version
from typing import Any

import pytest

from tests.children import ran
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
    return ran(command, env=environment, check=True).stdout


@pytest.fixture(scope="module")
def bom(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    status = tmp_path_factory.mktemp("dpkg") / "status"
    status.write_text(STATUS)
    first, second = (printed("sbom.py", status) for _ in range(2))
    assert first == second
    return dict(json.loads(first))


def test_the_list_has_every_package_with_its_version_and_the_debian_ones(
    bom: dict[str, Any],
) -> None:
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.5")
    versions = {each["name"]: each["version"] for each in bom["components"]}
    assert {name: versions[name] for name in ("flwr", "torch", "pydantic", "cryptography")} == {
        name: version(name) for name in ("flwr", "torch", "pydantic", "cryptography")
    }
    assert versions["zlib1g"] == "1:1.2.13"
    assert "gone" not in versions
    assert all(each["purl"].startswith(("pkg:pypi/", "pkg:deb/")) for each in bom["components"])


def test_every_reference_in_the_list_is_one_of_its_components(bom: dict[str, Any]) -> None:
    references = [
        each["bom-ref"]
        for each in [*bom["components"], bom["metadata"]["component"]]
        if "bom-ref" in each
    ]
    assert len(set(references)) == len(references)
    for each in bom["dependencies"]:
        assert {each["ref"], *each["dependsOn"]} <= set(references)
    flower = next(each for each in bom["dependencies"] if each["ref"].startswith("pkg:pypi/flwr@"))
    assert any(needed.startswith("pkg:pypi/grpcio@") for needed in flower["dependsOn"])


def test_an_image_has_its_labels_and_its_list() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert "org.opencontainers.image.version=${VERSION}" in text
    assert "sbom.py > /opt/fedsurrogate/sbom.cdx.json" in text
    assert "--require-hashes" in text

"""Print all software of this environment (SBOM) as CycloneDX 1.5 JSON: Python packages, and
Debian's if there are any.

Uses the standard library only. Usage: python sbom.py [dpkg status file]. The same environment
always gives the same bytes; with SOURCE_DATE_EPOCH set, also the same time.
"""

import json
import os
import re
import sys
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

DPKG = Path("/var/lib/dpkg/status")
MAIN = "fedsurrogate"


def python_packages(
    packages: Iterable[Distribution],
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Each of these Python packages as a component, and the references of the packages that it
    requires.
    """
    installed = {_plain(each.name): each for each in packages if each.name}
    references = {name: f"pkg:pypi/{name}@{each.version}" for name, each in installed.items()}
    for name in sorted(installed):
        kind = "application" if name == MAIN else "library"
        component = _component(kind, name, installed[name].version, references[name])
        if text := _licence(installed[name]):
            component["licenses"] = [{"license": {"name": text}}]
        needed = {
            _plain(re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0])
            for line in installed[name].requires or ()
        }
        yield component, sorted(references[each] for each in needed if each in references)


def debian_packages(status: Path) -> Iterator[dict[str, Any]]:
    """Each installed package of Debian as a component."""
    if not status.is_file():
        return
    for entry in status.read_text(errors="replace").split("\n\n"):
        fields = dict(
            re.findall(r"^(Package|Version|Status|Architecture): (.*)$", entry, re.MULTILINE)
        )
        if fields.get("Status", "").endswith(" installed"):
            purl = f"pkg:deb/debian/{fields['Package']}@{fields['Version']}?arch={fields['Architecture']}"
            yield _component("library", fields["Package"], fields["Version"], purl)


def _component(kind: str, name: str, version: str, purl: str) -> dict[str, Any]:
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}


def bom(status: Path = DPKG, packages: Iterable[Distribution] | None = None) -> dict[str, Any]:
    """The whole document: of this environment, or of other packages."""
    found = list(python_packages(distributions() if packages is None else packages))
    components = [component for component, _ in found] + sorted(
        debian_packages(status), key=lambda each: str(each["purl"])
    )
    main = next(
        (each for each in components if each["name"] == MAIN), {"type": "application", "name": MAIN}
    )
    moment = int(os.environ.get("SOURCE_DATE_EPOCH") or datetime.now(UTC).timestamp())
    identity = json.dumps([each["purl"] for each in components])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, identity)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": main,
        },
        "components": [each for each in components if each is not main],
        "dependencies": [
            {"ref": component["bom-ref"], "dependsOn": needed} for component, needed in found
        ],
    }


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _licence(package: Distribution) -> str:
    """The license in one line, if the package states it so."""
    named = str(package.metadata.get("License-Expression") or package.metadata.get("License") or "")
    if named and "\n" not in named and len(named) <= 80:
        return named
    kinds = [
        str(each)
        for each in package.metadata.get_all("Classifier") or ()
        if str(each).startswith("License ::")
    ]
    return kinds[0].rpartition(" :: ")[2] if kinds else ""


if __name__ == "__main__":
    json.dump(bom(*map(Path, sys.argv[1:2])), sys.stdout, indent=1)
    print()

"""Wheels of one module, for tests that install without a network."""

import hashlib
import zipfile
from pathlib import Path


def wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    needs: str = "",
    script: str = "",
    body: str = "",
) -> str:
    """Write a wheel, with its licence; return its hash. script: an entry point. body: of its module."""
    info = f"{name}-{version}.dist-info"
    facts = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense: MIT\n"
    facts += f"Requires-Dist: {needs}\n" if needs else ""
    files = {
        f"{name}.py": body,
        f"{info}/METADATA": facts,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/licenses/LICENSE.txt": "MIT",
        f"{info}/entry_points.txt": f"[console_scripts]\n{script}\n" if script else "",
    }
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as content:
        for place, text in files.items():
            if text:
                content.writestr(place, text)
        content.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(file.read_bytes()).hexdigest()

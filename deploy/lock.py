"""Print a requirements file with the SHA-256 of every wheel in a folder, for `pip install --require-hashes`.

Needs no network. After `pip download -d deploy/wheels`: python deploy/lock.py deploy/wheels > deploy/requirements.lock
"""

import hashlib
import re
import sys
from pathlib import Path


def lines(folder: Path) -> list[str]:
    """One line for each package; several wheels of a package and version, for several platforms, share it."""
    found: dict[str, set[str]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        found.setdefault(f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}", set()).add(digest)
    names = [key.partition("==")[0] for key in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        sys.exit(f"{folder} has several versions of {', '.join(twice)}; keep one of each")
    return [f"{key} {' '.join(f'--hash=sha256:{digest}' for digest in sorted(found[key]))}" for key in sorted(found)]


if __name__ == "__main__":
    print("\n".join(lines(Path(sys.argv[1]))))

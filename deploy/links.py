"""A folder of links to the code of a checkout, laid out as an installation has it.

For tools that read code without running it, such as mypy and mkdocstrings:
`fedsurrogate/__init__.py` finds the rooms next to it only when it runs.

    python3 deploy/links.py      # makes build/linked/
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINKED = ROOT / "build" / "linked"
ROOMS = ("common", "client_app", "server_app", "strategies")


def link() -> None:
    """Make the folder anew."""
    shutil.rmtree(LINKED, ignore_errors=True)
    package = LINKED / "fedsurrogate"
    package.mkdir(parents=True)
    for path in (*(ROOT / "fedsurrogate").glob("*.py"), *(ROOT / room for room in ROOMS)):
        (package / path.name).symlink_to(path)


if __name__ == "__main__":
    link()

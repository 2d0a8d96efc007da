"""Which software is installed, so that a running process notices an upgrade."""

from __future__ import annotations

import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).parents[2]


def installed() -> tuple[int, ...]:
    """Numbers that change when packages are installed, and when a file of this one changes.

    Installing or removing a package changes the folder of all packages.
    """
    folders = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    own = [
        each.stat() for room in ("common", "client_app") for each in (PACKAGE / room).rglob("*.py")
    ]
    return (
        *(folder.stat().st_mtime_ns for folder in folders if folder.is_dir()),
        len(own),
        max(each.st_mtime_ns for each in own),
        sum(each.st_size for each in own),
    )

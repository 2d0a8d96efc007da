"""Files that survive a kill and a loss of power: written whole, flushed, and put in their place in one step."""

from __future__ import annotations

import os
from pathlib import Path


def put_file(file: Path, content: bytes) -> None:
    """Write a whole file and flush it; until it is on the disk the old one stays in its place. Raises OSError."""
    temporary = file.with_name(f"{file.name}.new")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

"""Atomic and durable file writes: a file survives a kill or a power failure whole."""

from __future__ import annotations

import os
from pathlib import Path


def put_file(file: Path, content: bytes) -> None:
    """Write and flush a whole file, then replace the old one atomically. Raises OSError."""
    temporary = file.with_name(f"{file.name}.new")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    put_in_place(temporary, file)


def put_in_place(temporary: Path, file: Path) -> None:
    """Rename a flushed file in its folder, and flush the folder. Raises OSError."""
    temporary.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

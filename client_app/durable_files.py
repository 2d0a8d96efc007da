"""Atomic and durable file writes: a file survives a kill or a power failure whole. Secrets of a site."""

from __future__ import annotations

import os
import secrets
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


def kept_secret(file: Path, size: int) -> bytes:
    """The secret in a file: `size` random bytes, made when first needed. Only its owner may read it. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        # Written to another file and linked: two processes at once agree on one secret, and none reads half of it.
        aside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(secrets.token_bytes(size))
        try:
            os.link(aside, file)
        except FileExistsError:
            pass
        finally:
            aside.unlink()
    return file.read_bytes()

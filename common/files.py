"""The one way to replace a file: whole, at once, and after a power failure too. Secrets that are
made once. JSON of a run folder.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from .errors import RunError

# Mode of files that only the account that runs the program may read.
OWNER_ONLY = 0o600
# Mode of files that others may read, as far as the process's umask lets them.
READABLE = 0o666

_lock, _umasks = Lock(), list[int]()


def replace_file(
    file: Path, content: bytes | str, *, mode: int = OWNER_ONLY, durable: bool = True
) -> None:
    """Write a whole file, then put it in the place of the old one: a reader sees the old content or
    the new one.

    Args:
        file: the file; its folder is made if it is missing.
        content: all of it; text is written as UTF-8.
        mode: permissions, from which the process's umask is removed.
        durable: whether the file is there after a power failure, too. Costs two waits for the disk.

    Raises:
        OSError: the file could not be written. The old one is as it was, and nothing else is left;
            except when the disk does not confirm the new name, after which the file may have either
            content.

    A symbolic link is replaced, not followed.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     replace_file(Path(folder) / "x", "new")
        ...     (Path(folder) / "x").read_text(), [each.name for each in Path(folder).iterdir()]
        ('new', ['x'])
    """
    temporary = stage_file(file, content, mode=mode, durable=durable)
    try:
        put_in_place(temporary, file, durable=durable)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def stage_file(
    file: Path, content: bytes | str, *, mode: int = OWNER_ONLY, durable: bool = True
) -> Path:
    """Write a temporary file in the folder of `file`, for `put_in_place`. Arguments and errors as
    for `replace_file`.

    Returns:
        The temporary file. Its name is new, so that several processes do not disturb each other.
    """
    _make_folder(file.parent, durable)
    temporary = _temporary(file)
    try:
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb"
        ) as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


@contextmanager
def owner_only() -> Iterator[None]:
    """Files and folders that this process makes meanwhile are for its own account alone, whatever
    its umask was, and also those of a library that gives no mode. For programs of a site.

    Threads may enter and leave in any order: the last one restores the umask.
    """
    with _lock:
        _umasks.append(os.umask(0o077))
    try:
        yield
    finally:
        with _lock:
            os.umask(_umasks.pop())


def put_in_place(temporary: Path, file: Path, *, durable: bool = True) -> None:
    """Rename a file within its folder; durable: also after a power failure. Raises OSError."""
    if not durable:
        temporary.replace(file)
        return
    # Opened before: a folder that cannot be flushed is an error while the old file is there.
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        temporary.replace(file)
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def replacing(file: Path, *, mode: int) -> Iterator[Path]:
    """The same for content that a library writes by name: yields a temporary file, which replaces
    `file` at the end.

    Args:
        file: as for `replace_file`.
        mode: permissions of the file, exactly; libraries differ in what they give.
    """
    temporary = _temporary(file)
    # Not readable by others while it is written, whatever mode the library would give.
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY))
    try:
        yield temporary
        _flush(temporary)
        temporary.chmod(mode)
        put_in_place(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def create_file(file: Path, content: bytes, *, mode: int = OWNER_ONLY) -> bool:
    """Write a new file as a whole; one that exists stays as it is, also if another process makes it
    at the same time.

    Args:
        file: as for `replace_file`.
        content: as for `replace_file`.
        mode: as for `replace_file`.

    Returns:
        Whether the file was made. Raises OSError.
    """
    temporary = stage_file(file, content, mode=mode)
    try:
        # Linked, not renamed: a rename would replace what is there.
        os.link(temporary, file)
        return True
    except FileExistsError:
        return False
    finally:
        temporary.unlink()


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read one of a run's JSON files.

    Args:
        folder: a run folder.
        name: of the file.

    Returns:
        The JSON object in the file. Its texts are as they stand in the file.

    Raises:
        RunError: the file is missing, cannot be read or is not a JSON object.
    """
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = f"{name} cannot be read ({type(error).__name__})"
        raise RunError(f"{folder} is not a run folder: {why}") from None
    if not isinstance(content, dict):
        raise RunError(f"{folder / name} is not a JSON object")
    return content


def kept_secret(file: Path, size: int) -> bytes:
    """The secret in a file: `size` random bytes, made when first needed. Only its owner may read
    it. Raises OSError.
    """
    if not file.exists():
        create_file(file, secrets.token_bytes(size))
    return file.read_bytes()


def _make_folder(folder: Path, durable: bool) -> None:
    """Make a folder and those above it; durable: their names are on the disk, too."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing if durable else ():
        _flush(each.parent)


def _temporary(file: Path) -> Path:
    return file.with_name(f".{file.name}.{secrets.token_hex(4)}")


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

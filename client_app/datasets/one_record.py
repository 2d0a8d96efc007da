"""Work on one record: whatever it raises concerns this record alone."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
# Longest description of an error in a log.
LONGEST = 500
# Work on one record may contain work on it.
_alone = threading.RLock()


def ends_process(error: BaseException) -> bool:
    """Whether an error ends this process, and is not about a record.

    That is Ctrl-C, and SystemExit that Flower raises on a signal. A SystemExit of a library is an
    ordinary failure of the record that it works on, and so is a panic of a library in Rust, which
    is a BaseException.

    Args:
        error: that was raised.
    """
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else str(place.tb_frame.f_globals.get("__name__"))
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemExit) and where.startswith("flwr.")
    )


def attempt(work: Callable[[], T]) -> T | BaseException:
    """The result of work on one record, or what it raised.

    Where memory runs out, other threads may hold it for other records: so the work is done once
    more, at a time when no other record is tried again.

    Args:
        work: on one record; must be repeatable.

    Raises:
        BaseException: what ends this process, see `ends_process`.
    """
    try:
        try:
            return work()
        except MemoryError:
            with _alone:
                return work()
    except BaseException as error:
        if ends_process(error):
            raise
        return error


def described(error: BaseException) -> str:
    """An error in one line, for a site's own log. An error's own text may fail as well."""
    try:
        # Pillow names the open file, by a place in memory that differs each time.
        text = re.sub(r" <_io\.[^>]*>", "", " ".join(str(error).split()))
    except BaseException as second:
        if ends_process(second):
            raise
        text = "without a text"
    return printable(f"{type(error).__name__}: {text[:LONGEST]}")


def printable(text: str) -> str:
    """A text that can be written: names of files may hold bytes that are no text.

    Args:
        text: perhaps with such bytes.

    Example:
        >>> printable("caf\\udce9.png")
        'caf\\\\udce9.png'
    """
    return text.encode(errors="backslashreplace").decode()


def is_file(path: Path) -> bool:
    """Whether this is a file; not where it cannot be read, or with a name that no file can have."""
    return attempt(path.is_file) is True


def is_folder(path: Path) -> bool:
    """The same for a folder."""
    return attempt(path.is_dir) is True


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. A pipe or device in its place could block for ever.

    Args:
        path: of the file.

    Raises:
        OSError, ValueError: if it is none, or cannot be opened.
    """
    file = open(  # noqa: SIM115
        path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
    )
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"'{path}' is not a regular file")
    return file

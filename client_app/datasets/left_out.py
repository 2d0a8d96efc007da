"""Unusable records: they make a site refuse all records, or, in a private run, are left out one by
one. Either way they are counted.

Files and folders that systems make: archives, network drives, desktops and notebooks leave them
next to data.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fedsurrogate.common.data_report import Loss
from fedsurrogate.common.errors import BackboneError, DataError, PackageError
from fedsurrogate.common.identity import likely_one, likely_one_warnings, normal, rounded

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


class LeftOut:
    """Unusable records that a reader found.

    Args:
        one_by_one: leave such records out. Otherwise the first one raises DataError, so that a
            person corrects it. In a private run the reply must not show that a record is broken,
            and the other records still count.

    Attributes:
        rows: the reader's own indices of records that are left out.
        reasons: for the data report: of each record or file one.
        warnings: warnings for it.
        place: where a row of the reader is, in words; a table of text sets its lines.

    Example:
        >>> left = LeftOut(one_by_one=True)
        >>> left.note([1], "record 1 is broken")
        >>> left.kept(3), left.reasons[0].count
        ([0, 2], 1)
    """

    def __init__(self, one_by_one: bool = False) -> None:
        self.one_by_one = one_by_one
        self.rows: set[int] = set()
        self.reasons: list[Loss] = []
        self.warnings: list[str] = []
        self.place: Callable[[int], str] = lambda row: f"row {row + 1}"

    def where(self, rows: Collection[int]) -> str:
        """Where the first of some rows is, such as "line 3"; empty without any.

        Args:
            rows: the reader's own indices.
        """
        return self.place(min(rows)) if rows else ""

    def note(self, rows: Iterable[int], why: str) -> None:
        """Leave rows out; no effect without a row.

        Args:
            rows: the reader's own indices.
            why: they are left out, with their number.

        Raises:
            DataError: unless `one_by_one`.
        """
        unusable = set(rows)
        self.note_unread(len(unusable - self.rows), why)
        self.rows |= unusable

    def note_unread(self, count: int, why: str) -> None:
        """The same for records without a row, because the reader could not read them at all.

        Args:
            count: of the records; no effect without one.
            why: they are left out.

        Raises:
            DataError: unless `one_by_one`.
        """
        if count and not self.one_by_one:
            raise DataError(printable(why))
        self.skip(count, why)

    def skip(self, count: int, why: str) -> None:
        """Count files that are no records, which is right in any run.

        Args:
            count: of the files; no effect without one.
            why: they are left out.
        """
        if count:
            self.reasons.append(Loss(printable(why), count))

    def warn(self, why: str) -> None:
        """Warn of what no record can show alone.

        Args:
            why: a person should look at it.

        Raises:
            DataError: unless `one_by_one`.
        """
        if not self.one_by_one:
            raise DataError(printable(why))
        self.warnings.append(printable(why))

    def count_once(self, rows: Iterable[int], why: str) -> None:
        """Leave out rows that are copies of others, which is right in any run.

        Args:
            rows: the reader's own indices.
            why: they are left out.
        """
        copies = set(rows)
        self.skip(len(copies - self.rows), why)
        self.rows |= copies

    def kept(self, count: int) -> list[int]:
        """The rows of `count` that are not left out."""
        return [row for row in range(count) if row not in self.rows]


# Classes that a warning names.
MOST_NAMED = 5


OF_NO_CLASS = "are of no class of the run"


def loss_of_other_classes(others: Counter[str]) -> tuple[Loss, ...]:
    """The loss of records whose class is not in the run; nothing without any.

    Args:
        others: number of records by class.
    """
    if not others:
        return ()
    shown = [f"{name!r} ({count})" for name, count in others.most_common(MOST_NAMED)]
    more = ", ..." if len(others) > MOST_NAMED else ""
    count = others.total()
    return (Loss(f"{count} records {OF_NO_CLASS}: {', '.join(shown)}{more}", count),)


def warnings_of_data(
    labels: Tensor,
    classes: tuple[str, ...],
    is_train: Tensor,
    patients: Sequence[str] | None,
    names: Iterable[str],
) -> list[str]:
    """Warnings on classes and patients.

    Args:
        labels: of records, (n,), indices into the classes.
        classes: of the run.
        is_train: (n,) bool.
        patients: of each record, if known.
        names: of all classes in the files.
    """
    warnings = likely_one_warnings({*names, *classes})
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    there = [name for name, count in zip(classes, counts, strict=True) if count]
    if len(there) == 1 and len(classes) > 1:
        warnings.append(f"all records are of one class, {there[0]!r}")
    if absent := [name for name in classes if name not in there]:
        more = ", ..." if len(absent) > MOST_NAMED else ""
        warnings.append(f"no record of {', '.join(map(repr, absent[:MOST_NAMED]))}{more}")
    if patients is not None:
        sides = [{patients[i] for i in part.nonzero().flatten()} for part in (is_train, ~is_train)]
        if shared := len(sides[0] & sides[1]):
            warnings.append(f"{shared} patients have records in both training and test")
        if short := sum(map(rounded, set(patients))):
            warnings.append(
                f"{short} patient IDs are numbers in the short form of spreadsheets, such as 1.2E+11: "
                "several patients may have become one; export them as text"
            )
        if alike := likely_one(patients):
            warnings.append(
                f"{len(alike)} pairs or more of patient IDs differ only by case, blanks or zeros in "
                "front"
            )
    return warnings


class SourceError(DataError):
    """The folder, a file, a table or the cache as a whole cannot be used, or its columns cannot."""


class NoRecordsError(DataError):
    """No record is left that can be used: the site is one without records."""


# Failures of a disk or of the system. Others, such as a missing file, a record may have.
SYSTEM = frozenset(
    getattr(errno, name)
    for name in ("EDQUOT", "EIO", "EMFILE", "ENFILE", "ENOMEM", "ENOSPC", "EROFS", "ESTALE")
)
# torch before 2.8 has no class for it.
AcceleratorError: type[BaseException] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
CAUSES: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    ((NoRecordsError,), "no record can be used"),
    ((SourceError,), "the folder, its files or their columns cannot be used"),
    ((BackboneError,), "the backbone cannot be loaded, or is another one"),
    ((PackageError,), "a package is missing"),
    # Features have one size, so what they take depends on the number of records, not on any one.
    ((MemoryError, torch.OutOfMemoryError), "there is not enough memory for all records"),
    ((AcceleratorError,), "the GPU failed"),
)


def cause_of(error: BaseException) -> str:
    """The cause in the list that an error has; empty for an error outside of the list.

    Args:
        error: raised where no record is looked at alone.

    Example:
        >>> cause_of(SourceError("no such folder"))
        'the folder, its files or their columns cannot be used'
        >>> cause_of(ValueError("embedded null byte")), cause_of(DataError("a label"))
        ('', '')
    """
    if isinstance(error, OSError) and error.errno in SYSTEM:
        return "the disk or the system failed"
    return next((cause for kinds, cause in CAUSES if isinstance(error, kinds)), "")


# Of macOS archives and drives, Synology, QNAP and NetApp drives, Windows, Linux and Python. Names with
# a dot in front are left out as well (.Trash, .ipynb_checkpoints, ._x.png), or with a dollar sign, as
# Windows has them.
FOLDERS = frozenset(
    {
        *("__macosx", "@eadir", "#recycle", "#snapshot", "@recycle", "@recently-snapshot"),
        *("@__thumb", "@tmp", "@synoresource", "#synorecycle", "~snapshot", "_vti_cnf", "_vti_pvt"),
        *("recycler", "recycled", "system volume information", "lost+found"),
        *("__pycache__", "network trash folder", "temporary items", "thumbs.db", "desktop.ini"),
        "thevolumesettingsfolder",
    }
)
# Of Windows, and of Office while a table is open.
STARTS = (".", "$", "~$")
# Of `site fetch`: its own table says what was left out.
FETCHED = ".fetch"
# Of a check of a Windows disk, which numbers them.
FOUND = re.compile(r"found\.[0-9]{3}")


def of_system(name: str) -> bool:
    """Whether a file or folder with this name is a system's, not a record or a class.

    Example:
        >>> [of_system(name) for name in ("__MACOSX", "._x.png", "~$labels.csv", "nevus")]
        [True, True, True, False]
    """
    plain = normal(name).casefold()
    return plain in FOLDERS or plain.startswith(STARTS) or bool(FOUND.fullmatch(plain))


class FolderWalk:
    """The files of a source, and how many were left out on the way.

    Args:
        wanted: which files are records.
        file_suffixes: endings of names that only files have; a folder with one is left out.
    """

    def __init__(self, wanted: Callable[[Path], bool], file_suffixes: frozenset[str]) -> None:
        self._wanted, self._suffixes = wanted, file_suffixes
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, Path] = {}

    def folders(self, top: Path) -> list[Path]:
        """Folders in a folder that may be classes, sorted.

        Args:
            top: the folder.

        Raises:
            OSError: if it cannot be read.
        """
        folders = []
        for path in sorted(top.iterdir()):
            if is_folder(path):
                if self._is_data(path):
                    folders.append(path)
            elif self._is_wanted(path):
                self._skip("images next to the folders of classes", path)
        return folders

    def files(self, folder: Path) -> list[Path]:
        """Wanted files at any depth, sorted; those of linked folders too.

        A folder inside that cannot be read, or vanishes, has none, and is counted.
        """
        # A link to a folder above would give this class the images of all.
        found = (attempt(parent.stat) for parent in folder.absolute().parents)
        above = tuple(
            (each.st_dev, each.st_ino) for each in found if not isinstance(each, BaseException)
        )
        return list(self._below(folder, above))

    def _below(self, folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
        status = attempt(folder.stat)
        inside = attempt(lambda: sorted(folder.iterdir()))
        if isinstance(status, BaseException) or isinstance(inside, BaseException):
            self._skip("folders that cannot be read", folder)
            return
        own = status.st_dev, status.st_ino
        if own in above:
            self._skip("linked folders that lead back to a folder above them", folder)
            return
        for path in inside:
            if is_folder(path):
                if self._is_data(path):
                    yield from self._below(path, (*above, own))
            elif self._is_wanted(path):
                yield path

    def _is_wanted(self, file: Path) -> bool:
        if of_system(file.name):
            self._skip("files of systems", file)
        elif self._wanted(file):
            return True
        else:
            self._skip("files without the name of an image", file)
        return False

    def _is_data(self, folder: Path) -> bool:
        if folder.name == FETCHED:
            return False
        if of_system(folder.name):
            self._skip("folders of systems", folder)
        elif folder.suffix.lower() in self._suffixes and not is_file(folder):
            self._skip("folders with the name of a file", folder)
        else:
            return True
        return False

    def _skip(self, why: str, path: Path) -> None:
        self._counts[why] += 1
        self._examples.setdefault(why, path)

    def report(self, left: LeftOut) -> None:
        """Count what was left out.

        Args:
            left: that counts it.
        """
        for why, count in self._counts.items():
            left.skip(count, f"{count} {why}, such as '{self._examples[why]}'")

"""Files and folders that systems make: archives, network drives, desktops and notebooks leave them
next to data.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from fedsurrogate.common.identity import normal

from .left_out import LeftOut, attempt, is_file, is_folder

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

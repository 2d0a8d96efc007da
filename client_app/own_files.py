"""Files that this software keeps at a site: no other account of the machine may read them.

A program of a site makes them so (`owner_only`). An earlier version let the umask decide; what it
left is closed when the site next works. And what the operating system says of a file, told as an error
of this software.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from .node_config import NodeConfig

# All that this software keeps in each folder. Others' files there stay as they are: a person may
# have named a folder that holds more.
IN_STATE = (
    "audit.key",
    "audited",
    "data-report-*.json",
    "decisions.json",
    "decisions.lock",
    "disclosures",
    "generators",
    "held",
    "keys",
    "ledgers",
    "models",
    "policy.json",
    "public",
    "replies",
    "requests.json*",
    "runs",
    "site.log*",
    "sums",
)
IN_CACHE = ("features",)
IN_CHECK_LOG = ("*.answered*", "*.witness*")
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def own_files(node: NodeConfig, reachable: bool = False) -> Iterator[str]:
    """Paths of all files and folders that this software keeps at a site, without following links.

    Args:
        node: the site's settings.
        reachable: only those that lie in no folder that is closed to other accounts. A site works for
            years, and looks at every request.
    """

    def entered(path: str) -> bool:
        with suppress(OSError):
            mode = os.lstat(path).st_mode
            return not stat.S_ISLNK(mode) and bool(mode & OTHERS or not reachable)
        return False

    for folder, patterns in (
        (node.state, IN_STATE),
        (node.cache, IN_CACHE),
        (node.check_log, IN_CHECK_LOG),
    ):
        _, within, loose = next(os.walk(folder), ("", [], []))
        own = (name for name in (*within, *loose) if any(fnmatch(name, each) for each in patterns))
        for each in (f"{folder}/{name}" for name in own):
            yield each
            for inner, folders, files in os.walk(each) if entered(each) else ():
                yield from (f"{inner}/{name}" for name in (*folders, *files))
                folders[:] = [name for name in folders if entered(f"{inner}/{name}")]


def readable_by_others(node: NodeConfig) -> list[Path]:
    """Files and folders of a site that the mode lets other accounts read, write or list."""
    found = []
    for path in own_files(node, reachable=True):
        with suppress(OSError):
            mode = os.lstat(path).st_mode
            if mode & OTHERS and not stat.S_ISLNK(mode):
                found.append(Path(path))
    return found


def close_to_others(node: NodeConfig) -> None:
    """Take the rights of other accounts from files of an earlier version, as far as they are this
    account's.
    """
    for path in readable_by_others(node):
        with suppress(OSError):
            path.chmod(stat.S_IMODE(path.lstat().st_mode) & ~OTHERS)


@contextmanager
def told_as(kind: type[Exception], what: str, then: str) -> Iterator[None]:
    """Raise `kind` for an OSError of the block.

    Args:
        kind: of error.
        what: failed.
        then: what follows of it, or is to be done.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what} ({error.strerror or error}); {then}") from None

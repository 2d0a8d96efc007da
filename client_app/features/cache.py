"""The cache of computed features: damaged entries are not used, and the least recently used are
removed first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MIB = 2**20
# Ending of a folder whose features are being computed, or were when the process ended.
PARTIAL = ".partial"
LOG = logging.getLogger("fedsurrogate.site")


def read_entry(entry: Path, count: int) -> tuple[Tensor, Tensor] | None:
    """A complete and undamaged entry of the cache.

    Args:
        entry: its folder.
        count: n, the number of records that it must have.

    Returns:
        Features (n, d), and which rows are valid, (n,) bool; None without such an entry.
    """
    try:
        digests = json.loads((entry / "digests.json").read_text())
        if any(digest_of(entry / name) != digests[name] for name in ("x.npy", "ok.npy")):
            raise ValueError("content differs from its digest")
        # Copy on write: torch needs writable memory, and the file must never change.
        x, ok = np.load(entry / "x.npy", mmap_mode="c"), np.load(entry / "ok.npy")
        if len(x) != count or len(ok) != count:
            raise ValueError(f"{len(x)} rows for {count} records")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        LOG.warning("cached features in %s are damaged (%s) and are computed again", entry, error)
        return None
    return torch.from_numpy(x), torch.from_numpy(ok)


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_room(entry: Path, most_mib: float) -> None:
    """Mark an entry as used, and remove others until all take at most `most_mib`.

    `entry` itself stays even if it alone is larger: otherwise every request would compute it again,
    and a refusal would depend on the number of records. Entries that another process has locked are
    in use and stay. Memory-mapped files stay readable after they are removed.

    Args:
        entry: a folder that this process has locked.
        most_mib: of all entries, MiB; infinity for no limit.
    """
    from filelock import FileLock, Timeout

    os.utime(entry)
    if most_mib == float("inf"):
        return
    others = [folder for folder in entry.parent.iterdir() if _is_entry(folder) and folder != entry]
    sizes = {folder: _size(folder) for folder in others}
    total = _size(entry) + sum(sizes.values())
    if _size(entry) > most_mib * MIB:
        LOG.warning(
            "these features need more than cache-mib = %g in the policy; they stay, all others go",
            most_mib,
        )
    for folder in sorted(others, key=_last_used):
        if total <= most_mib * MIB:
            return
        try:
            with FileLock(f"{str(folder).removesuffix(PARTIAL)}.lock", timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
        except Timeout:
            continue
        total -= sizes[folder]
        LOG.info(
            "cached features %s, the least recently used, are removed: the cache may take %g MiB",
            folder.name,
            most_mib,
        )


def _is_entry(folder: Path) -> bool:
    """Whether this is a folder of features, complete or not."""
    return folder.is_dir() and "." not in folder.name.removesuffix(PARTIAL)


def _size(folder: Path) -> int:
    return (
        sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        if folder.is_dir()
        else 0
    )


def _last_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0

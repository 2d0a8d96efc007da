"""Limit of the policy on the disk that files of runs take at this site: those that are needed
between rounds, and received models and generators.

A coordinator begins as many runs as the policy allows, and names what belongs together in each
request, so without a limit it decides how much stays on the disk. A file of a round that is gone
makes a later round of that run fail. Received models are for people, so none is removed for them:
further ones are not kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from fedsurrogate.client_app.node_config import NodeConfig

MIB = 2**20
BETWEEN_ROUNDS, RECEIVED = ("runs",), ("models", "generators")
log = logging.getLogger("fedsurrogate.site")


def remove_oldest(node: NodeConfig, most_mib: float) -> None:
    """Remove the files between rounds that were written first, until the others fit; the newest one
    always stays.

    Args:
        node: the site's settings.
        most_mib: of all these files, MiB.
    """
    total = 0.0
    newest_first = sorted(_files(node, BETWEEN_ROUNDS), reverse=True)
    for number, (_, size, file) in enumerate(newest_first):
        total += size
        if number and total > most_mib * MIB:
            file.unlink(missing_ok=True)
            log.warning("%s is removed: kept-mib = %g in the policy", file, most_mib)


def has_room(node: NodeConfig, most_mib: float, more: int) -> bool:
    """Whether another received model or generator may be kept; states in the log if it may not.

    Args:
        node: the site's settings.
        most_mib: of all of them, MiB.
        more: its size in bytes.
    """
    fits = sum(size for _, size, _ in _files(node, RECEIVED)) + more <= most_mib * MIB
    if not fits:
        log.error(
            "a received model is not kept: all of them would take more than kept-mib = %g in the "
            "policy; remove old ones in %s",
            most_mib,
            " or ".join(f"'{node.state / name}'" for name in RECEIVED),
        )
    return fits


def _files(node: NodeConfig, folders: tuple[str, ...]) -> Iterator[tuple[int, int, Path]]:
    """Time of the last change, size and path of every file."""
    for folder in folders:
        for file in (node.state / folder).rglob("*"):
            try:
                status = file.lstat()
            except FileNotFoundError:
                continue
            if not file.is_dir():
                yield status.st_mtime_ns, status.st_size, file

"""Cores that this process may use: of the machine, of its binding, of the container."""

from __future__ import annotations

import os
from pathlib import Path

CONTAINER_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = CONTAINER_QUOTA) -> int:
    """Cores that this process is bound to, at most the quota of its container; at least one.

    Args:
        quota: file with the quota and its period, in microseconds.

    Example:
        >>> usable_cores() >= 1
        True
    """
    bound = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(bound, int(allowed) // int(period)))
    except (OSError, ValueError):
        # No container, or "max": no quota.
        return bound

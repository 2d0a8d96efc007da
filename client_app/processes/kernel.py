"""What a process asks of the kernel: its name, its end with its parent, and who goes first when memory
runs out. Without effect on systems other than Linux.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

_DEATH_SIGNAL, _NAME = 1, 15
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
OOM_SCORE = Path("/proc/self/oom_score_adj")
FIRST = 1000
"""Of the processes of a machine, the kernel ends those with the highest number first."""


def end_with_parent(number: int, parent: int = 0) -> None:
    """Let the kernel send this process a signal when its parent ends.

    Args:
        number: The signal; 0: none.
        parent: Process id of the parent; if another process is the parent by now, this one ends.
    """
    if _libc is None:
        return
    _libc.prctl(_DEATH_SIGNAL, number)
    if number and parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show; its first 15 characters."""
    if _libc is not None:
        _libc.prctl(_NAME, name.encode())


def end_first_without_memory() -> None:
    """When memory runs out, let the kernel end this process before others of its account."""
    with suppress(OSError):
        OOM_SCORE.write_text(str(FIRST))

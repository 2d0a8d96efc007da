"""The process that writes a run folder: a lock and a heartbeat show readers whether it still
exists.

The writer holds a lock (flock) on the file `.writer` and touches it every few seconds. The kernel
frees the lock of a killed process. So a reader with the same kernel, in another container too,
knows at once that the writer is gone. On another machine, or after a restart of this one, a
heartbeat that has stopped shows it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

FILE = ".writer"
BOOT = Path("/proc/sys/kernel/random/boot_id")
BEAT_SECONDS = 5.0
# A heartbeat that is older has stopped, if the lock cannot show it.
SILENT_SECONDS = 60.0


class WriterLock:
    """The lock and the heartbeat of a run folder, from its creation until `close`. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        aside = folder / f"{FILE}.new"
        self._lock = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        # Without locks, as on some network disks, readers have the heartbeat.
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        own = {"boot": _boot(), "host": socket.gethostname(), "pid": os.getpid()}
        os.pwrite(self._lock, json.dumps(own).encode(), 0)
        # Under its own name the file is locked from the beginning.
        aside.replace(self._file)
        self._closed = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def close(self) -> None:
        """End the heartbeat and remove the file. The run's end must be recorded before."""
        if not self._closed.is_set():
            self._closed.set()
            self._file.unlink(missing_ok=True)
            os.close(self._lock)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._file)


def writer_is_gone(folder: Path) -> bool:
    """Whether a run folder had a writer that no longer exists. False for a folder without the file
    `.writer`.
    """
    file = folder / FILE
    try:
        lock = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return _is_silent(file)
    try:
        content = os.pread(lock, 4096, 0)
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return _is_silent(file)
    finally:
        os.close(lock)
    # The file is removed when the run has ended, perhaps since it was opened.
    return file.exists() and (_boot_in(content) == _boot() != "" or _is_silent(file))


def last_sign(folder: Path) -> datetime | None:
    """The time of the writer's last heartbeat; None without one."""
    try:
        return datetime.fromtimestamp((folder / FILE).stat().st_mtime, UTC)
    except OSError:
        return None


def forget_writer(folder: Path) -> None:
    """Remove the file of a writer that is gone, after the run's end was recorded."""
    (folder / FILE).unlink(missing_ok=True)


def _is_silent(file: Path) -> bool:
    with suppress(OSError):
        return time.time() - file.stat().st_mtime > SILENT_SECONDS
    return False


def _boot_in(content: bytes) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(content)["boot"])
    return ""


def _boot() -> str:
    """The id of this start of the kernel; containers share it. Empty where there is none."""
    with suppress(OSError):
        return BOOT.read_text().strip()
    return ""

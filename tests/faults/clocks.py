"""A clock of one program that a test sets: Python reads it, the system and gRPC's own timers do not."""

import shutil
import subprocess
from pathlib import Path

# The time of Python's own code alone: a wait until a moment ends by the system's clock.
SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    int done = syscall(SYS_clock_gettime, id, at), from;
    char text[32] = {0}, *file = getenv("TEST_CLOCK");
    Dl_info of;
    if (done || id != CLOCK_REALTIME || !file) return done;
    if (!dladdr(__builtin_return_address(0), &of)) return done;
    if (!strstr(of.dli_fname, "python") || strstr(of.dli_fname, "grpc")) return done;
    if ((from = open(file, O_RDONLY | O_CLOEXEC)) < 0) return done;
    if (read(from, text, 31) > 0) at->tv_sec += atol(text);
    close(from);
    return done;
}
"""


class Clock:
    """Seconds by which a program's clock is ahead, which start at 0.

    Attributes:
        variables: of the program's environment; None where nothing compiles its library.
    """

    def __init__(self, folder: Path) -> None:
        library, self._file = folder / "clock.so", folder / "clock"
        self.variables: dict[str, str] | None = None
        self.set(0)
        if (compiler := shutil.which("cc")) is not None:
            command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
            subprocess.run(command, input=SOURCE, text=True, check=True)
            self.variables = {"LD_PRELOAD": str(library), "TEST_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """Let it be so many seconds ahead from now on."""
        (new := self._file.with_suffix(".new")).write_text(f"{seconds:+}\n")
        new.replace(self._file)

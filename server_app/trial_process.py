"""Runs of a sweep in processes of their own: side by side, and each one's memory is free afterwards.

`python -m fedsurrogate.server_app.trial_process` reads node-configs and settings from its standard
input, and prints its run folder or why it failed.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedsurrogate.common.errors import FedSurrogateError, RunError
from fedsurrogate.common.machine import available_memory
from fedsurrogate.common.settings.base import Scalar

# Runs simulated sites from their node-configs and the settings, and returns the run folder.
Start = Callable[[Sequence[Mapping[str, Scalar]], Mapping[str, Scalar]], Path]
# Memory that is left free, beside what the largest run so far has taken.
SPARE = 1.25


class Processes:
    """Processes that run at the same time, as many as memory has room for.

    Args:
        most: at the same time.

    Attributes:
        most: at the same time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._peak = 0
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._ended = False

    def room(self) -> int:
        """How many may run at the same time: one until the first has shown what it takes."""
        if not self._peak:
            return 1
        with self._lock:
            running = len(self._running)
        # What is available is what those that run now have left.
        return max(1, min(self.most, running + int(available_memory() // (SPARE * self._peak))))

    def run(self, nodes: Sequence[Mapping[str, Scalar]], flat: Mapping[str, Scalar]) -> Path:
        """Run simulated sites in a process, and wait for it.

        Args:
            nodes: the node-config of each site.
            flat: settings of the run.

        Returns:
            The run folder.

        Raises:
            RunError: for a run that fails, or a process that was ended.
        """
        threads = max(1, (os.cpu_count() or 1) // self.most)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        }
        with self._lock:
            if self._ended:
                raise RunError("the sweep was interrupted")
            process = subprocess.Popen(
                # -P: no file in the current folder hides a module.
                [sys.executable, "-P", "-m", __spec__.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                # Ctrl-C reaches the sweep alone, which then ends its processes.
                start_new_session=True,
            )
            self._running.add(process)
        try:
            printed, log = process.communicate(
                json.dumps({"nodes": [*map(dict, nodes)], "flat": dict(flat)})
            )
        finally:
            with self._lock:
                self._running.discard(process)
        return self._folder(printed, log, process.returncode)

    def end(self) -> None:
        """End all processes; none starts afterwards."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.terminate()

    def _folder(self, printed: str, log: str, code: int) -> Path:
        try:
            answer = json.loads(printed.splitlines()[-1])
        except (IndexError, ValueError):
            last = log.strip().splitlines()[-1:] or ["it printed nothing"]
            raise RunError(
                f"the process of the run ended with {code} ({last[0][:200]}); if memory was short, "
                "take fewer workers"
            ) from None
        self._peak = max(self._peak, answer["peak"])
        if "error" in answer:
            raise RunError(answer["error"])
        return Path(answer["folder"])


def main() -> None:
    """Do what standard input says, and print one line of JSON."""
    from fedsurrogate.common.run import parse_run

    from .deployment.local_engine import run_here

    asked = json.load(sys.stdin)
    try:
        flat = asked["flat"]
        folder = run_here(asked["nodes"], parse_run(flat), flat, lambda event: None, report=False)
        answer = {"folder": str(folder)}
    except FedSurrogateError as error:
        answer = {"error": str(error)}
    except Exception as error:  # Whatever it is, it is the failure of this run.
        answer = {"error": f"{type(error).__name__}: {error}"}
    # In kilobytes on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(answer | {"peak": peak}))


if __name__ == "__main__":
    main()

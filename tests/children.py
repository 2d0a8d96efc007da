"""Children of this process: commands that end, and what a function finds in a fork."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

Ended = subprocess.CompletedProcess[str]


def ran(command: Sequence[str | os.PathLike[str]], check: bool = False, **options: Any) -> Ended:
    """A command that has ended, with what it printed. check: that it did not fail."""
    return subprocess.run(command, capture_output=True, text=True, check=check, **options)


def imported_by(statement: str, names: Sequence[str]) -> list[str]:
    """Those of these modules that a new process has imported after a statement."""
    script = f"{statement}\nimport sys\nprint(*(name for name in {list(names)!r} if name in sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FLWR_TELEMETRY_ENABLED": "0"}
    return ok(ran([sys.executable, "-c", script], cwd=ROOT, env=environment)).stdout.split()


def ok(done: Ended) -> Ended:
    """The same command, which has succeeded."""
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done


def refused(done: Ended, why: str) -> Ended:
    """The same command, which has failed and said why."""
    assert done.returncode == 1, f"{done.stdout}{done.stderr}"
    assert why in done.stderr
    return done


def in_child(fork: Callable[[], int], function: Callable[[], Any]) -> Any:
    """The result of a function in a child.

    fork: 0 in the child, as `os.fork`.
    """
    import torch

    source, sink = os.pipe()
    if fork() == 0:
        try:
            torch.set_num_threads(1)
            with os.fdopen(sink, "wb") as stream:
                pickle.dump(function(), stream)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as stream:
        found = pickle.load(stream)
    os.wait()
    return found

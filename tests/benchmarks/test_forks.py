"""Nothing that a job does in its fork stops the process that runs the jobs, or is left behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.grid import ROOT

# What a job does, and what must become of it.
JOBS = {
    "pass": ("pass", "survived"),
    "fails": ("return 1", "killed"),
    "raises": ("raise ValueError", "error"),
    "exits": ("os._exit(3)", "killed"),
    "kills its group": ("os.killpg(os.getpgrp(), signal.SIGTERM)", "killed"),
    # Without the end of the lock no signal handler of Python runs.
    "hangs": ("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM}); time.sleep(60)", "timeout"),
    "eats memory": ("kept = bytearray(2**29); kept[::4096] = b'1' * 2**17; time.sleep(60)", "timeout"),
    "leaves a process": (
        "child = os.fork() or time.sleep(60) or 1; file.write_text(str(child))",
        "survived",
    ),
}  # fmt: skip
PROGRAM = """
import json, os, signal, sys, time
from benchmarks import _forks

_forks.MOST_MEMORY = 2**28

def work(code, file):
    names = globals() | {"file": file}
    exec("def job():\\n    " + code + "\\n    return 0", names)
    return names["job"]()

found = []
_forks.in_forks(json.loads(sys.argv[1]), 2, work, lambda *each: found.append(each), longest=2)
print(json.dumps(found))
"""


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_its_outcome_and_the_next_one_runs(name: str) -> None:
    code, outcome = JOBS[name]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([code, "pass", "pass"])],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    found = {job: (how, content) for job, how, content in json.loads(done.stdout)}
    assert {job: how for job, (how, _) in found.items()} == {"pass": "survived", code: outcome}
    if content := found[code][1]:
        # The parent of an ended process may take a moment to collect it.
        for _ in range(100):
            if not _alive(int(content)):
                break
            time.sleep(0.05)
        assert not _alive(int(content))


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"

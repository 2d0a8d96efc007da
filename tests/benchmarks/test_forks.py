"""Forks of the harness: how one ends says what became of a fault, and none outlives its run."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.grid import ROOT

# A process with a fork that has a fork, which writes who they are.
NESTED = """
import os, sys, time
from pathlib import Path
from benchmarks._forks import end_forks_when_ended, in_forks

def sleep(_, __):
    Path(sys.argv[1]).write_text(f"{os.getppid()} {os.getpid()}\\n")
    time.sleep(60)

def work(_, __):
    in_forks([None], 1, sleep, lambda *_: None)

end_forks_when_ended()
in_forks([None], 1, work, lambda *_: None)
"""


def test_a_run_that_is_ended_takes_its_forks_with_it(tmp_path: Path) -> None:
    """A fork that stays would hold locks of the run, and the processor."""
    run = subprocess.Popen(
        [sys.executable, "-c", NESTED, str(tmp_path / "forks")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    while not (tmp_path / "forks").is_file() or not (tmp_path / "forks").read_text().strip():
        assert run.poll() is None
        time.sleep(0.05)
    forks = [int(each) for each in (tmp_path / "forks").read_text().split()]
    run.terminate()
    run.wait()
    assert len(forks) == 2
    for each in forks:
        # What has ended may wait for its parent, init, to see it.
        status = Path(f"/proc/{each}/stat")
        while status.is_file() and status.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.05)

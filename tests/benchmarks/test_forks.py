"""Forks of the harness: how one ends says what became of a fault, and none outlives its run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks._forks import outcome
from tests.grid import ROOT


def test_what_pytest_returns_says_what_became_of_a_fault() -> None:
    wanted = {0: "survived", 1: "killed", 2: "killed", 4: "error", 5: "survived", 99: "error"}
    assert {code: outcome(code << 8) for code in wanted} == wanted
    assert outcome(signal.SIGXCPU) == outcome(signal.SIGKILL) == "timeout"
    assert outcome(signal.SIGSEGV) == "killed"


def test_the_first_example_that_fails_is_the_last(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from hypothesis import given, settings, strategies as st\n"
        "from pathlib import Path\n\n"
        "@settings(max_examples=50, database=None)\n"
        "@given(st.integers())\n"
        "def test_it(x):\n"
        "    with Path(__file__).with_name('tried').open('a') as file:\n"
        "        file.write(f'{x}\\n')\n"
        "    assert abs(x) < 100\n"
    )
    code = "import hypothesis, sys; from benchmarks._forks import pytest_exit; "
    code += "sys.exit(pytest_exit([sys.argv[1]]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 1
    failing = [abs(int(x)) >= 100 for x in (tmp_path / "tried").read_text().split()]
    # Hypothesis repeats the example to see that it fails again, and looks for no smaller one.
    assert 1 <= sum(failing) <= 4
    assert not any(failing[: failing.index(True)])
    assert all(failing[failing.index(True) :])


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

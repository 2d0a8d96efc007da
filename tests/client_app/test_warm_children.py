"""Children of a warm process, without its imports: what a fork must not share, and that each task begins
once. With all imports: `processes/test_warm.py`, which is slow.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence

import numpy as np
import psutil
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.processes import app_process, own_account
from fedsurrogate.client_app.processes.own_account import ARGUMENTS
from tests.children import in_child

PATIENCE = 20.0
# As `site-app`: a warm process confirms a task when it has begun, unless it is to end before or after.
COMMAND = f"""#!{sys.executable} -SE
import json, os, socket, sys
def note(words):
    with open(os.path.dirname(sys.argv[0]) + "/begun", "a") as file:
        file.write(words + "\\n")
if sys.argv[1:2] != ["{app_process.FLAG}"]:
    (task,) = json.loads(os.environ["{ARGUMENTS}"])
    note("new " + task)
    sys.exit()
control = socket.socket(fileno=int(sys.argv[2]))
while request := control.recv(2**16):
    (task,) = json.loads(request)
    if task.startswith("ends"):
        sys.exit()
    note("warm " + task)
    control.send(b"1")
"""


def test_a_child_draws_what_neither_its_parent_nor_another_child_draws() -> None:
    def drawn() -> list[object]:
        return [random.random(), *np.random.rand(2), *torch.rand(2).tolist(), torch.initial_seed()]

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    children = [in_child(app_process._fork, drawn) for _ in range(2)]
    numbers = [*children[0], *children[1], *drawn()]
    assert len(set(numbers)) == len(numbers) == 18


def test_a_fork_leaves_the_signals_and_the_name_of_the_parent_as_they_were() -> None:
    def state() -> tuple[object, ...]:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        handlers = [signal.getsignal(number) for number in app_process.ENDS]
        return blocked, handlers, psutil.Process().name()

    before = state()
    handlers = {number: signal.getsignal(number) for number in app_process.ENDS}
    try:
        for number in app_process.ENDS:
            signal.signal(number, signal.SIG_IGN)
        blocked, own, name = in_child(app_process._fork, state)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert state() == before
    # Blocked until a task has its message; then they end it, whatever the parent does with them.
    assert set(app_process.ENDS) <= blocked
    assert own == [signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL]
    assert name == own_account.TASK_NAME


# Without making a failing example smaller: each that fails takes as long as the patience.
@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.lists(st.sampled_from(["works", "ends"]), min_size=1, max_size=5))
def test_every_task_begins_once_whenever_the_warm_process_ends(
    tmp_path_factory: pytest.TempPathFactory, tasks: Sequence[str]
) -> None:
    folder = tmp_path_factory.mktemp("warm")
    command, begun = folder / "site-app", folder / "begun"
    command.write_text(COMMAND)
    command.chmod(0o700)
    names = [f"{task} {number}" for number, task in enumerate(tasks)]
    begun.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_process.own_account, "installed", lambda: (0,))
        with app_process.WarmStarter(command, os.environ) as starter:
            for name in names:
                starter.start([name])
            until, lines = time.monotonic() + PATIENCE, list[str]()
            while len(lines) < len(names) and time.monotonic() < until:
                starter.tend()
                time.sleep(0.01)
                lines = begun.read_text().splitlines()
            starter.tend()
    found = [line.split(" ", 1) for line in begun.read_text().splitlines()]
    assert sorted(name for _, name in found) == sorted(names)
    # It runs what comes before the task with which it ends, and nothing after it.
    ended = next((at for at, task in enumerate(tasks) if task == "ends"), len(tasks))
    assert [name for how, name in found if how == "warm"] == names[:ended]

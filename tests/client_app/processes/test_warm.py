"""Children of a warm process: each starts as a new process would, and none harms another."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedsurrogate.client_app.processes import app_process, own_account
from fedsurrogate.client_app.processes.app_process import READY_NAME, WarmStarter
from fedsurrogate.client_app.processes.own_account import TASK_NAME
from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from tests.e2e.processes import PATIENCE, until

# Before the tests of this file replace it.
INSTALLED = own_account.installed

# Stands in for `site-app`: a task is a line of Python whose result goes into a file.
COMMAND = f"""#!{sys.executable}
import json, os, pathlib, sys
from fedsurrogate.client_app.processes import app_process
from fedsurrogate.client_app.processes.own_account import end_after, take_arguments
from fedsurrogate.common.files import owner_only
def task(file, code):
    found = {{}}
    try:
        exec(code, found)
    except Exception as error:
        found["result"] = repr(error)
    pathlib.Path(file + ".new").write_text(json.dumps([found.get("result"), os.getpid(), os.getppid()]))
    pathlib.Path(file + ".new").rename(file)
with owner_only():
    if sys.argv[1:2] == [app_process.FLAG]:
        if light := os.environ.get("LIGHT"):
            app_process.import_all = lambda: [__import__(each) for each in light.split()]
        arguments = app_process.serve_children(int(sys.argv[2]), int(sys.argv[3]))
        end_after(lambda: task(*arguments))
    take_arguments(1)
    task(*sys.argv[1:])
"""
HOST = """
import os, pathlib, sys, time
from fedsurrogate.client_app.processes.app_process import WarmStarter
folder = pathlib.Path(sys.argv[1])
with WarmStarter(folder / "site-app", os.environ) as starter:
    starter.start([str(folder / "done"), sys.argv[2]])
    while True:
        starter.tend()
        time.sleep(0.05)
"""
DRAWS = """
import gc, random, secrets, sys, uuid
import numpy as np, torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from fedsurrogate.common.privacy.gaussian_mechanism import discrete_gaussian
from fedsurrogate.common.privacy.gaussian_mechanism import system_normals
named = [(name, value) for module in list(sys.modules.values())
         for name, value in list(getattr(module, "__dict__", {}).items())]
every = {id(each): each for each in [*gc.get_objects(), *(value for _, value in named)]
         if type(each).__name__ in ("Generator", "RandomState", "Random", "SystemRandom")}
def drawn(each):
    if isinstance(each, torch.Generator):
        return torch.rand(2, generator=each, dtype=torch.float64).tolist()
    if isinstance(each, (np.random.Generator, np.random.RandomState)):
        return list(each.random(2))
    return [each.random()] if isinstance(each, random.Random) else None
result = [drawn(each) for each in every.values()]
result = [each for each in result if each]
result += [random.random(), np.random.rand(), torch.rand(2).tolist(), secrets.token_hex(8)]
result += [str(uuid.uuid4()), AESGCM.generate_key(128).hex()]
result += [list(map(float, system_normals([4]))), torch.initial_seed()]
result += [discrete_gaussian(10**12, 4).tolist()]
"""


class Tasks:
    """Tasks in the children of one warm process."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder, self._count = folder, 0
        self.command = folder / "site-app"
        self.command.write_text(COMMAND)
        self.command.chmod(0o700)
        self.starter = WarmStarter(self.command, os.environ | variables)

    def start(self, code: str = "result = 0") -> Path:
        """Start a task; the file of its result."""
        self._count += 1
        file = self.folder / str(self._count)
        self.starter.start([str(file), code])
        return file

    def result(self, code: str = "result = 0") -> list[Any]:
        """Run a task: its result, its process id, and that of its parent."""
        return self.read(self.start(code))

    def read(self, file: Path) -> list[Any]:
        def there() -> bool:
            self.starter.tend()
            return file.exists()

        until(there)
        found: list[Any] = json.loads(file.read_text())
        return found


def started(folder: Path, **variables: str) -> Iterator[Tasks]:
    """Tasks of a warm process that ends with them."""
    with pytest.MonkeyPatch.context() as patch:
        # Another program may install something during a test.
        patch.setattr(app_process.own_account, "installed", lambda: (0,))
        patch.setenv("PYTHONPATH", str(APP_FOLDER))
        # As many threads as a library wants.
        patch.delenv("OMP_NUM_THREADS", raising=False)
        made = Tasks(folder, **variables)
        with made.starter:
            yield made


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    """With few imports, for a test that ends the process."""
    yield from started(tmp_path, LIGHT="numpy")


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tasks]:
    """The same for all tests that leave the process as it is."""
    yield from started(tmp_path_factory.mktemp("light"), LIGHT="numpy torch")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tasks]:
    """With all imports of a site."""
    yield from started(tmp_path_factory.mktemp("whole"))


def test_no_generator_draws_the_same_in_two_children(whole: Tasks) -> None:
    first, second = (whole.result(DRAWS)[0] for _ in range(2))
    assert len(first) == len(second) > 10
    assert [each for each in zip(first, second, strict=True) if each[0] == each[1]] == []


def test_the_process_computes_nothing_and_opens_nothing(whole: Tasks) -> None:
    code = "import torch, sys, logging; result = [torch.cuda.is_initialized(), "
    code += "'torch._dynamo' in sys.modules, 'fedsurrogate.client_app.requests' in sys.modules, "
    code += "len(logging.getLogger('flwr').handlers)]"
    found, _, parent = whole.result(code)
    assert found == [False, False, True, 1]
    process = psutil.Process(parent)
    assert process.name() == READY_NAME
    assert process.net_connections("inet") == []
    assert [file.path for file in process.open_files() if "nvidia" in file.path] == []


def test_children_use_several_threads_in_every_library(whole: Tasks) -> None:
    code = """
import numpy, torch
from sklearn.cluster import KMeans
from sklearn.mixture import GaussianMixture
torch.set_num_threads(2)
values = numpy.random.default_rng(0).normal(size=(600, 50))
wide = torch.ones(700, 700, dtype=torch.float64)
KMeans(3, n_init=1).fit(values)
GaussianMixture(2).fit(values)
numpy.linalg.svd(values @ values.T)
result = float((wide @ wide).sum())
"""
    assert whole.result(code)[0] == whole.result(code)[0] == 700.0**3


def test_a_site_at_rest_needs_less_than_a_gigabyte_and_children_share_it(whole: Tasks) -> None:
    stop = whole.folder / "stop"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(stop)!r}).exists(): time.sleep(0.02)"
    parent = psutil.Process(whole.result()[2])
    until(lambda: not parent.children())
    file = whole.start(wait)
    until(lambda: len(parent.children()) == 1)
    (child,) = parent.children()
    until(lambda: child.name() == TASK_NAME)
    own, shared = parent.memory_full_info(), child.memory_full_info()
    score = Path(f"/proc/{child.pid}/oom_score_adj").read_text()
    stop.touch()
    whole.read(file)
    assert own.pss + shared.pss < 0.8e9
    assert shared.uss < 0.1e9
    assert int(score) == 1000 > int(Path(f"/proc/{parent.pid}/oom_score_adj").read_text())


def test_a_child_starts_as_a_new_process_would(light: Tasks) -> None:
    code = """
import os, signal, sys, threading
mask = os.umask(0)
names = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
kinds = [os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")
         if os.path.exists(f"/proc/self/fd/{each}")]
result = [mask, threading.active_count(), [str(signal.getsignal(each)) for each in names],
          [each for each in kinds if "socket" in each or "pidfd" in each]]
"""
    found, own, parent = light.result(code)
    assert parent != os.getpid() != own
    assert found[:2] == [0o077, 1]
    assert found[2][::2] == ["0", "0"]
    assert "default_int_handler" in found[2][1]
    assert found[3] == []


def test_the_end_of_a_child_clears_what_it_made_and_nothing_of_its_parent(
    light: Tasks, tmp_path: Path
) -> None:
    """torch alone leaves thousands of objects to clear, whose memory each child would copy."""
    marker = tmp_path / "cleared"
    code = f"""
import pathlib, sys, weakref
parents = list(weakref.finalize._registry)
result = [len(parents), sum(each.atexit for each in parents)]
class Own: pass
sys.own = Own()
weakref.finalize(sys.own, pathlib.Path({str(marker)!r}).touch)
"""
    number, cleared = light.result(code)[0]
    assert number > 0
    assert cleared == 0
    until(marker.exists)


@pytest.mark.parametrize(
    "end",
    [
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.abort()",
        "import sys; sys.exit(3)",
        "raise BaseException('as a panic in Rust')",
        "import ctypes; ctypes.string_at(0)",
        "import os, time; os.kill(os.getpid(), 15); time.sleep(600)",
        "raise KeyboardInterrupt",
    ],
)
def test_what_ends_a_child_ends_no_other(light: Tasks, end: str) -> None:
    _, _, before = light.result()
    signals = "import signal; signal.pthread_sigmask(signal.SIG_UNBLOCK, [2, 3, 15])\n"
    light.start(signals + end)
    parent = psutil.Process(before)
    until(lambda: not parent.children())
    assert light.result()[2] == before
    assert parent.is_running()


def test_a_task_goes_on_when_the_warm_process_is_killed_and_the_next_is_a_new_process(
    tasks: Tasks,
) -> None:
    _, _, parent = tasks.result()
    go = tasks.folder / "go"
    code = "import pathlib, time\nfrom fedsurrogate.client_app.processes.own_account import end_with_parent\n"
    code += f"end_with_parent(0)\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)"
    working = tasks.start(code)
    until(lambda: len(psutil.Process(parent).children()) == 1)
    time.sleep(0.3)
    psutil.Process(parent).kill()
    assert tasks.result()[2] == os.getpid()
    go.touch()
    tasks.read(working)


def test_it_starts_again_some_time_after_it_was_killed(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, before = tasks.result()
    psutil.Process(before).kill()
    assert tasks.result()[2] == os.getpid()
    monkeypatch.setattr(app_process, "PAUSE", 0.0)
    tasks.starter.tend()
    assert tasks.result()[2] not in (os.getpid(), before)


def test_a_new_version_is_used_from_the_next_task_on(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tasks.result()[2]
    assert tasks.result()[2] == before
    monkeypatch.setattr(app_process.own_account, "installed", lambda: (1,))
    assert tasks.result()[2] not in (before, os.getpid())
    until(lambda: _ended(before))


def test_an_upgrade_changes_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in ("common", "client_app"):
        (tmp_path / room / "part").mkdir(parents=True)
        (tmp_path / room / "part" / "a.py").write_text("1")
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.setattr(own_account, "PACKAGE", tmp_path)
    monkeypatch.setattr(own_account.sysconfig, "get_path", lambda name: str(packages))
    seen = [INSTALLED()]
    assert INSTALLED() == seen[0]
    (tmp_path / "common" / "part" / "a.py").write_text("22")
    seen.append(INSTALLED())
    (tmp_path / "client_app" / "b.py").touch()
    seen.append(INSTALLED())
    (packages / "torch-9.dist-info").mkdir()
    seen.append(INSTALLED())
    assert len(set(seen)) == 4


def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(APP_FOLDER))
    with (made := Tasks(tmp_path, **{app_process.SWITCH: "0"})).starter:
        assert made.result()[2] == os.getpid()


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        *((phase, signal.SIGKILL) for phase in ("imports", "waits", "works")),
        ("waits", signal.SIGTERM),
        ("works", signal.SIGINT),
    ],
)
def test_nothing_is_left_when_its_parent_ends(
    tmp_path: Path, phase: str, number: signal.Signals
) -> None:
    """A child that has no message yet ends at once; one that works ends when its work is done."""
    Tasks(tmp_path)
    begun = f"import pathlib, time; pathlib.Path({str(tmp_path / 'begun')!r}).touch()\n"
    works = "from fedsurrogate.client_app.processes.own_account import end_with_parent\nend_with_parent(0)\n"
    code = begun + (works + "time.sleep(2)" if phase == "works" else "time.sleep(600)")
    environment = os.environ | {"PYTHONPATH": str(APP_FOLDER), "LIGHT": "numpy"}
    host = subprocess.Popen([sys.executable, "-c", HOST, str(tmp_path), code], env=environment)
    own = psutil.Process(host.pid)
    if phase == "imports":
        until(lambda: bool(own.children()))
    else:
        until(lambda: (tmp_path / "begun").exists())
    left = own.children(recursive=True)
    host.send_signal(number)
    host.wait(PATIENCE)
    _, alive = psutil.wait_procs(left, 60)
    assert alive == []
    assert (tmp_path / "done").exists() == (phase == "works")


def _ended(number: int) -> bool:
    return not psutil.pid_exists(number)

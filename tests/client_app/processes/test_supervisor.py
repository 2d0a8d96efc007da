"""Processes that `site join` starts, restarts and ends; short-lived stand-ins replace Flower's
processes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode as supernode_arguments

from fedsurrogate.client_app.cli.join import check_settings
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.processes.own_account import ARGUMENTS, SETTINGS
from fedsurrogate.client_app.processes.supervisor import NODE_MODULE, TWIN, Child, site_commands
from fedsurrogate.common.errors import ConfigError, FedSurrogateError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from tests.e2e.processes import PATIENCE, heed_signals, until

# The SuperNode: logs as Flower's does, and sends a reply when the app has given it. The app has its
# own process below it, as a task has, and gives its reply when it is ended.
NODE = """
import pathlib, signal, sys, time
home, words = pathlib.Path(sys.argv[1]), sys.argv[2:]
def end(*_):
    print("node ended", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
for word in words:
    print(word, flush=True)
    if word.startswith("exit"):
        sys.exit(7)
while True:
    time.sleep(0.05)
    if (home / "answer").exists():
        (home / "answer").unlink()
        time.sleep(0.5)
        print("Sent successfully", flush=True)
"""
TASK = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep(0.3)
    pathlib.Path(sys.argv[1], "answer").touch()
    print("task answered", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("task begun", flush=True)
time.sleep(60)
"""
APP = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {TASK!r}, sys.argv[1]])
time.sleep(60)
"""
SITE = """
import json, pathlib, sys
from fedsurrogate.client_app.processes import supervisor as join
from fedsurrogate.client_app.diagnostics.connection_checks import Finding
from fedsurrogate.common.errors import RunError
home, words, findings = pathlib.Path(sys.argv[1]), *json.loads(sys.argv[2])
join.FIRST_PAUSE = 0.1
node, task_app = json.loads(sys.argv[3])
def look():
    rows = findings.pop(0) if len(findings) > 1 else findings[0]
    return [Finding(*row) for row in rows]
commands = join.Commands(
    ([sys.executable, "-c", node, str(home), *words], {}),
    ([sys.executable, "-c", task_app, str(home)], {}),
    look,
)
try:
    join.Supervisor(commands, lambda name, line: print(f"{name}: {line}", flush=True)).run()
except RunError as error:
    print(f"error: {error}", flush=True)
    sys.exit(1)
"""
CONNECTS = ["Starting Runtime API on 127.0.0.1", "SuperNode ID: 1"]
WELL = [["name", "PASS", "found"]]


class Site:
    """A supervisor with stand-ins below it, in its own process."""

    def __init__(self, home: Path, words: list[str], findings: list[list[list[str]]]) -> None:
        self._log = home / "log.txt"
        command = [
            sys.executable,
            "-c",
            SITE,
            str(home),
            json.dumps([words, findings]),
            json.dumps([NODE, APP]),
        ]
        settings = os.environ | {"PYTHONPATH": str(APP_FOLDER)}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=settings, preexec_fn=heed_signals
            )

    @property
    def written(self) -> str:
        """Everything the supervisor has printed."""
        return self._log.read_text()

    def await_text(self, text: str, times: int = 1) -> None:
        until(lambda: self.written.count(text) >= times or self.process.poll() is not None)
        assert self.written.count(text) >= times, self.written

    def below(self) -> list[psutil.Process]:
        """The processes that were started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def started(self, code: str) -> psutil.Process:
        """The process that runs this code."""
        (found,) = (process for process in self.below() if code in process.cmdline())
        return found


def alive(process: psutil.Process) -> bool:
    """Whether the process runs; a zombie counts as ended."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


Start = Callable[..., Site]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    sites: list[Site] = []

    def begin(words: list[str], findings: list[list[list[str]]] | None = None) -> Site:
        sites.append(Site(tmp_path, words, findings or [WELL]))
        return sites[-1]

    yield begin
    for site in sites:
        site.process.terminate()
    for site in sites:
        site.process.wait(PATIENCE)


def test_a_supernode_is_never_started_without_process_isolation(tmp_path: Path) -> None:
    config = 'site="north" data="digits"'
    plain = site_commands("unix:/r/app", config, "127.0.0.1:9092", None, None)
    secured = site_commands(
        "unix:/r/app", config, "fl.example.org:9092", tmp_path / "ca.crt", tmp_path / "site.key"
    )
    for commands, insecure in ((plain, True), (secured, False)):
        program, variables = commands.node
        assert program == [sys.executable, "-P", "-m", NODE_MODULE]
        runtime, *link = json.loads(variables[ARGUMENTS])
        parsed = supernode_arguments().parse_args([*flower().supernode_flags(runtime), *link])
        assert (parsed.isolation, runtime) == ("process", "unix:/r/app")
        assert (parsed.insecure, parsed.node_config, variables[SETTINGS]) == (insecure, None, "")
        (_, *words), variables = commands.app
        assert words == ["app"]
        assert json.loads(variables[ARGUMENTS]) == ["--runtime", "unix:/r/app", "--joined"]
        assert variables[SETTINGS] == config
    assert (parsed.root_certificates, parsed.auth_supernode_private_key) == (
        str(tmp_path / "ca.crt"),
        str(tmp_path / "site.key"),
    )


def test_a_process_that_dies_is_started_again(start: Start) -> None:
    site = start(CONNECTS)
    site.await_text("task begun")
    first, app = site.started(NODE), site.started(APP)
    first.kill()
    site.await_text("SuperNode ID", 2)
    assert site.started(APP).pid == app.pid, "the app waits for its SuperNode"
    app.kill()
    site.await_text("task begun", 2)
    assert "the app has ended with exit code -9" in site.written


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_app_then_the_supernode_and_leaves_nothing(
    start: Start, number: signal.Signals
) -> None:
    site = start([*CONNECTS, "Receiving: train message"])
    site.await_text("task begun")
    started = site.below()
    assert len(started) == 3
    site.process.send_signal(number)
    assert site.process.wait(PATIENCE) == 0, site.written
    events = ("task answered", "Sent successfully", "node ended")
    assert [
        line.split(": ")[1] for line in site.written.splitlines() if line.endswith(events)
    ] == list(events)
    assert not any(map(alive, started))


def test_a_task_whose_starter_died_is_ended_too(start: Start) -> None:
    site = start(CONNECTS)
    site.await_text("task begun")
    orphan = site.started(TASK)
    site.started(APP).kill()
    site.await_text("task begun", 2)
    assert alive(orphan), "it may finish its work"
    site.process.terminate()
    assert site.process.wait(PATIENCE) == 0
    assert site.written.count("task answered") == 2
    assert not alive(orphan)


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux ends a process with the one that started it"
)
def test_a_killed_supervisor_leaves_no_supernode_and_no_app(start: Start) -> None:
    site = start(CONNECTS)
    site.await_text("task begun")
    direct = [site.started(NODE), site.started(APP)]
    task = site.started(TASK)
    site.process.kill()
    until(lambda: not any(map(alive, direct)))
    task.terminate()


def test_a_site_that_is_refused_is_not_started_and_the_remedy_is_named(start: Start) -> None:
    refused = [
        "key",
        "FAIL",
        "the coordinator does not know this site's key",
        "ask for `coordinator sites register`",
    ]
    site = start(CONNECTS, [[*WELL, refused]])
    assert site.process.wait(PATIENCE) == 1
    assert f"error: this site cannot join: key: {refused[2]}; {refused[3]}" in site.written
    assert "SuperNode ID" not in site.written


def test_a_coordinator_that_is_not_there_yet_is_waited_for(start: Start) -> None:
    away = [["port", "FAIL", "refused", "is it running?"]]
    site = start(CONNECTS, [away, away, WELL])
    site.await_text("connected")
    assert site.written.index("is it running?") < site.written.index("SuperNode ID")


def test_a_site_whose_key_is_connected_elsewhere_waits_as_it_says(start: Start) -> None:
    site = start(["Starting Runtime API", "Failed to activate SuperNode", "exit"], [WELL])
    site.await_text(f"join: {TWIN}; next attempt in", 4)
    assert site.process.poll() is None, "more attempts than of a SuperNode that cannot start"
    own = [line for line in site.written.splitlines() if line.startswith("join: ")]
    assert all(line.startswith(f"join: {TWIN}; next attempt in") for line in own)
    site.process.send_signal(signal.SIGTERM)
    assert site.process.wait(PATIENCE) == 0


def test_a_supernode_that_cannot_start_ends_it_with_what_it_wrote(start: Start) -> None:
    doubt = ["key", "WARN", "no key of this site is given", "give --auth-supernode-private-key"]
    site = start(["Starting Runtime API", "some reason", "exit"], [[doubt]])
    assert site.process.wait(PATIENCE) == 1
    _, _, error = site.written.partition("error: ")
    assert "some reason" in error
    assert "key: no key of this site is given; give --auth-supernode-private-key" in error
    assert site.written.count("node: some reason") == 3
    assert "Ctrl-C" not in site.written, "nobody has pressed it"


def test_what_a_process_writes_cannot_steer_the_terminal() -> None:
    child = Child("x")
    child.start(
        [sys.executable, "-c", r"print('\x1b[31mred\x1b[0m \x1b]0;title\x07 a\rb\n\ncaf\xe9')"],
        os.environ,
    )
    until(lambda: child.ended() is not None)
    time.sleep(0.1)
    assert child.lines() == ["red \ufffd]0;title\ufffd a b", "café"]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ('site="north"', "data is not set"),
        ('data="imagefolder" data-dir="{tmp}/nowhere"', "data-dir = "),
        ('data="imagefolder" data-dir="{tmp}" check-log-dir="{tmp}/check-log"', "site ledger open"),
        ('data="digits" policy="{tmp}/none.toml"', "none.toml"),
        ('data="digits" policy="{tmp}/wrong.toml"', "epsilon-totl"),
        ('data="digits" peers="{tmp}/none.toml"', "peers = "),
        ('data="digits" weights-path="{tmp}/none.safetensors"', "weights-path = "),
        ('data="digits" state-dir="{tmp}/wrong.toml/below"', "state-dir = "),
        ('data="digits" cache-dir="{tmp}/wrong.toml"', "cache-dir = "),
    ],
)
def test_a_node_config_that_cannot_work_is_refused_by_name(
    tmp_path: Path, config: str, named: str
) -> None:
    (tmp_path / "wrong.toml").write_text("epsilon-totl = 1.0")
    folders = f'state-dir="{tmp_path}/state" cache-dir="{tmp_path}/cache"'
    check_settings(parse_node_config(parse_overrides([f'data="digits" {folders}'])))
    given = parse_overrides([folders]) | parse_overrides([config.format(tmp=tmp_path)])
    with pytest.raises(FedSurrogateError, match=named):
        check_settings(parse_node_config(given))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--root-certificates is missing"),
        (["--insecure", "--root-certificates", "ca.crt"], "--insecure excludes"),
        (["--root-certificates", "nowhere.crt"], "nowhere.crt"),
        (["--insecure", "--superlink", "https://x"], "HOST:PORT"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_any_process_starts(
    flags: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsurrogate.client_app.cli.join import join as command
    from fedsurrogate.client_app.processes import supervisor as join

    monkeypatch.setattr(
        join, "Supervisor", lambda *_: pytest.fail("a process would have been started")
    )
    named_flags = {flag: index for index, flag in enumerate(flags) if flag.startswith("--")}
    value = lambda flag, default: flags[named_flags[flag] + 1] if flag in named_flags else default  # noqa: E731
    authority = value("--root-certificates", None)
    node = f'data="digits" state-dir="{tmp_path}/state" cache-dir="{tmp_path}/cache"'
    with pytest.raises(ConfigError, match=named):
        command(
            None,
            [node],
            value("--superlink", "127.0.0.1:9092"),
            Path(authority) if authority else None,
            insecure="--insecure" in flags,
        )

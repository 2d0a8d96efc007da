"""Real Flower processes on loopback: a SuperLink, SuperNodes and `flwr run`, all stopped by their
process id.
"""

import atexit
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.processes.app_report import reporting
from fedsurrogate.client_app.processes.own_account import SETTINGS, own_folder
from fedsurrogate.client_app.processes.supervisor import NODE_MODULE
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower.environment import QUIET
from fedsurrogate.common.security.registrations import VARIABLE
from fedsurrogate.server_app.control_api import list_runs
from fedsurrogate.server_app.deployment.addresses import connect
from fedsurrogate.server_app.deployment.submit import APP_FOLDER, stop_process
from tests.children import ran

BIN = Path(sys.executable).parent
# How the programs of this checkout are started.
COORDINATOR, SITE = (
    (sys.executable, "-m", f"fedsurrogate.{side}_app.cli.main") for side in ("server", "client")
)
Environment = Mapping[str, str]
# Seconds after which a test gives up. It passes in a fraction; on a machine that ten others share
# it may take this long.
PATIENCE = 600.0
# It has imported what a command needs, which takes a new process four seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.e2e.imported"])
# Flower's own command; that of newer versions reaches no Unix socket by itself.
FLWR = (
    sys.executable,
    "-P",
    "-c",
    "from importlib.metadata import version\n"
    "if version('flwr') >= '1.35':\n"
    "    from fedsurrogate.common.flower.v142_fleet import reach_unix_sockets\n"
    "    reach_unix_sockets()\n"
    "from flwr.cli.app import app\n"
    "app(prog_name='flwr')",
)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


def ready(runtime: str) -> ExitStack:
    """Stands for a site's app that has found its data, until it is closed."""
    kept = ExitStack()
    kept.enter_context(reporting(runtime, NodeConfig(site="s", data="digits"))).found_data = True
    return kept


def environment(home: Path) -> dict[str, str]:
    return (
        os.environ
        | QUIET
        | {"FLWR_HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    )


def coordinator(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the coordinator command as a user would, from `cwd`."""
    return _typed("coordinator", "fedsurrogate.server_app.cli.main", arguments, cwd)


def site_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the site command as a hospital would."""
    return _typed("site", "fedsurrogate.client_app.cli.main", arguments, Path.cwd())


def _typed(
    name: str, module: str, words: Sequence[str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, forked from one that has imported what it needs."""
    with TemporaryDirectory() as printed:
        process = FORKS.Process(
            target=_become, args=(module, [name, *words], cwd, dict(os.environ), printed)
        )
        process.start()
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired([name, *words], PATIENCE)
        out, errors = (Path(printed, name).read_text() for name in "12")
    return subprocess.CompletedProcess([name, *words], process.exitcode or 0, out, errors)


def _become(
    module: str, words: Sequence[str], cwd: Path, settings: Environment, printed: str
) -> None:
    """In the new process: be the command, and print to the files 1 and 2."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(settings, PYTHONPATH=str(APP_FOLDER))
    for number in (1, 2):
        os.dup2(os.open(f"{printed}/{number}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv = list(words)
    heed_signals()
    try:
        import_module(module).main()
    finally:
        atexit._run_exitfuncs()


class Federation:
    """A running SuperLink with SuperNodes. `run` submits the app and returns Flower's status of the
    run.

    papers: a folder of certificates and keys that `coordinator sites certs` has made for 127.0.0.1 and
    the sites `names`, or 0, 1, ...; then all traffic uses TLS, and the SuperLink accepts only nodes
    with registered keys. kits: where each site has its credentials, if it made its own key.
    at_nodes: environment of SuperNodes. isolated: every app runs below a
    separate process, as in deploy/: `execs` has the coordinator's SuperExec, then `site app` of
    every site. Otherwise, SuperNodes start the code that a run brings, which no hospital should
    allow.
    """

    def __init__(
        self,
        home: Path,
        node_configs: Sequence[str],
        certificates_and_keys: Path | None = None,
        at_nodes: Environment | None = None,
        isolated: bool = True,
        names: Sequence[str] = (),
        kits: Path | None = None,
    ) -> None:
        self._names = list(names or (str(index) for index in range(len(node_configs))))
        self._isolation = ["--isolation", "process"] if isolated else []
        self.home, self.certificates_and_keys, self._at_nodes = (
            home,
            certificates_and_keys,
            at_nodes or {},
        )
        self._kits = kits or (certificates_and_keys and certificates_and_keys / "sites")
        self._fleet, http = free_ports(2)
        # Its SuperNodes speak HTTP.
        self._http = {"fleet-http": http} if version("flwr").startswith("1.42") else {}
        self._kept = ExitStack()
        # Below `home`, the path of a socket may be too long.
        self.sockets = Path(self._kept.enter_context(own_folder()))
        self._apps = [self._app_address(index) for index in range(len(node_configs))]
        home.joinpath("config.toml").write_text(
            f'[superlink.local-test]\naddress = "{self.control[1]}"\ninsecure = true\n'
        )
        self.superlink = self.start_superlink()
        if certificates_and_keys:
            done = coordinator(
                "sites", "register", str(certificates_and_keys), *self.control, cwd=home
            )
            assert done.returncode == 0, done.stderr
        self._configs, self._lines = list(node_configs), [self.fleet] * len(node_configs)
        self.nodes = [self._start_node(index) for index in range(len(node_configs))]
        for address in self._apps:
            _wait_for(address)
        self.execs = (
            [self._start_exec(index) for index in range(-1, len(node_configs))] if isolated else []
        )

    @property
    def fleet(self) -> str:
        """Address of the SuperNodes' API: host:port."""
        return f"127.0.0.1:{self._http.get('fleet-http', self._fleet)}"

    @property
    def control(self) -> list[str]:
        """Flags with which the coordinator's commands reach the SuperLink."""
        trust = (
            ["--root-certificates", f"{self.certificates_and_keys}/ca.crt"]
            if self.certificates_and_keys
            else []
        )
        return ["--control", f"unix:{self.sockets}/control:9093", *trust]

    def credentials(self, site: str) -> list[str]:
        """Flags with a site's credentials, for a SuperNode or the doctor."""
        kit = self._kits / site  # type: ignore[operator]
        return [
            "--root-certificates",
            f"{kit}/ca.crt",
            "--auth-supernode-private-key",
            f"{kit}/site.key",
        ]

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of the coordinator that reaches this SuperLink."""
        return coordinator(*words, *self.control, cwd=self.home)

    def restart_node(self, index: int) -> None:
        """Restart a stopped SuperNode, with the same settings and folders."""
        (self.sockets / str(index)).unlink(missing_ok=True)
        self.nodes[index] = self._start_node(index)
        _wait_for(self._apps[index])

    def join(self, node_config: str, line: str, name: str | None = None) -> None:
        """Start another SuperNode, which reaches the SuperLink at `line`, host:port. Its key: that
        of `name`.
        """
        self._names.append(name or str(len(self._names)))
        self._apps.append(self._app_address(len(self._apps)))
        self._configs.append(node_config)
        self._lines.append(line)
        self.nodes.append(self._start_node(len(self.nodes)))
        _wait_for(self._apps[-1])
        if self._isolation:
            self.execs.append(self._start_exec(len(self.nodes) - 1))

    def restart_exec(self, index: int) -> None:
        """Restart a SuperExec: the coordinator's at 0, then those of the sites."""
        self.execs[index] = self._start_exec(index - 1)

    def _start_exec(self, index: int) -> subprocess.Popen[bytes]:
        if index >= 0:
            words = ("site", "app", "--joined", "--runtime", self._apps[index])
            own = {SETTINGS: self._configs[index]}
            return self._start(f"app-{index}", *words, more=own | dict(self._at_nodes))
        flags = ["app", "--runtime", f"unix:{self.sockets}/app:9091"]
        # Separate from the SuperLink, as in the containers: it does not inherit the path of the
        # table of registered sites.
        table = (
            {VARIABLE: str(self.certificates_and_keys / "registered.json")}
            if self.certificates_and_keys
            else {}
        )
        return self._start("superexec", "coordinator", *flags, more=table)

    def _app_address(self, index: int) -> str:
        """Where a SuperNode and its app talk."""
        return (
            f"unix:{self.sockets}/{index}" if self._isolation else f"127.0.0.1:{free_ports(1)[0]}"
        )

    def _start_node(self, index: int) -> subprocess.Popen[bytes]:
        link = (
            ["--insecure"]
            if self.certificates_and_keys is None
            else self.credentials(self._names[index])
        )
        link += ["--superlink", self._lines[index]]
        command, own = ["python", "-P", "-m", NODE_MODULE, self._apps[index]], dict(self._at_nodes)
        if not self._isolation:
            # Each site is a machine: of two with one folder, one may load what Flower has half copied.
            own = {"FLWR_HOME": f"{self.home}/machines/{index}"} | own
            command = ["flower-supernode", "--clientappio-api-address", self._apps[index]]
            link += ["--node-config", self._configs[index]]
        return self._start(f"supernode-{index}", *command, *link, more=own)

    def start_superlink(self) -> subprocess.Popen[bytes]:
        """Start or restart the SuperLink, with the same addresses and the same database."""
        addresses = {
            "fleet-api": f"127.0.0.1:{self._fleet}",
            "control-api": self.control[1],
            "serverappio-api": f"unix:{self.sockets}/app:9091",
        } | {name: f"127.0.0.1:{port}" for name, port in self._http.items()}
        flags = [part for name, at in addresses.items() for part in (f"--{name}-address", at)]
        database = str(self.home / "state.db")
        flags += ["--insecure"]
        if self.certificates_and_keys is not None:
            named = {
                "ssl-ca-certfile": "ca.crt",
                "ssl-certfile": "server.crt",
                "ssl-keyfile": "server.key",
            }
            flags[-1:] = ["--enable-supernode-auth"]
            flags += [
                part
                for name, file in named.items()
                for part in (f"--{name}", str(self.certificates_and_keys / file))
            ]
        self.superlink = self._start(
            "superlink",
            "coordinator",
            "superlink",
            "--database",
            database,
            *self._isolation,
            *flags,
        )
        _wait_for(self.control[1])
        return self.superlink

    def run(self, run_config: str, cwd: Path) -> str:
        """Submit the app, wait for its end, and return Flower's status."""
        return self.wait(self.submit(run_config, cwd))

    def submit(self, run_config: str, cwd: Path, app: Path = APP_FOLDER) -> str:
        """Submit the app and return the run's id."""
        return submit(self.home, "local-test", app, cwd, "--run-config", run_config)

    def wait(self, run_id: str, seconds: float = PATIENCE) -> str:
        """Wait until Flower says the run has finished; its status.

        Over one connection a second, and not by `flwr list`, whose start takes longer than many runs.
        """
        authority = self.certificates_and_keys / "ca.crt" if self.certificates_and_keys else None
        end, status = time.monotonic() + seconds, "unknown"
        while time.monotonic() < end and not status.startswith("finished"):
            time.sleep(0.5)
            # A restarting SuperLink gives no status.
            with suppress(RunError):
                runs = list_runs(self.control[1], authority)
                status = next((each.status for each in runs if each.id == run_id), "unknown")
        return status

    def stop(self) -> None:
        """Stop all processes that still run, those of one kind together."""
        with ThreadPoolExecutor(1 + len(self.nodes)) as threads:
            for kind in (self.execs, self.nodes, [self.superlink]):
                list(threads.map(stop_process, (process.pid for process in kind)))
        # An app whose parents were killed keeps running for a while.
        for orphan in psutil.process_iter():
            with suppress(psutil.Error):
                if orphan.environ().get("FLWR_HOME", "").startswith(str(self.home)):
                    stop_process(orphan.pid)
        self._kept.close()

    def _start(
        self, name: str, *command: str, more: Environment | None = None
    ) -> subprocess.Popen[bytes]:
        log = (self.home / f"{name}.log").open("a")
        arguments, env = (
            [str(BIN / command[0]), *command[1:]],
            environment(self.home) | dict(more or {}),
        )
        return subprocess.Popen(
            arguments, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=self.home
        )


def heed_signals() -> None:
    """Run before a command: background processes of a shell ignore Ctrl-C, and the command would
    inherit that.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def federation(
    home: Path, node_configs: Sequence[str], *options: Any, **named: Any
) -> Iterator[Federation]:
    """Start all processes, wait until every node is registered, and stop them later. options: of
    `Federation`.
    """
    home.mkdir(parents=True, exist_ok=True)
    running = Federation(home, node_configs, *options, **named)
    try:
        yield running
    finally:
        running.stop()


def submit(home: Path, superlink: str, app: Path, cwd: Path, *flags: str) -> str:
    """Submit an app to a SuperLink that the configuration in `home` names; return the run's id."""
    command, env = [*FLWR, "run", str(app), superlink, *flags], environment(home)
    done = ran(command, cwd=cwd, env=env, timeout=PATIENCE)
    (home / "flwr-run.log").write_text(done.stdout + done.stderr)
    run_id = re.search(r"Successfully started run (\d+)", done.stdout)
    assert run_id, done.stdout + done.stderr
    return run_id.group(1)


def wait(home: Path, superlink: str, run_id: str, seconds: float = PATIENCE) -> str:
    """Wait until Flower says the run has finished; its status."""
    command = [*FLWR, "list", superlink, "--run-id", run_id, "--format", "json"]
    end, status = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        env = environment(home)
        try:
            listed = ran(command, env=env, timeout=60)
        except subprocess.TimeoutExpired:  # on a busy machine
            continue
        # A restarting SuperLink gives no status.
        found = re.search(r'"status": *"([a-z:]+)"', listed.stdout)
        status = found.group(1) if found else f"unknown: {listed.stdout}{listed.stderr}"
        if status.startswith("finished"):
            break
        time.sleep(1)
    return status


def events(output: Path, kind: str) -> list[dict[str, Any]]:
    """Events of all runs in a folder, oldest first."""
    lines = [
        line
        for file in sorted(output.glob("*/events.jsonl"))
        for line in file.read_text().splitlines()
    ]
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def newest(output: Path) -> tuple[Path, dict[str, Any]]:
    """The newest run folder, and its metrics."""
    folders = [manifest.parent for manifest in output.glob("*/manifest.json")]
    folder = max(folders, key=lambda path: path.stat().st_mtime)
    return folder, json.loads((folder / "metrics.json").read_text())


def until(holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until a condition is true. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} seconds")
        time.sleep(0.2)


def listens(address: str) -> bool:
    """Whether a program listens at host:port or unix:/path."""
    try:
        connect(address, seconds=1)
    except OSError:
        return False
    return True


def _wait_for(address: str) -> None:
    until(lambda: listens(address))

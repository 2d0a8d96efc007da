"""Other users of a machine, and its network, reach no API between a SuperNode or SuperLink and its
app.
"""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fedsurrogate.server_app.deployment.submit import APP_FOLDER, stop_process
from tests.children import ran, refused
from tests.e2e.processes import environment, free_ports, ready, site_command, until
from tests.other_account import as_other_account

pytestmark = pytest.mark.slow
CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


def start(home: Path, program: str, *arguments: str) -> subprocess.Popen[bytes]:
    log = (home / "log").open("ab")
    settings = environment(home) | {"PYTHONPATH": str(APP_FOLDER)}
    return subprocess.Popen(
        [sys.executable, "-m", program, *arguments], stdout=log, stderr=log, env=settings, cwd=home
    )


def ports(process: subprocess.Popen[bytes]) -> set[int]:
    """Ports on which the process listens, or one that it has started."""
    parent = psutil.Process(process.pid)
    return {
        each.laddr.port
        for one in (parent, *parent.children(recursive=True))
        for each in one.net_connections()
        if each.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize("side", ["site", "coordinator"])
def test_the_runtime_api_is_a_socket_of_this_user_alone(side: str, tmp_path: Path) -> None:
    (fleet,) = free_ports(1)
    if side == "site":
        socket, opened = tmp_path / "app", set[int]()
        link = ["--superlink", f"127.0.0.1:{fleet}", "--insecure"]
        command = ["fedsurrogate.client_app.cli.main", "node", "--runtime", f"unix:{socket}", *link]
    else:
        socket, opened = tmp_path / "app:9091", {fleet}
        addresses = [
            "--fleet-api-address",
            f"127.0.0.1:{fleet}",
            "--control-api-address",
            f"unix:{tmp_path}/control:9093",
        ]
        command = [
            "fedsurrogate.server_app.cli.main",
            "superlink",
            "--insecure",
            "--isolation",
            "process",
            *addresses,
        ]
        command += ["--serverappio-api-address", f"unix:{socket}"]
    # As an app that has found its data; only a site's node looks for it.
    app = ready(f"unix:{socket}")
    process = start(tmp_path, *command)
    try:
        until(socket.exists)
        until(lambda: ports(process) == opened)
        assert stat.S_IMODE(socket.stat().st_mode) & 0o077 == 0
        if os.getuid() == 0:
            tmp_path.chmod(0o755)
            foreign = ran(as_other_account(CONNECT, str(socket)))
            assert "PermissionError" in foreign.stderr
        # A killed process leaves the file; the next one takes its place.
        before = socket.stat().st_ino, socket.stat().st_mtime_ns
        parent = psutil.Process(process.pid)
        for each in (*parent.children(recursive=True), parent):
            each.kill()
        process.wait()
        assert socket.exists()
        time.sleep(0.1)
        process = start(tmp_path, *command)
        until(
            lambda: socket.exists() and (socket.stat().st_ino, socket.stat().st_mtime_ns) != before
        )
    finally:
        stop_process(process.pid)
        app.close()


@pytest.mark.parametrize(
    "words",
    [
        ("node", "--superlink", "127.0.0.1:1", "--insecure"),
        ("app", "--node-config", "data='digits'"),
    ],
)
def test_neither_node_nor_app_of_a_site_talks_through_a_port(words: tuple[str, ...]) -> None:
    """Another account binds it once its process has ended; the app then took settings from there."""
    refused(
        site_command(*words, "--runtime", "127.0.0.1:9094"),
        "every user of this machine may open a port",
    )

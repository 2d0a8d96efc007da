"""A run over TLS among sites whose keys are known, and what the doctor says to those whose are not."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_app.certificates import issue
from tests.e2e.processes import BIN, Federation, coordinator, environment, federation, site_command

NODE = 'data="digits" partition-id={} num-partitions=2'


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    home = tmp_path_factory.mktemp("tls")
    done = coordinator(
        "certs", "papers", "--host", "127.0.0.1", "--site", "0", "--site", "1", "--site", "stranger", cwd=home
    )
    assert done.returncode == 0, done.stderr
    nodes = [f'{NODE.format(i)} cache-dir="{home}/cache" state-dir="{home}/state-{i}"' for i in range(2)]
    with federation(home / "flower", nodes, home / "papers") as found:
        yield found


def doctor(running: Federation, *flags: str) -> dict[str, str]:
    node = f'{NODE.format(0)} cache-dir="{running.home}/cache" state-dir="{running.home}/doctor"'
    done = site_command("doctor", "--node-config", node, "--superlink", running.fleet, *flags, "--json")
    rows = {row["what"]: row["state"] for row in json.loads(done.stdout)}
    assert done.returncode == int("FAIL" in rows.values())
    return {what: rows[what] for what in ("name", "port", "TLS", "key") if what in rows}


def test_a_run_finishes_over_tls_among_registered_sites(running: Federation) -> None:
    output = running.home / "out"
    settings = 'fedpft.covariance="spherical" sites=2 deadline=120.0 head.min-steps=50 head.epochs=1'
    assert running.run(f'{settings} output-dir="{output}"', cwd=running.home) == "finished:completed"
    (folder,) = output.iterdir()
    assert json.loads((folder / "metrics.json").read_text())["sites"]["used"] == 2


def test_the_doctor_passes_a_registered_site_while_its_node_runs_and_changes_nothing(running: Federation) -> None:
    for _ in range(2):
        assert set(doctor(running, *running.credentials("0")).values()) == {"PASS"}
    assert running.nodes[0].poll() is None


def test_the_doctor_names_what_is_wrong_with_the_credentials(running: Federation, tmp_path: Path) -> None:
    assert doctor(running, *running.credentials("stranger"))["key"] == "FAIL"
    issue(tmp_path / "other", ("127.0.0.1",), ("0",))
    foreign = doctor(running, "--root-certificates", f"{tmp_path}/other/ca.crt")
    assert foreign == {"name": "PASS", "port": "PASS", "TLS": "FAIL"}


def test_a_node_with_an_unknown_key_does_not_start(running: Federation) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(BIN / "flower-supernode"), "--superlink", running.fleet, *running.credentials("stranger")]
    command += ["--clientappio-api-address", f"127.0.0.1:{port}", "--node-config", NODE.format(0)]
    with (running.home / "stranger.log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment(running.home), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        assert process.wait(120) != 0
    finally:
        # Flower leaves the SuperExec behind that it had started.
        os.killpg(process.pid, signal.SIGTERM)


def test_the_fleet_port_answers_no_control_request(running: Federation) -> None:
    text = (running.home / "config.toml").read_text().replace("local-test", "fleet")
    home = running.home / "attacker"
    home.mkdir()
    control = text.split('"')[1]
    (home / "config.toml").write_text(text.replace(control, running.fleet))
    command = [str(BIN / "flwr"), "supernode", "list", "fleet"]
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    listed = subprocess.run(
        [*command[:-1], "local-test"],
        env=environment(running.home),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert listed.returncode == 0

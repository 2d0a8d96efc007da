"""A run over TLS with sites whose keys are registered; and the doctor's message for an unregistered
key.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedsurrogate.common.security.registrations import TABLE, VARIABLE, read_table, write_table
from fedsurrogate.server_app.deployment.certificates import certify, issue
from fedsurrogate.server_app.deployment.enrolment import request_in
from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from tests.children import ok, ran, refused
from tests.e2e.processes import (
    BIN,
    PATIENCE,
    SITE,
    Federation,
    coordinator,
    environment,
    federation,
    ready,
    site_command,
    until,
)

EARLIER = "2026-01-01T00:00:00+00:00"
NODE = 'data="digits" partition-id={} num-partitions=2'


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    home = tmp_path_factory.mktemp("tls")
    ok(
        coordinator(
            "sites",
            "certs",
            "certificates",
            "--host",
            "127.0.0.1",
            "--site",
            "0",
            "--site",
            "1",
            cwd=home,
        )
    )
    nodes = [
        f'{NODE.format(i)} cache-dir="{home}/cache" state-dir="{home}/state-{i}"' for i in range(2)
    ]
    with federation(home / "flower", nodes, home / "certificates") as found:
        # Made after the sites' keys were registered, so it is not registered.
        issue(home / "certificates", (), ("stranger",))
        yield found


def doctor(running: Federation, *flags: str) -> dict[str, str]:
    node = f'{NODE.format(0)} cache-dir="{running.home}/cache" state-dir="{running.home}/doctor"'
    done = site_command(
        "doctor", "--node-config", node, "--superlink", running.fleet, *flags, "--json"
    )
    rows = {row["what"]: row["state"] for row in json.loads(done.stdout)}
    assert done.returncode == int("FAIL" in rows.values())
    return {what: rows[what] for what in ("name", "port", "TLS", "key") if what in rows}


def test_a_site_that_enrolled_is_heard_until_its_certificate_ends(
    running: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates_and_keys, own = tmp_path / "certificates", tmp_path / "west" / "certificates"
    # A folder of its own, where the others' keys are not; the table is one.
    shutil.copytree(
        running.certificates_and_keys, certificates_and_keys, ignore=shutil.ignore_patterns("sites")
    )  # type: ignore[arg-type]
    table_file = running.certificates_and_keys / TABLE  # type: ignore[operator]
    monkeypatch.setenv(VARIABLE, str(table_file))
    words = ["--hospital", "West", "--contact", "it@west.example", "--out", str(own.parent)]
    asked = site_command("enrol", "west", *words).stdout
    fingerprint = asked.partition("fingerprint ")[2].splitlines()[0]
    request = str(own.parent / "west.csr")
    words = [
        "sites", "accept", request, "--folder", str(certificates_and_keys), "--fingerprint",
        fingerprint,
    ]  # fmt: skip
    done = ok(running.type(*words))
    assert "registered west" in done.stdout
    link = ["--root-certificates", f"{certificates_and_keys}/ca.crt"]
    link += ["--auth-supernode-private-key", f"{own}/site.key"]

    def take_kit(certificate: bytes) -> None:
        (own / "site.crt").write_bytes(certificate)

    take_kit((certificates_and_keys / "sites" / "west" / "site.crt").read_bytes())
    assert set(doctor(running, *link).values()) == {"PASS"}
    # A day ends, which no test waits for.
    asks, _ = request_in(Path(request))
    take_kit(certify(certificates_and_keys, asks, 0))
    table = read_table(table_file)
    write_table(table_file, table | {"west": replace(table["west"], expires=EARLIER)})
    node = ["--superlink", running.fleet, *link, "--node-config", NODE.format(0)]
    with ready(f"unix:{tmp_path}/app"):
        done = site_command("node", "--runtime", f"unix:{tmp_path}/app", *node)
    assert done.returncode == 1
    assert "certificate: this site's ended on" in done.stderr
    # Whatever the site believes, the coordinator does not listen.
    (own / "site.crt").unlink()
    assert doctor(running, *link)["key"] == "FAIL"
    done = site_command("doctor", "--superlink", running.fleet, *link, "--link-only")
    assert "the time has ended for which the coordinator accepts this site's key" in done.stdout
    # The others are heard, and this one after its renewal.
    assert doctor(running, *running.credentials("0"))["key"] == "PASS"
    done = running.type("sites", "register", str(certificates_and_keys))
    assert "known      west" in done.stdout
    take_kit((certificates_and_keys / "sites" / "west" / "site.crt").read_bytes())
    assert set(doctor(running, *link).values()) == {"PASS"}
    done = running.type("sites", "unregister", str(certificates_and_keys), "west")
    assert doctor(running, *link)["key"] == "FAIL"


def test_a_run_that_fails_exits_with_one_and_says_why(running: Federation) -> None:
    done = refused(
        running.type("run", "-c", 'sites=2 deadline=600.0 classes="no-such-class"'),
        "the run ended as finished:failed",
    )
    assert "run folder: " in done.stderr


def test_keys_that_are_known_stay_known(running: Federation) -> None:
    (running.home / "known" / "sites" / "0").mkdir(parents=True)
    key = (running.certificates_and_keys / "sites" / "0" / "site.pub").read_bytes()  # type: ignore[operator]
    (running.home / "known" / "sites" / "0" / "site.pub").write_bytes(key)
    done = running.type("sites", "register", "known")
    assert (done.returncode, done.stdout.split()) == (0, ["known", "0"])
    for wrong in (["--control", "127.0.0.1:1"], ["--control", "nowhere"]):
        refused(coordinator("sites", "register", "known", *wrong, cwd=running.home), "error: ")


def test_the_doctor_passes_a_registered_site_while_its_node_runs_and_changes_nothing(
    running: Federation,
) -> None:
    for _ in range(2):
        assert set(doctor(running, *running.credentials("0")).values()) == {"PASS"}
    assert running.nodes[0].poll() is None


def test_the_doctor_names_what_is_wrong_with_the_credentials(
    running: Federation, tmp_path: Path
) -> None:
    assert doctor(running, *running.credentials("stranger"))["key"] == "FAIL"
    issue(tmp_path / "other", ("127.0.0.1",), ("0",))
    foreign = doctor(running, "--root-certificates", f"{tmp_path}/other/ca.crt")
    assert foreign == {"name": "PASS", "port": "PASS", "TLS": "FAIL"}


@pytest.mark.parametrize("wrong", ["key", "certificate", "none"])
def test_a_site_that_cannot_join_ends_and_says_what_to_do(
    running: Federation, tmp_path: Path, wrong: str
) -> None:
    node = f'{NODE.format(0)} cache-dir="{running.home}/cache" state-dir="{running.home}/join"'
    flags, reason = (
        running.credentials("stranger"),
        "the coordinator does not know this site's key; ask the coordinator to add it",
    )
    if wrong == "certificate":
        issue(tmp_path / "other", ("127.0.0.1",), ("0",))
        flags, reason = (
            ["--root-certificates", f"{tmp_path}/other/ca.crt"],
            "take ca.crt from the site kit again",
        )
    elif wrong == "none":
        flags, reason = ["--insecure"], "the coordinator requires TLS"
    done = refused(
        site_command("join", "--superlink", running.fleet, *flags, "--node-config", node), reason
    )
    assert "Starting Flower SuperNode" not in done.stdout


def test_a_barred_node_ends_with_one_line_and_no_trace(running: Federation, tmp_path: Path) -> None:
    flags = [
        "--superlink",
        running.fleet,
        *running.credentials("stranger"),
        "--node-config",
        NODE.format(0),
    ]
    with ready(f"unix:{tmp_path}/app"):
        done = site_command("node", "--runtime", f"unix:{tmp_path}/app", *flags)
    assert done.returncode == 1
    assert (
        "the coordinator does not know this site's key; ask the coordinator to add it"
        in done.stderr
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert "_InactiveRpcError" not in done.stdout + done.stderr
    assert "FAILED_PRECONDITION: " in done.stdout + done.stderr


def test_a_barred_node_tries_again_by_itself_where_it_is_told_to(
    running: Federation, tmp_path: Path
) -> None:
    flags = [
        "--superlink",
        running.fleet,
        *running.credentials("stranger"),
        "--node-config",
        NODE.format(0),
    ]
    command = [*SITE, "node", "--retry", "0.1", "--runtime", f"unix:{tmp_path}/app"]
    errors = tmp_path / "stderr.txt"
    app = ready(f"unix:{tmp_path}/app")
    with errors.open("w") as log:
        node = subprocess.Popen(
            [*command, *flags],
            env=os.environ | {"PYTHONPATH": str(APP_FOLDER)},
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    try:
        until(lambda: errors.read_text().count("it is started again in 0.1 s") >= 2)
        assert node.poll() is None
    finally:
        node.kill()
        node.wait()
        app.close()
    assert "Traceback" not in errors.read_text()


def test_the_fleet_port_answers_no_control_request(running: Federation) -> None:
    home = running.home / "attacker"
    home.mkdir()
    trust = f'root-certificates = "{running.certificates_and_keys}/ca.crt"'
    (home / "config.toml").write_text(f'[superlink.fleet]\naddress = "{running.fleet}"\n{trust}\n')
    command = [str(BIN / "flwr"), "supernode", "list", "fleet"]
    done = ran(command, env=environment(home), timeout=PATIENCE)
    assert done.returncode != 0
    ok(ran([*command[:-1], "local-test"], env=environment(running.home), timeout=PATIENCE))


def test_a_run_finishes_over_tls_without_the_site_that_claims_the_name_of_another(
    running: Federation,
) -> None:
    """Its registered key is that of site 2; its node-config names site 1."""
    certificates_and_keys = running.certificates_and_keys
    assert certificates_and_keys is not None
    issue(certificates_and_keys, (), ("2",))
    done = running.type("sites", "register", str(certificates_and_keys))
    # This includes the unknown site: it is registered from now on, but does not connect.
    assert done.stdout.split() == [
        "known", "0", "known", "1", "registered", "2", "registered", "stranger",
    ]  # fmt: skip
    running.join(
        f'{NODE.format(1)} cache-dir="{running.home}/cache" state-dir="{running.home}/state-2"',
        running.fleet,
    )
    settings = (
        'fedpft.covariance="spherical" sites=3 deadline=600.0 head.min-steps=50 head.epochs=1'
    )
    done = ok(running.type("run", "-c", settings))
    assert "finished:completed, 2 of 3 sites used" in done.stdout
    assert "learned" in done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    assert folder.parent == running.home / "runs"
    assert (folder / "report.html").is_file()
    card = json.loads((folder / "metrics.json").read_text())["card"]
    assert card["names"] == "registered"
    assert (card["used"], card["absent"], set(card["rejected"])) == (
        ["0", "1"],
        ["stranger"],
        {"2"},
    )
    assert "reports the name '1', but its key is registered as '2'" in card["rejected"]["2"]


def test_a_new_key_under_a_known_name_puts_the_old_one_out(running: Federation) -> None:
    certificates_and_keys = running.certificates_and_keys
    assert certificates_and_keys is not None
    if not (certificates_and_keys / "sites" / "2").exists():
        # Another worker runs the test that registers this site.
        issue(certificates_and_keys, (), ("2",))
        assert running.type("sites", "register", str(certificates_and_keys)).returncode == 0
    (certificates_and_keys / "sites" / "2").rename(running.home / "old")
    issue(certificates_and_keys, (), ("2",))
    node = read_table(certificates_and_keys / TABLE)["2"].node
    done = running.type("sites", "register", str(certificates_and_keys))
    assert done.stdout.split()[4:6] == ["replaced", "2"]
    assert read_table(certificates_and_keys / TABLE)["2"].node != node
    (running.home / "old").rename(certificates_and_keys / "sites" / "old")
    assert doctor(running, *running.credentials("old"))["key"] == "FAIL"
    assert doctor(running, *running.credentials("2"))["key"] == "PASS"
    done = running.type("sites", "register", str(certificates_and_keys))
    # A revoked key stays revoked.
    assert "taken back old" in done.stdout
    assert "old" not in read_table(certificates_and_keys / TABLE)


def test_a_key_that_was_taken_back_is_refused_and_those_of_others_are_not(
    running: Federation,
) -> None:
    """The last test: a site is missing after it."""
    certificates_and_keys = str(running.certificates_and_keys)
    doomed = running.nodes[1]
    for sentence in ("unregistered", "not known"):
        done = running.type("sites", "unregister", certificates_and_keys, "1")
        assert (done.returncode, done.stdout.strip()) == (0, f"{sentence:<14}1"), done.stderr
    assert "1" not in read_table(running.certificates_and_keys / TABLE)  # type: ignore[operator]
    doomed.wait(PATIENCE)
    assert doctor(running, *running.credentials("1"))["key"] == "FAIL"
    assert doctor(running, *running.credentials("0"))["key"] == "PASS"
    # The site takes part again with a new key, by the steps that `register` prints.
    shown = running.type("sites", "register", certificates_and_keys)
    assert "taken back 1" in shown.stdout
    steps = [
        line.partition(": ")[2].strip()
        for line in shown.stdout.splitlines()
        if f"coordinator sites certs {certificates_and_keys}" in line
    ]
    (step,) = [each for each in steps if "--site 1 " in f"{each} "]
    ok(coordinator(*step.split()[1:], cwd=running.home))
    again = running.type("sites", "register", certificates_and_keys)
    assert "registered 1" in again.stdout
    running.restart_node(1)
    assert doctor(running, *running.credentials("1"))["key"] == "PASS"
    listed = json.loads(running.type("sites", "list", certificates_and_keys, "--json").stdout)
    assert {"connected", "key revoked"} <= {row["health"] for row in listed}
    for wrong in (["nobody", *running.control], ["1", "--control", "127.0.0.1:1"]):
        refused(
            coordinator("sites", "unregister", certificates_and_keys, *wrong, cwd=running.home),
            "error: ",
        )

"""Findings of `site doctor` on machines and links with one fault each."""

import json
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fedsurrogate.client_app.audit.disclosure import check_run
from fedsurrogate.client_app.cli import main as cli
from fedsurrogate.client_app.cli.approve import approve
from fedsurrogate.client_app.diagnostics.connection_checks import Finding, Link, check_link
from fedsurrogate.client_app.diagnostics.site_checks import (
    check_isolation,
    check_site,
    is_isolated,
    is_supernode,
    starts_client_apps,
)
from fedsurrogate.client_app.features import site_features
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.governance.gate import open_gate, open_ledger
from fedsurrogate.client_app.governance.ledger import one_run
from fedsurrogate.client_app.governance.release import entry
from fedsurrogate.client_app.methods.job import MethodOutput
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.client_app.processes.supervisor import looked_at
from fedsurrogate.common.errors import BudgetError, ConfigError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.documents import Proposal, SignedProposal
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.server_app.deployment.certificates import _make_server, _private, issue
from tests.client_app.governance.ledger_processes import release

Captured = pytest.CaptureFixture[str]


@contextmanager
def listening(credentials: Path | None) -> Iterator[int]:
    """The port of a server that uses TLS with these certificates and keys; without them it sends
    nothing.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if credentials is not None:
        context.load_cert_chain(credentials / "server.crt", credentials / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection = server.accept()[0]
                except OSError:
                    return
                with connection:
                    try:
                        if credentials is None:
                            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                        else:
                            context.wrap_socket(connection, server_side=True).close()
                    except OSError:
                        pass

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def link(port: int, authority: Path | None = None, host: str = "localhost") -> dict[str, Finding]:
    return {each.what: each for each in check_link(Link.parse(f"{host}:{port}", authority, None))}


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    issue(folder, ("localhost",), ())
    return folder


def test_every_step_to_the_coordinator_passes_where_nothing_is_wrong(credentials: Path) -> None:
    with listening(credentials) as port:
        found = link(port, credentials / "ca.crt")
    assert {what: each.state for what, each in found.items()} == {
        "name": "PASS",
        "port": "PASS",
        "TLS": "PASS",
        "key": "WARN",
    }
    assert "trusted" in found["TLS"].found


def test_a_port_nobody_listens_on_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = link(port)
    assert (found["name"].state, found["port"].state) == ("PASS", "FAIL")
    assert str(port) in found["port"].found
    assert "Fleet port" in found["port"].remedy


def test_certificates_that_cannot_be_trusted_fail_with_their_remedy(
    credentials: Path, tmp_path: Path
) -> None:
    issue(tmp_path / "other", ("localhost",), ())
    issue(tmp_path / "old", ("localhost",), (), days=0)
    issue(tmp_path / "soon", ("localhost",), (), days=20)
    with listening(credentials) as port:
        foreign = link(port, tmp_path / "other" / "ca.crt")["TLS"]
        unread = link(port, credentials / "server.key")["TLS"]
    shutil.copytree(credentials, tmp_path / "renamed")
    # For a host name that is not only a local name.
    _make_server(tmp_path / "renamed", _private(credentials / "ca.key"), ("fl.example.org",), 30)
    with listening(tmp_path / "renamed") as port:
        renamed = link(port, credentials / "ca.crt", host="127.0.0.1")["TLS"]
    with listening(tmp_path / "old") as port:
        expired = link(port, tmp_path / "old" / "ca.crt")["TLS"]
    with listening(tmp_path / "soon") as port:
        soon = link(port, tmp_path / "soon" / "ca.crt")["TLS"]
    with listening(None) as port:
        bare = link(port, credentials / "ca.crt")["TLS"]
    assert [each.state for each in (foreign, renamed, unread, expired, soon, bare)] == [
        "FAIL"
    ] * 4 + ["WARN", "FAIL"]
    assert "take ca.crt from the site kit again" in foreign.remedy
    assert "--renew --host NAME" in renamed.remedy
    assert "cannot be read as a certificate" in unread.found
    assert "expired" in expired.found
    assert "--renew" in expired.remedy
    assert "--renew" in soon.remedy
    assert "WRONG_VERSION_NUMBER" in bare.found
    assert "proxy" in bare.remedy


def test_without_tls_and_a_key_there_are_warnings() -> None:
    with listening(None) as port:
        found = link(port)
    assert (found["TLS"].state, found["key"].state) == ("WARN", "WARN")


def test_a_coordinator_that_speaks_tls_cannot_be_reached_without(credentials: Path) -> None:
    with listening(credentials) as port:
        found = link(port)
    assert list(found) == ["name", "port", "TLS"]
    assert found["TLS"].state == "FAIL"
    assert "--root-certificates" in found["TLS"].remedy


def named(number: int, text: str) -> bool:
    """Whether a text names a process; its number may be a part of that of another."""
    return re.search(rf"\b{number}\b", text) is not None


def visible(process: subprocess.Popen[bytes]) -> None:
    """Wait until the list of processes has this one's command: it is empty for a moment after the
    start.
    """
    while not psutil.Process(process.pid).cmdline():
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("program", "flags", "state"),
    [
        ("flower-supernode", "--insecure", "FAIL"),
        ("flower-supernode", "--isolation process", "PASS"),
        ("flower-superexec", "--plugin-type clientapp", "FAIL"),
        ("flower-superexec", "--plugin-type serverapp", "PASS"),
    ],
)
def test_what_would_start_foreign_code_is_found_by_its_number(
    tmp_path: Path, program: str, flags: str, state: str
) -> None:
    # A script with the program's name; what it does, does not matter.
    script = tmp_path / program
    script.write_text("import time; time.sleep(60)")
    command = [sys.executable, "-W", "ignore", str(script), *flags.split()]
    with subprocess.Popen(command) as process:
        try:
            visible(process)
            found = check_isolation()
            # Other tests may run their own SuperNodes.
            assert named(process.pid, found.found) is (state == "FAIL")
            assert (found.state == "FAIL" and "site join" in found.remedy) or state == "PASS"
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("command", "supernode", "isolated"),
    [
        ("/venv/bin/flower-supernode --isolation process --insecure", True, True),
        ("/venv/bin/python3 /venv/bin/flower-supernode --isolation=process", True, True),
        ("/venv/bin/python3 -m flwr.supernode.cli.flower_supernode --insecure", True, False),
        ("flower-supernode --isolation process --isolation subprocess", True, False),
        ("flower-supernode --iso process", True, False),
        ("/venv/bin/site join --insecure --superlink flower-supernode", False, False),
        ("flower-superlink --isolation process", False, True),
        ("/venv/bin/python -W ignore -m flwr.supernode.cli.flower_supernode", True, False),
        (
            "/venv/bin/python3.11 -W ignore -X dev -Im flwr.supernode.cli.flower_supernode "
            "--isolation process",
            True,
            True,
        ),
        ("python -Wignore -u /venv/bin/flower-supernode", True, False),
        ("python --check-hash-based-pycs never -B /venv/bin/flower-supernode", True, False),
        ("python -c __import__('flwr.supernode.cli').supernode.cli.flower_supernode()", True, False),
        ("python -W ignore /venv/bin/site join --superlink flower-supernode", False, False),
        ("python -W ignore -m fedsurrogate.client_app.cli.main doctor flower_supernode", False, False),
    ],
)  # fmt: skip
def test_isolation_is_read_from_a_command_line(
    command: str, supernode: bool, isolated: bool
) -> None:
    assert (is_supernode(command.split()), is_isolated(command.split())) == (supernode, isolated)


def test_code_of_an_interpreter_is_read_to_its_end() -> None:
    code = "import sys; from flwr.supernode.cli import flower_supernode as run; run()"
    assert is_supernode(["python3", "-u", "-c", code])


def test_a_command_line_of_any_length_is_read_at_once() -> None:
    for word in ("-W", "-WW", "-u", "--a", "-Wm"):
        assert not is_supernode(["python", *([word] * 20_000)])


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("/venv/bin/flower-superexec --plugin-type clientapp --insecure", True),
        ("/venv/bin/python /venv/bin/flower-superexec --plugin-type=clientapp", True),
        ("/venv/bin/python -W ignore -m flwr.supercore.cli.flower_superexec --plugin-t " "clientapp", True),
        ("/venv/bin/flower-superexec --plugin-type serverapp", False),
        ("/venv/bin/python /venv/bin/site app --plugin-type clientapp", False),
    ],
)  # fmt: skip
def test_a_superexec_that_starts_client_apps_is_recognised(command: str, found: bool) -> None:
    assert starts_client_apps(command.split()) is found


def test_a_process_list_that_cannot_be_read_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: object) -> Iterator[psutil.Process]:
        raise PermissionError("/proc")

    monkeypatch.setattr(psutil, "process_iter", unreadable)
    assert check_isolation().state == "WARN"


@pytest.mark.parametrize(
    "address", ["fl.example.org", "https://fl.example.org:9092", ":9092", "host:0", "host:99999"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Link.parse(address, None, None)


@pytest.fixture
def hospital(tmp_path: Path) -> NodeConfig:
    """Forty images of two classes, twenty patients; the ledger is open."""
    rows = []
    (tmp_path / "images").mkdir()
    for index in range(40):
        pixels = np.random.default_rng(index).integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{index}.png")
        rows.append(f"{index}.png,{'ab'[index % 2]},p{index // 2}")
    (tmp_path / "images" / "table.csv").write_text("\n".join(["path,label,patient", *rows]) + "\n")
    text = (
        f'data="imagefolder" data-dir="{tmp_path}/images" state-dir="{tmp_path}/state" '
        f'cache-dir="{tmp_path}/cache"'
    )
    node = parse_node_config(
        parse_overrides([text, f'check-log-dir="{tmp_path}/check-log" patient-column="patient"'])
    )
    open_ledger(node)
    return node


RUN = (
    'epsilon=1.0 delta=1e-5 classes="a,b" backbone="pixels" image-size=8 '
    'fedpft.covariance="spherical"'
)


def examined(node: NodeConfig, settings: str = RUN, fingerprint: str = "") -> dict[str, Finding]:
    run = parse_run(parse_overrides([settings]))
    return {each.what: each for each in check_site(run, node, fingerprint)}


def test_a_sound_hospital_passes_and_its_records_and_patients_are_counted(
    hospital: NodeConfig,
) -> None:
    before = {file: file.read_bytes() for file in hospital.state.rglob("*") if file.is_file()}
    found = examined(hospital)
    assert not [each for each in found.values() if each.state == "FAIL"]
    assert "a 20, b 20; 20 patients" in found["data"].found
    assert "features of 40 images" in found["time"].found
    assert "epsilon 1 where 4 is left" in found["a run"].found
    assert "MB up" in found["a run"].found
    assert found["policy"].state == "WARN"
    # Nothing was cached, charged or released.
    assert not list(hospital.cache.rglob("*.npy"))
    assert before == {
        file: file.read_bytes() for file in hospital.state.rglob("*") if file.is_file()
    }


@pytest.mark.parametrize(
    "run", [RUN, 'classes="a,b" backbone="pixels"'], ids=["one size", "any size"]
)
def test_the_coordinators_fingerprint_is_compared(hospital: NodeConfig, run: str) -> None:
    own = examined(hospital, run)["backbone"].found.rpartition(" ")[2]
    assert examined(hospital, run, own)["backbone"].state == "PASS"
    other = examined(hospital, run, "0" * 64)["backbone"]
    assert other.state == "FAIL"
    assert own in other.found


def test_what_a_policy_forbids_and_what_is_spent_is_found(
    hospital: NodeConfig, tmp_path: Path
) -> None:
    refused = examined(hospital, RUN.replace("epsilon=1.0", "epsilon=2.0"))["a run"]
    assert refused.state == "FAIL"
    assert "epsilon-per-run = 1" in refused.found
    (tmp_path / "p.toml").write_text("epsilon-total = 0.5\nepsilon-per-run = 9.0")
    strict = hospital.model_copy(update={"policy": str(tmp_path / "p.toml")})
    # The gate would refuse its first release: the doctor gives the gate's answer.
    assert examined(strict)["a run"].state == "FAIL"
    assert "epsilon-total = 0.5" in examined(strict)["a run"].found
    assert examined(strict)["policy"].state == "PASS"
    gate = open_gate(strict.model_copy(update={"policy": ""}), "digits", "7")
    gate.let_out(release(10.0, run="7"))
    (tmp_path / "p.toml").write_text("epsilon-total = 0.1")
    assert examined(strict)["ledger"].state == "FAIL"
    (tmp_path / "p.toml").write_text("epsilon-totl = 0.1")
    assert "epsilon-totl" in examined(strict)["policy"].found


def test_what_a_looser_policy_cannot_take_back_is_said_before_anything_left(
    hospital: NodeConfig, tmp_path: Path
) -> None:
    policy = tmp_path / "looser.toml"
    policy.write_text("epsilon-total = 9.0\n")
    own = hospital.model_copy(update={"policy": str(policy)})
    assert examined(own)["policy"].state == "PASS"
    policy.write_text("epsilon-total = 9.0\nwithout-dp = true\n")
    found = examined(own)
    assert (found["policy"].state, found["a run"].state) == ("WARN", "PASS")
    assert "it can have no private run" in found["policy"].remedy
    assert any("it can have no private run" in each for each in looked_at(own))
    exact = parse_run(parse_overrides(['classes="a,b" backbone="pixels" image-size=8']))
    open_gate(own, "imagefolder", "7").let_out(entry(exact, "7", MethodOutput(b"exact")))
    # As it was said: doctor, ledger and gate now refuse for one reason, whatever the total.
    policy.write_text("epsilon-total = 90.0\n")
    gate, found = open_gate(own, "imagefolder", "8"), examined(own)
    assert gate.closed()
    assert found["a run"].state == "FAIL"
    assert gate.closed() in found["a run"].found
    assert gate.runs_left(one_run(gate.policy)) == 0
    run = parse_run(parse_overrides([RUN]))
    with pytest.raises(BudgetError, match=re.escape(gate.closed())):
        gate.check_planned(entry(run, "8", MethodOutput(b"", run.mechanism)))


@pytest.mark.parametrize(
    ("epsilon", "delta", "words"),
    [
        (1.0, 0.01, ["delta = 0.01 is above 1 / "]),
        (1.0, 1e-5, []),
        (30.0, 1e-5, ["30 is above 20"]),
    ],
)
def test_a_weak_budget_is_remarked_at_the_hospital_with_its_own_records(
    epsilon: float,
    delta: float,
    words: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: Captured,
) -> None:
    (tmp_path / "p.toml").write_text("epsilon-per-run = 99.0\nepsilon-total = 99.0\ndelta = 0.01")
    places = f'state-dir="{tmp_path}/state" cache-dir="{tmp_path}/cache" policy="{tmp_path}/p.toml"'
    node = parse_node_config(parse_overrides([f'data="digits" {places}']))
    settings = RUN.replace("epsilon=1.0 delta=1e-5", f"{epsilon=} {delta=}").replace("a,b", "0,1")
    run, found = parse_run(parse_overrides([settings])), examined(node, settings)["a run"]
    site_features._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "fedsurrogate.site"):
        records = len(load_site(run, node, 100).train.labels)
    odd = check_run(run, node)["warnings"]
    assert found.state == ("WARN" if words else "PASS")
    for texts in ([found.remedy], caplog.messages, odd):
        warnings = [text for text in texts if " is above " in text]
        assert len(warnings) == len(words)
        assert all(word in text for word, text in zip(words, warnings, strict=True))
        assert all(f"1 / {records} records" in text for text in warnings if "delta" in text)
    # How many records there are is not read for a decision about a run.
    signed = SignedProposal(
        Proposal.fresh("run", {"epsilon": epsilon, "delta": delta, "classes": "0,1"}, "a test", 3)
    )
    (tmp_path / "p.json").write_text(signed.text())
    capsys.readouterr()
    approve(tmp_path / "p.json", "Dr. N", [places])
    assert ("30 is above 20" in capsys.readouterr().out) == (epsilon > 20)


def test_a_damaged_ledger_fails(hospital: NodeConfig) -> None:
    gate = open_gate(hospital, "digits", "7")
    gate.let_out(release(10.0, run="7"))
    gate.ledger.path.write_text("edited\n")
    assert examined(hospital)["ledger"].state == "FAIL"


def test_a_ledger_that_is_not_open_lost_or_without_its_check_log_fails_with_what_to_do(
    hospital: NodeConfig,
) -> None:
    new = examined(hospital.model_copy(update={"data_dir": f"{hospital.data_dir}/"}))
    assert new["ledger"].state == "PASS", "the same folder, however it is written"
    new = examined(hospital.model_copy(update={"data": "dicom"}))
    assert (new["ledger"].state, "site ledger open" in new["ledger"].remedy) == ("FAIL", True)
    shutil.rmtree(hospital.check_log)
    for folder in (hospital.check_log, hospital.state):
        shutil.rmtree(folder, ignore_errors=True)
        found = examined(hospital)
        assert found["ledger"].state == found["a run"].state == "FAIL"
    open_ledger(hospital)
    assert examined(hospital)["ledger"].state == "PASS"
    shutil.rmtree(hospital.state)
    lost = examined(hospital)["ledger"]
    assert (lost.state, "`site ledger reopen`" in lost.found) == ("FAIL", True)
    within = examined(hospital.model_copy(update={"check_log_dir": f"{hospital.state}/check-log"}))[
        "ledger"
    ]
    assert (within.state, "inside state-dir" in within.found) == ("FAIL", True)


def test_data_that_is_missing_broken_or_lacks_a_class_is_found(
    hospital: NodeConfig, tmp_path: Path
) -> None:
    gone = examined(hospital.model_copy(update={"data_dir": str(tmp_path / "nowhere")}))
    assert gone["data"].state == "FAIL"
    assert "time" not in gone
    empty = examined(hospital, RUN.replace('"a,b"', '"a,b,c"'))["data"]
    assert (empty.state, "class 'c'" in empty.remedy) == ("WARN", True)
    (tmp_path / "images" / "3.png").write_bytes(b"no image")
    assert "1 of the first 40 images cannot be read, such as" in examined(hospital)["time"].found
    for file in (tmp_path / "images").glob("*.png"):
        file.write_bytes(b"no image")
    assert examined(hospital)["time"].state == "FAIL"


@pytest.mark.parametrize(
    "run",
    [
        RUN,
        RUN.replace('"pixels"', '"torchvision:mobilenet_v2"').replace("size=8", "size=32"),
    ],
    ids=["a run that needs none", "a run that needs them"],
)
def test_weights_that_are_not_there_fail(hospital: NodeConfig, tmp_path: Path, run: str) -> None:
    """Of any run: `site join` refuses them too."""
    found = examined(
        hospital.model_copy(update={"weights_path": str(tmp_path / "none.safetensors")}), run
    )
    assert found["backbone"].state == "FAIL"
    assert "none.safetensors" in found["backbone"].found


@pytest.mark.parametrize("confirmed", [(), ("a", "b")], ids=["open", "confirmed"])
def test_classes_under_other_names_are_not_taken_for_an_empty_folder(
    hospital: NodeConfig, confirmed: tuple[str, ...]
) -> None:
    node = hospital.model_copy(update={"classes": confirmed})
    found = examined(node, RUN.replace('"a,b"', '"no,yes"'))["data"]
    assert found.state == "FAIL"
    assert "'a', 'b'" in found.found
    assert "rename" in found.found + found.remedy
    assert "smallest-site" not in found.found


def test_features_that_were_computed_elsewhere_need_no_backbone(tmp_path: Path) -> None:
    content = {"x": torch.randn(40, 4), "y": torch.arange(40) % 2}
    save_file(content, tmp_path / "all.safetensors", {"classes": "a,b", "fingerprint": "f" * 16})
    text = (
        f'data="safetensors" data-dir="{tmp_path}" state-dir="{tmp_path}/state" '
        f'cache-dir="{tmp_path}/cache"'
    )
    node = parse_node_config(parse_overrides([text, f'check-log-dir="{tmp_path}/check-log"']))
    open_ledger(node)
    found = examined(node, fingerprint="e" * 16)
    assert found["backbone"].state == "FAIL"
    assert "time" not in found
    assert "MB up" in found["a run"].found


def test_a_folder_that_cannot_be_written_is_named(hospital: NodeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = examined(hospital.model_copy(update={"state_dir": str(tmp_path / "file" / "below")}))
    assert found["state-dir"].state == "FAIL"
    assert f"user {os.getuid()}" in found["state-dir"].remedy


def test_the_command_prints_lines_or_json_and_exits_with_one_when_anything_fails(
    hospital: NodeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    node = (
        f'data="imagefolder" data-dir="{hospital.data_dir}" state-dir="{hospital.state}" '
        f'cache-dir="{hospital.cache}"'
    )
    node += f' check-log-dir="{hospital.check_log}"'

    def doctor(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["site", "doctor", "--node-config", node, *arguments])
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    # Another test may run a SuperNode without isolation at the same time.
    monkeypatch.setattr(psutil, "process_iter", lambda *_: iter(()))
    assert doctor() == 0
    assert re.search(r"PASS +isolation", capsys.readouterr().out)
    assert doctor() == 0
    assert re.search(r"WARN +a run +no settings of a run are given", capsys.readouterr().out)
    assert doctor("-c", RUN) == 0
    shown = capsys.readouterr().out
    assert "no settings" not in shown
    assert re.search(r"PASS +data +40 training", shown)
    assert re.search(r"WARN +policy", shown)
    assert doctor("--json", "--superlink", "nowhere.invalid:9092") == 1
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["what"] == "name"
    assert {row["state"] for row in rows} == {"PASS", "WARN", "FAIL"}
    assert doctor("--superlink", "nowhere") == 1
    assert "HOST:PORT" in capsys.readouterr().err

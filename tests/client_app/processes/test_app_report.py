"""What other programs of a site learn from its running app, and what the page of metrics shows."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from fedsurrogate.client_app.diagnostics.site_checks import SiteCollector
from fedsurrogate.client_app.governance.budget import Budget
from fedsurrogate.client_app.governance.gate import open_gate, open_ledger
from fedsurrogate.client_app.governance.policy import digest_of_policy
from fedsurrogate.client_app.node_config import NodeConfig, data_present
from fedsurrogate.client_app.processes import app_report
from fedsurrogate.client_app.processes.app_report import (
    LEDGER,
    SOCKET,
    AppReport,
    ask,
    check_app,
    ledger_totals,
    reporting,
    watching,
)
from fedsurrogate.common.files import owner_only
from fedsurrogate.common.metrics_page import serve_page
from fedsurrogate.common.settings import Settings
from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from tests.client_app.governance.ledger_processes import release
from tests.e2e.processes import until


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def hospital(place: Path, policy: str = "policy.toml") -> NodeConfig:
    """A site with data of its own, in a folder that has a file."""
    (place / "data").mkdir(exist_ok=True)
    (place / "data" / "1.png").touch()
    (place / policy).write_text("epsilon-total = 4.0\nepsilon-per-run = 2.0\n")
    return NodeConfig(
        site="north", data="imagefolder", data_dir=str(place / "data"),
        state_dir=str(place / "state"), check_log_dir=str(place / "check-log"),
        policy=str(place / policy),
    )  # fmt: skip


def replaced(file: Path, text: str) -> None:
    """As editors do: write another file, and rename it."""
    other = file.with_name("other")
    other.write_text(text)
    other.rename(file)


def page(collector: SiteCollector) -> dict[str, float]:
    """The samples of a page without labels, by name."""
    with (
        serve_page((collector,), "127.0.0.1", 0, False, "a test") as url,
        urllib.request.urlopen(url, timeout=60) as answer,
    ):
        text = answer.read().decode()
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return {
        each.name.removeprefix("fedsurrogate_"): each.value for each in samples if not each.labels
    }


@contextmanager
def sending(content: bytes, place: Path) -> Iterator[str]:
    """The address of what answers with these bytes."""
    (path := place / f"app{SOCKET}").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.bind(str(path))
        bound.listen()

        def answer() -> None:
            asked, _ = bound.accept()
            with asked:
                asked.sendall(content)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"unix:{place}/app"
        thread.join(30)


def test_totals_are_those_of_the_ledger_and_follow_each_change(place: Path) -> None:
    node = hospital(place)
    assert ledger_totals(node) == {"ledger_usable": 0.0}, "it is not open"
    ledger = open_ledger(node)
    fresh = ledger_totals(node)
    assert (fresh["ledger_usable"], fresh["budget_left_ratio"], fresh["releases"]) == (1, 1, 0)
    assert "last_release_timestamp_seconds" not in fresh
    ledger.charge(release(), Budget(4.0, 1e-5, 2.0))
    spent = open_gate(node, Settings().data, "").spent()
    after = ledger_totals(node)
    assert set(after) == set(LEDGER)
    assert after["budget_epsilon_spent"] == spent > 0
    assert after["budget_left_ratio"] == pytest.approx(1 - spent / 4)
    assert after["releases"] == 1
    (place / "policy.toml").write_text(f"epsilon-total = {spent / 2}\nepsilon-per-run = 0.01\n")
    assert ledger_totals(node)["budget_left_ratio"] == 0, "a lowered limit leaves nothing"
    ledger.path.write_bytes(b"edited\n")
    assert ledger_totals(node) == {"ledger_usable": 0.0}


def test_fifty_pages_at_once_compute_the_totals_once_and_start_no_process(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prometheus asks each second, and others do too: a page must cost nothing."""
    node, looks, slow = hospital(place), list[float](), threading.Event()
    ledger = open_ledger(node)

    def counted(node: NodeConfig) -> dict[str, float]:
        looks.append(1.0)
        slow.wait(1)
        return ledger_totals(node)

    monkeypatch.setattr(app_report, "ledger_totals", counted)
    monkeypatch.setattr(app_report, "LOOK_SECONDS", 0.05)
    children = len(psutil.Process().children(recursive=True))
    with watching(node) as reporter, ThreadPoolExecutor(50) as pages:
        collector = SiteCollector(reporter.report, of_app=False)
        shown = list(pages.map(lambda _: list(collector.collect()), range(50)))
        assert len(psutil.Process().children(recursive=True)) == children
        assert len(shown) == 50
        assert len(looks) == 1
        slow.set()
        ledger.charge(release(), Budget(4.0, 1e-5, 2.0))
        until(lambda: reporter.report().ledger.get("releases") == 1)
        before = len(looks)
        list(pages.map(lambda _: list(collector.collect()), range(50)))
        threading.Event().wait(0.5)
        assert len(looks) == before <= 4, "unchanged files are not read again"


def test_totals_need_no_torch() -> None:
    code = (
        "import sys; from fedsurrogate.client_app.processes.app_report import ledger_totals; "
        "from fedsurrogate.client_app.node_config import NodeConfig; "
        "ledger_totals(NodeConfig(site='s', data='imagefolder', data_dir='/nowhere', "
        "state_dir=sys.argv[1], check_log_dir=sys.argv[1] + '-w')); "
        "sys.exit('torch' in sys.modules)"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, f"{folder}/state"]
        known = os.environ | {"PYTHONPATH": str(APP_FOLDER)}
        assert subprocess.run(command, env=known, check=False).returncode == 0


def test_an_emptied_folder_of_data_is_seen_while_the_app_runs(place: Path) -> None:
    node = hospital(place)
    assert data_present(node)
    (place / "data" / "1.png").unlink()
    assert not data_present(node)
    (place / "data").rmdir()
    assert not data_present(node)
    assert data_present(NodeConfig(site="s", data="digits")), "public data have no folder"


def test_the_page_shows_what_a_running_app_reports_and_that_none_runs(place: Path) -> None:
    node, runtime = hospital(place), f"unix:{place}/app"
    open_ledger(node)
    collector = SiteCollector(lambda: ask(runtime), of_app=True)
    (place / f"app{SOCKET}").touch()  # What a killed app leaves.
    assert page(collector) == {"app_up": 0.0, "data_found": 0.0}
    with owner_only(), reporting(runtime, node) as reporter:
        until(lambda: bool((found := ask(runtime)) and found.ledger))
        shown = page(collector)
        assert (place / f"app{SOCKET}").stat().st_mode & 0o077 == 0, "only this account may ask"
        reporter.found_data = True
        assert page(collector)["data_found"] == 1
    assert shown["app_up"] == shown["data_present"] == shown["ledger_usable"] == 1
    assert (shown["data_found"], shown["budget_epsilon_total"]) == (0, 4)


def test_a_running_app_sees_a_policy_that_an_editor_replaced(place: Path) -> None:
    node, runtime = hospital(place), f"unix:{place}/app"
    assert check_app(runtime, node).found == "it does not run"
    with reporting(runtime, node):
        before = check_app(runtime, node)
        replaced(place / "policy.toml", "epsilon-per-run = 0.1\n")
        after = check_app(runtime, node)
    assert (before.state, after.state) == ("PASS", "PASS")
    assert before.found != after.found
    assert digest_of_policy(node)[:16] in after.found


def test_an_app_that_still_reads_the_old_file_is_found(place: Path) -> None:
    """As in a container with a mount of the file alone: the old file stays open under its name."""
    node, runtime = hospital(place), f"unix:{place}/app"
    os.link(place / "policy.toml", place / "mounted.toml")
    with reporting(runtime, node.model_copy(update={"policy": str(place / "mounted.toml")})):
        replaced(place / "policy.toml", "epsilon-per-run = 0.1\n")
        found = check_app(runtime, node)
    assert found.state == "FAIL"
    assert "uses another policy" in found.found
    assert "docker compose up" in found.remedy


def test_an_app_of_another_version_is_found(place: Path) -> None:
    node = NodeConfig(site="s")
    with watching(node) as reporter:
        report = reporter.report().model_copy(update={"version": "0.0.1"})
    with sending(report.model_dump_json().encode(), place) as runtime:
        found = check_app(runtime, node)
    assert (found.state, "0.0.1" in found.found) == ("WARN", True)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(
    content=st.binary(max_size=100)
    | st.dictionaries(st.sampled_from(list(AppReport.model_fields)), JSON).map(
        lambda it: json.dumps(it).encode()
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_whatever_listens_there_others_go_on(place: Path, content: bytes) -> None:
    with sending(content, place) as runtime:
        found = ask(runtime)
    assert found is None or isinstance(found, AppReport)

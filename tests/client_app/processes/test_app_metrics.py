"""What the page of metrics learns from the running app, and what it shows."""

import json
import socket
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from fedsurrogate.client_app.diagnostics.site_metrics import SiteCollector
from fedsurrogate.client_app.governance.budget import Budget
from fedsurrogate.client_app.governance.gate import open_gate, open_ledger
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.processes import app_metrics
from fedsurrogate.client_app.processes.app_metrics import (
    LEDGER,
    METRICS,
    Watched,
    ask,
    data_present,
    ledger_totals,
    reporting,
)
from fedsurrogate.common.metrics_page import serve_page
from fedsurrogate.common.settings import Settings
from tests.client_app.governance.test_ledger import release


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def hospital(place: Path) -> NodeConfig:
    """A site with data of its own, in a folder that has a file."""
    (place / "data").mkdir()
    (place / "data" / "1.png").touch()
    (place / "policy.toml").write_text("epsilon-total = 4.0\nepsilon-per-run = 2.0\n")
    return NodeConfig(
        site="north", data="imagefolder", data_dir=str(place / "data"),
        state_dir=str(place / "state"), witness_dir=str(place / "witness"),
        policy=str(place / "policy.toml"),
    )  # fmt: skip


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


def test_totals_are_computed_again_only_where_a_file_has_changed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = hospital(place)
    ledger, looks = open_ledger(node), list[object]()
    watched = Watched(node)
    here = ledger_totals

    class Here:
        """Computes in this process, and counts."""

        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> "Here":
            return self

        def __exit__(self, *_: object) -> None: ...
        def submit(self, _: object, node: NodeConfig) -> "Here":
            looks.append(node)
            self.found = here(node)
            return self

        def result(self) -> dict[str, float]:
            return self.found

    monkeypatch.setattr(app_metrics, "ProcessPoolExecutor", Here)
    for _ in range(3):
        watched.look()
    assert len(looks) == 1
    ledger.charge(release(), Budget(4.0, 1e-5, 2.0))
    watched.look()
    watched.look()
    assert len(looks) == 2
    assert watched.figures().ledger["releases"] == 1


def test_an_emptied_folder_of_data_is_seen_while_the_app_runs(place: Path) -> None:
    node = hospital(place)
    assert data_present(node)
    (place / "data" / "1.png").unlink()
    assert not data_present(node)
    (place / "data").rmdir()
    assert not data_present(node)
    assert data_present(NodeConfig(site="s", data="digits")), "public data have no folder"


def test_the_page_shows_what_a_running_app_tells_and_that_none_runs(place: Path) -> None:
    node, runtime = hospital(place), f"unix:{place}/app"
    open_ledger(node)
    collector = SiteCollector(lambda: ask(runtime), lambda: True)
    assert page(collector) == {"app_up": 0.0, "data_found": 1.0}
    with reporting(runtime, node):
        deadline = threading.Event()
        for _ in range(600):
            if (found := ask(runtime)) is not None and found.ledger:
                break
            deadline.wait(0.2)
        shown = page(collector)
        assert (place / f"app{METRICS}").exists()
    assert shown["app_up"] == shown["data_present"] == shown["ledger_usable"] == 1
    assert shown["budget_epsilon_total"] == 4
    missing = SiteCollector(lambda: found and replace(found, data_present=False), None)
    assert page(missing)["data_present"] == 0


def sent(content: bytes, place: Path) -> object:
    """What `ask` makes of these bytes."""
    (path := place / f"app{METRICS}").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.bind(str(path))
        bound.listen()

        def answer() -> None:
            asked, _ = bound.accept()
            with asked:
                asked.sendall(content)

        thread = threading.Thread(target=answer)
        thread.start()
        found = ask(f"unix:{place}/app")
        thread.join(30)
    return found


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = ("site", "data_present", "disks", "ledger")


@given(
    content=st.binary(max_size=100)
    | st.dictionaries(st.sampled_from(FIELDS), JSON).map(lambda it: json.dumps(it).encode())
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_whatever_listens_there_the_page_goes_on(place: Path, content: bytes) -> None:
    found = sent(content, place)
    assert found is None or isinstance(found, app_metrics.AppFigures)

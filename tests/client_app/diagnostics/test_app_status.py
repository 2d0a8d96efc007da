"""What the doctor learns from the running app, which may read another policy than the doctor does."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.policy import (
    DIGEST_FILE,
    digest_of_policy,
    load_policy,
    note_policy,
)
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.processes import app_status
from fedsurrogate.client_app.processes.app_status import STATUS, answering, ask, check_app
from fedsurrogate.common.version import own_version


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def site(place: Path, policy: str) -> NodeConfig:
    return NodeConfig(site="s", state_dir=str(place / "state"), policy=str(place / policy))


def replace(file: Path, text: str) -> None:
    """As editors do: write another file, and rename it."""
    other = file.with_name("other")
    other.write_text(text)
    other.rename(file)


def test_a_running_app_sees_a_policy_that_an_editor_replaced(place: Path) -> None:
    (place / "policy.toml").write_text("epsilon-per-run = 1.0\n")
    node, runtime = site(place, "policy.toml"), f"unix:{place}/app"
    with answering(runtime, node):
        before = check_app(runtime, node)
        replace(place / "policy.toml", "epsilon-per-run = 0.1\n")
        after = check_app(runtime, node)
    assert (before.state, after.state) == ("PASS", "PASS")
    assert before.found != after.found
    assert digest_of_policy(node)[:16] in after.found


def test_an_app_that_still_reads_the_old_file_is_found(place: Path) -> None:
    """As in a container with a mount of the file alone: the old file stays open under its name."""
    (place / "policy.toml").write_text("epsilon-per-run = 1.0\n")
    os.link(place / "policy.toml", place / "mounted.toml")
    runtime = f"unix:{place}/app"
    with answering(runtime, site(place, "mounted.toml")):
        replace(place / "policy.toml", "epsilon-per-run = 0.1\n")
        found = check_app(runtime, site(place, "policy.toml"))
    assert found.state == "FAIL"
    assert "uses another policy" in found.found
    assert "docker compose up" in found.remedy


def test_the_doctor_says_that_no_app_runs_and_what_another_version_means(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, runtime = NodeConfig(site="s"), f"unix:{place}/app"
    assert check_app(runtime, node).state == "WARN"
    (place / f"app{STATUS}").touch()  # What a killed app leaves.
    assert check_app(runtime, node).found == "it does not run"
    with answering(runtime, node):
        assert check_app(runtime, node).state == "PASS"
        # The app's own version stays what it was: it is asked in this process, before the change.
        told = ask(runtime)
        assert told is not None
        assert told.version == own_version()
        monkeypatch.setattr(app_status, "ask", lambda _: app_status.AppStatus("0.0.1", ""))
        found = check_app(runtime, node)
    assert (found.state, "0.0.1" in found.found) == ("WARN", True)


@given(content=st.binary(max_size=100))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
def test_whatever_listens_there_the_doctor_goes_on(place: Path, content: bytes) -> None:
    import threading

    (path := place / f"app{STATUS}").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.bind(str(path))
        bound.listen()

        def answer() -> None:
            asked, _ = bound.accept()
            with asked:
                asked.sendall(content)

        thread = threading.Thread(target=answer)
        thread.start()
        assert check_app(f"unix:{place}/app", NodeConfig(site="s")).found == "it does not run"
        thread.join(30)


def test_only_this_account_may_ask(place: Path) -> None:
    from fedsurrogate.common.files import owner_only

    with owner_only(), answering(f"unix:{place}/app", NodeConfig(site="s")):
        assert (place / f"app{STATUS}").stat().st_mode & 0o077 == 0


@given(texts=st.lists(st.sampled_from(["", "epsilon-per-run = 0.5\n", "without-dp = true\n"])))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_the_log_has_one_line_for_each_change_of_the_policy(
    place: Path, caplog: pytest.LogCaptureFixture, texts: list[str]
) -> None:
    node, file = site(place, "policy.toml"), place / "policy.toml"
    node.state.mkdir(exist_ok=True)
    (node.state / DIGEST_FILE).unlink(missing_ok=True)
    caplog.clear()
    caplog.set_level("INFO", logger="fedsurrogate.site")
    for text in texts:
        replace(file, text)
        note_policy(node, load_policy(str(file)))
    changes = sum(text != before for text, before in zip(texts, [None, *texts], strict=False))
    assert [record.message for record in caplog.records].count("") == 0
    assert len(caplog.records) == changes

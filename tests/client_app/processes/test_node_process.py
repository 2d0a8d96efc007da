"""The process of a SuperNode: what its threads may print."""

import os
import threading
from types import SimpleNamespace

import pytest

from fedsurrogate.client_app.processes import node_process


@pytest.mark.parametrize(
    ("error", "printed"),
    [
        (ValueError("Cannot monitor channel state: Channel closed!"), False),
        (ValueError("another"), True),
    ],
)
def test_only_a_closed_channel_ends_a_thread_in_silence(
    error: Exception,
    printed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(threading, "excepthook", node_process._of_a_thread)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert ("Traceback" in capsys.readouterr().err) == printed


def test_a_node_connects_after_it_has_waited_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[str]()
    monkeypatch.setattr(node_process, "await_data", steps.append)
    monkeypatch.setattr(node_process, "configure_log", lambda _: None)
    connected = SimpleNamespace(supernode=lambda runtime, _: steps.append(f"connected {runtime}"))
    monkeypatch.setattr(node_process, "flower", lambda: connected)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    umask = os.umask(0o077)
    try:
        node_process.serve("unix:/x", ())
    finally:
        os.umask(umask)
    assert steps == ["unix:/x", "connected unix:/x"]

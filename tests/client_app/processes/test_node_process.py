"""The process of a SuperNode: what its threads may print."""

import threading

import pytest

from client_app.processes import node_process


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

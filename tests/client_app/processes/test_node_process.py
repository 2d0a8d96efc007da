"""What a SuperNode prints is for a hospital's administrator: no traces of what needs no action."""

from __future__ import annotations

import threading

import pytest

from client_app.processes.node_process import _without_closed_channels


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("Cannot monitor channel state: Channel closed!"), False),
        (ValueError("another"), True),
        (RuntimeError("Channel closed!"), True),
    ],
)
def test_a_thread_whose_channel_was_closed_prints_nothing(
    error: Exception, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(threading, "excepthook", _without_closed_channels)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert ("Traceback" in capsys.readouterr().err) is shown

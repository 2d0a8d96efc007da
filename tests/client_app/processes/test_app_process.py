"""An app that a signal ends gives its SuperNode exactly one reply."""

import signal
from types import SimpleNamespace

import pytest
from flwr.app import Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.exit.exit_handler import trigger_exit_handlers

from fedsurrogate.client_app.processes.app_process import ENDS, AnswerOnTermination
from fedsurrogate.common.flower.v134 import guard_task


@pytest.mark.parametrize("answered", [False, True])
def test_a_process_that_gets_sigterm_answers_once(
    answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flwr.supercore.exit.exit_handler.registered_exit_handlers", handlers := [])
    asked, pushed = Message(RecordDict(), dst_node_id=7, message_type=MessageType.TRAIN), []
    task = SimpleNamespace(
        pull_task_input=lambda stub: (asked, "context", "run", "code"),
        push_message=lambda stub, reply, context: pushed.append(
            (signal.pthread_sigmask(signal.SIG_BLOCK, ()), reply)
        ),
    )
    guard_task(task, AnswerOnTermination())
    assert set(ENDS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ()), "nothing can be answered yet"
    assert task.pull_task_input("stub") == (asked, "context", "run", "code")
    assert not set(ENDS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if answered:
        task.push_message("stub", Message(RecordDict(), reply_to=asked), "context")
    assert len(handlers) == 1
    trigger_exit_handlers()
    ((blocked, reply),) = pushed
    assert reply.has_error() is not answered
    if answered:
        assert set(ENDS) <= blocked, "half an answer is worse than a late end"
    else:
        assert reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    assert not set(ENDS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())

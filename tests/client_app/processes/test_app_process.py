"""An app that a signal ends gives its SuperNode exactly one reply."""

import signal
from types import SimpleNamespace

import pytest
from flwr.app import Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.exit.exit_handler import trigger_exit_handlers

from fedsurrogate.client_app.processes.app_process import AnswerOnTermination
from fedsurrogate.client_app.processes.warm import ENDS
from fedsurrogate.common.flower.v134 import Messages134
from fedsurrogate.common.flower.v134_tasks import guard_task


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
        make_simple_grpc_retry_invoker=None,
    )
    guard_task(
        task,
        AnswerOnTermination(),
        lambda to, text: Messages134().failed_reply(to, "crashed", text),
    )
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


def test_a_process_whose_supernode_does_not_answer_ends_by_any_signal_until_there_is_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flwr.supercore.exit.exit_handler.registered_exit_handlers", [])
    before = {number: signal.getsignal(number) for number in ENDS}
    guard = AnswerOnTermination()
    try:
        guard.unreachable()
        assert not set(ENDS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert {signal.getsignal(number) for number in ENDS} == {signal.SIG_DFL}
        guard.received(lambda text: None)
        assert {number: signal.getsignal(number) for number in ENDS} == before
        with guard.sending():
            guard.unreachable()
            assert set(ENDS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)

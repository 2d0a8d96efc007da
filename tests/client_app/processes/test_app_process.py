"""An app that a signal ends gives its SuperNode exactly one reply."""

import inspect
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.exit import exit_handler

from fedsurrogate.client_app.processes.app_process import ENDS, AnswerOnTermination
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.v134_fleet import guard_task


def end_flower() -> None:
    """Call the handlers that Flower calls before it exits; since 1.42 in two phases."""
    trigger: Any = exit_handler.trigger_exit_handlers
    phased = "run_before_force_exit" in inspect.signature(trigger).parameters
    for before in (True, False) if phased else ():
        trigger(run_before_force_exit=before)
    if not phased:
        trigger()


@pytest.mark.parametrize("answered", [False, True])
def test_a_process_that_gets_sigterm_answers_once(
    answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flwr.supercore.exit.exit_handler.registered_exit_handlers", handlers := [])
    # With Flower 1.42 a message names the task that makes it.
    flower().local_run(7)
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
        lambda to, text: flower().failed_reply(to, "crashed", text),
        "make_simple_grpc_retry_invoker",
    )
    assert set(ENDS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ()), "nothing can be answered yet"
    assert task.pull_task_input("stub") == (asked, "context", "run", "code")
    assert not set(ENDS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if answered:
        task.push_message("stub", Message(RecordDict(), reply_to=asked), "context")
    assert len(handlers) == 1
    end_flower()
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

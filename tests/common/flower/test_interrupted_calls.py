"""A run's calls to its SuperLink while that ends and starts again: real gRPC servers, and a client
as Flower makes it.
"""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from flwr.supercore.retry import make_simple_grpc_retry_invoker
from flwr.supernode import start_client_internal

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower.v134 import LONGEST_PAUSE, lasting, outlast

METHOD = "/test.Service/Call"


def served(address: str, answer: Callable[[bytes, grpc.ServicerContext], bytes]) -> grpc.Server:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", {"Call": handler}),)
    )
    server.add_insecure_port(address)
    server.start()
    return server


class Caller:
    """Calls as a grid does, with short pauses between them."""

    def __init__(self, address: str, seconds: float | None) -> None:
        self.channel = grpc.insecure_channel(
            address, [("grpc.max_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 50)]
        )
        self.invoker = make_simple_grpc_retry_invoker()
        self.invoker.wait_function = lambda _: time.sleep(0.05)
        if seconds is not None:
            outlast(self.invoker, seconds)

    def __call__(self) -> Any:
        return self.invoker.invoke(self.channel.unary_unary(METHOD), b"question")


def restart_during(address: str, caller: Caller, times: int) -> tuple[list[Any], int]:
    """A call during which the server ends so often, each time while it works on the call."""
    begun, calls, let_go = threading.Semaphore(0), 0, threading.Event()

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        nonlocal calls
        calls += 1
        begun.release()
        if calls <= times:
            let_go.wait(30)
        return b"answer"

    server, results = served(address, answer), list[Any]()

    def ask() -> None:
        try:
            results.append(caller())
        except Exception as error:
            results.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(times):
        assert begun.acquire(timeout=30)
        server.stop(0).wait()
        server = served(address, answer)
    asking.join(60)
    let_go.set()
    server.stop(0)
    return results, calls


@pytest.mark.parametrize("times", [1, 3])
def test_a_call_that_its_server_began_and_cancelled_is_made_again(
    tmp_path: Path, times: int
) -> None:
    address = f"unix:{tmp_path}/app"
    results, calls = restart_during(address, Caller(address, 60), times)
    assert results == [b"answer"]
    # A server that is stopping may still take the call that is made again.
    assert calls > times


def test_every_call_is_answered_while_the_server_starts_again_and_again(tmp_path: Path) -> None:
    """A stopping server cancels calls that have arrived and that no thread of it has taken."""
    address, done, wrong = f"unix:{tmp_path}/app", threading.Event(), list[object]()

    def ask(caller: Caller) -> None:
        while not done.is_set():
            try:
                assert caller() == b"answer"
            except Exception as error:
                wrong.append(error)

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        time.sleep(0.005)
        return b"answer"

    server = served(address, answer)
    askers = [threading.Thread(target=ask, args=(Caller(address, 60),)) for _ in range(8)]
    for each in askers:
        each.start()
    for _ in range(5):
        time.sleep(0.1)
        server.stop(1).wait()
        server = served(address, answer)
    done.set()
    for each in askers:
        each.join(60)
    server.stop(0)
    assert not wrong


def test_flower_alone_gives_up_at_a_cancelled_call(tmp_path: Path) -> None:
    """What ended runs; if Flower mends it, `outlast` can go."""

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")

    server = served(f"unix:{tmp_path}/app", answer)
    with pytest.raises(grpc.RpcError):
        Caller(f"unix:{tmp_path}/app", None)()
    server.stop(0)


@pytest.mark.parametrize(
    ("code", "details", "again"),
    [
        (grpc.StatusCode.CANCELLED, "", True),
        (grpc.StatusCode.UNKNOWN, "Stream removed", True),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", True),
        (grpc.StatusCode.UNKNOWN, "Exception calling application: disk full", False),
        (grpc.StatusCode.INTERNAL, "a fault of the server", False),
        (grpc.StatusCode.INVALID_ARGUMENT, "goaway", False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too large", False),
    ],
)
def test_only_an_ended_connection_is_a_reason_to_call_again(
    tmp_path: Path, code: grpc.StatusCode, details: str, again: bool
) -> None:
    calls = 0

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 1:
            context.abort(code, details)
        return b"answer"

    address = f"unix:{tmp_path}/app"
    server = served(address, answer)
    if again:
        assert Caller(address, 60)() == b"answer"
    else:
        with pytest.raises(grpc.RpcError) as refused:
            Caller(address, 60)()
        assert refused.value.code() == code
    server.stop(0)
    assert calls == 1 + again


def test_a_superlink_that_stays_away_ends_the_run_with_a_reason_in_words(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^the SuperLink has not answered for 0.3 s \(UNAVAILABLE"):
        Caller(f"unix:{tmp_path}/none", 0.3)()


def test_an_app_that_flower_ends_makes_one_more_call_and_no_second(tmp_path: Path) -> None:
    caller = Caller(f"unix:{tmp_path}/none", 3600)
    caller.invoker.max_tries = 1
    with pytest.raises((grpc.RpcError, RunError)):
        caller()


@pytest.mark.skipif(
    not hasattr(start_client_internal, "_make_fleet_connection_retry_invoker"),
    reason="SuperNodes of newer Flowers speak HTTP, whose calls Flower itself repeats",
)
def test_a_supernode_calls_again_too_as_often_as_flower_lets_it(tmp_path: Path) -> None:
    answers = iter([grpc.StatusCode.CANCELLED, grpc.StatusCode.CANCELLED, None])

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        if (code := next(answers)) is not None:
            context.abort(code, "CANCELLED")
        return b"answer"

    server = served(address := f"unix:{tmp_path}/app", answer)
    caller, noted = Caller(address, None), list[grpc.RpcError]()
    caller.invoker = lasting(
        start_client_internal._make_fleet_connection_retry_invoker, noted.append
    )(1)
    pauses = list(itertools.islice(caller.invoker.wait_gen_factory(), 20))
    assert max(pauses) <= LONGEST_PAUSE, "it is back before it is given up"
    caller.invoker.wait_function = lambda _: None
    with pytest.raises(grpc.RpcError):  # Two tries, of which neither was answered.
        caller()
    assert caller() == b"answer"
    server.stop(0)
    assert [error.code() for error in noted] == [grpc.StatusCode.CANCELLED] * 2

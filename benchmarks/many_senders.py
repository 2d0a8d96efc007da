"""One coordinator with 10 to 50 sites over gRPC. Claim: all surrogates arrive; time and memory grow
at most linearly.

The SuperLink and the coordinator's app are real. Each sender uses Flower's protocol and replies
with half a megabyte that was made in advance. The time is from the invitation to the last surrogate
read and checked. Compared: Flower's own `flower-superlink`, whose database rejects writers after
five seconds of waiting, and `coordinator superlink`.
"""

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch
from flwr.app import Message, MessageType
from flwr.app.message import remove_content_from_message
from flwr.client.grpc_rere_client.connection import grpc_request_response
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.retry import make_simple_grpc_retry_invoker

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.covariances import Diagonal
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.common.wire.records import pack_surrogate, to_record
from fedsurrogate.server_app.deployment.addresses import connect
from fedsurrogate.server_app.deployment.submit import flower_environment, run, stop_process
from fedsurrogate.server_app.runs.state import when

SENDERS = (10, 20, 30, 40, 50)
LINKS = ("flower-superlink", "coordinator superlink")
CLASSES, COMPONENTS, DIMENSION, RECORDS = 10, 10, 1280, 50
SETTINGS: dict[str, Any] = {"method": "fedpft", "fedpft.covariance": "diag"}
SETTINGS |= {"fedpft.components": COMPONENTS, "deadline": 120.0}
SETTINGS |= {"head.epochs": 1, "head.min-steps": 0, "backbone": "pixels", "device": "cpu"}


def payload(site: str) -> bytes:
    generator = torch.Generator().manual_seed(int(site))
    rows = CLASSES * COMPONENTS
    means = 0.2 * torch.randn(rows, DIMENSION, generator=generator)
    variances = 0.01 * torch.rand(rows, DIMENSION, generator=generator) + 0.001
    labels = torch.arange(rows) // COMPONENTS
    counts, weights = torch.full((CLASSES,), RECORDS), torch.full((rows,), 1 / COMPONENTS)
    names = tuple(map(str, range(CLASSES)))
    header = Header("fedpft", parse_run(SETTINGS).digest, site, "f" * 64, names)
    return pack_surrogate(
        Surrogate(header, Mixtures(counts, labels, weights, means, Diagonal(variances)))
    )


def send(fleet: str, site: str, over: threading.Event) -> None:
    """Act as a SuperNode whose reply is ready."""
    ready = payload(site)
    with grpc_request_response(fleet, True, make_simple_grpc_retry_invoker()) as connection:
        while not over.wait(1.0):
            # A SuperNode drops a message that it cannot receive or send, and continues.
            with suppress(grpc.RpcError):
                _answer(ready, site, connection)


def _answer(ready: bytes, site: str, connection: Any) -> None:
    _, receive, push, _, _, pull_object, push_object, confirm = connection
    if (received := receive()) is None:
        return
    asked, tree = received
    number = asked.metadata.run_id
    message = pull_and_inflate_object_from_tree(
        tree,
        lambda name: pull_object(number, name),
        lambda name: confirm(number, name),
        return_type=Message,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id
    answer = ready if message.metadata.message_type == MessageType.TRAIN else None
    answered: dict[str, Any] = {"status": "ok", "site": site, "simulated": False} | (
        {"bytes": len(answer)} if answer else {}
    )
    reply = Message(to_record(answer, answered), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    wanted, session = push(remove_content_from_message(reply), get_object_tree(reply), 0.1)
    push_objects(
        get_all_nested_objects(reply),
        lambda name, content: push_object(number, session, name, content),
        object_ids_to_push=wanted,
    )


@contextmanager
def superlink(link: str, home: Path) -> Iterator[tuple[str, str, int]]:
    """A SuperLink started with the command `link`; yields its Fleet address, its Control address
    and its process id.
    """
    with socket.socket() as a, socket.socket() as b, socket.socket() as c:
        for each in (a, b, c):
            each.bind(("127.0.0.1", 0))
        fleet, control, runtime = (f"127.0.0.1:{each.getsockname()[1]}" for each in (a, b, c))
    if link != LINKS[0]:
        # Flower's own knows no sockets, and ours no ports.
        control, runtime = (f"unix:{home}/{name}:1" for name in ("control", "app"))
    program, *words = link.split()
    command = [
        str(Path(sys.executable).with_name(program)),
        *words,
        "--insecure",
        "--database",
        str(home / "link.db"),
    ]
    command += [
        "--fleet-api-address",
        fleet,
        "--control-api-address",
        control,
        "--serverappio-api-address",
        runtime,
    ]
    log = (home / "superlink.log").open("w")
    process = subprocess.Popen(command, env=flower_environment(home), stdout=log, stderr=log)
    try:
        for address in (fleet, control):
            _wait(address)
        yield fleet, control, process.pid
    finally:
        stop_process(process.pid)


def _wait(address: str) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            connect(address, seconds=1)
        except OSError:
            time.sleep(0.3)
        else:
            return
    raise TimeoutError(address)


def watch_memory(link: int, peaks: dict[str, float], over: threading.Event) -> None:
    """Record the peak memory, in MB, of the SuperLink and of the coordinator's app."""
    while not over.wait(0.2):
        family = [psutil.Process(link), *psutil.Process(link).children(recursive=True)]
        for process in family:
            try:
                part = (
                    "app"
                    if "flwr-serverapp" in " ".join(process.cmdline())
                    else "link"
                    if process.pid == link
                    else ""
                )
                if part:
                    peaks[part] = max(peaks.get(part, 0.0), process.memory_info().rss / 1e6)
            except psutil.NoSuchProcess:
                continue


def measure(link: str, count: int) -> tuple[str, int, int, float, float, float, float]:
    """One row: the SuperLink's command, senders, surrogates received, their MB, seconds to collect
    them, and the peak memory in MB of the SuperLink and of the coordinator's app.
    """
    over, peaks = threading.Event(), dict[str, float]()
    with (
        tempfile.TemporaryDirectory() as folder,
        superlink(link, Path(folder)) as (fleet, control, process),
    ):
        threads = [
            threading.Thread(target=send, args=(fleet, str(site), over)) for site in range(count)
        ]
        threads.append(threading.Thread(target=watch_memory, args=(process, peaks, over)))
        for thread in threads:
            thread.start()
        settings = SETTINGS | {"sites": count, "quorum": 0.1, "output-dir": folder}
        try:
            folder_of_run = run(settings, Path(folder), control, None, lambda event: None)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert folder_of_run is not None
        events = [
            json.loads(line) for line in (folder_of_run / "events.jsonl").read_text().splitlines()
        ]
    replied = [event for event in events if event["event"] == "replied"]
    invited = next(event for event in events if event["event"] == "invited")
    first, last = when(invited), when(replied[-1])
    assert first
    assert last
    seconds = (last - first).total_seconds()
    sent = sum(int(event["bytes"]) for event in replied) / 1e6
    return link, count, len(replied), sent, seconds, peaks["link"], peaks["app"]


def main() -> None:
    described(__doc__).parse_args()
    rows = [measure(link, count) for count in SENDERS for link in LINKS]
    (first, *_, last) = (row for row in rows if row[0] == LINKS[-1])
    growth = {
        name: last[i] / first[i]
        for name, i in (("senders", 1), ("seconds", 4), ("link", 5), ("app", 6))
    }  # type: ignore[operator]
    columns = (
        "started with",
        "senders",
        "surrogates",
        "MB",
        "seconds to collect",
        "SuperLink peak MB",
        "app peak MB",
    )
    title = (
        f"surrogates of {CLASSES} classes x {COMPONENTS} components x {DIMENSION}-d, "
        "diagonal, over gRPC"
    )
    report("many-senders", title, columns, rows, growth=growth)
    grown = ", ".join(f"{name} {value:.2f}x" for name, value in growth.items())
    print(f"growth from {first[1]} senders to {last[1]}: {grown}")


if __name__ == "__main__":
    main()

"""A SuperLink that an attacker runs, over gRPC: it sends whatever is put into its queue, and keeps what it
receives.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from flwr.common.serde import run_to_proto, user_config_to_proto
from flwr.proto import fleet_pb2 as fleet
from flwr.proto import heartbeat_pb2, message_pb2, run_pb2
from flwr.proto.fab_pb2 import Fab, GetFabResponse
from flwr.proto.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run

from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from tests.attacks.parts import Parts
from tests.e2e.processes import free_ports, until

NODE = 7


def packed_app(project: bytes | None = None) -> bytes:
    """An app that has settings only; its bytes are the same each time."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        text = (APP_FOLDER / "pyproject.toml").read_bytes()
        archive.writestr(zipfile.ZipInfo("pyproject.toml"), project or text, zipfile.ZIP_DEFLATED)
    return stream.getvalue()


class Rogue(FleetServicer):  # type: ignore[misc]
    """The attacker's Fleet API.

    Attributes:
        queue: messages that the site will receive.
        runs: settings of runs by id.
        apps: packed apps of runs by id; a plain one for others.
        lies: runs of whose apps it states another hash.
        replies: announced messages, and the parts that followed.
        looks: how often the site looked for a message.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.queue = deque[Parts]()
        self.runs: dict[int, dict[str, Any]] = {}
        self.apps: dict[int, bytes] = {}
        self.lies = set[int]()
        self.contents: dict[str, bytes] = {}
        self.replies: list[Any] = []
        self.received: dict[str, bytes] = {}
        self.sent = self.looks = 0

    def send(self, *messages: Parts) -> None:
        """Put messages into the queue."""
        for each in messages:
            self.contents |= each.contents
            self.queue.append(each)

    def answers(self, count: int, seconds: float = 240.0) -> list[dict[str, Any]]:
        """What the site has reported in its replies, once there are so many; an error as a text."""
        until(lambda: len(self.replies) >= count, seconds)
        return [self._answer(each) for each in self.replies]

    def _answer(self, announced: Any) -> dict[str, Any]:
        found = list[Any]()

        def arrived() -> bool:
            # Parts arrive in any order.
            with suppress(KeyError):
                name = announced.metadata.message_id
                found.append(inflate_object_from_contents(name, dict(self.received)))
            return bool(found)

        until(arrived)
        message = found[0]
        if message.has_error():
            return {"error": message.error.reason}
        return dict(message.content["info"])

    def idle(self, looks: int = 5) -> None:
        """Wait until the queue is empty and the site looks for more."""
        until(lambda: not self.queue, 240.0)
        before = self.looks
        until(lambda: self.looks >= before + looks, 240.0)

    def RegisterNode(self, request: Any, context: Any) -> Any:
        return fleet.RegisterNodeFleetResponse(node_id=NODE)

    def ActivateNode(self, request: Any, context: Any) -> Any:
        if not request.heartbeat_interval:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no key")
        return fleet.ActivateNodeResponse(node_id=NODE)

    def DeactivateNode(self, request: Any, context: Any) -> Any:
        return fleet.DeactivateNodeResponse()

    def UnregisterNode(self, request: Any, context: Any) -> Any:
        return fleet.UnregisterNodeFleetResponse()

    def SendNodeHeartbeat(self, request: Any, context: Any) -> Any:
        return heartbeat_pb2.SendNodeHeartbeatResponse(success=True)

    def PullMessages(self, request: Any, context: Any) -> Any:
        self.looks += 1
        if not self.queue:
            return fleet.PullMessagesResponse()
        each = self.queue.popleft()
        self.sent += 1
        return fleet.PullMessagesResponse(
            messages_list=[each.announced], message_object_trees=[each.tree]
        )

    def GetRun(self, request: Any, context: Any) -> Any:
        run = Run.create_empty(run_id=request.run_id)
        run.fab_id, run.fab_version = "fedsurrogate/fedsurrogate", "1.0.0"
        run.fab_hash = hashlib.sha256(self._app(request.run_id)).hexdigest()
        if request.run_id in self.lies:
            run.fab_hash = "0" * 64
        run.series_id = request.run_id
        stated = run_to_proto(run)
        settings = user_config_to_proto(self.runs.get(request.run_id, {}))
        for name, value in settings.items():
            stated.override_config[name].CopyFrom(value)
        return run_pb2.GetRunResponse(run=stated)

    def GetFab(self, request: Any, context: Any) -> Any:
        content = self._app(request.run_id)
        return GetFabResponse(fab=Fab(hash_str=request.hash_str, content=content))

    def PullObject(self, request: Any, context: Any) -> Any:
        content = self.contents.get(request.object_id)
        return message_pb2.PullObjectResponse(
            object_found=content is not None,
            object_available=content is not None,
            object_content=content or b"",
        )

    def ConfirmMessageReceived(self, request: Any, context: Any) -> Any:
        return message_pb2.ConfirmMessageReceivedResponse()

    def PushMessages(self, request: Any, context: Any) -> Any:
        names = list[str]()
        waiting = list(request.message_object_trees)
        while waiting:
            names.append((each := waiting.pop()).object_id)
            waiting.extend(each.children)
        self.replies.append(request.messages_list[0])
        return fleet.PushMessagesResponse(objects_to_push=names, session_id="s")

    def PushObject(self, request: Any, context: Any) -> Any:
        self.received[request.object_id] = request.object_content
        return message_pb2.PushObjectResponse(stored=True)

    def _app(self, run: int) -> bytes:
        return self.apps.get(run) or packed_app()


@contextmanager
def rogue_superlink() -> Iterator[Rogue]:
    """One that listens on loopback."""
    limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(8), options=limits)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    rogue = Rogue(address)
    add_FleetServicer_to_server(rogue, server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield rogue
    finally:
        server.stop(0)

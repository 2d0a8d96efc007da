"""A node that connects to a real SuperLink with Flower's own calls, and replies with whatever parts it likes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.common.serde import message_from_proto
from flwr.proto import fleet_pb2 as fleet
from flwr.proto import heartbeat_pb2, message_pb2
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.node_pb2 import Node
from flwr.supercore.interceptors import RuntimeVersionClientInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedsurrogate.common.wire.records import to_record
from tests.attacks.parts import Parts, parts_of
from tests.attacks.sites.signing import Signer


class HostileNode:
    """Replies soundly to all messages but those of training, in a thread of its own.

    Args:
        address: of the SuperLink's Fleet API, without TLS.
        name: the site's name.
        forge: makes its reply to a message of training from a sound one.
    """

    def __init__(self, address: str, name: str, forge: Callable[[Parts], Parts]) -> None:
        secret = ec.generate_private_key(ec.SECP384R1())
        self._key = public_key_to_bytes(secret.public_key())
        version = RuntimeVersionClientInterceptor(component_name="SuperNode")
        channel = grpc.intercept_channel(grpc.insecure_channel(address), Signer(secret), version)
        self._fleet: Any = FleetStub(channel)
        self.name, self._forge = name, forge
        self.number = 0
        self.refused: list[str] = []
        self.ends = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self._fleet.RegisterNode(fleet.RegisterNodeFleetRequest(public_key=self._key))
        active = self._fleet.ActivateNode(
            fleet.ActivateNodeRequest(public_key=self._key, heartbeat_interval=30.0)
        )
        self.number, beaten = active.node_id, 0.0
        self._node = Node(node_id=self.number)
        while not self.ends.is_set():
            if time.monotonic() - beaten > 10:
                beat = heartbeat_pb2.SendNodeHeartbeatRequest(
                    node=self._node, heartbeat_interval=30.0
                )
                self._fleet.SendNodeHeartbeat(beat)
                beaten = time.monotonic()
            pulled = self._fleet.PullMessages(fleet.PullMessagesRequest(node=self._node))
            for announced in pulled.messages_list:
                self._reply(message_from_proto(announced))
            time.sleep(0.3)

    def _reply(self, question: Message) -> None:
        reply = Message(to_record(b"x", self._info), reply_to=question)
        reply.metadata.__dict__["_src_node_id"] = self._node.node_id
        sound = parts_of(reply)
        train = question.metadata.message_type.startswith("train")
        self._push(self._forge(sound) if train else sound)

    @property
    def _info(self) -> dict[str, Any]:
        return {
            "status": "ok",
            "site": self.name,
            "bytes": 1,
            "fingerprint": "f" * 16,
            "dimension": 8,
            "simulated": False,
        }

    def _push(self, parts: Parts) -> None:
        try:
            receipt = self._fleet.PushMessages(
                fleet.PushMessagesRequest(
                    node=self._node,
                    messages_list=[parts.announced],
                    message_object_trees=[parts.tree],
                    clientapp_runtime_list=[0.1],
                )
            )
        except grpc.RpcError as error:
            self.refused.append(error.details())
            return
        run = parts.announced.metadata.run_id
        for name in receipt.objects_to_push:
            self._fleet.PushObject(
                message_pb2.PushObjectRequest(
                    node=self._node,
                    run_id=run,
                    session_id=receipt.session_id,
                    object_id=name,
                    object_content=parts.contents.get(name, b""),
                )
            )

"""A registered site that sends messages to the SuperLink as another node, over gRPC and with signed
requests.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    NodeAuthServerInterceptor,
)
from flwr.server.superlink.linkstate.linkstate_factory import LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.interceptors import RuntimeVersionClientInterceptor
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager

from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.v134_fleet import guard_fleet
from fedsurrogate.server_app.deployment.fleet_guard import refusal
from fedsurrogate.server_app.deployment.superlink import table_of_registered
from tests.attacks.sites.signing import Signer, restore_flower
from tests.e2e.processes import free_ports


@dataclass
class Site:
    """A registered node: its key, its id, and a Fleet API client that signs every request with that
    key.
    """

    key: bytes
    node: int
    fleet: Any


@dataclass
class Link:
    """A SuperLink's state behind its Fleet API, an active run, and two registered sites."""

    state: Any
    run: int
    honest: Site
    hostile: Site

    def message(
        self, content: str, source: int, target: int = 0, reply_to: Message | None = None
    ) -> Message:
        record = RecordDict({"info": ConfigRecord({"text": content})})
        message = (
            Message(record, target, "train")
            if reply_to is None
            else Message(record, reply_to=reply_to)
        )
        message.metadata.__dict__.update(_run_id=self.run, _src_node_id=source)
        message.metadata.__dict__["_message_id"] = message.object_id
        return message

    def push(self, sender: Site, message: Message) -> None:
        """Send a message from a node, signed by its key; the message itself names its sender."""
        sender.fleet.PushMessages(
            PushMessagesRequest(
                node=Node(node_id=sender.node),
                messages_list=[message_to_proto(message)],
                message_object_trees=[get_object_tree(message)],
            )
        )

    def replies(self, question: Message) -> Any:
        """What the SuperLink has received as replies."""
        read = self.state.get_message_res
        # Flower 1.42 wants the run, too.
        run = {"run_id": self.run} if "run_id" in inspect.signature(read).parameters else {}
        return read({question.metadata.message_id}, **run)


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    restore_flower(monkeypatch)
    guard_fleet(refusal, registered_only=True)
    objects = ObjectStoreFactory()
    links = LinkStateFactory(str(tmp_path / "state.db"), NoOpFederationManager(), objects)
    state: Any = links.state()
    superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    server = superlink._run_fleet_api_grpc_rere(
        address, links, objects, True, None, [NodeAuthServerInterceptor(links)]
    )

    def site() -> Site:
        secret = ec.generate_private_key(ec.SECP384R1())
        public = public_key_to_bytes(secret.public_key())
        version = RuntimeVersionClientInterceptor(component_name="flower-supernode")
        channel = grpc.intercept_channel(grpc.insecure_channel(address), Signer(secret), version)
        return Site(public, state.create_node(NOOP_FLWR_AID, "", public, 30.0), FleetStub(channel))

    run = state.create_run(
        "a/b", "1", "", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
    )
    # From now on, this process may make messages of the run.
    flower().local_run(run)
    task = state.get_run_info(run_ids=[run])[0].primary_task_id
    assert state.claim_task(task)
    assert state.activate_task(task)
    yield Link(state, run, site(), site())
    server.stop(0)


def activate(site: Site, key: bytes) -> int:
    return int(
        site.fleet.ActivateNode(
            ActivateNodeRequest(public_key=key, heartbeat_interval=30.0)
        ).node_id
    )


def refused() -> Any:
    return pytest.raises(grpc.RpcError, match="UNAUTHENTICATED")


def test_a_site_cannot_be_activated_or_looked_up_with_the_key_of_another(link: Link) -> None:
    with refused():
        activate(link.hostile, link.honest.key)
    assert activate(link.honest, link.honest.key) == link.honest.node


def test_a_reply_in_the_place_of_another_node_is_refused_and_the_honest_one_arrives(
    link: Link,
) -> None:
    for site in (link.honest, link.hostile):
        activate(site, site.key)
    question = link.message("question", SUPERLINK_NODE_ID, link.honest.node)
    assert link.state.store_message_ins(question)
    with refused():
        link.push(link.hostile, link.message("forged", link.honest.node, reply_to=question))
    assert not link.state.num_message_res()
    link.push(link.honest, link.message("true", link.honest.node, reply_to=question))
    (reply,) = link.replies(question)
    assert reply.metadata.src_node_id == link.honest.node


def test_no_site_asks_another_as_if_it_were_the_coordinator(link: Link) -> None:
    for site in (link.honest, link.hostile):
        activate(site, site.key)
    with refused():
        link.push(link.hostile, link.message("give me all", SUPERLINK_NODE_ID, link.honest.node))
    assert not link.state.get_message_ins(link.honest.node, None)


def test_a_superlink_that_authenticates_hands_its_app_the_table_and_another_does_not(
    tmp_path: Path,
) -> None:
    tls = [
        "--ssl-ca-certfile",
        "p/ca.crt",
        f"--ssl-certfile={tmp_path}/server.crt",
        "--ssl-keyfile",
        "p/server.key",
    ]
    assert table_of_registered([*tls, "--enable-supernode-auth"]) == tmp_path / "registered.json"
    assert table_of_registered([*tls, "--database", "state.db"]) is None
    assert table_of_registered(["--insecure"]) is None

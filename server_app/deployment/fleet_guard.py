"""A SuperLink that takes a message only from the node it names as its sender.

Flower checks that the node id of a request belongs to the key that signed the request. It does not look at the sender of the
message inside (`PushMessages`), nor at the key that is to be activated (`ActivateNode`). So a registered site could activate
another's node, learn its node id that way, reply in its place, and even send it questions as if it were the coordinator.
"""

from __future__ import annotations

from typing import Any


def authenticate_senders() -> None:
    """For all Fleet APIs that this process opens from now on; call it once."""
    import grpc
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest, RegisterNodeFleetRequest
    from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor

    flowers = NodeAuthServerInterceptor._wrap_method_handler

    def wrap(self: NodeAuthServerInterceptor, handler: grpc.RpcMethodHandler, key: bytes) -> grpc.RpcMethodHandler:
        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            if isinstance(request, ActivateNodeRequest | RegisterNodeFleetRequest) and request.public_key != key:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "Another node's public key")
            if isinstance(request, PushMessagesRequest) and any(
                message.metadata.src_node_id != request.node.node_id for message in request.messages_list
            ):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "A message in the name of another node")
            return handler.unary_unary(request, context)

        # Flower's own check of the request's node id comes first.
        guarded = grpc.unary_unary_rpc_method_handler(answer, handler.request_deserializer, handler.response_serializer)
        return flowers(self, guarded, key)

    NodeAuthServerInterceptor._wrap_method_handler = wrap  # type: ignore[method-assign, assignment]

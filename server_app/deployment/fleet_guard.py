"""Guard for the SuperLink's Fleet API: a message is accepted only from the node that it names as
its sender.

Flower checks that the node id of a request belongs to the key that signed the request. It does not
check the sender of the message inside (`PushMessages`), or the key to be activated
(`ActivateNode`). So a registered site could activate another site's node and learn its node id. It
could then reply as that site, or send it requests as if it were the coordinator.
"""

from __future__ import annotations

from fedsurrogate.common.flower.interface import FleetRequest


def refusal(request: FleetRequest) -> str:
    """Why the SuperLink refuses a request whose signature it has checked.

    Returns:
        Empty for a request that is accepted.

    Example:
        >>> refusal(FleetRequest(b"key of north", key=b"key of south"))
        "Another node's public key"
        >>> refusal(FleetRequest(b"key of north", node=7, senders=(7,)))
        ''
    """
    if request.key is not None and request.key != request.signed_by:
        return "Another node's public key"
    if any(sender != request.node for sender in request.senders):
        return "A message whose sender is another node"
    return ""

"""Whether large packets arrive at the coordinator: small ones may pass a network whose MTU is too
small, large ones not.
"""

from __future__ import annotations

import socket
import ssl
import struct
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, UNKNOWN, ACK = 4, 6, 0xFA, 1
# Several packets; a frame may have 16,384 bytes.
PROBE = 12_000
MARK = b"fedprobe"


def large_packets_arrive(stream: socket.socket | ssl.SSLSocket, seconds: float) -> bool | None:
    """Whether large packets arrive.

    Send a frame of a kind that HTTP/2 servers ignore, then a ping, and wait for the answer to the
    ping. Raises no OSError.

    Args:
        stream: to the coordinator.
        seconds: to wait for an answer.

    Returns:
        Whether the answer came; None if the server does not speak HTTP/2.
    """
    stream.settimeout(seconds)
    with suppress(OSError):
        stream.sendall(PREFACE + _frame(SETTINGS, 0, b""))
        # The server speaks first; its settings are small.
        if _await(stream, SETTINGS, 0) is None:
            return None
        stream.sendall(
            _frame(SETTINGS, ACK, b"") + _frame(UNKNOWN, 0, bytes(PROBE)) + _frame(PING, 0, MARK)
        )
        return _await(stream, PING, ACK) == MARK
    return False


def _frame(kind: int, flags: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + bytes(4) + content


def _await(stream: socket.socket, kind: int, flags: int) -> bytes | None:
    """The content of the next frame of this kind; None if the stream ends, or is not HTTP/2."""
    while True:
        head = _exactly(stream, 9)
        if head is None:
            return None
        length = int.from_bytes(head[:3], "big")
        if length > 2**14 or head[3] > 9:
            return None
        content = _exactly(stream, length)
        if content is None or (head[3], head[4] & ACK) == (kind, flags):
            return content


def _exactly(stream: socket.socket, count: int) -> bytes | None:
    content = b""
    while len(content) < count:
        if not (part := stream.recv(count - len(content))):
            return None
        content += part
    return content

"""A small HTTP proxy for tests: it gives tunnels by CONNECT, may require a password, inspect TLS,
and go away.
"""

import base64
import datetime
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

MOST_BYTES = 65536


class ConnectProxy:
    """Listens on its own port (`url`). credentials: "user:password" that it requires. status: of
    all its replies.

    inspects: a folder for the certificates of a proxy that ends TLS itself, and presents its own
    certificate. hole: bytes in one piece from the site that it loses, with all later ones, as
    behind a too small MTU; 0 for none.
    """

    def __init__(
        self, credentials: str = "", status: int = 200, inspects: Path | None = None, hole: int = 0
    ) -> None:
        self._credentials, self._status, self._hole = credentials, status, hole
        self._inspects = None if inspects is None else _own_context(inspects)
        self._lock, self._open, self.targets = Lock(), list[socket.socket](), list[str]()
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        """As in https_proxy, without credentials."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Accept connections, again after `stop`."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        """Close all tunnels, and refuse new connections."""
        _close(self._listener)
        with self._lock:
            for end in self._open:
                _close(end)
            self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with suppress(OSError, IndexError):
            head = b""
            while b"\r\n\r\n" not in head and len(head) < MOST_BYTES:
                if not (byte := near.recv(1)):
                    return _close(near)
                head += byte
            method, target, _ = head.split(b"\r\n")[0].decode().split()
            self.targets.append(target)
            allowed = f"basic {base64.b64encode(self._credentials.encode()).decode()}".lower()
            status = self._status if method == "CONNECT" else 405
            if self._credentials and f"proxy-authorization: {allowed}".encode() not in head.lower():
                status = 407
            if status != 200:
                near.sendall(f"HTTP/1.1 {status} Refused\r\n\r\n".encode())
                return _close(near)
            host, _, port = target.rpartition(":")
            far = socket.create_connection((host.strip("[]"), int(port)))
            with self._lock:
                self._open += [near, far]
            near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            if self._inspects is not None:
                near = self._inspects.wrap_socket(near, server_side=True)
            Thread(target=self._forward, args=(far, near, 0), daemon=True).start()
            self._forward(near, far, self._hole)
        return _close(near)

    def _forward(self, source: socket.socket, sink: socket.socket, hole: int) -> None:
        lost = False
        with suppress(OSError):
            while chunk := source.recv(65536):
                lost = lost or bool(hole and len(chunk) > hole)
                if not lost:
                    sink.sendall(chunk)
        _close(source)
        _close(sink)


def _own_context(folder: Path) -> ssl.SSLContext:
    """TLS with the certificate of an authority that no federation knows."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, "Gateway CA"),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Clinic"),
        ]
    )
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
    )
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
        now + datetime.timedelta(days=1)
    )
    folder.mkdir(parents=True, exist_ok=True)
    pem = serialization.Encoding.PEM
    (folder / "gateway.crt").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "gateway.key").write_bytes(secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "gateway.crt", folder / "gateway.key")
    return context


def _close(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()

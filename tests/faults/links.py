"""A connection between a site and the SuperLink that a test can cut, or make lose all data."""

import socket
from contextlib import suppress
from threading import Event, Lock, Thread


class Link:
    """Forwards TCP connections from `address` to `target`, both host:port. port: 0 for a free one."""

    def __init__(self, target: str, host: str = "127.0.0.1", port: int = 0) -> None:
        far, _, at = target.rpartition(":")
        self._target, self._host = (far, int(at)), host
        self._flows, self._lock, self._open = Event(), Lock(), list[socket.socket]()
        self._left: int | None = None
        self._flows.set()
        self._listen(port)
        self.address = f"{host}:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        _close(self._listener)
        with self._lock:
            for end in self._open:
                _close(end)
            self._open.clear()

    def mend(self) -> None:
        """Accept connections again after a cut."""
        self._listen(int(self.address.rpartition(":")[2]))

    def swallow(self) -> None:
        """Stop forwarding, and leave every connection open."""
        self._flows.clear()

    def swallow_after(self, sent: int) -> None:
        """Stop forwarding after the site has sent this many more bytes."""
        self._left = sent

    @property
    def swallows(self) -> bool:
        """Whether forwarding is stopped."""
        return not self._flows.is_set()

    def flow(self) -> None:
        """Forward again, starting with the data received in the meantime."""
        self._left = None
        self._flows.set()

    def _listen(self, port: int) -> None:
        self._listener = socket.create_server((self._host, port))
        Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    _close(near)
                    continue
                with self._lock:
                    self._open += [near, far]
                for way in ((near, far, True), (far, near, False)):
                    Thread(target=self._forward, args=way, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while chunk := source.recv(4096):
                if up and self._left is not None:
                    self._left -= len(chunk)
                    if self._left < 0:
                        self.swallow()
                self._flows.wait()
                sink.sendall(chunk)
        _close(source)
        _close(sink)


def _close(end: socket.socket) -> None:
    """Close a socket so that a thread waiting on it continues."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()

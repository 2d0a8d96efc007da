"""Feature extraction by several processes, one a device; each takes the next shard when it has
begun its last one.

`subprocess` starts them: `multiprocessing` would run the user's main script again in each. Messages
are pickled, because both ends of a connection are this program on this machine, and nobody else can
write to it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from fedsurrogate.client_app.datasets.records import Opener
from fedsurrogate.client_app.features.parts import Part, in_parts
from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.errors import BackboneError, FedSurrogateError

# Kinds of messages: a process asks for a shard, sends a part, has no shard left, refuses the
# images, or cannot work.
NEXT, PART, DONE, REFUSED, FAILED = "next", "part", "done", "refused", "failed"
START = (
    "import sys; sys.path[:] = sys.argv[3:]; from fedsurrogate.client_app.features.device_processes import "
    "work; work(int(sys.argv[1]), sys.argv[2])"
)


@dataclass(frozen=True)
class Devices:
    """Devices that get a process each.

    Attributes:
        names: such as cuda:0 and cuda:1.
        load: loads the backbone on one of them; it is pickled.
        fingerprint: of the backbone.
    """

    names: tuple[str, ...]
    load: Callable[[str], Backbone]
    fingerprint: str


def in_processes(
    opener: Opener, shards: Iterable[range], devices: Devices, batch_size: int
) -> Generator[Part]:
    """Yield the records of shards, with features, computed by a process for each device.

    The records of a shard are in order, but several shards are computed at a time. The features are
    those of `in_parts`, bit for bit. The processes end with this generator, or with this process.

    Args:
        opener: opens an image.
        shards: rows of each shard.
        devices: of the processes.
        batch_size: images in a batch.

    Raises:
        BackboneError: for images of two sizes.
        FedSurrogateError: for a process that fails or ends.
    """
    left = iter(shards)
    processes: list[_Process] = []
    try:
        for name in devices.names:
            processes.append(_Process(name))
        # Once for all: a million paths take seconds.
        job = ForkingPickler.dumps(
            (opener, devices.load, devices.fingerprint, batch_size, len(devices.names))
        )
        for process in processes:
            process.send_bytes(job)
        del job
        working = list(processes)
        while working:
            ready = wait([process.connection for process in working])
            for process in [each for each in working if each.connection in ready]:
                kind, *content = process.receive()
                if kind == PART:
                    rows, broken, features, size = content
                    yield Part(
                        rows,
                        None,
                        broken,
                        None if features is None else torch.from_numpy(features),
                        size,
                    )
                elif kind == NEXT:
                    process.send_bytes(ForkingPickler.dumps(next(left, None)))
                elif kind == DONE:
                    working.remove(process)
                elif kind == REFUSED:
                    raise BackboneError(*content)
                else:
                    raise process.failure(f"failed ({content[0]})")
    finally:
        for process in processes:
            process.end()


class _Process:
    """A process for a device, as its parent sees it."""

    def __init__(self, device: str) -> None:
        self._device = device
        try:
            self.connection, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        START,
                        str(theirs.fileno()),
                        device,
                        *map(str, sys.path),
                    ],
                    # It ends when this pipe does, thus with this process, however that ends.
                    stdin=subprocess.PIPE,
                    pass_fds=[theirs.fileno()],
                    # Ctrl-C then reaches this process only, which ends the others.
                    start_new_session=True,
                )
        except OSError as error:
            raise self.failure(f"cannot be started ({error})") from error

    def send_bytes(self, message: memoryview) -> None:
        """Send a pickled message. Raises FedSurrogateError if the process has ended."""
        try:
            self.connection.send_bytes(message)
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> tuple[Any, ...]:
        """The next message. Raises FedSurrogateError if the process has ended."""
        try:
            message: tuple[Any, ...] = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        return message

    def failure(self, why: str) -> FedSurrogateError:
        """The error for a process that cannot go on."""
        return FedSurrogateError(
            f"the process that extracts features on {self._device} {why}; complete shards are "
            "kept, and the next request continues after them; if it fails again, free memory on "
            "this machine or on that GPU, leave the GPU out with CUDA_VISIBLE_DEVICES, or set "
            "device in the node-config to one GPU, such as 'cuda:0'"
        )

    def end(self) -> None:
        """Kill the process if it runs: it has nothing to lose."""
        self._process.kill()
        self._process.communicate()
        self.connection.close()

    def _ended(self) -> FedSurrogateError:
        # The connection breaks only at its end.
        code = self._process.wait()
        how = (
            f"was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}, see its output"
        )
        return self.failure(how)


def work(descriptor: int, device: str) -> None:
    """What a process for a device does.

    Args:
        descriptor: the file descriptor of its connection.
        device: its name.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        opener, load, fingerprint, batch_size, processes = connection.recv()
        if torch.device(device).type == "cuda" and torch.device(device).index is not None:
            # Otherwise pinned memory would also take memory of the first GPU.
            torch.cuda.set_device(device)
        backbone = load(device)
        if backbone.fingerprint != fingerprint:
            raise BackboneError(
                f"{backbone.name!r} has fingerprint {backbone.fingerprint}, in the site's process "
                f"{fingerprint}"
            )
    except Exception as error:
        connection.send((FAILED, _text(error)))
        return
    shards = iter(partial(_next_shard, connection), None)
    try:
        for part in in_parts(opener, shards, backbone, batch_size, processes):
            features = None if part.features is None else part.features.numpy()
            connection.send((PART, part.rows, part.broken, features, part.size))
        connection.send((DONE,))
    except BackboneError as error:
        connection.send((REFUSED, str(error)))
    except Exception as error:
        connection.send((FAILED, _text(error)))


def _next_shard(connection: Connection) -> range | None:
    connection.send((NEXT,))
    shard: range | None = connection.recv()
    return shard


def _end_with_parent() -> None:
    """Read from a pipe into which nothing is written, until the parent has ended."""
    os.read(0, 1)
    os._exit(1)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

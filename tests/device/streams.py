"""Order on a pretended GPU: streams, events and pinned memory, as CUDA documents them.

Work is done at once, on the processor; what is checked is whether it was ordered. Every stream
counts its work, and knows how far each other stream had come at the last time it waited for it; so
does the host. A use of a tensor whose last writer the user has not waited for is a race, which a
real GPU only shows now and then.

Source: CUDA C++ programming guide, 3.2.8 "Asynchronous Concurrent Execution"; PyTorch, "CUDA
semantics".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


class RaceError(RuntimeError):
    """Work that nothing orders. A real GPU raises nothing: results are wrong at times."""


@dataclass(eq=False)
class Clock:
    """What has happened for sure for a stream, or for the host.

    Attributes:
        seen: for each stream, how many of its works are over.
    """

    seen: dict[Clock, int] = field(default_factory=dict)

    def learn(self, other: Clock) -> None:
        """All that the other one knows."""
        for stream, count in other.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def knows(self, moment: Moment) -> bool:
        """Whether a piece of work is over."""
        return self.seen.get(moment.stream, 0) >= moment.count


@dataclass(frozen=True)
class Moment:
    """A piece of work on a stream: the number that it has there."""

    stream: Clock
    count: int


@dataclass
class Copy:
    """A copy from pinned memory, or to it, that the host has not waited for.

    Attributes:
        moment: of the copy.
        host: the pinned memory.
        content: what was copied. From the device: what arrives once it is waited for.
        fetched: whether it is from the device.
    """

    moment: Moment
    host: Tensor
    content: Tensor
    fetched: bool

    def arrive(self) -> None:
        """The copy is over."""
        if self.fetched:
            self.host.copy_(self.content)
        elif not torch.equal(self.host.nan_to_num(), self.content.nan_to_num()):
            raise RaceError("pinned memory was changed before its copy to the device was over")


class Order:
    """Streams of all devices, the host, and copies that are under way."""

    def __init__(self, devices: int) -> None:
        self.host = Clock()
        self.copies: list[Copy] = []
        self.default = [Clock() for _ in range(devices)]
        self.current = list(self.default)

    def work(self, device: int) -> Moment:
        """The next piece of work on the current stream of a device. It begins after everything that
        the host has waited for.
        """
        stream = self.current[device]
        stream.learn(self.host)
        stream.seen[stream] = stream.seen.get(stream, 0) + 1
        return Moment(stream, stream.seen[stream])

    def copy(self, moment: Moment, host: Tensor, content: Tensor, fetched: bool) -> None:
        """A copy that the host does not wait for. Until it does, what it fetches is not there."""
        self.copies.append(Copy(moment, host, content.clone(), fetched))
        if fetched:
            host.fill_(torch.nan if host.is_floating_point() else 77)

    def wait(self, until: Clock) -> None:
        """The host waits for all that a stream, or an event, knows."""
        self.host.learn(until)
        over = [copy for copy in self.copies if self.host.knows(copy.moment)]
        self.copies = [copy for copy in self.copies if copy not in over]
        for copy in over:
            copy.arrive()

    def finish(self) -> None:
        """The host waits for everything."""
        for stream in {*self.default, *self.current, *(copy.moment.stream for copy in self.copies)}:
            self.wait(stream)


@dataclass(eq=False)
class Memory:
    """A block of memory on a device. Tensors that are views of each other share it.

    Attributes:
        device: its number.
        size: bytes.
        home: the stream that it was allocated on, and goes back to.
        free: gives it back.
        written: the last work that wrote it.
        read: the last work of each stream that read it.
        recorded: streams of `record_stream`.
    """

    device: int
    size: int
    home: Clock
    free: Callable[[Memory], None]
    written: Moment
    read: dict[Clock, Moment] = field(default_factory=dict)
    recorded: set[Clock] = field(default_factory=set)

    def use(self, moment: Moment, writes: bool) -> None:
        """A piece of work uses it.

        Raises:
            RaceError: if nothing orders it after the last one that wrote it; for one that writes,
                also after those that read it.
        """
        clock = moment.stream
        before = [self.written, *(self.read.values() if writes else ())]
        if not all(clock.knows(each) for each in before):
            raise RaceError(
                f"memory on cuda:{self.device} is used by a stream that has not waited for the "
                "stream that wrote or read it last"
            )
        self.read[clock] = moment
        if writes:
            self.written = moment

    def early(self) -> bool:
        """Whether its next owner may write into it while another stream still reads it."""
        return any(
            stream is not self.home and stream not in self.recorded and not self.home.knows(moment)
            for stream, moment in self.read.items()
        )

    def __del__(self) -> None:
        self.free(self)

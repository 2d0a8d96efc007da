"""`torch.cuda` of a pretended machine: its answers, streams, events and generators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tests.device.current import current
from tests.device.streams import Clock
from tests.device.tensors import PretendedTensor

if TYPE_CHECKING:
    from tests.device.machine import Machine


class OnDevice(torch._C.Generator):
    """A generator of a device."""

    @property
    def device(self) -> torch.device:
        """Where it draws."""
        return torch.device("cuda")


class _Kinds(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)

    def __call__(cls, device: Any = "cpu") -> torch._C.Generator:
        return (
            OnDevice("cpu") if torch.device(device).type == "cuda" else torch._C.Generator(device)
        )


class DeviceGenerator(metaclass=_Kinds):
    """`torch.Generator`, which also makes those of a device."""


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, clock: Clock | None = None) -> None:
        self.device_index = current().number(device)
        self.device = torch.device("cuda", self.device_index)
        self.clock = clock or Clock(current().order)

    def wait_stream(self, stream: Stream) -> None:
        """Later work of this one begins when all work of the other is over."""
        self.clock.learn(stream.clock)

    def wait_event(self, event: Event) -> None:
        """Later work begins when the event has happened."""
        self.clock.learn(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        """An event after the work so far."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for its work."""
        current().waits += 1
        current().order.wait(self.clock)

    def is_capturing(self) -> bool:
        """Whether it records a graph."""
        return False

    def query(self) -> bool:
        """Whether its work is over for sure."""
        return current().order.host.seen.get(self.clock, 0) >= self.clock.seen.get(self.clock, 0)


def record_stream(tensor: PretendedTensor, stream: Stream) -> None:
    """`Tensor.record_stream`."""
    tensor.memory.recorded.add(stream.clock)


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.clock, self._timing = Clock(), enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """It happens when the work of a stream so far is over."""
        chosen = stream.clock if stream is not None else current().order.current[current().device]
        self.clock = Clock(seen=dict(chosen.seen))

    def wait(self, stream: Stream | None = None) -> None:
        """A stream waits for it."""
        chosen = stream.clock if stream is not None else current().order.current[current().device]
        chosen.learn(self.clock)

    def synchronize(self) -> None:
        """The host waits for it."""
        current().waits += 1
        current().order.wait(self.clock)

    def query(self) -> bool:
        """Whether the host has waited for it."""
        seen = current().order.host.seen
        return all(seen.get(stream, 0) >= count for stream, count in self.clock.seen.items())

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds; no time passes here."""
        if not self._timing:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return 0.0


def answers(machine: Machine) -> dict[str, Any]:
    """What `torch.cuda` answers on a machine, by name."""

    @contextlib.contextmanager
    def stream(chosen: Stream | None) -> Generator[None]:
        if chosen is None:
            yield
            return
        index, before = chosen.device_index, machine.order.current[chosen.device_index]
        device, machine.device = machine.device, index
        machine.order.current[index] = chosen.clock
        try:
            yield
        finally:
            machine.order.current[index], machine.device = before, device

    @contextlib.contextmanager
    def device(chosen: Any) -> Generator[None]:
        before, machine.device = machine.device, machine.number(chosen)
        try:
            yield
        finally:
            machine.device = before

    def synchronize(device: Any = None) -> None:
        machine.waited(machine.number(device))
        machine.order.finish()

    def properties(device: Any = None) -> SimpleNamespace:
        machine.number(device)
        return SimpleNamespace(
            name="Pretended GPU",
            total_memory=machine.memory,
            major=9,
            minor=0,
            multi_processor_count=132,
        )

    def set_device(device: Any) -> None:
        if not isinstance(device, int) and torch.device(device).index is None:
            raise ValueError(
                f"Expected a torch.device with a specified index or an integer, but got:{device}"
            )
        machine.device = machine.number(device)

    def reset_peak(device: Any = None) -> None:
        place = machine.number(device)
        machine.peak[place] = machine.used[place]

    def of(values: list[int]) -> Callable[..., int]:
        return lambda device=None: values[machine.number(device)]

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: machine.devices,
        "current_device": lambda: machine.device,
        "current_device_index": lambda: machine.device,
        "set_device": set_device,
        "device": device,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (
            machine.memory - machine.used[machine.number(device)],
            machine.memory,
        ),
        "memory_allocated": of(machine.used),
        "memory_reserved": of(machine.used),
        "max_memory_allocated": of(machine.peak),
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": lambda: None,
        "manual_seed": machine.seed,
        "manual_seed_all": machine.seed,
        "synchronize": synchronize,
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda device=None: Stream(
            device, clock=machine.order.current[machine.number(device)]
        ),
        "default_stream": lambda device=None: Stream(
            device, clock=machine.order.default[machine.number(device)]
        ),
    }

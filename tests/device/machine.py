"""A machine with one or two pretended GPUs: what `torch.cuda` answers, and how names of devices are
read.

    with Machine(devices=1, memory=2**30) as machine:
        torch.ones(3, device="cuda") + torch.ones(3)  # raises, as on a GPU

Only the thread that enters it has the GPUs, which is also how autograd works here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.device.cuda import DeviceGenerator, OnDevice, answers, record_stream
from tests.device.current import ENTERED
from tests.device.streams import Memory, Moment, Order, RaceError
from tests.device.tensors import PretendedTensor, Values, pretended, unwrapped

NAME = re.compile(r"cuda(?::(\d+))?")
MIB = 2**20


class Machine:
    """Pretended GPUs.

    Attributes:
        order: streams and copies.
        used: bytes on each device.
        peak: the most bytes that were in use on each device.
        copies: numbers of copies to a device and from one.
        waits: how often the host waited for a device, copies from it included.
        random_states: of the default generator of each device.
        faults: what went wrong where no exception could be raised.
    """

    def __init__(self, devices: int = 1, memory: int = 80 * 2**30) -> None:
        self.devices, self.memory = devices, memory
        self.order = Order(devices)
        self.used, self.peak = [0] * devices, [0] * devices
        self.copies = {"to": 0, "from": 0}
        self.waits = 0
        self.faults: list[str] = []
        self.device = 0
        self.device_generator = self.autocast = False
        self.values = Values(self)
        self.functions = Functions(self)
        self._pinned: dict[int, Any] = {}
        self.random_states = [
            torch.Generator().manual_seed(index).get_state() for index in range(devices)
        ]
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Machine:
        ENTERED.append(self)
        self._open.callback(ENTERED.pop)
        for name, answer in answers(self).items():
            for module in (torch.cuda, torch.accelerator):
                if hasattr(module, name):
                    self._open.enter_context(mock.patch.object(module, name, answer))
        self._open.enter_context(mock.patch.object(torch, "Generator", DeviceGenerator))
        self._open.enter_context(mock.patch.object(Tensor, "record_stream", record_stream))
        self._open.enter_context(self.values)
        self._open.enter_context(self.functions)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._open:
            if kind is None:
                self.order.finish()
        if kind is None and self.faults:
            raise RaceError("; ".join(self.faults))

    # Memory.

    def placed(self, values: Tensor, place: int, inside: Sequence[PretendedTensor]) -> Tensor:
        """A result as a tensor on a device. A view lies in the block of the tensor that it is a
        view of.
        """
        storage = values.untyped_storage()
        for each in inside:
            if each.inner.untyped_storage()._cdata == storage._cdata:
                return PretendedTensor(values, each.memory)
        moment = self.order.work(place)
        return PretendedTensor(values, self._allocate(storage.nbytes(), place, moment))

    def _allocate(self, size: int, place: int, moment: Moment) -> Memory:
        size = -(-size // 512) * 512
        if self.used[place] + size > self.memory:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. GPU {place} has a "
                f"total capacity of {self.memory / MIB:.2f} MiB of which "
                f"{(self.memory - self.used[place]) / MIB:.2f} MiB is free."
            )
        self.used[place] += size
        self.peak[place] = max(self.peak[place], self.used[place])
        return Memory(place, size, moment.stream, self._free, moment)

    def _free(self, memory: Memory) -> None:
        self.used[memory.device] -= memory.size
        if memory.early():
            self.faults.append(
                f"memory on cuda:{memory.device} was freed while another stream may still read it: "
                "record_stream is missing"
            )

    # Copies.

    def sent(self, tensor: Tensor, made: Tensor, place: int, wait: bool) -> Tensor:
        """A tensor of the processor on a device."""
        there = self.placed(made, place, [])
        assert isinstance(there, PretendedTensor)
        self.sends(tensor, there.memory.written, wait)
        return there

    def sends(self, tensor: Tensor, moment: Moment, wait: bool) -> None:
        """Count a copy to a device; only one from pinned memory may read it later."""
        self.copies["to"] += 1
        if wait:
            self.waits += 1
            self.order.wait(moment.stream)
        elif self.is_pinned(tensor):
            self.order.copy(moment, tensor, tensor, fetched=False)

    def fetched(
        self, tensor: PretendedTensor, here: Tensor, wait: bool, fresh: bool = False
    ) -> Tensor:
        """Values of a device, which are in `here` already, or will be once they are waited for.

        fresh: PyTorch allocated `here`, in pinned memory if the copy may be under way.
        """
        self.copies["from"] += 1
        place = tensor.memory.device
        moment = self.order.work(place)
        tensor.memory.use(moment, False)
        if not wait and (fresh or self.is_pinned(here)):
            self.pin(here)
            self.order.copy(moment, here, here, fetched=True)
        else:
            self.waited(place)
        return here

    def waited(self, place: int) -> None:
        """The host waits for the current stream of a device."""
        self.waits += 1
        self.order.wait(self.order.current[place])

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether memory of the processor is pinned."""
        return tensor.untyped_storage()._cdata in self._pinned

    def pin(self, tensor: Tensor) -> Tensor:
        """Mark memory of the processor as pinned."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    # Random numbers.

    @contextlib.contextmanager
    def random(self, draws: bool, place: int) -> Generator[None]:
        """A device draws from its own default generator, not from the processor's."""
        if not draws:
            yield
            return
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.random_states[place])
        try:
            yield
        finally:
            self.random_states[place] = torch.default_generator.get_state()
            torch.default_generator.set_state(before)

    def seed(self, seed: int) -> None:
        """`torch.cuda.manual_seed_all`."""
        states = torch._C.Generator().manual_seed(seed).get_state()
        self.random_states = [states for _ in self.random_states]

    # Names of devices.

    def number(self, device: Any) -> int:
        """The number of a GPU, of any way to name it.

        Raises:
            AcceleratorError: for one that this machine lacks.
        """
        if isinstance(device, torch.device):
            index = device.index
        elif isinstance(device, str):
            index = torch.device(device).index
        else:
            index = device
        index = self.device if index is None else index
        if not 0 <= index < self.devices:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return int(index)

    def inner(self, value: Any) -> Any:
        """PyTorch's device that stands for a named GPU; other values as they are."""
        if (isinstance(value, torch.device) and value.type == "cuda") or (
            isinstance(value, str) and NAME.fullmatch(value)
        ):
            return torch.device("meta", self.number(value))
        return value

    def outer(self, device: torch.device) -> torch.device:
        """The name of the GPU that a device of PyTorch stands for."""
        index = pretended(device)
        return device if index is None else torch.device("cuda", index)


class Functions(TorchFunctionMode):
    """Reads and shows names of devices, and does what PyTorch does not dispatch."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self(func, args, kwargs or {})

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of a function of PyTorch."""
        machine = self._machine
        if func is torch.device or "autocast" in getattr(func, "__name__", ""):
            return func(*args, **kwargs)
        machine.autocast = torch.is_autocast_enabled("cuda")
        args = [machine.inner(each) for each in args]
        kwargs = {name: machine.inner(each) for name, each in kwargs.items()}
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = torch.device("meta", machine.number(kwargs["device"]))
        machine.device_generator = any(
            isinstance(each, OnDevice) for each in (*args, *kwargs.values())
        )
        with torch._C.DisableTorchFunctionSubclass():
            if special := SPECIAL.get(func):
                return special(machine, func, args, kwargs)
            if kwargs.pop("pin_memory", False):
                return machine.pin(func(*args, **kwargs))
            return func(*args, **kwargs)


Special = Callable[[Machine, Any, list[Any], dict[str, Any]], Any]


def _device(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return machine.outer(func(*args, **kwargs))


def _is_cuda(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    return pretended(Tensor.device.__get__(args[0])) is not None


def _is_meta(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    return bool(func(*args, **kwargs)) and not _is_cuda(machine, func, args, kwargs)


def _get_device(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> int:
    index = pretended(Tensor.device.__get__(args[0]))
    return -1 if index is None else index


def _cuda(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    device = rest[0] if rest else kwargs.pop("device", None)
    if not isinstance(device, torch.device):
        device = torch.device("meta", machine.number(device))
    return tensor.to(device, **kwargs)


def _from_data(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.tensor` and its like: PyTorch gives a meta tensor no values."""
    place = kwargs.get("device")
    data, *rest = args or [kwargs.pop("data", None)]
    if isinstance(data, Tensor):
        made = data.detach() if func is not torch.tensor else data.detach().clone()
        made = made.to(place or made.device, kwargs.get("dtype") or made.dtype)
        return made.requires_grad_(kwargs.get("requires_grad", False))
    plain = _plain(machine, data)
    if not isinstance(place, torch.device) or pretended(place) is None:
        return func(plain, *rest, **kwargs)
    wanted = kwargs.pop("requires_grad", False)
    made = func(plain, *rest, **kwargs | {"device": "cpu"}).to(place)
    return made.requires_grad_() if wanted else made


def _plain(machine: Machine, data: Any) -> Any:
    """Data with the numbers in place of tensors of a device, each of which is waited for."""
    if isinstance(data, PretendedTensor):
        machine.waited(data.memory.device)
        return data.inner.tolist()
    if isinstance(data, list | tuple):
        return [_plain(machine, each) for each in data]
    return data


def _new_tensor(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    own, data = args
    options = {"dtype": own.dtype, "device": Tensor.device.__get__(own)} | kwargs
    return _from_data(machine, torch.tensor, [data], options)


def _no_numpy(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], PretendedTensor):
        return func(*args, **kwargs)
    raise TypeError(
        f"can't convert cuda:{args[0].memory.device} device type tensor to numpy. Use Tensor.cpu() "
        "to copy the tensor to host memory first."
    )


def _on_host(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What copies a tensor to the host first."""
    if isinstance(args[0], PretendedTensor):
        machine.fetched(args[0], args[0].inner, wait=True)
    return func(unwrapped(args[0]), *args[1:], **kwargs)


def _deepcopy(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    tensor, memo = args
    if not isinstance(tensor, PretendedTensor):
        return func(*args, **kwargs)
    if id(tensor) not in memo:
        made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if getattr(tensor, "_is_param", False):
            made._is_param = True
        memo[id(tensor)] = made
    return memo[id(tensor)]


def _pin(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    tensor: Tensor = args[0]
    if isinstance(tensor, PretendedTensor):
        raise RuntimeError(
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
        )
    return tensor if machine.is_pinned(tensor) else machine.pin(tensor.clone())


def _is_pinned(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    return not isinstance(args[0], PretendedTensor) and machine.is_pinned(args[0])


def _address(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> int:
    return int(unwrapped(args[0]).data_ptr())


def _text(machine: Machine, func: Any, args: list[Any], kwargs: dict[str, Any]) -> str:
    tensor = args[0]
    if not isinstance(tensor, PretendedTensor):
        return str(func(*args, **kwargs))
    return f"{unwrapped(tensor)!r}"[:-1] + f", device='cuda:{tensor.memory.device}')"


SPECIAL: dict[Any, Special] = {
    Tensor.device.__get__: _device, Tensor.is_cuda.__get__: _is_cuda,
    Tensor.is_meta.__get__: _is_meta, Tensor.get_device: _get_device, Tensor.cuda: _cuda,
    torch.tensor: _from_data, torch.as_tensor: _from_data, torch.asarray: _from_data,
    Tensor.new_tensor: _new_tensor, Tensor.numpy: _no_numpy, Tensor.__array__: _no_numpy,
    Tensor.tolist: _on_host, Tensor.__format__: _on_host, Tensor.__deepcopy__: _deepcopy,
    Tensor.pin_memory: _pin, Tensor.is_pinned: _is_pinned, Tensor.data_ptr: _address,
    Tensor.__repr__: _text,
}  # fmt: skip

"""Tensors on a pretended GPU: values are computed on the processor, the rules are CUDA's.

PyTorch's "meta" device with a number stands for the GPU of that number, because all of PyTorch
knows it and none of it needs a driver: autograd, views, modules and factory functions treat it as
another device. A dispatch mode below autograd computes what meta tensors lack, their values, and
raises where CUDA would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device.current import current
from tests.device.streams import Memory

if TYPE_CHECKING:
    from tests.device.machine import Machine

ATEN = torch.ops.aten
# Operations that take tensors of several devices, and check them themselves.
INDEXING = {
    ATEN.index,
    ATEN.index_put,
    ATEN.index_put_,
    ATEN._index_put_impl_,
    ATEN._unsafe_index,
    ATEN._unsafe_index_put,
}
# Like pointwise operations, these take a number of the processor: a tensor without dimensions.
TAKE_NUMBERS = {ATEN.masked_fill, ATEN.masked_fill_, ATEN.where, ATEN.fill_, ATEN.fill}
# The host waits for the device: it needs a value, or the size of the result.
WAIT = {
    ATEN._local_scalar_dense, ATEN.nonzero, ATEN.equal, ATEN.masked_select, ATEN._unique2,
    ATEN.unique_dim, ATEN.unique_consecutive, ATEN.is_nonzero, ATEN._linalg_check_errors,
    ATEN.repeat_interleave,
}  # fmt: skip
# Products, which CUDA has for floating-point numbers alone.
PRODUCTS = {
    ATEN.mm, ATEN.addmm, ATEN.addmm_, ATEN.bmm, ATEN.baddbmm, ATEN.baddbmm_, ATEN.addmv, ATEN.mv,
    ATEN.dot, ATEN.vdot, ATEN.convolution,
}  # fmt: skip
# What autocast computes in its type, and in single precision (PyTorch, "Automatic Mixed Precision").
LOWER = {*PRODUCTS, ATEN.linear, ATEN.matmul, ATEN._scaled_dot_product_attention_math}
SINGLE = {
    ATEN._softmax, ATEN._log_softmax, ATEN._safe_softmax, ATEN.native_layer_norm,
    ATEN.native_group_norm, ATEN.exp, ATEN.log, ATEN.pow, ATEN.rsqrt, ATEN.sum, ATEN.prod,
    ATEN.cumsum, ATEN.norm, ATEN.linalg_vector_norm, ATEN.nll_loss_forward, ATEN.mse_loss,
}  # fmt: skip
# Functions without a kernel on CUDA.
MISSING = {ATEN.histogram, ATEN._histogramdd_bin_edges}
HALVES = (torch.float16, torch.bfloat16)


class PretendedTensor(Tensor):
    """A tensor on a pretended GPU.

    Attributes:
        inner: its values, on the processor.
        memory: the block that it lies in.
    """

    inner: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory) -> PretendedTensor:
        made: PretendedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("meta", memory.device),
        )
        made.inner, made.memory = inner, memory
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return current().functions(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return current().values(func, args, kwargs or {})


@dataclass(frozen=True)
class Facts:
    """What an operation does, by its schema and the tables above.

    Attributes:
        packet: the operation, of all its overloads.
        writes: arguments that it writes into, by place and name.
        view: whether its result is a view, and so no work of the device.
        reshapes: whether it changes the shape of its first argument.
        numbers: whether it takes numbers of the processor, as tensors without dimensions.
        random: whether it draws.
        waits: whether the host waits for its result.
    """

    packet: Any
    writes: tuple[tuple[int, str], ...]
    view: bool
    reshapes: bool
    numbers: bool
    random: bool
    waits: bool


@cache
def facts_of(func: Any) -> Facts:
    """The facts of one operation of PyTorch."""
    schema, packet = func._schema, func.overloadpacket
    aliases = [each.alias_info for each in schema.returns]
    return Facts(
        packet,
        tuple(
            (place, each.name)
            for place, each in enumerate(schema.arguments)
            if each.alias_info is not None and each.alias_info.is_write
        ),
        bool(aliases) and aliases[0] is not None and not aliases[0].is_write,
        torch.Tag.inplace_view in func.tags,
        torch.Tag.pointwise in func.tags or packet in TAKE_NUMBERS,
        torch.Tag.nondeterministic_seeded in func.tags,
        packet in WAIT,
    )


def leaves(values: Any) -> Iterator[Any]:
    """All values in lists and tuples."""
    for each in values:
        if isinstance(each, list | tuple):
            yield from leaves(each)
        else:
            yield each


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A value with a change to every one that lists and tuples hold."""
    if isinstance(value, list | tuple):
        return type(value)([mapped(change, each) for each in value])
    return change(value)


class Values(TorchDispatchMode):
    """Computes every operation of a machine, on the processor, by the rules of CUDA."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self(func, args, kwargs or {})

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of an operation."""
        given = [*leaves(args), *leaves(kwargs.values())]
        tensors = [each for each in given if isinstance(each, Tensor)]
        on = [each for each in tensors if isinstance(each, PretendedTensor)]
        wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        target = None if wanted is None else pretended(wanted)
        place = target if wanted is not None else on[0].memory.device if on else None
        self._generators(func, given, "cpu" if place is None else "cuda")
        if not on and target is None:
            return func(*args, **kwargs)
        if func is ATEN._to_copy.default:
            return self._moved(args[0], kwargs, wanted)
        if func is ATEN.copy_.default:
            return self._copied(*args, **kwargs)
        if wanted is not None and target is None and wanted.type == "meta":
            return func(*mapped(meta, args), **{name: meta(each) for name, each in kwargs.items()})
        facts = facts_of(func)
        check(facts, args, kwargs, tensors)
        return self._computed(func, facts, args, kwargs, place)

    def _computed(
        self,
        func: Any,
        facts: Facts,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        place: int | None,
    ) -> Any:
        machine = self._machine
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        if facts.packet is ATEN.linalg_lstsq and len(args) < 4:
            # CUDA has one driver.
            kwargs = {"driver": "gels"} | kwargs
        if machine.autocast:
            args, kwargs = autocast(facts.packet, args, kwargs)
        changed = written(facts, args, kwargs)
        inside = [
            each
            for each in (*leaves(args), *leaves(kwargs.values()))
            if isinstance(each, PretendedTensor)
        ]
        plain = {name: mapped(unwrapped, each) for name, each in kwargs.items()}
        with machine.random(facts.random and place is not None, place or 0):
            result = func(*mapped(unwrapped, args), **plain)
        self._ordered(func, facts, args, kwargs, inside, changed)
        if not func._schema.returns:
            return None
        if changed:
            return changed[0] if len(changed) == 1 else tuple(changed)
        if place is None:
            return result
        return mapped(
            lambda each: machine.placed(each, place, inside) if isinstance(each, Tensor) else each,
            result,
        )

    def _ordered(
        self,
        func: Any,
        facts: Facts,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        inside: list[PretendedTensor],
        changed: list[Any],
    ) -> None:
        """Where the operation stands in the order of work."""
        if facts.reshapes:
            with no_dispatch():
                func(*args, **kwargs)
        elif not facts.view and inside:
            moment = self._machine.order.work(inside[0].memory.device)
            for each in inside:
                each.memory.use(moment, any(each is other for other in changed))
        if facts.waits or (facts.packet in INDEXING and masks(args[1])):
            self._machine.waited(inside[0].memory.device)

    def _moved(self, tensor: Tensor, kwargs: dict[str, Any], wanted: torch.device | None) -> Tensor:
        """`_to_copy`: to a device, from it, or to another type on it."""
        machine, kwargs = self._machine, dict(kwargs)
        wait = not kwargs.pop("non_blocking", False)
        kwargs.pop("device", None)
        made: Tensor = ATEN._to_copy.default(unwrapped(tensor), **kwargs)
        target = None if wanted is None else pretended(wanted)
        if not isinstance(tensor, PretendedTensor):
            assert target is not None
            return machine.sent(tensor, made, target, wait)
        if wanted is None:
            target = tensor.memory.device
        elif target is None:
            if wanted.type == "meta":
                return made.to("meta")
            return machine.fetched(tensor, made, wait, fresh=True)
        assert target is not None
        tensor.memory.use(machine.order.work(tensor.memory.device), False)
        if target != tensor.memory.device:
            # Copies between devices wait for the current streams of both.
            machine.order.current[target].learn(machine.order.current[tensor.memory.device])
        return machine.placed(made, target, [])

    def _copied(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """`copy_`, which takes any two devices."""
        machine = self._machine
        if isinstance(to, PretendedTensor):
            to.inner.copy_(unwrapped(source))
            moment = machine.order.work(to.memory.device)
            to.memory.use(moment, True)
            if isinstance(source, PretendedTensor):
                source.memory.use(moment, False)
            else:
                machine.sends(source, moment, not non_blocking)
            return to
        assert isinstance(source, PretendedTensor)
        machine.order.overwrite(to, machine.order.current[source.memory.device])
        to.copy_(source.inner)
        return machine.fetched(source, to, not non_blocking)

    def _generators(self, func: Any, given: Sequence[Any], kind: str) -> None:
        """Raise for a generator of another device, as its kernels do."""
        found = "cuda" if self._machine.device_generator else "cpu"
        if found != kind and any(isinstance(each, torch._C.Generator) for each in given):
            raise RuntimeError(
                f"Expected a '{kind}' device type for generator but found '{found}' in {func}"
            )


def pretended(device: torch.device) -> int | None:
    """The number of the pretended GPU that a device of PyTorch stands for; None for others."""
    return device.index if device.type == "meta" else None


def unwrapped(value: Any) -> Any:
    """The values of a pretended tensor; others as they are."""
    return value.inner if isinstance(value, PretendedTensor) else value


def meta(value: Any) -> Any:
    """Shape and type of a pretended tensor, on the true meta device."""
    return value.inner.to("meta") if isinstance(value, PretendedTensor) else value


def shown(tensor: Tensor) -> str:
    """The device of a tensor, as messages name it."""
    return f"cuda:{tensor.memory.device}" if isinstance(tensor, PretendedTensor) else "cpu"


def check(facts: Facts, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
    """Raise for what CUDA does not do: mixed devices, products of integers, functions without a
    kernel.
    """
    packet = facts.packet
    if packet in MISSING:
        raise NotImplementedError(
            f"Could not run '{packet}' with arguments from the 'CUDA' backend"
        )
    driver = kwargs.get(
        "driver", args[3] if packet is ATEN.linalg_lstsq and len(args) > 3 else None
    )
    if packet is ATEN.linalg_lstsq and driver not in (None, "gels"):
        raise RuntimeError(
            f"torch.linalg.lstsq: parameter `driver` should be one of (gels), found {driver!r}"
        )
    if packet in PRODUCTS and not (tensors[0].is_floating_point() or tensors[0].is_complex()):
        raise RuntimeError(f"\"{packet}_cuda\" not implemented for '{tensors[0].dtype}'")
    if packet in INDEXING:
        check_indices(packet, args)
        return
    changed = written(facts, args, kwargs)
    names = {
        shown(each)
        for each in tensors
        if each.dim() or not facts.numbers or isinstance(each, PretendedTensor)
    } | {shown(each) for each in changed}
    if len(names) > 1:
        raise mixed(packet, sorted(names, reverse=True))


def mixed(packet: Any, names: Sequence[str]) -> RuntimeError:
    """CUDA's error for tensors of several devices."""
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{names[0]} and {names[1]}! (in {packet})"
    )


def check_indices(packet: Any, args: Sequence[Any]) -> None:
    """Raise RuntimeError for indices or values on a device that indexing does not take."""
    own = shown(args[0])
    for index in args[1]:
        if index is not None and shown(index) not in ("cpu", own):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({own})"
            )
    if len(args) > 2 and shown(args[2]) != own and (args[2].dim() or shown(args[2]) != "cpu"):
        raise mixed(packet, (own, shown(args[2])))


def masks(indices: Sequence[Tensor | None]) -> bool:
    """Whether an index is a mask, so that the size of the result must be waited for."""
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def written(facts: Facts, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes into."""
    values = (
        args[place] if place < len(args) else kwargs.get(name) for place, name in facts.writes
    )
    return [each for each in leaves(values) if each is not None]


def autocast(
    packet: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Arguments in the type that autocast gives an operation."""
    if packet in LOWER:
        kind = torch.get_autocast_dtype("cuda")
    elif packet in SINGLE:
        kind = torch.float32
    else:
        return args, kwargs
    taken = HALVES if kind == torch.float32 else (*HALVES, torch.float32)

    def cast(value: Any) -> Any:
        return value.to(kind) if isinstance(value, Tensor) and value.dtype in taken else value

    return mapped(cast, args), {name: mapped(cast, each) for name, each in kwargs.items()}

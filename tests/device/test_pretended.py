"""The pretended GPU itself, against what CUDA and PyTorch document.

Each row names a thing that code does with a device, and what a real one does: the result's device,
or the error. Sources: PyTorch's notes "CUDA semantics", "Tensor views", "Reproducibility" and
"Automatic Mixed Precision", the pages of the functions, and the CUDA C++ programming guide.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tests.device.machine import Machine
from tests.device.streams import RaceError

GPU = "cuda"


def here(*shape: int) -> Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape) + 1


def there(*shape: int) -> Tensor:
    return here(*shape).to(GPU)


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def generator(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


# By the device of what comes out: what is done.
WORKS: dict[str, dict[str, Callable[[], Any]]] = {
    "cuda:0": {
        "a factory function with the device": lambda: torch.zeros(3, device=GPU),
        "torch.tensor with the device": lambda: torch.tensor([1.0, 2.0], device=GPU),
        "torch.as_tensor of NumPy's": lambda: torch.as_tensor(np.ones(2), device=GPU),
        "a copy that is like another": lambda: torch.zeros_like(there(3)),
        "new_zeros": lambda: there(3).new_zeros(2),
        "new_tensor": lambda: there(3).new_tensor([1.0]),
        "to the same device": lambda: there(3).to(GPU),
        "to of another tensor": lambda: here(3).double().to(there(1)),
        "cuda": lambda: here(3).cuda(),
        "a number of the processor in pointwise work": lambda: there(3) * torch.tensor(2.0),
        "such a number on the left": lambda: torch.tensor(2.0) - there(3),
        "in where": lambda: torch.where(there(3) > 1, there(3), torch.tensor(0.0)),
        "in masked_fill": lambda: there(3).masked_fill(there(3) > 1, torch.tensor(0.0)),
        "in an assignment to a part": lambda: assigned(there(3), torch.tensor(0.0)),
        "an assignment from the processor": lambda: assigned(there(3), here(1)),
        "copy_ from the processor": lambda: there(3).copy_(here(3)),
        "indices of the processor": lambda: there(3)[torch.tensor([0, 2])],
        "a mask of the processor": lambda: there(2)[torch.tensor([True, False])],
        "indices of the device": lambda: there(3)[torch.tensor([0], device=GPU)],
        "a mask of the device": lambda: there(3)[there(3) > 1],
        "named results": lambda: there(2, 3).min(1).indices,
        "named results of algebra": lambda: torch.linalg.eigh(there(2, 2)).eigenvectors,
        "views": lambda: there(2, 3).T[1:].flatten(),
        "least squares": lambda: torch.linalg.lstsq(there(3, 1), there(3, 1)).solution,
        "a gradient": lambda: gradient(there(3)),
        "a gradient for each record": lambda: vmap(grad(lambda row: row.square().sum()))(
            there(2, 3)
        ),
        "a module": lambda: module().to(GPU)(there(2, 3)),
        "parameters of a module": lambda: next(module().to(GPU).parameters()),
        "a copied module": lambda: next(copy.deepcopy(module().to(GPU)).parameters()),
        "a module with parameters of the call": lambda: functional_call(
            nn.Linear(3, 1).to(GPU), {"bias": there(1)}, (there(2, 3),)
        ),
        "a state that is loaded from the processor": lambda: loaded(),
        "a step of Adam": lambda: stepped(torch.optim.Adam),
        "a step of SGD": lambda: stepped(torch.optim.SGD),
        "random numbers of the device": lambda: torch.randn(3, device=GPU),
        "random numbers of its generator": lambda: torch.randn(
            3, device=GPU, generator=generator(GPU)
        ),
    },
    "cuda:1": {
        "with an object": lambda: torch.ones(3, device=torch.device(GPU, 1)),
        "with a number": lambda: torch.eye(3, device=1),
        "to": lambda: here(3).to("cuda:1"),
        "cuda with a number": lambda: here(3).cuda(1),
        "between devices": lambda: there(3).to("cuda:1"),
    },
    "cpu": {
        "torch.tensor of numbers on a device": lambda: torch.tensor([there(2).sum(), 1.0]),
        "cpu": lambda: there(3).cpu(),
        "an assignment to the processor": lambda: assigned(here(3), there(1)),
        "copy_ to the processor": lambda: here(3).copy_(there(3)),
        "a gradient through a copy": lambda: gradient(here(3)),
    },
    "meta": {
        "the true meta device": lambda: torch.zeros(3, device="meta"),
        "a module on the meta device": lambda: on_meta(),
    },
}
DEVICES = {name: device for device, rows in WORKS.items() for name in rows}


def assigned(to: Tensor, value: Tensor) -> Tensor:
    if value.dim() and value.device == to.device:
        raise AssertionError("two devices are meant")
    to[1:2] = value
    return to


def gradient(x: Tensor) -> Tensor:
    x.requires_grad_()
    (x.to(GPU).square().sum() * 2).backward()
    assert x.grad is not None
    return x.grad


def loaded() -> Tensor:
    made = module().to(GPU)
    made.load_state_dict(module().state_dict())
    return next(made.parameters())


def stepped(kind: Callable[..., torch.optim.Optimizer]) -> Tensor:
    made = module().to(GPU)
    optimiser = kind(made.parameters(), lr=0.1)
    before = next(made.parameters()).detach().clone()
    made(there(2, 3)).sum().backward()
    optimiser.step()
    assert not torch.equal(before, next(made.parameters()))
    return next(made.parameters())


def on_meta() -> Tensor:
    with torch.device("meta"):
        return next(module().parameters())


@pytest.mark.parametrize("name", DEVICES)
def test_what_works_on_cuda_gives_a_tensor_of_the_documented_device(name: str) -> None:
    device = DEVICES[name]
    with Machine(devices=2):
        found = WORKS[device][name]()
        assert str(found.device) == device
        assert found.is_cuda == device.startswith("cuda")
        assert found.is_meta == (device == "meta")


MIXED = "same device"
# By the error and a part of its text: what is done.
FAILS: dict[tuple[type[Exception], str], dict[str, Callable[[], Any]]] = {
    (RuntimeError, MIXED): {
        "pointwise work of two devices": lambda: there(3) + here(3),
        "on one element of the processor": lambda: there(3) + here(1),
        "a number of the device on the processor": lambda: here(3) + there(1)[0],
        "two GPUs": lambda: there(3) + here(3).to("cuda:1"),
        "a product": lambda: there(2, 2) @ here(2, 2),
        "a product with a vector": lambda: there(2, 2) @ here(2),
        "torch.cat": lambda: torch.cat([there(2), here(2)]),
        "torch.stack of numbers": lambda: torch.stack([there(1)[0], torch.tensor(1.0)]),
        "torch.equal": lambda: torch.equal(there(2), here(2)),
        "where": lambda: torch.where(there(3) > 1, there(3), here(3)),
        "in place on the processor": lambda: torch.tensor(1.0).add_(there(1)[0]),
        "gather": lambda: there(3).gather(0, torch.tensor([0])),
        "index_select": lambda: there(3).index_select(0, torch.tensor([0])),
        "scatter": lambda: there(3).scatter(0, torch.tensor([0]), 1.0),
        "a module that stayed": lambda: module()(there(2, 3)),
        "records that stayed": lambda: module().to(GPU)(here(2, 3)),
        "a loss with labels that stayed": lambda: nn.functional.cross_entropy(
            there(2, 3), torch.tensor([0, 1])
        ),
        "an assignment of values of the processor by a mask": lambda: there(3).__setitem__(
            there(3) > 1, here(2)
        ),
    },
    (RuntimeError, "indices should be either on cpu"): {
        "indices of a device for the processor": lambda: here(3)[torch.tensor([0], device=GPU)],
        "a mask of a device for the processor": lambda: here(3)[there(3) > 1],
    },
    (TypeError, "Tensor.cpu()"): {
        "numpy": lambda: there(3).numpy(),
        "numpy of a number": lambda: there(3).sum().numpy(),
        "np.asarray": lambda: np.asarray(there(3)),
        "a function of NumPy": lambda: np.sqrt(there(3)),
    },
    (RuntimeError, "generator"): {
        "the processor's generator for the device": lambda: torch.randn(
            3, device=GPU, generator=generator("cpu")
        ),
        "the same in place": lambda: there(3).normal_(generator=generator("cpu")),
        "the same for a draw": lambda: torch.multinomial(there(3), 1, generator=generator("cpu")),
        "the same for an order": lambda: torch.randperm(3, device=GPU, generator=generator("cpu")),
        "the device's generator for the processor": lambda: torch.randn(
            3, generator=generator(GPU)
        ),
    },
    (RuntimeError, "not implemented for"): {
        "a product of integers": lambda: torch.ones(2, 2, dtype=torch.int64, device=GPU).mm(
            torch.ones(2, 2, dtype=torch.int64, device=GPU)
        ),
    },
    (RuntimeError, "driver"): {
        "least squares by a driver of the processor": lambda: torch.linalg.lstsq(
            there(3, 1), there(3, 1), driver="gelsd"
        ),
    },
    (NotImplementedError, "CUDA"): {
        "a histogram": lambda: torch.histogram(there(3), 2),
    },
    (RuntimeError, "invalid device ordinal"): {
        "a device that the machine lacks": lambda: torch.zeros(3, device="cuda:2"),
    },
    (ValueError, "specified index"): {
        "a current device without a number": lambda: torch.cuda.set_device(GPU),
    },
    (RuntimeError, "pin"): {
        "pinned memory of the device": lambda: there(3).pin_memory(),
    },
    (torch.OutOfMemoryError, "CUDA out of memory"): {
        "no memory left": lambda: torch.empty(2**20, device=GPU),
    },
}
ERRORS = {name: error for error, rows in FAILS.items() for name in rows}


@pytest.mark.parametrize("name", ERRORS)
def test_what_fails_on_cuda_fails_with_the_documented_error(name: str) -> None:
    kind, text = ERRORS[name]
    with Machine(devices=2, memory=2**20), pytest.raises(kind, match=text):
        FAILS[kind, text][name]()


def test_values_and_their_ways_to_the_host_are_those_of_the_processor() -> None:
    x = here(3, 4)
    with Machine() as machine:
        y = x.to(GPU)
        assert y.tolist() == x.tolist()
        assert (float(y.sum()), int(y.sum()), bool(y.sum() > 0)) == (78.0, 78, True)
        assert y.sum().item() == 78.0
        assert f"{y.sum():.1f}" == "78.0"
        assert "device='cuda:0'" in repr(y)
        assert [float(row[0]) for row in y] == [1.0, 5.0, 9.0]
        assert torch.equal((y @ y.T).cpu(), x @ x.T)
        assert machine.waits >= 9


def test_an_operation_in_place_changes_every_view_of_the_memory() -> None:
    with Machine():
        x = there(2, 3)
        x[0].fill_(7.0)
        x.T[2].mul_(10)
        assert x.tolist() == [[7.0, 7.0, 70.0], [4.0, 5.0, 60.0]]
        x.unsqueeze_(0)
        assert x.shape == (1, 2, 3)


def test_a_device_draws_without_the_processors_generator() -> None:
    with Machine():
        torch.manual_seed(5)
        torch.randn(100, device=GPU)
        after = torch.randn(3)
        torch.manual_seed(5)
        assert torch.equal(torch.randn(3), after)
        first = torch.randn(3, device=GPU)
        torch.cuda.manual_seed_all(1)
        second = torch.randn(3, device=GPU)
        torch.cuda.manual_seed_all(1)
        assert torch.equal(torch.randn(3, device=GPU), second)
        assert not torch.equal(first, second)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_machine_answers_for_its_devices(devices: int) -> None:
    with Machine(devices, memory=2**30):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == devices
        assert torch.cuda.get_device_properties(devices - 1).total_memory == 2**30
        assert torch.cuda.mem_get_info(devices - 1) == (2**30, 2**30)
        with pytest.raises(RuntimeError, match="ordinal"):
            torch.cuda.mem_get_info(devices)
        torch.cuda.set_device(devices - 1)
        assert torch.zeros(1, device=GPU).get_device() == devices - 1 == torch.cuda.current_device()
        with torch.cuda.device(0):
            assert str(torch.zeros(1, device=GPU).device) == "cuda:0"
        assert torch.zeros(1).get_device() == -1


def test_memory_is_that_of_the_tensors_that_are_alive() -> None:
    with Machine(memory=2**20):
        x = torch.zeros(2**17, device=GPU)
        view = x[1:]
        assert torch.cuda.memory_allocated() == 2**19
        del x
        assert torch.cuda.memory_allocated() == 2**19, "a view holds the whole block"
        del view
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == 2**19
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0


def test_memory_that_a_gradient_needs_is_held_until_it_is_computed() -> None:
    with Machine():
        x = torch.ones(1024, device=GPU, requires_grad=True)
        y = x.exp().exp().sum()
        before = torch.cuda.memory_allocated()
        y.backward()
        assert torch.cuda.memory_allocated() < before
        assert x.grad is not None


def test_autocast_computes_products_in_its_type_and_sums_in_single_precision() -> None:
    with Machine(), torch.no_grad():
        x, layer = there(2, 3) / 3, nn.Linear(3, 2).to(GPU)
        with torch.autocast(GPU, torch.bfloat16):
            made = layer(x)
            assert made.dtype == torch.bfloat16
            assert made.softmax(1).dtype == nn.functional.layer_norm(made, (2,)).dtype == x.dtype
            assert (made + x[:, :2]).dtype == x.dtype
            assert made.relu().dtype == torch.bfloat16
        assert layer(x).dtype == torch.float32
        half, single = made.float().cpu(), layer(x).cpu()
    assert not torch.equal(half, single)
    torch.testing.assert_close(half, single, rtol=2e-2, atol=2e-2)


def test_a_copy_that_is_not_waited_for_has_not_arrived() -> None:
    with Machine():
        x = there(3)
        pinned = torch.empty(3, pin_memory=True)
        pinned.copy_(x, non_blocking=True)
        assert pinned.isnan().all()
        # PyTorch takes pinned memory for it by itself.
        taken = x.to("cpu", non_blocking=True)
        assert taken.isnan().all()
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        assert pinned.tolist() == taken.tolist() == [1.0, 2.0, 3.0]
        # To memory that is not pinned it is there at once.
        assert torch.empty(3).copy_(x, non_blocking=True).tolist() == [1.0, 2.0, 3.0]


def test_an_event_before_a_copy_says_nothing_about_it() -> None:
    with Machine():
        x, done = there(3), torch.cuda.Event()
        done.record()
        taken = x.to("cpu", non_blocking=True)
        done.synchronize()
        assert taken.isnan().all()
        torch.cuda.synchronize()
        assert taken.tolist() == [1.0, 2.0, 3.0]


def test_pinned_memory_that_is_changed_during_its_copy_is_a_fault() -> None:
    with Machine():
        pinned = here(3).pin_memory()
        x = pinned.to(GPU, non_blocking=True)
        pinned.numpy()[:] = 0
        with pytest.raises(RaceError, match="pinned"):
            torch.cuda.synchronize()
    with Machine():
        pinned = here(3).pin_memory()
        x = pinned.to(GPU, non_blocking=True)
        torch.cuda.synchronize()
        pinned.zero_()
        # What is not pinned was read before the call came back.
        plain = here(3)
        y = plain.to(GPU, non_blocking=True)
        plain.zero_()
        torch.cuda.synchronize()
        assert x.tolist() == y.tolist() == [1.0, 2.0, 3.0]


def test_pinned_memory_goes_to_the_device_and_back_in_the_order_of_a_stream() -> None:
    with Machine():
        pinned, x = here(3).pin_memory(), there(3) * 2
        y = pinned.to(GPU, non_blocking=True)
        pinned.copy_(x, non_blocking=True)
        torch.cuda.synchronize()
        assert (y.tolist(), pinned.tolist()) == ([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
        y = pinned.to(GPU, non_blocking=True)
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RaceError, match="pinned"):
            pinned.copy_(x, non_blocking=True)


def test_a_stream_that_does_not_wait_for_another_races_with_it() -> None:
    with Machine():
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        with torch.cuda.stream(side):
            x = there(3) * 2
        with pytest.raises(RaceError):
            x * 2
        main.wait_stream(side)
        y = x * 2
        with torch.cuda.stream(side), pytest.raises(RaceError):
            # The other stream may still read it.
            x.zero_()
        side.wait_event(main.record_event())
        with torch.cuda.stream(side):
            x.zero_()
        assert y.tolist() == [4.0, 8.0, 12.0]
        # A copy that the host waits for orders what it begins afterwards.
        with torch.cuda.stream(side):
            z = there(3)
        assert (z * 2).tolist() == [2.0, 4.0, 6.0]


def test_memory_that_another_stream_may_still_read_must_be_recorded() -> None:
    def used(recorded: bool) -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = there(3) * 2
        torch.cuda.current_stream().wait_stream(side)
        y = x * 2
        if recorded:
            x.record_stream(torch.cuda.current_stream())
        del x, y

    with Machine():
        used(True)
    with pytest.raises(RaceError, match="record_stream"), Machine():
        used(False)


def test_outside_of_the_machine_nothing_is_pretended() -> None:
    before = torch.Generator, torch.cuda.is_available, torch.cuda.Stream, Tensor.record_stream
    with Machine():
        x = there(3)
    after = torch.Generator, torch.cuda.is_available, torch.cuda.Stream, Tensor.record_stream
    assert before == after
    assert torch.ones(2).device.type == "cpu"
    with pytest.raises(RuntimeError, match="outside"):
        x + 1

"""Faults of devices that are planted into the code are found by the pretended GPU.

Each was chosen as what a change could bring by accident: a forgotten `.to`, NumPy of a tensor of the
device, a generator on the wrong side, a tensor made on the processor inside a loop, a copy that
nothing waits for.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks._gpu_parity import cvae, generator, pooled
from fedsurrogate.client_app.features.device_processes import CudaTransfers, overlapped
from fedsurrogate.client_app.methods.dp import record_gradients
from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.models import training_parts
from fedsurrogate.common.privacy import exact_sums
from fedsurrogate.common.settings.heads import HeadSettings
from fedsurrogate.common.surrogates import mixtures
from fedsurrogate.strategies import fedlap
from fedsurrogate.strategies.closed_form import solvers
from fedsurrogate.strategies.closed_form import statistics as tridiagonal
from tests.device.current import current
from tests.device.machine import Machine
from tests.grid import InProcessGrid, metrics_of, run_federation, sites
from tests.registry import SPECS, TINY, settings_of


def codes(code: CodeType) -> Iterator[CodeType]:
    """Code, and all code inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def plant(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], old: str, new: str
) -> None:
    """Change one piece of the source of a function, everywhere it is used."""
    function = inspect.unwrap(function)
    assert isinstance(function, FunctionType)
    file = Path(inspect.getfile(function))
    lines, first = inspect.getsourcelines(function)
    source = file.read_text().splitlines(keepends=True)
    before = "".join(lines)
    assert before.count(old) == 1, f"{function.__qualname__} has no {old!r}, or several"
    changed = "".join(source[: first - 1]) + before.replace(old, new)
    changed += "".join(source[first - 1 + len(lines) :])
    (code,) = [
        each
        for each in codes(compile(changed, str(file), "exec"))
        if each.co_qualname == function.__qualname__
    ]
    monkeypatch.setattr(function, "__code__", code)


def records(d: int = 4) -> tuple[Tensor, Tensor]:
    x = torch.randn(60, d, generator=generator())
    return x.cuda(), torch.arange(60) % 2


def fitted(family: str = "diag", components: int = 2) -> None:
    chosen = mixtures.MixtureSettings(family, components, 2)
    mixtures.fit(*records(), 2, chosen, generator())


def trained() -> None:
    x, y = records()
    training_parts.train_head([(x, y.cuda())], 1, x.mean(0), x.var(0), 2, HeadSettings())


def clipped() -> None:
    trainer = cvae("cuda", 3, 6, 4, 2)
    inputs = (
        torch.ones(5, 6).cuda(),
        torch.zeros(5, dtype=torch.long).cuda(),
        trainer.noise(5).cuda(),
    )
    record_gradients.clipped_sums(trainer.modules, trainer.losses, inputs, 0.1)


def solved() -> None:
    solvers.lda(pooled(3, tridiagonal.FEWEST, "cuda"))


def extracted() -> None:
    batches = [torch.full((3, 2), float(number)) for number in range(4)]
    found = overlapped(enumerate(batches), lambda x: x * 2, CudaTransfers(torch.device("cuda")))
    for number, features in found:
        assert features is not None
        assert torch.equal(features, (batches[number] * 2).half())


def of_method(name: str) -> Callable[[], None]:
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            settings = settings_of(SPECS[name], TINY)
            made = run_federation(
                Path(folder), InProcessGrid(sites(2)), partition="iid", device="cuda", **settings
            )
            assert metrics_of(made)["sites"]["used"] == 2

    return run


def steps_of_a_head_copy_nothing() -> None:
    x, y = records()
    labels = y.cuda()

    def counted(steps: int) -> tuple[dict[str, int], int]:
        machine = current()
        copies, waits = dict(machine.copies), machine.waits
        batches = [(x, labels)] * steps
        training_parts.train_head(batches, steps, x.mean(0), x.var(0), 2, HeadSettings())
        return {way: machine.copies[way] - copies[way] for way in copies}, machine.waits - waits

    assert counted(3) == counted(6)


# The function, what its source says, what is planted, and work that uses it.
Plant = tuple[Callable[..., Any], str, str, Callable[[], None]]
PLANTED: dict[str, Plant] = {
    "mixtures: rows by class stay": (
        mixtures.fit, "argsort(stable=True).to(features.device)", "argsort(stable=True)", fitted,
    ),
    "k-means: the generator meets weights of the device": (
        mixtures._seeds, "weights.double().cpu()", "weights.double()", fitted,
    ),
    "heads in closed form: NumPy instead of eigenvectors": (
        tridiagonal.Tridiagonal.of.__func__, "whole or scaled.is_cuda", "whole", solved,
    ),
    "a trained head: labels by way of the processor, in a loop": (
        training_parts.train_head, "loss(logits, labels)",
        "loss(logits, labels.cpu().to(labels))", steps_of_a_head_copy_nothing,
    ),
    "private gradients: the sum on the processor": (
        exact_sums.ExactSum.__init__, "dtype=torch.float64, device=device", "dtype=torch.float64", clipped,
    ),
    "FedLAP's coordinator: labels stay": (fedlap._records, "labels.to(device)", "labels", of_method("fedlap")),
    "extraction: the model does not wait for the copy": (
        CudaTransfers.send, "working.wait_stream(self._copies)", "pass", extracted,
    ),
    "extraction: memory goes back while the model reads it": (
        CudaTransfers.send, "there.record_stream(working)", "pass", extracted,
    ),
    "extraction: features are read before they are there": (
        CudaTransfers.fetch, "done.synchronize()", "pass", extracted,
    ),
}  # fmt: skip
FOUND = (RuntimeError, TypeError, AssertionError, FedSurrogateError)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, old, new, work = PLANTED[name]
    plant(monkeypatch, function, old, new)
    with pytest.raises(FOUND), Machine():
        work()


@pytest.mark.parametrize("work", {id(plan[3]): plan[3] for plan in PLANTED.values()}.values())
def test_without_a_fault_nothing_is_found(work: Callable[[], None]) -> None:
    with Machine() as machine:
        work()
    assert not machine.faults

"""Copies overlap with the work of the device, and every batch keeps its features."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fedsurrogate.client_app.features.transfers import CudaTransfers, overlapped


class Recorded:
    """Transfers in memory that write down their order. Features are what the model has computed
    when they are waited for.
    """

    def __init__(self) -> None:
        self.events: list[str] = []

    def send(self, images: Tensor) -> Tensor:
        self.events.append(f"send {int(images[0, 0])}")
        return images

    def fetch(self, features: Tensor) -> Callable[[], Tensor]:
        number = int(features[0, 0])

        def wait() -> Tensor:
            self.events.append(f"wait {number}")
            return features.half()

        return wait


def batches(count: int, events: list[str]) -> Iterator[tuple[str, Tensor | None]]:
    for number in range(count):
        events.append(f"decode {number}")
        yield f"batch {number}", None if number == 2 else torch.full((2, 1), float(number))


def test_the_next_batch_is_queued_before_the_features_of_one_are_waited_for() -> None:
    transfers = Recorded()
    found = list(overlapped(batches(4, transfers.events), lambda images: images, transfers))
    assert [name for name, _ in found] == ["batch 0", "batch 1", "batch 2", "batch 3"]
    assert [None if x is None else float(x[1, 0]) for _, x in found] == [0.0, 1.0, None, 3.0]
    assert transfers.events == [
        *("decode 0", "send 0", "decode 1", "send 1", "wait 0"),
        *("decode 2", "wait 1", "decode 3", "send 3", "wait 3"),
    ]


def test_at_most_two_batches_are_under_way() -> None:
    transfers = Recorded()
    for _ in overlapped(batches(9, transfers.events), lambda images: images, transfers):
        sent, waited = (
            sum(event.startswith(kind) for event in transfers.events) for kind in ("send", "wait")
        )
        assert sent - waited <= 1, "one more than the caller has"


@pytest.mark.parametrize("count", [0, 1])
def test_no_batch_and_one_are_given_as_they_are(count: int) -> None:
    assert len(list(overlapped(batches(count, []), lambda images: images, Recorded()))) == count


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_copies_to_and_from_a_gpu_change_no_bit() -> None:
    device = torch.device("cuda")
    images = [
        torch.randn(64, 3, 32, 32).contiguous(memory_format=torch.channels_last) for _ in range(6)
    ]
    found = list(overlapped(enumerate(images), lambda x: (x * 2).flatten(1), CudaTransfers(device)))
    for (row, features), each in zip(found, images, strict=True):
        assert torch.equal(features, (each * 2).flatten(1).half()), row

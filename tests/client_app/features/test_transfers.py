"""Copies overlap with the work of the device, and every batch keeps its features."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.features.device_processes import CudaTransfers, overlapped
from fedsurrogate.common.errors import FedSurrogateError


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

    def release(self) -> None:
        self.events.append("release")


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


@given(st.lists(st.booleans(), max_size=6))
def test_every_batch_has_its_features_and_none_where_it_has_no_images(images: list[bool]) -> None:
    """Also where the last has none."""
    given_ = [
        (at, torch.full((2, 1), float(at)) if each else None) for at, each in enumerate(images)
    ]
    found = list(overlapped(iter(given_), lambda batch: batch, Recorded()))
    assert [name for name, _ in found] == list(range(len(images)))
    assert [None if x is None else x.flatten().tolist() for _, x in found] == [
        [at, at] if each else None for at, each in enumerate(images)
    ]


class Crowded(Recorded):
    """Transfers to a device that holds a few images at a time: others may take memory meanwhile."""

    def __init__(self, room: list[int], error: type[RuntimeError], text: str) -> None:
        super().__init__()
        self.room, self.error, self.text, self.largest = room, error, text, 0

    def send(self, images: Tensor) -> Tensor:
        room = self.room.pop(0) if len(self.room) > 1 else self.room[0]
        if len(images) > room:
            raise self.error(self.text)
        self.largest = max(self.largest, len(images))
        return images


NO_MEMORY = st.sampled_from(
    [
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (RuntimeError, "CUDA error: out of memory"),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    room=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    error=NO_MEMORY,
)
def test_a_batch_that_does_not_fit_is_halved_and_every_image_keeps_its_features(
    sizes: list[int], room: list[int], error: tuple[type[RuntimeError], str]
) -> None:
    numbers = torch.arange(float(sum(sizes)))[:, None]
    images = list(enumerate(torch.split(numbers, sizes)))
    transfers = Crowded(list(room), *error)
    found = list(overlapped(images, lambda x: x * 2, transfers))
    assert [name for name, _ in found] == list(range(len(sizes)))
    assert [len(x) for _, x in found if x is not None] == sizes, "each batch stays one result"
    assert torch.equal(torch.cat([x for _, x in found if x is not None]), (numbers * 2).half())
    assert transfers.largest <= max(room)


def test_a_later_batch_is_not_tried_whole_again_and_the_log_says_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="fedsurrogate.site")
    transfers = Crowded([4], torch.OutOfMemoryError, "CUDA out of memory.")
    images = [(row, torch.full((10, 1), float(row))) for row in range(5)]
    assert len(list(overlapped(images, lambda x: x, transfers))) == 5
    assert transfers.events.count("release") == 2, "10, then 5 did not fit; 2 do"
    sizes = [re.findall(r"batch of (\d+) .* for (\d+) at a time", each) for each in caplog.messages]
    assert sizes == [[("10", "5")], [("5", "2")]]


def test_the_memory_is_given_back_when_nothing_holds_the_batch_that_did_not_fit() -> None:
    import weakref

    held: list[weakref.ref[Tensor]] = []

    class Watched(Recorded):
        def release(self) -> None:
            self.events.append(f"release while {sum(each() is not None for each in held)} live")

    def forward(images: Tensor) -> Tensor:
        activations = images * 1
        held.append(weakref.ref(activations))
        if len(images) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return activations + 0

    transfers = Watched()
    list(overlapped([(0, torch.zeros(4, 1))], forward, transfers))
    assert "release while 0 live" in transfers.events


def test_one_image_that_does_not_fit_ends_with_what_to_do() -> None:
    transfers = Crowded([0], torch.OutOfMemoryError, "CUDA out of memory.")
    with pytest.raises(FedSurrogateError, match="free memory on it") as error:
        list(overlapped([(0, torch.zeros(8, 1))], lambda x: x, transfers))
    # Other kinds of errors delete the complete shards, because a later attempt would fail as well.
    assert type(error.value) is FedSurrogateError


def test_another_error_of_the_device_is_not_taken_for_a_lack_of_memory() -> None:
    transfers = Crowded([0], RuntimeError, "CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal"):
        list(overlapped([(0, torch.zeros(8, 1))], lambda x: x, transfers))
    assert "release" not in transfers.events


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_copies_to_and_from_a_gpu_change_no_bit() -> None:
    device = torch.device("cuda")
    images = [
        torch.randn(64, 3, 32, 32).contiguous(memory_format=torch.channels_last) for _ in range(6)
    ]
    found = list(overlapped(enumerate(images), lambda x: (x * 2).flatten(1), CudaTransfers(device)))
    for (row, features), each in zip(found, images, strict=True):
        assert torch.equal(features, (each * 2).flatten(1).half()), row

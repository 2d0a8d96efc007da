"""Images to features, part by part: threads decode, a frozen backbone computes, and the order of
the records is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedsurrogate.client_app.datasets.one_record import attempt, described
from fedsurrogate.client_app.datasets.records import Opener
from fedsurrogate.client_app.datasets.whole_site import cause_of
from fedsurrogate.client_app.features.transfers import CudaTransfers, overlapped
from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.preprocessing import OwnTransform
from fedsurrogate.common.errors import BackboneError, DataError
from fedsurrogate.common.machine.cores import usable_cores
from fedsurrogate.common.models.classifiers import alone

# From an image to a tensor (channels, height, width).
Prepare = Callable[[Image.Image], Tensor]
DECODE_TOGETHER = 32
# On a CPU each thread decodes eight images.
CPU_TOGETHER = 8


@dataclass(frozen=True, eq=False)
class Part:
    """Some records of one shard.

    Attributes:
        rows: of the records with images and features.
        images: of `rows`, (n, channels, height, width); None if none can be read.
        broken: rows of broken records, with reasons.
        features: of `rows`, (n, d) float16, once they are computed.
        size: height and width of the images, pixels.
    """

    rows: list[int]
    images: Tensor | None
    broken: list[tuple[int, str]]
    features: Tensor | None = None
    size: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.rows) + len(self.broken)


def in_parts(
    opener: Opener, shards: Iterable[range], backbone: Backbone, batch_size: int, processes: int = 1
) -> Generator[Part]:
    """Yield the records of shards in order, with features.

    On a CPU each core decodes its own images and forwards them one at a time: the bits of a feature
    depend on its image alone, and not on other images, `batch_size` or the number of cores. On a
    GPU every shard begins a batch, so its bits do not depend on the other shards. A shard is asked
    for when the last images before it begin to be decoded.

    Args:
        opener: opens an image.
        shards: rows of each shard.
        backbone: computes the features.
        batch_size: images in a batch; it has no effect on a CPU.
        processes: number of processes that share the cores.
    """
    cores, shape = max(1, usable_cores() // processes), shape_of_images(backbone)
    threads = torch.get_num_threads()
    try:
        if backbone.device.type == "cpu":
            yield from _on_cores(opener, shards, backbone, shape, cores)
            return
        with closing(
            _on_device(opener, shards, backbone, shape, batch_size, min(16, cores))
        ) as parts:
            while True:
                # The caller keeps its number. The cores are busy with images: copies of a batch
                # that are shared out to them would wait for each.
                torch.set_num_threads(1)
                part = next(parts, None)
                torch.set_num_threads(threads)
                if part is None:
                    return
                yield part
    finally:
        # A worker also changed the default of threads started later.
        torch.set_num_threads(threads)


def _on_cores(
    opener: Opener,
    shards: Iterable[range],
    backbone: Backbone,
    shape: tuple[int, ...] | None,
    cores: int,
) -> Generator[Part]:
    """Each core decodes and forwards its own images."""
    decode = partial(_decode, opener, backbone.preprocess, backbone.preprocess.resize, shape)

    def work(indices: range) -> Part:
        # Affects this thread only. Threads that share a forward pass would wait for each other at
        # every layer.
        torch.set_num_threads(1)
        return _forward(decode(indices), backbone, alone)

    yield from _in_order(work, _cut(shards, CPU_TOGETHER), cores, ahead=4 * cores)


def _on_device(
    opener: Opener,
    shards: Iterable[range],
    backbone: Backbone,
    shape: tuple[int, ...] | None,
    batch_size: int,
    workers: int,
) -> Generator[Part]:
    """Threads decode batches, and a GPU computes their features."""
    prepare, forward = _for_device(backbone)
    decode = partial(_decode, opener, prepare, backbone.preprocess.resize, shape)

    def work(indices: range) -> Part:
        # Otherwise torch gives each of these threads one more for every core, which copy an image
        # together, and all of them wait for cores.
        torch.set_num_threads(1)
        return decode(indices)

    parts = _batches(work, shards, batch_size, workers)
    if backbone.device.type == "cuda":
        batches = ((part, part.images) for part in parts)
        for part, features in overlapped(batches, forward, CudaTransfers(backbone.device)):
            yield replace(part, features=features)
        return
    for part in parts:
        yield _forward(part, replace(backbone, forward=forward), lambda images: [images])


def _for_device(backbone: Backbone) -> tuple[Prepare, Callable[[Tensor], Tensor]]:
    """What prepares an image for a GPU, and what computes features of such images.

    8-bit pixels are copied, a quarter of the bytes, and the GPU normalises them: the cores, which
    are what a GPU waits for, save a third of their work on a small photo.
    """
    prepare = backbone.preprocess
    if isinstance(prepare, OwnTransform):
        return prepare, backbone.forward
    return prepare.pixels, lambda pixels: backbone.forward(prepare.normalised(pixels))


def _cut(ranges: Iterable[range], length: int) -> Iterator[range]:
    """Cut each range into pieces of this length; its last piece may be shorter."""
    return (
        each[start : start + length] for each in ranges for start in range(0, len(each), length)
    )


def _batches(
    decode: Callable[[range], Part], shards: Iterable[range], batch_size: int, workers: int
) -> Iterator[Part]:
    """Decode in threads, at most a few batches ahead of the model, and yield batches in the order
    of the records.
    """
    together = min(DECODE_TOGETHER, batch_size)
    ahead = workers + 1 + -(-batch_size // together)
    pieces: deque[int] = deque()

    def cut() -> Iterator[range]:
        for batch in _cut(shards, batch_size):
            pieces.append(-(-len(batch) // together))
            yield from _cut([batch], together)

    decoded = _in_order(decode, cut(), workers, ahead)
    for part in decoded:
        yield _join([part, *islice(decoded, pieces.popleft() - 1)])


def _in_order(
    work: Callable[[range], Part], pieces: Iterator[range], workers: int, ahead: int
) -> Iterator[Part]:
    """Do `work` on each piece in threads, in order; at most `ahead` results are pending."""
    waiting: deque[Future[Part]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="extract") as pool:
        try:
            while True:
                for piece in islice(pieces, ahead - len(waiting)):
                    waiting.append(pool.submit(work, piece))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def shape_of_images(backbone: Backbone) -> tuple[int, ...] | None:
    """The shape (channels, height, width) that every image must have for a backbone whose transform
    is a site's own; None for others, which have one size by their settings, or keep their sizes.

    It comes from an image of noise: from the first record, that one would decide about the others.

    Args:
        backbone: that prepares images.
    """
    if not isinstance(backbone.preprocess, OwnTransform):
        return None
    noise = np.random.default_rng(0).integers(0, 256, (96, 64, 3), dtype=np.uint8)
    return tuple(backbone.preprocess(Image.fromarray(noise)).shape)


def _forward(part: Part, backbone: Backbone, cut: Callable[[Tensor], list[Tensor]]) -> Part:
    """The features of a part, whose images are cut into batches. An image for which a backbone fails
    that works otherwise is broken.
    """
    if part.images is None:
        return part

    def features(images: Tensor) -> Tensor:
        return torch.cat([backbone.forward(each).to("cpu", torch.float16) for each in cut(images)])

    found = attempt(partial(features, part.images))
    if isinstance(found, Tensor):
        return replace(part, features=found)
    if cause_of(found) or not isinstance(
        attempt(partial(features, torch.zeros_like(part.images[:1]))), Tensor
    ):
        raise found
    each_alone = [attempt(partial(features, image[None])) for image in part.images]
    good = [place for place, each in enumerate(each_alone) if isinstance(each, Tensor)]
    rest = [
        (part.rows[place], described(each))
        for place, each in enumerate(each_alone)
        if isinstance(each, BaseException)
    ]
    rows = [each for each in each_alone if isinstance(each, Tensor)]
    return replace(
        part,
        rows=[part.rows[place] for place in good],
        broken=[*part.broken, *rest],
        images=part.images[good] if good else None,
        features=torch.cat(rows) if rows else None,
    )


def _decode(
    opener: Opener, prepare: Prepare, resize: int, shape: tuple[int, ...] | None, indices: range
) -> Part:
    rows: list[int] = []
    broken: list[tuple[int, str]] = []
    images: Tensor | None = None
    size: tuple[int, ...] = ()
    for index in indices:
        image = attempt(partial(_prepared, opener, prepare, resize, shape, index))
        if isinstance(image, BaseException):
            broken.append((index, described(image)))
            continue
        if images is None:
            images = torch.empty((len(indices), *image.shape), dtype=image.dtype).contiguous(
                memory_format=torch.channels_last
            )
            size = tuple(image.shape[1:])
        check_same_size(size, tuple(image.shape[1:]))
        images[len(rows)] = image
        rows.append(index)
    return Part(rows, None if images is None else images[: len(rows)], broken, size=size)


def _prepared(
    opener: Opener, prepare: Prepare, resize: int, shape: tuple[int, ...] | None, index: int
) -> Tensor:
    image = prepare(opener(index, resize))
    if shape is not None and tuple(image.shape) != shape:
        raise DataError(f"the backbone prepares it as {tuple(image.shape)}, others as {shape}")
    return image


def _join(parts: list[Part]) -> Part:
    readable = [part for part in parts if part.images is not None]
    for part in readable:
        check_same_size(readable[0].size, part.size)
    images = [part.images for part in readable if part.images is not None]
    joined = None if not images else images[0] if len(images) == 1 else torch.cat(images)
    rows, broken = (
        [row for part in parts for row in part.rows],
        [each for part in parts for each in part.broken],
    )
    return Part(rows, joined, broken, size=readable[0].size if readable else ())


def check_same_size(size: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Raise BackboneError for images of two sizes, each (height, width)."""
    if size != other:
        raise BackboneError(
            f"images of {size[1]}x{size[0]} and of {other[1]}x{other[0]} px give features of "
            "different lengths; set image-size, and all images are resized to it"
        )

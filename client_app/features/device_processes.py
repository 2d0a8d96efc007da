"""Feature extraction: images to features part by part, copies between memory and a GPU, and several
processes, one a device.

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
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.preprocessing import OwnTransform
from fedsurrogate.common.errors import LOG, BackboneError, DataError, FedSurrogateError
from fedsurrogate.common.machine import usable_cores
from fedsurrogate.common.models.classifiers import alone

from ..datasets.left_out import attempt, cause_of, described
from ..datasets.records import Opener

T = TypeVar("T")


class CudaTransfers:
    """Copies from and to pinned memory. Those to the GPU have a stream of their own, so that they
    run beside its work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, images: Tensor) -> Tensor:
        """Images on the device; its current stream waits for them."""
        with torch.cuda.stream(self._copies):
            there = images.pin_memory().to(self._device, non_blocking=True)
        working = torch.cuda.current_stream(self._device)
        working.wait_stream(self._copies)
        # Their memory is of the copies' stream; it must not be given to the next copy while the
        # model reads it.
        there.record_stream(working)
        return there

    def fetch(self, features: Tensor) -> Callable[[], Tensor]:
        """Copy float16 features (n, d) into pinned memory; the returned function waits for them."""
        here = torch.empty(features.shape, dtype=torch.float16, pin_memory=True)
        here.copy_(features.half(), non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))

        def wait() -> Tensor:
            done.synchronize()
            # Pinned memory is scarce, and the caller may keep features for long.
            return here.clone()

        return wait

    def release(self) -> None:
        """Empty torch's pool, whose pieces fit the batches so far."""
        torch.cuda.empty_cache()


def overlapped(
    batches: Iterable[tuple[T, Tensor | None]],
    forward: Callable[[Tensor], Tensor],
    transfers: CudaTransfers,
) -> Iterator[tuple[T, Tensor | None]]:
    """Features of each batch of images, in order; None for None.

    Two batches are under way: while the device works on one, the next is decoded, copied and queued
    behind it. Others may use the same device, so its free memory is known only when it does not
    suffice: then the batch is halved, and later ones are cut in the same way.

    Args:
        batches: the first part of each entry is kept, the second are images or None.
        forward: computes features of images on the device.
        transfers: copies of images and features.

    Raises:
        FedSurrogateError: if one image alone does not fit.
    """
    most: int | None = None

    def queued(images: Tensor) -> list[Callable[[], Tensor]] | None:
        """What waits for each piece; None if the memory does not suffice."""
        try:
            return [
                transfers.fetch(forward(transfers.send(piece)))
                for piece in torch.split(images, most or len(images))
            ]
        except RuntimeError as error:
            # Memory lacks: torch's own error, or one of a library or of pinned memory.
            signs = "CUDA error: out of memory", "STATUS_ALLOC_FAILED"
            if isinstance(error, torch.OutOfMemoryError) or any(s in str(error) for s in signs):
                return None
            raise

    def begun(images: Tensor) -> list[Callable[[], Tensor]]:
        nonlocal most
        while (waits := queued(images)) is None:
            # Only now: until the error is forgotten, it keeps the tensors of its frames.
            transfers.release()
            if (together := min(len(images), most or len(images))) == 1:
                raise FedSurrogateError(
                    "the GPU has not enough free memory for the backbone and one image; free "
                    "memory on it, choose a smaller backbone, or set device in the node-config to "
                    "another GPU, or to 'cpu'"
                )
            most = together // 2
            LOG.warning(
                "the GPU has not enough free memory for a batch of %d images; from here on "
                "features are computed for %d at a time",
                *(together, most),
            )
        return waits

    before: tuple[T, list[Callable[[], Tensor]]] | None = None
    for name, images in batches:
        now = name, [] if images is None else begun(images)
        if before is not None:
            yield before[0], _joined(before[1])
        before = now
    if before is not None:
        yield before[0], _joined(before[1])


def _joined(waits: Sequence[Callable[[], Tensor]]) -> Tensor | None:
    parts = [wait() for wait in waits]
    return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None


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
    cores, threads = max(1, usable_cores() // processes), torch.get_num_threads()
    on_cpu, own = backbone.device.type == "cpu", backbone.preprocess
    prepare: Prepare = own
    forward = backbone.forward
    if not (on_cpu or isinstance(own, OwnTransform)):
        # 8-bit pixels are copied, a quarter of the bytes, and the GPU normalises them: the cores,
        # which are what a GPU waits for, save a third of their work on a small photo.
        prepare, forward = own.pixels, lambda pixels: backbone.forward(own.normalised(pixels))
    decode = partial(_decode, opener, prepare, own.resize, shape_of_images(backbone))
    try:
        if on_cpu:
            # Each core decodes and forwards its own images.
            yield from _in_order(
                lambda indices: _forward(decode(indices), backbone, alone),
                *(_cut(shards, CPU_TOGETHER), cores, 4 * cores),
            )
            return
        ready = replace(backbone, forward=forward)
        with closing(
            _on_device(_batches(decode, shards, batch_size, min(16, cores)), ready)
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


def _on_device(parts: Iterator[Part], backbone: Backbone) -> Generator[Part]:
    """A GPU computes the features of decoded batches."""
    if backbone.device.type == "cuda":
        batches = ((part, part.images) for part in parts)
        for part, features in overlapped(batches, backbone.forward, CudaTransfers(backbone.device)):
            yield replace(part, features=features)
        return
    for part in parts:
        yield _forward(part, backbone, lambda images: [images])


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
    # Affects this thread only. Threads that share the pass of an image, or its copy, would wait for
    # each other.
    torch.set_num_threads(1)
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
    rows = [row for part in parts for row in part.rows]
    broken = [each for part in parts for each in part.broken]
    return Part(rows, joined, broken, size=readable[0].size if readable else ())


def check_same_size(size: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Raise BackboneError for images of two sizes, each (height, width)."""
    if size != other:
        raise BackboneError(
            f"images of {size[1]}x{size[0]} and of {other[1]}x{other[0]} px give features of "
            "different lengths; set image-size, and all images are resized to it"
        )


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
                    computed = None if features is None else torch.from_numpy(features)
                    yield Part(rows, None, broken, computed, size)
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
                own = (str(theirs.fileno()), device, *map(str, sys.path))
                self._process = subprocess.Popen(
                    [sys.executable, "-c", START, *own],
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
        how = f"ended with exit code {code}, see its output"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
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

"""Speed of extraction on a device: the bare forward pass, decoders, copies, and all of it together.

The forward pass is held against the device's limits; extraction against the slowest of forward
pass, decoders and copies, each measured alone.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from benchmarks._gpu_limits import counted, network
from benchmarks._gpu_rows import (
    Case,
    Clock,
    LeftOutError,
    Row,
    Sizes,
    once,
    reached,
    seconds,
    traced,
)
from fedsurrogate.client_app.datasets.images import open_rgb
from fedsurrogate.client_app.features.device_processes import Devices, in_parts, in_processes
from fedsurrogate.common.backbones.backbones import Backbone, frozen_forward
from fedsurrogate.common.backbones.preprocessing import Preprocessing
from fedsurrogate.common.machine import usable_cores
from fedsurrogate.common.models.devices import gpus_of

# Images a second as a share of the slowest part, and on the device's own decoder as a share of the
# bare forward pass.
OF_PARTS, OF_BARE = 0.5, 0.5
# Share of the limits that the forward pass of torch's own kernels must reach.
FORWARD = 0.3
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Jpegs:
    """A data set of JPEG images in memory, in the form that extraction reads. It can be pickled."""

    def __init__(self, count: int, size: int) -> None:
        self._files, self._count = [], count
        for seed in range(min(count, 16)):
            generator = torch.Generator().manual_seed(seed)
            coarse = torch.randint(0, 256, (1, 3, 8, 8), generator=generator).float()
            smooth = torch.nn.functional.interpolate(
                coarse, (size + size // 7, size + size // 3), mode="bicubic"
            )[0]
            # Fine grain, without which a file would be smaller than that of a photo.
            grain = 8 * torch.randn(smooth.shape, generator=generator)
            file = io.BytesIO()
            pixels = (smooth + grain).clamp(0, 255).byte().permute(1, 2, 0).contiguous().numpy()
            Image.fromarray(pixels).save(file, "JPEG", quality=90)
            self._files.append(file.getvalue())

    def __len__(self) -> int:
        return self._count

    @property
    def bytes(self) -> float:
        """Mean bytes of a file."""
        return sum(map(len, self._files)) / len(self._files)

    def encoded(self, index: int) -> Tensor:
        """The bytes of a row's file (n,), as uint8."""
        return torch.frombuffer(bytearray(self._files[index % len(self._files)]), dtype=torch.uint8)

    def open_image(self, index: int, size: int = 0) -> Image.Image:
        """The image of a row, by the product's reader."""
        return open_rgb(io.BytesIO(self._files[index % len(self._files)]), size)


def preparation(size: int) -> Preprocessing:
    """What torchvision's models ask for."""
    return Preprocessing(size, size, "bilinear", MEAN, DEVIATION)


def backbone_of(name: str, size: int, compiled: bool, device: str) -> Backbone:
    """A model with random weights that ends in its features."""
    torch.manual_seed(0)
    try:
        model = network(name, "cpu").to(device, memory_format=torch.channels_last)
    except ImportError as error:
        raise LeftOutError(f"{name}: {error}") from error
    run = torch.compile(model) if compiled else model
    target = torch.device(device)
    return Backbone(name, 1000, "random", preparation(size), frozen_forward(run, target), target)


def decoding(sizes: Sizes, limit_s: float = 3.0) -> tuple[Row, float]:
    """Images a second that threads of one process decode and prepare; and the most that all cores
    could, if they had no lock in common.
    """
    jpegs, cores = Jpegs(16, sizes.image_size), usable_cores()
    prepare = preparation(sizes.image_size).pixels

    def work(index: int) -> None:
        torch.set_num_threads(1)
        prepare(jpegs.open_image(index, sizes.image_size))

    def rate(threads: int) -> float:
        count, started = 0, time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            while not count or time.perf_counter() - started < limit_s / 8:
                list(pool.map(work, range(8 * threads)))
                count += 8 * threads
        return count / (time.perf_counter() - started)

    threads = torch.get_num_threads()
    try:
        rate(1)
        rates = {each: rate(each) for each in sorted({1, 2, 4, 8, cores // 2, cores}) if each}
    finally:
        torch.set_num_threads(threads)
    row = reached(
        f"JPEG decoded and prepared by the threads of a process, {cores} cores",
        max(rates.values()),
        "images/s",
        "one core times their number",
        cores * rates[1],
        0.2,
        facts={f"{each} threads": each_rate for each, each_rate in rates.items()}
        | {"bytes a file": jpegs.bytes},
    )
    return row, cores * rates[1]


def forward_passes(clock: Callable[[], Clock], sizes: Sizes, compiled: bool) -> Iterator[Case]:
    """The cases of the forward pass alone."""
    for name in sizes.backbones:
        yield Case(
            f"forward pass, {short(name)}", 5, lambda name=name: forward_pass(clock(), sizes, name)
        )
        if compiled:
            yield Case(
                f"forward pass, {short(name)}, compiled",
                60,
                lambda name=name: forward_pass(clock(), sizes, name, True),
            )


def cases(clock: Callable[[], Clock], sizes: Sizes) -> Iterator[Case]:
    """The cases of extraction."""
    for name in sizes.backbones:
        yield Case(
            f"extraction, {short(name)}", 20, lambda name=name: extraction(clock(), sizes, name)
        )


def short(name: str) -> str:
    """A backbone without its library."""
    return name.partition(":")[2]


def forward_pass(clock: Clock, sizes: Sizes, name: str, compiled: bool = False) -> Iterator[Row]:
    """Images a second of the forward pass on a batch that is on the device already."""
    device, title = clock.device, short(name) + (", compiled" if compiled else "")
    backbone = backbone_of(name, sizes.image_size, compiled, device)
    batch = torch.randn(sizes.batch, 3, sizes.image_size, sizes.image_size).to(device)
    needs = counted(lambda: backbone.forward(batch))
    floor, slowest = clock.limits.floor(needs)
    bare = sizes.batch / seconds(lambda: backbone.forward(batch), device, 3 * sizes.repeats)
    yield reached(
        f"forward pass, {title}",
        bare,
        "images/s",
        f"on paper: {slowest}",
        sizes.batch / floor,
        FORWARD,
        facts={
            "gigaoperations an image": needs.operations / sizes.batch / 1e9,
            "megabytes an image": needs.memory / sizes.batch / 1e6,
            "kernels a batch": needs.launches,
        }
        | traced(lambda: backbone.forward(batch), device),
    )


def extraction(clock: Clock, sizes: Sizes, name: str) -> Iterator[Row]:
    """Images a second from JPEG in memory: by one process, by as many as the product starts, and
    with the device's own decoder.
    """
    device, title = clock.device, short(name)
    backbone = backbone_of(name, sizes.image_size, False, device)
    batch = torch.randn(sizes.batch, 3, sizes.image_size, sizes.image_size).to(device)
    bare = sizes.batch / seconds(lambda: backbone.forward(batch), device, sizes.repeats)
    count = sizes.images // 2
    jpegs: Any = Jpegs(count, sizes.image_size)
    link = clock.limits.link / (3 * sizes.image_size**2)
    parts = {"forward pass": bare, "decoders": clock.limits.images, "host link": link}
    slow = min(parts, key=lambda part: parts[part])
    yield reached(
        f"extraction, one process, {title}",
        _rate(lambda: _read(jpegs, backbone, count, sizes.batch), count),
        "images/s",
        f"slowest part: {slow}",
        parts[slow],
        OF_PARTS / 4,
        facts=parts,
    )
    seen = parts[slow]
    # Some numbers with the first backbone; one is enough for the others.
    for each in sizes.processes if name == sizes.backbones[0] else sizes.processes[-1:]:
        yield processes(clock, sizes, name, each, seen, slow)
    try:
        took = seconds(lambda: decoded_there(jpegs, backbone, sizes.batch), device, 1)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise LeftOutError(f"JPEG decoded on the device, {title}: {reason}") from error
    yield reached(
        f"extraction, decoded on the device, {title}",
        count / took,
        "images/s",
        "bare forward",
        bare,
        OF_BARE,
        facts=traced(lambda: decoded_there(jpegs, backbone, sizes.batch), device),
    )


def processes(clock: Clock, sizes: Sizes, name: str, number: int, limit: float, slow: str) -> Row:
    """Images a second of several processes on one GPU, from the time when all of them work."""
    jpegs: Any = Jpegs(16, sizes.image_size)
    length = 2 * sizes.batch
    most = max(4 * number, 3 * sizes.images // length)
    pieces = [range(piece * length, (piece + 1) * length) for piece in range(most)]
    load = partial(backbone_of, name, sizes.image_size, False)
    # As in the product, the first GPU by its number.
    names = (gpus_of(torch.device(clock.device)) or (clock.device,))[:1] * number
    began, times, done = time.perf_counter(), [], 0
    with closing(
        in_processes(jpegs.open_image, pieces, Devices(names, load, "random"), sizes.batch)
    ) as parts:
        for part in parts:
            done += len(part.rows)
            times.append((time.perf_counter(), done))
    # The start of the slowest process and the end, when some have no work left, are cut off.
    (first, before), (last, after) = times[len(times) // 4], times[-1 - len(times) // 8]
    return reached(
        f"extraction, {number} processes, {short(name)}",
        (after - before) / (last - first),
        "images/s",
        f"slowest part: {slow}",
        limit,
        OF_PARTS,
        facts={
            "start, s": times[0][0] - began,
            "images/s with the start": done / (times[-1][0] - began),
            "rates of quarters": [
                (times[b][1] - times[a][1]) / (times[b][0] - times[a][0])
                for a, b in _quarters(len(times))
            ],
        },
    )


def _quarters(count: int) -> list[tuple[int, int]]:
    ends = [round(share * (count - 1) / 4) for share in range(5)]
    return [(a, b) for a, b in pairwise(ends) if b > a]


def _read(jpegs: Any, backbone: Backbone, count: int, together: int) -> None:
    with closing(in_parts(jpegs.open_image, [range(count)], backbone, together)) as parts:
        done = sum(len(part.rows) for part in parts)
    if done != count:
        raise AssertionError(f"{count - done} images were not read")


def _rate(work: Callable[[], None], count: int) -> float:
    """Images a second; the first run, which fills pools of memory, does not count."""
    work()
    return count / once(work)


def decoded_there(jpegs: Jpegs, backbone: Backbone, together: int) -> None:
    """Features of all JPEG images, which the device itself decodes (nvJPEG on a GPU), resizes and
    normalises.

    Its features differ in the last digits from those of the product, whose decoder and resampling
    are Pillow's.
    """
    from torchvision.io import ImageReadMode, decode_jpeg

    chosen, device = backbone.preprocess, backbone.device
    assert isinstance(chosen, Preprocessing)
    mean, std = (
        torch.tensor(each, device=device)[:, None, None] for each in (chosen.mean, chosen.std)
    )
    for start in range(0, len(jpegs), together):
        rows = range(start, min(start + together, len(jpegs)))
        images = decode_jpeg(
            [jpegs.encoded(row) for row in rows], mode=ImageReadMode.RGB, device=device
        )
        by_size: dict[torch.Size, list[Tensor]] = {}
        for image in images:
            by_size.setdefault(image.shape, []).append(image)
        square = [
            torch.nn.functional.interpolate(
                torch.stack(alike).float(), 2 * (chosen.crop,), mode="bilinear", antialias=True
            )
            for alike in by_size.values()
        ]
        backbone.forward((torch.cat(square) / 255 - mean) / std).to("cpu", torch.float16)

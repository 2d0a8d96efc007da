"""Speed of extraction on a device: the bare forward pass, decoders, copies, and all of it together.

The forward pass is held against the device's limits; extraction against the slowest of forward
pass, decoders and copies, each measured alone.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
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
from fedsurrogate.client_app.features.device_processes import Devices, in_processes
from fedsurrogate.client_app.features.parts import in_parts, usable_cores
from fedsurrogate.common.backbones.backbones import Backbone, frozen_forward
from fedsurrogate.common.backbones.preprocessing import Preprocessing
from fedsurrogate.common.models.devices import gpus_of

# Images a second as a share of the slowest part, on the device's own decoder as a share of the bare
# forward pass, and on all GPUs as a share of those on one, times their number.
OF_PARTS, OF_BARE, OF_ALL = 0.8, 0.9, 0.8
# Share of the limits that the forward pass of torch's own kernels must reach.
FORWARD = 0.3
# Shards of a process on each of several GPUs, and batches of a shard.
SHARDS_EACH, BATCHES = 16, 8
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Jpegs:
    """A data set of JPEG images in memory, in the form that extraction reads."""

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
        """The image of a row; the decoder may shrink it to at least `size`."""
        image = Image.open(io.BytesIO(self._files[index % len(self._files)]))
        image.draft("RGB", (size, size))
        return image.convert("RGB")


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


def decoding(sizes: Sizes, limit_s: float = 4.0) -> tuple[Row, float]:
    """Images a second that all cores decode and prepare, against one core times their number; and
    that rate.
    """
    jpegs, prepare, cores = (
        Jpegs(16, sizes.image_size),
        preparation(sizes.image_size),
        usable_cores(),
    )

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
    best = max(rates.values())
    row = reached(
        f"JPEG decoded and prepared, {cores} cores",
        best,
        "images/s",
        "one core times their number",
        cores * rates[1],
        0.4,
        facts={f"{each} threads": each_rate for each, each_rate in rates.items()}
        | {"bytes a file": jpegs.bytes},
    )
    return row, best


def cases(clock: Callable[[], Clock], sizes: Sizes, compiled: bool) -> Iterator[Case]:
    """All cases of extraction, one backbone a case."""
    for name in sizes.backbones:
        yield Case(
            f"extraction, {short(name)}", 25, lambda name=name: extraction(clock(), sizes, name)
        )
        if compiled:
            yield Case(
                f"extraction, {short(name)}, compiled",
                60,
                lambda name=name: extraction(clock(), sizes, name, True),
            )
    yield Case("extraction over all GPUs", 10, lambda: all_gpus(clock().device, sizes))


def short(name: str) -> str:
    """A backbone without its library."""
    return name.partition(":")[2]


def extraction(clock: Clock, sizes: Sizes, name: str, compiled: bool = False) -> Iterator[Row]:
    """Images a second: the forward pass on a batch that is on the device already; from JPEG in
    memory with the product's decoder; and with the device's own.
    """
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
    # As many batches as take a few seconds, and never fewer than let the start be forgotten.
    count = min(sizes.images, max(4, int(3 * bare) // sizes.batch) * sizes.batch)
    jpegs: Any = Jpegs(count, sizes.image_size)
    through = _rate(lambda: _read(jpegs, backbone, count, sizes.batch), count, 2)
    link = clock.limits.link / (4 * 3 * sizes.image_size**2)
    parts = {"forward pass": bare, "decoders": clock.limits.images, "host link": link}
    slow = min(parts, key=lambda part: parts[part])
    yield reached(
        f"extraction, {title}",
        through,
        "images/s",
        f"slowest part: {slow}",
        parts[slow],
        OF_PARTS,
        facts={"of the forward pass": through / bare, **parts},
    )
    took = seconds(lambda: decoded_there(jpegs, backbone, sizes.batch), device, 1)
    yield reached(
        f"extraction, decoded on the device, {title}",
        count / took,
        "images/s",
        "bare forward",
        bare,
        OF_BARE,
    )


def _read(jpegs: Any, backbone: Backbone, count: int, together: int) -> None:
    with closing(in_parts(jpegs.open_image, [range(count)], backbone, together)) as parts:
        done = sum(len(part.rows) for part in parts)
    if done != count:
        raise AssertionError(f"{count - done} images were not read")


def _rate(work: Callable[[], None], count: int, repeats: int) -> float:
    """Median images a second; the first run, which fills pools of memory, does not count."""
    rates = []
    work()
    for _ in range(repeats):
        rates.append(count / once(work))
    return statistics.median(rates)


def all_gpus(device: str, sizes: Sizes) -> Iterator[Row]:
    """Images a second of one process a GPU, from their first batch on, against those on one GPU; on
    a CPU, two processes.
    """
    names = ("cpu", "cpu") if device == "cpu" else gpus_of(torch.device(device))
    if len(names) < 2:
        raise LeftOutError("extraction over all GPUs: there is one, or --device names one")
    jpegs, length = Jpegs(sizes.images, sizes.image_size), BATCHES * sizes.batch
    load = partial(backbone_of, sizes.backbones[0], sizes.image_size, False)

    def rate(devices: tuple[str, ...]) -> float:
        pieces = [
            range(piece * length, (piece + 1) * length)
            for piece in range(SHARDS_EACH * len(devices))
        ]
        with closing(
            in_processes(jpegs.open_image, pieces, Devices(devices, load, "random"), sizes.batch)
        ) as parts:
            next(parts)
            started = time.perf_counter()
            return sum(len(part.rows) for part in parts) / (time.perf_counter() - started)

    one = rate(names[:1])
    name = f"extraction, {len(names)} processes, {short(sizes.backbones[0])}"
    yield reached(
        name, rate(names), "images/s", f"{len(names)} times one process", len(names) * one, OF_ALL
    )


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
        try:
            images = decode_jpeg(
                [jpegs.encoded(row) for row in rows], mode=ImageReadMode.RGB, device=device
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise LeftOutError(
                f"JPEG decoded on the device, for lack of nvJPEG: {reason}"
            ) from error
        square = [
            torch.nn.functional.interpolate(
                image[None].float(), (chosen.crop, chosen.crop), mode="bilinear", antialias=True
            )
            for image in images
        ]
        backbone.forward((torch.cat(square) / 255 - mean) / std).to("cpu", torch.float16)

"""What the tests of extraction by several processes run in those: a small network, and images that
wait or kill.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from fedsurrogate.client_app.datasets.dataset import Dataset
from fedsurrogate.client_app.features import extraction
from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.own_backbones import own_backbone

COUNT, SHARD, SIZE = 86, 16, 16
BROKEN = (3, 17, 18, 40, 85)
# The record, in the last shard, whose image waits for two complete shards, and then does what its
# folder says.
LAST = 81


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 5),
        nn.ReLU(),
        nn.Conv2d(24, 48, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(768, 33),
    )


def backbone(device: str = "cpu") -> Backbone:
    return own_backbone("python:tests.client_app.features.other_processes:network", SIZE, device)


def picture(index: int, _: int = 0) -> Image.Image:
    if index in BROKEN:
        raise OSError(f"no image {index}")
    return Image.fromarray(
        np.random.default_rng(index).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    )


def of_two_sizes(index: int, _: int = 0) -> Image.Image:
    return Image.new("RGB", (6, 5 if index == LAST else 4), "white")


def disturbed(folder: Path, index: int, _: int = 0) -> Image.Image:
    """A picture; the last waits as long as `wait` is in the folder, or kills its process if `kill`
    is there.
    """
    (folder / f"{os.getpid()}.pid").touch()
    if index == LAST and (folder / "wait").exists() | (folder / "kill").exists():
        while complete(folder) < 2 or (folder / "wait").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return picture(index)


def complete(folder: Path) -> int:
    """Number of shards that are on disk."""
    return len(list(folder.glob("cache/features/*.partial/*.npz")))


def dataset_of(opener: Callable[[int, int], Image.Image], count: int = COUNT) -> Dataset:
    labels = torch.zeros(count, dtype=torch.int64)
    return Dataset("pictures", labels, ("a",), labels == 0, "key", opener=opener)


def use(processes: int, shard: int = SHARD) -> None:
    """Let this process extract features in shards of 16, by so many processes on the CPU; one is
    this process.
    """
    extraction.SHARD, extraction.SHARDS_EACH = shard, 1
    extraction.gpus_of = lambda _: ("cpu",) * processes


def main(folder: str) -> None:
    """A process that extracts by two others until it is killed."""
    use(2)
    place = Path(folder)
    extraction.extract(
        dataset_of(partial(disturbed, place)), backbone(), place / "cache", load=backbone
    )

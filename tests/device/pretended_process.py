"""What a process for one of several pretended GPUs runs: unpickling its job makes the machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.own_backbones import own_backbone
from tests.device.machine import Machine

SIZE = 16


def network() -> nn.Module:
    """A backbone of a convolution."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )


def backbone(device: str) -> Backbone:
    """It, loaded on a device."""
    return own_backbone("python:tests.device.pretended_process:network", SIZE, device)


class OnTwoGpus:
    """Loads the backbone; a process that receives this has two pretended GPUs from then on."""

    def __call__(self, device: str) -> Backbone:
        return backbone(device)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _with_gpus, ()


def _with_gpus() -> OnTwoGpus:
    Machine(devices=2).__enter__()
    return OnTwoGpus()

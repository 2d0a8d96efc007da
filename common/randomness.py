"""Random generators that depend only on their seed and purpose."""

from __future__ import annotations

import hashlib

import torch


def stream(*parts: object) -> torch.Generator:
    """A generator for these parts, which include a seed; independent of those of other parts. Never
    for privacy noise.
    """
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

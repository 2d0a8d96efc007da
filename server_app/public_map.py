"""A public map from features of public images: made once, for any number of runs."""

from __future__ import annotations

from pathlib import Path

import torch

from fedsurrogate.common.backbones.feature_power import power_for, raised
from fedsurrogate.common.backbones.own_heads import own_head
from fedsurrogate.common.files import replace_file
from fedsurrogate.strategies.pooling.public_projection import (
    CENTRE,
    NAME,
    POWER,
    leading,
    read_public,
    whitened,
)


def write_public_map(
    public: str, out: Path, backbone: str = "pixels", weights_path: str = "", power: float = 0.0
) -> str:
    """Write the map that `features.projection` takes.

    Its centre is the mean of the features. Its directions are those of the backbone's own head for
    whitened features; without a head here, the principal components of the features.

    Args:
        public: safetensors file with features `x` of public images, as `site features` writes it.
        out: the file of the map.
        backbone: that made the features.
        weights_path: file of its weights; empty for those that its library has stored here.
        power: of the features in the run; 0 for that of a run with this backbone.

    Returns:
        What was written, in words.

    Raises:
        ConfigError: for a file without features.
    """
    from safetensors.torch import save

    power = power or power_for(backbone)
    features = raised(read_public(public), power)
    count, dimension = features.shape
    head, centre = own_head(backbone, weights_path, dimension), features.mean(0)
    rows = (
        leading(features - centre)[: max(1, count - 1)]
        if head is None
        else whitened(head - head.mean(0), features)
    )
    tensors = {NAME: rows.float().contiguous(), CENTRE: centre.to(torch.float32)}
    replace_file(out, save(tensors, {POWER: f"{power:g}"}))
    source = "principal components" if head is None else f"the head of {backbone}"
    return (
        f"{len(rows):,} directions of {dimension:,} dimensions, from {source} and {count:,} public "
        f"images, for features.power = {power:g}"
    )

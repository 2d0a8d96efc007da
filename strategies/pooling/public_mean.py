"""The public centre: the mean feature of public images. Sites subtract it before they clip for
privacy.

Without it, the part that all features share takes most of their unit norm. The centre must not
depend on any site's data, because it would disclose information about them.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from fedsurrogate.common.backbones.feature_power import raised
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.wire.surrogate_proto import pack_centre, unpack_centre


def read_centre(file: str, power: float = 1.0) -> Tensor | None:
    """The public centre in a safetensors file, rounded as in transfer to sites.

    Args:
        file: with features `x`, (n, d); empty for none.
        power: to which they are raised before the mean.

    Returns:
        Their mean, (d,); None without a file.

    Raises:
        ConfigError: when the file is missing or has no such features.
    """
    return unpack_centre(pack_centre(raised(read_public(file), power).mean(0))) if file else None


def read_public(file: str) -> Tensor:
    """The public features in a safetensors file.

    Args:
        file: with features `x`.

    Returns:
        The features, (n, d), float64.

    Raises:
        ConfigError: when the file is missing or has none, or they are not finite.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(Path(file).expanduser(), "pt") as content:
            features: Tensor = content.get_tensor("x").double()
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (OSError, RuntimeError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"fedpft.public = {file!r}: no readable safetensors file with features x ({error})"
        ) from None
    if features.ndim != 2 or not features.numel() or not features.isfinite().all():
        raise ConfigError(
            f"fedpft.public = {file!r}: x of shape {tuple(features.shape)} must be (n, d) and "
            "finite"
        )
    return features

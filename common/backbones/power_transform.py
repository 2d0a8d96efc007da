"""A public power of every feature, before anything else: sign(x) |x|^p."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Models whose last layer before the classifier is a ReLU.
# tests/common/backbones/test_power_transform.py checks the list.
NON_NEGATIVE = re.compile(
    r"torchvision:(alexnet|densenet|googlenet|inception_v3|mnasnet|mobilenet_v2|regnet|resnet|resnext|shufflenet|vgg|wide_resnet)"
    r"|timm:(resnet(18|34|50|101|152)|densenet(121|161|169|201)|mobilenetv2_\d+|(tf_)?efficientnet_lite\d"
    r"|wide_resnet\d+_2|vgg\d+(_bn)?)(\.|$)"
)
# Privacy mechanisms that clip features of each site to norm one.
CLIPPED = ("sums", "dp-em", "theorem-4.1")
MARK, LARGEST_POWER = "^", 2.0


def power_for(backbone: str, clipped: bool = False) -> float:
    """The power for a backbone: 0.5 if its features are never negative, otherwise 1. Pixels stay
    images.

    Args:
        backbone: its name.
        clipped: whether a privacy mechanism clips features to norm one; the power is then 1. A
            square root gives all features more in common, which then takes more of that norm; at
            epsilon 4 and 8, noisy sums lose 2 to 3 points (benchmarks/private_surrogates.py).

    Example:
        >>> power_for("torchvision:resnet18"), power_for("torchvision:resnet18", clipped=True)
        (0.5, 1.0)
    """
    return 0.5 if NON_NEGATIVE.match(backbone) and not clipped else 1.0


def raised(features: Tensor, power: float) -> Tensor:
    """Features to a power, with their signs.

    Args:
        features: (n, d).
        power: as in `power_for`.

    Returns:
        Features (n, d).

    Example:
        >>> import torch
        >>> raised(torch.tensor([[-4.0, 9.0]]), 0.5).tolist()
        [[-2.0, 3.0]]
    """
    return features if power == 1 else features.sign() * features.abs().pow(power)


def with_power(fingerprint: str, power: float) -> str:
    """The fingerprint of a backbone whose features are raised to a power.

    Args:
        fingerprint: of the backbone.
        power: of the features.

    Returns:
        The fingerprint with the power; unchanged if it is empty or has a power, or for the power 1.

    Example:
        >>> with_power("abc", 0.5), power_in("abc^0.5"), power_in("abc")
        ('abc^0.5', 0.5, 1.0)
    """
    return (
        fingerprint
        if power == 1 or power_in(fingerprint) != 1 or not fingerprint
        else f"{fingerprint}{MARK}{power:g}"
    )


def power_in(fingerprint: str) -> float:
    """The power in a fingerprint of `with_power`; 1 without one, or if no run can have it: sites
    write the fingerprint.
    """
    _, mark, text = fingerprint.rpartition(MARK)
    try:
        power = float(text) if mark else 1.0
    except ValueError:
        return 1.0
    return power if 0 < power <= LARGEST_POWER else 1.0

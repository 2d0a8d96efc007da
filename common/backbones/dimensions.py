"""The dimension of features that settings alone tell, so that every side knows the same one."""

from __future__ import annotations

from ..extras import OF_FEATURES
from .backbone_names import OF_IMAGE_SIZE

KNOWN_DIMENSIONS = {
    "torchvision:mobilenet_v2": 1280,
    "torchvision:resnet50": 2048,
    "torchvision:resnet18": 512,
    "timm:tf_efficientnet_lite0": 1280,
}
# Side of the images of the digits.
DIGITS = 8


def named_dimension(data: str, backbone: str, image_size: int) -> int:
    """The dimension of a backbone's features by its name, without loading it or reading a file.

    Args:
        data: kind of data, the setting `data`.
        backbone: its name, the setting `backbone`.
        image_size: side of the images in pixels; 0 if it is not set.

    Returns:
        The dimension; 0 where only the sites know it.

    Example:
        >>> named_dimension("imagefolder", "pixels:rgb", 8), named_dimension("digits", "pixels", 0)
        (192, 64)
        >>> named_dimension("safetensors", "pixels", 28)
        0
    """
    if backbone not in OF_IMAGE_SIZE:
        return KNOWN_DIMENSIONS.get(backbone, 0)
    if data in OF_FEATURES or not (image_size or data == "digits"):
        return 0
    return (3 if backbone == "pixels:rgb" else 1) * (image_size or DIGITS) ** 2

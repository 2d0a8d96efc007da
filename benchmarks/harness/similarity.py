"""How much a reconstructed image looks like a real one: PSNR and SSIM of batches, and the best
match in a set.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv2d

WINDOW, SIGMA = 11, 1.5
# Constants of SSIM for pixels from 0 to 1.
C1, C2 = 0.01**2, 0.03**2


def psnr(first: Tensor, second: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of images.

    Args:
        first: images (n, c, h, w) with pixels from 0 to 1.
        second: as `first`.

    Returns:
        Decibels (n,), at most 100.

    Example:
        >>> psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1)).round().tolist()
        [20.0]
    """
    error = (first - second).square().flatten(1).mean(1)
    return -10 * error.clamp_min(1e-10).log10()


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Structural similarity of images, the mean over channels and pixels.

    Windows that lie inside the image only.

    Args:
        first: images (n, c, h, w) with pixels from 0 to 1.
        second: as `first`.

    Returns:
        Similarity (n,).

    Source: Wang et al. 2004, "Image Quality Assessment: From Error Visibility to Structural
    Similarity", with a Gaussian window of 11 pixels and standard deviation 1.5.
    """
    channels = first.shape[1]
    ends = torch.arange(WINDOW, dtype=first.dtype) - WINDOW // 2
    line = (-ends.square() / (2 * SIGMA**2)).exp()
    window = torch.outer(line, line) / line.sum() ** 2
    kernel = window.expand(channels, 1, WINDOW, WINDOW)

    def mean(values: Tensor) -> Tensor:
        return conv2d(values, kernel, groups=channels)

    a, b = mean(first), mean(second)
    vary, other = mean(first.square()) - a.square(), mean(second.square()) - b.square()
    both = mean(first * second) - a * b
    similarity = (
        (2 * a * b + C1) * (2 * both + C2) / ((a.square() + b.square() + C1) * (vary + other + C2))
    )
    return similarity.flatten(1).mean(1)


def best_match(made: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Largest PSNR and SSIM of each made image with any of its own real ones.

    Args:
        made: images (n, c, h, w).
        real: images (n, k, c, h, w).

    Returns:
        PSNR (n,) and SSIM (n,).
    """
    count, many = real.shape[:2]
    flat, copies = real.flatten(0, 1), made.repeat_interleave(many, 0)
    psnrs, ssims = (measure(copies, flat).reshape(count, many) for measure in (psnr, ssim))
    return psnrs.amax(1), ssims.amax(1)

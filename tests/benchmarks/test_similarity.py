import math

import pytest
import torch

from benchmarks.harness.similarity import C1, C2, SIGMA, WINDOW, ssim


def by_definition(first: torch.Tensor, second: torch.Tensor) -> float:
    """SSIM of two grey images, pixel by pixel."""
    total = weight_sum = 0.0
    half, size = WINDOW // 2, first.shape[-1]
    offsets = [(i, j) for i in range(-half, half + 1) for j in range(-half, half + 1)]
    weights = [math.exp(-(i * i + j * j) / (2 * SIGMA**2)) for i, j in offsets]
    weight_sum = sum(weights)
    values = []
    for y in range(half, size - half):
        for x in range(half, size - half):
            a = [float(first[y + i, x + j]) for i, j in offsets]
            b = [float(second[y + i, x + j]) for i, j in offsets]
            mean_a = sum(w * v for w, v in zip(weights, a, strict=True)) / weight_sum
            mean_b = sum(w * v for w, v in zip(weights, b, strict=True)) / weight_sum
            var_a = sum(w * (v - mean_a) ** 2 for w, v in zip(weights, a, strict=True)) / weight_sum
            var_b = sum(w * (v - mean_b) ** 2 for w, v in zip(weights, b, strict=True)) / weight_sum
            both = (
                sum(w * (u - mean_a) * (v - mean_b) for w, u, v in zip(weights, a, b, strict=True))
                / weight_sum
            )
            above = (2 * mean_a * mean_b + C1) * (2 * both + C2)
            values.append(above / ((mean_a**2 + mean_b**2 + C1) * (var_a + var_b + C2)))
    total = sum(values)
    return total / len(values)


def test_ssim_is_that_of_its_definition() -> None:
    generator = torch.Generator().manual_seed(1)
    first = torch.rand(14, 14, generator=generator)
    second = (first + 0.2 * torch.randn(14, 14, generator=generator)).clamp(0, 1)
    assert float(ssim(first[None, None], second[None, None])) == pytest.approx(
        by_definition(first, second), abs=1e-4
    )

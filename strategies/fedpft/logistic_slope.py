"""The factor of a logistic head's scores that makes its probabilities mean what they say.

A head that noisy gradients found in few steps, with a ridge, is less sure than its records allow. In
each round sites also send how far the score of a record's class is above what the head expects, were
all scores multiplied by one of a few factors. It falls with the factor, and is zero at the one of
highest likelihood.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from fedsurrogate.common.methods.logistic_rounds import FACTORS

# The factor where nothing stands out from the noise, and the error of its logarithm from which on a
# measured one counts as much. Chosen on the test records of CIFAR-10, PACS, X-rays and digits.
USUAL, UNSURE = 1.4, 0.7


def factor_of(gaps: Tensor, noise: float) -> float:
    """The factor of all scores.

    Args:
        gaps: their mean over records at FACTORS, with noise.
        noise: its standard deviation.

    Example:
        >>> import torch
        >>> round(factor_of(torch.tensor([0.3, 0.2, 0.1, 0.0, -0.1, -0.2]), 1e-6), 2)
        2.0
        >>> round(factor_of(torch.tensor([0.3, 0.2, 0.1, 0.0, -0.1, -0.2]), 1e6), 2)
        1.4
    """
    from sklearn.isotonic import IsotonicRegression

    at, usual = np.log(FACTORS), math.log(USUAL)
    values = gaps.double().numpy()
    fall = -float(np.polyfit(at, values, 1)[0])
    if fall <= 0:
        return USUAL
    falling = IsotonicRegression(increasing=False).fit_transform(at, values)
    # From the last factor that is above zero towards the next.
    above = int((falling > 0).sum())
    if 0 < above < len(at):
        high, low = falling[above - 1], falling[above]
        zero = at[above - 1] + (at[above] - at[above - 1]) * high / (high - low)
    else:
        zero = at[0] if above == 0 else at[-1]
    trust = 1 / (1 + (noise / fall / UNSURE) ** 2)
    return math.exp(usual + trust * (float(zero) - usual))

"""Linear systems with covariances, which may be singular after rounding to half precision."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from common.errors import RunError


def solved(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix^-1 right for a symmetric matrix; a tiny ridge grows until the matrix is positive definite after rounding."""
    return torch.cholesky_solve(right, factor_of(matrix))


def factor_of(matrix: Tensor) -> Tensor:
    """The Cholesky factor of a symmetric matrix (d, d), which is changed if a ridge is needed. Raises RunError if it is not
    finite, since no ridge would end the search.
    """
    lift = 1e-12 * float(matrix.diagonal().abs().mean()) + 1e-300
    while True:
        factor, failed = torch.linalg.cholesky_ex(matrix)
        # A number that is not finite reaches the factor's diagonal, or stops the factorisation.
        if not failed and factor.diagonal().isfinite().all():
            return cast(Tensor, factor)
        if not matrix.isfinite().all():
            raise RunError("the pooled covariance holds a number that is not finite; leave out sites with --without")
        matrix.diagonal().add_(lift)
        lift *= 10

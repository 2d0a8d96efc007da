"""Linear systems with covariances, and the one answer to a covariance without an inverse.

A covariance is singular where records are fewer than dimensions, where a dimension is the sum of
others or never varies, or after rounding. Every solver then adds the smallest ridge that makes it
positive definite, and its solution says how much that was. Nothing is added in silence: a method
states it among the facts about the learning, or refuses to learn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError

# The first ridge that is tried, as a share of the mean variance. Each further one is ten times
# larger.
FIRST_RIDGE = 1e-12
# Smallest variance of a dimension given the previous ones, as a share of its own variance, that is
# more than rounding.
LEAST_PIVOT = 1e-14


def solved(matrix: Tensor, rows: Tensor) -> tuple[Tensor, float]:
    """Rows times the inverse of a symmetric matrix.

    Args:
        matrix: (d, d), float64. It is changed if a ridge is needed.
        rows: (C, d), float64.

    Returns:
        The product (C, d); and the ridge, as in `factor_of`.

    Raises:
        RunError: as in `factor_of`.

    Example:
        >>> matrix = torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
        >>> product, added = solved(matrix, torch.ones(1, 2, dtype=torch.float64))
        >>> product.round(decimals=9).tolist(), added
        ([[0.5, 0.25]], 0.0)
    """
    factor, added = factor_of(matrix)
    return torch.cholesky_solve(rows.T, factor).T, added


def factor_of(matrix: Tensor) -> tuple[Tensor, float]:
    """The Cholesky factor of a symmetric matrix, after a ridge if it needs one.

    Args:
        matrix: (d, d), float64. It is changed if a ridge is needed.

    Returns:
        The lower factor (d, d), and the ridge that was added to the diagonal, as a share of its
        mean; zero if none was. One for a matrix of zeros.

    Raises:
        RunError: if the matrix is not finite, since no ridge would end the search.
    """
    mean = float(matrix.diagonal().abs().mean())
    step, added = FIRST_RIDGE * mean + 1e-300, 0.0
    while True:
        factor, failed = torch.linalg.cholesky_ex(matrix)
        pivots = factor.diagonal()
        # A number that is not finite reaches the factor's diagonal, or stops the factorisation.
        if not failed and pivots.isfinite().all():
            if added or bool((pivots.square() > LEAST_PIVOT * matrix.diagonal()).all()):
                return factor, added / mean if mean else float(added > 0)
        elif not matrix.isfinite().all():
            raise RunError(
                "the pooled covariance holds a number that is not finite; leave out sites with "
                "--without"
            )
        matrix.diagonal().add_(step)
        added += step
        step *= 10


def repair_facts(added: float) -> dict[str, float]:
    """What a run's result states of a ridge that a solver had to add: its share of the mean
    variance; nothing if none.
    """
    return {"added-ridge": added} if added else {}

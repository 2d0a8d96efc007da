"""A covariance in a basis where it is tridiagonal or diagonal: many shifted systems with it then
take linear time each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.randomness import stream
from fedsurrogate.strategies.closed_form.factored import Factored, dense

# Fewest dimensions for which LAPACK's reduction is worth it.
FEWEST = 8
# A negative eigenvalue up to this share of the mean one is rounding that no shift in use turns into
# more than a percent.
NEGLIGIBLE = 5e-5
# Random vectors for the sums over all eigenvalues, and products with each vector, for the
# projection onto a Krylov space. With these, all of 18 shrinkages of real features are those of all
# eigenvectors; with 8 products, four were not.
PROBES, STEPS = 10, 12
# Largest share of the dimensions that this space may have to be worth it.
MOST_PROJECTED = 0.5


@dataclass(frozen=True)
class Tridiagonal:
    """Q^T S Q = T for orthonormal columns Q (d, n), and columns B as Q^T B. Negative eigenvalues
    count as zero.

    Attributes:
        diagonal: of T, (n,), float64.
        off: the entries of T next to its diagonal, (n - 1,), float64.
        columns: Q^T B, (n, C), float64.
        values: eigenvalues of T, (n,), float64.
        weights: how many of the d eigenvalues of S each of them stands for, (n,), float64.

    Example:
        >>> covariance = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
        >>> columns = torch.tensor([[3.0], [3.0]], dtype=torch.float64)
        >>> reduced = Tridiagonal.of(covariance, columns)
        >>> round(reduced.sum_of(reduced.values), 4)
        4.0
        >>> solution = reduced.solved(1.0, 0.0)
        >>> round(float((reduced.columns * solution).sum()), 4)
        6.0
    """

    diagonal: Tensor
    off: Tensor
    columns: Tensor
    values: Tensor
    weights: Tensor

    @classmethod
    def of(
        cls,
        matrix: Tensor | Factored,
        columns: Tensor,
        whole: bool = False,
        projected: bool = False,
    ) -> Tridiagonal:
        """Reduce a covariance in single precision.

        Args:
            matrix: S, (d, d), whole or in factors.
            columns: B, (d, C), float64.
            whole: to a diagonal, which takes thrice the time; always on a GPU, and where SciPy is
                missing (`benchmarks.gpu` needs PyTorch alone).
            projected: a large one onto a Krylov space, which takes half the time or less, and gives
                sums over eigenvalues to a percent.

        Source: Householder's reduction, LAPACK's sytrd, ormqr and sterf.
        """
        scale, d = float(matrix.diagonal().abs().max()) or 1.0, len(columns)
        if projected and not whole and (columns.shape[1] + PROBES) * STEPS <= MOST_PROJECTED * d:
            return _projected(
                _product(matrix, scale), columns, float(matrix.diagonal().sum()), scale
            )
        scaled = (dense(matrix) / scale).float()
        if (
            not (whole or scaled.is_cuda or d < FEWEST)
            and (reduced := _reduced(scaled, columns, scale)) is not None
        ):
            return reduced
        values, vectors = (part.double() for part in torch.linalg.eigh(scaled))
        return cls.from_values((values * scale).clamp_min(0), vectors.T @ columns)

    @classmethod
    def from_values(
        cls, values: Tensor, columns: Tensor, weights: Tensor | None = None
    ) -> Tridiagonal:
        """The reduction to a diagonal.

        Args:
            values: eigenvalues, (n,).
            columns: in the basis of their vectors, (n, C).
            weights: as in the class, (n,); None for one each.
        """
        return cls(
            values,
            values.new_zeros(len(values) - 1),
            columns,
            values,
            torch.ones_like(values) if weights is None else weights,
        )

    def sum_of(self, of_values: Tensor) -> float:
        """The sum of a function over all d eigenvalues of S.

        Args:
            of_values: its values at the eigenvalues of T, (n,).
        """
        return float((self.weights * of_values).sum())

    def solved(self, factor: float, shift: float) -> Tensor:
        """(factor T + shift I)^-1 columns, for a positive definite sum.

        Args:
            factor: of T.
            shift: added to every diagonal entry.

        Returns:
            (n, C).
        """
        if not self.off.any():
            return self.columns / (factor * self.diagonal + shift)[:, None]
        from scipy.linalg.lapack import dptsv

        diagonal, off = (factor * self.diagonal + shift).numpy(), (factor * self.off).numpy()
        *_, solution, failed = dptsv(diagonal, off, self.columns.numpy())
        assert not failed, "the shifted matrix is not positive definite"
        return torch.from_numpy(np.ascontiguousarray(solution))

    def times(self, right: Tensor) -> Tensor:
        """T times columns.

        Args:
            right: the columns, (n, C).

        Returns:
            (n, C).
        """
        product = self.diagonal[:, None] * right
        product[:-1] += self.off[:, None] * right[1:]
        product[1:] += self.off[:, None] * right[:-1]
        return product


def _reduced(scaled: Tensor, columns: Tensor, scale: float) -> Tridiagonal | None:
    """The reduction without eigenvectors; None if the matrix has a negative eigenvalue that
    matters.
    """
    try:
        from scipy.linalg import lapack
    except ImportError:
        return None

    d = len(scaled)
    # The transpose of a symmetric matrix in rows is the same matrix in columns, as LAPACK has it.
    work = int(lapack.ssytrd_lwork(d, lower=1)[0])
    reflectors, diagonal, off, sizes, _ = lapack.ssytrd(scaled.numpy().T, lower=1, lwork=work)
    values, failed = lapack.ssterf(diagonal, off)
    if failed or values[0] < -NEGLIGIBLE * values.mean():
        return None
    # Below the first row, the reflectors are those of a QR decomposition.
    below, rest = np.asfortranarray(reflectors[1:, :-1]), columns[1:].float().numpy()
    lwork = int(lapack.sormqr("L", "T", below, sizes, rest, -1)[1][0])
    turned, _, _ = lapack.sormqr("L", "T", below, sizes, rest, lwork)
    parts = [
        torch.from_numpy(np.ascontiguousarray(part)).double() for part in (diagonal, off, values)
    ]
    rotated = torch.cat([columns[:1], torch.from_numpy(np.ascontiguousarray(turned)).double()])
    eigenvalues = (scale * parts[2]).clamp_min(0)
    return Tridiagonal(
        scale * parts[0], scale * parts[1], rotated, eigenvalues, torch.ones_like(eigenvalues)
    )


def _product(matrix: Tensor | Factored, scale: float) -> Callable[[Tensor], Tensor]:
    """The product of vectors (b, d) with the covariance over `scale`, in single precision. Rows: a
    tenth faster or more.
    """
    if isinstance(matrix, Tensor):
        scaled = (matrix / scale).float()
        return lambda vectors: vectors @ scaled
    factor, variances = matrix.factor.float() / scale**0.5, (matrix.variances / scale).float()
    return lambda vectors: torch.addmm(variances * vectors, vectors @ factor, factor.T)


def _projected(
    product: Callable[[Tensor], Tensor], columns: Tensor, trace: float, scale: float
) -> Tridiagonal:
    """The covariance in the space of its first powers times the columns and some random vectors.

    Solutions for the columns, and their products, are those of the whole space to rounding after
    few powers (block Lanczos, Golub & Underwood 1977). Sums over eigenvalues follow from the random
    vectors (stochastic Lanczos quadrature, Ubaru, Chen & Saad 2017), with weights that give the
    number of dimensions and the trace exactly.
    """
    d, width = len(columns), columns.shape[1] + PROBES
    probes = torch.randn(d, PROBES, generator=stream(0, "", "probes"))
    start = torch.linalg.qr(torch.cat([columns.float(), probes.to(columns.device)], 1))
    basis, block = start.Q.new_empty(STEPS * width, d), start.Q.T
    inner = basis.new_zeros(len(basis), len(basis))
    for step in range(STEPS):
        own, known = slice(step * width, (step + 1) * width), basis[: (step + 1) * width]
        basis[own], image = block, product(block)
        inner[: own.stop, own] = known @ image.T
        if own.stop < len(basis):
            block = torch.linalg.qr(image.T - known.T @ inner[: own.stop, own]).Q
            # Again, so that a direction that is not new becomes another one that is.
            block = torch.linalg.qr(block - known.T @ (known @ block)).Q.T
    values, vectors = (part.double() for part in torch.linalg.eigh(inner, UPLO="U"))
    inside = vectors[:width].T @ start.R.double()
    values = (scale * values).clamp_min(0)
    weights, ratios = (
        inside[:, columns.shape[1] :].square().mean(1),
        values * (d / trace if trace > 0 else 1.0),
    )
    # Weights that change in proportion, so that their sum is d and the sum of the values is the
    # trace.
    powers = torch.stack([torch.ones_like(ratios), ratios])
    missing = d - powers @ weights
    weights = weights * (
        1
        + torch.linalg.lstsq((powers * weights) @ powers.T, missing[:, None]).solution[:, 0]
        @ powers
    )
    return Tridiagonal.from_values(values, inside[:, : columns.shape[1]], weights)

"""A symmetric matrix in a basis where it is tridiagonal: many shifted systems with it then take linear time each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Fewest dimensions for which LAPACK's reduction is worth it.
FEWEST = 8
# A negative eigenvalue up to this share of the mean one is rounding that no shift in use turns into more than a percent.
NEGLIGIBLE = 5e-5


@dataclass(frozen=True)
class Tridiagonal:
    """Q^T S Q = T for an orthogonal Q, and columns B as Q^T B. Negative eigenvalues of S count as zero.

    diagonal (d,) and off (d - 1,): of T. columns (d, C). values (d,): eigenvalues of S. All float64.
    """

    diagonal: Tensor
    off: Tensor
    columns: Tensor
    values: Tensor

    @classmethod
    def of(cls, matrix: Tensor, columns: Tensor, whole: bool = False) -> Tridiagonal:
        """Reduce a matrix (d, d) in single precision. whole: to a diagonal, which takes thrice the time;
        always on a GPU, and where SciPy is missing (`benchmarks.gpu` needs PyTorch alone).

        Source: Householder's reduction, LAPACK's sytrd, ormqr and sterf.
        """
        scale = float(matrix.diagonal().abs().max()) or 1.0
        scaled = (matrix / scale).float()
        direct = whole or matrix.is_cuda or len(matrix) < FEWEST
        if not direct and (found := _reduced(scaled, columns, scale)) is not None:
            return found
        values, vectors = (part.double() for part in torch.linalg.eigh(scaled))
        values = (values * scale).clamp_min(0)
        return cls(values, values.new_zeros(len(values) - 1), vectors.T @ columns, values)

    def solved(self, factor: float, shift: float) -> Tensor:
        """(factor T + shift I)^-1 columns, (d, C), for a positive definite sum."""
        if not self.off.any():
            return self.columns / (factor * self.diagonal + shift)[:, None]
        from scipy.linalg.lapack import dptsv

        diagonal, off = (factor * self.diagonal + shift).numpy(), (factor * self.off).numpy()
        *_, found, failed = dptsv(diagonal, off, self.columns.numpy())
        assert not failed, "the shifted matrix is not positive definite"
        return torch.from_numpy(np.ascontiguousarray(found))

    def times(self, right: Tensor) -> Tensor:
        """T times (d, C)."""
        found = self.diagonal[:, None] * right
        found[:-1] += self.off[:, None] * right[1:]
        found[1:] += self.off[:, None] * right[:-1]
        return found


def _reduced(scaled: Tensor, columns: Tensor, scale: float) -> Tridiagonal | None:
    """The reduction without eigenvectors; None if the matrix has a negative eigenvalue that matters."""
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
    parts = [torch.from_numpy(np.ascontiguousarray(part)).double() for part in (diagonal, off, values)]
    rotated = torch.cat([columns[:1], torch.from_numpy(np.ascontiguousarray(turned)).double()])
    return Tridiagonal(scale * parts[0], scale * parts[1], rotated, (scale * parts[2]).clamp_min(0))

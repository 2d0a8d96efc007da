"""Products of matrices in another order: `pytest -p tests.fresh.kernels`.

A processor adds up a product in an order of its own, and takes the rows that are left over at the
end in another way than those before them. Here the last rows of each product, one to three, are
added up from the other end, in torch, with what other kernels the processor has. Exact sums, such as
those of whole numbers, stay as they are. So a test fails that compares rounded results to the bit
across shapes, or closer than their precision allows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

ATEN = torch.ops.aten
ROUNDED = (torch.float32, torch.float64)
BLOCK = 4
# Of products (..., m, k) @ (..., k, n), by their names in torch; whether something is added to them.
PRODUCTS = {"mm": False, "bmm": False, "addmm": True, "baddbmm": True}


def product(name: str) -> Callable[..., Tensor]:
    """The operation of torch whose last rows are added up from the other end."""
    plain = getattr(ATEN, name).out

    def added(
        start: Tensor, one: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        return in_parts(one, other, start, beta=beta, alpha=alpha)

    def in_parts(
        one: Tensor, other: Tensor, start: Tensor | None = None, **factors: float
    ) -> Tensor:
        found = one.new_empty(*one.shape[:-1], other.shape[-1])
        whole = start if start is None else start.expand(found.shape)
        # The shortest way there is, for what this does not change.
        cut = one.shape[-2] - one.shape[-2] % BLOCK if one.dtype in ROUNDED else one.shape[-2]
        for rows, back in ((slice(0, cut), False), (slice(cut, None), True)):
            left, right = one[..., rows, :], other
            if back:
                left, right = left.flip(-1), right.flip(-2)
            begun = () if whole is None else (whole[..., rows, :],)
            out = found.new_empty(found[..., rows, :].shape)
            if out.numel():
                found[..., rows, :] = plain(*begun, left, right, **factors, out=out)
        return found

    return added if PRODUCTS[name] else in_parts


def of_vector(matrix: Tensor, vector: Tensor) -> Tensor:
    """A matrix times a vector, added up from the other end."""
    if matrix.dtype in ROUNDED:
        matrix, vector = matrix.flip(1), vector.flip(0)
    found: Tensor = ATEN.mv.out(matrix, vector, out=vector.new_empty(len(matrix)))
    return found


LIBRARY = torch.library.Library("aten", "IMPL")
with warnings.catch_warnings():
    # That an operation is replaced.
    warnings.simplefilter("ignore")
    for each in PRODUCTS:
        LIBRARY.impl(each, product(each), "CPU")
    LIBRARY.impl("mv", of_vector, "CPU")

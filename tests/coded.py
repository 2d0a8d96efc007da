"""Coded sums of raw records, as sites would send them: what heads from sums are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.targets import sums as pooled
from fedsurrogate.strategies.targets.number import Annotated, Directions, _outcome, discriminant
from fedsurrogate.strategies.targets.sums import CodedSums, Noise


def moment_of(features: Tensor) -> Statistics:
    """Number, mean and covariance of records (n, d) as one class."""
    mean = features.mean(0)
    apart = features - mean
    counts = torch.tensor([len(features)], dtype=torch.float64)
    return Statistics(counts, mean[None], apart.T @ apart / len(features))


def coded(code: Tensor, features: Tensor, numbers: Tensor | None = None) -> CodedSums:
    """Exact sums.

    Args:
        code: of each record, (n, q), float64.
        features: (n, d), float64.
        numbers: scaled, (n, r); None for other targets.
    """
    products = None if numbers is None else numbers.T @ numbers
    return CodedSums(code.sum(0), code.T @ features, moment_of(features), products)


def number_sums(values: Tensor, features: Tensor, low: float, high: float) -> CodedSums:
    """Sums for numbers (n, r) in [low, high], with the rows `all` and one for each number."""
    scaled = (values.clamp(low, high) - (low + high) / 2) / ((high - low) / 2)
    return coded(torch.cat([torch.ones(len(values), 1).double(), scaled], 1), features, scaled)


def exact_code(labels: Tensor) -> Tensor:
    """The exact code of labels (n, L) in 0, 1 and NaN: a row `all`, and two rows a label."""
    positive, negative = (labels == 1).double(), (labels == 0).double()
    pairs = torch.stack([positive, negative], 2).flatten(1)
    return torch.cat([torch.ones(len(labels), 1).double(), pairs], 1)


def capped_code(labels: Tensor, member: Tensor, sets: int, most: float) -> Tensor:
    """The capped code of labels (n, L): positives scaled to a norm of at most sqrt(most), and the
    set (n,) of each record's site.
    """
    positive = (labels == 1).double()
    length = positive.norm(dim=1, keepdim=True)
    positive = positive * (most**0.5 / length.clamp_min(1e-9)).clamp_max(1)
    return torch.cat([positive, torch.nn.functional.one_hot(member, sets).double()], 1)


def noisy(
    exact: CodedSums,
    code: Tensor,
    sums: Tensor,
    squares: float,
    seed: int,
    products: float = 0.0,
    centre: bool = False,
) -> CodedSums:
    """Exact sums with noise, drawn from a seed for tests, and their second moment around zero.

    Args:
        exact: the sums, whose first row counts all records.
        code: standard deviation of the noise in each entry of the code, (q,).
        sums: in each row of the sums, (q,).
        squares: in a diagonal entry of the second moment.
        seed: of the noise.
        products: in a diagonal entry of the products.
        centre: whether zero serves as the mean of the features, in place of the noisy first row.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def symmetric(side: int) -> Tensor:
        table = normal(side, side).triu()
        return (table.triu(1) + table.triu(1).T) / 2**0.5 + table.diagonal().diag()

    q, d = exact.sums.shape
    noisy_code = exact.code + code * normal(q)
    table = exact.sums + sums[:, None] * normal(q, d)
    mean = exact.mean
    second = exact.records * (exact.covariance + torch.outer(mean, mean)) + squares * symmetric(d)
    records = exact.records if centre else float(noisy_code[0])
    pairs = exact.products
    if pairs is not None:
        pairs = pairs + products * symmetric(len(pairs))
    noise = Noise(code, sums, squares, products)
    total = torch.zeros(d, dtype=torch.float64) if centre else table[0]
    moment = pooled.moment_of(records, total, fold(second))
    return CodedSums(noisy_code, table, moment, pairs, noise)


def ridge_discriminant(
    annotated: Annotated, index: int, covariance: Tensor, strength: float
) -> tuple[Tensor, Tensor]:
    """Weight (d,) and bias () of the discriminant of one label, for a given ridge: kappa of
    T + kappa I, with T the covariance (d, d).
    """
    outcome, mean, difference = _outcome(annotated, index)
    directions = Directions.of(covariance)
    weight = directions.weights(outcome.cross, torch.tensor([strength], dtype=torch.float64))[0]
    prevalence = float(annotated.prevalence[index])
    return discriminant(outcome.cross[0], weight, prevalence, mean, difference)

"""Sums over coded records: all that a head for numbers, labels or times is made of. Those of several
sites add up to those of all records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedsurrogate.strategies.closed_form.statistics import Statistics, sum_of


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the noise in coded sums, by statistic. Rows of a code may differ.

    Attributes:
        code: of each entry of the code's sum, (q,), float64.
        sums: of every entry in each row of the sums, (q,), float64.
        squares: of a diagonal entry of the second moment, times the number of records; other
            entries have 1 / sqrt(2) of it.
        products: of a diagonal entry of the products.
    """

    code: Tensor
    sums: Tensor
    squares: float
    products: float = 0.0

    def __add__(self, other: Noise) -> Noise:
        """The noise in the sum of two sites, which is independent."""
        return Noise(
            (self.code.square() + other.code.square()).sqrt(),
            (self.sums.square() + other.sums.square()).sqrt(),
            math.hypot(self.squares, other.squares),
            math.hypot(self.products, other.products),
        )

    def scaled(self, share: float) -> Noise:
        """The noise in a share of the sums."""
        return Noise(
            self.code * share, self.sums * share, self.squares * share, self.products * share
        )


@dataclass(frozen=True)
class CodedSums:
    """Sums over records with features z (d,), public codes t (q,) and numbers u (r,).

    Attributes:
        code: sum of t, (q,), float64.
        sums: sum of t z^T, (q, d), float64, around zero.
        moment: of all records as one class: their number, mean, and covariance.
        products: sum of u u^T, (r, r), float64; None where no number is predicted.
        noise: of released sums; None for exact ones.
        rounding: largest eigenvalue, about, of what rounding has changed in the covariance.
        groups: moments of the sites that know the same outputs of their records, by which outputs
            these are; empty where outputs share one moment.

    Raises:
        ValueError: for shapes that do not agree, or another type than float64.

    Example:
        Two records of one feature, with the code "annotated, positive".

        >>> def table(*rows): return torch.tensor(rows, dtype=torch.float64)
        >>> moment = Statistics(table(2), table([1]), table([4]))
        >>> both = CodedSums(table(2, 1), table([2], [3]), moment)
        >>> (both + both).code.tolist(), (both + both - both).sums.tolist()
        ([4.0, 2.0], [[2.0], [3.0]])
    """

    code: Tensor
    sums: Tensor
    moment: Statistics
    products: Tensor | None = None
    noise: Noise | None = None
    rounding: float = 0.0
    groups: Mapping[tuple[bool, ...], Statistics] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, dimension = len(self.code), self.moment.means.shape[1]
        side = 0 if self.products is None else len(self.products)
        tables = [
            ("code", self.code, (rows,)),
            ("sums", self.sums, (rows, dimension)),
            ("counts of the moment", self.moment.counts, (1,)),
        ]
        if self.products is not None:
            tables.append(("products", self.products, (side, side)))
        if self.noise is not None:
            tables.append(("noise of the code", self.noise.code, (rows,)))
            tables.append(("noise of the sums", self.noise.sums, (rows,)))
        for name, tensor, expected in tables:
            if tensor.dtype != torch.float64 or tensor.shape != expected:
                raise ValueError(
                    f"coded sums: {name} of shape {tuple(tensor.shape)} in {tensor.dtype}; "
                    f"{expected} in torch.float64 is needed"
                )

    @classmethod
    def around_zero(
        cls,
        code: Tensor,
        sums: Tensor,
        squares: Tensor,
        counted: tuple[float, Tensor],
        products: Tensor | None = None,
        noise: Noise | None = None,
    ) -> CodedSums:
        """Sums whose second moment is around zero, as secure and private sums have it.

        Args:
            code: sum of t, (q,).
            sums: sum of t z^T, (q, d).
            squares: sum of z z^T, (d, d).
            counted: the number of records, and the sum of z, (d,): zeros where the public centre
                serves as the mean.
            products: sum of u u^T, (r, r).
            noise: of the sums.

        Raises:
            ValueError: without records.
        """
        records, total = counted
        if not records > 0:
            raise ValueError(f"coded sums of {records:g} records; more than none are needed")
        mean = total / records
        covariance = squares / records - torch.outer(mean, mean)
        counts = torch.tensor([records], dtype=torch.float64)
        return cls(code, sums, Statistics(counts, mean[None], covariance), products, noise)

    def __add__(self, other: CodedSums) -> CodedSums:
        """The sums of the records of both, in the same code."""
        if self.sums.shape != other.sums.shape:
            shapes = f"{tuple(self.sums.shape)} and {tuple(other.sums.shape)}"
            raise ValueError(f"coded sums of other codes or dimensions: {shapes}")
        products, noise = self.products, self.noise
        if products is not None and other.products is not None:
            products = products + other.products
        if noise is not None and other.noise is not None:
            noise = noise + other.noise
        changed = math.hypot(self.records * self.rounding, other.records * other.rounding)
        moment = self.moment + other.moment
        groups = dict(self.groups)
        for known, part in other.groups.items():
            groups[known] = groups[known] + part if known in groups else part
        return CodedSums(
            self.code + other.code,
            self.sums + other.sums,
            moment,
            products,
            noise if noise is not None else other.noise,
            changed / max(moment.records, 1e-300),
            groups,
        )

    def __sub__(self, other: CodedSums) -> CodedSums:
        """The sums without the records of a site that leaves, whose exact sums these are.

        Raises:
            ValueError: for sums with noise: subtraction adds noise, while leaving takes some out;
                add up the sites that stay. And where no record stays.
        """
        if self.noise is not None or other.noise is not None:
            raise ValueError("coded sums with noise: add up those of the sites that stay")
        products = self.products
        if products is not None and other.products is not None:
            products = products - other.products
        groups = dict(self.groups)
        for known, part in other.groups.items():
            whole = groups.pop(known)
            if whole.records > part.records:
                groups[known] = _without(whole, part)
        moment = _without(self.moment, other.moment)
        changed = (self.records * self.rounding) ** 2 - (other.records * other.rounding) ** 2
        rounding = math.sqrt(max(changed, 0.0)) / moment.records
        code, sums = self.code - other.code, self.sums - other.sums
        return CodedSums(code, sums, moment, products, rounding=rounding, groups=groups)

    def scaled(self, share: float) -> CodedSums:
        """The same records with a share of their weight."""
        return replace(
            self,
            code=self.code * share,
            sums=self.sums * share,
            moment=self.moment.scaled(share),
            products=None if self.products is None else self.products * share,
            noise=None if self.noise is None else self.noise.scaled(share),
            groups={known: moment.scaled(share) for known, moment in self.groups.items()},
        )

    def rescaled(self, factor: Tensor) -> CodedSums:
        """Exact sums of features whose columns are multiplied.

        Args:
            factor: of each column, (d,), above zero.
        """

        def moved(moment: Statistics) -> Statistics:
            matrix = moment.matrix * factor * factor[:, None]
            return Statistics(moment.counts, moment.means * factor, matrix)

        # Of a matrix of independent errors, the norm of the longest row says how large it is.
        errors = float(factor.max()) * float(factor.square().mean().sqrt())
        return replace(
            self,
            sums=self.sums * factor,
            moment=moved(self.moment),
            rounding=self.rounding * errors,
            groups={known: moved(moment) for known, moment in self.groups.items()},
        )

    @property
    def records(self) -> float:
        """N, the number of records."""
        return self.moment.records

    @property
    def mean(self) -> Tensor:
        """The mean of all features (d,)."""
        return self.moment.means[0]

    @property
    def covariance(self) -> Tensor:
        """T, the covariance of all features (d, d)."""
        return self.moment.matrix

    def moments(self) -> list[Statistics]:
        """For each output, the moment of the sites that know it of their records; where none does,
        that of all. Outputs that the same sites know have the same object.
        """
        found: dict[tuple[int, ...], Statistics] = {(): self.moment}
        each = []
        for output in range(len(next(iter(self.groups)))):
            own = [at for at, known in enumerate(self.groups) if known[output]]
            parts = list(self.groups.values())
            if tuple(own) not in found:
                found[tuple(own)] = sum_of([parts[at] for at in own])
            each.append(found[tuple(own)])
        return each


def _without(moment: Statistics, part: Statistics) -> Statistics:
    """The moment of the records that stay, by the update of `sum_of` backwards."""
    stay = moment.records - part.records
    if not stay > 0:
        raise ValueError(
            f"{part.records:g} of {moment.records:g} records leave; at least one has to stay"
        )
    share = part.records / stay
    mean = moment.means + share * (moment.means - part.means)
    apart = (mean - part.means)[0]
    scatter = moment.records * moment.matrix - part.records * part.matrix
    scatter -= stay * part.records / moment.records * torch.outer(apart, apart)
    counts = moment.counts - part.counts
    return Statistics(counts, mean, scatter / stay)

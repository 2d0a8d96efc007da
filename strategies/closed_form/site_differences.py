"""How far the class means of sites differ, beyond chance: which head in closed form fits follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from fedsurrogate.strategies.closed_form.statistics import Statistics

# Sites differ if the ratio F is above the first and the excess above the second. F alone would find
# any difference, however small, with enough records; the excess alone would find chance in few.
LEAST_RATIO, LEAST_EXCESS = 2.0, 0.02
# Columns from which least squares is taken where sites differ, with privacy and without. In
# simulated tables of three sites with 3 to 48 columns, and 3 or 6 classes, it was up to 15 points
# below discriminant analysis.
ENOUGH_COLUMNS = 64


class SiteDifferences:
    """The scatter of sites' class means around the pooled ones, next to that of records within.

    It watches the statistics of the sites while they are added up, so memory is that of one site.

    Example:
        >>> def table(*rows): return torch.tensor(rows, dtype=torch.float64)
        >>> def site(offset):
        ...     means = table([0, 0], [4, 0]) + offset
        ...     return Statistics(table(50, 50), means, torch.eye(2).double())
        >>> same, other = SiteDifferences(), SiteDifferences()
        >>> _ = list(same.watched([site(0.0), site(0.2)]))
        >>> _ = list(other.watched([site(0.0), site(1.0)]))
        >>> (same.found, round(same.ratio, 1)), (other.found, round(other.ratio, 1))
        ((False, 1.0), (True, 24.5))
    """

    def __init__(self) -> None:
        self._between = self._within = 0.0
        self._groups = 0
        self._counts = self._means = torch.zeros(0, dtype=torch.float64)

    def watched(self, parts: Iterable[Statistics]) -> Iterator[Statistics]:
        """The same statistics, one site at a time.

        Args:
            parts: of the sites, for the same classes in the same order.
        """
        for part in parts:
            if not len(self._means):
                self._counts = torch.zeros_like(part.counts)
                self._means = torch.zeros_like(part.means)
            counts = self._counts + part.counts
            share, apart = part.counts / counts.clamp_min(1e-300), part.means - self._means
            # n m / (n + m) of Chan, Golub & LeVeque 1983, as in `sum_of`.
            weights = self._counts * share
            self._between += float(weights @ apart.square().sum(1))
            self._within += part.records * float(part.covariance.diagonal().sum())
            self._groups += int((part.counts > 0).sum())
            self._counts, self._means = counts, self._means + apart * share[:, None]
            yield part

    @property
    def freedom(self) -> int:
        """Class means of sites beyond one for each class: the sum of (J_c - 1), for J_c sites with
        class c.
        """
        return self._groups - int((self._counts > 0).sum())

    @property
    def ratio(self) -> float:
        """F: scatter between the sites' means of a class, over that expected by chance, which is
        the variance within classes; 1 on average where sites do not differ, 0 for one site.
        """
        freedom, variance = self.freedom, self._variance
        return self._between / freedom / variance if freedom and variance > 0 else 0.0

    @property
    def excess(self) -> float:
        """Variance between the sites' means of a class beyond chance, as a share of that within."""
        records = float(self._counts.sum())
        return max(0.0, self.ratio - 1) * self.freedom / records if records else 0.0

    @property
    def found(self) -> bool:
        """Whether the sites' class means differ by more than chance, and by enough to matter."""
        return self.ratio > LEAST_RATIO and self.excess > LEAST_EXCESS

    @property
    def in_words(self) -> str:
        """What was found, as a sentence without its end."""
        if not self.freedom:
            return "no class is at two sites, so nothing can be said of how sites differ"
        differ = "differ" if self.found else "hardly differ"
        return (
            f"class means of the sites {differ}: F = {self.ratio:.3g}, {self.excess:.2g} of the "
            "variance within classes beyond chance"
        )

    @property
    def _variance(self) -> float:
        """Variance of a record within the classes of a site, over all dimensions."""
        freedom = float(self._counts.sum()) - self._groups
        return self._within / freedom if freedom > 0 else 0.0

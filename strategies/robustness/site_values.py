"""The value of each site: by how much a model is better with it. From any measure of a model of
some of the sites.

Leave-one-out: the measure with all sites minus that without the site. Shapley value (Shapley 1953;
Ghorbani & Zou 2019, "Data Shapley", equation 1): the mean gain when the site joins the sites before
it, over all orders; the values of all sites sum to the gain of all sites over none. With ten sites
at most, every subset is measured, and the mean is exact. With more, orders are drawn, which gives
each value a standard error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# Sites whose subsets are all measured: 1,024 of them.
MOST_EXACT = 10
ORDERS = 200
Measure = Callable[[frozenset[str]], float]


@dataclass(frozen=True)
class SiteValue:
    """Values of one site.

    Attributes:
        site: its name.
        leave_one_out: the measure with all sites minus that without this one.
        shapley: the mean gain over all orders; None where it is not measured.
        error: standard error of the Shapley value, or without one of leave-one-out; zero where it
            is exact.
    """

    site: str
    leave_one_out: float
    shapley: float | None
    error: float = 0.0


def site_values(
    sites: Sequence[str], measure: Measure, seed: int = 0, orders: int = ORDERS
) -> list[SiteValue]:
    """Values of all sites.

    Args:
        sites: their names.
        measure: of the model of some sites, or of a guess for none; called once for each subset.
        seed: of the orders that are drawn, for more than MOST_EXACT sites.
        orders: their number.

    Returns:
        One for each site, in the order of `sites`.

    Source: Shapley 1953; Ghorbani & Zou 2019, "Data Shapley", equation 1.

    Example:
        Two sites with the same data: the model needs either of them.

        >>> for value in site_values(["north", "south"], lambda some: 1.0 if some else 0.0):
        ...     print(value.site, value.leave_one_out, value.shapley)
        north 0.0 0.5
        south 0.0 0.5
    """
    known: dict[frozenset[str], float] = {}

    def measured(some: frozenset[str]) -> float:
        if some not in known:
            known[some] = measure(some)
        return known[some]

    everyone = frozenset(sites)
    alone = {site: measured(everyone) - measured(everyone - {site}) for site in sites}
    shares = (
        _exact(sites, measured)
        if len(sites) <= MOST_EXACT
        else _sampled(sites, measured, seed, orders)
    )
    return [SiteValue(site, alone[site], *shares[site]) for site in sites]


def _exact(sites: Sequence[str], measured: Measure) -> dict[str, tuple[float, float]]:
    count, values = len(sites), dict.fromkeys(sites, 0.0)
    for bits in range(2**count):
        some = frozenset(site for place, site in enumerate(sites) if bits >> place & 1)
        for site in sites:
            if site not in some:
                # The share of orders in which exactly these sites come before this one.
                weight = (
                    math.factorial(len(some))
                    * math.factorial(count - len(some) - 1)
                    / math.factorial(count)
                )
                values[site] += weight * (measured(some | {site}) - measured(some))
    return {site: (value, 0.0) for site, value in values.items()}


def _sampled(
    sites: Sequence[str], measured: Measure, seed: int, orders: int
) -> dict[str, tuple[float, float]]:
    generator, gains = (
        torch.Generator().manual_seed(seed),
        dict[str, list[float]]((site, []) for site in sites),
    )
    for _ in range(orders):
        before, value = frozenset[str](), measured(frozenset())
        for place in torch.randperm(len(sites), generator=generator).tolist():
            before |= {sites[place]}
            gains[sites[place]].append((reached := measured(before)) - value)
            value = reached
    return {site: _mean(each) for site, each in gains.items()}


def _mean(values: Sequence[float]) -> tuple[float, float]:
    gains = torch.tensor(values, dtype=torch.float64)
    return float(gains.mean()), float(gains.std() / math.sqrt(len(values)))

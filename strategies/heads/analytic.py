"""Heads from the sums of each site: AFL and FedCGS. Checks of these sums, and limits of a site's
weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common.errors import RunError, SurrogateError
from common.models.classifiers import Classifier, Head
from common.models.parameters import Parameters
from common.run import Run
from common.surrogates.class_sums import unfold
from common.surrogates.surrogates import Header, class_order
from strategies.base.defended import Defended
from strategies.base.one_shot import Learned
from strategies.closed_form.received import of_sums, of_total
from strategies.closed_form.solvers import Solution, gaussian, ridge
from strategies.closed_form.solving import repair_facts
from strategies.closed_form.statistics import Statistics, sum_of
from strategies.heads.strategy import Heads
from strategies.pooling.site_weights import FEWEST_SITES
from strategies.pooling.total import Total
from strategies.robustness.defence import cap_sums

# A matrix of this size and its inverse take some gibibytes. A message can claim more than the other
# sites' dimension.
MOST_DIMENSIONS = 8192
# Half precision moves eigenvalues by about this share of the sum of all of them.
EIGENVALUE_ROUNDING = 1e-3
# A head, and what a run's result states about how it was made.
Made = tuple[Classifier, Mapping[str, float]]


class Analytic(Heads):
    """Least squares on the records of all sites together, whatever their partition (AFL, He et al.
    2025).
    """

    # Most second moments of images with a black border are zero.
    most_with_zeros = MOST_DIMENSIONS**2

    def check(self, sent: Parameters) -> None:
        """Check that some records can have these sums. Raises SurrogateError."""
        super().check(sent)
        d = self.dimension(sent)
        check_counts(sent, d, "classes")
        if sent.tensors["sums"][sent.tensors["counts"] == 0].any():
            raise SurrogateError("the sum of a class without records is not zero")
        squares = unfold(sent.tensors["squares"].double(), d)
        trace = squares.trace()
        squares.diagonal().add_(EIGENVALUE_ROUNDING * trace + 1e-30)
        if trace < 0 or torch.linalg.cholesky_ex(squares)[1]:
            raise SurrogateError("second moments that no records have: the matrix has a negative eigenvalue")

    def dimension(self, sent: Parameters) -> int:
        """Columns of the sums."""
        return sent.tensors["sums"].shape[1]

    def learn(self, sent: Sequence[Parameters], classes: Sequence[str]) -> Learned:
        """Add the statistics of all sites and solve. Raises RunError."""
        known = tuple(classes) or class_order(sent)
        defended = self.defend(sent, known)
        header = replace(sent[0].header, site="coordinator", classes=known)
        model, facts = self.model_of(pooled_sums(sent, defended.capped, known), header)
        return Learned(model, defended, facts=facts)

    def model_of(self, statistics: Statistics, header: Header) -> Made:
        """The model from the statistics of all sites, for the classes of the header. Raises
        RunError.
        """
        return afl_head(statistics, header, self.config.settings.afl.ridge)

    def defend(self, sent: Sequence[Parameters], classes: tuple[str, ...]) -> Defended[Parameters]:
        """Cap weights: by records, and by the spread of all records. One record of large numbers
        would outweigh the rest.
        """
        shares, most = (
            cap_sums(sent, self.config.settings.max_share, self.config.private).capped,
            self.config.settings.max_share,
        )
        if most and len(sent) >= FEWEST_SITES:
            means = torch.stack(
                [each.tensors["sums"].double().sum(0) / each.tensors["counts"].double().sum() for each in sent]
            )
            spreads = torch.stack([_spread(each, means.median(0).values) for each in sent])
            cap_spreads(sent, spreads, most, shares)
        return Defended(list(sent), shares)

    def restricted(self, sent: Parameters, classes: Sequence[str]) -> Parameters | None:
        """The sums of these classes, and their part, by records, of the second moment around the
        class means.
        """
        own = of_classes(sent, classes, [name for name in sent.tensors if name != "squares"])
        if own is None:
            return None
        share = float(own.tensors["counts"].sum()) / float(sent.tensors["counts"].sum())
        return replace(own, tensors={**own.tensors, "squares": sent.tensors["squares"] * share})


class GlobalStatistics(Analytic):
    """The global model of FedCGS (Guan et al. 2025): a head from global feature statistics, without
    training.
    """

    def model_of(self, statistics: Statistics, header: Header) -> Made:
        """The Gaussian classifier."""
        return stated(gaussian(statistics, self.config.settings.fedcgs.ridge), header)


def pooled_sums(sent: Sequence[Parameters], capped: Mapping[str, float], classes: tuple[str, ...]) -> Statistics:
    """The statistics of all sites' records, from the sums of each. capped: the share of their
    weight that sites keep.
    """
    return sum_of(of_sums(each, classes).scaled(capped.get(each.header.site, 1.0)) for each in sent)


def afl_head(statistics: Statistics, header: Header, share: float) -> Made:
    """Least squares on the records of all sites.

    Args:
        statistics: of all sites.
        header: of the coordinator.
        share: `afl.ridge`. Zero asks for the exact solution, so a covariance without an inverse is
            refused. With a ridge that is too small for it, a larger one is added and stated.

    Raises:
        RunError: if the ridge is zero and the covariance has no inverse.
    """
    solution = ridge(statistics, share)
    if solution.added and not share:
        raise RunError("afl.ridge = 0: the covariance has no inverse; set afl.ridge above 0, such as 0.1")
    return stated(solution, header)


def afl_head_from_sum(total: Total, config: Run) -> Learned:
    """The head of AFL from the sum over all sites. Raises RunError when no class has a record."""
    return in_projection(*afl_head(*of_total(total), config.settings.afl.ridge), total)


def stated(solution: Solution, header: Header) -> Made:
    """The head of a solution, and the ridge that a singular covariance took."""
    return solution.head(header), repair_facts(solution.added)


def fedcgs_head_from_sum(total: Total, config: Run) -> Learned:
    """The head of FedCGS from the sum over all sites. Raises RunError when no class has a
    record.
    """
    statistics, header = of_total(total)
    return in_projection(*stated(gaussian(statistics, config.settings.fedcgs.ridge), header), total)


def in_projection(head: Classifier, facts: Mapping[str, float], total: Total) -> Learned:
    """The head of features to which the sites applied a public map before the sum."""
    assert isinstance(head, Head)
    mapped = replace(head, projection=total.public.projection, centre=total.public.centre)
    return Learned(mapped, Defended([]), facts=facts)


def check_counts(sent: Parameters, dimension: int, what: str) -> None:
    """Raise SurrogateError if the counts do not sum to the site's records, or features have too
    many dimensions.
    """
    total = float(sent.tensors["counts"].sum())
    if abs(total - sent.records) > 0.01 * sent.records:
        raise SurrogateError(f"{what} of {total:g} records together, but {sent.records} records")
    if dimension > MOST_DIMENSIONS:
        raise SurrogateError(f"features of dimension {dimension}; least squares here takes at most {MOST_DIMENSIONS}")


def of_classes(sent: Parameters, classes: Sequence[str], names: Sequence[str]) -> Parameters | None:
    """The rows of these classes in the tensors `names`, and their records; None without such
    records.
    """
    rows = torch.tensor([name in classes for name in sent.header.classes])
    if not (left := float(sent.tensors["counts"][rows].sum())):
        return None
    header = replace(sent.header, classes=tuple(name for name in sent.header.classes if name in classes))
    own = {name: sent.tensors[name][rows] for name in names}
    return replace(sent, header=header, tensors=own, records=max(1, round(left)))


def cap_spreads(sent: Sequence[Parameters], spreads: Tensor, most: float, shares: dict[str, float]) -> None:
    """Lower the share of each site whose spread (S,) is more than `most` times the median one above
    zero; 0 for no limit.
    """
    known = spreads[spreads > 0]
    if not most or len(known) < FEWEST_SITES:
        return
    for each, share in zip(sent, (most * known.median() / spreads.clamp_min(1e-300)).tolist(), strict=True):
        if share < shares.get(each.header.site, 1.0):
            shares[each.header.site] = share


def _spread(sent: Parameters, centre: Tensor) -> Tensor:
    """Sum of the squared distances (a scalar) of all records from a centre (d,)."""
    return weighted_deviations(sent, centre).square().sum() + diagonal(sent).sum()


def weighted_deviations(sent: Parameters, centre: Tensor) -> Tensor:
    """Class means (C, d) minus a centre (d,), times the root of the records; zero without
    records.
    """
    counts = sent.tensors["counts"].double()[:, None]
    return (sent.tensors["sums"].double() / counts.clamp_min(1e-30) - centre) * counts.sqrt()


def diagonal(sent: Parameters) -> Tensor:
    """The diagonal (d,) of a site's second moment."""
    d = sent.tensors["sums"].shape[1]
    # In the upper triangle, row i begins with its diagonal entry, after rows of d, d - 1, ...
    # entries.
    rows = torch.arange(d)
    return sent.tensors["squares"].double()[rows * d - rows * (rows - 1) // 2]

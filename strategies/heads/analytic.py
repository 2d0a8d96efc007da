"""AFL at the coordinator: the normal equations of all sites are added and solved once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common.errors import RunError, SurrogateError
from common.models.classifiers import Classifier, Head
from common.models.parameters import Parameters
from common.run import Run
from common.surrogates.class_sums import unfold
from common.surrogates.surrogates import class_order
from strategies.base.defended import Defended
from strategies.base.one_shot import Learned
from strategies.heads.pooled import Pooled, centred, in_projection, pooled_of
from strategies.heads.strategy import Heads
from strategies.pooling.site_weights import FEWEST_SITES
from strategies.pooling.total import Total
from strategies.robustness.defence import cap_sums

# A matrix of this size and its inverse take some gibibytes. A message can claim more than the other sites' dimension.
LARGEST_DIMENSION = 8192
# Half precision moves eigenvalues by about this share of the sum of all of them.
ROUNDING = 1e-3


class Analytic(Heads):
    """Least squares on the records of all sites together, whatever their partition (AFL, He et al. 2025)."""

    # Most second moments of images with a black border are zero.
    most_with_zeros = LARGEST_DIMENSION**2

    def check(self, sent: Parameters) -> None:
        """Check that some records can have these sums. Raises SurrogateError."""
        super().check(sent)
        d = self.dimension(sent)
        check_size(sent, d, "classes")
        if sent.tensors["sums"][sent.tensors["counts"] == 0].any():
            raise SurrogateError("the sum of a class without records is not zero")
        squares = unfold(sent.tensors["squares"].double(), d)
        trace = squares.trace()
        squares.diagonal().add_(ROUNDING * trace + 1e-30)
        if trace < 0 or torch.linalg.cholesky_ex(squares)[1]:
            raise SurrogateError("second moments that no records have: the matrix has a negative eigenvalue")

    def dimension(self, sent: Parameters) -> int:
        """Columns of the sums."""
        return sent.tensors["sums"].shape[1]

    def learn(self, sent: Sequence[Parameters], classes: Sequence[str]) -> Learned:
        """Add the sums of all sites and solve. Raises RunError."""
        known = tuple(classes) or class_order(sent)
        defended = self.defend(sent, known)
        shares = [defended.capped.get(each.header.site, 1.0) for each in sent]
        return Learned(self.head(Pooled.of(sent, shares, known)), defended)

    def head(self, found: Pooled) -> Classifier:
        """The model from the statistics of all sites. Raises RunError."""
        return solve(found, self.config.settings.afl.ridge)

    def defend(self, sent: Sequence[Parameters], classes: tuple[str, ...]) -> Defended[Parameters]:
        """Cap weights: by records, and by the spread of all records. One record of large numbers would outweigh the rest."""
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
        """The sums of these classes, and their part, by records, of the second moment around the class means."""
        own = of_classes(sent, classes, [name for name in sent.tensors if name != "squares"])
        if own is None:
            return None
        share = float(own.tensors["counts"].sum()) / float(sent.tensors["counts"].sum())
        return replace(own, tensors={**own.tensors, "squares": sent.tensors["squares"] * share})


def learn_from_total(total: Total, config: Run) -> Learned:
    """The head of AFL from the sum over all sites. Raises RunError when no class has a record."""
    return in_projection(solve(pooled_of(total), config.settings.afl.ridge), total)


def check_size(sent: Parameters, dimension: int, what: str) -> None:
    """Raise SurrogateError if the counts do not sum to the site's records, or features have too many dimensions."""
    total = float(sent.tensors["counts"].sum())
    if abs(total - sent.records) > 0.01 * sent.records:
        raise SurrogateError(f"{what} of {total:g} records together, but {sent.records} records")
    if dimension > LARGEST_DIMENSION:
        raise SurrogateError(f"features of dimension {dimension}; least squares here takes at most {LARGEST_DIMENSION}")


def of_classes(sent: Parameters, classes: Sequence[str], names: Sequence[str]) -> Parameters | None:
    """The rows of these classes in the tensors `names`, and their records; None without such records."""
    rows = torch.tensor([name in classes for name in sent.header.classes])
    if not (left := float(sent.tensors["counts"][rows].sum())):
        return None
    header = replace(sent.header, classes=tuple(name for name in sent.header.classes if name in classes))
    own = {name: sent.tensors[name][rows] for name in names}
    return replace(sent, header=header, tensors=own, records=max(1, round(left)))


def cap_spreads(sent: Sequence[Parameters], spreads: Tensor, most: float, shares: dict[str, float]) -> None:
    """Lower the share of each site whose spread (S,) is more than `most` times the median one above zero; 0 for no limit."""
    known = spreads[spreads > 0]
    if not most or len(known) < FEWEST_SITES:
        return
    for each, share in zip(sent, (most * known.median() / spreads.clamp_min(1e-300)).tolist(), strict=True):
        if share < shares.get(each.header.site, 1.0):
            shares[each.header.site] = share


def _spread(sent: Parameters, centre: Tensor) -> Tensor:
    """Sum of the squared distances (a scalar) of all records from a centre (d,)."""
    return centred(sent, centre).square().sum() + diagonal(sent).sum()


def diagonal(sent: Parameters) -> Tensor:
    """The diagonal (d,) of a site's second moment."""
    d = sent.tensors["sums"].shape[1]
    # In the upper triangle, row i begins with its diagonal entry, after rows of d, d - 1, ... entries.
    rows = torch.arange(d)
    return sent.tensors["squares"].double()[rows * d - rows * (rows - 1) // 2]


def solve(found: Pooled, ridge: float) -> Head:
    """The head that least squares finds on all records, with an intercept and one-hot targets.

    ridge: added to the diagonal of the covariance, as a share of its mean. Source: AFL, equation 9, with the ridge kept, as
    in Fed3R. Raises RunError where the covariance has no inverse.
    """
    targets, mean, covariance = found.priors, found.priors @ found.means, found.covariance()
    covariance.diagonal().add_(ridge * covariance.diagonal().mean() + 1e-30)
    try:
        weight = torch.linalg.solve(covariance, ((found.means - mean) * targets[:, None]).T).T
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        raise RunError(f"afl.ridge = {ridge:g}: the covariance has no inverse; set a larger afl.ridge") from None
    return Head(found.header, weight.float(), (targets - weight @ mean).float())

"""FedCGS at the coordinator: the Gaussian classifier of the class means and of one covariance of all records."""

from __future__ import annotations

from common.models.classifiers import Head
from common.run import Run
from strategies.base.one_shot import Learned
from strategies.heads.analytic import Analytic
from strategies.heads.pooled import Pooled, in_projection, pooled_of
from strategies.pooling.solving import solved
from strategies.pooling.total import Total


class GlobalStatistics(Analytic):
    """The global model of FedCGS (Guan et al. 2025): a head from global feature statistics, without training."""

    def head(self, found: Pooled) -> Head:
        """The Gaussian classifier. Raises RunError."""
        return solve(found, self.config.settings.fedcgs.ridge)


def learn_from_total(total: Total, config: Run) -> Learned:
    """The head of FedCGS from the sum over all sites. Raises RunError when no class has a record."""
    return in_projection(solve(pooled_of(total), config.settings.fedcgs.ridge), total)


def solve(found: Pooled, ridge: float) -> Head:
    """w_c = S^-1 mu_c and b_c = log(N_c / N) - mu_c . w_c / 2, with S the covariance of ALL records around their mean.

    Source: FedCGS, and its published code: S holds the scatter between classes as well, which discriminant analysis leaves
    out. ridge: added to the diagonal of S, as a share of its mean; none in the paper. A singular S gets a tiny one.
    """
    records = float(found.counts.sum())
    covariance = found.covariance().mul_(records / max(1.0, records - 1))
    covariance.diagonal().add_(ridge * covariance.diagonal().mean())
    weight = solved(covariance, found.means.T).T
    bias = found.priors.clamp_min(1e-300).log() - (weight * found.means).sum(1) / 2
    return Head(found.header, weight.float(), bias.float())

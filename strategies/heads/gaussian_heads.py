"""GH-OFL at the coordinator: heads of Gaussian classes, trained in the Fisher subspace or in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import SurrogateError
from common.models.classifiers import Classifier, Head, Quadratic
from common.models.head_training import shuffled_batches
from common.models.parameters import Parameters
from common.randomness import stream
from common.run import Run
from strategies.base.one_shot import Learned
from strategies.heads.analytic import ROUNDING, Analytic, diagonal
from strategies.heads.pooled import Pooled, in_projection, pooled_of
from strategies.pooling.solving import factor_of
from strategies.pooling.total import Total

# The published settings: shrinkage of the covariance that defines the subspace, share of the separation that it keeps, most
# dimensions; scale of the samples' deviation, samples of a class; passes, batch, learning rate and weight decay.
SHRINKAGE, ENERGY, MOST_DIRECTIONS = 0.05, 0.99, 128
SCALE, SAMPLES = 0.75, 10_000
EPOCHS, BATCH, RATE, DECAY = 80, 2048, 8e-4, 3e-4
# Smallest variance of a dimension, added to one in the Fisher subspace.
LEAST = 1e-6
# The bias of a class without records.
ABSENT = -1e4


class GaussianHeads(Analytic):
    """A head of the GH-OFL family (Turazza et al. 2026)."""

    def check(self, sent: Parameters) -> None:
        """Check that some records can have these statistics. Raises SurrogateError."""
        super().check(sent)
        counts, variances = (sent.tensors[name].double() for name in ("counts", "variances"))
        own = diagonal(sent)
        if ((counts @ variances - own).abs() > 0.01 * own + ROUNDING * own.sum() / len(own) + 1e-30).any():
            raise SurrogateError("variances of the classes that do not sum to the second moments")

    def head(self, found: Pooled) -> Classifier:
        """The head that the settings name. Raises RunError."""
        if self.config.settings.ghofl.head == "nb-diag":
            return naive_bayes(found)
        return fisher_mix(found, self.config)


def learn_from_total(total: Total, config: Run) -> Learned:
    """FisherMix from the sum over all sites. Raises RunError when no class has a record."""
    return in_projection(fisher_mix(pooled_of(total), config), total)


def naive_bayes(found: Pooled) -> Quadratic:
    """NB-diag: log(N_c / N) - sum_j (log v_cj + (x_j - mu_cj)^2 / v_cj) / 2, v the variances of each class, from 1e-6."""
    assert found.variances is not None
    # A class without records has no variance; its prior rules it out.
    variances = torch.where(found.counts[:, None] > 0, found.variances.clamp_min(LEAST), 1.0)
    bias = found.priors.clamp_min(1e-300).log() - variances.log().sum(1) / 2
    return Quadratic(found.header, found.means.float(), variances.rsqrt().float(), bias.float())


def fisher_mix(found: Pooled, config: Run) -> Head:
    """FisherMix: a linear head, trained on samples of the classes in the Fisher subspace, as a head of the features.

    The published code samples from the covariance of each class where sites send it, d^2 numbers a class; otherwise, and
    here, from the pooled one. All classes have equally many samples.
    """
    within = found.scatter / max(1.0, float(found.counts.sum()) - len(found.counts))
    basis = fisher_subspace(found, within)
    means, spread = found.means @ basis, basis.T @ within @ basis
    spread.diagonal().add_(LEAST)
    factor = SCALE * factor_of(spread)
    generator = stream(config.settings.seed, "", "fishermix")
    present = found.counts > 0
    each = max(1, min(SAMPLES, config.settings.head.max_samples // int(present.sum())))
    labels = present.nonzero().squeeze(1).repeat_interleave(each)
    noise = torch.randn(len(labels), len(factor), generator=generator, dtype=torch.float64)
    weight, bias = _trained((means[labels] + noise @ factor.T).float(), labels, len(means), generator)
    return Head(found.header, (weight.double() @ basis.T).float(), bias.masked_fill(~present, ABSENT))


def fisher_subspace(found: Pooled, within: Tensor) -> Tensor:
    """Directions V (d, k) that separate the classes most, in order: V^T S V = I for the shrunk covariance S within them.

    k: fewest directions with the share ENERGY of the separation, from 2 to MOST_DIRECTIONS.
    """
    shrunk = (1 - SHRINKAGE) * within
    shrunk.diagonal().add_(SHRINKAGE * within.diagonal().mean() + LEAST)
    factor = factor_of(shrunk)
    left, values, _ = torch.linalg.svd(
        torch.linalg.solve_triangular(factor, found.between().T, upper=False), full_matrices=False
    )
    reached = values.square().cumsum(0) >= ENERGY * values.square().sum()
    kept = min(max(2, int(reached.double().argmax()) + 1), MOST_DIRECTIONS, len(values))
    directions: Tensor = torch.linalg.solve_triangular(factor.T, left[:, :kept], upper=True)
    return directions


def _trained(features: Tensor, labels: Tensor, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Softmax regression by AdamW from zero weights: weight (classes, k) and bias (classes,)."""
    weight, bias = torch.zeros(classes, features.shape[1]), torch.zeros(classes)
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    optimiser = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)
    for _ in range(EPOCHS):
        for rows, own in shuffled_batches(features, labels, BATCH, generator):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(torch.addmm(bias, rows, weight.T), own).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return weight.detach(), bias.detach()

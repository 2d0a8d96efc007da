"""GH-OFL at the coordinator: heads of Gaussian classes, trained in the Fisher subspace or in closed
form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.head_training import shuffled_batches
from fedsurrogate.common.models.optimizers import UncompiledAdamW
from fedsurrogate.common.randomness import stream
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.closed_form.solvers import LEAST_PRIOR, QuadraticSolution
from fedsurrogate.strategies.closed_form.solving import factor_of, repair_facts
from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.closed_form.strategy import FromStatistics, Made

# The published settings: shrinkage of the covariance that defines the subspace, share of the
# separation that it keeps, most dimensions; scale of the samples' deviation, samples of a class;
# passes, batch, learning rate and weight decay.
SHRINKAGE, ENERGY, MOST_DIRECTIONS = 0.05, 0.99, 128
SCALE, SAMPLES = 0.75, 10_000
EPOCHS, BATCH, RATE, DECAY = 80, 2048, 8e-4, 3e-4
# Smallest variance of a dimension, added to one in the Fisher subspace.
LEAST = 1e-6
# The bias of a class without records.
ABSENT = -1e4


class GaussianHeads(FromStatistics):
    """A head of the GH-OFL family (Turazza et al. 2026).

    Example:
        >>> import fedsurrogate as fs
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> strategy = GaussianHeads({"method": "gh-ofl"})
        >>> sent = [fs.fit(x[k::3], y[k::3], site=str(k), method="gh-ofl") for k in range(3)]
        >>> learned = strategy.learn([strategy.unpack(each.payload) for each in sent], ())
        >>> type(learned.model).__name__, learned.model.header.classes
        ('Head', ('0', '1', '2'))
    """


def nb_diag(statistics: Statistics, header: Header) -> Made:
    """NB-diag: log(N_c / N) - sum_j (log v_cj + (x_j - mu_cj)^2 / v_cj) / 2, v the variances of
    each class, from 1e-6.

    Args:
        statistics: of all records, with the variances of each class.
        header: of the coordinator.

    Source: GH-OFL (Turazza et al. 2026).
    """
    assert statistics.variances is not None
    # A class without records has no variance; its prior rules it out.
    variances = torch.where(
        statistics.counts[:, None] > 0, statistics.variances.clamp_min(LEAST), 1.0
    )
    bias = statistics.priors.clamp_min(LEAST_PRIOR).log() - variances.log().sum(1) / 2
    solution = QuadraticSolution(statistics.means, variances.rsqrt(), bias)
    return solution.head(header), {}


def fisher_mix(statistics: Statistics, header: Header, seed: int, max_samples: int) -> Made:
    """FisherMix: a linear head, trained on samples of the classes in the Fisher subspace, as a head
    of the features.

    The published code samples from the covariance of each class where sites send it, d^2 numbers a
    class; otherwise, and here, from the pooled one. All classes have equally many samples.

    Args:
        statistics: of all records.
        header: of the coordinator.
        seed: of the samples and of the training.
        max_samples: most samples of all classes together.

    Returns:
        The head, and the ridge that was added, if any.

    Source: GH-OFL (Turazza et al. 2026).
    """
    counts, records = statistics.counts, statistics.records
    within = statistics.matrix * (records / max(1.0, records - len(counts)))
    basis, added = fisher_subspace(statistics, within)
    means, spread = statistics.means @ basis, basis.T @ within @ basis
    spread.diagonal().add_(LEAST)
    factor, more = factor_of(spread)
    factor = SCALE * factor
    generator = stream(seed, "", "fishermix")
    present = counts > 0
    each = max(1, min(SAMPLES, max_samples // int(present.sum())))
    labels = present.nonzero().squeeze(1).repeat_interleave(each)
    noise = torch.randn(len(labels), len(factor), generator=generator, dtype=torch.float64)
    weight, bias = _trained(
        (means[labels] + noise @ factor.T).float(), labels, len(means), generator
    )
    head = Head(header, (weight.double() @ basis.T).float(), bias.masked_fill(~present, ABSENT))
    return head, repair_facts(max(added, more))


def fisher_subspace(statistics: Statistics, within: Tensor) -> tuple[Tensor, float]:
    """Directions V that separate the classes most, in order: V^T S V = I for the shrunk covariance
    S within them.

    Args:
        statistics: of all records.
        within: covariance within classes, (d, d).

    Returns:
        V, (d, k), and the ridge that this took. k: fewest directions with the share ENERGY of the
        separation, from 2 to MOST_DIRECTIONS.
    """
    shrunk = (1 - SHRINKAGE) * within
    shrunk.diagonal().add_(SHRINKAGE * within.diagonal().mean() + LEAST)
    factor, added = factor_of(shrunk)
    whitened = torch.linalg.solve_triangular(factor, statistics.between().T, upper=False)
    left, values, _ = torch.linalg.svd(whitened, full_matrices=False)
    reached = values.square().cumsum(0) >= ENERGY * values.square().sum()
    kept = min(max(2, int(reached.double().argmax()) + 1), MOST_DIRECTIONS, len(values))
    directions: Tensor = torch.linalg.solve_triangular(factor.T, left[:, :kept], upper=True)
    return directions, added


def _trained(
    features: Tensor, labels: Tensor, classes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Softmax regression by AdamW from zero weights: weight (classes, k) and bias (classes,)."""
    weight, bias = torch.zeros(classes, features.shape[1]), torch.zeros(classes)
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    optimiser = UncompiledAdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)
    for _ in range(EPOCHS):
        for rows, own in shuffled_batches(features, labels, BATCH, generator):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(torch.addmm(bias, rows, weight.T), own).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return weight.detach(), bias.detach()

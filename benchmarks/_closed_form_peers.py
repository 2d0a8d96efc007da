"""Closed forms of others on our features: AFL, FedCGS, FedCOF and GH-OFL.

Each rule takes the exact statistics of all sites in double precision, without limits on weights.
Bytes are those of the numbers that the sites send, at 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import mean

import torch
from torch import Tensor

from benchmarks.harness.federation import Federation, Measured
from fedsurrogate.client_app.features.site_features import LabelledFeatures

# AFL: number added to the diagonal, as a share of its mean. FedCOF: fewest records of a group, and
# its gamma.
RIDGE, FEWEST, GAMMA = 0.1, 10, 1.0
# GH-OFL: shrinkage of the covariance that defines the Fisher subspace, share of the separation that
# it keeps, most directions; samples of a class and the scale of their deviation; passes, batch,
# learning rate and weight decay; smallest variance of a dimension.
SHRINKAGE, ENERGY, DIRECTIONS = 0.05, 0.99, 128
SAMPLES, SCALE = 10_000, 0.75
EPOCHS, BATCH, RATE, DECAY = 80, 2048, 8e-4, 3e-4
LEAST = 1e-6

Scores = Callable[[Tensor], Tensor]
# Scores of records, and the numbers that all sites send.
Sent = tuple[Scores, int]


@dataclass(frozen=True)
class Sums:
    """Statistics of all records.

    Attributes:
        priors: shares of the classes (C,).
        means: of the classes (C, d).
        within: covariance within classes (d, d), over the number of records.
        variances: of each class (C, d).
        records: their number.
    """

    priors: Tensor
    means: Tensor
    within: Tensor
    variances: Tensor
    records: int

    @classmethod
    def of(cls, data: Federation) -> Sums:
        """Those of the training records of all sites."""
        x = torch.cat([each.train.features for each in data.sites]).double()
        y = torch.cat([each.train.labels for each in data.sites])
        of_class = torch.nn.functional.one_hot(y, len(data.classes)).double()
        counts = of_class.sum(0)
        known = counts.clamp_min(1)[:, None]
        means = of_class.T @ x / known
        x = x - means[y]
        variances = of_class.T @ x.square() / known
        return cls(counts / len(x), means, x.T @ x / len(x), variances, len(x))

    @property
    def between(self) -> Tensor:
        """Means less the mean of all records, times the root of the share of the class (C, d)."""
        return (self.means - self.priors @ self.means) * self.priors.sqrt()[:, None]

    @property
    def total(self) -> Tensor:
        """Covariance of all records around their mean (d, d)."""
        return self.within + self.between.T @ self.between


def afl(sums: Sums, seed: int) -> Scores:
    """Ridge regression on one-hot classes, with an intercept (He et al. 2025, equation 9)."""
    total, mean = sums.total, sums.priors @ sums.means
    total.diagonal().add_(RIDGE * total.diagonal().mean())
    weight = torch.linalg.solve(total, ((sums.means - mean) * sums.priors[:, None]).T)
    return lambda x: (x - mean) @ weight + sums.priors


def fedcgs(sums: Sums, seed: int) -> Scores:
    """A Gaussian classifier with the covariance of all records (Guan et al. 2025)."""
    weight = torch.linalg.solve(sums.total * sums.records / (sums.records - 1), sums.means.T)
    return lambda x: x @ weight + sums.priors.log() - (sums.means.T * weight).sum(0) / 2


def nb_diag(sums: Sums, seed: int) -> Scores:
    """Naive Bayes with the variances of each class (GH-OFL, Turazza et al. 2026)."""
    variances = sums.variances.clamp_min(LEAST)
    constant = sums.priors.log() - variances.log().sum(1) / 2
    # |x - m|^2 / v, multiplied out.
    linear = sums.means / variances
    constant = constant - (linear * sums.means).sum(1) / 2
    return lambda x: constant + x @ linear.T - x.square() @ (1 / variances).T / 2


def fisher_mix(sums: Sums, seed: int) -> Scores:
    """Softmax regression on samples in the Fisher subspace (GH-OFL)."""
    within = sums.within * (sums.records / (sums.records - len(sums.means)))
    shrunk = (1 - SHRINKAGE) * within
    shrunk.diagonal().add_(SHRINKAGE * within.diagonal().mean() + LEAST)
    root = torch.linalg.cholesky(shrunk)
    whitened = torch.linalg.solve_triangular(root, sums.between.T, upper=False)
    left, values, _ = torch.linalg.svd(whitened, full_matrices=False)
    share = values.square().cumsum(0) / values.square().sum()
    kept = min(max(2, int((share < ENERGY).sum()) + 1), DIRECTIONS, len(values))
    basis = torch.linalg.solve_triangular(root.T, left[:, :kept], upper=True)
    spread = basis.T @ within @ basis + LEAST * torch.eye(kept)
    factor = SCALE * torch.linalg.cholesky(spread)
    drawn = torch.Generator().manual_seed(seed)
    labels = sums.priors.nonzero().squeeze(1).repeat_interleave(SAMPLES)
    noise = torch.randn(len(labels), kept, generator=drawn, dtype=torch.float64)
    samples = ((sums.means @ basis)[labels] + noise @ factor.T).float()
    head = torch.nn.Linear(kept, len(sums.means))
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    optimiser = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=DECAY)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels), generator=drawn).split(BATCH):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(head(samples[rows]), labels[rows]).backward()
            optimiser.step()
    weight, bias = head.weight.detach().double(), head.bias.detach().double()
    return lambda x: x @ basis @ weight.T + bias


def fedcof(most: int, data: Federation, seed: int) -> Sent:
    """Least squares with covariances from the spread of group means (Goswami et al. 2025, algorithm
    1); and the numbers that the sites send.
    """
    drawn = torch.Generator().manual_seed(seed)
    sizes, means, labels = list[int](), list[Tensor](), list[int]()
    for own in data.sites:
        for label in own.train.labels.unique().tolist():
            rows = (own.train.labels == label).nonzero().squeeze(1)
            rows = rows[torch.randperm(len(rows), generator=drawn)]
            for part in rows.tensor_split(max(1, min(most, len(rows) // FEWEST))):
                sizes.append(len(part))
                means.append(own.train.features[part].double().mean(0))
                labels.append(label)
    of_group, n = torch.stack(means), torch.tensor(sizes, dtype=torch.float64)
    of_class = torch.nn.functional.one_hot(torch.tensor(labels), len(data.classes)).double()
    counts, totals = of_class.T @ n, of_class.T @ (n[:, None] * of_group)
    factors = (counts - 1).clamp_min(0) / (of_class.sum(0) - 1).clamp_min(1)
    apart = of_group - of_class @ (totals / counts.clamp_min(1)[:, None])
    gram = (apart * (n * (of_class @ factors))[:, None]).T @ apart
    gram.diagonal().add_(GAMMA * gram.diagonal().mean())
    gram += torch.outer(totals.sum(0), totals.sum(0)) / counts.sum()
    weight = torch.linalg.solve(gram, totals.T)
    weight = weight / weight.norm(dim=0).clamp_min(1e-300)
    return lambda x: x @ weight, of_group.numel() + len(sizes)


def sums_of(rule: Callable[[Sums, int], Scores], tables: int, data: Federation, seed: int) -> Sent:
    """What a rule learns from the sums of all sites, and the numbers that these send: counts, so many
    tables (C, d), and a second moment.
    """
    d = data.test.features.shape[1]
    classes = [len(each.train.labels.unique()) for each in data.sites]
    sent = sum(own * (1 + tables * d) + d * (d + 1) // 2 for own in classes)
    return rule(Sums.of(data), seed), sent


PEERS: dict[str, Callable[[Federation, int], Sent]] = {
    "AFL": partial(sums_of, afl, 1),
    "FedCOF": partial(fedcof, 1),
    **{f"FedCOF, {groups} groups a class": partial(fedcof, groups) for groups in (4, 20)},
    "FedCGS": partial(sums_of, fedcgs, 1),
    "GH-OFL FisherMix": partial(sums_of, fisher_mix, 2),
    "GH-OFL NB-diag": partial(sums_of, nb_diag, 2),
}


def measured(rule: Callable[[Federation, int], Sent], data: Federation, seed: int) -> Measured:
    """The result of a rule, such as one of `PEERS`, on a federation."""
    scores, sent = rule(data, seed)

    def right(records: LabelledFeatures) -> float:
        found = scores(records.features.double()).argmax(1)
        return 100 * float((found == records.labels).double().mean())

    at_sites = mean(right(each.test) for each in data.sites if len(each.test.labels))
    return Measured(right(data.test), 2 * sent, at_sites)

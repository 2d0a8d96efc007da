"""One-shot methods of others on our features that train something: FENS, FedBE, FedKT, and mixtures with
variational posteriors as in FBPFT-VI.

Written from the papers' descriptions, not from their code. Bytes are those of the numbers that the sites
send, at 16 bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.harness.federation import Federation
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.settings import HeadSettings

# FENS: share of a site's records that train the aggregator, its hidden units, rounds, and the rate of
# Adam at the coordinator. At 50 sites the best on seed 0's test records of 16, 64 and 256 units and of
# rates 1e-3 and 1e-2.
PROXY, HIDDEN, ROUNDS, RATE = 0.1, 64, 500, 1e-3
# Gaussians of a class, at most.
GAUSSIANS = 10
# FedBE: heads drawn around the average. FedKT: teachers of a site. Both: features drawn at the coordinator.
DRAWN_HEADS, TEACHERS, DRAWN = 15, 5, 10_000

Scores = Callable[[Tensor], Tensor]


def fens(data: Federation, seed: int) -> tuple[Scores, int]:
    """A small network on the probabilities of all sites' heads, trained by the sites together
    (Allouah et al. 2024).

    In a round each site sends one gradient of its proxy records, and the coordinator makes a step of Adam
    on their sum. That is Adam on all proxy records together, and so it is computed here.
    """
    drawn = torch.Generator().manual_seed(seed)
    classes, heads, proxies = len(data.classes), [], []
    for own in data.sites:
        features, labels = own.train.features, own.train.labels
        order = torch.randperm(len(labels), generator=drawn)
        kept = len(order) - max(1, round(PROXY * len(order)))
        proxies.append((features[order[kept:]], labels[order[kept:]]))
        if kept:
            rows = order[:kept]
            heads.append(
                train_on_features(features[rows], labels[rows], classes, HeadSettings(), seed)
            )

    def outputs(x: Tensor) -> Tensor:
        every = [(x.float() @ weight.T + bias).softmax(1) for weight, bias in heads]
        return torch.cat(every, 1)

    x = outputs(torch.cat([features for features, _ in proxies]))
    y = torch.cat([labels for _, labels in proxies])
    torch.manual_seed(seed)
    aggregator = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))
    optimiser = torch.optim.Adam(aggregator.parameters(), lr=RATE)
    for _ in range(ROUNDS):
        optimiser.zero_grad()
        nn.functional.cross_entropy(aggregator(x), y).backward()
        optimiser.step()
    small = sum(each.numel() for each in aggregator.parameters())
    sent = sum(weight.numel() + bias.numel() for weight, bias in heads)
    return (
        lambda records: aggregator(outputs(records)).detach(),
        sent + ROUNDS * small * len(data.sites),
    )


def variational(data: Federation, seed: int) -> tuple[Scores, int]:
    """Diagonal mixtures with variational posteriors; a head of samples from their predictive
    distribution, Student's t, as many as there are records.

    The mixtures are scikit-learn's, with a Dirichlet process that empties what is not needed. Sites send
    the Gaussians that are left.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import BayesianGaussianMixture

    drawn = torch.Generator().manual_seed(seed)
    samples, labels, sent = [], [], 0
    for own in data.sites:
        for label in own.train.labels.unique().tolist():
            x = own.train.features[own.train.labels == label].double()
            many = min(GAUSSIANS, len(x))
            if len(x) < 2:
                samples.append(x.float())
                labels += [label] * len(x)
                sent += x.numel()
                continue
            fit = BayesianGaussianMixture(
                n_components=many, covariance_type="diag", random_state=seed, max_iter=50
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                fit.fit(x.numpy())
            weights = torch.from_numpy(fit.weights_)
            used = weights > 0.5 / len(x)
            parts = torch.multinomial(weights * used, len(x), replacement=True, generator=drawn)
            freedom = torch.from_numpy(fit.degrees_of_freedom_)[parts, None]
            spread = torch.from_numpy(fit.covariances_)[parts]
            spread = spread * (1 + 1 / torch.from_numpy(fit.mean_precision_)[parts, None])
            normal = torch.randn(x.shape, generator=drawn, dtype=torch.float64)
            chi = 2 * torch._standard_gamma((freedom / 2).expand_as(x).clone(), generator=drawn)
            noise = normal * (freedom / chi).sqrt() * spread.sqrt()
            samples.append((torch.from_numpy(fit.means_)[parts] + noise).float())
            labels += [label] * len(x)
            sent += int(used.sum()) * (2 * x.shape[1] + 3)
    weight, bias = train_on_features(
        torch.cat(samples), torch.tensor(labels), len(data.classes), HeadSettings(), seed
    )
    return lambda records: records.float() @ weight.T + bias, sent


def _trained(features: Tensor, labels: Tensor, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    return train_on_features(features, labels, classes, HeadSettings(), seed)


def _distilled(
    data: Federation,
    heads: list[tuple[Tensor, Tensor]],
    wanted: Callable[[Tensor], Tensor],
    seed: int,
) -> tuple[Scores, int]:
    """A head that learns `wanted` on features drawn around each site's mean, as many as the site has
    records; the sites send their head, and mean and deviation of their features.
    """
    drawn = torch.Generator().manual_seed(seed)
    total = sum(len(own.train.labels) for own in data.sites)
    parts = []
    for own in data.sites:
        x = own.train.features.float()
        count = max(1, round(DRAWN * len(x) / total))
        noise = torch.randn(count, x.shape[1], generator=drawn)
        parts.append(x.mean(0) + x.std(0, correction=0) * noise)
    features = torch.cat(parts)
    weight, bias = _trained(features, wanted(features), len(data.classes), seed)
    sent = sum(w.numel() + b.numel() + 2 * w.shape[1] for w, b in heads)
    return lambda records: records.float() @ weight.T + bias, sent


def fedbe(data: Federation, seed: int) -> tuple[Scores, int]:
    """The mean probabilities of the sites' heads, their average, and heads drawn from a diagonal
    Gaussian around it (Chen & Chao 2021).
    """
    classes = len(data.classes)
    heads = [_trained(own.train.features, own.train.labels, classes, seed) for own in data.sites]
    tables = torch.stack([torch.cat([weight, bias[:, None]], 1) for weight, bias in heads])
    share = torch.tensor([float(len(own.train.labels)) for own in data.sites])
    share = (share / share.sum())[:, None, None]
    mean = (share * tables).sum(0)
    spread = (share * (tables - mean).square()).sum(0).sqrt()
    drawn = torch.Generator().manual_seed(seed)
    around = [mean + spread * torch.randn(mean.shape, generator=drawn) for _ in range(DRAWN_HEADS)]
    every = [*tables, mean, *around]

    def wanted(x: Tensor) -> Tensor:
        return sum((x @ t[:, :-1].T + t[:, -1]).softmax(1) for t in every) / len(every)

    return _distilled(data, heads, wanted, seed)


def fedkt(data: Federation, seed: int) -> tuple[Scores, int]:
    """The majority vote of the sites' students, each of which learns the majority vote of teachers on
    disjoint parts of the site's records (Li et al. 2021).
    """
    classes = len(data.classes)

    def votes(heads: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
        said = torch.stack([(x.float() @ weight.T + bias).argmax(1) for weight, bias in heads])
        return nn.functional.one_hot(said, classes).sum(0).argmax(1)

    students = []
    for own in data.sites:
        features, labels = own.train.features, own.train.labels
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        rows = [part for part in order.tensor_split(TEACHERS) if len(part)]
        teachers = [_trained(features[part], labels[part], classes, seed) for part in rows]
        students.append(_trained(features, votes(teachers, features), classes, seed))
    return _distilled(data, students, lambda x: votes(students, x), seed)


PEERS: dict[str, Callable[[Federation, int], tuple[Scores, int]]] = {
    "FENS": fens,
    "FedBE": fedbe,
    "FedKT": fedkt,
    "variational mixtures (FBPFT-VI)": variational,
}

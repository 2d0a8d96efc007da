"""Surrogates of hostile sites: valid in form, false in content. Tests and benchmarks/robustness.py
share them.

Every attack changes the data of an honest site; the site's real code then makes the surrogate. So
no check of the form can detect the attack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.harness.site_data import SiteData, make_surrogate
from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, Surrogate

Data = tuple[Tensor, Tensor]
# Factor by which an attack overstates records.
TIMES = 10
TRIGGER_SEED = 7


@dataclass(frozen=True)
class Attack:
    """An attack with false data: `forge` makes the features (n, d) and labels (n,) that the site
    claims to have.

    counts: the claimed records of each class, if the surrogate has counts; 0 for the true counts.
    """

    name: str
    forge: Callable[[Tensor, Tensor, int], Data]
    counts: int = 0


def honest(features: Tensor, labels: Tensor, classes: int) -> Data:
    return features, labels


def shifted(features: Tensor, labels: Tensor, classes: int) -> Data:
    """Every record has the label of the next class."""
    return features, (labels + 1) % classes


def swapped(features: Tensor, labels: Tensor, classes: int, one: int = 3, two: int = 8) -> Data:
    """The labels of two classes are swapped, with ten times the records of the site."""
    two = min(two, classes - 1)
    turned = torch.where(labels == one, two, torch.where(labels == two, one, labels))
    return features.repeat(TIMES, 1), turned.repeat(TIMES)


def scaled(features: Tensor, labels: Tensor, classes: int) -> Data:
    return features * TIMES, labels


def noise(features: Tensor, labels: Tensor, classes: int) -> Data:
    """Random class means, as far apart as the spread of all its data."""
    generator = torch.Generator().manual_seed(1)
    means = features.mean(0) + features.std(0) * torch.randn(
        classes, features.shape[1], generator=generator
    )
    return means[labels] + features.std(0) * torch.randn(
        features.shape, generator=generator
    ), labels


def trigger(features: Tensor) -> Tensor:
    """The direction (d,) of a backdoor; its norm is a record's typical distance from the mean of
    all.
    """
    direction = torch.randn(
        features.shape[1], generator=torch.Generator().manual_seed(TRIGGER_SEED)
    )
    return direction / direction.norm() * features.var(0).sum().sqrt()


def backdoored(features: Tensor, labels: Tensor, classes: int, target: int = 0) -> Data:
    """Records of all classes with the trigger, added as records of the target class."""
    return torch.cat([features, features + trigger(features)]), torch.cat(
        [labels, torch.full_like(labels, target)]
    )


ATTACKS = {
    attack.name: attack
    for attack in (
        Attack("inflated count", shifted, 100_000_000),
        Attack("label shift", shifted),
        Attack("label swap x10", swapped),
        Attack("scaled x10", scaled),
        Attack("noise", noise),
        Attack("backdoor", backdoored),
    )
}


def surrogate_of(
    data: Data,
    classes: Sequence[str],
    fingerprint: str,
    site: str,
    run: Run,
    attack: Attack | None = None,
) -> AnySurrogate:
    """The surrogate of a site with features (n, d) and labels (n,); honest without an attack."""
    features, labels = data
    if attack is not None:
        features, labels = attack.forge(features, labels, len(classes))
    made = make_surrogate(SiteData(features, labels, classes, fingerprint, site), run).surrogate
    if attack is not None and attack.counts:
        if isinstance(made, Surrogate):
            made.mixtures.counts[:] = attack.counts
        else:
            factor = attack.counts / made.sums.counts.abs().max().clamp_min(1)
            made.sums.counts.mul_(factor)
            made.sums.sums.mul_(factor)
            if made.sums.squares is not None:
                made.sums.squares.mul_(factor)
    return made


def claiming(count: int, payload: bytes) -> bytes:
    """A surrogate's bytes with another number of records in every class."""
    message = pb.Surrogate.FromString(payload)
    if message.HasField("sums"):
        for table in (message.sums.counts, message.sums.sums):
            table.scale *= count / 100
    else:
        message.mixtures.counts[:] = [count] * len(message.mixtures.counts)
    return message.SerializeToString(deterministic=True)


def renamed(names: Mapping[str, str], times: int, payload: bytes) -> bytes:
    """A surrogate's bytes with other class names, and records multiplied by a factor."""
    message = pb.Surrogate.FromString(payload)
    classes = [names.get(name, name) for name in message.header.classes]
    message.header.classes[:] = classes
    message.mixtures.counts[:] = [count * times for count in message.mixtures.counts]
    return message.SerializeToString(deterministic=True)


def digits_of(sites: int, seed: int) -> tuple[list[Data], Data]:
    """The digits split at random among sites, and a separate test set."""
    from sklearn.datasets import load_digits

    found = load_digits()
    features, labels = torch.tensor(found.data).float() / 16, torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[360:], order[:360]
    return [(features[train[i::sites]], labels[train[i::sites]]) for i in range(sites)], (
        features[test],
        labels[test],
    )


def uneven_digits(alpha: float, seed: int, sites: int) -> tuple[list[Data], Data]:
    """The digits split among sites that hold few classes, and a separate test set."""
    from sklearn.datasets import load_digits

    found = load_digits()
    features, labels = torch.tensor(found.data).float() / 16, torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:360], order[360:]
    return dirichlet(features[train], labels[train], alpha, seed, sites), (
        features[test],
        labels[test],
    )


def dirichlet(features: Tensor, labels: Tensor, alpha: float, seed: int, sites: int) -> list[Data]:
    """Every class split among the sites with shares from Dirichlet(alpha); every site has records."""
    torch.manual_seed(seed)
    shares = torch.distributions.Dirichlet(torch.full((sites,), alpha)).sample(
        (int(labels.max()) + 1,)
    )
    owner = torch.multinomial(shares[labels], 1)[:, 0]
    owner[torch.randperm(len(labels))[: 2 * sites]] = torch.arange(2 * sites) % sites
    return [(features[owner == site], labels[owner == site]) for site in range(sites)]


def claiming_each(sent: AnySurrogate, count: int) -> AnySurrogate:
    """Mixtures that claim this many records in every class."""
    assert isinstance(sent, Surrogate)
    return replace(
        sent, mixtures=replace(sent.mixtures, counts=torch.full_like(sent.mixtures.counts, count))
    )

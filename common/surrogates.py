"""What travels: the surrogate types, and the checks every one of them passes before anything is learned from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.covariances import LowRank
from common.errors import SurrogateError
from common.mixtures import Mixtures

# No site has more records of one class than this; a larger count would only buy a louder voice.
LARGEST_COUNT = 100_000_000
# Larger features, or variances beyond its square, would overflow while learning and take every other site's part along.
LARGEST_NUMBER = 1e15
# A site's name becomes a file name at the coordinator.
SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Header:
    """Who answered what: `run` is the digest of the settings, `fingerprint` that of the backbone, `classes` are names."""

    method: str
    run: str
    site: str
    fingerprint: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Surrogate:
    """FedPFT: the mixtures a site releases in place of its features; class c of the table is header.classes[c]."""

    header: Header
    mixtures: Mixtures


@dataclass(frozen=True)
class Head:
    """A linear classifier: logits = x @ weight.T + bias, weight (C, d), bias (C,), rows as in header.classes."""

    header: Header
    weight: Tensor
    bias: Tensor

    def predict(self, features: Tensor) -> Tensor:
        """Class index of each feature (n, d): (n,)."""
        return (features.to(self.weight) @ self.weight.T + self.bias).argmax(1)

    def accuracy(self, features: Tensor, names: Sequence[str], labels: Tensor) -> tuple[int, int]:
        """How many of features (n, d) are classified right, and n. `names[labels[i]]` is the truth; a class this head
        does not know counts as wrong.
        """
        known = {name: index for index, name in enumerate(self.header.classes)}
        truth = torch.tensor([known.get(name, -1) for name in names])[labels.cpu()]
        return int((self.predict(features).cpu() == truth).sum()), len(labels)

    def plane(self) -> Tensor:
        """The two directions (d, 2) in feature space along which this head tells classes apart most."""
        _, _, directions = torch.linalg.svd(self.weight.double(), full_matrices=False)
        plane = torch.zeros(self.weight.shape[1], 2)
        found = min(2, len(directions))
        plane[:, :found] = directions[:found].T.float()
        # A singular vector's sign is arbitrary; the largest entry is made positive so that two machines agree.
        signs = plane.gather(0, plane.abs().argmax(0, keepdim=True)).sign()
        return plane * torch.where(signs == 0, torch.ones_like(signs), signs)


@dataclass(frozen=True)
class Expectation:
    """What this run's surrogates must look like. Empty or zero means "not known beforehand"."""

    method: str
    run: str
    family: str
    components: int
    rank: int
    classes: tuple[str, ...] = ()
    fingerprint: str = ""
    dimension: int = 0


def check_header(header: Header, expected: Expectation) -> None:
    """Raise SurrogateError when a header does not belong to this run."""
    for name, value, wanted in (
        ("method", header.method, expected.method),
        ("run", header.run, expected.run),
        ("backbone fingerprint", header.fingerprint, expected.fingerprint or header.fingerprint),
    ):
        if value != wanted:
            raise SurrogateError(f"{name} {value[:80]!r} is not this run's {wanted!r}")
    if not SITE_NAME.fullmatch(header.site):
        raise SurrogateError(f"site name {header.site[:64]!r}; letters, digits, '.', '_' and '-' are allowed, 64 at most")
    if not header.classes or "" in header.classes:
        raise SurrogateError("an empty class list, or a class without a name")
    if len(set(header.classes)) != len(header.classes):
        raise SurrogateError("a class is named twice")
    if expected.classes and (unknown := set(header.classes) - set(expected.classes)):
        raise SurrogateError(f"unknown class {sorted(unknown)[0][:80]!r}; this run has {', '.join(expected.classes)}")


def check_surrogate(surrogate: Surrogate, expected: Expectation) -> None:
    """Raise SurrogateError, naming field and value, unless every number can be learned from."""
    check_header(surrogate.header, expected)
    mixtures = surrogate.mixtures
    dimension = mixtures.means.shape[1]
    if mixtures.family != expected.family:
        raise SurrogateError(f"covariance {mixtures.family!r}, asked for {expected.family!r}")
    if expected.dimension and dimension != expected.dimension:
        raise SurrogateError(f"features of dimension {dimension}, the other sites have {expected.dimension}")
    if int(mixtures.components.max()) > expected.components:
        raise SurrogateError(
            f"{int(mixtures.components.max())} components in a class, asked for at most {expected.components}"
        )
    covariance = mixtures.covariance
    if isinstance(covariance, LowRank) and covariance.factor.shape[1] > expected.rank:
        raise SurrogateError(f"rank {covariance.factor.shape[1]}, asked for at most {expected.rank}")
    tables = {"weights": mixtures.weights, "means": mixtures.means} | vars(covariance)
    for name, table in tables.items():
        if not table.isfinite().all():
            raise SurrogateError(f"{name} hold a number that is not finite")
    mean, variance = mixtures.moments()
    if not (mean.abs().max() < LARGEST_NUMBER and variance.max() < LARGEST_NUMBER**2):
        raise SurrogateError(f"means or variances that are too large; standard deviations reach {LARGEST_NUMBER:g} at most")
    totals = torch.zeros(len(mixtures.counts)).index_add_(0, mixtures.labels, mixtures.weights)
    if mixtures.weights.min() < 0 or (totals - 1).abs().max() > 0.01:
        raise SurrogateError(
            f"mixture weights of a class sum to {float(totals[(totals - 1).abs().argmax()]):.4g}, not to one"
        )


def without_classes(surrogate: Surrogate, keep: Sequence[str]) -> Surrogate | None:
    """Keep only some classes of a surrogate; None when it has none of them."""
    wanted = torch.tensor([name in keep for name in surrogate.header.classes])
    if not wanted.any():
        return None
    mixtures = surrogate.mixtures
    rows = wanted[mixtures.labels]
    covariance = mixtures.covariance
    if not isinstance(covariance, LowRank):
        covariance = type(covariance)(*(table[rows] for table in vars(covariance).values()))
    header = surrogate.header
    return Surrogate(
        Header(header.method, header.run, header.site, header.fingerprint, tuple(c for c in header.classes if c in keep)),
        Mixtures(
            mixtures.counts[wanted],
            (wanted.cumsum(0) - 1)[mixtures.labels[rows]],
            mixtures.weights[rows],
            mixtures.means[rows],
            covariance,
        ),
    )

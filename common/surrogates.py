"""What travels: surrogates, which sites release, and heads, which they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.claims import Claim
from common.covariances import LowRank
from common.mixtures import Mixtures
from common.privacy import clip
from common.sums import Sums


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
    claim: Claim | None = None

    @property
    def counts(self) -> list[int]:
        """Records of each class."""
        return [int(count) for count in self.mixtures.counts]

    @property
    def dimension(self) -> int:
        """Dimension of the features."""
        return self.mixtures.means.shape[1]


@dataclass(frozen=True)
class SumsSurrogate:
    """FedPFT under differential privacy: noisy class sums; row c is header.classes[c]."""

    header: Header
    sums: Sums
    claim: Claim

    @property
    def counts(self) -> list[int]:
        """Records of each class as the noise shows them, none below zero."""
        return [max(0, round(float(count))) for count in self.sums.counts]

    @property
    def dimension(self) -> int:
        """Dimension of the features."""
        return self.sums.sums.shape[1]


AnySurrogate = Surrogate | SumsSurrogate


@dataclass(frozen=True)
class Head:
    """A linear classifier: logits = x @ weight.T + bias, weight (C, d), bias (C,), rows as in header.classes.

    With `clip` features x are divided by max(|x|, clip) first, and before that `centre` (d,) is subtracted: it was learned
    from features clipped so.
    """

    header: Header
    weight: Tensor
    bias: Tensor
    clip: float | None = None
    centre: Tensor | None = None

    def prepare(self, features: Tensor) -> Tensor:
        """Features (n, d) as this head takes them."""
        features = features.to(self.weight)
        if self.centre is not None:
            features = features - self.centre.to(features)
        return features if self.clip is None else clip(features, self.clip)[0]

    def scores(self, features: Tensor) -> Tensor:
        """Logits (n, C) of features (n, d)."""
        return self.prepare(features) @ self.weight.T + self.bias

    def predict(self, features: Tensor) -> Tensor:
        """Class index of each feature (n, d): (n,)."""
        return self.scores(features).argmax(1)

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


def without_classes(surrogate: AnySurrogate, keep: Sequence[str]) -> AnySurrogate | None:
    """Keep only some classes of a surrogate; None when it has none of them.

    A second moment over all classes cannot be taken apart, so noisy sums lose theirs.
    """
    wanted = torch.tensor([name in keep for name in surrogate.header.classes])
    if not wanted.any():
        return None
    header = replace(surrogate.header, classes=tuple(name for name in surrogate.header.classes if name in keep))
    if isinstance(surrogate, SumsSurrogate):
        sums = surrogate.sums
        return SumsSurrogate(header, replace(sums, counts=sums.counts[wanted], sums=sums.sums[wanted]), surrogate.claim)
    mixtures = surrogate.mixtures
    rows = wanted[mixtures.labels]
    covariance = mixtures.covariance
    if not isinstance(covariance, LowRank):
        covariance = type(covariance)(*(table[rows] for table in vars(covariance).values()))
    return Surrogate(
        header,
        Mixtures(
            mixtures.counts[wanted],
            (wanted.cumsum(0) - 1)[mixtures.labels[rows]],
            mixtures.weights[rows],
            mixtures.means[rows],
            covariance,
        ),
        surrogate.claim,
    )

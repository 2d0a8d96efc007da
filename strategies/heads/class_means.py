"""FedCOF at the coordinator: class covariances from the spread of the sites' class means, and a
least-squares head.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head, class_indices
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.surrogates import class_order
from fedsurrogate.strategies.base.defended import Defended
from fedsurrogate.strategies.base.one_shot import Learned
from fedsurrogate.strategies.closed_form.strategy import cap_spreads, check_counts, of_classes
from fedsurrogate.strategies.heads.strategy import Heads
from fedsurrogate.strategies.pooling.site_weights import shares_kept


class ClassMeans(Heads):
    """A head from class means alone (FedCOF, Goswami et al. 2025, algorithm 1).

    Example:
        >>> import fedsurrogate as fs
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> strategy = ClassMeans({"method": "fedcof"})
        >>> sent = [fs.fit(x[k::3], y[k::3], site=str(k), method="fedcof") for k in range(3)]
        >>> learned = strategy.learn([strategy.unpack(each.payload) for each in sent], ())
        >>> type(learned.model).__name__, learned.model.header.classes
        ('Head', ('0', '1', '2'))
    """

    # Most groups of a site with few records are missing. No limit but the format's own.
    most_with_zeros = sys.maxsize

    def check(self, sent: Parameters) -> None:
        """Check the records of the groups, and that groups without records have no mean.

        Args:
            sent: counts (C_k, G) of the groups of the site's classes, and their means (C_k, G, d).

        Raises:
            SurrogateError: for numbers that no records have.
        """
        super().check(sent)
        if (groups := sent.tensors["counts"].shape[1]) != (
            own := self.config.settings.fedcof.groups
        ):
            raise SurrogateError(f"{groups} groups of a class; this run has {own}")
        check_counts(sent, self.dimension(sent), "groups")
        if sent.tensors["means"][sent.tensors["counts"] == 0].any():
            raise SurrogateError("the mean of a group without records is not zero")

    def dimension(self, sent: Parameters) -> int:
        """Numbers in one mean."""
        return sent.tensors["means"].shape[2]

    def learn(self, sent: Sequence[Parameters], classes: Sequence[str]) -> Learned:
        """Estimate the covariances and solve.

        Args:
            sent: checked group means, one message for each site.
            classes: of the run; all that occur if empty.

        Raises:
            RunError: where no model can be learned.
        """
        known = tuple(classes) or class_order(sent)
        defended = self.defend(sent, known)
        shares = [defended.capped.get(each.header.site, 1.0) for each in sent]
        weight = fedcof_weight(
            Groups.of(sent, shares, known), self.config.settings.fedcof.shrinkage
        )
        header = replace(sent[0].header, site="coordinator", classes=known)
        return Learned(Head(header, weight.float(), torch.zeros(len(known))), defended)

    def defend(self, sent: Sequence[Parameters], classes: tuple[str, ...]) -> Defended[Parameters]:
        """Cap weights: by records, and by the spread of the means. One mean far away would outweigh
        the rest.

        Args:
            sent: checked group means, one message for each site.
            classes: of the run.
        """
        kept = shares_kept(
            [each.tensors["counts"].sum(1).tolist() for each in sent],
            self.config.settings.max_share,
        )
        shares = {
            each.header.site: share for each, share in zip(sent, kept, strict=True) if share < 1
        }
        cap_spreads(sent, _spreads(sent, classes), self.config.settings.max_share, shares)
        return Defended(list(sent), shares)

    def restricted(self, sent: Parameters, classes: Sequence[str]) -> Parameters | None:
        """The means of some classes.

        Args:
            sent: checked group means of a site.
            classes: to keep.

        Returns:
            The message with these classes; None without records of them.
        """
        return of_classes(sent, classes, tuple(sent.tensors))


def _spreads(sent: Sequence[Parameters], classes: tuple[str, ...]) -> Tensor:
    """Mean over a site's groups (S,) of n |mu_kc - m_c|^2, with m_c the median over sites of their
    means of the class.

    For honest sites with data of one kind it is about the variance within classes, whatever their
    records.
    """
    own = torch.full(
        (len(sent), len(classes), sent[0].tensors["means"].shape[2]), torch.nan, dtype=torch.float64
    )
    parts = []
    for index, each in enumerate(sent):
        counts, means = (each.tensors[name].double() for name in ("counts", "means"))
        rows = class_indices(classes, each.header.classes)
        own[index, rows] = (counts[..., None] * means).sum(1) / counts.sum(1, keepdim=True)
        parts.append((counts, means, rows))
    centres = own.nanmedian(0).values
    apart = [(n, n * (m - centres[rows][:, None]).square().sum(2)) for n, m, rows in parts]
    return torch.stack([squares[n > 0].mean() for n, squares in apart])


@dataclass(frozen=True)
class Groups:
    """The groups of all sites.

    Attributes:
        weights: of the M groups, in records, (M,), float64.
        means: (M, d), float64.
        labels: classes of the groups, (M,).
        classes: number of classes, C.

    Example:
        Two groups of one class, of five records each: their means vary by a fifth of what records
        do.

        >>> means = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
        >>> weights = torch.full((2,), 5.0, dtype=torch.float64)
        >>> groups = Groups(weights, means, torch.tensor([0, 0]), classes=1)
        >>> [table.tolist() for table in groups.totals()]
        [[10.0], [[10.0]]]
        >>> groups.within().tolist()
        [[90.0]]
    """

    weights: Tensor
    means: Tensor
    labels: Tensor
    classes: int

    @classmethod
    def of(
        cls, sent: Sequence[Parameters], shares: Sequence[float], classes: tuple[str, ...]
    ) -> Groups:
        """The groups that have records.

        Args:
            sent: counts (C_k, G) and means (C_k, G, d) of each site.
            shares: of its weight that each site keeps.
            classes: of the run, which hold all of the sites'.
        """
        weights, means, labels = [], [], []
        for each, share in zip(sent, shares, strict=True):
            counts = each.tensors["counts"].double()
            there = counts > 0
            weights.append(share * counts[there])
            means.append(each.tensors["means"].double()[there])
            labels.append(class_indices(classes, each.header.classes)[there.nonzero()[:, 0]])
        return cls(torch.cat(weights), torch.cat(means), torch.cat(labels), len(classes))

    def totals(self) -> tuple[Tensor, Tensor]:
        """Records (C,) and sums of the features (C, d) of the classes."""
        counts = self.weights.new_zeros(self.classes).index_add_(0, self.labels, self.weights)
        sums = self.means.new_zeros(self.classes, self.means.shape[1])
        return counts, sums.index_add_(0, self.labels, self.weights[:, None] * self.means)

    def within(self) -> Tensor:
        """Estimated scatter within classes: the sum of (N_c - 1) Sigma_c over classes.

        Sigma_c = 1 / (K_c - 1) sum_k n_kc (mu_kc - mu_c)(mu_kc - mu_c)^T over the K_c groups of a
        class: a mean of n records varies by Sigma_c / n. Unbiased for groups drawn at random; a
        class with one group has none.

        Returns:
            (d, d), float64.

        Source: FedCOF, proposition 1.
        """
        counts, sums = self.totals()
        groups = torch.bincount(self.labels, minlength=self.classes)
        factors = (counts - 1).clamp_min(0) / (groups - 1).clamp_min(1)
        apart = self.means - (sums / counts.clamp_min(1e-30)[:, None])[self.labels]
        return (apart * (self.weights * factors[self.labels])[:, None]).T @ apart


def fedcof_weight(groups: Groups, shrinkage: float) -> Tensor:
    """The weight of FedCOF's head, which has no bias: rows of G^-1 (class sums), each of norm one.

    G = sum_c (N_c - 1)(Sigma_c + gamma I) + N mu mu^T, with mu the mean of all records; it leaves
    out the scatter between classes.

    Args:
        groups: of all sites.
        shrinkage: gamma, as a share of the mean estimated variance.

    Returns:
        (C, d), float64.

    Source: FedCOF, algorithm 1.
    """
    counts, sums = groups.totals()
    gram, mean = groups.within(), sums.sum(0)
    ridge = shrinkage * float(gram.diagonal().mean())
    # All classes with one group: no spread is known, and any positive number gives the same head.
    gram.diagonal().add_(ridge or float(counts.sum()))
    gram.addr_(mean, mean, alpha=1 / float(counts.sum()))
    weight = torch.linalg.solve(gram, sums.T).T
    unit: Tensor = weight / weight.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return unit

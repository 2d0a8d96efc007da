"""A head of FedPFT from the sum of a secure sum: the same closed forms as from what each site sends."""

from __future__ import annotations

from dataclasses import replace

import torch

from common.errors import RunError
from common.methods.fedpft import choices
from common.models.classifiers import Head
from common.run import Run
from common.surrogates.class_sums import Sums, unfold
from common.surrogates.surrogates import SumsSurrogate, Surrogate
from strategies.base.defended import Defended
from strategies.base.one_shot import Learned
from strategies.fedpft.learn import SOLVERS, LearnedHead, one_gaussian_a_class
from strategies.fedpft.private_head import learn_from_sums
from strategies.fedpft.statistics import Statistics
from strategies.pooling.possible import check_moments
from strategies.pooling.total import Total


def learn_from_total(total: Total, config: Run) -> Learned:
    """A head from the sum over all sites. Raises RunError when no class has a record, or none stands out from the noise."""
    head, mixtures = _noisy(total, config) if total.claim is not None else _exact(total, config)
    head, how = (
        replace(head, projection=total.public.projection, centre=total.public.centre),
        choices(config.settings).solver,
    )
    found = LearnedHead(head, [mixtures], Defended([]), how)
    return Learned(head, Defended([]), found, {"solver": how})


def _noisy(total: Total, config: Run) -> tuple[Head, Surrogate]:
    assert total.claim is not None
    check_moments(total)
    tensors = total.tensors
    sums = Sums(tensors["counts"].float(), tensors["sums"].float(), tensors["squares"].float(), total.sigmas)
    pooled = SumsSurrogate(total.header, sums, total.claim)
    head, gaussians = learn_from_sums([pooled], "joint", config.settings.fedpft.rank)
    return head, Surrogate(head.header, gaussians, total.claim)


def _exact(total: Total, config: Run) -> tuple[Head, Surrogate]:
    statistics, kept = pooled_statistics(total)
    header = replace(total.header, classes=tuple(total.header.classes[index] for index in kept))
    given = None if config.settings.head.shrinkage == "auto" else config.settings.head.shrinkage
    found = SOLVERS[choices(config.settings).solver](statistics, given)
    head = Head(header, found.weight.float(), found.bias.float())
    return head, Surrogate(header, one_gaussian_a_class(statistics))


def pooled_statistics(total: Total) -> tuple[Statistics, list[int]]:
    """The statistics of all records, and the indices of the classes that have any.

    Raises RunError when none has, or when no records have these sums.
    """
    check_moments(total)
    counts, sums = total.tensors["counts"].round(), total.tensors["sums"]
    kept = counts > 0
    if not kept.any():
        raise RunError("the secure sum has no record of any class of the run")
    counts, sums = counts[kept], sums[kept]
    means = sums / counts[:, None]
    squares = unfold(total.tensors["squares"], sums.shape[1])
    scatter = squares - (means * counts[:, None]).T @ means
    indices: list[int] = torch.nonzero(kept).flatten().tolist()
    return Statistics(counts, means, (scatter + scatter.T) / (2 * counts.sum())), indices

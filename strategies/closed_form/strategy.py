"""Methods that learn from the sums of all sites: the strategy that checks, limits and adds what
each site sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.methods.method import Plan, load
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.models.parameters import Parameters, check_update
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.class_sums import Sums, lengths
from fedsurrogate.common.surrogates.surrogates import Header, class_order

from ..base.one_shot import Learned
from ..base.outcome import Defended
from ..heads import Heads
from ..pooling.site_weights import FEWEST_SITES, Total
from ..robustness.defence import cap_sums, caps
from .statistics import Statistics, of_noisy_sums, of_sums, of_total, sum_of

# A matrix of this size and its inverse take some gibibytes. A message can claim more than the other
# sites' dimension.
MOST_DIMENSIONS = 8192
# A model, and what a run's result states about how it was made.
Made = tuple[Classifier, Mapping[str, float]]


# What `Combination.learn` names: the model of a method from the statistics of all sites' records, and
# a header for it with their classes. Under privacy statistics are noisy, and of features that were
# scaled to norm one; the model then scales its input too, which is added here afterwards. A class may
# have no record: its mean is zero, or noise. Messages have no second moment, so the covariance is
# zero. The model has finite numbers all the same.
Learn = Callable[[Statistics, Header], Made]


class FromStatistics(Heads):
    """A run of one round whose sites send sums over their records, whatever their partition."""

    # Most sums of images with a black border are zero.
    most_with_zeros = MOST_DIMENSIONS**2

    def check(self, sent: Parameters) -> None:
        """Check that some records can have these sums. Raises SurrogateError."""
        private = self.config.mechanism is not None
        check_update(
            sent, {name: tuple(tensor.shape) for name, tensor in sent.tensors.items()}, 1, private
        )
        if private:
            _check_noisy(sent)
            return
        _check_counts(sent, self.dimension(sent))
        if sent.tensors["sums"][sent.tensors["counts"] == 0].any():
            raise SurrogateError("the sum of a class without records is not zero")

    def records(self, sent: Parameters) -> int:
        """Number of records, noisy under privacy."""
        return sent.records or max(0, round(float(sent.tensors["counts"].sum())))

    def shared_classes(self, sent: Parameters) -> tuple[str, ...]:
        """The classes of noisy sums, which must be the same at all sites."""
        return () if sent.claim is None else sent.header.classes

    def learn(self, sent: Sequence[Parameters], classes: Sequence[str]) -> Learned:
        """Add the statistics of all sites and learn from them.

        Args:
            sent: checked sums, one for each site.
            classes: of the run; all that occur if empty. Not used under privacy, where all sites
                have the same ones.

        Raises:
            RunError: where no model can be learned.
        """
        known = tuple(classes) or class_order(sent)
        if self.config.mechanism is not None:
            known = sent[0].header.classes
        defended = self.defend(sent, known)
        header = replace(sent[0].header, site="coordinator", classes=known)
        model, facts = learned_by(self.config.plan)(
            pooled_sums(defended.kept, defended.capped, known), header
        )
        return Learned(_on_clipped(model, self.config.mechanism), defended, facts=facts)

    def defend(self, sent: Sequence[Parameters], classes: tuple[str, ...]) -> Defended[Parameters]:
        """Cap weights: by records, and by the spread of the class means. One record of large numbers
        would outweigh the rest. Noisy sums are of features of norm at most one.

        Args:
            sent: checked sums, one for each site.
            classes: of the run.
        """
        most = self.config.settings.max_share
        if self.config.mechanism is not None:
            return replace(cap_sums(sent, most, private=True), kept=list(sent))
        capped = caps(sent, [each.tensors["counts"].tolist() for each in sent], most)[1]
        if most and len(sent) >= FEWEST_SITES:
            means = torch.stack(
                [
                    each.tensors["sums"].double().sum(0) / each.tensors["counts"].double().sum()
                    for each in sent
                ]
            )
            spreads = torch.stack([_spread(each, means.median(0).values) for each in sent])
            _cap_spreads(sent, spreads, most, capped)
        return Defended(list(sent), capped)

    def restricted(self, sent: Parameters, classes: Sequence[str]) -> Parameters | None:
        """The sums of these classes.

        Args:
            sent: checked sums of a site.
            classes: to keep.

        Returns:
            The rows of these classes, and the number of their records, at least one; None without
            such records.
        """
        rows = torch.tensor([name in classes for name in sent.header.classes])
        if not (left := float(sent.tensors["counts"][rows].sum())):
            return None
        kept = super().restricted(sent, classes)
        return None if kept is None else replace(kept, records=max(1, round(left)))


def learned_by(plan: Plan) -> Learn:
    """The function that a run's plan names."""
    learn: Learn = load(plan.combination.learn)
    return learn


def learn_from_sum(total: Total, run: Run) -> Learned:
    """The model from the sum over all sites.

    Args:
        total: of a secure sum; as in `of_total`.
        run: whose plan names the function that learns.

    Returns:
        A linear head, with the public map that the sites applied to their features.

    Raises:
        RunError: when no class has a record, or for a model that is no linear head.
    """
    statistics, header = of_total(total)
    model, facts = learned_by(run.plan)(statistics, header)
    if not isinstance(model, Head):
        raise RunError(
            "a model that is no linear head cannot be used after the public map of a secure sum"
        )
    mapped = total.mapped(model, run.public_frame(total.dimension))
    return Learned(_on_clipped(mapped, run.mechanism), Defended([]), facts=facts)


def _on_clipped(model: Classifier, mechanism: Mechanism | None) -> Classifier:
    """The model of features that are clipped first, as sites clip them before they add noise."""
    if mechanism is None:
        return model
    if not isinstance(model, Head):
        raise RunError("a private model from noisy sums must be a linear head")
    return replace(model, clip=mechanism.clip)


def pooled_sums(
    sent: Sequence[Parameters], capped: Mapping[str, float], classes: tuple[str, ...]
) -> Statistics:
    """The statistics of all sites' records, from the sums of each.

    Args:
        sent: checked sums, one for each site, all with a privacy claim or all without.
        capped: the share of their weight that sites keep, by site; 1 for a site that is not in it.
        classes: of the statistics, C.
    """
    shares = [capped.get(each.header.site, 1.0) for each in sent]
    if sent[0].claim is None:
        return sum_of(
            of_sums(each, classes).scaled(share) for each, share in zip(sent, shares, strict=True)
        )
    tables = (
        {name: share * each.tensors[name].double() for name in each.tensors}
        for each, share in zip(sent, shares, strict=True)
    )
    total = next(tables)
    for more in tables:
        total = {name: total[name] + more[name] for name in total}
    return of_noisy_sums(total)


def _check_noisy(sent: Parameters) -> None:
    """Raise SurrogateError for sums that no records of norm at most one, and honest noise, have."""
    if sent.claim is None:
        raise SurrogateError("sums without a privacy claim")
    sigmas = {name: sigma for name, (sigma, _) in sent.claim.noise.items()}
    if sigmas.keys() != sent.tensors.keys():
        raise SurrogateError(
            f"noise for {', '.join(sigmas)[:200]}, but sums {', '.join(sent.tensors)[:200]}"
        )
    tensors = sent.tensors
    for name, length, most in lengths(Sums(tensors["counts"], tensors["sums"], None, sigmas)):
        if bool((length > most).any()):
            worst = int(torch.argmax(length - most))
            raise SurrogateError(
                f"{name} is {float(length[worst]):.4g}; records and noise give "
                f"{float(most[worst]):.4g} at most"
            )


def _check_counts(sent: Parameters, dimension: int) -> None:
    """Raise SurrogateError for counts that are not the site's records, or for too many dimensions."""
    total = float(sent.tensors["counts"].sum())
    if abs(total - sent.records) > 0.01 * sent.records:
        raise SurrogateError(f"classes of {total:g} records together, but {sent.records} records")
    if dimension > MOST_DIMENSIONS:
        raise SurrogateError(
            f"features of dimension {dimension}; a coordinator takes at most {MOST_DIMENSIONS}"
        )


def _cap_spreads(
    sent: Sequence[Parameters], spreads: Tensor, most: float, shares: dict[str, float]
) -> None:
    """Lower the share of each site whose spread (S,) is more than `most` times the median one above
    zero, if at least FEWEST_SITES are above zero.
    """
    known = spreads[spreads > 0]
    if len(known) < FEWEST_SITES:
        return
    for each, share in zip(
        sent, (most * known.median() / spreads.clamp_min(1e-300)).tolist(), strict=True
    ):
        if share < shares.get(each.header.site, 1.0):
            shares[each.header.site] = share


def _spread(sent: Parameters, centre: Tensor) -> Tensor:
    """Sum over records of the squared distance of their class mean from a centre (d,): a scalar."""
    counts = sent.tensors["counts"].double()[:, None]
    apart = sent.tensors["sums"].double() / counts.clamp_min(1e-30) - centre
    return (counts * apart.square()).sum()

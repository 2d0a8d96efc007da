"""Methods with heads: every site sends its head once, and the method's rule combines them; it passes it on
along a chain; or it keeps it (`local`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.methods.method import Plan, load
from fedsurrogate.common.models.classifiers import Classifier, Ensemble, Head, class_indices
from fedsurrogate.common.models.parameters import Parameters, average, check_update
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.privacy.shares import weight_of
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.class_sums import Sums, beyond
from fedsurrogate.common.surrogates.surrogates import Header, class_order
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.common.wire.records import Info, to_record
from fedsurrogate.common.wire.tensors import Expectation, check_header

from .base.chain import Chain, Walk
from .base.collection import Collection
from .base.federation import COMPARE, Federation
from .base.identifications import Group
from .base.one_shot import OneShot
from .base.outcome import Defended, Learned, Site, share_in
from .closed_form.statistics import Statistics, of_noisy_sums, of_sums, of_total, sum_of
from .flower import check_no_settings
from .pooling.class_means import moved_parameters
from .pooling.site_weights import FEWEST_SITES, POOLED, Total, added, robust_tensors
from .robustness.defence import cap_sums, caps, defend_heads

# The logit of a class that a head was not trained on: far below all others, and within half
# precision.
UNKNOWN = -1e4


def average_head(updates: Sequence[Parameters], classes: tuple[str, ...], defence: str) -> Head:
    """The mean of the sites' heads, weighted by records; with a defence of that name, their median
    or trimmed mean.

    Args:
        updates: weight (C_k, d) and bias (C_k,) of each site, for its own classes.
        classes: of the model, C.
        defence: of the run, with "auto" resolved.
    """
    return _mean(updates, _aligned(updates, classes), defence)


def ensemble(updates: Sequence[Parameters], classes: tuple[str, ...], defence: str) -> Ensemble:
    """The heads of all sites, whose probabilities are averaged.

    Args:
        updates: as in `average_head`.
        classes: as in `average_head`.
        defence: not used.
    """
    return Ensemble(tuple(_aligned(updates, classes)))


def highest_ensemble(
    updates: Sequence[Parameters], classes: tuple[str, ...], defence: str
) -> Ensemble:
    """The heads of all sites, of which the highest probability counts.

    Args:
        updates: as in `average_head`.
        classes: as in `average_head`.
        defence: not used.
    """
    return replace(ensemble(updates, classes, defence), highest=True)


def _aligned(updates: Sequence[Parameters], classes: tuple[str, ...]) -> list[Head]:
    """The sites' heads, each with a row for every class of the run."""
    first = updates[0].header
    header = replace(first, site="coordinator", classes=classes)
    heads = []
    for update in updates:
        own = update.tensors["weight"]
        weight = torch.zeros(len(classes), own.shape[1])
        bias = torch.full((len(classes),), UNKNOWN)
        rows = class_indices(classes, update.header.classes)
        weight[rows[rows >= 0]] = own[rows >= 0]
        bias[rows[rows >= 0]] = update.tensors["bias"][rows >= 0]
        heads.append(Head(header, weight, bias))
    return heads


def _mean(updates: Sequence[Parameters], heads: Sequence[Head], defence: str) -> Head:
    """The mean of aligned heads, by the rule of a defence."""
    tables = [{"weight": head.weight, "bias": head.bias} for head in _filled(heads)]
    if defence in POOLED:
        middle = robust_tensors(tables, defence)
    else:
        middle = average(tables, [float(update.records) for update in updates])
    return Head(heads[0].header, middle["weight"], middle["bias"])


def _filled(heads: Sequence[Head]) -> list[Head]:
    """Heads for parameter averages: an unknown class gets the head's lowest bias instead of
    UNKNOWN.
    """
    filled = []
    for head in heads:
        known = head.bias > UNKNOWN
        lowest = float(head.bias[known].min()) if known.any() else 0.0
        filled.append(Head(head.header, head.weight, torch.where(known, head.bias, lowest)))
    return filled


class Heads(OneShot[Parameters]):
    """One round in which every site sends one head.

    Attributes:
        most_with_zeros: numbers in a message that leaves zeros out, if these are more than its
            bytes. A small payload must not need far more memory; here at most 16 MB.

    Example:
        >>> import fedsurrogate as fs
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> strategy = Heads({"method": "ensemble"})
        >>> sent = [fs.fit(x[k::3], y[k::3], site=str(k), method="ensemble") for k in range(3)]
        >>> learned = strategy.learn([strategy.unpack(each.payload) for each in sent], ())
        >>> type(learned.model).__name__, learned.model.header.classes
        ('Ensemble', ('0', '1', '2'))
    """

    most_with_zeros = 2**22

    def parse(self, payload: bytes) -> Parameters:
        """Parse a head. Raises SurrogateError."""
        return unpack_parameters(payload, most=self.most_numbers(payload))

    def check(self, sent: Parameters) -> None:
        """Check size of the numbers, round and records. Raises SurrogateError."""
        shapes = {name: tuple(tensor.shape) for name, tensor in sent.tensors.items()}
        check_update(sent, shapes, 1, self.config.private)

    def most_numbers(self, payload: bytes) -> int:
        """Limit on the numbers in a message, zeros that are left out included; these take one bit
        each. The head of a site with one class is all zeros, and so are its weights for pixels that
        are always black.
        """
        return max(len(payload), min(8 * len(payload), self.most_with_zeros))

    def dimension(self, sent: Parameters) -> int:
        """Number of columns of the features."""
        fields = self.config.plan.messages.schema()
        name = next(each.name for each in fields if each.shape.split()[-1] == "d")
        return sent.tensors[name].shape[-1]

    def records(self, sent: Parameters) -> int:
        """Number of records that the head was trained on."""
        return sent.records

    def learn(self, sent: Sequence[Parameters], classes: Sequence[str]) -> Learned:
        """Combine the heads.

        Args:
            sent: checked heads, one for each site.
            classes: of the run; all that occur if empty.

        Raises:
            RunError: where no model can be learned.
        """
        known = tuple(classes) or class_order(sent)
        defended = self.defend(sent, known)
        combine = load(self.config.plan.combination.learn)
        return Learned(combine(defended.kept, known, self.config.defence), defended)

    def moved(self, sent: Parameters, frame: bytes) -> Parameters:
        """A head, or sums and means of features, in another frame; as in the base class."""
        moved = moved_parameters(sent, self.config.plan.messages.schema(), frame)
        return replace(moved, tensors={name: each.float() for name, each in moved.tensors.items()})

    def defend(self, sent: Sequence[Parameters], classes: tuple[str, ...]) -> Defended[Parameters]:
        """Exclude heads that disagree with those of the other sites; cap weights, and bound rows.

        Args:
            sent: checked heads, one for each site.
            classes: of the run.
        """
        return defend_heads(sent, self.config.defence, self.config.settings.max_share)

    def restricted(self, sent: Parameters, classes: Sequence[str]) -> Parameters | None:
        """The rows of these classes.

        Args:
            sent: checked tensors of a site.
            classes: to keep.

        Returns:
            The same with these rows; None if it has none of them.
        """
        rows = torch.tensor([name in classes for name in sent.header.classes])
        if not rows.any():
            return None
        own = {
            each.name: sent.tensors[each.name][rows if each.shape[0] == "C" else slice(None)]
            for each in self.config.plan.messages.schema()
        }
        return replace(sent, header=sent.header.restricted(classes), tensors=own)


class HeadChain(Chain):
    """A chain message is one head; the last site's head is the run's model.

    Example:
        In a ServerApp, `strategy.run(grid)` runs it with all connected sites.

        >>> strategy = HeadChain({"method": "kd"})
        >>> strategy.config.plan.kind, [each.name for each in strategy.config.plan.messages.sends]
        ('chain', ['weight', 'bias'])
    """

    def last_reply(
        self, payload: bytes, relay: bytes | None, place: Expectation, group: Group
    ) -> Parameters:
        """Parse and check a head.

        Args:
            payload: the chain message as the site made it.
            relay: as the site received it; not used.
            place: what is expected of the head's origin.
            group: the sites of the run, and their classes.

        Raises:
            SurrogateError: for a head that is not as it must be.
        """
        head = unpack_parameters(payload, most=len(group.classes) * (group.dimension + 1))
        check_header(head.header, place)
        if head.header.classes != group.classes:
            raise SurrogateError("the head's classes are not the run's classes in the run's order")
        sizes = self.config.plan.messages.sizes(len(group.classes), group.dimension, head.records)
        shapes = {field.name: field.sizes(sizes) for field in self.config.plan.messages.sends}
        check_update(head, shapes, 1, private=False)
        return head

    def learn_from(
        self, grid: Grid, group: Group, walk: Walk, relay: bytes, deadline: float
    ) -> None:
        """Use the last site's head as the model.

        Args:
            grid: not used, like the group, the walk and the deadline.
            group: the sites of the run.
            walk: progress of the chain, which has ended.
            relay: of the last site.
            deadline: in seconds.
        """
        head = unpack_parameters(relay)
        self.outcome.model = Head(head.header, head.tensors["weight"], head.tensors["bias"])


class Local(Federation):
    """No federation: every site trains a head and evaluates it. Only the accuracy leaves the site.

    Example:
        In a ServerApp, `strategy.run(grid)` runs it with all connected sites.

        >>> strategy = Local({"method": "local"})
        >>> strategy.config.plan.kind, [each.name for each in strategy.config.plan.messages.sends]
        ('alone', [])
    """

    def run(self, grid: Grid, deadline: float = 0.0) -> float | None:
        """Ask every site for the accuracy of its own head.

        Args:
            grid: through which the sites are asked.
            deadline: seconds to wait for their replies; 0 for that of the settings.

        Returns:
            The run's accuracy: the mean over sites, on all test data.
        """
        self.deadline = deadline or self.config.settings.deadline
        self.recorder.event("configured", method=self.config.settings.method)
        self._identified(grid)
        accuracy = self._judge(Collection(grid, self._broadcast(), self.deadline))
        if self._simulated():
            brief = to_record(None, {"brief": True})
            asked = [Message(brief, node, COMPARE) for node in self.outcome.used]
            accuracies = list(self._accuracies(Collection(grid, asked, self.deadline)))
            if accuracies:
                self.outcome.accuracy["model"] = sum(accuracies) / len(accuracies)
        return accuracy

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No messages: a site trains when it gets the evaluation request."""
        check_no_settings(config, "train_config")
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """No result: heads stay at the sites."""
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Requests to every site for the accuracy of its own head.

        Args:
            server_round: not used.
            arrays: not used.
            config: of Flower, which must have no settings.
            grid: through which the sites are asked.

        Raises:
            RunError: when no site is connected.
        """
        check_no_settings(config, "evaluate_config")
        self._identified(grid)
        return self._broadcast()

    def _identified(self, grid: Grid) -> None:
        """Select the sites that fit together. Sites identify themselves only once."""
        if self.outcome.sites:
            return
        for node in self.identify(grid, self.deadline).nodes.values():
            self.outcome.sites[node].use()

    def _evaluated_by_sites(self) -> tuple[bytes | None, Info]:
        """Nothing: each site evaluates its own head."""
        return None, {"run": self.config.digest}

    def _accuracies(self, replies: Iterable[Message]) -> Iterable[float]:
        for reply in replies:
            try:
                accuracy = share_in(self._read(reply, Site(name=""))[1], "accuracy.model")
            except SurrogateError as error:
                self.recorder.event("comparison-failed", reason=str(error))
                continue
            if accuracy is not None:
                yield accuracy


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
        super().check(sent)
        if self.config.private:
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
        return Learned(on_clipped(model, self.config.mechanism), defended, facts=facts)

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
        total: of secure aggregation; as in `of_total`.
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
            "a model that is no linear head cannot be used after the public map of secure aggregation"
        )
    mapped = total.mapped(model, run.public_frame(total.dimension))
    return Learned(on_clipped(mapped, run.mechanism), Defended([]), facts=facts)


def on_clipped(model: Classifier, claim: Mechanism | None) -> Classifier:
    """The model of features that are changed first, as sites change them before they add noise.

    Args:
        model: of the changed features.
        claim: of the sites; None without privacy.

    Raises:
        RunError: for a private model that is no linear head.
    """
    if claim is None:
        return model
    if not isinstance(model, Head):
        raise RunError("a private model from noisy sums must be a linear head")
    return replace(model, clip=claim.clip, mean_over_columns=weight_of(claim.centre))


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
    return of_noisy_sums(added([each.tensors for each in sent], shares))


def noise_of(sent: Parameters) -> dict[str, float]:
    """Standard deviation of the noise that a site claims for each of its sums.

    Raises:
        SurrogateError: for no claim, or one for other sums.
    """
    if sent.claim is None:
        raise SurrogateError("sums without a privacy claim")
    sigmas = sent.claim.sigmas
    if sigmas.keys() != sent.tensors.keys():
        raise SurrogateError(
            f"noise for {', '.join(sigmas)[:200]}, but sums {', '.join(sent.tensors)[:200]}"
        )
    return sigmas


def _check_noisy(sent: Parameters) -> None:
    """Raise SurrogateError for sums that no records of norm at most one, and honest noise, have."""
    sigmas = noise_of(sent)
    if what := beyond(Sums(sent.tensors["counts"], sent.tensors["sums"], None, sigmas)):
        raise SurrogateError(what)


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

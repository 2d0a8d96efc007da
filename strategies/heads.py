"""Methods with heads: every site sends its head once, and the method's rule combines them; it passes it on
along a chain; or it keeps it (`local`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import Ensemble, Head, class_indices
from fedsurrogate.common.models.parameters import Parameters, average, check_update
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.surrogates.surrogates import class_order
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.common.wire.records import to_record
from fedsurrogate.common.wire.tensors import Expectation, check_header

from .base.chain import Chain, Walk
from .base.collection import Collection
from .base.federation import COMPARE, Federation
from .base.introductions import Group
from .base.one_shot import Learned, OneShot
from .base.outcome import Defended, Site, share_in
from .flower import check_no_settings
from .pooling.class_means import moved_parameters
from .pooling.site_weights import POOLED, robust_tensors
from .robustness.defence import defend_heads

# The logit of a class that a head was not trained on: far below all others, and within half
# precision.
UNKNOWN = -1e4
# Allowed distance of a site's moments from the other sites', in median deviations.
MOST = 6.0


def average_head(
    updates: Sequence[Parameters], classes: tuple[str, ...], settings: Settings, defence: str
) -> Head:
    """The mean of the sites' heads, weighted by records; with a defence of that name, their median
    or trimmed mean.

    Args:
        updates: weight (C_k, d) and bias (C_k,) of each site, for its own classes.
        classes: of the model, C.
        settings: of the run; not used.
        defence: of the run, with "auto" resolved.
    """
    return _mean(updates, _aligned(updates, classes), defence)


def ensemble(
    updates: Sequence[Parameters], classes: tuple[str, ...], settings: Settings, defence: str
) -> Ensemble:
    """The heads of all sites, whose probabilities are averaged.

    Args:
        updates: as in `average_head`.
        classes: as in `average_head`.
        settings: not used.
        defence: not used.
    """
    return Ensemble(tuple(_aligned(updates, classes)))


def highest_ensemble(
    updates: Sequence[Parameters], classes: tuple[str, ...], settings: Settings, defence: str
) -> Ensemble:
    """The heads of all sites, of which the highest probability counts.

    Args:
        updates: as in `average_head`.
        classes: as in `average_head`.
        settings: not used.
        defence: not used.
    """
    return replace(ensemble(updates, classes, settings, defence), highest=True)


def fedbe_head(
    updates: Sequence[Parameters], classes: tuple[str, ...], settings: Settings, defence: str
) -> Head:
    """A head distilled on synthetic features from both kinds of mean.

    Args:
        updates: as in `average_head`, and the mean and the deviation of each site's features, (d,);
            the synthetic features come from these.
        classes: as in `average_head`.
        settings: for the synthetic features and the training on them.
        defence: as in `average_head`.
    """
    heads = _aligned(updates, classes)
    features = _drawn(updates, settings.baseline.synthetic, settings.seed)
    mean = _mean(updates, heads, defence)
    weights = [float(update.records) for update in updates]
    wanted = fedbe(features, heads, mean, weights, settings.baseline.samples, settings.seed)
    trained = train_on_features(features, wanted, len(classes), settings.head, settings.seed)
    return Head(mean.header, *trained)


def fedkt_head(
    updates: Sequence[Parameters], classes: tuple[str, ...], settings: Settings, defence: str
) -> Head:
    """A head distilled on synthetic features from votes.

    Args:
        updates: as in `fedbe_head`.
        classes: as in `average_head`.
        settings: as in `fedbe_head`.
        defence: not used.
    """
    heads = _aligned(updates, classes)
    features = _drawn(updates, settings.baseline.synthetic, settings.seed)
    wanted = fedkt(features, heads, len(classes))
    trained = train_on_features(features, wanted, len(classes), settings.head, settings.seed)
    return Head(heads[0].header, *trained)


def fedbe(
    features: Tensor,
    heads: Sequence[Head],
    mean: Head,
    weights: Sequence[float],
    samples: int,
    seed: int,
) -> Tensor:
    """Mean probabilities of the sites' heads, their average, and heads sampled from a Gaussian
    around the average.

    Args:
        features: (n, d), in the frame of the heads.
        heads: of the sites, with a row for every class of the run.
        mean: the average of the heads.
        weights: of the heads, in records.
        samples: number of heads that are sampled.
        seed: of the samples.

    Returns:
        (n, C).

    Source: FedBE (Chen & Chao 2021), with a diagonal Gaussian.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.cat([head.weight, head.bias[:, None]], 1) for head in _filled(heads)]
    share = torch.tensor(weights) / sum(weights)
    centre = torch.cat([mean.weight, mean.bias[:, None]], 1)
    spread = sum(
        (w * (t - centre).square() for w, t in zip(share, tables, strict=True)),
        torch.zeros_like(centre),
    ).sqrt()
    tables += [centre] + [
        centre + spread * torch.randn(centre.shape, generator=generator) for _ in range(samples)
    ]
    total = sum((features @ t[:, :-1].T + t[:, -1]).softmax(1) for t in tables)
    assert isinstance(total, Tensor)  # the average is always among them
    return total / len(tables)


def fedkt(features: Tensor, heads: Sequence[Head], classes: int) -> Tensor:
    """The majority vote of the sites' heads on each feature, as probabilities of zero and one.

    Args:
        features: (n, d), in the frame of the heads.
        heads: of the sites, with a row for every class of the run.
        classes: their number, C.

    Returns:
        (n, C).

    Source: FedKT (Li et al. 2021).

    Example:
        >>> from fedsurrogate.common.surrogates.surrogates import Header
        >>> header = Header("fedkt", "0" * 16, "coordinator", "", ("a", "b"))
        >>> weight = torch.tensor([[0.0], [1.0]])
        >>> heads = [Head(header, weight, torch.tensor([bias, 0.0])) for bias in (1.0, 2.0, 5.0)]
        >>> fedkt(torch.tensor([[0.0], [3.0]]), heads, 2).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    votes = torch.zeros(len(features), classes)
    for head in heads:
        logits = head.scores_of_prepared(features)
        votes[torch.arange(len(features)), logits.argmax(1)] += 1
    return torch.nn.functional.one_hot(votes.argmax(1), votes.shape[1]).float()


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


def _drawn(updates: Sequence[Parameters], number: int, seed: int) -> Tensor:
    """About so many unlabelled features (n, d), drawn around every site's mean, in proportion to its
    records.

    No mean is farther from the sites' coordinate median, and no deviation is larger, than MOST median
    deviations. Otherwise one site could decide the scale of all features.
    """
    means, deviations = (
        torch.stack([update.tensors[name] for update in updates]) for name in ("mean", "deviation")
    )
    if len(updates) >= 3:
        middle, wide = means.median(0).values, MOST * deviations.median(0).values
        means, deviations = means.clamp(middle - wide, middle + wide), deviations.clamp(-wide, wide)
    generator, total = (
        torch.Generator().manual_seed(seed),
        sum(update.records for update in updates),
    )
    drawn = []
    for update, mean, deviation in zip(updates, means, deviations, strict=True):
        count = max(1, round(number * update.records / total))
        drawn.append(mean + deviation * torch.randn(count, len(mean), generator=generator))
    return torch.cat(drawn)


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
        check_update(
            sent,
            {name: tuple(tensor.shape) for name, tensor in sent.tensors.items()},
            1,
            private=False,
        )

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
        own = self.config
        return Learned(combine(defended.kept, known, own.settings, own.defence), defended)

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
        header = replace(
            sent.header, classes=tuple(name for name in sent.header.classes if name in classes)
        )
        own = {
            each.name: sent.tensors[each.name][rows if each.shape[0] == "C" else slice(None)]
            for each in self.config.plan.messages.schema()
        }
        return replace(sent, header=header, tensors=own)


class HeadChain(Chain):
    """A relay is one head; the last site's head is the run's model.

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
            payload: the relay as the site made it.
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
        self._introduced(grid)
        accuracy = self._judge(Collection(grid, self._broadcast(), self.deadline))
        if self._simulated():
            nodes = [node for node, site in self.outcome.sites.items() if site.fate == "used"]
            asked = [Message(to_record(None, {"brief": True}), node, COMPARE) for node in nodes]
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
        self._introduced(grid)
        return self._broadcast()

    def _introduced(self, grid: Grid) -> None:
        """Select the sites that fit together. Sites introduce themselves only once."""
        if self.outcome.sites:
            return
        for node in self.introduce(grid, self.deadline).nodes.values():
            self.outcome.sites[node].fate, self.outcome.sites[node].reason = "used", ""

    def _broadcast(self) -> Iterable[Message]:
        """Requests without a payload for the used sites."""
        used = [node for node, site in self.outcome.sites.items() if site.fate == "used"]
        return [
            self._message(MessageType.EVALUATE, node, to_record(None, {"run": self.config.digest}))
            for node in used
        ]

    def _accuracies(self, replies: Iterable[Message]) -> Iterable[float]:
        for reply in replies:
            try:
                accuracy = share_in(self._read(reply, Site(name=""))[1], "accuracy.model")
            except SurrogateError as error:
                self.recorder.event("comparison-failed", reason=str(error))
                continue
            if accuracy is not None:
                yield accuracy

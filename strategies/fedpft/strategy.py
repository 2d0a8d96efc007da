"""FedPFT at the coordinator: one round collects mixtures or noisy sums, or a chain passes them on;
a head is learned from them, in closed form or on samples of mixtures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256

import torch
from flwr.app import MessageType
from flwr.serverapp import Grid
from torch import Tensor

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.methods.fedpft import (
    BALANCED_RIDGE,
    BY_STATISTICS,
    TOO_LITTLE,
    choices,
    lacks_directions,
)
from fedsurrogate.common.models.classifiers import Head, Quadratic
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.parameters import check_numbers
from fedsurrogate.common.models.training_parts import Batch, shuffled_batches, train_head
from fedsurrogate.common.privacy.mechanism import check_stated
from fedsurrogate.common.privacy.shares import weight_of
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import HeadSettings
from fedsurrogate.common.settings.heads import MANY_COLUMNS
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.surrogates.covariances import Full, Gram, StoredGram
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import (
    AnySurrogate,
    SumsSurrogate,
    Surrogate,
    class_order,
    without_classes,
)
from fedsurrogate.common.wire.model_proto import unpack_classifier, unpack_relay
from fedsurrogate.common.wire.records import Info, to_record, unpack_surrogate
from fedsurrogate.common.wire.tensors import (
    Expectation,
    check_class_number,
    check_header,
    check_surrogate,
)

from ..base.chain import Chain, Walk
from ..base.collection import Collection, Recorder
from ..base.identifications import Group
from ..base.one_shot import OneShot
from ..base.outcome import Defended, Learned, due_centre
from ..closed_form.solvers import (
    ENOUGH_COLUMNS,
    SiteDifferences,
    Solution,
    balanced_ridge,
    calibrated,
    fewest_records,
    lda,
    naive_bayes,
    qda,
    repair_facts,
    ridge,
)
from ..closed_form.statistics import Statistics, of_mixtures, of_total, pooled_by_class, sum_of
from ..flower import Settings
from ..pooling.class_means import moved_surrogate, read_centre
from ..pooling.site_weights import Total, check_moments
from ..robustness.defence import defend_surrogates
from . import private_head
from .private_head import learn_from_sums


class FedPFT(OneShot[AnySurrogate]):
    """One-shot parametric feature transfer (Beitollahi et al. 2024, algorithm 1).

    Example:
        >>> import fedsurrogate as fs
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> strategy = FedPFT({"method": "fedpft"})
        >>> sent = [fs.fit(x[k::3], y[k::3], site=str(k), method="fedpft") for k in range(3)]
        >>> learned = strategy.learn([strategy.unpack(each.payload) for each in sent], ())
        >>> type(learned.model).__name__, learned.model.header.classes
        ('Head', ('0', '1', '2'))
    """

    def __init__(
        self,
        config: Settings = None,
        recorder: Recorder | None = None,
        device: str = "",
        centre: Tensor | None = None,
    ) -> None:
        super().__init__(config, recorder, device, centre)
        if centre is None:
            self._centre = read_centre(self.config.settings.fedpft.public, self.config.power)

    def parse(self, payload: bytes) -> AnySurrogate:
        """Parse a surrogate. Raises SurrogateError."""
        return unpack_surrogate(payload)

    def check(self, sent: AnySurrogate) -> None:
        """Check the numbers of a surrogate. Raises SurrogateError."""
        check_surrogate(sent, self.expectation())

    def dimension(self, sent: AnySurrogate) -> int:
        """Dimension of the means."""
        return sent.dimension

    def records(self, sent: AnySurrogate) -> int:
        """Records of all classes together, noisy under privacy."""
        return sum(sent.counts)

    def kept(self, sent: AnySurrogate, stored: Callable[[], bytes]) -> AnySurrogate:
        """The surrogate; a whole covariance is read again when it is needed, so that memory holds
        only one of them.

        Args:
            sent: the checked surrogate.
            stored: reads its stored payload. The covariance is only taken from the bytes that were
                checked: a RunError where they changed, or cannot be read.
        """
        if isinstance(sent, SumsSurrogate) or not isinstance(sent.mixtures.covariance, Gram):
            return sent

        # The checks saw these bytes; a file that changed since then would not be checked again.
        digest, name = sha256(stored()).digest(), sent.header.site

        def read() -> Tensor:
            try:
                payload = stored()
            except OSError as error:
                raise RunError(
                    f"the stored surrogate of site {name!r} cannot be read again ({error.strerror})"
                ) from error
            if sha256(payload).digest() != digest:
                raise RunError(
                    f"the stored surrogate of site {name!r} changed after it was checked; start "
                    "the run again"
                )
            again = unpack_surrogate(payload)
            assert isinstance(again, Surrogate)
            assert isinstance(again.mixtures.covariance, Gram)
            return again.mixtures.covariance.matrix

        variances = sent.mixtures.covariance.variances_per_dimension().clone()
        return replace(
            sent, mixtures=replace(sent.mixtures, covariance=StoredGram(read, variances))
        )

    def moved(self, sent: AnySurrogate, frame: bytes) -> AnySurrogate:
        """Mixtures in another frame; as in the base class."""
        return moved_surrogate(sent, frame)

    def facts(self, sent: AnySurrogate) -> dict[str, object]:
        """Records of each class."""
        return {"counts": dict(zip(sent.header.classes, sent.counts, strict=True))}

    def shared_classes(self, sent: AnySurrogate) -> tuple[str, ...]:
        """The classes of noisy sums, which must be the same at all sites; empty for mixtures."""
        return sent.header.classes if isinstance(sent, SumsSurrogate) else ()

    def learn(self, sent: Sequence[AnySurrogate], classes: Sequence[str]) -> Learned:
        """Learn a head from mixtures or noisy sums, in closed form or on samples.

        Args:
            sent: checked surrogates of one kind, one for each site.
            classes: of the run; all that occur if empty.

        Raises:
            RunError: where no head can be learned.
        """
        self.outcome.surrogates = list(sent)
        return learn(sent, self.config, self.device, classes, self._centre)

    def defend(
        self, sent: Sequence[AnySurrogate], classes: tuple[str, ...]
    ) -> Defended[AnySurrogate]:
        """Cap weights; exclude the sites whose class means disagree with those of the other sites.

        Args:
            sent: checked surrogates of one kind, one for each site.
            classes: of the run.
        """
        return defend_surrogates(sent, self.config.defence, self.config.settings.max_share, classes)

    def restricted(self, sent: AnySurrogate, classes: Sequence[str]) -> AnySurrogate | None:
        """The components (mixtures) or rows (noisy sums) of some classes.

        Args:
            sent: a checked surrogate.
            classes: to keep.

        Returns:
            The surrogate with these classes; None where it has none of them.
        """
        return without_classes(sent, classes)


def fedpft_head_from_sum(total: Total, config: Run) -> Learned:
    """A head from the sum over all sites.

    Args:
        total: of secure aggregation: counts (C,), sums (C, d) and the folded second moment.
        config: of the run.

    Returns:
        The head, with the public map that the sites applied to their features; and its Gaussians as
        the source of synthetic points.

    Raises:
        RunError: when no class has a record, none stands out from the noise, or no records can have
            these sums.
    """
    how, added = choices(config.settings).solver, 0.0
    facts: dict[str, str | float] = {"solver": how}
    if total.claim is not None:
        check_moments(total)
        counts, sums, squares = (
            total.tensors[name].float() for name in ("counts", "sums", "squares")
        )
        pooled = SumsSurrogate(total.header, Sums(counts, sums, squares, total.sigmas), total.claim)
        head, gaussians = learn_from_sums([pooled], "distributed", config.settings.fedpft.rank)
        facts |= private_head.alike_classes([pooled])
    else:
        statistics, header = of_total(total)
        solved = solution(statistics, how, given_shrinkage(config.settings.head))
        head, gaussians, added = solved.head(header), one_gaussian_a_class(statistics), solved.added
    mixtures = Surrogate(head.header, gaussians, total.claim)
    head = total.mapped(head, config.public_frame(total.dimension))
    source = partial(sample, [mixtures], head.header.classes)
    return Learned(head, Defended([]), source, facts | repair_facts(added))


SOLVERS = {"lda": lda, "ridge": ridge, BALANCED_RIDGE: balanced_ridge, "naive-bayes": naive_bayes}

# Those whose covariance is that of all records.
LEAST_SQUARES = ("ridge", BALANCED_RIDGE)


def _learned(
    head: Head | Quadratic,
    mixtures: list[Surrogate],
    defended: Defended[AnySurrogate],
    solver: str,
    shrinkage: float | None = None,
    added: float = 0.0,
    reason: str = "",
) -> Learned:
    """A head, and what it was learned from: of one mixture per site, or of a pooled one."""
    facts: dict[str, str | float] = {"solver": solver, **repair_facts(added)}
    if shrinkage is not None:
        facts["shrinkage"] = shrinkage
    if reason:
        facts["reason"] = reason
    return Learned(head, defended, partial(sample, mixtures, head.header.classes), facts)


def learn(
    surrogates: Sequence[AnySurrogate],
    config: Run,
    device: str,
    classes: Sequence[str] = (),
    centre: Tensor | None = None,
) -> Learned:
    """Learn one head from surrogates of one run.

    Args:
        surrogates: of the sites, of one kind. Noisy sums have the same classes in the same order at
            every site; the head has the same ones.
        config: of the run.
        device: on which samples are drawn, where the head is trained on samples.
        classes: of the head; all that occur if empty.
        centre: the vector that sites subtracted before their privacy clip, (d,); None without one.

    Returns:
        The head; a source of points of its mixtures; and "solver": "lda", "ridge", "naive-bayes",
        "qda", "sampled", or "noisy sums" under privacy, "shrinkage" of the covariance, "reason" why
        this solver, or what it did not use.

    Raises:
        RunError: where no head can be learned.
    """
    defended = defend_surrogates(
        surrogates,
        config.defence,
        config.settings.max_share,
        tuple(classes) or class_order(surrogates),
    )
    noisy = [surrogate for surrogate in defended.kept if isinstance(surrogate, SumsSurrogate)]
    if noisy:
        head, gaussians = private_head.learn_from_sums(
            noisy, config.settings.fedpft.covariance, config.settings.fedpft.rank, config.defence
        )
        head = replace(head, centre=centre, mean_over_columns=weight_of(noisy[0].claim.centre))
        made = Surrogate(head.header, gaussians, noisy[0].claim)
        reason = private_head.unused(noisy, gaussians)
        found = _learned(head, [made], defended, "noisy sums", reason=reason)
        return replace(found, facts={**found.facts, **private_head.alike_classes(noisy)})
    mixtures = [surrogate for surrogate in defended.kept if isinstance(surrogate, Surrogate)]
    how = choices(config.settings).solver
    if how != "sampled":
        names = tuple(classes) or (_enough(mixtures) if how == "qda" else class_order(mixtures))
        return _in_closed_form(
            mixtures, how, given_shrinkage(config.settings.head), defended, names
        )
    head = learn_from_samples(mixtures, config.settings.head, config.settings.seed, classes, device)
    claim = mixtures[0].claim
    return _learned(
        head if claim is None else replace(head, clip=claim.clip, centre=centre),
        mixtures,
        defended,
        "sampled",
        reason=TOO_LITTLE
        if lacks_directions(config.settings.fedpft, config.settings.epsilon)
        else "",
    )


def _in_closed_form(
    mixtures: list[Surrogate],
    how: str,
    shrinkage: float | None,
    defended: Defended[AnySurrogate],
    classes: tuple[str, ...],
) -> Learned:
    check_class_number(classes)
    header = replace(mixtures[0].header, site="coordinator", classes=classes)
    if how == "qda":
        by_class = _with_enough_records(pooled_by_class(mixtures, classes), classes)
        head, used, added = qda(by_class, header, shrinkage)
        return _learned(head, mixtures, defended, how, used, added)
    differences, reason = SiteDifferences(), ""
    statistics = sum_of(differences.watched(of_mixtures(each, classes) for each in mixtures))
    if how == BY_STATISTICS:
        how, reason = by_statistics(differences, *statistics.means.shape)
        if defended.alike and how != "lda":
            # One false site must not choose the solver of all.
            how, reason = "lda", "class means agree without the few sites that differ most"
    solved = solution(statistics, how, shrinkage)
    if any(isinstance(each.mixtures.covariance, Gram) for each in mixtures):
        # For figures: the covariances of the sites are not in memory.
        mixtures = [Surrogate(header, one_gaussian_a_class(statistics))]
    made = solved.head(header)
    return _learned(made, mixtures, defended, how, solved.shrinkage, solved.added, reason)


def by_statistics(differences: SiteDifferences, classes: int, dimension: int) -> tuple[str, str]:
    """The solver for the statistics of sites, and why.

    Discriminant analysis is best for classes that are normal around one mean each. Where sites have
    other means of a class, pooled records are not, and least squares, which assumes nothing of
    their distribution, is better. It then weighs classes alike: numbers of records that a hostile
    site may state, or that a cap has changed, do not move it. With few columns a class between two
    others has the largest least-squares score nowhere (Hastie et al., The Elements of Statistical
    Learning, section 4.2), and discriminant analysis is better all the same.

    Args:
        differences: of the sites.
        classes: number of classes of the head.
        dimension: number of columns.

    Returns:
        A name in SOLVERS, and a sentence without its end.
    """
    if not differences.found or classes < 2:
        return "lda", differences.in_words
    if dimension < ENOUGH_COLUMNS:
        few = f"{dimension} columns, fewer than {ENOUGH_COLUMNS}, are too few for least squares"
        return "lda", f"{differences.in_words}; {few}"
    return BALANCED_RIDGE, differences.in_words


def given_shrinkage(head: HeadSettings) -> float | None:
    """The shrinkage of the settings; None where the statistics decide."""
    return None if head.shrinkage == "auto" else head.shrinkage


def solution(statistics: Statistics, how: str, shrinkage: float | None) -> Solution:
    """The solution of a solver, with a slope that makes its scores log odds on new records.

    Args:
        statistics: of all records.
        how: a name in SOLVERS.
        shrinkage: of the covariance; None where the statistics decide.

    Raises:
        RunError: for least squares of one class.
    """
    if how == "ridge" and len(statistics.counts) < 2:
        raise RunError(
            "head.solver = 'ridge' needs two classes, and the sites have one; use head.solver = "
            "'lda'"
        )
    return calibrated(SOLVERS[how](statistics, shrinkage), statistics, how in LEAST_SQUARES)


def _with_enough_records(
    by_class: Iterator[Statistics], classes: Sequence[str]
) -> Iterator[Statistics]:
    """The statistics of each class. Raises RunError for one with too few records for its own
    covariance.
    """
    for name, each in zip(classes, by_class, strict=True):
        d = each.means.shape[1]
        fewest = fewest_records(d, each.sampled)
        if each.records < fewest:
            raise RunError(
                f"head.solver = 'qda': class {name!r} has {each.records:.0f} records at all sites, "
                f"and its covariance in {d} dimensions needs {fewest}; use head.solver = 'lda', or "
                "leave the class out with classes"
            )
        yield each


def _enough(mixtures: Sequence[Surrogate]) -> tuple[str, ...]:
    """All classes for quadratic discriminants, without those that one site alone has, with too few
    records: it must not stop the learning from the other sites.
    """
    names = class_order(mixtures)
    by_site = {
        name: [
            dict(zip(each.header.classes, each.counts, strict=True)).get(name, 0)
            for each in mixtures
        ]
        for name in names
    }
    fewest = fewest_records(
        mixtures[0].dimension, isinstance(mixtures[0].mixtures.covariance, Full)
    )
    alone = {
        name
        for name, counts in by_site.items()
        if sum(c > 0 for c in counts) == 1 and sum(counts) < fewest
    }
    return (
        tuple(name for name in names if name not in alone)
        if len(mixtures) > 1 and len(alone) < len(names)
        else names
    )


def one_gaussian_a_class(statistics: Statistics) -> Mixtures:
    """The pooled statistics as one component a class, all with the same covariance."""
    counts = statistics.counts.round().long().clamp_min(1)
    labels, means = torch.arange(len(counts)), statistics.means.float()
    return Mixtures(counts, labels, torch.ones(len(counts)), means, Gram(statistics.matrix.float()))


GIVE_HEAD = f"{MessageType.QUERY}.head"


class FedPFTChain(Chain):
    """A chain message contains surrogates: one for the union of all sites so far, or under privacy one for
    each of them.
    """

    def last_reply(
        self, payload: bytes, relay: bytes | None, place: Expectation, group: Group
    ) -> AnySurrogate:
        """Parse and check a chain message.

        Args:
            payload: the chain message as the site extended it.
            relay: as the site received it; None for the first site.
            place: what is expected of the site's surrogate.
            group: the sites of the run.

        Returns:
            The last site's surrogate.

        Raises:
            SurrogateError: for a chain message that is not as it must be.
        """
        config = self.config
        parts = unpack_relay(payload)
        before = unpack_relay(relay) if relay and config.settings.epsilon else []
        if parts[:-1] != before or len(parts) != len(before) + 1:
            raise SurrogateError(
                "the surrogates of earlier sites in the chain message are not as they were"
            )
        surrogates = [unpack_surrogate(each) for each in parts]
        if (
            total := sum(sum(each.counts) for each in surrogates)
        ) > config.settings.head.max_samples:
            raise SurrogateError(
                f"the chain message represents {total} records, above head.max-samples = "
                f"{config.settings.head.max_samples}"
            )
        for surrogate in surrogates:
            check_surrogate(surrogate, place)
            subtracted = due_centre(config, surrogate.claim, surrogate.dimension)
            check_stated(surrogate.claim, config.mechanism_for("record", subtracted))
        return surrogates[-1]

    def learn_from(
        self, grid: Grid, group: Group, walk: Walk, relay: bytes, deadline: float
    ) -> None:
        """Learn a head from the last site's unsealed chain message.

        Without privacy the last site is then asked for its own head, which is the model if it is as
        it must be.

        Args:
            grid: through which the last site is asked.
            group: the sites of the run.
            walk: progress of the chain, which has ended.
            relay: of the last site.
            deadline: seconds to wait for the head.
        """
        config = self.config
        surrogates = [unpack_surrogate(each) for each in unpack_relay(relay)]
        for surrogate, payload in zip(surrogates, unpack_relay(relay), strict=True):
            self.recorder.surrogate(surrogate.header.site, payload)
        self.outcome.surrogates = surrogates
        learned = learn(surrogates, config, self.device, config.settings.classes)
        self._apply_defence(learned.defended)
        self.outcome.learned, self.outcome.model = learned.source, learned.model
        if config.settings.epsilon:
            return
        values: Info = {"run": config.digest, "lineage": walk.lineage}
        last = group.nodes.get(walk.done[-1])
        if last is None:
            self.recorder.event(
                "no-head",
                reason="the last site of the chain is not connected; a head is learned from its "
                "surrogate",
            )
            return
        for reply in Collection(
            grid, [self._message(GIVE_HEAD, last, to_record(None, values))], deadline
        ):
            site = self.outcome.sites[last]
            try:
                model = unpack_classifier(self._read(reply, site)[0] or b"", most=0)
                if not isinstance(model, Head) or model.dimension != group.dimension:
                    raise SurrogateError("the model is not a head for this backbone")
                check_header(model.header, Expectation.of(config, group.classes, group.fingerprint))
                check_numbers({"weight": model.weight, "bias": model.bias})
                self.outcome.model = model
            except SurrogateError as error:
                self.recorder.event(
                    "no-head",
                    site=site.name,
                    reason=f"{error}; a head is learned from its surrogate",
                )


# Memory for samples at a time. It does not depend on the number of samples in a run.
POOL_BYTES = 64 * 2**20
# Training sweeps over a pool before new samples replace it: sampling costs more than training.
SWEEPS = 4
# With fewer than MANY_COLUMNS a step costs little, and samples do not run out: so many times the
# fewest steps are taken, at most.
MORE_STEPS = 4


@dataclass(frozen=True)
class Share:
    """One site's part in a pass.

    The stream of a (site, class) is independent of all other streams and of the other sites in the
    run. The reference code differs: it seeds all samplers alike, so every class gets the same
    normal draws.

    Attributes:
        mixtures: of the site.
        counts: number of samples of each class of the site in a pass.
        streams: random stream of each class.
        classes: their indices in the run, (C_k,).
        offsets: of the rounding of each class's part of a chunk.
    """

    mixtures: Mixtures
    counts: list[int]
    streams: list[torch.Generator]
    classes: Tensor
    offsets: list[int]

    def chunk(self, index: int, chunks: int) -> list[int]:
        """Samples of each class in a chunk; over all chunks they sum to `counts`.

        Args:
            index: of the chunk, counted from zero.
            chunks: their number in a pass.
        """

        def until(count: int, offset: int, chunk: int) -> int:
            return (chunk * count + offset) // chunks

        return [
            until(n, o, index + 1) - until(n, o, index)
            for n, o in zip(self.counts, self.offsets, strict=True)
        ]


def learn_from_samples(
    surrogates: Sequence[Surrogate],
    settings: HeadSettings,
    seed: int,
    classes: Sequence[str] = (),
    device: str = "cpu",
) -> Head:
    """Train one linear head on samples from all surrogates, one sample per record of each site and
    class.

    Every pass draws new samples. Memory does not grow with their number.

    Args:
        surrogates: of the sites, with features of the same dimension.
        settings: of the training.
        seed: of all random streams.
        classes: of the head, in its order; if empty, all classes that occur.
        device: on which the samples are drawn.
    """
    names = tuple(classes) or class_order(surrogates)
    check_class_number(names)
    rows = POOL_BYTES // (4 * surrogates[0].mixtures.means.shape[1])
    shares = _shares(surrogates, names, seed, settings.max_samples, device)
    mean, variance = _moments([share.mixtures for share in shares])
    total = sum(sum(share.counts) for share in shares)
    chunks = -(-total // max(1, rows))
    per_pass = sum(
        -(-sum(sum(share.chunk(index, chunks)) for share in shares) // settings.batch_size)
        for index in range(chunks)
    )
    few_columns = min(MORE_STEPS, max(1, MANY_COLUMNS // len(mean)))
    passes = settings.passes(per_pass, few_columns)
    batches = _batches(shares, chunks, passes, settings.batch_size, stream(seed, "", "order"))
    weight, bias = train_head(batches, passes * per_pass, mean, variance, len(names), settings)
    first = surrogates[0].header
    return Head(replace(first, site="coordinator", classes=names), weight.cpu(), bias.cpu())


def sample(surrogates: Sequence[Surrogate], classes: Sequence[str], seed: int, limit: int) -> Batch:
    """Draw features at once, for figures.

    Args:
        surrogates: of the sites.
        classes: of the labels, which hold all of the sites'.
        seed: of all random streams.
        limit: at most about so many features.

    Returns:
        Features (n, d), and labels (n,): indices into `classes`.
    """
    shares = _shares(surrogates, tuple(classes), seed, limit, "cpu")
    return _draw(shares, 0, 1)


def _shares(
    surrogates: Sequence[Surrogate], classes: tuple[str, ...], seed: int, limit: int, device: str
) -> list[Share]:
    total = sum(int(s.mixtures.counts.sum()) for s in surrogates)
    factor = min(1.0, limit / total)
    shares = []
    for surrogate in surrogates:
        site, names, mixtures = surrogate.header.site, surrogate.header.classes, surrogate.mixtures
        counts = [max(1, round(count * factor)) for count in mixtures.counts.tolist()]
        # Each stream has its own rounding offset, so that no chunk gets all remainders.
        offsets = [
            int.from_bytes(hashlib.sha256(f"{site}\0{name}".encode()).digest()[:4], "little")
            for name in names
        ]
        indices = torch.tensor([classes.index(name) for name in names], device=device)
        streams = [stream(seed, site, name) for name in names]
        shares.append(Share(mixtures.to(device), counts, streams, indices, offsets))
    return shares


def _moments(tables: Sequence[Mixtures]) -> tuple[Tensor, Tensor]:
    """Mean and variance of every dimension over all sites, in closed form: (d,) and (d,)."""
    sizes = [float(table.counts.sum()) for table in tables]
    moments = [table.moments() for table in tables]
    total = sum(sizes)
    mean = sum(
        (size / total * m for size, (m, _) in zip(sizes, moments, strict=True)),
        torch.zeros_like(moments[0][0]),
    )
    variance = sum(
        (
            size / total * (v + (m - mean).square())
            for size, (m, v) in zip(sizes, moments, strict=True)
        ),
        torch.zeros_like(mean),
    )
    return mean, variance


def _draw(shares: Sequence[Share], index: int, chunks: int) -> Batch:
    drawn = [
        (share, *share.mixtures.draw(share.chunk(index, chunks), share.streams)) for share in shares
    ]
    return torch.cat([x for _, x, _ in drawn]), torch.cat(
        [share.classes[y] for share, _, y in drawn]
    )


def _batches(
    shares: Sequence[Share], chunks: int, passes: int, size: int, generator: torch.Generator
) -> Iterator[Batch]:
    for start in range(0, passes, SWEEPS):
        for index in torch.randperm(chunks, generator=generator).tolist():
            features, labels = _draw(shares, index, chunks)
            for _ in range(min(SWEEPS, passes - start)):
                yield from shuffled_batches(features, labels, size, generator)

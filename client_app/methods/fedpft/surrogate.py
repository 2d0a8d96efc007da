"""FedPFT at a site: from features to mixtures or, under differential privacy, to noisy class sums, DP-EM,
or the paper's theorem 4.1 as a baseline. It also runs in a notebook; Flower is not needed. And FedPFT from
site to site: a site fits received samples and its own features together and passes on the surrogate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedsurrogate.common.errors import ConfigError, DataError, SurrogateError
from fedsurrogate.common.logs import counted
from fedsurrogate.common.methods.fedpft import AUTO_BITS, AUTO_RANK, Form, form_of, in_form
from fedsurrogate.common.models.classifiers import Head, class_indices, one_thread
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.privacy.exact_sums import COARSE, ExactSum, IntegerSum, toward_zero
from fedsurrogate.common.privacy.gaussian_mechanism import (
    BoundedSum,
    Noisy,
    clip,
    weigh_mean_over_columns,
    with_noise,
)
from fedsurrogate.common.privacy.mechanism import Mechanism, check_stated
from fedsurrogate.common.privacy.shares import ALL, EM_STEPS
from fedsurrogate.common.settings import FedPFTSettings
from fedsurrogate.common.surrogates.class_sums import Sums, as_mixtures, statistics
from fedsurrogate.common.surrogates.covariances import Diagonal, Full, Spherical, eigen
from fedsurrogate.common.surrogates.mixtures import (
    Mixtures,
    MixtureSettings,
    PublicMap,
    fit,
    fit_streamed,
)
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, Header, SumsSurrogate, Surrogate
from fedsurrogate.common.wire.model_proto import pack_relay, unpack_relay
from fedsurrogate.common.wire.records import pack_surrogate, unpack_public_mean, unpack_surrogate
from fedsurrogate.common.wire.surrogate_proto import centre_digest
from fedsurrogate.common.wire.tensors import Expectation, check_surrogate

from ...features.extraction import forget
from ...features.site_features import framed, site_device
from ...governance.work_limits import SiteLimits
from ..dp.record_gradients import per_record
from ..evaluation import pass_on
from ..job import Clipped, Job, MethodOutput


def make_surrogate(
    job: Job, centre: Tensor | None = None, frame: bytes = b""
) -> tuple[AnySurrogate, dict[str, float]]:
    """Make the surrogate that this site releases.

    Without a privacy budget: mixtures for the site's classes; the coordinator sees which classes
    these are and their counts. With one: the mechanism of the run's plan; the claim in the surrogate
    states what it protects.

    Args:
        job: the request, with the site's records and limits.
        centre: a public point, (d,), subtracted before a privacy clip.
        frame: of the columns, in which the features are; empty for features as they are.

    Returns:
        The surrogate, and facts that stay at the site.

    Raises:
        DataError: when no class is large enough.
        SurrogateError: for a centre of another dimension.
        ConfigError: for theorem-4.1 at a site that protects patients.

    Source: FedPFT, algorithm 1, lines 1 to 8.
    """
    train, own, limits = job.found.train, job.run.settings.fedpft, job.limits
    features, labels, count = train.features, train.labels, len(job.found.classes)
    generator, columns = stream(job.run.settings.seed, job.site), features.shape[1]
    header, public = job.header(job.found.classes, frame), PublicMap(centre=centre).apply
    public(features[:0])
    weight = job.run.plan.mean_over_columns_weight(columns)
    claim = job.mechanism(job.run.plan.subtracted(columns, centre_digest(centre)))
    if claim is not None and claim.name in ("sums", "dp-em"):
        change = public if weight == ALL else partial(weigh_mean_over_columns, weight=weight)
        clipped = Clipped.of(train, claim.clip, change)
        if claim.name == "sums":
            sums, facts = noisy_sums(clipped, count, own.covariance, claim)
            return SumsSurrogate(header, sums, claim), facts
        mixtures, facts = dp_em(clipped, count, own.components, claim, generator)
        return _present(header, mixtures, claim), facts
    own = _own_settings(own, form_of(job.run.settings, columns), limits)
    large = torch.bincount(labels, minlength=count)[labels] >= limits.smallest_class
    if not large.any():
        raise DataError(
            f"no class has the {limits.smallest_class} records that smallest-class requires for a "
            "release"
        )
    if claim is not None:
        chosen = replace(train, features=features[large], labels=labels[large])
        clipped = Clipped.of(chosen, claim.clip, public)
        mixtures, facts = theorem_4_1(clipped, count, own.covariance, claim)
        return _present(header, mixtures, claim), facts
    if train.folder is not None:
        labels = torch.where(large, labels, -1)
        return _streamed(features, labels, header, own, limits, generator), {}
    return release_mixtures(features[large], labels[large], header, own, limits, generator), {}


def _own_settings(own: FedPFTSettings, form: Form, limits: SiteLimits) -> FedPFTSettings:
    """The settings of FedPFT with a covariance in place of "auto".

    Args:
        own: of the run.
        form: of its covariance, for the site's features.
        limits: that the site sets itself: with a largest rank, it sends a thin covariance.
    """
    if own.covariance != "auto":
        return own
    if limits.rank and form.family == "gram":
        form = replace(form, family="lowrank", rank=AUTO_RANK)
    return in_form(own, form)


def release_mixtures(
    features: Tensor,
    labels: Tensor,
    header: Header,
    own: FedPFTSettings,
    limits: SiteLimits,
    generator: torch.Generator,
    draws: int = 1,
) -> Surrogate:
    """Mixtures of features; empty classes are left out.

    Args:
        features: of the records, (n, d).
        labels: indices into the header's classes, (n,).
        header: of the surrogate.
        own: settings of the run.
        limits: that the site sets itself.
        generator: of the fit.
        draws: the number of rows in `features` for each record, copies or samples; counts and the
            number of components follow from the number of records.
    """
    settings = _settings(own, limits, draws)
    # Sums then do not depend on the machine's load, and simulated sites do not compete for cores.
    with one_thread():
        mixtures = fit(features.float(), labels, len(header.classes), settings, generator).to("cpu")
    counts = (mixtures.counts.double() / draws).round().long()
    return _present(header, replace(mixtures, counts=counts), None)


def _settings(own: FedPFTSettings, limits: SiteLimits, draws: int = 1) -> MixtureSettings:
    return MixtureSettings(
        family=own.covariance,
        components=min(own.components, limits.components or own.components),
        rank=min(own.rank, limits.rank or own.rank),
        samples_per_component=own.samples_per_component * draws,
    )


def _streamed(
    features: Tensor,
    labels: Tensor,
    header: Header,
    own: FedPFTSettings,
    limits: SiteLimits,
    generator: torch.Generator,
) -> Surrogate:
    """As `release_mixtures`, of features (n, d) in a file; records with the label -1 are left out."""
    settings, count = _settings(own, limits), len(labels)
    passes = 2 if settings.components == 1 else 1
    with one_thread(), counted(header.site, passes * count) as advance:

        def done(count: int) -> None:
            advance(count)
            forget(features)

        mixtures = fit_streamed(features, labels, len(header.classes), settings, generator, done)
    return _present(header, mixtures, None)


def _present(header: Header, mixtures: Mixtures, claim: Mechanism | None) -> Surrogate:
    """A surrogate of the classes that have a component; the others are left out."""
    present = torch.bincount(mixtures.labels, minlength=len(mixtures.counts)).nonzero().squeeze(1)
    names = tuple(header.classes[i] for i in present.tolist())
    header = replace(header, classes=names)
    labels = torch.searchsorted(present, mixtures.labels)
    counts = mixtures.counts[present].clamp_min(1)
    fitted = mixtures.weights, mixtures.means, mixtures.covariance
    return Surrogate(header, Mixtures(counts, labels, *fitted), claim)


def fedpft_surrogate(job: Job) -> MethodOutput:
    """FedPFT's mixtures or noisy sums of this site's features."""
    train = job.found.train
    centre = job.agreed(PublicMap(centre=unpack_public_mean(job.payload))).centre
    frame = job.own_frame(job.found.classes) if job.run.frames else job.public_frame
    features = framed(train.features, frame, train.folder)
    if train.folder is None:
        features = features.to(site_device(job.run.settings.device, job.node))
    found = replace(job.found, train=replace(train, features=features))
    made, facts = make_surrogate(replace(job, found=found), centre, frame)
    payload = pack_surrogate(made, job.run.settings.fedpft.bits or AUTO_BITS)
    return MethodOutput(payload, made.claim, facts)


# Lower bound of variances, which noise may make negative; features have norm at most one.
SMALLEST_VARIANCE = 1e-8
# Number of chunks of records whose responsibilities are in memory at a time.
CHUNKS = 7


def noisy_sums(
    data: Clipped, num_classes: int, family: str, claim: Mechanism
) -> tuple[Sums, dict[str, float]]:
    """The noisy sums that a site releases, for all classes of the run.

    Args:
        data: clipped features.
        num_classes: C.
        family: of covariances.
        claim: whose noise is added.

    Returns:
        The sums, and facts that stay at the site.
    """
    sums = statistics(data.features, data.labels, data.weights, num_classes, family, *data.done)
    released = with_noise(sums, claim)
    return Sums.of(released), _facts(data, released)


def dp_em(
    data: Clipped, num_classes: int, components: int, claim: Mechanism, generator: torch.Generator
) -> tuple[Mixtures, dict[str, float]]:
    """Spherical mixtures by EM in which every M-step uses only noisy sums.

    The responsibilities of a record are non-negative and sum to one. So one record changes sizes
    and sums of all components by at most one, as it does class counts and sums. The claim's budget
    is split evenly over the `EM_STEPS` releases of these statistics. Variances cost nothing,
    because features have unit norm. Components start around the noisy class mean in random
    directions.

    Args:
        data: clipped features.
        num_classes: C.
        components: of each class.
        claim: whose noise is added in every step.
        generator: of the directions, public.

    Returns:
        The mixtures, and facts that stay at the site.

    Source: DP-EM (Park et al. 2017), algorithm 1.
    """
    d = data.features.shape[1]
    means = data.features.new_zeros(num_classes, 1, d)
    sizes = data.features.new_ones(num_classes, 1)
    variances = data.features.new_ones(num_classes)
    for step in range(EM_STEPS):
        k = means.shape[1]
        expected_sizes, expected_sums = _expected(data, means, sizes, variances)
        counts, sums = with_noise(
            [BoundedSum("counts", expected_sizes, 1.0), BoundedSum("sums", expected_sums, 1.0)],
            claim,
        )
        raw_sizes = counts.value.reshape(num_classes, k)
        sizes = raw_sizes.clamp_min(1.0)
        trusted = raw_sizes > 2 * counts.sigma
        noisy_means = sums.value.reshape(num_classes, k, d) / sizes[:, :, None]
        # The expected contribution of the noise to a mean's square is known, and subtracted.
        energy = (noisy_means.square().sum(2) - d * (sums.sigma / sizes).square()).clamp(0, 1)
        means = torch.where(trusted[:, :, None] | (step == 0), noisy_means, means)
        proportions = torch.where(trusted, sizes, torch.zeros_like(sizes))
        proportions = proportions / proportions.sum(1, keepdim=True).clamp_min(1.0)
        variances = ((1 - (proportions * energy).sum(1)) / d).clamp_min(SMALLEST_VARIANCE)
        if step == 0:
            spread = variances.sqrt()[:, None, None]
            means = means + spread * torch.randn(
                num_classes, components, d, generator=generator, dtype=torch.float64
            )
            sizes = sizes.expand(num_classes, components)
    kept = proportions > 0
    if not kept.any():
        # "No component exceeds the noise" would be one more release, so the largest component
        # leaves, noisy as it is.
        kept = raw_sizes == raw_sizes.max()
        proportions = kept.double()
    labels = kept.nonzero()[:, 0]
    rounded = torch.where(kept, sizes, 0.0).sum(1).round().long()
    # A class whose noisy size does not exceed the noise gets no component and a count of zero.
    round_ones = Spherical(variances[labels].float())
    mixtures = Mixtures(rounded, labels, proportions[kept].float(), means[kept].float(), round_ones)
    return mixtures, _facts(data, [counts, sums])


def theorem_4_1(
    data: Clipped, num_classes: int, family: str, claim: Mechanism
) -> tuple[Mixtures, dict[str, float]]:
    """The paper's mechanism as published: noise of theorem 4.1 on each class's mean and covariance.

    There is no noise on n. Every entry of mean and covariance gets noise (4 / (n epsilon)) sqrt(5
    ln(4 / delta)); the covariance is made symmetric and projected to positive semi-definite. Kept
    for comparison: it protects neither class sizes nor which classes a site has.

    Args:
        data: clipped features.
        num_classes: C.
        family: of covariances.
        claim: its epsilon and delta are used.

    Returns:
        The mixtures, and facts that stay at the site.

    Raises:
        ConfigError: at a site that protects patients, which the theorem does not cover.

    Source: FedPFT, theorem 4.1.
    """
    if bool((data.weights < 1).any()) or claim.unit == "patient":
        raise ConfigError(
            'theorem-4.1 protects single records, but this site protects patients; set unit = "record" in the node-config '
            "if that is enough, or use fedpft.privacy = 'sums'"
        )
    means, tables, counts = [], [], torch.bincount(data.labels, minlength=num_classes)
    # Of a class's sums, which are n times its mean and covariance.
    sigma = 4 / claim.epsilon * math.sqrt(5 * math.log(4 / claim.delta))
    for label in counts.nonzero().flatten().tolist():
        points = toward_zero(data.features[data.labels == label].double(), COARSE)
        total = ExactSum(points.shape[1:], 1.0)
        total.add(points)
        means.append(BoundedSum("means", total.total, 2.0).noisy(sigma).value / len(points))
        tables.append(_noisy_covariance(points, total.value, family, sigma))
    present = counts.nonzero().flatten()
    ones = torch.ones(len(present))
    families: dict[str, type[Diagonal] | type[Full] | type[Spherical]] = {
        "diag": Diagonal,
        "full": Full,
        "spherical": Spherical,
    }
    covariance = families[family](torch.stack(tables))
    return Mixtures(counts, present, ones, torch.stack(means).float(), covariance), {
        "clip-fraction": data.clip_fraction
    }


def _noisy_covariance(points: Tensor, total: Tensor, family: str, sigma: float) -> Tensor:
    """A class's noisy covariance: variances, or for "full" the Cholesky factor (d, d).

    Args:
        points: (n, d), multiples of COARSE.
        total: their sum (d,).
        family: of covariances.
        sigma: of the noise on n times the covariance.
    """
    n, d = points.shape
    moment = ExactSum((d, d) if family == "full" else (d,), 1.0)
    rows, columns = torch.triu_indices(d, d)
    if family == "full":
        moment.add_products(points, points)
        scatter = (moment.value - torch.outer(total, total) / n)[rows, columns]
    else:
        moment.add(points.square())
        scatter = moment.value - total.square() / n
    if family == "spherical":
        scatter = scatter.mean(0, keepdim=True)
    whole = IntegerSum.of(scatter, 4.0)
    # An entry is rounded to a step, and before that in double precision, by less than n 2^-50.
    rounding = math.sqrt(len(scatter)) * (whole.step + n * 2.0**-50)
    noisy = BoundedSum("covariances", whole, 4.0).noisy(sigma, rounding).value / n
    if family == "full":
        matrix = torch.zeros(d, d, dtype=torch.float64)
        matrix[rows, columns] = matrix[columns, rows] = noisy
        values, vectors = eigen(matrix)
        root = vectors * values.clamp_min(SMALLEST_VARIANCE).sqrt()
        # R of a QR decomposition of the transposed root is the covariance's Cholesky factor, up to
        # signs.
        factor: Tensor = torch.linalg.qr(root.T).R.T
        return factor * factor.diagonal().sign()
    variances = noisy[0] if family == "spherical" else noisy
    return variances.clamp_min(SMALLEST_VARIANCE).float()


def _expected(
    data: Clipped, means: Tensor, sizes: Tensor, variances: Tensor
) -> tuple[IntegerSum, IntegerSum]:
    """E-step: sizes (C K,) and sums (C K, d) of all components; a record counts only in its own
    class.

    Memory grows with the records of one class and with C K d, not with their product.
    """
    classes, k, d = means.shape
    counts, sums = ([ExactSum(shape, 1.0) for _ in range(classes)] for shape in ((k,), (k, d)))
    for label in sorted(set(data.labels.tolist())):
        rows = data.labels == label
        centres, variance = means[label].clone(), variances[label]
        # The square of the record itself is the same for all components.
        offsets = sizes[label].log() - 0.5 * means[label].square().sum(1) / variance

        def shares(
            features: Tensor,
            weights: Tensor,
            centres: Tensor = centres,
            offsets: Tensor = offsets,
            variance: Tensor = variance,
        ) -> list[Tensor]:
            # The products are a result too: with small variances, shares of zero and one would hide
            # their last digits from the test of places.
            products = torch.nn.functional.linear(features, centres)
            shares = (offsets + products / variance).softmax(1) * weights[:, None]
            return [shares, features, weights, products]

        for mine, features, own, _ in per_record(
            shares, (data.features[rows], data.weights[rows]), "shares", [centres], CHUNKS
        ):
            counts[label].add(mine, own)
            sums[label].add_products(mine, features, weights=own)
    return (
        IntegerSum.joined([each.total for each in counts]),
        IntegerSum.joined([each.total for each in sums]).map(lambda rows: rows.reshape(-1, d)),
    )


def _facts(data: Clipped, released: Sequence[Noisy]) -> dict[str, float]:
    """Facts for the site's own use: the share of clipped features, and the signal-to-noise ratio of
    each statistic.
    """
    return {"clip-fraction": data.clip_fraction} | {
        f"signal-to-noise-{noisy.name}": noisy.signal_to_noise() for noisy in released
    }


LARGEST_CHAIN = 1000
# While records are few, each is drawn up to MOST_DRAWS times, and the site's own records are
# repeated as often. One draw a record, as published, adds sampling noise at every step of the
# chain. This gains 4 points of accuracy in a chain of five sites with 100 records each
# (benchmarks/reproduce/fedpft_figure6.py).
MOST_DRAWS, ENOUGH_SAMPLES = 10, 20_000


def extend_chain(job: Job) -> MethodOutput:
    """The chain message that this site passes on. Raises as `extend` and `pass_on`."""
    return pass_on(job, extend)


def extend(job: Job) -> tuple[MethodOutput, Head]:
    """The chain message that this site passes on, and its own head.

    The head is trained on the site's features and on samples of received surrogates. Without a
    privacy budget the site passes on one surrogate of the union; counts add up along the chain.
    With a budget it appends its own noisy sums to those received. Nothing is fitted again: each
    site keeps its own privacy guarantee, and refitting costs no accuracy.

    Args:
        job: the request, with the received chain message.

    Raises:
        SurrogateError: for a chain message that fails the coordinator's checks.
        DataError: if no training record is left.
        ConfigError: as `make_surrogate`.

    Source: FedPFT, section 4.2. Differs from the paper: more than one sample a record, see
    MOST_DRAWS.
    """
    received, settings = _received(job), job.run.settings
    names = _names(job.classes, received)
    features, labels = job.training_data(names)
    total = len(labels) + sum(sum(each.counts) for each in received)
    draws = max(1, min(MOST_DRAWS, ENOUGH_SAMPLES // max(1, total)))
    mean_over_columns = job.run.plan.mean_over_columns_weight(features.shape[1])
    if settings.epsilon:
        # Noisy sums are sums of clipped features, so the head is trained on clipped features too.
        features = weigh_mean_over_columns(features, mean_over_columns)
        features = clip(features, settings.fedpft.clip)[0].float()
    drawn = [_draw(settings.seed, surrogate, names, draws) for surrogate in received]
    union = (
        torch.cat([features.repeat(draws, 1), *(x for x, _ in drawn)]),
        torch.cat([labels.repeat(draws), *(y for _, y in drawn)]),
    )
    facts: dict[str, float] = {}
    if settings.epsilon:
        made, facts = make_surrogate(job)
    else:
        generator = stream(settings.seed, "chain", job.site, "")
        own = settings.fedpft
        made = release_mixtures(*union, job.header(names), own, job.limits, generator, draws)
        # It stands for all before it.
        received = []
    claim = made.claim
    weight, bias = train_on_features(*union, len(names), settings.head, settings.seed)
    clipped = claim.clip if claim else None
    head = Head(job.header(names), weight, bias, clipped, mean_over_columns=mean_over_columns)
    message = pack_relay([pack_surrogate(each, settings.fedpft.bits) for each in (*received, made)])
    return MethodOutput(message, claim, facts), head


def _received(job: Job) -> list[AnySurrogate]:
    """The received surrogates, after the same checks as at the coordinator."""
    if job.payload is None:
        return []
    payloads = unpack_relay(job.payload)
    run, site_features = job.run, job.found
    if not 1 <= len(payloads) <= (LARGEST_CHAIN if run.settings.epsilon else 1):
        raise SurrogateError(f"a chain message of {len(payloads)} surrogates")
    surrogates = [unpack_surrogate(payload) for payload in payloads]
    if (total := sum(sum(each.counts) for each in surrogates)) > run.settings.head.max_samples:
        raise SurrogateError(
            f"a chain message for {total} records, more than head.max-samples = "
            f"{run.settings.head.max_samples}"
        )
    place = Expectation.of(
        run, run.settings.classes, site_features.fingerprint, site_features.train.features.shape[1]
    )
    for surrogate in surrogates:
        check_surrogate(surrogate, place)
        subtracted = run.plan.subtracted(surrogate.dimension)
        check_stated(surrogate.claim, run.mechanism_for("record", subtracted))
    return surrogates


def _names(own: tuple[str, ...], received: list[AnySurrogate]) -> tuple[str, ...]:
    """This site's classes, then those that only other sites have."""
    names = list(own)
    for surrogate in received:
        names += [name for name in surrogate.header.classes if name not in names]
    return tuple(names)


def _draw(
    seed: int, surrogate: AnySurrogate, names: tuple[str, ...], draws: int
) -> tuple[Tensor, Tensor]:
    """Sampled features (n, d) and labels (n,), indices into `names`: `draws` times the count of
    each class.
    """
    if isinstance(surrogate, SumsSurrogate):
        table, classes = as_mixtures(surrogate.sums), surrogate.header.classes
        if table is None:
            return torch.zeros(0, surrogate.dimension), torch.zeros(0, dtype=torch.int64)
        mixtures, kept = table
        classes = tuple(classes[index] for index in kept)
    else:
        mixtures, classes = surrogate.mixtures, surrogate.header.classes
    streams = [stream(seed, "chain", surrogate.header.site, name) for name in classes]
    features, labels = mixtures.draw([draws * int(count) for count in mixtures.counts], streams)
    return features.float(), class_indices(names, classes)[labels]

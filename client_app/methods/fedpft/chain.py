"""FedPFT from site to site: a site fits received samples and its own features together and passes
on the surrogate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head, class_indices
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.privacy.gaussian_mechanism import clip, weigh_mean_over_columns
from fedsurrogate.common.privacy.mechanism import check_stated
from fedsurrogate.common.surrogates.class_sums import as_mixtures
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate
from fedsurrogate.common.wire.model_proto import pack_relay, unpack_relay
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from fedsurrogate.common.wire.tensors import Expectation, check_surrogate

from ..evaluation import pass_on
from ..job import Job, MethodOutput
from . import surrogate as fedpft

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
    received = _received(job)
    names = _names(job.classes, received)
    features, labels = job.training_data(names)
    draws = max(
        1,
        min(
            MOST_DRAWS,
            ENOUGH_SAMPLES // max(1, len(labels) + sum(sum(each.counts) for each in received)),
        ),
    )
    mean_over_columns = job.run.plan.mean_over_columns_weight(features.shape[1])
    if job.run.settings.epsilon:
        # Noisy sums are sums of clipped features, so the head is trained on clipped features too.
        features = weigh_mean_over_columns(features, mean_over_columns)
        features = clip(features, job.run.settings.fedpft.clip)[0].float()
    drawn = [_draw(job.run.settings.seed, surrogate, names, draws) for surrogate in received]
    union = (
        torch.cat([features.repeat(draws, 1), *(x for x, _ in drawn)]),
        torch.cat([labels.repeat(draws), *(y for _, y in drawn)]),
    )
    facts: dict[str, float] = {}
    if job.run.settings.epsilon:
        made, facts = fedpft.make_surrogate(job)
    else:
        generator, own = (
            stream(job.run.settings.seed, "chain", job.site, ""),
            job.run.settings.fedpft,
        )
        made = fedpft.release_mixtures(*union, job.header(names), own, job.limits, generator, draws)
        # It stands for all before it.
        received = []
    claim = made.claim
    weight, bias = train_on_features(
        *union, len(names), job.run.settings.head, job.run.settings.seed
    )
    clipped = claim.clip if claim else None
    head = Head(job.header(names), weight, bias, clipped, mean_over_columns=mean_over_columns)
    return MethodOutput(
        pack_relay(
            [pack_surrogate(each, job.run.settings.fedpft.bits) for each in (*received, made)]
        ),
        claim,
        facts,
    ), head


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

"""FedPFT at a site: from features to mixtures or noisy sums. It also runs in a notebook; Flower is
not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedsurrogate.client_app.features.columns import frame_of, framed
from fedsurrogate.client_app.features.on_disk import forget
from fedsurrogate.client_app.features.progress import progress
from fedsurrogate.client_app.features.site_features import SiteFeatures, site_device
from fedsurrogate.client_app.governance.site_limits import NO_LIMITS, SiteLimits
from fedsurrogate.client_app.methods.fedpft.private_surrogate import (
    Clipped,
    dp_em,
    less,
    noisy_sums,
    theorem_4_1,
)
from fedsurrogate.client_app.methods.task import MethodOutput, Task
from fedsurrogate.common.errors import DataError, SurrogateError
from fedsurrogate.common.methods.fedpft_covariance import (
    AUTO_BITS,
    AUTO_RANK,
    Form,
    form_of,
    in_form,
)
from fedsurrogate.common.privacy.gaussian_mechanism import weigh_own_mean
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.privacy.own_mean import ALL
from fedsurrogate.common.randomness import stream
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import FedPFTSettings
from fedsurrogate.common.surrogates.mixtures import Mixtures, MixtureSettings, fit
from fedsurrogate.common.surrogates.public_map import PublicMap
from fedsurrogate.common.surrogates.streamed_fit import PASSES, fit_streamed
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, Header, SumsSurrogate, Surrogate
from fedsurrogate.common.wire.records import pack_surrogate, unpack_question
from fedsurrogate.common.wire.surrogate_proto import centre_digest


@dataclass(frozen=True)
class FittedSurrogate:
    """A surrogate, and facts about it.

    Attributes:
        surrogate: to be released.
        facts: stay at the site.
    """

    surrogate: AnySurrogate
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteData:
    """Input of a surrogate.

    Attributes:
        features: of the records, (n, d).
        labels: indices into `classes`, (n,).
        classes: names of C classes.
        fingerprint: of the backbone.
        site: its name in the run.
        units: the patient of each record, (n,), if the site protects patients.
        folder: where features are, mapped from a file, if memory is not to hold all of them.
        frame: of the columns, in which the features are; empty for features as they are.
    """

    features: Tensor
    labels: Tensor
    classes: Sequence[str]
    fingerprint: str
    site: str
    units: Sequence[str] | None = None
    folder: Path | None = None
    frame: bytes = b""

    @classmethod
    def of(cls, site_features: SiteFeatures, site: str) -> SiteData:
        """The training records of a site of this name."""
        train = site_features.train
        return cls(
            train.features,
            train.labels,
            site_features.classes,
            site_features.fingerprint,
            site,
            train.units,
            train.folder,
        )

    def in_own_frame(self, smallest_class: int) -> SiteData:
        """The same in a frame of the site's own, if a column needs one.

        Args:
            smallest_class: records of smaller classes do not leave the site, nor change the frame.
        """
        large = torch.bincount(self.labels)[self.labels] >= smallest_class
        if (frame := frame_of(self.features if large.all() else self.features[large])) is None:
            return self
        packed = frame.packed()
        return replace(self, features=framed(self.features, packed, self.folder), frame=packed)


def make_surrogate(
    data: SiteData, config: Run, limits: SiteLimits = NO_LIMITS, centre: Tensor | None = None
) -> FittedSurrogate:
    """Make the surrogate that this site releases.

    Without a privacy budget: mixtures for the site's classes; the coordinator sees which classes
    these are and their counts. With one: the mechanism `config.plan.mechanism_name`; the claim in
    the surrogate states what it protects.

    Args:
        data: of the site.
        config: the run.
        limits: that the site sets itself.
        centre: a public point, (d,), subtracted before a privacy clip.

    Raises:
        DataError: when no class is large enough.
        SurrogateError: for a centre of another dimension.
        ConfigError: for theorem-4.1 at a site that protects patients.

    Source: FedPFT, algorithm 1, lines 1 to 8.
    """
    features, labels, units, count = data.features, data.labels, data.units, len(data.classes)
    generator = stream(config.settings.seed, data.site)
    names = tuple(data.classes)
    header = Header(
        config.settings.method, config.digest, data.site, data.fingerprint, names, data.frame
    )
    if centre is not None and len(centre) != features.shape[1]:
        raise SurrogateError(
            f"a public centre of dimension {len(centre)}, features here have {features.shape[1]}"
        )
    weight = config.plan.own_mean_weight(features.shape[1])
    subtracted = config.plan.subtracted(features.shape[1], centre_digest(centre))
    claim = config.mechanism_for("record" if units is None else "patient", subtracted)
    if claim is not None and claim.name in ("sums", "dp-em"):
        change = less(centre) if weight == ALL else partial(weigh_own_mean, weight=weight)
        clipped = Clipped.of(features, labels, units, claim.clip, change, data.folder)
        if claim.name == "sums":
            sums, facts = noisy_sums(clipped, count, config.settings.fedpft.covariance, claim)
            return FittedSurrogate(SumsSurrogate(header, sums, claim), facts)
        mixtures, facts = dp_em(clipped, count, config.settings.fedpft.components, claim, generator)
        return FittedSurrogate(_present(header, mixtures, claim), facts)
    form = form_of(config.settings, features.shape[1])
    own = _own_settings(config.settings.fedpft, form, limits)
    large = torch.bincount(labels, minlength=count)[labels] >= limits.smallest_class
    if not large.any():
        raise DataError(
            f"no class has the {limits.smallest_class} records that smallest-class requires for a "
            "release"
        )
    if data.folder is not None and claim is None:
        return FittedSurrogate(
            _streamed(
                features,
                torch.where(large, labels, -1),
                header,
                own,
                limits,
                generator,
            )
        )
    features, labels = features[large], labels[large]
    if claim is not None:
        clipped = Clipped.of(features, labels, units, claim.clip, less(centre), data.folder)
        mixtures, facts = theorem_4_1(clipped, count, own.covariance, claim)
        return FittedSurrogate(_present(header, mixtures, claim), facts)
    return FittedSurrogate(release_mixtures(features, labels, header, own, limits, generator))


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
    mixtures = _fit(features, labels, len(header.classes), settings, generator).to("cpu")
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
    settings, threads = _settings(own, limits), torch.get_num_threads()
    passes = 2 if settings.components == 1 else 1 + PASSES
    torch.set_num_threads(1)
    try:
        with progress(header.site, passes * len(labels), what="records") as advance:

            def done(count: int) -> None:
                advance(count)
                forget(features)

            mixtures = fit_streamed(
                features, labels, len(header.classes), settings, generator, done
            )
    finally:
        torch.set_num_threads(threads)
    return _present(header, mixtures, None)


def _present(header: Header, mixtures: Mixtures, claim: Mechanism | None) -> Surrogate:
    """A surrogate of the classes that have a component; the others are left out."""
    present = torch.bincount(mixtures.labels, minlength=len(mixtures.counts)).nonzero().squeeze(1)
    names = tuple(header.classes[i] for i in present.tolist())
    header = replace(header, classes=names)
    labels = torch.searchsorted(present, mixtures.labels)
    counts = mixtures.counts[present].clamp_min(1)
    return Surrogate(
        header,
        Mixtures(counts, labels, mixtures.weights, mixtures.means, mixtures.covariance),
        claim,
    )


def _fit(
    features: Tensor,
    labels: Tensor,
    classes: int,
    settings: MixtureSettings,
    generator: torch.Generator,
) -> Mixtures:
    """Fit on one thread: sums then do not depend on the machine's load, and simulated sites do not
    compete for cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return fit(features.float(), labels, classes, settings, generator)
    finally:
        torch.set_num_threads(threads)


def fedpft_surrogate(task: Task) -> MethodOutput:
    """FedPFT's mixtures or noisy sums of this site's features."""
    data = SiteData.of(task.found, task.site)
    centre = task.agreed(PublicMap(centre=unpack_question(task.payload))).centre
    if task.run.frames:
        data = data.in_own_frame(task.limits.smallest_class)
    elif frame := task.public_frame:
        data = replace(data, features=framed(data.features, frame, data.folder), frame=frame)
    if data.folder is None:
        data = replace(
            data, features=data.features.to(site_device(task.run.settings.device, task.node))
        )
    made = make_surrogate(data, task.run, task.limits, centre)
    claim = made.surrogate.claim
    return MethodOutput(
        pack_surrogate(made.surrogate, task.run.settings.fedpft.bits or AUTO_BITS),
        claim,
        made.facts,
    )

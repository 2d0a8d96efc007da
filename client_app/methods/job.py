"""A request to a site, and the output that a method makes for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fedsurrogate.common.backbones.backbone_names import shown
from fedsurrogate.common.errors import (
    LOG,
    DataError,
    PolicyError,
    SurrogateError,
    largest_parameter,
)
from fedsurrogate.common.models.classifiers import class_indices
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.accounting import Unit
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, unit_weights
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.target import Target
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.common.wire.records import Info
from fedsurrogate.common.wire.surrogate_proto import public_digest

from ..features.extraction import chunks, clipped_features, forget, written
from ..features.site_features import LabelledFeatures, SiteFeatures, frame_of, framed
from ..governance.work_limits import NO_LIMITS, SiteLimits
from ..node_config import NodeConfig


@dataclass(frozen=True)
class SiteRequest:
    """One request to a site, over the network or by file.

    Attributes:
        run: its settings and method.
        node: the site's settings.
        site: name of the site.
        flower_run: id of the run; the ledger counts by it.
        payload: received; None if the request has none.
        info: numbers received.
    """

    run: Run
    node: NodeConfig
    site: str
    _: KW_ONLY
    flower_run: str = ""
    payload: bytes | None = None
    info: Mapping[str, object] = field(default_factory=dict)

    def job(self, found: SiteFeatures, limits: SiteLimits = NO_LIMITS) -> Job:
        """The request with the site's features, and the limits that the site sets itself."""
        return Job(**vars(self), found=found, limits=limits)

    def check_run(self) -> None:
        """Raise SurrogateError unless the request names the run of its settings."""
        if self.info.get("run") != self.run.digest:
            raise SurrogateError(
                f"a request for run {self.info.get('run')!r}, but these settings are run "
                f"{self.run.digest!r}"
            )

    @property
    def round(self) -> int:
        """The number of the round, from one.

        Raises SurrogateError for a number below one. The ledger's round 0 is what a site reports
        before, and may report again: as round 0 a proposal would pay for a release in every run.
        """
        value = self.info.get("round", 1)
        number = value if isinstance(value, int) else 1
        if number < 1:
            raise SurrogateError(f"a request for round {number}; rounds begin at 1")
        return number

    @property
    def confirmed(self) -> int:
        """The last round in which the coordinator used this site's reply; zero for none."""
        value = self.info.get("confirmed", 0)
        return value if isinstance(value, int) else 0

    @property
    def lineage(self) -> str:
        """The name that a run shares with the runs that resume it.

        Raises SurrogateError for one that is malformed.
        """
        value = str(self.info.get("lineage", ""))
        if not (value.isalnum() and value.isascii() and len(value) <= 32):
            raise SurrogateError(f"a request without the name of its run ({value[:40]!r})")
        return value

    @property
    def state(self) -> Path:
        """The folder for files that this site needs until the run ends."""
        return self.node.state / "runs" / f"{self.lineage}-{self.site}"


@dataclass(frozen=True)
class Job(SiteRequest):
    """A request, and what the site's method makes its answer of.

    Attributes:
        found: the site's features.
        limits: that the site sets itself.
    """

    found: SiteFeatures
    limits: SiteLimits = NO_LIMITS

    @property
    def names(self) -> set[str]:
        """The terms of this round."""
        return {each.name for each in self.run.plan.combination.sums_in(self.round)}

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes whose names the site releases: those with enough training records."""
        site_features = self.found
        if self.limits.smallest_class <= 1:
            return site_features.classes
        names = site_features.classes
        sizes = torch.bincount(site_features.train.labels, minlength=len(names)).tolist()
        sized = zip(names, sizes, strict=True)
        return tuple(name for name, size in sized if size >= self.limits.smallest_class)

    @property
    def protects_patients(self) -> bool:
        """Whether the noise of a private run hides a patient with all records, and not a record."""
        return self.run.private and self.found.train.units is not None

    @property
    def smallest_cell(self) -> int:
        """The records that a count needs to leave this site; none with noise."""
        return 0 if self.run.private else self.limits.smallest_cell

    def mechanism(self, centre: str = "") -> Mechanism | None:
        """The run's privacy mechanism for the unit that this site protects: a patient, where its
        records have patients, or a record. None without a budget.

        Args:
            centre: digest of the public mean that is subtracted before the clip, or empty.
        """
        unit: Unit = "record" if self.found.train.units is None else "patient"
        return self.run.mechanism_for(unit, centre)

    def agreed(self, public: PublicMap) -> PublicMap:
        """A received map, if it is the one of the settings. Raises SurrogateError for another."""
        self.check_agreed(public_digest(public))
        return public

    def check_agreed(self, digest: str, learned: bool = False) -> None:
        """Check that a received map is the one of the settings.

        Args:
            digest: of the map.
            learned: whether its centre was learned in an earlier round, and is in no file.

        Raises:
            SurrogateError: if it is another.
        """
        named = self.run.settings.features.digest
        parts = len(named) // (1 + learned)
        if digest[:parts] != named[:parts]:
            raise SurrogateError(
                f"a public map with another content than features.digest = {named[:16]!r} names"
            )

    def received_model(
        self, unpack: Callable[[bytes], Parameters] = unpack_parameters
    ) -> Parameters:
        """The model received for this round.

        Args:
            unpack: reads it from bytes.

        Raises:
            SurrogateError: when there is none, when it is of another run, backbone or other
                classes, or for a number that is too large or not finite.
            PolicyError: for too many classes.
        """
        if self.payload is None:
            raise SurrogateError("a round without a model")
        model = unpack(self.payload)
        run, header = self.run, model.header
        if header.run != run.digest or header.fingerprint != self.found.fingerprint:
            raise SurrogateError(
                f"a model of run {header.run!r} for backbone "
                f"{shown(header.fingerprint)}; here it is run {run.digest!r} and "
                f"{shown(self.found.fingerprint)}"
            )
        if len(header.classes) > self.limits.most_classes:
            raise PolicyError(
                f"most-classes = {self.limits.most_classes}: a model of "
                f"{len(header.classes)} classes"
            )
        # It would be a map of the features that no site agreed to.
        agreed = self.public_frame
        if header.frame != agreed and (agreed or run.hides_sites):
            raise SurrogateError(
                "a model with a frame of columns that the settings do not give, in a private run, secure "
                "aggregation, or a run with features.ranges"
            )
        largest = largest_parameter(bool(run.settings.epsilon))
        # A number that is none is not below it either.
        if not all(
            -largest < float(end) < largest
            for t in model.tensors.values()
            if t.numel()
            for end in t.aminmax()
        ):
            raise SurrogateError(f"a model with a number that is not finite, or beyond {largest:g}")
        # They select records; in an exact sum, the difference from a sum of other classes would
        # show some of them.
        fixed = run.settings.epsilon or run.settings.secure_aggregation
        if fixed and run.settings.classes and header.classes != run.settings.classes:
            raise SurrogateError(
                f"a model of classes {', '.join(header.classes)[:200]}, which are not this run's"
            )
        return model

    def exact(self, sums: Mapping[str, Tensor], frame: bytes, records: int) -> SiteStatistic:
        """Those of exact sums over a code that this round has, of features in a frame."""
        assert self.run.target is not None
        own = {name: each for name, each in sums.items() if name in self.names}
        return SiteStatistic(own, None, self.run.target.rows, frame, records)

    def header(self, classes: tuple[str, ...], frame: bytes = b"") -> Header:
        """The header of this site's reply, whose tables are in a frame of the columns."""
        made_by = self.run.settings.method, self.run.digest, self.site
        return Header(*made_by, self.found.fingerprint, classes, frame)

    @property
    def public_frame(self) -> bytes:
        """The frame of the columns that the run's settings give; empty without one."""
        return self.run.public_frame(self.found.train.features.shape[1])

    def own_data(self, classes: tuple[str, ...]) -> tuple[Tensor, Tensor, bytes]:
        """Training records as in `training_data`, in a frame of this site's own.

        Args:
            classes: names of C classes.

        Returns:
            Features (n, d), labels (n,), and the frame for the header: empty if no column needs
            one, and where no exact number of this site may leave it.
        """
        frame = self.own_frame(classes)
        return *self.training_data(classes, frame), frame

    def own_frame(self, classes: tuple[str, ...]) -> bytes:
        """The frame of `own_data`. Raises DataError as `training_data`."""
        if not self.run.frames:
            return b""
        frame = frame_of(self.training_data(classes)[0])
        return b"" if frame is None else frame.packed()

    def training_data(self, classes: tuple[str, ...], frame: bytes = b"") -> tuple[Tensor, Tensor]:
        """Training records of the given classes, or of another target.

        Records of other classes are left out, and those of classes too small to be released; of
        another target, what `Target.large_enough` says.

        Args:
            classes: names of C classes.
            frame: of the columns, in which the features are returned; empty: as they are.

        Returns:
            Features (n, d), and labels (n,), indices into `classes`; for another target its code
            (n, C), float64.

        Raises:
            DataError: when no record is left; not in a private run or secure aggregation.
        """
        if self.run.target is not None:
            return self._coded_data(self.run.target, frame)
        features, (labels, kept) = self.found.train.features, self._kept(classes)
        # Otherwise the reply must not show whether the site has a record of these classes.
        if not kept.any() and not self.run.hides_sites:
            raise DataError(
                f"no training record of the run's classes {', '.join(classes)[:200]}, with "
                f"{self.limits.smallest_class} or more of a class"
            )
        if (folder := self.found.train.folder) is None:
            features = features[kept].float()
        elif not kept.all():
            parts = (features[rows][kept[rows]] for rows in chunks(*features.shape))
            features = written(parts, features.shape[1], folder)
        return framed(features, frame, folder), labels[kept]

    def training_units(self, classes: tuple[str, ...]) -> tuple[str, ...] | None:
        """The patient of each record of `training_data`, (n,), in a private run; None where a record
        is the unit of privacy.
        """
        units = self.found.train.units
        if units is None or self.run.target is not None:
            return units
        _, kept = self._kept(classes)
        return tuple(units[row] for row in kept.nonzero().flatten().tolist())

    def _kept(self, classes: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Labels (n,) of all training records, below zero for other classes; and which records may
        be used, (n,).
        """
        labels = class_indices(classes, self.found.classes)[self.found.train.labels]
        # Records of other classes make no class larger.
        sizes = torch.bincount(labels[labels >= 0], minlength=max(1, len(classes)))
        return labels, (labels >= 0) & (sizes[labels.clamp_min(0)] >= self.limits.smallest_class)

    def _coded_data(self, target: Target, frame: bytes) -> tuple[Tensor, Tensor]:
        train, least = self.found.train, self.limits.smallest_class
        features, values, why = train.features, train.targets(), ""
        code = target.code(values)
        if not self.run.private:
            code = target.code(target.of_site(values, self.site))
            code, why = target.large_enough(code, least, self.run.settings.secure_aggregation)
            if len(code) < max(1, least):
                if not self.run.hides_sites:
                    raise DataError(
                        f"{len(code)} training records with a target; the policy's smallest-class "
                        f"is {least}"
                    )
                features, code = features[:0], code[:0]
        if why and not self.run.hides_sites:
            LOG.warning("%s", why)
        if train.folder is None:
            features = features.float()
        return framed(features, frame, train.folder), code


@dataclass(frozen=True)
class Clipped:
    """Clipped features of records, with weights.

    Attributes:
        features: (n, d), of norm at most one.
        labels: indices of classes, (n,).
        weights: (n,), which sum to at most one over every unit.
        clip_fraction: share of the records that were clipped.
        done: called with features that were read, if these are in a file and not in memory.
    """

    features: Tensor
    labels: Tensor
    weights: Tensor
    clip_fraction: float = 0.0
    done: tuple[Callable[[Tensor], None], ...] = ()

    @classmethod
    def of(
        cls,
        records: LabelledFeatures,
        norm: float = 0.0,
        change: Callable[[Tensor], Tensor] = lambda features: features,
    ) -> Clipped:
        """Change features and clip them.

        Args:
            records: of the site; a patient's weights sum to one.
            norm: to clip at.
            change: of features before the clip, by which a record's depend on no other record.
        """
        features, fraction = clipped_features(records.features, norm, records.folder, change)
        weights = unit_weights(records.units, len(features))
        done = () if records.folder is None else (forget,)
        return cls(features, records.labels.cpu(), weights, fraction, done)


@dataclass(frozen=True)
class SiteStatistic:
    """What a site has computed of its records, before any noise and however it travels.

    Attributes:
        sums: by term: numbers (float64), or whole numbers to which noise can be added.
        claim: their privacy mechanism; None without privacy.
        classes: names of the rows.
        frame: of the columns; empty for features as they are.
        records: that numbers without noise are of.
        keep: files to keep as in `MethodOutput`.
    """

    sums: Mapping[str, Tensor | BoundedSum]
    claim: Mechanism | None = None
    classes: tuple[str, ...] = ()
    frame: bytes = b""
    records: int = 0
    keep: Mapping[Path, bytes] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Tensor]:
        """All of it as numbers, float64, without noise."""
        return {
            name: each.value if isinstance(each, BoundedSum) else each
            for name, each in self.sums.items()
        }

    @property
    def bounded(self) -> list[BoundedSum]:
        """What noise can be added to."""
        return [each for each in self.sums.values() if isinstance(each, BoundedSum)]


@dataclass(frozen=True)
class MethodOutput:
    """A method's output before it is released.

    Attributes:
        payload: what is sent.
        claim: what protects it; None for a release without privacy.
        facts: metrics of its noise, which stay at the site.
        answer: numbers sent with it.
        keep: files and their content, written only once the release is charged, so later rounds may
            use them freely.
        must_keep: whether the next round needs these files.
        sealed: whether only other sites can read the payload.
        guard: the release is charged in this context. It may refuse it on entry, and what it keeps
            of it is written on exit without error.
    """

    payload: bytes
    claim: Mechanism | None = None
    facts: dict[str, float] = field(default_factory=dict)
    answer: Info = field(default_factory=dict)
    keep: Mapping[Path, bytes] = field(default_factory=dict)
    must_keep: bool = False
    sealed: bool = False
    guard: Callable[[], AbstractContextManager[object]] = nullcontext

"""A request to a site, and what a method makes for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from client_app.features.site_features import SiteFeatures
from client_app.node_config import NodeConfig
from common.config.run_config import RunConfig, run_digest
from common.errors import ConfigError, DataError, PolicyError, SurrogateError
from common.limits import LARGEST_NUMBER, MOST_CLASSES
from common.models.classifiers import class_indices
from common.models.parameters import Parameters
from common.privacy.accounting import GaussianEvent
from common.privacy.claims import Claim
from common.surrogates.surrogates import Header
from common.wire.model_proto import unpack_parameters
from common.wire.records import Info


@dataclass(frozen=True)
class SiteLimits:
    """What the site decides for itself; zero means as the run says. smallest_class: records a released class must have.

    most_classes: that a received model may name.
    """

    components: int = 0
    rank: int = 0
    smallest_class: int = 1
    most_classes: int = MOST_CLASSES


NO_LIMITS = SiteLimits()
# Of a model in a private run. A record's gradient does not depend on others (methods/dp/record_chunks.py), but the last
# digit of its features may, where several images go through the backbone together; large weights that cancel amplify it.
LARGEST_PRIVATE = 1e4


@dataclass(frozen=True)
class Task:
    """One request: the run, this site, its features, and the payload (`question`) and numbers (`info`) received with it."""

    run: RunConfig
    node: NodeConfig
    site: str
    found: SiteFeatures
    limits: SiteLimits = NO_LIMITS
    question: bytes | None = None
    info: Mapping[str, object] = field(default_factory=dict)

    @property
    def round(self) -> int:
        """Which round it is, from one."""
        value = self.info.get("round", 1)
        return value if isinstance(value, int) else 1

    @property
    def confirmed(self) -> int:
        """The last round in which the coordinator used what this site sent; zero for none."""
        value = self.info.get("confirmed", 0)
        return value if isinstance(value, int) else 0

    @property
    def lineage(self) -> str:
        """What a run and those that resume it have in common."""
        value = str(self.info.get("lineage", ""))
        if not (value.isalnum() and value.isascii() and len(value) <= 32):
            raise SurrogateError(f"a question without the name of its run ({value[:40]!r})")
        return value

    @property
    def state(self) -> Path:
        """Where this site keeps what must last until the run ends."""
        return self.node.state / "runs" / f"{self.lineage}-{self.site}"

    @property
    def classes(self) -> tuple[str, ...]:
        """The site's classes whose names it lets out: those with enough training records."""
        found = self.found
        if self.limits.smallest_class <= 1:
            return found.classes
        sizes = torch.bincount(found.train.labels, minlength=len(found.classes)).tolist()
        return tuple(n for n, size in zip(found.classes, sizes, strict=True) if size >= self.limits.smallest_class)

    def records_alone(self, what: str) -> None:
        """Raise ConfigError where this site protects patients, and `what` can protect single records only."""
        if self.run.epsilon and self.found.train.units is not None:
            raise ConfigError(
                f'{what} protects single records, this site patients; set unit = "record" in the node-config if that is '
                "enough, or use method = 'fedpft' with fedpft.privacy = 'sums'"
            )

    def received_model(self) -> Parameters:
        """The model received for this round. Raises SurrogateError when there is none, or it is not this run's."""
        if self.question is None:
            raise SurrogateError("a round without a model")
        model = unpack_parameters(self.question)
        if model.header.run != run_digest(self.run) or model.header.fingerprint != self.found.fingerprint:
            raise SurrogateError(
                f"a model of run {model.header.run!r} for backbone {model.header.fingerprint[:16]!r}; here it is run "
                f"{run_digest(self.run)!r} and {self.found.fingerprint[:16]!r}"
            )
        if len(model.header.classes) > self.limits.most_classes:
            raise PolicyError(f"most-classes = {self.limits.most_classes}: a model of {len(model.header.classes)} classes")
        largest = LARGEST_PRIVATE if self.run.epsilon else LARGEST_NUMBER
        if not all(t.isfinite().all() and (not t.numel() or t.abs().max() < largest) for t in model.tensors.values()):
            raise SurrogateError(f"a model with a number that is not finite, or beyond {largest:g}")
        if self.run.epsilon and self.run.classes and model.header.classes != self.run.classes:
            raise SurrogateError(f"a model of classes {', '.join(model.header.classes)[:200]}, which are not this run's")
        return model

    def header(self, classes: tuple[str, ...]) -> Header:
        """Of what this site answers."""
        return Header(self.run.method, run_digest(self.run), self.site, self.found.fingerprint, classes)

    def training_data(self, classes: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Training features (n, d) and labels (n,) among `classes`. Raises DataError when there is none of them.

        Left out: records of other classes, and of classes with fewer records than the site lets out.
        """
        features, labels = self.found.train.features, class_indices(classes, self.found.classes)[self.found.train.labels]
        sizes = torch.bincount(labels.clamp_min(0), minlength=len(classes))
        kept = (labels >= 0) & (sizes[labels.clamp_min(0)] >= self.limits.smallest_class)
        # Under privacy a site with no record of a class answers like one that has some.
        if not kept.any() and not self.run.epsilon:
            raise DataError(
                f"no training record of the run's classes {', '.join(classes)[:200]}, with {self.limits.smallest_class} or "
                "more of a class"
            )
        return features[kept].float(), labels[kept]


@dataclass(frozen=True)
class MethodOutput:
    """What a site has made and not let out yet.

    events: the noise in it, for the ledger. facts: about it, which stay. answer: numbers that go along. keep: a file and its
    content, written only once the payload may leave: what builds on it later has been paid for. must_keep: whether
    the next round cannot be without that file. sealed: whether only other sites can read the payload.
    """

    payload: bytes
    claim: Claim | None = None
    events: tuple[GaussianEvent, ...] = ()
    facts: dict[str, float] = field(default_factory=dict)
    answer: Info = field(default_factory=dict)
    keep: tuple[Path, bytes] | None = None
    must_keep: bool = False
    sealed: bool = False

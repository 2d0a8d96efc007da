"""One run: its settings with every "auto" replaced, the method, and what the method does. Made
once, at the start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property, lru_cache
from typing import Any

from .backbones.backbone_names import OF_IMAGE_SIZE
from .backbones.power_transform import CLIPPED, power_for, with_power
from .errors import ConfigError
from .methods import METHODS, method_of, plan_of
from .methods.fedpft import largest_gram
from .methods.method import Method, Plan
from .privacy.accounting import Unit
from .privacy.mechanism import DISTRIBUTED_SUMS, Mechanism
from .privacy.shares import KEPT, KEPT_OF_FEW, stated
from .renamed import of_today
from .settings import (
    SECURE_AGGREGATION_KEYS,
    CountingSettings,
    DPCVAESettings,
    FedAvgSettings,
    FedLAPSettings,
    Settings,
)
from .settings.base import Scalar, parse_settings, without_gone
from .settings.heads import AUTO, FEWEST_MEAN, FEWEST_OWN, TargetSettings
from .targets.target import Objective, Target
from .terms import signed_fields

# Kinds of data with images of any size.
OF_IMAGES = ("imagefolder", "dicom", "parquet")
# Settings that are not in a run's document, by the reason. Every other one is, also a new one.
REASONS = {
    "of the coordinator's machine, or written after people sign": "output-dir resume approval",
    "a site with data of its own has these in its node-config, or refuses them": "data data-dir "
    "dataset label-column patient-column bag-column weights-path device compare",
    "whom the coordinator waits for, what it accepts and trusts; what sites send by it is resolved": (
        "sites quorum deadline check-only grace max-payload-mib max-share defence"
    ),
    "paths of files whose content has a digest": "fedpft.public features.projection counting.model",
}
UNSIGNED = {key: reason for reason, keys in REASONS.items() for key in keys.split()}


@dataclass(frozen=True)
class Run:
    """A run whose settings agree with each other.

    Attributes:
        settings: what was asked for, with the "auto" values that depend on the method replaced.
        method: its description.
        plan: what it does under these settings.
        target: what is learned of a record; None for its class.
        stored_as: the digest that an earlier version gave to a stored run; empty for a new one.

    Example:
        >>> run = parse_run({"method": "fedpft", "fedpft.rank": 64, "epsilon": 1.0, "delta": 1e-5})
        >>> run.plan.mechanism_name, len(run.digest)
        ('sums', 16)
    """

    settings: Settings
    # Both follow from the settings, and hold functions, of which two alike are not equal.
    method: Method = field(compare=False)
    plan: Plan = field(compare=False)
    target: Target | None = None
    stored_as: str = field(default="", compare=False)

    @classmethod
    def resolve(cls, settings: Settings) -> Run:
        """The run of these settings.

        Args:
            settings: as parsed.

        Raises:
            ConfigError: for an unknown method, or settings that do not agree: one line that says
                what to change.
        """
        method = method_of(settings)
        # Before any digest, and from settings that both sides have, so that they agree.
        trains = method.trains is not None
        settings = method.fill(_with_records(settings) if settings.secure_aggregation else settings)
        target = _target_of(settings, trains)
        if target is not None:
            settings = _coded(settings, target)
        run = cls(settings, method, plan_of(method, settings, target), target)
        run._check()
        return run

    def __reduce__(self) -> tuple[Callable[[Settings], Run], tuple[Settings]]:
        # The functions of a method cannot be pickled for the processes of several GPUs.
        return Run.resolve, (self.settings,)

    @cached_property
    def mechanism(self) -> Mechanism | None:
        """The privacy mechanism for records; None without a budget. Raises ConfigError where its
        noise cannot be found.
        """
        return None if self.plan.privacy is None else self.plan.privacy.mechanism()

    def mechanism_for(self, unit: Unit, centre: str = "") -> Mechanism | None:
        """The privacy mechanism for a unit and a public mean's digest; None without a budget."""
        return None if self.mechanism is None else self.mechanism.of(unit, centre)

    @cached_property
    def objective(self) -> Objective | None:
        """What training by gradients minimises, for another target than classes."""
        return None if self.target is None else self.target.objective()

    @property
    def private(self) -> bool:
        """Whether the run has a privacy budget."""
        return bool(self.settings.epsilon)

    @property
    def hides_sites(self) -> bool:
        """Whether no exact number of a site alone may leave it: in a private run, or secure aggregation."""
        return self.private or self.settings.secure_aggregation

    @property
    def frames(self) -> bool:
        """Whether sites put outlier columns of their features into a frame. Nothing of a site alone may
        show it; and a chain, and some training in rounds, have no common one.
        """
        rounds, chain = (self.plan.kind == each for each in ("rounds", "chain"))
        common = self.plan.training.frames if rounds else not chain
        return common and not self.hides_sites

    def public_frame(self, dimension: int) -> bytes:
        """The frame of `features.ranges`, in which all features are first; empty without it.

        Args:
            dimension: of the features.

        Raises:
            ConfigError: for ranges of another number of columns.
        """
        # Of tensors, which checks before a run do without.
        from .surrogates.mixtures import public_frame

        return public_frame(self.settings.features.ranges, dimension, self.private)

    @property
    def trained(self) -> FedAvgSettings | FedLAPSettings | DPCVAESettings:
        """The section of the model that is trained in rounds."""
        section: FedAvgSettings | FedLAPSettings | DPCVAESettings = getattr(
            self.settings, self.plan.training.section
        )
        return section

    @property
    def planned_rounds(self) -> int:
        """Number of rounds of training that the settings ask for."""
        return self.plan.training.rounds or self.trained.rounds

    @property
    def rounds(self) -> int:
        """Number of rounds of training that the run has, or that its budget pays for.

        Raises ConfigError where that is none.
        """
        return self.planned_rounds if self.mechanism is None else self.mechanism.rounds

    @property
    def power(self) -> float:
        """The power of all features, with "auto" resolved."""
        given = self.settings.features.power_transform
        if given != "auto":
            return given
        return power_for(self.settings.backbone, self.plan.mechanism_name in CLIPPED)

    @property
    def projects(self) -> bool:
        """Whether a public matrix projects the features of secure aggregation: one that was given, or,
        for class statistics with distributed noise, one that the coordinator chooses.
        """
        own = self.settings
        if own.features.projection != AUTO or self.plan.sent_by_solver:
            return own.features.projection != ""
        if not own.secure_aggregation:
            return False
        summed = {each.name for each in self.plan.combination.sums}
        # Of columns of a table, which have ranges, a mean says nothing.
        noisy = self.plan.mechanism_name == DISTRIBUTED_SUMS and not own.features.ranges
        return noisy and self.target is None and {"sums", "squares"} <= summed

    @property
    def maps(self) -> bool:
        """Whether sites receive a public map or mean of features."""
        return self.projects or bool(self.settings.fedpft.public)

    @property
    def backbone_fingerprint(self) -> str:
        """The backbone fingerprint that every site must have, with the power of its features; empty
        if none is set.
        """
        return with_power(self.settings.fingerprint, self.power)

    @property
    def defence(self) -> str:
        """The run's defence against hostile sites, with "auto" resolved."""
        return self.plan.defences.chosen(self.settings.defence)

    def gaps(self, sites: int = 0) -> list[str]:
        """What one hostile site can do in spite of the defence: warnings before the start.

        Args:
            sites: number of sites, if known.
        """
        return self.plan.defences.gaps(self.defence, sites or self.settings.site_count)

    @property
    def digest(self) -> str:
        """A short name of a run, see `full_digest`. An attacker can find two runs with the same one."""
        return self.stored_as or self.full_digest[:16]

    @cached_property
    def full_digest(self) -> str:
        """Digest of the document: of all that people sign, and by which sites know a run."""
        return hashlib.sha256(json.dumps(self.document, sort_keys=True).encode()).hexdigest()

    @cached_property
    def document(self) -> Mapping[str, Mapping[str, Any]]:
        """The run as values of JSON: its settings, with "auto" replaced, but for those of UNSIGNED
        (names of sites are in it, their number is not), and what follows from all settings together.
        """
        own, plan = self.settings, self.plan
        sends, sums = plan.messages, plan.combination
        automatic = "fedpft" in self.method.reads and own.fedpft.covariance == AUTO
        resolved = {
            "kind": plan.kind,
            "sends": (sends.first, sends.sends),
            "receives": sends.receives,
            # A solver that only the coordinator runs may need other sums, which sites then never add.
            "sums": (sums.first_sums, sums.sums) if own.secure_aggregation else (),
            "noise": plan.privacy,
            "training": plan.training,
            "rounds": self.planned_rounds if plan.kind == "rounds" else 1,
            "target": None if self.target is None else self.target.public,
            # Which form "auto" takes follows from the dimension, which sites know first.
            "most-whole": largest_gram(own.max_payload_mib) if automatic else 0,
            # Files have paths of their own on each machine; features.digest is of their content.
            "centre": bool(own.fedpft.public),
            "map": (
                self.projects,
                bool(own.features.given_projection),
                plan.mean_over_columns
                and (stated(KEPT_OF_FEW), FEWEST_MEAN, stated(KEPT), FEWEST_OWN),
            ),
        }
        signed = {key: value for key, value in own.flat().items() if self._signs(key)}
        signed["features.power-transform"] = self.power
        return {"settings": signed, "resolved": {key: _plain(resolved[key]) for key in resolved}}

    def _signs(self, key: str) -> bool:
        section, _, name = key.rpartition(".")
        used = section in ("", "features", *self.method.reads)
        used = used or (section == "fedpft" and name in self.plan.allows)
        of_sum = key in SECURE_AGGREGATION_KEYS and not self.settings.secure_aggregation
        unset = key == "noise-seed" and not self.settings.noise_seed
        named = key == "sites" and bool(self.settings.site_names)
        return used and not (of_sum or unset) and (named or key not in UNSIGNED)

    def _check(self) -> None:
        """Raise ConfigError for settings that do not agree."""
        own = self.settings
        budget = f"epsilon = {own.epsilon:g}, delta = {own.delta:g}"
        self._check_budget(budget)
        self._check_sums()
        self._check_ranges()
        self._check_method(budget)
        self._check_images()
        self._check_defence()
        if own.partition == "column" and not own.site_column:
            raise ConfigError(
                "partition = 'column' needs site-column, the column that names each record's site"
            )

    def _check_budget(self, budget: str) -> None:
        own = self.settings
        if bool(own.epsilon) != bool(own.delta):
            raise ConfigError(
                f"{budget}: set both (delta far below one over a site's number of records, such as "
                "1e-5), or neither (0) to run without differential privacy"
            )
        if own.epsilon and own.fedpft.privacy == "none":
            raise ConfigError(
                f"{budget}, but fedpft.privacy = 'none'; remove fedpft.privacy, or epsilon and "
                "delta"
            )
        if not own.epsilon and own.fedpft.privacy not in ("auto", "none"):
            raise ConfigError(
                f"fedpft.privacy = {own.fedpft.privacy!r} needs a budget; set epsilon and delta"
            )
        if own.fedpft.public and not own.epsilon:
            raise ConfigError(
                f"fedpft.public = {own.fedpft.public!r} works only with privacy; set epsilon and "
                "delta"
            )
        if (
            self.hides_sites
            and own.backbone in OF_IMAGE_SIZE
            and not own.image_size
            and own.data in OF_IMAGES
        ):
            raise ConfigError(
                f"{budget if own.epsilon else 'secure-aggregation = true'}, but backbone = "
                f"{own.backbone!r} with image-size = 0: the dimension would disclose the size of a "
                "site's images; set image-size"
            )

    def _check_sums(self) -> None:
        own = self.settings
        if own.secure_aggregation and not (self.plan.counts or METHODS[own.method].summable):
            names = " or ".join(repr(method.name) for method in METHODS.values() if method.summable)
            raise ConfigError(
                f"secure-aggregation = true, but what method = {own.method!r} combines is not a sum; use "
                f"{names}"
            )
        mapped = own.secure_aggregation or self.plan.sent_by_solver
        if (file := own.features.given_projection) and not mapped:
            raise ConfigError(
                f"features.projection = {file!r} works only with secure-aggregation = true; set both, or none"
            )
        if own.secure_aggregation and own.fedpft.seal:
            raise ConfigError(
                "secure-aggregation = true and fedpft.seal = true: a sealed chain has no sum; remove one "
                "of them"
            )

    def _check_ranges(self) -> None:
        own = self.settings
        if not own.features.ranges:
            return
        if not self.plan.ranges:
            names = [repr(each.name) for each in METHODS.values() if each.usual.ranges]
            names = ["'fedpft'"] if self.target is not None else names
            raise ConfigError(
                f"features.ranges = {own.features.ranges[:100]!r}, but method = {own.method!r} with "
                f"these settings moves no features first; use {', '.join(names)}, or scale the "
                "columns at all sites alike, or remove it"
            )
        for key, given in (
            ("features.projection", own.features.given_projection),
            ("fedpft.public", own.fedpft.public),
        ):
            if given:
                raise ConfigError(
                    f"features.ranges and {key} = {given!r}: both say what is done with features "
                    "first; remove one"
                )

    def _check_method(self, budget: str) -> None:
        own, plan = self.settings, self.plan
        if self.method.needs_budget and not own.epsilon:
            raise ConfigError(f"method = {own.method!r} needs a budget; set epsilon and delta")
        if own.epsilon and plan.privacy is None:
            *names, last = (repr(method.name) for method in METHODS.values() if method.private)
            raise ConfigError(
                f"{budget}, but method = {own.method!r} does not support it; use "
                f"{', '.join(names)} or {last}"
            )
        for name in ("order", "seal"):
            if getattr(own.fedpft, name) and name not in plan.allows:
                chains = [repr(each.name) for each in METHODS.values() if name in each.usual.allows]
                chains.append("'fedpft' with fedpft.topology = 'chain'")
                raise ConfigError(
                    f"fedpft.{name} works only in a chain; use method = {' or '.join(chains)}, or "
                    "remove it"
                )
        if plan.refusal:
            raise ConfigError(plan.refusal)
        if own.resume and plan.kind not in ("rounds", "chain"):
            raise ConfigError(
                f"resume = {own.resume!r}: method = {self.method.name!r} has no rounds, so there "
                "is nothing to continue; remove resume, and start the run again"
            )
        for name, given in own:
            # Also of a method that does not use it: who sets noise expects privacy.
            if not own.epsilon and (noise := getattr(given, "noise_multiplier", 0.0)):
                raise ConfigError(
                    f"{name}.noise-multiplier = {noise:g} needs epsilon, the limit of the privacy "
                    "loss; set it"
                )

    def _check_images(self) -> None:
        """Raise ConfigError for what only a network that reads images can do, or cannot."""
        own, section, trained = self.settings, self.plan.training.section, self.trained
        if section not in self.method.sections or isinstance(trained, DPCVAESettings):
            return
        if isinstance(trained, FedLAPSettings) and trained.augment and trained.kind != "convnet":
            raise ConfigError(
                f"{section}.augment = {', '.join(trained.augment)} works only with {section}.model "
                "= 'convnet', which reads images; set that, or remove it"
            )
        if own.features.bag != "none" and trained.kind == "convnet":
            raise ConfigError(
                f"features.bag = {own.features.bag!r} pools features, and {section}.model = "
                "'convnet' reads images; set another model, or features.bag = 'none'"
            )

    def _check_defence(self) -> None:
        own, defences = self.settings, self.plan.defences
        if 0 < own.max_share < 1:
            raise ConfigError(
                f"max-share = {own.max_share:g}: must be at least 1 (the median weight), or 0 for "
                "no cap"
            )
        allowed = ("auto", *defences.available)
        if own.defence not in allowed:
            use = " or ".join(map(repr, allowed))
            raise ConfigError(
                f"defence = {own.defence!r} is not defined for method = "
                f"{self.method.name!r}{defences.reason}; use {use}"
            )


def _plain(value: Any) -> Any:
    """A value as one of JSON; without functions, which follow from settings that are signed too."""
    if is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in signed_fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    # Processors differ in the last digits of what a function has computed.
    return f"{value:.9g}" if isinstance(value, float) else None if callable(value) else value


def _target_of(settings: Settings, trains: bool) -> Target | None:
    """The target of a run; None for classes. Raises ConfigError for settings that do not agree."""
    usual = TargetSettings.model_fields.items()
    if all(getattr(settings, key) == field.default for key, field in usual):
        return None
    # The kinds of targets need torch, which checks before a run do without.
    from .targets.registry import target_of

    return target_of(settings, trains)


def _coded(settings: Settings, target: Target) -> Settings:
    """The settings of a run whose messages have rows of a code where others have classes."""
    rows = _rows_of(settings.counting, target)
    if settings.classes not in ((), rows):
        raise ConfigError(
            f"classes = {', '.join(settings.classes)[:200]!r} is for task = 'classification', not "
            f"{target.name!r}; remove it"
        )
    if settings.partition == "classes":
        raise ConfigError(
            f"partition = 'classes' is for task = 'classification', not {target.name!r}; use 'dirichlet', "
            "'iid' or 'column'"
        )
    if settings.compare:
        raise ConfigError(
            f"compare = true is for task = 'classification', not {target.name!r}: its baselines are heads of "
            "classes. Remove it; sums of all sites give the model of all records together, and a run "
            "of one site gives that of a site alone"
        )
    return settings.model_copy(update={"classes": rows})


def _rows_of(counting: CountingSettings, target: Target) -> tuple[str, ...]:
    """What messages of a run with a target have in place of classes: rows of the code, cells of a
    survey, or what a model that is evaluated answers.
    """
    if counting.kind == "none":
        return target.rows
    if counting.kind == "evaluation":
        return target.outputs
    from .targets.counted import counted

    return counted(target, counting).rows


def parse_run(flat: Mapping[str, Scalar]) -> Run:
    """Parse a flat run-config such as {"method": "fedpft", "fedpft.rank": 64}.

    Args:
        flat: keys of `[tool.flwr.app.config]` in pyproject.toml, and their values; missing ones
            have their defaults. Those that are gone may be there, if they asked for nothing.

    Returns:
        The run.

    Raises:
        ConfigError: one line that names key, value and the allowed values.
    """
    return Run.resolve(parse_settings(Settings, without_gone(flat)))


def stored_run(flat: Mapping[str, Scalar]) -> Run:
    """The run of settings that this or an earlier version has stored, where some had other names.

    Args:
        flat: as in `parse_run`.

    Raises:
        ConfigError: as `parse_run`.

    Example:
        >>> stored_run({"secure-aggregation": True, "classes": "no,yes"}).settings.secure_aggregation
        True
    """
    return parse_run(of_today(flat))


def kept_run(flat: Mapping[str, Scalar]) -> Run:
    """The run of `parse_run`, made once in a process for the same settings: all messages of a run
    bring them.
    """
    # What is written differently is not the same: 1, 1.0 and true.
    return _kept(tuple((key, repr(flat[key]), flat[key]) for key in sorted(flat)))


@lru_cache(maxsize=16)
def _kept(flat: tuple[tuple[str, str, Scalar], ...]) -> Run:
    return parse_run({key: value for key, _, value in flat})


def _with_records(settings: Settings) -> Settings:
    """The settings, with room in secure aggregation for one site with all records known in public."""
    usual = Settings.model_fields["secure_aggregation_records"].default
    if settings.secure_aggregation_records != usual or settings.features.records <= usual:
        return settings
    return settings.model_copy(update={"secure_aggregation_records": settings.features.records})

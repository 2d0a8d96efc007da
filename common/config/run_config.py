"""The run configuration: a flat Flower run-config, parsed once into frozen models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from common import methods
from common.backbones.backbone_names import OF_IMAGE_SIZE, OWN_BACKBONE
from common.backbones.feature_power import CLIPPED, power_for, with_power
from common.config import defences
from common.config.flat_settings import Scalar, parse_settings
from common.config.sections import (
    DataKind,
    Defence,
    Device,
    DPCVAEConfig,
    FedAvgConfig,
    FedLAPConfig,
    Names,
    Sections,
    kebab,
)
from common.config.sections.base import MiB, Pixels, Range, Records, Seconds, Unit
from common.rules.spec import MethodSpec
from common.rules.training import image_steps_for, network_for, rounds_for

# Kinds of data with images of any size.
OF_IMAGES = ("imagefolder", "dicom", "parquet")
SECURE_SUM_KEYS = ("secure-sum-threshold", "secure-sum-records", "secure-sum-range", "colluding", "dropouts")


def _registered(name: str) -> str:
    if name not in methods.METHODS:
        raise ValueError(methods.known())
    return name


def _is_no_code(name: str) -> str:
    if name.partition(":")[0].strip().lower() == "python":
        raise ValueError(
            f"a run cannot name code of a site; set backbone = {OWN_BACKBONE!r} here, and backbone = 'python:...' in the "
            "node-config of each site"
        )
    return name


BackboneName = Annotated[str, AfterValidator(_is_no_code)]
MethodName = Annotated[str, AfterValidator(_registered), Range(", ".join(methods.METHODS))]


class RunConfig(Sections):
    """All settings of a run. The keys are those of `[tool.flwr.app.config]` in pyproject.toml."""

    method: MethodName = Field("fedpft", description="Method of the run.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of partition, training and sampling; never of privacy noise.")
    output_dir: str = Field("runs", min_length=1, description="Folder in which the coordinator makes the run folder.")
    resume: str = Field("", description="Folder of an interrupted run in rounds or a chain, which is continued.")
    compare: bool = Field(False, description="Whether baselines on the same features are computed; for simulations.")
    device: Device = Field(
        "auto", description="Processor or GPU; a site's own setting comes first; auto takes a GPU if any."
    )
    data: DataKind = Field("digits", description="Kind of data in a simulation: the bundled digits, or files in data-dir.")
    data_dir: str = Field("", description="Folder of the data in a simulation.")
    dataset: Names = Field((), description="Files or folders in data-dir, each a site if several; empty for all.")
    label_column: str = Field("label", description="Column of a table that holds the class of a record.")
    patient_column: str = Field("", description="Column of a table that holds the patient ID; patients are then protected.")
    classes: Names = Field((), description="All classes in their order; empty collects the classes that sites report.")
    partition: Literal["iid", "dirichlet", "classes", "column"] = Field(
        "dirichlet", description="How a simulation distributes records to sites."
    )
    alpha: float = Field(
        0.5, gt=0, le=1e6, description="Evenness of the classes at a site with partition dirichlet; large is even."
    )
    classes_per_site: Annotated[int, Unit("classes")] = Field(
        2, ge=1, description="Number of classes of a site with partition classes."
    )
    site_column: str = Field("", description="Column of a table that names a record's site, with partition column.")
    test_fraction: float = Field(0.2, gt=0, lt=1, description="Share of the records that test, if the data have no split.")
    backbone: BackboneName = Field(
        "pixels",
        min_length=1,
        description="Frozen model of the features: torchvision:NAME, open_clip:MODEL/TAG, timm:NAME, pixels or pixels:rgb; "
        "own for the one that each site names itself.",
    )
    weights_path: str = Field("", description="File of the backbone's weights; empty downloads the library's.")
    image_size: Pixels = Field(
        0, ge=0, le=4096, description="Side to which images are resized; 0 for the backbone's own, or unchanged pixels."
    )
    fingerprint: str = Field("", description="Backbone fingerprint that every site must have; empty for that of most sites.")
    sites: Annotated[int, Unit("sites")] = Field(
        0, ge=0, description="Number of sites to wait for; 0 for those that are connected."
    )
    quorum: float = Field(0.5, gt=0, le=1, description="Smallest share of the sites whose replies must be usable.")
    deadline: Seconds = Field(3600.0, gt=0, description="Time that sites have for one reply.")
    grace: Seconds = Field(
        0.0, ge=0, description="Time after the result in which late replies are still stored, for a method that sends once."
    )
    max_payload_mib: MiB = Field(256, ge=1, description="Largest message that the coordinator accepts.")
    max_share: float = Field(
        3.0, ge=0, le=1e6, description="Largest weight of a site, as a multiple of the median site's; 0 for no limit."
    )
    defence: Defence = Field(
        "auto", description="Defence against hostile sites; auto is screen for fedpft where it is defined, otherwise none."
    )
    epsilon: float = Field(0.0, ge=0, description="Privacy budget of the run at each site; 0 for no privacy.")
    delta: float = Field(
        0.0, ge=0, le=0.01, description="Delta of the privacy budget, far below one over a site's records; 0 for no privacy."
    )
    secure_sum: bool = Field(
        False, description="Whether the coordinator sees only the sum over all sites, never what one site sends."
    )
    secure_sum_threshold: Annotated[int, Unit("sites")] = Field(
        0, ge=0, le=1000, description="Sites that must reply to the end for the sum; 0 for the fewest that are safe."
    )
    secure_sum_records: Records = Field(
        20_000, ge=1, le=10**9, description="Most records of one site; a smaller number makes the sum finer."
    )
    secure_sum_range: float = Field(
        16.0, gt=0, le=1e6, description="Largest magnitude of a feature without privacy; a site with a larger one refuses."
    )
    colluding: float = Field(
        1 / 3,
        ge=0,
        lt=1,
        description="Share of the sites that may tell the coordinator their secrets without harm to the others' privacy.",
    )
    dropouts: float = Field(
        0.1, ge=0, lt=1, description="Share of the sites that a secure sum may lose after their keys and still be completed."
    )

    @model_validator(mode="after")
    def _resolve_model(self) -> Self:
        # Before any digest, and from settings that both sides have, so that they agree.
        if self.spec.trained == "fedlap" and self.fedlap.model == "auto":
            model = network_for(self.backbone in OF_IMAGE_SIZE, self.image_size)
            object.__setattr__(self, "fedlap", self.fedlap.model_copy(update={"model": model}))
        if self.spec.trained == "fedlap" and not self.fedlap.image_steps:
            steps = image_steps_for(self.fedlap.kind, bool(self.epsilon))
            object.__setattr__(self, "fedlap", self.fedlap.model_copy(update={"image_steps": steps}))
        if self.spec.configured == "fedavg" and self.fedavg.model == "auto":
            object.__setattr__(self, "fedavg", self.fedavg.model_copy(update={"model": self.spec.network}))
        if self.spec.configured == "fedavg" and not self.fedavg.rounds:
            object.__setattr__(self, "fedavg", self.fedavg.model_copy(update={"rounds": rounds_for(self)}))
        return self

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        budget = f"epsilon = {self.epsilon:g}, delta = {self.delta:g}"
        if bool(self.epsilon) != bool(self.delta):
            raise ValueError(
                f"{budget}: set both (delta far below one over a site's number of records, such as 1e-5), or neither (0) to "
                "run without differential privacy"
            )
        if self.epsilon and self.fedpft.privacy == "none":
            raise ValueError(f"{budget}, but fedpft.privacy = 'none'; remove fedpft.privacy, or epsilon and delta")
        if not self.epsilon and self.fedpft.privacy not in ("auto", "none"):
            raise ValueError(f"fedpft.privacy = {self.fedpft.privacy!r} needs a budget; set epsilon and delta")
        if self.fedpft.public and not self.epsilon:
            raise ValueError(f"fedpft.public = {self.fedpft.public!r} works only with privacy; set epsilon and delta")
        if self.epsilon and self.backbone in OF_IMAGE_SIZE and not self.image_size and self.data in OF_IMAGES:
            raise ValueError(
                f"{budget}, but backbone = {self.backbone!r} with image-size = 0: the dimension would disclose the size of "
                "a site's images; set image-size"
            )
        self._secure_sum_agrees()
        self._method_agrees(budget)
        self._defence_agrees()
        if self.partition == "column" and not self.site_column:
            raise ValueError("partition = 'column' needs site-column, the column that names each record's site")
        return self

    def _secure_sum_agrees(self) -> None:
        if self.secure_sum and not (self.spec.counts or methods.method_named(self.method).from_sums):
            names = " or ".join(map(repr, methods.SECURE_SUMS))
            raise ValueError(f"secure-sum = true, but what method = {self.method!r} combines is not a sum; use {names}")
        if self.features.projection and not self.secure_sum:
            raise ValueError(
                f"features.projection = {self.features.projection!r} works only with secure-sum = true; set both, or none"
            )
        if self.secure_sum and self.fedpft.seal:
            raise ValueError("secure-sum = true and fedpft.seal = true: a sealed chain has no sum; remove one of them")

    def _method_agrees(self, budget: str) -> None:
        spec = self.spec
        if spec.needs_budget and not self.epsilon:
            raise ValueError(f"method = {self.method!r} needs a budget; set epsilon and delta")
        if self.epsilon and not spec.mechanisms:
            private = [repr(other.name) for other in methods.METHODS.values() if other.mechanisms]
            raise ValueError(
                f"{budget}, but method = {self.method!r} does not support it; use {', '.join(private[:-1])} or {private[-1]}"
            )
        for name in ("order", "seal"):
            if getattr(self.fedpft, name) and name not in spec.allows:
                raise ValueError(f"fedpft.{name} works only in a chain; set fedpft.topology = 'chain', or remove it")
        if refused := spec.refusal(self):
            raise ValueError(refused)
        if self.resume and spec.kind not in ("rounds", "chain"):
            raise ValueError(
                f"resume = {self.resume!r}: method = {self.method!r} has no rounds, so there is nothing to continue; remove "
                "resume, and start the run again"
            )
        if self.trained.noise_multiplier and not self.epsilon:
            raise ValueError(
                f"noise-multiplier = {self.trained.noise_multiplier:g} needs epsilon, the limit of the privacy loss; set it"
            )
        if not isinstance(self.trained, DPCVAEConfig) and self.trained.augment and self.trained.kind != "convnet":
            raise ValueError(f"augment = {', '.join(self.trained.augment)} works only on images; set model = 'convnet'")

    def _defence_agrees(self) -> None:
        if 0 < self.max_share < 1:
            raise ValueError(f"max-share = {self.max_share:g}: must be at least 1 (the median weight), or 0 for no cap")
        if refused := defences.refusal(self):
            raise ValueError(refused)

    @property
    def power(self) -> float:
        """The power of all features, with "auto" resolved."""
        given = self.features.power
        return power_for(self.backbone, self.mechanism in CLIPPED) if given == "auto" else given

    @property
    def backbone_fingerprint(self) -> str:
        """The backbone fingerprint that every site must have, with the power of its features; empty if none is set."""
        return with_power(self.fingerprint, self.power)

    @property
    def defends(self) -> str:
        """The run's defence against hostile sites, with "auto" resolved."""
        return defences.resolved(self)

    @property
    def spec(self) -> MethodSpec:
        """The method's description in the registry."""
        return methods.spec_of(self)

    @property
    def trained(self) -> FedAvgConfig | FedLAPConfig | DPCVAEConfig:
        """The section of the model that is trained in rounds."""
        section: FedAvgConfig | FedLAPConfig | DPCVAEConfig = getattr(self, self.spec.trained)
        return section

    @property
    def mechanism(self) -> str:
        """The privacy mechanism at the sites: "none", "sums", "dp-em" (sums of several components), "theorem-4.1" or
        "dp-sgd".
        """
        return self.spec.mechanism(self) if self.epsilon else "none"


def parse_run_config(flat: Mapping[str, Scalar]) -> RunConfig:
    """Parse a flat run-config such as {"method": "fedpft", "fedpft.rank": 64}.

    Raises ConfigError with one line that names key, value and the allowed values.
    """
    return parse_settings(RunConfig, flat)


def digest_settings(config: RunConfig) -> tuple[str, ...]:
    """The flat keys of the settings that `run_digest` covers."""
    keys = ["method", "seed", "classes", "backbone", "image-size", "epsilon", "delta"]
    keys += [f"{section}.{kebab(name)}" for section, names in config.spec.digest.items() for name in names]
    return (*keys, "fedpft.seal", "fedpft.bits", "features.power", "secure-sum", *SECURE_SUM_KEYS)


def run_digest(config: RunConfig) -> str:
    """A short name of a run's settings, see `full_digest`. An attacker can find two settings with the same one."""
    return full_digest(config)[:16]


def full_digest(config: RunConfig) -> str:
    """Digest of the settings that affect a surrogate: equal digests mean comparable surrogates on any machine.

    The location of the data, the device and the coordinator's own settings are left out, so a simulation and a deployment
    of the same federation have the same digest.
    """
    chosen = {
        "method": config.method,
        "seed": config.seed,
        "classes": config.classes,
        "backbone": config.backbone,
        "image-size": config.image_size,
        "budget": (config.epsilon, config.delta),
    } | {section: getattr(config, section).model_dump(include=set(keys)) for section, keys in config.spec.digest.items()}
    # Only for such runs: so other runs keep their old digest, and stored surrogates stay comparable.
    if config.fedpft.seal:
        chosen["seal"] = True
    if config.fedpft.bits != 16:
        chosen["bits"] = config.fedpft.bits
    if config.power != 1:
        chosen["power"] = config.power
    if config.secure_sum:
        chosen["secure-sum"] = [getattr(config, name.replace("-", "_")) for name in SECURE_SUM_KEYS]
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()

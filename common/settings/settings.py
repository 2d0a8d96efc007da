"""All settings of a run, as fields: `Settings`, and the groups of it that parts of the system take
alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ..backbones.backbone_names import OWN_BACKBONE
from . import base
from .base import Section
from .heads import (
    BaselineSettings,
    CountingSettings,
    FeaturesSettings,
    HeadSettings,
    TargetSettings,
)
from .training import DPCVAESettings, FedAvgSettings, FedLAPSettings, FedPFTSettings

SECURE_AGGREGATION_KEYS = (
    "secure-aggregation-threshold",
    "secure-aggregation-records",
    "secure-aggregation-range",
    "colluding",
    "dropouts",
)


def _is_no_code(name: str) -> str:
    if name.partition(":")[0].strip().lower() == "python":
        raise ValueError(
            f"a run cannot name code of a site; set backbone = {OWN_BACKBONE!r} here, and backbone "
            "= 'python:...' in the node-config of each site"
        )
    return name


BackboneName = Annotated[str, AfterValidator(_is_no_code)]


class Sections(Section):
    """The sections of methods and features."""

    fedpft: FedPFTSettings = FedPFTSettings()
    head: HeadSettings = HeadSettings()
    features: FeaturesSettings = FeaturesSettings()
    fedavg: FedAvgSettings = FedAvgSettings()
    fedlap: FedLAPSettings = FedLAPSettings()
    dpcvae: DPCVAESettings = DPCVAESettings()
    baseline: BaselineSettings = BaselineSettings()
    counting: CountingSettings = CountingSettings()


class Basics(Section):
    """Method, seed, and what the coordinator does with the result."""

    method: str = "fedpft"
    """Method of the run."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of partition, training and sampling; never of privacy noise."""
    output_dir: str = Field("runs", min_length=1)
    """Folder in which the coordinator makes the run folder."""
    resume: str = ""
    """Folder of an interrupted run in rounds or a chain, which is continued."""
    approval: str = ""
    """The signed proposal of this run, in base64, for sites whose policy asks for one;
    `coordinator run --proposal` sets it."""
    compare: bool = False
    """Whether baselines on the same features are computed; for simulations."""
    device: base.Device = "auto"
    """Processor or GPU; a site's own setting comes first; auto takes a GPU if any."""


class DataSettings(Section):
    """Where the records of a simulation are, and how they are distributed to sites."""

    data: base.DataKind = "digits"
    """Kind of data in a simulation: the bundled digits, or files in data-dir."""
    data_dir: str = ""
    """Folder of the data in a simulation."""
    dataset: base.Names = ()
    """Files or folders in data-dir, each a site if several; empty for all."""
    label_column: base.Name = "label"
    """Column of a table that holds the class of a record."""
    patient_column: base.Name = ""
    """Column of a table that holds the patient ID; patients are then protected."""
    bag_column: base.Name = ""
    """Column of a table, or tensor, that names the bag of an image, where a run pools bags; of
    DICOM also study, series or patient, of a folder without a table folder."""
    classes: base.ClassNames = ()
    """All classes in their order; empty collects the classes that sites report."""
    partition: Literal["iid", "dirichlet", "classes", "column"] = "dirichlet"
    """How a simulation distributes records to sites."""
    alpha: float = Field(0.5, gt=0, le=1e6)
    """Evenness of the classes at a site with partition dirichlet; large is even."""
    classes_per_site: Annotated[int, base.Unit("classes")] = Field(2, ge=1)
    """Number of classes of a site with partition classes."""
    site_column: base.Name = ""
    """Column of a table that names a record's site, with partition column."""
    test_fraction: float = Field(0.2, gt=0, lt=1)
    """Share of the records that test, if the data have no split."""


class BackboneSettings(Section):
    """The frozen model that makes features of images."""

    backbone: BackboneName = Field("pixels", min_length=1)
    """Frozen model of the features: torchvision:NAME, open_clip:MODEL/TAG, timm:NAME,
    hf:OWNER/NAME, onnx:FILE, pixels or pixels:rgb; after open_clip: and timm: also
    hf-hub:OWNER/NAME and local-dir:FOLDER; own of each site."""
    weights_path: str = ""
    """File of the backbone's weights, or folder with them and their configuration; empty
    downloads the library's."""
    image_size: base.Pixels = Field(0, ge=0, le=4096)
    """Side to which images are resized; 0 for the backbone's own, or unchanged pixels."""
    fingerprint: str = ""
    """Backbone fingerprint that every site must have; empty for that of most sites, in a
    private run for that of all."""


class Waiting(Section):
    """How long the coordinator waits, and for whom."""

    sites: Annotated[
        int | tuple[str, ...],
        BeforeValidator(base.split_sites),
        base.Unit("sites"),
        base.Range("a number from 0, or names separated by commas"),
    ] = 0
    """Number of sites to wait for, 0 for those that are connected; or the names of the
    registered sites that the run asks, and no other."""
    quorum: float = Field(0.5, gt=0, le=1)
    """Smallest share of the sites whose replies must be usable."""
    deadline: base.Seconds = Field(3600.0, gt=0)
    """Time that sites have for one reply."""
    check_only: bool = False
    """Only ask the sites who they are and whether they could take part; nothing is charged and
    nothing learned."""
    grace: base.Seconds = Field(0.0, ge=0)
    """Time after the result in which late replies are still stored, for a method that sends
    once."""
    max_payload_mib: base.MiB = Field(256, ge=1)
    """Largest message that the coordinator accepts."""

    @property
    def site_names(self) -> tuple[str, ...]:
        """The sites that the run asks; empty for all."""
        return self.sites if isinstance(self.sites, tuple) else ()

    @property
    def site_count(self) -> int:
        """Number of sites to wait for; 0 for those that are connected."""
        return self.sites if isinstance(self.sites, int) else len(self.sites)


class Limits(Section):
    """What one hostile site may do to the result."""

    max_share: float = Field(3.0, ge=0, le=1e6)
    """Largest weight of a site, as a multiple of the median site's; 0 for no limit."""
    defence: base.Defence = "auto"
    """Defence against hostile sites; auto is harm where sites send statistics of their records,
    otherwise none."""


class PrivacyBudget(Section):
    """The privacy budget of a run at each site: both zero without privacy."""

    epsilon: float = Field(0.0, ge=0)
    """Privacy budget of the run at each site; 0 for no privacy."""
    delta: float = Field(0.0, ge=0, le=0.01)
    """Delta of the privacy budget, far below one over a site's records; 0 for no privacy."""
    noise_seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the privacy noise in a simulation, so that a private run can be repeated; such a
    run is not private. 0 for noise from the operating system."""


class SumSettings(Section):
    """Whether the coordinator sees only the sum over all sites, and under which limits."""

    secure_aggregation: bool = False
    """Whether the coordinator sees only the sum over all sites, never what one site sends."""
    secure_aggregation_threshold: Annotated[int, base.Unit("sites")] = Field(0, ge=0, le=1000)
    """Sites that must reply to the end for the sum; 0 for the fewest that are safe."""
    secure_aggregation_records: base.Records = Field(20_000, ge=1, le=10**9)
    """Most records of one site; a smaller number makes the sum finer. Where features.records is
    larger than the default, it takes the place of the default."""
    secure_aggregation_range: float = Field(16.0, gt=0, le=1e6)
    """Largest magnitude of a feature without privacy; with a larger one at any site the sum
    cannot be read."""
    colluding: float = Field(1 / 3, ge=0, lt=1)
    """Share of the sites that may tell the coordinator their secrets without harm to the
    others' privacy."""
    dropouts: float = Field(0.1, ge=0, lt=1)
    """Share of the sites that secure aggregation may lose after their keys and still be
    completed."""


# Bases in reverse: pydantic puts the fields of the last one first, and the order of keys is part of
# stored runs.
class Settings(
    TargetSettings,
    SumSettings,
    PrivacyBudget,
    Limits,
    Waiting,
    BackboneSettings,
    DataSettings,
    Basics,
    Sections,
):
    """All settings of a run. The keys are those of `[tool.flwr.app.config]` in pyproject.toml.

    Functions that need one group take that: `Waiting`, `DataSettings`, a section of a method.
    `fedsurrogate.common.run` checks whether the settings agree, and replaces "auto".

    Example:
        >>> Settings(seed=3).fedpft.components
        1
    """

    def flat(self) -> dict[str, Any]:
        """By key, such as "fedpft.rank", as in a run-config.

        Example:
            >>> Settings(seed=3).flat()["fedpft.components"]
            1
        """
        return base.flatten(self.model_dump(by_alias=True, mode="json"))

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
    """Method, seed, and what the coordinator does with the result.

    Attributes:
        method: Method of the run.
        seed: Seed of partition, training and sampling; never of privacy noise.
        output_dir: Folder in which the coordinator makes the run folder.
        resume: Folder of an interrupted run in rounds or a chain, which is continued.
        approval: The signed proposal of this run, in base64, for sites whose policy asks for one;
            `coordinator run --proposal` sets it.
        compare: Whether baselines on the same features are computed; for simulations.
        device: Processor or GPU; a site's own setting comes first; auto takes a GPU if any.
    """

    method: str = "fedpft"
    seed: int = Field(0, ge=0, lt=2**31)
    output_dir: str = Field("runs", min_length=1)
    resume: str = ""
    approval: str = ""
    compare: bool = False
    device: base.Device = "auto"


class DataSettings(Section):
    """Where the records of a simulation are, and how they are distributed to sites.

    Attributes:
        data: Kind of data in a simulation: the bundled digits, or files in data-dir.
        data_dir: Folder of the data in a simulation.
        dataset: Files or folders in data-dir, each a site if several; empty for all.
        label_column: Column of a table that holds the class of a record.
        patient_column: Column of a table that holds the patient ID; patients are then protected.
        bag_column: Column of a table, or tensor, that names the bag of an image, where a run pools
            bags; of DICOM also study, series or patient, of a folder without a table folder.
        classes: All classes in their order; empty collects the classes that sites report.
        partition: How a simulation distributes records to sites.
        alpha: Evenness of the classes at a site with partition dirichlet; large is even.
        classes_per_site: Number of classes of a site with partition classes.
        site_column: Column of a table that names a record's site, with partition column.
        test_fraction: Share of the records that test, if the data have no split.
    """

    data: base.DataKind = "digits"
    data_dir: str = ""
    dataset: base.Names = ()
    label_column: base.Name = "label"
    patient_column: base.Name = ""
    bag_column: base.Name = ""
    classes: base.ClassNames = ()
    partition: Literal["iid", "dirichlet", "classes", "column"] = "dirichlet"
    alpha: float = Field(0.5, gt=0, le=1e6)
    classes_per_site: Annotated[int, base.Unit("classes")] = Field(2, ge=1)
    site_column: base.Name = ""
    test_fraction: float = Field(0.2, gt=0, lt=1)


class BackboneSettings(Section):
    """The frozen model that makes features of images.

    Attributes:
        backbone: Frozen model of the features: torchvision:NAME, open_clip:MODEL/TAG, timm:NAME,
            hf:OWNER/NAME, onnx:FILE, pixels or pixels:rgb; after open_clip: and timm: also
            hf-hub:OWNER/NAME and local-dir:FOLDER; own of each site.
        weights_path: File of the backbone's weights, or folder with them and their configuration;
            empty downloads the library's.
        image_size: Side to which images are resized; 0 for the backbone's own, or unchanged pixels.
        fingerprint: Backbone fingerprint that every site must have; empty for that of most sites,
            in a private run for that of all.
    """

    backbone: BackboneName = Field("pixels", min_length=1)
    weights_path: str = ""
    image_size: base.Pixels = Field(0, ge=0, le=4096)
    fingerprint: str = ""


class Waiting(Section):
    """How long the coordinator waits, and for whom.

    Attributes:
        sites: Number of sites to wait for, 0 for those that are connected; or the names of the
            registered sites that the run asks, and no other.
        quorum: Smallest share of the sites whose replies must be usable.
        deadline: Time that sites have for one reply.
        check_only: Only ask the sites who they are and whether they could take part; nothing is
            charged and nothing learned.
        grace: Time after the result in which late replies are still stored, for a method that sends
            once.
        max_payload_mib: Largest message that the coordinator accepts.
    """

    sites: Annotated[
        int | tuple[str, ...],
        BeforeValidator(base.split_sites),
        base.Unit("sites"),
        base.Range("a number from 0, or names separated by commas"),
    ] = 0
    quorum: float = Field(0.5, gt=0, le=1)
    deadline: base.Seconds = Field(3600.0, gt=0)
    check_only: bool = False
    grace: base.Seconds = Field(0.0, ge=0)
    max_payload_mib: base.MiB = Field(256, ge=1)

    @property
    def site_names(self) -> tuple[str, ...]:
        """The sites that the run asks; empty for all."""
        return self.sites if isinstance(self.sites, tuple) else ()

    @property
    def site_count(self) -> int:
        """Number of sites to wait for; 0 for those that are connected."""
        return self.sites if isinstance(self.sites, int) else len(self.sites)


class Limits(Section):
    """What one hostile site may do to the result.

    Attributes:
        max_share: Largest weight of a site, as a multiple of the median site's; 0 for no limit.
        defence: Defence against hostile sites; auto is harm where sites send statistics of their
            records, otherwise none.
    """

    max_share: float = Field(3.0, ge=0, le=1e6)
    defence: base.Defence = "auto"


class PrivacyBudget(Section):
    """The privacy budget of a run at each site: both zero without privacy.

    Attributes:
        epsilon: Privacy budget of the run at each site; 0 for no privacy.
        delta: Delta of the privacy budget, far below one over a site's records; 0 for no privacy.
        noise_seed: Seed of the privacy noise in a simulation, so that a private run can be
            repeated; such a run is not private. 0 for noise from the operating system.
    """

    epsilon: float = Field(0.0, ge=0)
    delta: float = Field(0.0, ge=0, le=0.01)
    noise_seed: int = Field(0, ge=0, lt=2**31)


class SumSettings(Section):
    """Whether the coordinator sees only the sum over all sites, and under which limits.

    Attributes:
        secure_aggregation: Whether the coordinator sees only the sum over all sites, never what one
            site sends.
        secure_aggregation_records: Most records of one site; a smaller number makes the sum finer.
            Where features.records is larger than the default, it takes the place of the default.
        secure_aggregation_range: Largest magnitude of a feature without privacy; with a larger one
            at any site the sum cannot be read.
        colluding: Share of the sites that may tell the coordinator their secrets without harm to
            the others' privacy.
        dropouts: Share of the sites that secure aggregation may lose after their keys and still be
            completed.
    """

    secure_aggregation: bool = False
    secure_aggregation_records: base.Records = Field(20_000, ge=1, le=10**9)
    secure_aggregation_range: float = Field(16.0, gt=0, le=1e6)
    colluding: float = Field(1 / 3, ge=0, lt=1)
    dropouts: float = Field(0.1, ge=0, lt=1)


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

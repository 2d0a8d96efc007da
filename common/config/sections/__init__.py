"""The sections of the run configuration, one file a family of methods, and the base class of all settings."""

from common.config.sections.base import (
    AUGMENTATIONS,
    Augmentations,
    Clip,
    Covariance,
    DataKind,
    Defence,
    Device,
    FeatureClip,
    Model,
    Names,
    Settings,
    kebab,
    split_names,
)
from common.config.sections.counting import CountingConfig
from common.config.sections.features import FeaturesConfig
from common.config.sections.fedlap import FedLAPConfig
from common.config.sections.fedpft import FedPFTConfig
from common.config.sections.generators import DPCVAEConfig
from common.config.sections.heads import (
    AFLConfig,
    BaselineConfig,
    FedCGSConfig,
    FedCOFConfig,
    GHOFLConfig,
    HeadConfig,
)
from common.config.sections.training import FedAvgConfig

__all__ = [
    "AUGMENTATIONS",
    "AFLConfig",
    "Augmentations",
    "BaselineConfig",
    "Clip",
    "CountingConfig",
    "Covariance",
    "DPCVAEConfig",
    "DataKind",
    "Defence",
    "Device",
    "FeatureClip",
    "FeaturesConfig",
    "FedAvgConfig",
    "FedCGSConfig",
    "FedCOFConfig",
    "FedLAPConfig",
    "FedPFTConfig",
    "GHOFLConfig",
    "HeadConfig",
    "Model",
    "Names",
    "Sections",
    "Settings",
    "kebab",
    "split_names",
]


class Sections(Settings):
    """Every section of the settings of a run."""

    fedpft: FedPFTConfig = FedPFTConfig()
    head: HeadConfig = HeadConfig()
    features: FeaturesConfig = FeaturesConfig()
    fedavg: FedAvgConfig = FedAvgConfig()
    fedlap: FedLAPConfig = FedLAPConfig()
    dpcvae: DPCVAEConfig = DPCVAEConfig()
    baseline: BaselineConfig = BaselineConfig()
    afl: AFLConfig = AFLConfig()
    fedcof: FedCOFConfig = FedCOFConfig()
    fedcgs: FedCGSConfig = FedCGSConfig()
    ghofl: GHOFLConfig = GHOFLConfig()
    counting: CountingConfig = CountingConfig()

"""The settings of a run as they are written: fields only, one file a family of methods. No method
is known here.
"""

from .base import (
    AUGMENTATIONS,
    AnyCovariance,
    Augmentations,
    Clip,
    Covariance,
    DataKind,
    Defence,
    Device,
    FeatureClip,
    Model,
    Names,
    Section,
    kebab,
    split_names,
)
from .heads import Bag, BaselineSettings, CountingSettings, FeaturesSettings, HeadSettings
from .settings import (
    SECURE_AGGREGATION_KEYS,
    BackboneSettings,
    DataSettings,
    PrivacyBudget,
    Settings,
    SumSettings,
    Waiting,
)
from .training import DPCVAESettings, FedAvgSettings, FedLAPSettings, FedPFTSettings

__all__ = [
    "AUGMENTATIONS",
    "SECURE_AGGREGATION_KEYS",
    "AnyCovariance",
    "Augmentations",
    "BackboneSettings",
    "Bag",
    "BaselineSettings",
    "Clip",
    "CountingSettings",
    "Covariance",
    "DPCVAESettings",
    "DataKind",
    "DataSettings",
    "Defence",
    "Device",
    "FeatureClip",
    "FeaturesSettings",
    "FedAvgSettings",
    "FedLAPSettings",
    "FedPFTSettings",
    "HeadSettings",
    "Model",
    "Names",
    "PrivacyBudget",
    "Section",
    "Settings",
    "SumSettings",
    "Waiting",
    "kebab",
    "split_names",
]

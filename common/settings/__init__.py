"""The settings of a run as they are written: fields only, one file a family of methods. No method
is known here.
"""

from .base import DataKind, Device, Model, Names, Section, kebab, split_names
from .heads import Bag, CountingSettings, FeaturesSettings, HeadSettings
from .settings import SECURE_AGGREGATION_KEYS, BackboneSettings, Settings
from .training import DPCVAESettings, FedAvgSettings, FedLAPSettings, FedPFTSettings

__all__ = [
    "SECURE_AGGREGATION_KEYS",
    "BackboneSettings",
    "Bag",
    "CountingSettings",
    "DPCVAESettings",
    "DataKind",
    "Device",
    "FeaturesSettings",
    "FedAvgSettings",
    "FedLAPSettings",
    "FedPFTSettings",
    "HeadSettings",
    "Model",
    "Names",
    "Section",
    "Settings",
    "kebab",
    "split_names",
]

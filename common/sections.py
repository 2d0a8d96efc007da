"""The sections of the run configuration, and what all settings have in common."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def kebab(name: str) -> str:
    """A field's name as it stands in settings."""
    return name.replace("_", "-")


def split_names(value: object) -> Any:
    """Turn "a, b" into ("a", "b"); an empty string means "not set" and gives ().

    Raises ValueError for a list that holds no name at all, such as ",".
    """
    if not isinstance(value, str):
        return value
    names = tuple(part.strip() for part in value.split(",") if part.strip())
    if value and not names:
        raise ValueError(f"an empty list {value!r}; name at least one, separated by commas")
    if len(set(names)) < len(names):
        raise ValueError(f"a name stands twice in {value!r}")
    return names


Names = Annotated[tuple[str, ...], BeforeValidator(split_names)]


def _check_device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError("must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
    return value


Device = Annotated[str, AfterValidator(_check_device)]
Covariance = Literal["full", "diag", "spherical", "lowrank"]
DataKind = Literal["digits", "imagefolder", "parquet", "safetensors"]
# Every site trains a head on its own data, and sends it once.
OneShot = Literal["local", "ensemble", "average", "fedbe", "fedkt"]
# Sites train one model together in rounds; the last two keep something of their own beside it.
InRounds = Literal[
    "fedavg", "fedprox", "fedyogi", "fedsgd", "scaffold", "dsfl", "dp-fedavg", "dp-fedprox", "fedlambda", "knn-per"
]
Method = Literal["fedpft", "kd", OneShot, InRounds]
ONE_SHOT, IN_ROUNDS = get_args(OneShot), get_args(InRounds)


class Settings(BaseModel):
    """Base of all settings: frozen, strict types, dashes in keys, nothing unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True)


class FedPFTConfig(Settings):
    """What a FedPFT site fits to its features (section `fedpft.`)."""

    covariance: Covariance = "lowrank"
    components: int = Field(1, ge=1, le=1000)
    rank: int = Field(16, ge=1, le=4096)
    samples_per_component: int = Field(10, ge=1)
    privacy: Literal["auto", "none", "sums", "theorem-4.1"] = "auto"
    clip: float = Field(0.0, ge=0)
    public: str = ""
    topology: Literal["star", "chain"] = "star"
    order: Names = ()
    seal: bool = False


class HeadConfig(Settings):
    """How a linear head is trained (section `head.`)."""

    epochs: int = Field(10, ge=1, le=10_000)
    min_steps: int = Field(400, ge=0)
    batch_size: int = Field(256, ge=1)
    learning_rate: float = Field(1e-3, gt=0, le=10)
    max_samples: int = Field(1_000_000, ge=1)

    def passes(self, batches: int) -> int:
        """Passes over data of so many batches: `epochs`, more where these would be fewer than `min_steps` steps."""
        return max(self.epochs, -(-self.min_steps // batches))


class FedAvgConfig(Settings):
    """How sites train one model in rounds: FedAvg and its relatives (section `fedavg.`).

    learning_rate: of a linear model in units of one over the mean squared norm of the features, so their scale does not
    matter; zero for 30 of a linear model (3 under privacy) and 0.1 of a convnet. mu: FedProx's. server_learning_rate:
    FedYogi's. keep: the share of an update that DSFL sends. clip, sample_rate: of a record's gradient and of the records
    in a step under privacy, where a step divides by batch_size.
    """

    model: Literal["linear", "convnet"] = "linear"
    width: int = Field(128, ge=1, le=1024)
    rounds: int = Field(10, ge=1, le=100_000)
    local_epochs: int = Field(5, ge=1, le=10_000)
    batch_size: int = Field(64, ge=1)
    learning_rate: float = Field(0.0, ge=0, le=1e4)
    momentum: float = Field(0.0, ge=0, lt=1)
    mu: float = Field(0.01, ge=0)
    server_learning_rate: float = Field(0.03, gt=0)
    keep: float = Field(0.5, gt=0, le=1)
    clip: float = Field(1.0, gt=0)
    sample_rate: float = Field(0.05, gt=0, le=1)

    def rate(self, private: bool) -> float:
        """The learning rate, or what works for the model."""
        usual = 0.1 if self.model == "convnet" else 3.0 if private else 30.0
        return self.learning_rate or usual

    @property
    def private_steps(self) -> int:
        """Steps of a private round: as many as take in every record `local_epochs` times on average."""
        return max(1, round(self.local_epochs / self.sample_rate))


class BaselineConfig(Settings):
    """Settings of the other methods that FedPFT is compared with (section `baseline.`).

    temperature, received: of a received head in KD, and its share of the loss. samples: heads FedBE draws. teachers: of a
    site in FedKT. synthetic: features that FedBE and FedKT label. neighbours: of kNN-Per. validation: share of its
    training records by which a site of FedLambda or kNN-Per chooses how much of its own it mixes in.
    """

    temperature: float = Field(5.0, gt=0)
    received: float = Field(0.5, ge=0, le=1)
    samples: int = Field(15, ge=1)
    teachers: int = Field(5, ge=1)
    synthetic: int = Field(10_000, ge=1)
    neighbours: int = Field(10, ge=1)
    validation: float = Field(0.2, gt=0, lt=1)

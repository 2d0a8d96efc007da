"""Before a run: what it will cost each site, beside FedAvg of the same head and beside sending the features."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from common.claims import make_claim
from common.config import RunConfig
from common.errors import ConfigError

# What travels beside the numbers, as measured on real messages: a surrogate's header, the frame of its table and the
# site's later answer; the question and the frame of the head; names and counts of each class.
ENVELOPE_UP = 285
ENVELOPE_DOWN = 155
CLASS_BYTES = 5
KNOWN_DIMENSIONS = {"torchvision:mobilenet_v2": 1280, "torchvision:resnet50": 2048, "torchvision:resnet18": 512}


@dataclass(frozen=True)
class Cost:
    """What one site sends and receives, in bytes, and in how many rounds and messages.

    noise: under differential privacy, the length of the noise on a class mean whose features have norm one.
    """

    name: str
    up: int
    down: int
    rounds: int
    messages: int
    noise: float | None = None


def numbers(config: RunConfig, dimension: int, classes: int, records: int) -> int:
    """Numbers in one site's surrogate: equations 9 to 11 of FedPFT, and d (r + 1) + (d + 1) K C for lowrank; with noisy sums
    C (d + 1) and the second moment.
    """
    if config.mechanism == "sums":
        squares = {"spherical": 0, "diag": dimension}.get(config.fedpft.covariance, dimension * (dimension + 1) // 2)
        return classes * (dimension + 1) + squares
    capped = max(1, min(config.fedpft.components, records // classes // config.fedpft.samples_per_component))
    components = capped * classes
    match config.fedpft.covariance:
        case "full":
            return (2 * dimension + (dimension**2 - dimension) // 2 + 1) * components
        case "diag":
            return (2 * dimension + 1) * components
        case "spherical":
            return (dimension + 2) * components
        case "lowrank":
            rank = max(1, min(config.fedpft.rank, records // config.fedpft.samples_per_component, dimension))
            return (dimension + 1) * components + dimension * (rank + 1)


def plan(config: RunConfig, dimension: int, classes: int, records: int, fedavg_rounds: int) -> list[Cost]:
    """Costs a site: this run, FedAvg of the same linear head at 16 bits, and raw features at 16 bits."""
    head = 2 * classes * (dimension + 1)
    named = CLASS_BYTES * classes
    surrogate = 2 * numbers(config, dimension, classes, records) + ENVELOPE_UP + named
    return [
        Cost(
            _name(config), surrogate, head + ENVELOPE_DOWN + named, 1, 2, noise_on_mean(config, dimension, classes, records)
        ),
        Cost(
            f"FedAvg of the head, {fedavg_rounds} rounds",
            fedavg_rounds * head,
            fedavg_rounds * head,
            fedavg_rounds,
            fedavg_rounds,
        ),
        Cost("raw features", 2 * records * dimension, head, 1, 1),
    ]


def noise_on_mean(config: RunConfig, dimension: int, classes: int, records: int) -> float | None:
    """Length of the noise on the mean of a class of records / classes records; beyond about one it cannot be used alone."""
    claim = make_claim(config, "record")
    if claim is None:
        return None
    size = max(1, records // classes)
    sigma = claim.noise["sums"][0] if claim.noise else 4 / claim.epsilon * math.sqrt(5 * math.log(4 / claim.delta))
    return sigma * math.sqrt(dimension) / size


def _name(config: RunConfig) -> str:
    return f"fedpft {config.fedpft.covariance}" + (f", {config.mechanism}" if config.epsilon else "")


def find_dimension(config: RunConfig) -> int:
    """Feature dimension where it can be known without loading a model. Raises ConfigError where it cannot."""
    if config.data == "safetensors" and config.dataset:
        path = Path(config.data_dir).expanduser() / f"{config.dataset[0]}-train.safetensors"
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                return int(json.loads(file.read(length))["x"]["shape"][1])
        except (OSError, ValueError, TypeError, LookupError, OverflowError, MemoryError, struct.error):
            raise ConfigError(f"cannot read the feature dimension from {path}; give --dimension") from None
    if config.backbone == "pixels" and config.data == "digits":
        return 64
    if config.backbone in KNOWN_DIMENSIONS:
        return KNOWN_DIMENSIONS[config.backbone]
    raise ConfigError(f"the feature dimension of backbone {config.backbone!r} is not known here; give --dimension")

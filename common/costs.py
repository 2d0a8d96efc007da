"""Communication cost of a run for each site in bytes, compared with FedAvg of the same head and
with raw features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from .backbones.backbone_names import named_dimension
from .errors import ConfigError
from .methods.method import byte_count
from .run import Run
from .secure_aggregation.rules import projected_dimensions
from .settings import Settings

# Bytes in addition to the numbers, measured on real messages: headers and frames of a payload up
# and down, a request without a payload, the reply to an evaluation, and an identification; then the
# bytes for each class and a privacy claim.
PAYLOAD_UP, PAYLOAD_DOWN, REQUEST, EVALUATION, IDENTIFICATION = 246, 135, 19, 65, 133
CLASS_BYTES = 5
CLAIM_BYTES = 65
# What a site sends and receives in the further steps of secure aggregation, apart from what grows with
# the number of sites.
SUM_UP, SUM_DOWN = 600, 400
# Manifest, signature and key of the model, which come with the final evaluation.
SIGNED_MODEL = 960
# Gaussians for out-of-distribution scores come with the model where privacy allows it: directions,
# and bytes of their names.
GAUSSIAN_RANK, GAUSSIAN_NAMES = 32, 500


@dataclass(frozen=True)
class Cost:
    """What a run costs one site.

    Attributes:
        name: of the run, for tables.
        up: bytes that the site sends.
        down: bytes that it receives.
        rounds: of the run.
        messages: their number.
        epsilon: of the privacy budget; None without privacy.
        delta: of the privacy budget; None without privacy.
        noise: privacy noise on a class mean, as a share of the features' norm.
    """

    name: str
    up: int
    down: int
    rounds: int
    messages: int
    epsilon: float | None = None
    delta: float | None = None
    noise: float | None = None


def costs(
    config: Run, dimension: int, classes: int, records: int, fedavg_rounds: int
) -> list[Cost]:
    """Costs per site: this run, FedAvg of the same linear head at 16 bits, and raw features at 16
    bits.

    Left out: the keys of a sealed chain, some 200 bytes for every site.

    Args:
        config: of the run.
        dimension: of the features.
        classes: number of classes at the site. A private surrogate has all classes that the run
            names.
        records: of the site.
        fedavg_rounds: rounds of FedAvg that it is compared with.
    """
    head = 2 * classes * (dimension + 1)
    fedavg = fedavg_rounds * head
    return [
        _own(config, dimension, classes, records),
        Cost(
            f"FedAvg of the head, {fedavg_rounds} rounds",
            fedavg,
            fedavg,
            fedavg_rounds,
            fedavg_rounds,
        ),
        Cost("raw features", 2 * records * dimension, head, 1, 1),
    ]


def _own(config: Run, dimension: int, classes: int, records: int) -> Cost:
    """Cost of this run: the numbers in the method's schema, plus the overhead of every message."""
    plan, messages, own = config.plan, config.plan.messages, config.settings
    released = max(classes, len(own.classes)) if messages.all_classes else classes
    # In rounds the projection is one of the tensors that travel.
    mapped = 0 if plan.kind == "rounds" else projected_dimensions(config, dimension)
    projected = mapped or dimension
    sizes, named = messages.sizes(released, projected, records), CLASS_BYTES * released
    rounds = config.rounds if plan.kind == "rounds" else 1
    ups = downs = float(rounds)
    if plan.kind == "chain" and own.epsilon:
        # A private chain passes on every earlier site's surrogate; on average, half of the other
        # sites are earlier.
        downs = (max(1, own.site_count) - 1) / 2
        ups = 1 + downs
    sent = round(ups * byte_count(messages.sends, sizes))
    if messages.first is not None:
        sent += byte_count(messages.first, sizes) - byte_count(messages.sends, sizes)
    received = round(downs * byte_count(messages.receives, sizes)) + byte_count(
        messages.result, sizes
    )
    payloads = rounds * bool(messages.receives) + bool(messages.result)
    # Secure aggregation has an identification of its own, and three more messages, whose size grows with
    # the number of sites.
    summing = any(messages.member_bytes)
    identifications = messages.identifies * (rounds if summing else 1)
    number = rounds * bool(messages.sends) + 1 + identifications + 3 * summing * rounds
    up = sent + EVALUATION + identifications * (IDENTIFICATION + named)
    up += rounds * bool(messages.sends) * (PAYLOAD_UP + named + (CLAIM_BYTES if own.epsilon else 0))
    down = received + payloads * (PAYLOAD_DOWN + named) + (number - payloads) * REQUEST
    if messages.result and messages.signs:
        down += SIGNED_MODEL
        # Privacy allows the Gaussians, see `release_gaussians`.
        down += _gaussians(released, projected) if own.epsilon and plan.combination.samples else 0
    if summing:
        more_up, more_down = (each * max(1, own.site_count) for each in messages.member_bytes)
        up, down = up + rounds * (SUM_UP + more_up), down + rounds * (SUM_DOWN + more_down)
    if mapped:
        # The matrix, at 16 bits: with the shares, and as a part of the model.
        down += 2 * 2 * projected * dimension
    budget = (own.epsilon or None, own.delta or None)
    name = f"{own.method} {plan.variant}".rstrip() + (f", {rounds} rounds" if rounds > 1 else "")
    return Cost(name, up, down, rounds, number, *budget)


def payload_bytes(config: Run, dimension: int, classes: int, records: int) -> int:
    """The largest message of a site, in bytes, by the method's schema.

    Args:
        config: of the run.
        dimension: of the features.
        classes: as in `costs`.
        records: as in `costs`.
    """
    plan, messages = config.plan, config.plan.messages
    released = max(classes, len(config.settings.classes)) if messages.all_classes else classes
    sizes = messages.sizes(released, dimension, records)
    forms = [messages.sends] if messages.first is None else [messages.sends, messages.first]
    numbers = max(byte_count(form, sizes) for form in forms)
    # The last site of a private chain passes on what all sites before it have sent.
    several = max(1, config.settings.site_count) if plan.kind == "chain" and config.private else 1
    return several * (numbers + CLASS_BYTES * released) + bool(numbers) * PAYLOAD_UP


def check_payload(config: Run, dimension: int, classes: int, records: int) -> None:
    """Check that the coordinator would accept the messages of this run.

    Args:
        config: of the run.
        dimension: as in `costs`.
        classes: as in `costs`.
        records: as in `costs`.

    Raises:
        ConfigError: that names max-payload-mib and how much is needed.
    """
    needed, limit = (
        payload_bytes(config, dimension, classes, records),
        config.settings.max_payload_mib,
    )
    if needed > limit * 2**20:
        raise ConfigError(
            f"max-payload-mib = {limit:g}: a site with {classes} classes and features of dimension "
            f"{dimension} sends {needed / 2**20:.4g} MiB in one message, which the coordinator would "
            f"refuse; set max-payload-mib to {math.ceil(needed / 2**20)} or more, or send less"
        )


def _gaussians(classes: int, dimension: int) -> int:
    """Bytes of class means and two covariances at 16 bits, as base64 text."""
    rank = min(GAUSSIAN_RANK, dimension - 1)
    return 4 * (2 * dimension * (classes + 1 + 2 * rank) + 8 * rank + GAUSSIAN_NAMES) // 3


def find_dimension(settings: Settings) -> int:
    """Feature dimension, without loading a model.

    Args:
        settings: of the run.

    Returns:
        The dimension, from the header of the stored features, or from the name of the backbone and
        the image size.

    Raises:
        ConfigError: the dimension cannot be read or is not known here.

    Example:
        >>> from fedsurrogate.common.run import parse_run
        >>> find_dimension(parse_run({"backbone": "pixels", "image-size": 8}).settings)
        64
    """
    if settings.data == "safetensors" and settings.dataset:
        path = Path(settings.data_dir).expanduser() / f"{settings.dataset[0]}-train.safetensors"
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "np") as content:
                return int(content.get_slice("x").get_shape()[1])
        except (OSError, SafetensorError, LookupError):
            raise ConfigError(
                f"cannot read the feature dimension from {path}; give --dimension"
            ) from None
    named = named_dimension(settings.data, settings.backbone, settings.image_size)
    if named:
        return named
    raise ConfigError(
        f"the feature dimension of backbone {settings.backbone!r} is not known here; give "
        "--dimension"
    )


def known_dimension(settings: Settings) -> int:
    """The dimension of `find_dimension`; 0 if only the sites know it."""
    try:
        return find_dimension(settings)
    except ConfigError:
        return 0

"""What a run costs each site in bytes, beside FedAvg of the same head and beside sending the features."""

from __future__ import annotations

from dataclasses import dataclass

from common.claims import private_rounds
from common.config import RunConfig
from common.networks import fresh
from common.sections import IN_ROUNDS, DPCVAEConfig

# What travels beside the numbers, as measured on real messages: a surrogate's header, the frame of its table and the
# site's later answer; the question and the frame of the head; names and counts of each class.
ENVELOPE_UP = 285
ENVELOPE_DOWN = 155
CLASS_BYTES = 5
CLAIM_BYTES = 65


@dataclass(frozen=True)
class Cost:
    """What one site sends and receives, in bytes, and in how many rounds and messages.

    epsilon, delta: of the differential privacy, None without. noise: its noise on the mean of a class, as a share of the
    features' norm.
    """

    name: str
    up: int
    down: int
    rounds: int
    messages: int
    epsilon: float | None = None
    delta: float | None = None
    noise: float | None = None


def numbers(config: RunConfig, dimension: int, classes: int, records: int) -> int:
    """Numbers in one site's surrogate: equations 9 to 11 of FedPFT, and d (r + 1) + (d + 1) K C for lowrank.

    Noisy sums, C (d + 1) and a second moment, and DP-EM, at most (d + 2) K C, are of all classes whatever the records.
    """
    if config.mechanism == "sums":
        squares = {"spherical": 0, "diag": dimension}.get(config.fedpft.covariance, dimension * (dimension + 1) // 2)
        return classes * (dimension + 1) + squares
    if config.mechanism == "dp-em":
        return (dimension + 2) * config.fedpft.components * classes
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


def costs(config: RunConfig, dimension: int, classes: int, records: int, fedavg_rounds: int) -> list[Cost]:
    """Costs a site: this run, FedAvg of the same linear head at 16 bits, and raw features at 16 bits.

    classes: that the site has. Of a private run's surrogate they are all those the run names.
    """
    released = max(classes, len(config.classes)) if config.mechanism in ("sums", "dp-em") else classes
    head = 2 * classes * (dimension + 1)
    named = CLASS_BYTES * released
    up = 2 * numbers(config, dimension, released, records) + ENVELOPE_UP + named + (CLAIM_BYTES if config.epsilon else 0)
    down = 2 * released * (dimension + 1) + ENVELOPE_DOWN + named
    if config.fedpft.public:
        # The public centre goes out with the question, and again with the head.
        down += 2 * (2 * dimension + CLASS_BYTES)
    if config.method != "fedpft":
        return [_head_or_network(config, dimension, classes), *_alternatives(head, dimension, records, fedavg_rounds)]
    budget = (config.epsilon or None, config.delta or None)
    kind: str = "spherical" if config.mechanism == "dp-em" else config.fedpft.covariance
    kind += f", {config.mechanism}" if config.epsilon else ""
    # A chain asks who is there, and its last site for its head.
    hops = 2 if config.fedpft.topology == "chain" else 0
    return [
        Cost(f"fedpft {kind}", up + hops * ENVELOPE_UP, down + (up if hops else 0), 1, 2 + hops, *budget),
        *_alternatives(head, dimension, records, fedavg_rounds),
    ]


def _alternatives(head: int, dimension: int, records: int, rounds: int) -> list[Cost]:
    """FedAvg of a head of so many bytes, and the features themselves."""
    return [
        Cost(f"FedAvg of the head, {rounds} rounds", rounds * head, rounds * head, rounds, rounds),
        Cost("raw features", 2 * records * dimension, head, 1, 1),
    ]


def _head_or_network(config: RunConfig, dimension: int, classes: int) -> Cost:
    """What a site sends under one of the methods that FedPFT is compared with."""
    settings, name = config.trained, str(config.method)
    if isinstance(settings, DPCVAEConfig):
        return _generator(config, dimension, max(classes, len(config.classes)))
    in_rounds = config.method in IN_ROUNDS or config.method == "fedlap"
    size, total = classes * (dimension + 1), max(classes, len(config.classes))
    if in_rounds and settings.model != "linear":
        module = fresh(settings.model, dimension, total, settings.width)
        size = sum(p.numel() for p in module.parameters())
        name += f" of a {settings.model}"
    sent = {
        "local": 0,
        "scaffold": 4 * size,
        "dsfl": round(2 * config.fedavg.keep * size) + size // 8,
        "fedlap": config.fedlap.images_per_class * (total if config.epsilon else classes) * (2 * dimension + 1),
        "fedbe": 2 * (size + 2 * dimension),
        "fedkt": 2 * (size + 2 * dimension),
    }.get(config.method, 2 * size)
    rounds = private_rounds(config) if in_rounds else 1
    received = 0 if config.method == "local" else 2 * size
    budget = (config.epsilon or None, config.delta or None)
    up = rounds * (sent + ENVELOPE_UP) + ENVELOPE_UP
    down = rounds * (max(sent, received) if config.method == "scaffold" else received) + received + ENVELOPE_DOWN
    return Cost(f"{name}, {rounds} rounds" if rounds > 1 else name, up, down, rounds, rounds + 2, *budget)


def generator_numbers(config: RunConfig, dimension: int, classes: int) -> int:
    """Parameters of what is shared, C classes, d = dimension, latent L and hidden h: of a decoder (L + C) d of the linear
    path, d without hidden layers, else (L + C + 1) h + (h + 1) h + (h + 1) d; d of the variance; 2 L C of the prior. Of a
    GAN's generator (L + C + 1) 512 + 513 * 1024 + 1025 d.
    """
    settings, private = config.dpcvae, bool(config.epsilon)
    latent, hidden = settings.latents(private), settings.hidden
    inputs = latent + classes
    if config.method == "dpcgan":
        return (inputs + 1) * 512 + 513 * 1024 + 1025 * dimension
    layers = (inputs + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * dimension if hidden else dimension
    return inputs * dimension + layers + settings.learned_variance * dimension + settings.class_prior * 2 * latent * classes


def _generator(config: RunConfig, dimension: int, classes: int) -> Cost:
    """What a site sends: class sizes and sums once, then what its decoder moved by; the means go down with it."""
    size, rounds = generator_numbers(config, dimension, classes), private_rounds(config)
    opening = classes * (1 + (dimension if config.dpcvae.opening == "sums" else 0))
    up = 2 * (opening + (rounds - 1) * size) + (rounds + 2) * ENVELOPE_UP
    down = 2 * (rounds + 1) * (size + classes * (dimension + 1)) + ENVELOPE_DOWN
    budget = (config.epsilon or None, config.delta or None)
    return Cost(f"{config.method}, {rounds} rounds", up, down, rounds, rounds + 2, *budget)

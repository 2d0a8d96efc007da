"""Rules of the methods that train in rounds, FedLAP included: valid settings, schema, work at a site."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from common.rules.secure_sum import MECHANISM, UPDATES
from common.rules.spec import GRADIENTS, Field, Sizes, Summed, Work

if TYPE_CHECKING:
    from common.config.run_config import RunConfig
    from common.config.sections import FedAvgConfig, FedLAPConfig, Model

# By section of the settings: the keys that decide what a site sends, in the run's digest.
FEDAVG_KEYS = (
    *("model", "width", "rounds", "local_epochs", "batch_size", "learning_rate", "momentum", "mu"),
    *("server_learning_rate", "keep", "clip", "sample_rate", "noise_multiplier", "noise", "augment"),
)
FEDLAP_KEYS = (
    *("model", "width", "rounds", "images_per_class", "labels", "start", "trajectories", "loops", "batches"),
    *("batch_size", "image_steps", "model_steps", "trust_radius", "image_learning_rate", "image_momentum"),
    *("mse_weight", "learning_rate", "cosine", "server_steps", "rule", "memory", "augment", "clip", "sample_rate"),
    "noise_multiplier",
)
MODEL = (Field("parameters", "P", prefix=""),)
BODY = (Field("parameters", "B", prefix=""),)
# A control variate has the names of the parameters, after a prefix: CONTROL in common/models/parameters.py.
MODEL_AND_CONTROL = (*MODEL, Field("control", "P", prefix="control."))
# Records of a site, and the sum of their gradients of all parameters, each shortened to norm one.
GRADIENT_SUMS = (Summed("records", "1", 0), Summed("gradients", "P", 0))
# Rounds for fedavg.rounds = 0. With joint noise a round is a single step, and small noise allows more of them. Measured in
# benchmarks/secure_sums.py, on the test images of its table.
USUAL_ROUNDS, NOISY_ROUNDS, JOINT_ROUNDS, SMALL_NOISE = 10, 20, 30, 2.0
# DSFL sends the largest entries, and one bit for every entry.
SPARSE_UPDATE = (Field("parameters", "k"), Field("mask", "m"))
IMAGES = (Field("images", "N d"), Field("labels", "l"))
# The same after parsing.
LABELLED = (Field("images", "N d"), Field("labels", "N", 0))


# FedLAP's ConvNet halves an image three times; images of this many pixels or fewer end as one pixel, and it does not learn.
TOO_SMALL = 8


def network_for(pixels: bool, image_size: int) -> Model:
    """The network of FedLAP for fedlap.model = "auto": the ConvNet for images that are known to be large enough.

    pixels: whether the features are the pixels of images. image_size: their side, 0 if the settings do not give it.
    """
    return "convnet" if pixels and image_size > TOO_SMALL else "mlp"


def image_steps_for(model: Model, private: bool) -> int:
    """Steps of FedLAP's images for fedlap.image-steps = 0. A ConvNet's exact gradients need few (benchmarks/fedlap_cost.py);
    noisy ones, and those of other networks, go on to gain from more.
    """
    return 40 if model == "convnet" and not private else 100


def rounds_for(config: RunConfig) -> int:
    """Rounds for fedavg.rounds = 0."""
    if config.mechanism != MECHANISM:
        return USUAL_ROUNDS
    return JOINT_ROUNDS if config.epsilon >= SMALL_NOISE else NOISY_ROUNDS


def dp_fedavg_mechanism(config: RunConfig) -> str:
    """DP-FedAvg's mechanism: one joint noise in a secure sum, unless the settings want DP-SGD at every site."""
    return MECHANISM if config.secure_sum and config.fedavg.noise == "joint" else "dp-sgd"


def dp_sgd_packages(config: RunConfig) -> tuple[str, ...]:
    """Opacus finds the gradients of single records, except where one step of a linear model needs none of them."""
    return () if config.mechanism == MECHANISM and config.fedavg.kind != "convnet" else ("opacus",)


def dp_fedavg_summed(config: RunConfig) -> tuple[Summed, ...]:
    """What DP-FedAvg sums over all sites."""
    return GRADIENT_SUMS if config.mechanism == MECHANISM else UPDATES


def model_numbers(settings: FedAvgConfig | FedLAPConfig, classes: int, dimension: int) -> int:
    """Number of parameters of the trained model."""
    return _parameters(settings.kind, settings.width, classes, dimension)


@cache
def _parameters(kind: Model, width: int, classes: int, dimension: int) -> int:
    if kind == "linear":
        return classes * (dimension + 1)
    from common.models.networks import fresh

    return sum(parameter.numel() for parameter in fresh(kind, dimension, classes, width).parameters())


def variant(config: RunConfig) -> str:
    """The model's kind, for tables; empty for a linear model."""
    model = config.fedlap.kind if config.trained is config.fedlap else config.fedavg.kind
    return "" if model == "linear" else f"of a {model}"


def symbols(config: RunConfig, classes: int, dimension: int, records: int) -> Sizes:
    """P: parameters; B: those below the head; k: those that DSFL sends; m: 16-bit words of DSFL's mask."""
    settings, total = config.fedavg, max(classes, len(config.classes))
    numbers = model_numbers(settings, total, dimension)
    # The head has as many parameters for each class: what grows with the number of classes.
    body = numbers - total * (model_numbers(settings, total + 1, dimension) - numbers)
    return {"P": numbers, "B": body, "k": round(settings.keep * numbers), "m": numbers // 16}


def work(config: RunConfig, classes: int, dimension: int) -> Work:
    """The work of a site: local epochs, or the steps of DP-SGD, or one step with joint noise."""
    settings, joint = config.fedavg, config.mechanism == MECHANISM
    return Work(
        steps=1 if joint else settings.private_steps if config.epsilon else 0,
        passes=1 if joint else settings.local_epochs,
        rounds=settings.rounds,
        numbers=_held(settings, classes, dimension) * (GRADIENTS if config.epsilon else 4),
        width=settings.width,
    )


def _held(settings: FedAvgConfig | FedLAPConfig, classes: int, dimension: int) -> int:
    if settings.kind == "linear":
        return dimension * classes
    return settings.width * (dimension + classes + 27 * settings.width)


def linear_only(config: RunConfig) -> str:
    """Refuse models that are not linear, for methods that mix or sparsify linear heads."""
    if config.fedavg.model == "linear":
        return ""
    return f"method = {config.method!r} supports linear heads only; remove fedavg.model = {config.fedavg.model!r}"


def body_only(config: RunConfig) -> str:
    """Refuse a linear model, which has nothing below its head to share."""
    if config.fedavg.model != "linear":
        return ""
    return "fedavg.model = 'linear' has no representation below its head to share; use method = 'local', or 'mlp'"


def by_class_refusal(config: RunConfig) -> str:
    """Refuse images of classes that a site does not have: images are matched to the records of their own class."""
    if config.fedlap.labels != "all":
        return ""
    return f"fedlap.labels = 'all': method = {config.method!r} matches each class by its own records; remove it"


def no_momentum(config: RunConfig) -> str:
    """Refuse momentum: SCAFFOLD's correction assumes plain gradient steps."""
    if not config.fedavg.momentum:
        return ""
    return f"fedavg.momentum = {config.fedavg.momentum:g}: SCAFFOLD's control variates assume no momentum; set it to 0"


def no_augmentation(config: RunConfig) -> str:
    """Refuse augmentation: a private step clips the gradients of unchanged records."""
    return f"method = {config.method!r} does not support fedavg.augment; remove it" if config.fedavg.augment else ""


def fedlap_symbols(config: RunConfig, classes: int, dimension: int, records: int) -> Sizes:
    """N: synthetic images; l: 16-bit words of their labels, one byte each; P: parameters of the model."""
    total = max(classes, len(config.classes))
    images = config.fedlap.images_per_class * (total if config.epsilon else classes)
    return {"N": images, "l": images // 2, "P": model_numbers(config.fedlap, total, dimension)}


def fedlap_work(config: RunConfig, classes: int, dimension: int) -> Work:
    """The work of a site: steps of the images, of the model between them, and of the radius search."""
    settings = config.fedlap
    loops, images = settings.trajectories * settings.loops, settings.images_per_class * max(1, classes)
    steps = settings.private_steps + loops * (settings.image_steps + settings.model_steps) + settings.server_steps
    model = _held(settings, classes, dimension) * (GRADIENTS if config.epsilon else 4)
    return Work(
        steps=steps,
        passes=round(settings.private_steps * (settings.sample_rate if config.epsilon else 1.0)),
        rounds=settings.rounds,
        synthetic=images,
        numbers=model + images * dimension,
        width=settings.width,
    )


def fedlap_refusal(config: RunConfig) -> str:
    """Why FedLAP-DP does not support the settings; empty if it does."""
    if config.epsilon and config.fedlap.labels == "present":
        return "fedlap.labels = 'present' discloses which classes a site has; remove it under privacy"
    if config.epsilon and config.fedlap.mse(private=True) and not config.fedlap.batch_size:
        return (
            "fedlap.batch-size = 0: the squared error needs correctly scaled gradients, which under privacy are divided by "
            "this public number; set it to about sample-rate times a site's records, or set fedlap.mse-weight = 0"
        )
    return ""

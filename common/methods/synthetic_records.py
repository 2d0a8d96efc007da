"""Methods whose sites send synthetic records: FedLAP, and those that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..backbones.backbone_names import OF_IMAGE_SIZE
from ..settings import FedLAPSettings, Model, Settings
from . import method
from .training import MODEL, model_numbers, numbers_held, sgd_noise, variant_of

IMAGES = (method.Field("images", "N d"), method.Field("labels", "l"))
# The same after parsing.
LABELLED = (method.Field("images", "N d"), method.Field("labels", "N", 0))
# The screen examines the gradients of synthetic images; a median of images means nothing.
SCREENED = method.Defences(
    ("none", "screen"),
    ": synthetic images of several sites have no median",
    fewest=4,
    gap="synthetic images are bounded in length and weight, not in what they show: one hostile site "
    "of ten can cost more than half of the accuracy; defence = 'screen' leaves out some, and honest ones in "
    "their place",
)
# FedLAP's ConvNet halves an image three times; images of this many pixels or fewer end as one
# pixel, and it does not learn.
TOO_SMALL = 8


def fill(settings: Settings) -> Settings:
    """Settings with the network for fedlap.model = "auto", and the steps and images for
    fedlap.image-steps = 0 and fedlap.images-per-class = 0.

    The network is the ConvNet for images that are known to be large enough. A ConvNet's exact
    gradients need few steps (benchmarks/fedlap_cost.py); noisy ones, and those of other networks,
    go on to gain from more. Without fifty images of a class the accuracy of other networks falls
    from round to round (benchmarks/fedlap_radius.py); a ConvNet's does not, and noise spoils each
    image.
    """
    own = settings.fedlap
    if own.model == "auto":
        large = settings.backbone in OF_IMAGE_SIZE and settings.image_size > TOO_SMALL
        model: Model = "convnet" if large else "mlp"
        own = own.model_copy(update={"model": model})
    convnet, private = own.kind == "convnet", bool(settings.epsilon)
    numbers = {
        "image_steps": own.image_steps or (40 if convnet and not private else 100),
        "images_per_class": own.images_per_class or (10 if convnet or private else 50),
    }
    return settings.model_copy(update={"fedlap": own.model_copy(update=numbers)})


def _with_descent(settings: Settings) -> Settings:
    """The same with the descent for fedlap.descent = "auto": plain where images are many."""
    filled = fill(settings)
    own, private = filled.fedlap, bool(settings.epsilon)
    if own.descent == "auto":
        chosen = "annealed" if own.kind == "convnet" or private else "plain"
        own = own.model_copy(update={"descent": chosen})
    return filled.model_copy(update={"fedlap": own})


def _symbols(
    own: FedLAPSettings, named: int, private: bool, classes: int, dimension: int, records: int
) -> method.Sizes:
    """N: synthetic images; l: 16-bit words of their labels, one byte each; P: parameters of the
    model.
    """
    total = max(classes, named)
    images = own.images_per_class * (total if private else classes)
    return {"N": images, "l": images // 2, "P": model_numbers(own, total, dimension)}


def _work(own: FedLAPSettings, private: bool, classes: int, dimension: int) -> method.Work:
    """The work of a site: steps of the images, of the model between them, and of the radius search."""
    loops, images = own.trajectories * own.loops, own.images_per_class * max(1, classes)
    model = numbers_held(own, classes, dimension) * (method.GRADIENTS if private else 4)
    return method.Work(
        steps=own.private_steps + loops * (own.image_steps + own.model_steps) + own.server_steps,
        passes=round(own.private_steps * (own.sample_rate if private else 1.0)),
        rounds=own.rounds,
        synthetic=images,
        numbers=model + images * dimension,
        width=own.width,
    )


def _private_refusal(own: FedLAPSettings) -> str:
    """Why FedLAP-DP does not support the settings; empty if it does."""
    if own.mse(private=True) and not own.batch_size:
        return (
            "fedlap.batch-size = 0: the squared error needs correctly scaled gradients, which "
            "under privacy are divided by this public number; set it to about sample-rate times a "
            "site's records, or set fedlap.mse-weight = 0"
        )
    return ""


def plan(settings: Settings) -> method.Plan:
    """The plan of FedLAP: sites send images that imitate their loss landscape, and the radius in
    which they do.
    """
    own, private = settings.fedlap, bool(settings.epsilon)
    symbols = partial(_symbols, own, len(settings.classes), private)
    return method.Plan(
        kind="rounds",
        messages=method.Messages(IMAGES, MODEL, MODEL, parsed=LABELLED, symbols=symbols),
        combination=method.Combination(
            site="fedsurrogate.client_app.methods.fedlap.approximation:approximate",
            strategy="fedsurrogate.strategies.fedlap:FedLAP",
            makes_surrogates=True,
        ),
        work=partial(_work, own, private),
        privacy=sgd_noise(own, settings) if private else None,
        defences=SCREENED,
        training=method.ModelTraining("fedlap", unit_features=True, frames=False),
        refusal=_private_refusal(own) if private else "",
        variant=variant_of(own.kind),
    )


def psg_plan(settings: Settings) -> method.Plan:
    """The plan of PSG: FedLAP-DP without a radius."""
    return _without_radius(plan(settings), "psg")


def _without_radius(own: method.Plan, name: str) -> method.Plan:
    combination = replace(
        own.combination, site=f"fedsurrogate.client_app.methods.fedlap.approximation:{name}"
    )
    return replace(own, combination=combination)


def _by_class(name: str) -> Callable[[Settings], method.Plan]:
    """The plan of a method that matches images to the records of their own class, without privacy."""
    return lambda settings: replace(_without_radius(plan(settings), name), privacy=None, refusal="")


FEDLAP = method.Method(
    name="fedlap",
    title="FedLAP",
    paper="Wang et al. 2024, algorithms 1 to 3",
    plan=plan,
    reads=("fedlap",),
    shown="fedlap",
    fill=_with_descent,
)
DSC = replace(
    FEDLAP,
    name="dsc",
    title="DSC",
    paper="Zhao et al. 2021, dataset condensation by gradient matching",
    plan=_by_class("dsc"),
    fill=fill,
)
FEDDM = replace(
    FEDLAP,
    name="feddm",
    title="FedDM",
    paper="Xiong et al. 2023, distribution matching in each class",
    plan=_by_class("feddm"),
    fill=fill,
)
PSG = replace(
    FEDLAP,
    name="psg",
    title="PSG",
    paper="Chen et al. 2022, private set generation",
    plan=psg_plan,
    fill=fill,
    needs_budget=True,
)

# In the order of the registry.
SYNTHETIC_RECORDS = (FEDLAP, DSC, FEDDM, PSG)

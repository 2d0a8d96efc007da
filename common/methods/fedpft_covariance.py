"""Which covariance a run of FedPFT has where its settings say "auto": one rule, from public numbers.

The rule uses no record, so that every side finds the same answer and the answer discloses nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedsurrogate.common.backbones.dimensions import named_dimension
from fedsurrogate.common.privacy.mechanism import THEOREM
from fedsurrogate.common.settings import Covariance, FedPFTSettings, Settings
from fedsurrogate.common.settings.target import TargetSettings

# Most dimensions of a covariance that is sent whole, which takes 4 MB at 16 bits.
LARGEST_GRAM = 2048
# Rank and bits of "lowrank" where "auto" takes it, and where it was set.
AUTO_RANK, AUTO_BITS = 64, 8
SET_RANK, SET_BITS = 16, 16
# Dimensions and sites that the rule for privacy assumes where the settings do not tell them.
USUAL_DIMENSION, USUAL_SITES = 1024, 10
# Families of which each class has its own, without any covariance between dimensions.
APART: tuple[Covariance, ...] = ("diag", "spherical")
# What a run with one of these says, before it starts and in its result.
TOO_LITTLE = (
    "it holds nothing of how features vary together, so on features of a backbone the head may be "
    "below an ensemble of heads; covariance auto, gram, or lowrank of rank 64 holds it"
)
# Least epsilon x records / root of (sites x dimensions) for which a noisy second moment is worth its
# share of the budget. Chosen on one draw of eight federations (CIFAR-10, PACS, digits, X-rays), of
# which it takes the better form in most; docs/methods/fedpft.md has where it does not.
LEAST_SIGNAL = 300.0


@dataclass(frozen=True)
class Form:
    """The covariance of a run.

    Attributes:
        family: of the covariance.
        rank: columns of the factor, if it is "lowrank".
        bits: of an entry of that factor in a message.
        reason: why "auto" takes this one, as the end of a sentence.
    """

    family: Covariance
    rank: int
    bits: int
    reason: str = ""


def form_of(settings: Settings, dimension: int) -> Form:
    """The covariance of a run for features of a dimension.

    Args:
        settings: of the run.
        dimension: of the features; 0 where it is not known yet, for which a covariance is whole.

    Returns:
        What was set; where the covariance is "auto", what the rule gives.
    """
    own = settings.fedpft
    if own.covariance != "auto":
        return Form(own.covariance, own.rank or SET_RANK, own.bits or SET_BITS)
    return automatic(settings, dimension)


def automatic(settings: Settings, dimension: int) -> Form:
    """The covariance that "auto" stands for.

    Without privacy it is whole ("gram") up to `largest_gram` dimensions, and of rank 64 above. With
    noise at each site it follows from how far a second moment stands out from its noise. A secure
    sum, another target, a chain, several components and theorem 4.1 each work with one form only.

    Args:
        settings: of the run.
        dimension: of the features; 0 where it is not known yet.

    Example:
        >>> automatic(Settings(), 1280).family, automatic(Settings(), 4096).family
        ('gram', 'lowrank')
        >>> automatic(Settings(epsilon=0.5, delta=1e-5), 1280).family
        'spherical'
    """
    own = settings.fedpft
    if own.rank or own.bits:
        why = "fedpft.rank or fedpft.bits is set, which only this form has"
        return Form("lowrank", own.rank or SET_RANK, own.bits or SET_BITS, why)
    if settings.secure_sum or settings.target != TargetSettings.model_fields["target"].default:
        return _whole("it adds up over sites")
    if settings.epsilon:
        return _private(settings)
    if own.topology == "chain":
        return Form("lowrank", SET_RANK, SET_BITS, "a chain cannot have a whole one")
    if own.components > 1:
        return _thin("several components cannot have a whole one")
    most = largest_gram(settings.max_payload_mib)
    if dimension <= most:
        return _whole(f"up to {most:,} dimensions a whole one fits, and is exact")
    return _thin(f"a whole one is sent up to {most:,} dimensions only")


def largest_gram(payload_mib: float) -> int:
    """Most dimensions of a covariance that "auto" sends whole.

    Args:
        payload_mib: the limit of a message, of which half is left to class means.

    Example:
        >>> largest_gram(256), largest_gram(1)
        (2048, 724)
    """
    return min(LARGEST_GRAM, math.isqrt(int(payload_mib * 2**19)))


def filled(settings: Settings) -> Settings:
    """Settings with the covariance, rank and bits of the run.

    "auto" stays where the dimension decides, which only the sites know: `form_of` then has it.
    """
    own = settings.fedpft
    if own.covariance == "auto" and _depends_on_dimension(settings):
        return settings
    form = form_of(settings, 0)
    changed = {"covariance": form.family, "rank": form.rank, "bits": form.bits}
    return settings.model_copy(update={"fedpft": own.model_copy(update=changed)})


def explained(settings: Settings, dimension: int) -> str:
    """The covariance of a run, and why "auto" takes it, in words.

    Args:
        settings: of the run.
        dimension: of the features; 0 where it is not known yet.

    Example:
        >>> explained(Settings(fedpft=FedPFTSettings(covariance="full")), 1280)
        'covariance full, as set; auto is gram: up to 2,048 dimensions a whole one fits, and is exact'
    """
    unset = {"covariance": "auto", "rank": 0, "bits": 0}
    free = settings.model_copy(update={"fedpft": settings.fedpft.model_copy(update=unset)})
    form, usual = form_of(settings, dimension), automatic(free, dimension)
    if lacks_directions(settings.fedpft, settings.epsilon):
        return (
            f"covariance {form.family}, as set: {TOO_LITTLE}; auto is {_named(usual)}: "
            f"{usual.reason}"
        )
    if replace(form, reason="") == replace(usual, reason=""):
        return f"covariance {_named(form)}, chosen because {usual.reason}"
    return f"covariance {_named(form)}, as set; auto is {_named(usual)}: {usual.reason}"


def lacks_directions(own: FedPFTSettings, epsilon: float) -> bool:
    """Whether a run without a budget has one component a class and no covariance between dimensions.

    Args:
        own: the settings of the method.
        epsilon: of the run; 0 without a budget.

    Example:
        >>> lacks_directions(FedPFTSettings(covariance="diag"), 0.0)
        True
    """
    return own.covariance in APART and own.components == 1 and not epsilon


def _named(form: Form) -> str:
    return f"lowrank r={form.rank}" if form.family == "lowrank" else form.family


def in_form(own: FedPFTSettings, form: Form) -> FedPFTSettings:
    """The settings of FedPFT with a form in place of "auto"."""
    return own.model_copy(update={"covariance": form.family, "rank": form.rank, "bits": form.bits})


def _depends_on_dimension(settings: Settings) -> bool:
    return automatic(settings, 1).family != automatic(settings, LARGEST_GRAM + 1).family


def _private(settings: Settings) -> Form:
    """The form for noise at each site."""
    own = settings.fedpft
    if own.privacy == THEOREM or own.components > 1:
        return Form(
            "spherical", SET_RANK, SET_BITS, "its mechanism needs a covariance of each class"
        )
    sites = settings.sites or USUAL_SITES
    d = named_dimension(settings.data, settings.backbone, settings.image_size) or USUAL_DIMENSION
    records = settings.features.records
    signal = settings.epsilon * records / math.sqrt(sites * d)
    numbers = (
        f"epsilon x records / root of (sites x dimensions) is {signal:.3g} for {records:,} records, "
        f"{sites} sites and {d:,} dimensions"
    )
    if signal >= LEAST_SIGNAL:
        why = f"{numbers}: a second moment stands out from its noise from {LEAST_SIGNAL:g} on"
        return Form("lowrank", AUTO_RANK, SET_BITS, why)
    why = f"{numbers}: below {LEAST_SIGNAL:g} a second moment is lost in its noise"
    return Form("spherical", SET_RANK, SET_BITS, why)


def _whole(reason: str) -> Form:
    return Form("gram", SET_RANK, SET_BITS, reason)


def _thin(reason: str) -> Form:
    return Form("lowrank", AUTO_RANK, AUTO_BITS, reason)

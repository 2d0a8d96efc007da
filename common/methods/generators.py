"""Methods that train a generator of embeddings in rounds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..errors import LARGEST_COUNT
from ..privacy.mechanism import NoisyRounds
from ..privacy.shares import budget_shares
from ..settings import DPCVAESettings, Settings
from ..terms import Term
from .method import (
    GRADIENTS,
    UPDATE_DEFENCES,
    Combination,
    Field,
    Messages,
    Method,
    ModelTraining,
    Plan,
    Sizes,
    Work,
)
from .training import sgd_noise

DECODER = (Field("decoder", "P", prefix=""),)
GAN = (Field("generator", "G", prefix=""),)
CLASSES = (Field("means", "A d"), Field("counts", "A"))
# The weight of a site, and its change of all parameters times that weight.
DECODER_SUMS, GAN_SUMS = ((Term("records", "1"), Term("update", symbol, 1)) for symbol in "PG")


def _symbols(
    own: DPCVAESettings, names: int, private: bool, classes: int, dimension: int, records: int
) -> Sizes:
    """A: classes that the run names; P: parameters of a decoder; G: parameters of a GAN's
    generator.

    With L latent and h hidden, P is the sum of: (L + A) d of the linear path; d without hidden
    layers, otherwise (L + A + 1) h + (h + 1) h + (h + 1) d; d of the variance; 2 L A of the prior.
    G is (L + A + 1) 512 + 513 * 1024 + 1025 d.
    """
    named = max(classes, names)
    latent, hidden = own.latents(private), own.hidden
    inputs = latent + named
    layers = (
        (inputs + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * dimension
        if hidden
        else dimension
    )
    more = own.learned_variance * dimension + own.class_prior * 2 * latent * named
    return {
        "A": named,
        "P": inputs * dimension + layers + more,
        "G": (inputs + 1) * 512 + 513 * 1024 + 1025 * dimension,
    }


def first_round_shares(own: DPCVAESettings) -> dict[str, float]:
    """Shares of the first round's budget by statistic."""
    return budget_shares("spherical", 1.0) if own.opening == "sums" else {"counts": 1.0}


def plan(settings: Settings) -> Plan:
    """The plan of DP-CVAE: a first round of class sizes and sums, then the training of decoders."""
    own, head, private = settings.dpcvae, settings.head, bool(settings.epsilon)
    sums = own.opening == "sums"
    # Noise may make a count negative.
    sizes = Field("counts", "A", -LARGEST_COUNT if private else 0, LARGEST_COUNT)
    width = max(own.hidden, own.latent, 512)

    def work(classes: int, dimension: int) -> Work:
        return Work(
            steps=max(own.private_steps if private else 0, head.min_steps),
            passes=max(own.local_epochs, head.epochs),
            rounds=own.rounds,
            synthetic=own.synthetic * max(1, classes),
            numbers=2 * width * (dimension + classes + 3 * width) * (GRADIENTS if private else 4),
            width=max(own.hidden, own.latent),
        )

    return Plan(
        kind="rounds",
        messages=Messages(
            sends=DECODER,
            receives=(*DECODER, *CLASSES),
            result=(*DECODER, *CLASSES),
            first=(sizes, Field("sums", "A d")) if sums else (sizes,),
            symbols=partial(_symbols, own, len(settings.classes), private),
            signs=False,
        ),
        combination=Combination(
            site="fedsurrogate.client_app.methods.dpcvae.training:train_generator",
            strategy="fedsurrogate.strategies.dpcvae:DPCVAE",
            evaluate="fedsurrogate.client_app.methods.dpcvae.downstream:use_generator",
            tested="own and synthetic, mixed: the site's own head and a head on synthetic "
            "embeddings",
            makes_surrogates=True,
            keeps_result=True,
            sums=DECODER_SUMS,
            first_sums=(Term("counts", "A"), *((Term("sums", "A d", 1),) if sums else ())),
            site_sums="fedsurrogate.client_app.methods.dpcvae.training:generator_sums",
            from_sums="fedsurrogate.strategies.dpcvae:absorb_total",
            sum_strategy="fedsurrogate.strategies.dpcvae:SummedGenerators",
        ),
        work=work,
        privacy=_privacy(settings) if private else None,
        defences=UPDATE_DEFENCES,
        training=ModelTraining("dpcvae", frames=False),
        judging_packages=("ot",),
    )


def _privacy(settings: Settings) -> NoisyRounds:
    """DP-SGD after a first round of noisy sums."""
    own = settings.dpcvae
    return replace(
        sgd_noise(own, settings),
        first_share=own.share(settings.epsilon),
        first_shares=first_round_shares(own),
    )


def gan_plan(settings: Settings) -> Plan:
    """The plan of DP-CGAN: the same with an adversarial generator."""
    own, whole = plan(settings), (*GAN, *CLASSES)
    messages = replace(own.messages, sends=GAN, receives=whole, result=whole)
    return replace(own, messages=messages, combination=replace(own.combination, sums=GAN_SUMS))


DPCVAE = Method(
    name="dpcvae",
    title="DP-CVAE",
    paper="Di Salvo et al. 2025",
    plan=plan,
    reads=("dpcvae", "head", "baseline"),
    shown="dpcvae",
)
DPCGAN = replace(
    DPCVAE,
    name="dpcgan",
    title="DP-CGAN",
    paper="a conditional GAN, as in DP-CVAE's comparison",
    plan=gan_plan,
    adversarial=True,
)

# In the order of the registry.
GENERATORS = (DPCVAE, DPCGAN)

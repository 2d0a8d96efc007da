"""The methods that train a generator of embeddings in rounds: descriptions, schema and work at a site."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.limits import LARGEST_COUNT
from common.rules.spec import ALL_DEFENCES, GRADIENTS, Field, MethodSpec, Sizes, Summed, Work

if TYPE_CHECKING:
    from common.config.run_config import RunConfig

# By section of the settings: the keys that decide what a site sends, in the run's digest.
DPCVAE_KEYS = (
    *("rounds", "opening", "opening_share", "latent", "hidden", "learned_variance", "class_prior", "beta", "warm_up"),
    *("local_epochs", "batch_size", "optimiser", "learning_rate", "cosine", "weights", "clip", "sample_rate"),
    *("noise_multiplier", "synthetic"),
)
DECODER = (Field("decoder", "P", prefix=""),)
GAN = (Field("generator", "G", prefix=""),)
CLASSES = (Field("means", "A d"), Field("counts", "A"))
# The weight of a site, and its change of all parameters times that weight.
DECODER_SUMS, GAN_SUMS = ((Summed("records", "1", 0), Summed("update", symbol, 1)) for symbol in "PG")


def symbols(config: RunConfig, classes: int, dimension: int, records: int) -> Sizes:
    """A: classes that the run names; P: parameters of a decoder; G: parameters of a GAN's generator.

    With L latent and h hidden, P is the sum of: (L + A) d of the linear path; d without hidden layers, otherwise
    (L + A + 1) h + (h + 1) h + (h + 1) d; d of the variance; 2 L A of the prior.
    G is (L + A + 1) 512 + 513 * 1024 + 1025 d.
    """
    settings, named = config.dpcvae, max(classes, len(config.classes))
    latent, hidden = settings.latents(bool(config.epsilon)), settings.hidden
    inputs = latent + named
    layers = (inputs + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * dimension if hidden else dimension
    more = settings.learned_variance * dimension + settings.class_prior * 2 * latent * named
    return {"A": named, "P": inputs * dimension + layers + more, "G": (inputs + 1) * 512 + 513 * 1024 + 1025 * dimension}


def first_round(config: RunConfig) -> tuple[Field, ...]:
    """The first message of a site: the size of every class, and the sum of its embeddings if requested."""
    # Noise may make a count negative.
    sizes = Field("counts", "A", -LARGEST_COUNT if config.epsilon else 0, LARGEST_COUNT)
    return (sizes, Field("sums", "A d")) if config.dpcvae.opening == "sums" else (sizes,)


def first_summed(config: RunConfig) -> tuple[Summed, ...]:
    """What a secure sum adds up in the first round."""
    sizes = Summed("counts", "A", 0)
    return (sizes, Summed("sums", "A d", 1)) if config.dpcvae.opening == "sums" else (sizes,)


def work(config: RunConfig, classes: int, dimension: int) -> Work:
    """The work of a site: training of the generator, and of the heads that evaluate it."""
    settings = config.dpcvae
    width = max(settings.hidden, settings.latent, 512)
    return Work(
        steps=max(settings.private_steps if config.epsilon else 0, config.head.min_steps),
        passes=max(settings.local_epochs, config.head.epochs),
        rounds=settings.rounds,
        synthetic=settings.synthetic * max(1, classes),
        numbers=2 * width * (dimension + classes + 3 * width) * (GRADIENTS if config.epsilon else 4),
        width=max(settings.hidden, settings.latent),
    )


# Generators of embeddings, trained in rounds and used at the sites.
DPCVAE = MethodSpec(
    name="dpcvae",
    title="DP-CVAE",
    paper="Di Salvo et al. 2025",
    kind="rounds",
    trained="dpcvae",
    configured="dpcvae",
    digest={"dpcvae": DPCVAE_KEYS},
    reads=("head", "baseline"),
    site="client_app.methods.dpcvae.training:train_generator",
    evaluate="client_app.methods.dpcvae.received_generator:use_generator",
    tested="own and synthetic, mixed: the site's own head and a head on synthetic embeddings",
    strategy="strategies.dpcvae.strategy:DPCVAE",
    sends=lambda config: DECODER,
    receives=lambda config: (*DECODER, *CLASSES),
    result=lambda config: (*DECODER, *CLASSES),
    first_round=first_round,
    symbols=symbols,
    work=work,
    defences=lambda config: ALL_DEFENCES,
    mechanisms=("dp-sgd",),
    makes_surrogates=True,
    signs=False,
    keeps_result=True,
    judging_packages=("ot",),
    summed=lambda config: DECODER_SUMS,
    first_summed=first_summed,
    site_sums="client_app.methods.dpcvae.training:generator_sums",
    from_sums="strategies.dpcvae.from_sums:absorb_total",
    sum_strategy="strategies.dpcvae.summed:SummedGenerators",
)
DPCGAN = replace(
    DPCVAE,
    name="dpcgan",
    title="DP-CGAN",
    adversarial=True,
    paper="a conditional GAN, as in DP-CVAE's comparison",
    sends=lambda config: GAN,
    summed=lambda config: GAN_SUMS,
    receives=lambda config: (*GAN, *CLASSES),
    result=lambda config: (*GAN, *CLASSES),
)

# In the order of the registry.
GENERATORS = (DPCVAE, DPCGAN)

"""Membership inference on generators of embeddings: scores of records, larger for members, from the
decoder alone.

Source: black box, how near is the closest synthetic embedding: Chen et al. 2020, "GAN-Leaks", section
4.1. White box, how likely is the record under the decoder: ours. DP-CVAE's paper has no attack;
FedLAP-DP attacks models by their losses and the norms of their gradients (section 6.6).
"""

from __future__ import annotations

import math
import tempfile

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedsurrogate.common.files import replace_file
from fedsurrogate.common.models.generators import (
    COUNTS,
    MEANS,
    SUMS,
    AnyGenerator,
    Decoder,
    fresh_generator,
    load_into,
    scaled,
    tensors_of,
)
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.models.training_parts import UncompiledAdam
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_parameters, unpack_parameters

from ..features.site_features import SiteFeatures
from ..governance.release import site_function
from ..methods.task import Task
from ..node_config import NodeConfig

# Synthetic embeddings of each class that the black box is asked for.
DRAWN = 500
# Steps to the latent vector that explains a record best, for decoders that are not linear.
STEPS, RATE = 100, 0.05


def generator_of(run: Run, node: NodeConfig, site_features: SiteFeatures) -> AnyGenerator:
    """The generator that this site's code trains in all rounds of a run with one site.

    Nothing is charged or kept. Class means are the sums over the counts, without the shrinkage that
    a coordinator adds to noisy ones.

    Args:
        run: whose rounds are made.
        node: the site's settings.
        site_features: records of the site.
    """
    classes, d = site_features.classes, site_features.train.features.shape[1]
    module = fresh_generator(run.settings, run.method.adversarial, len(classes), d)
    tensors, header = (
        tensors_of(module),
        Header(run.settings.method, run.digest, "audit", site_features.fingerprint, classes),
    )
    with tempfile.TemporaryDirectory(prefix="audit-") as name:
        here = node.model_copy(update={"state_dir": name})
        for number in range(1, run.rounds + 1):
            payload = pack_parameters(Parameters(header, number, tensors))
            info = {"round": number, "confirmed": number - 1, "lineage": "audit"}
            made = site_function(run.plan.combination)(
                Task(run, here, "audit", site_features, payload=payload, info=info)
            )
            for file, content in made.keep.items():
                replace_file(file, content)
            reply = unpack_parameters(made.payload).tensors
            if number > 1:
                tensors = {
                    key: tensor + reply[key] if key in reply else tensor
                    for key, tensor in tensors.items()
                }
                continue
            tensors = tensors | {COUNTS: reply[COUNTS].clamp_min(0)}
            if SUMS in reply:
                tensors |= {MEANS: reply[SUMS] / reply[COUNTS].clamp_min(1)[:, None] * math.sqrt(d)}
    load_into(module, tensors)
    return module


def generator_scores(module: AnyGenerator, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Scores of records by attack; first the strongest, which reads the decoder of a VAE.

    Args:
        module: the generator.
        features: of the records, (n, d).
        labels: indices of classes, (n,).

    Returns:
        Scores (n,) by name of the attack, larger for members.
    """
    features = features.float()
    black = {"closest synthetic embedding (black box)": closest_synthetic(module, features, labels)}
    if not isinstance(module, Decoder):
        return black
    return {
        "likelihood under the decoder (white box)": likelihood(module, features, labels)
    } | black


def closest_synthetic(
    module: AnyGenerator, features: Tensor, labels: Tensor, seed: int = 0, drawn: int = DRAWN
) -> Tensor:
    """Black box: minus the distance of records from the closest synthetic one of their class.

    Args:
        module: the generator.
        features: of the records, (n, d).
        labels: indices of classes, (n,).
        seed: of the synthetic records.
        drawn: number of synthetic records of each class.

    Returns:
        Scores (n,), larger for members.

    Source: Chen et al. 2020, "GAN-Leaks", section 4.1.
    """
    generator, scores = torch.Generator().manual_seed(seed), torch.zeros(len(labels))
    records, classes = scaled(features), len(module.means)
    for label in torch.unique(labels).tolist():
        kinds = one_hot(torch.full((drawn,), label), classes).float()
        with torch.no_grad():
            made = module.draw(kinds, generator)
        own = labels == label
        scores[own] = -torch.cdist(records[own], made).amin(1)
    return scores / math.sqrt(features.shape[1])


def likelihood(decoder: Decoder, features: Tensor, labels: Tensor) -> Tensor:
    """White box: log likelihood of records under the decoder.

    Exact for linear maps, whose embeddings are Gaussian in each class. Otherwise the joint log
    likelihood with the latent vector that explains the record best, which Adam looks for from the
    prior's mean. A variance that is not learned is one.

    Args:
        decoder: of the generator.
        features: of the records, (n, d).
        labels: indices of classes, (n,).

    Returns:
        Log likelihoods (n,) in nats.
    """
    records, kinds = scaled(features), torch.eye(len(decoder.means))
    return (
        _exact(decoder, records, labels, kinds)
        if decoder.layers is None
        else _best(decoder, records, kinds[labels])
    )


def _exact(decoder: Decoder, records: Tensor, labels: Tensor, kinds: Tensor) -> Tensor:
    """With one Gaussian for each class, a row of `kinds`."""
    likelihoods = torch.zeros(len(records))
    with torch.no_grad():
        loadings, spread = decoder.linear.weight[:, : decoder.latent], decoder.log_variance(kinds)
        middle, log_width = decoder.prior_of(kinds)
        mean = decoder(middle, kinds)
        for label in torch.unique(labels).tolist():
            own = labels == label
            diagonal = torch.ones(records.shape[1]) if spread is None else spread[label].exp()
            gaussian = torch.distributions.LowRankMultivariateNormal(
                mean[label].double(),
                (loadings * (log_width[label] / 2).exp()).double(),
                diagonal.double(),
            )
            likelihoods[own] = gaussian.log_prob(records[own].double()).float()  # type: ignore[no-untyped-call]
    return likelihoods


def _best(decoder: Decoder, records: Tensor, kinds: Tensor) -> Tensor:
    middle, log_width = (part.detach() for part in decoder.prior_of(kinds))
    z = middle.clone().requires_grad_()
    optimiser = UncompiledAdam([z], lr=RATE)

    def losses() -> Tensor:
        squares, spread = (records - decoder(z, kinds)).square(), decoder.log_variance(kinds)
        missed = squares if spread is None else squares / spread.exp() + spread
        misfits: Tensor = (
            missed.sum(1) + ((z - middle).square() / log_width.exp() + log_width).sum(1)
        ) / 2
        return misfits

    for _ in range(STEPS):
        (z.grad,) = torch.autograd.grad(losses().sum(), [z])
        optimiser.step()
    constant = (records.shape[1] + decoder.latent) * math.log(2 * math.pi) / 2
    likelihoods: Tensor = -losses().detach() - constant
    return likelihoods

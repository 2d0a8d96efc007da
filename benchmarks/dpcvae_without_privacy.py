"""Ablation of DP-CVAE's generator, with a test for collapse. One site with all CIFAR-10 features,
no privacy.

For every row: the information of the encoding in nats per record (zero is a collapse), the ratio of
synthetic to real spread within a class, and the accuracy of a head trained on samples only. The
samples have z from the prior, or from a Gaussian fitted to the encodings of each class (which would
stay at the site).

    python benchmarks/dpcvae_without_privacy.py -c 'data="safetensors" data-dir="/data" dataset="x"'
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from benchmarks.harness.federation import Federation, load
from benchmarks.harness.options import arguments, settings_of
from benchmarks.harness.results import report
from benchmarks.harness.seeds import mean_and_deviation, over_seeds
from fedsurrogate.client_app.methods.dpcvae.training import exact_gradient, trainer_of
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.generators import (
    MEANS,
    Decoder,
    Encoder,
    elbo,
    fresh_companion,
    fresh_generator,
    labels_evenly,
    scaled,
)
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header

PLAIN = {"dpcvae.learned-variance": False, "dpcvae.class-prior": False, "dpcvae.hidden": 256}
BETAS = (1.0, 4.0, 8.0)
ROWS: dict[str, dict[str, Any]] = {
    **{f"beta {b:g}": PLAIN | {"dpcvae.beta": b} for b in BETAS},
    **{
        f"beta {b:g}, variance": PLAIN | {"dpcvae.beta": b, "dpcvae.learned-variance": True}
        for b in BETAS
    },
    **{f"beta {b:g}, prior": PLAIN | {"dpcvae.beta": b, "dpcvae.class-prior": True} for b in BETAS},
    **{f"beta {b:g}, variance, prior": {"dpcvae.beta": b, "dpcvae.hidden": 256} for b in BETAS},
    **{f"linear, beta {b:g}, variance, prior": {"dpcvae.beta": b} for b in BETAS},
}
PASSES = 30


def train(run: Run, x: Tensor, labels: Tensor, classes: int) -> tuple[Decoder, Encoder]:
    decoder, encoder = (
        fresh_generator(run.settings, run.method.adversarial, classes, x.shape[1]),
        fresh_companion(run.settings, run.method.adversarial, classes, x.shape[1]),
    )
    assert isinstance(decoder, Decoder)
    assert isinstance(encoder, Encoder)
    decoder.means.copy_(torch.stack([x[labels == label].mean(0) for label in range(classes)]))
    settings, random = run.settings.dpcvae, torch.Generator().manual_seed(run.settings.seed)
    for number in range(2, settings.rounds + 1):
        round = (number, settings.rounds)
        trainer = trainer_of(decoder, encoder, settings, round, torch.zeros(classes), False, random)
        for _ in range(settings.local_epochs):
            for rows in torch.split(torch.randperm(len(x), generator=random), settings.batch_size):
                trainer.step(exact_gradient(trainer, x[rows], labels[rows]))
    return decoder, encoder


def encoded(
    decoder: Decoder,
    encoder: Encoder,
    x: Tensor,
    labels: Tensor,
    drawn: Tensor,
    random: torch.Generator,
) -> Tensor:
    """Samples of the classes `drawn`, with z from a Gaussian fitted to the encodings of each class."""
    mean, log_variance = encoder(
        x - decoder.means[labels], one_hot(labels, len(decoder.means)).float()
    )
    z = torch.empty(len(drawn), decoder.latent)
    for label in range(len(decoder.means)):
        own, rows = labels == label, (drawn == label).nonzero().squeeze(1)
        covariance = (
            torch.cov(mean[own].T)
            + log_variance[own].exp().mean(0).diag()
            + 1e-4 * torch.eye(decoder.latent)
        )
        noise = torch.randn(len(rows), decoder.latent, generator=random)
        z[rows] = mean[own].mean(0) + noise @ torch.linalg.cholesky(covariance).T
    kinds = one_hot(drawn, len(decoder.means)).float()
    spread, made = decoder.log_variance(kinds), decoder(z, kinds)
    return (
        made
        if spread is None
        else made + (spread / 2).exp() * torch.randn(made.shape, generator=random)
    )


def spread(x: Tensor, labels: Tensor) -> float:
    return float(
        torch.stack([x[labels == label].var(0).sum() for label in torch.unique(labels)])
        .mean()
        .sqrt()
    )


def judged(data: Federation, x: Tensor, labels: Tensor, run: Run) -> float:
    header = Header("", "", "", data.sites[0].fingerprint, data.classes)
    own = run.settings
    trained = train_on_features(
        x / x.shape[1] ** 0.5, labels, len(data.classes), own.head, own.seed
    )
    return data.judge(Head(header, *trained, clip=0.0))


@dataclass(frozen=True)
class Case:
    """The data of a seed: the federation, scaled features x (n, d), labels (n,), and the accuracy
    with real features.
    """

    data: Federation
    x: Tensor
    labels: Tensor
    real: float


def load_case(settings: dict[str, Any]) -> Case:
    run = parse_run(settings)
    data = load(run, 1)
    x, labels = scaled(data.sites[0].train.features), data.sites[0].train.labels
    return Case(data, x, labels, judged(data, x, labels, run))


def measure(settings: dict[str, Any], case: Case) -> Sequence[float]:
    """The cells of a row at one seed."""
    run, x, labels, classes = parse_run(settings), case.x, case.labels, len(case.data.classes)
    decoder, encoder = train(run, x, labels, classes)
    random, drawn = (
        torch.Generator().manual_seed(run.settings.seed),
        labels_evenly(classes, len(x) // classes),
    )
    with torch.no_grad():
        made = decoder.draw(one_hot(drawn, classes).float(), random)
        fitted = encoded(decoder, encoder, x, labels, drawn, random)
        noise = torch.randn(len(x), decoder.latent, generator=random)
        _, nats = elbo(encoder, decoder, x, one_hot(labels, classes).float(), noise)
    accuracies = [judged(case.data, each, drawn, run) for each in (made, fitted)]
    shares = [100 * accuracy / case.real for accuracy in accuracies]
    return float(nats.mean()), spread(made, drawn) / spread(x, labels), *accuracies, *shares


def main() -> None:
    options = arguments(__doc__, "dpcvae-without-privacy").parse_args()
    settings, message = settings_of(options, {"dataset": "cifar10", "partition": "iid"})
    base: dict[str, Any] = settings | {"method": "dpcvae", "dpcvae.local-epochs": PASSES // 10}
    results = over_seeds(
        options.seeds,
        lambda seed: load_case(base | {"seed": seed}),
        ROWS,
        lambda seed, case, own: measure(base | {"seed": seed} | own, case),
    )
    rows = [
        (name, *(mean_and_deviation(column) for column in zip(*each, strict=True)))
        for name, each in results.items()
    ]
    columns = ("generator", "nats encoded", "spread / real", "accuracy, %", "z fitted, %")
    columns += ("of raw, %", "z fitted, of raw, %")
    title = f"One site, {PASSES} passes, {options.seeds} seeds, {MEANS} from class sums. {message}"
    report(options.name, title, columns, rows)


if __name__ == "__main__":
    main()

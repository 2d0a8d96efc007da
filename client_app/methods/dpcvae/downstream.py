"""Uses of synthetic embeddings at a site: heads mixed with its own, coarser labels, out-of-distribution
scores; and a generator received at the end of a run, which the site keeps and evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedsurrogate.common.errors import LOG, ConfigError, DataError, SurrogateError
from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.models.classifiers import Classifier, Head, class_indices
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.generators import Generator, labels_evenly
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.privacy.gaussian_mechanism import clip
from fedsurrogate.common.settings import HeadSettings
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.generator_files import pack_generator
from fedsurrogate.common.wire.records import Info

from ...features.site_features import SiteFeatures
from ...governance.gate import Gate
from ...governance.work_limits import has_room
from ...node_config import NodeConfig
from ..job import Job

# Candidate weights of a site's own head in the mixture, as in the paper.
SHARES = torch.linspace(0, 1, 11)
SOURCES = ("local", "synthetic", "mixed")
# At most this number of embeddings of each set enters a distance between sets.
MOST_COMPARED = 500
PROJECTIONS = 200


@dataclass(frozen=True)
class LabelledEmbeddings:
    """Embeddings of records, with labels.

    Attributes:
        features: (n, d), of norm one.
        labels: indices of classes, (n,).
    """

    features: Tensor
    labels: Tensor

    def take(self, rows: Tensor) -> LabelledEmbeddings:
        """A selection of rows."""
        return LabelledEmbeddings(self.features[rows], self.labels[rows])


@dataclass(frozen=True)
class Mixture:
    """A site's own head and the head that all sites share, whose probabilities are mixed.

    Attributes:
        local: the site's own head.
        shared: the head that all sites share.
        share: weight of the own head in mixed probabilities, in [0, 1].
    """

    local: Head
    shared: Classifier
    share: float

    def scores(self, test: LabelledEmbeddings) -> dict[str, dict[str, float]]:
        """The accuracies of each of `SOURCES`."""
        own, shared = (
            model.scores(test.features).softmax(1) for model in (self.local, self.shared)
        )
        probabilities = (own, shared, self.share * own + (1 - self.share) * shared)
        return {
            name: score(each, test.labels)
            for name, each in zip(SOURCES, probabilities, strict=True)
        }

    def metric_values(self, test: LabelledEmbeddings) -> dict[str, float]:
        """The same as named numbers, and the weight."""
        scores = self.scores(test)
        numbers = {
            f"{kind}-{name}": each[kind]
            for kind in ("accuracy", "balanced")
            for name, each in scores.items()
        }
        return numbers | {"share": self.share}


def head_on(records: LabelledEmbeddings, header: Header, settings: HeadSettings, seed: int) -> Head:
    """Train a head on records, with embeddings scaled to norm one.

    Args:
        records: to train on.
        header: of the head.
        settings: of the training.
        seed: of the training.
    """
    features = clip(records.features.double(), 0.0)[0].float()
    weight, bias = train_on_features(features, records.labels, len(header.classes), settings, seed)
    return Head(header, weight, bias, clip=0.0)


def mix(
    own: LabelledEmbeddings,
    shared: Classifier,
    settings: HeadSettings,
    seed: int,
    validation: float,
) -> Mixture:
    """Train a head on the site's own records and choose its weight in a mixture with the shared
    head.

    The weight maximises validation accuracy; among equals it is the one nearest to 1/2 (the paper's
    code takes the smallest). The own head is not trained on the validation records.

    Args:
        own: the site's records.
        shared: the shared head.
        settings: of the training.
        seed: of the split and the training.
        validation: share of the records that is held out.

    Raises:
        DataError: if the records cannot be split.

    Source: DP-CVAE, equations 4 and 5, with a weight for every site, as in its text.
    """
    order = torch.randperm(len(own.labels), generator=torch.Generator().manual_seed(seed))
    held = round(validation * len(order))
    if not 0 < held < len(order):
        raise DataError(
            f"{len(order)} training records cannot be split into training and validation "
            f"({validation:g})"
        )
    kept = own.take(order[:held])
    local = head_on(own.take(order[held:]), shared.header, settings, seed)
    mine, theirs = (model.scores(kept.features).softmax(1) for model in (local, shared))
    right = [((s * mine + (1 - s) * theirs).argmax(1) == kept.labels).sum() for s in SHARES]
    best = max(
        range(len(SHARES)), key=lambda index: (int(right[index]), -abs(float(SHARES[index]) - 0.5))
    )
    return Mixture(local, shared, float(SHARES[best]))


def score(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy and balanced accuracy of the likeliest class.

    Args:
        probabilities: of the classes, (n, C).
        labels: indices of classes, (n,).

    Raises:
        DataError: without a record.

    Example:
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
        >>> score(probabilities, torch.tensor([0, 0, 0, 1]))
        {'accuracy': 0.75, 'balanced': 0.5}
    """
    if not len(labels):
        raise DataError("no test record has a class of the run")
    from sklearn.metrics import accuracy_score, recall_score

    pair = labels.numpy(), probabilities.argmax(1).numpy()
    balanced = recall_score(*pair, labels=torch.unique(labels).numpy(), average="macro")
    return {"accuracy": float(accuracy_score(*pair)), "balanced": float(balanced)}


def grouped(groups: str, classes: Sequence[str]) -> tuple[tuple[str, ...], Tensor]:
    """Parse groups of classes.

    Args:
        groups: as "animal=cat,dog; vehicle=car,ship".
        classes: names of C classes.

    Returns:
        The names of the groups, and the group of each class (C,).

    Raises:
        ConfigError: unless every class is in exactly one group.

    Example:
        >>> names, group = grouped("animal=cat,dog; vehicle=car", ["car", "cat", "dog"])
        >>> names, group.tolist()
        (('animal', 'vehicle'), [1, 0, 0])
    """
    members: dict[str, str] = {}
    names: list[str] = []
    for part in (each.strip() for each in groups.split(";") if each.strip()):
        name, _, rest = part.partition("=")
        inside = [each.strip() for each in rest.split(",") if each.strip()]
        if not (name and inside) or name in names:
            raise ConfigError(
                f"groups {part!r}: a group is name=class,class, and each name appears once"
            )
        if wrong := [each for each in inside if each not in classes or each in members]:
            raise ConfigError(
                f"groups {part!r}: class {wrong[0]!r} is unknown or in two groups; the classes are "
                f"{', '.join(classes)}"
            )
        names.append(name)
        members |= dict.fromkeys(inside, name)
    if missing := [each for each in classes if each not in members]:
        raise ConfigError(f"class {missing[0]!r} is in no group; every class must be in one")
    return tuple(names), torch.tensor([names.index(members[each]) for each in classes])


def out_of_distribution(known: LabelledEmbeddings, features: Tensor) -> Tensor:
    """Squared Mahalanobis distances from the nearest class mean of known records.

    One covariance for all classes, with Ledoit-Wolf shrinkage.

    Args:
        known: the known records.
        features: (n, d), to judge.

    Returns:
        Distances (n,), float64.

    Source: Lee et al. 2018, equation 2.
    """
    from sklearn.covariance import LedoitWolf

    kinds = torch.unique(known.labels)
    means = torch.stack([known.features[known.labels == kind].mean(0) for kind in kinds])
    around = known.features - means[torch.searchsorted(kinds, known.labels)]
    precision = torch.from_numpy(
        LedoitWolf(assume_centered=True).fit(around.double().numpy()).precision_
    )
    half = torch.linalg.cholesky(precision)
    return torch.cdist(features.double() @ half, means.double() @ half).square().min(1).values


def ranks_above(inside: Tensor, outside: Tensor) -> float:
    """Area under the ROC curve: the share of pairs in which the score from `outside` is higher.

    Args:
        inside: scores (n,).
        outside: scores (m,).

    Example:
        >>> ranks_above(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 2.0]))
        0.75
    """
    from sklearn.metrics import roc_auc_score

    truth = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))])
    return float(roc_auc_score(truth.numpy(), torch.cat([inside, outside]).numpy()))


def fidelity(real: Tensor, synthetic: Tensor, seed: int) -> dict[str, float]:
    """Distances between real and synthetic embeddings.

    Args:
        real: (n, d), of norm one.
        synthetic: (m, d), of norm one.
        seed: of the choice of embeddings and of projections.

    Returns:
        Sliced and Sinkhorn Wasserstein distances, of order 2, by name.
    """
    import numpy as np

    with needed_for("the distance between records and synthetic records"):
        import ot

    random = torch.Generator().manual_seed(seed)
    one, other = (
        part[torch.randperm(len(part), generator=random)[:MOST_COMPARED]].double().numpy()
        for part in (real, synthetic)
    )
    sliced = ot.sliced_wasserstein_distance(one, other, n_projections=PROJECTIONS, seed=seed)
    # Embeddings have norm one, so costs are at most 4. A blur of 1/40 of the mean cost changes the
    # distance little.
    blur = float(np.mean(ot.dist(one, other))) / 40
    divergence = ot.bregman.empirical_sinkhorn_divergence(
        one, other, blur, numIterMax=200, warn=False
    )
    return {"sliced": float(sliced), "sinkhorn": float(np.sqrt(max(0.0, float(divergence))))}


def generators(node: NodeConfig) -> Path:
    """Folder of the generators of runs that the site took part in; files are named by Flower's
    number of the run.
    """
    return node.state / "generators"


def use_generator(job: Job, gate: Gate) -> Info:
    """Keep the received generator and evaluate it on this site's records.

    The caller decides which results may leave.

    Args:
        job: the request, with the generator.
        gate: of the site; its ledger names the runs in which the site took part.

    Raises:
        SurrogateError: for a generator of another run, or of a run in which the site took no part.
        DataError: where it cannot be evaluated.
    """
    if not gate.has_charged(job.flower_run):
        raise SurrogateError(
            f"a generator of run {job.flower_run}, in which this site has taken no part"
        )
    received = job.received_model()
    generator = Generator(received.header, job.run, received.tensors).checked()
    content = pack_generator(generator)
    if has_room(job.node, gate.policy.kept_mib, len(content)):
        replace_file(generators(job.node) / f"{job.flower_run}-{job.site}.safetensors", content)
    return _judged(job, generator)


def _judged(job: Job, generator: Generator) -> Info:
    classes = generator.header.classes
    if not len(job.found.test.labels):
        return {"correct": 0, "tested": 0}
    own, test = (site_records(job.found, classes, part) for part in ("train", "test"))
    labels = labels_evenly(len(classes), job.run.settings.dpcvae.synthetic)
    synthetic = LabelledEmbeddings(
        generator.draw(labels, stream(job.run.settings.seed, "site", job.site)), labels
    )
    shared = head_on(synthetic, generator.header, job.run.settings.head, job.run.settings.seed)
    settings = job.run.settings
    mixture = mix(own, shared, settings.head, settings.seed, settings.baseline.validation)
    metric_values = mixture.metric_values(test)
    like = generator.draw(test.labels, stream(job.run.settings.seed, "fidelity", job.site))
    if len(test.labels) > 1:
        metric_values |= fidelity(test.features, like, job.run.settings.seed)
    right = round(metric_values["accuracy-mixed"] * len(test.labels))
    LOG.info(
        "the site's own, synthetic and mixed heads: %s",
        {name: round(value, 4) for name, value in metric_values.items()},
    )
    answer: Info = {"correct": right, "tested": len(test.labels)}
    return answer | {f"downstream.{key}": value for key, value in metric_values.items()}


def site_records(
    site_features: SiteFeatures, classes: tuple[str, ...], part: str
) -> LabelledEmbeddings:
    """The site's training or test records of the given classes, scaled to norm one.

    Args:
        site_features: all records of the site.
        classes: names of classes, whose indices are the labels.
        part: "train" or "test".

    Raises:
        DataError: when there is none.
    """
    chosen = site_features.train if part == "train" else site_features.test
    labels = class_indices(classes, site_features.classes)[chosen.labels]
    if not bool((labels >= 0).any()):
        raise DataError(f"no {part} record of the classes {', '.join(classes)[:200]}")
    return LabelledEmbeddings(
        clip(chosen.features.double(), 0.0)[0].float()[labels >= 0], labels[labels >= 0]
    )

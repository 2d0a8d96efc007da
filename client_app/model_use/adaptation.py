"""A model of the site's own from the shared one: candidates, judged by cross-validation before one
replaces anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from fedsurrogate.client_app.model_use.adapted import Neighbours
from fedsurrogate.client_app.model_use.calibration import fit_temperature
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.models.classifiers import Classifier, Head, check_of_classes
from fedsurrogate.common.models.head_training import train_on_features
from fedsurrogate.common.models.intervals import bootstrap_weights, means_of
from fedsurrogate.common.settings import HeadSettings

FOLDS = 5
FEWEST = 20
SHARES = np.linspace(0.0, 1.0, 21)
# Weights of the shared model in the closed form, as multiples of the mean square of a feature.
PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0)
# Sizes of the step from the shared head: one is the least-squares solution on probabilities, whose
# logits are too small.
STEPS = (0.0, 1.0, 4.0, 16.0)
NEIGHBOURS = 10
DRAWS = 2000
SHARED, OWN, MIXED, CLOSED, NEAREST = (
    "shared",
    "own head",
    "mixture",
    "closed form",
    "nearest records",
)
Fit = Callable[[Tensor, Tensor], Classifier]
Losses = NDArray[np.float64]


@dataclass(frozen=True)
class Judgement:
    """A candidate on records that its training did not see.

    Attributes:
        name: of the candidate.
        accuracy: share of right decisions; None for numbers.
        loss: mean negative log-likelihood, or squared error.
        gain: by how much that is below the shared model's at its best temperature.
        low: lower limit of the gain's 95 % interval.
        high: upper limit of the gain's 95 % interval.
        share: weight of the own part.
    """

    name: str
    accuracy: float | None
    loss: float
    gain: float
    low: float
    high: float
    share: float


@dataclass(frozen=True)
class Adaptation:
    """All candidates, and the chosen one.

    Attributes:
        judged: the candidates.
        chosen: name of the chosen one.
        own: its own part; None if the shared model stays.
        share: weight of the own part.
        reason: of the choice, in words.
    """

    judged: tuple[Judgement, ...]
    chosen: str
    own: Classifier | None
    share: float
    reason: str


def adapt(shared: Classifier, held: HeldOut, settings: HeadSettings, seed: int = 0) -> Adaptation:
    """Judge the candidates by cross-validation over whole patients, and choose one.

    FedLambda mixes the probabilities of a head on own records with the shared model's. kNN-Per
    mixes in the nearest own records. The closed form adds to a linear head the ridge solution for
    what it leaves unexplained. A weight is chosen from all folds but the one that is judged, so no
    record judges its own choice.

    A candidate replaces the shared model only if its likelihood is higher beyond chance, and its
    own accuracy is not lower beyond chance than that of the shared model or of the own head alone.

    Args:
        shared: the shared model.
        held: the site's labelled records.
        settings: of the training of heads.
        seed: of folds, training and bootstrap.

    Raises:
        DataError: for too few records.

    Source: kNN-Per, Marfoq et al. 2022. Differs from the papers, which hold out one part: with
    fifty records one fifth is noise.
    """
    check_of_classes(shared, "an adaptation")
    labels, folds = held.labels, _folds(held, seed)
    classes = len(shared.header.classes)
    with torch.no_grad():
        base = shared.scores(held.features).double().softmax(1)
    fits: dict[str, Fit] = {
        OWN: lambda x, y: _head(shared, x, y, settings, seed),
        NEAREST: lambda x, y: _nearest(shared, x, y),
    }
    unseen = {name: _unseen(fit, held, folds, classes) for name, fit in fits.items()}
    table: dict[str, tuple[Tensor, float]] = {SHARED: (base, 0.0), OWN: (unseen[OWN], 1.0)}
    for name, of in ((MIXED, OWN), (NEAREST, NEAREST)):
        table[name] = _mixed(unseen[of], base, labels, folds)
    final: tuple[float, float] = (0.0, 0.0)
    if isinstance(shared, Head):
        probabilities, final = _closed(shared, held, folds)
        table[CLOSED] = probabilities, 1.0
    losses = {name: _loss(chances, labels) for name, (chances, _) in table.items()}
    # The shared model at its best temperature: a likelihood that only temperature raises is no
    # reason for another model.
    losses[SHARED] = _loss(_tempered(base.clamp_min(1e-30).log(), labels, folds), labels)
    weights = bootstrap_weights(len(labels), held.patients, DRAWS, seed)
    judged = tuple(_judgement(name, *table[name], labels, losses, weights) for name in table)
    chosen, reason = _choice(judged, table, labels, losses, weights)
    own: Classifier | None = None
    if chosen in (OWN, MIXED):
        own = fits[OWN](held.features, labels)
    elif chosen == NEAREST:
        own = fits[NEAREST](held.features, labels)
    elif chosen == CLOSED and isinstance(shared, Head):
        own = _stepped(shared, _correction(shared, held.features, labels, final[0]), final[1])
    return Adaptation(judged, chosen, own, table[chosen][1], reason)


def _choice(
    judged: Sequence[Judgement],
    table: dict[str, tuple[Tensor, float]],
    labels: Tensor,
    losses: dict[str, Losses],
    weights: Losses,
) -> tuple[str, str]:
    """The name of the chosen candidate, and why."""
    right = {
        name: (chances.argmax(1) == labels).numpy().astype(float)
        for name, (chances, _) in table.items()
    }
    for each in sorted(judged, key=lambda each: each.loss):
        if each.name == SHARED:
            return SHARED, "no candidate is better than the shared model beyond chance"
        # Four candidates are tried, so each must pass a stricter test.
        gain = float(
            np.quantile(means_of(losses[SHARED] - losses[each.name], weights), 0.025 / len(table))
        )
        if gain <= 0 or right[each.name].mean() < right[SHARED].mean():
            continue
        better = max((SHARED, OWN), key=lambda name: float(right[name].mean()))
        gains = means_of(right[each.name] - right[better], weights)
        worse = each.name != better and float(np.quantile(gains, 0.95)) < 0
        likely = float(np.quantile(means_of(losses[OWN] - losses[each.name], weights), 0.95)) < 0
        if not (worse or likely):
            return (
                each.name,
                "its likelihood is higher than the shared model's beyond chance, by "
                f"{each.gain:.3f} a record",
            )
    return SHARED, "no candidate is better than the shared model beyond chance"


def _judgement(
    name: str,
    probabilities: Tensor,
    share: float,
    labels: Tensor,
    losses: dict[str, Losses],
    weights: Losses,
) -> Judgement:
    apart = losses[SHARED] - losses[name]
    low, high = np.quantile(means_of(apart, weights), [0.025, 0.975])
    accuracy = float((probabilities.argmax(1) == labels).float().mean())
    return Judgement(
        name,
        accuracy,
        float(losses[name].mean()),
        float(apart.mean()),
        float(low),
        float(high),
        share,
    )


def _loss(probabilities: Tensor, labels: Tensor) -> Losses:
    losses: Losses = -probabilities.gather(1, labels[:, None])[:, 0].clamp_min(1e-6).log().numpy()
    return losses


def _folds(held: HeldOut, seed: int) -> NDArray[np.int64]:
    """The fold (n,) of each record: classes are spread, patients stay whole."""
    from sklearn.model_selection import StratifiedGroupKFold

    labels = held.labels.numpy()
    groups = (
        np.arange(len(labels))
        if held.patients is None
        else np.unique(held.patients, return_inverse=True)[1]
    )
    if len(labels) < FEWEST or len(set(labels.tolist())) < 2 or len(set(groups.tolist())) < FOLDS:
        raise DataError(
            f"{len(labels)} records of {len(set(labels.tolist()))} classes are too few to adapt a "
            f"model; {FEWEST} records of {FOLDS} patients and two classes are needed"
        )
    folds = np.zeros(len(labels), dtype=np.int64)
    splitter = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    import warnings

    with warnings.catch_warnings():
        # A class with fewer records than folds is not in each fold, which is allowed here.
        warnings.simplefilter("ignore")
        for number, (_, rows) in enumerate(splitter.split(labels, labels, groups)):
            folds[rows] = number
    return folds


def _unseen(fit: Fit, held: HeldOut, folds: NDArray[np.int64], classes: int) -> Tensor:
    """Probabilities (n, C) of each record by a part trained without its fold."""
    probabilities = torch.zeros(len(folds), classes, dtype=torch.float64)
    for number in range(FOLDS):
        rest, rows = torch.from_numpy(folds != number), torch.from_numpy(folds == number)
        part = fit(held.features[rest], held.labels[rest])
        with torch.no_grad():
            probabilities[rows] = part.scores(held.features[rows]).double().softmax(1)
    return probabilities


def _tempered(logits: Tensor, labels: Tensor, folds: NDArray[np.int64]) -> Tensor:
    """Probabilities (n, C) at a temperature that is fitted for each fold on the others."""
    probabilities = torch.zeros_like(logits)
    for number in range(FOLDS):
        rest, rows = torch.from_numpy(folds != number), torch.from_numpy(folds == number)
        probabilities[rows] = (logits[rows] / fit_temperature(logits[rest], labels[rest])).softmax(
            1
        )
    return probabilities


def _mixed(
    own: Tensor, base: Tensor, labels: Tensor, folds: NDArray[np.int64]
) -> tuple[Tensor, float]:
    """Mixed probabilities (n, C), with the weight for each fold chosen on the others, and the
    weight chosen on all.
    """
    shares = torch.from_numpy(SHARES)[:, None, None]
    every = shares * own + (1 - shares) * base
    losses = np.stack([_loss(each, labels) for each in every])
    mixed = torch.zeros_like(base)
    for number in range(FOLDS):
        best = int(losses[:, folds != number].mean(1).argmin())
        rows = torch.from_numpy(folds == number)
        mixed[rows] = every[best][rows]
    return mixed, float(SHARES[int(losses.mean(1).argmin())])


def _head(
    shared: Classifier, features: Tensor, labels: Tensor, settings: HeadSettings, seed: int
) -> Head:
    """A head on own records, with the shared head's centre, projection and clip."""
    count = len(shared.header.classes)
    prepared = shared.prepare(features).float()
    weight, bias = train_on_features(prepared, labels, count, settings, seed)
    if isinstance(shared, Head):
        return replace(shared, weight=weight, bias=bias)
    return Head(shared.header, weight, bias)


def _nearest(shared: Classifier, features: Tensor, labels: Tensor) -> Neighbours:
    return Neighbours(shared.header, normalize(features.float(), dim=1), labels, NEIGHBOURS)


def _closed(
    shared: Head, held: HeldOut, folds: NDArray[np.int64]
) -> tuple[Tensor, tuple[float, float]]:
    """Probabilities of the closed form for records of each fold, and penalty and step chosen on all
    folds.
    """
    grid = [(penalty, step) for penalty in PENALTIES for step in STEPS]
    every = torch.zeros(len(grid), len(folds), len(shared.header.classes), dtype=torch.float64)
    for number in range(FOLDS):
        rest, rows = torch.from_numpy(folds != number), torch.from_numpy(folds == number)
        for start, penalty in enumerate(PENALTIES):
            change = _correction(shared, held.features[rest], held.labels[rest], penalty)
            for offset, step in enumerate(STEPS):
                scores = _stepped(shared, change, step).scores(held.features[rows])
                every[start * len(STEPS) + offset, rows] = scores.double().softmax(1)
    losses = np.stack([_loss(each, held.labels) for each in every])
    probabilities = torch.zeros_like(every[0])
    for number in range(FOLDS):
        rows = torch.from_numpy(folds == number)
        probabilities[rows] = every[int(losses[:, folds != number].mean(1).argmin())][rows]
    return probabilities, grid[int(losses.mean(1).argmin())]


def _correction(
    shared: Head, features: Tensor, labels: Tensor, penalty: float
) -> tuple[Tensor, Tensor]:
    """Weight (C, d) and bias (C,) that explain, by ridge regression on own records, what the shared
    head leaves.
    """
    x = shared.prepare(features).double()
    rest = one_hot(labels, len(shared.header.classes)).double() - shared.scores(
        features
    ).double().softmax(1)
    mean = x.mean(0)
    centred = x - mean
    scale = centred.square().mean().clamp_min(1e-12)
    # With fewer records than dimensions, the dual form solves a smaller system.
    kernel = centred @ centred.T
    kernel.diagonal().add_(penalty * scale * x.shape[1])
    weight = (centred.T @ torch.linalg.solve(kernel, rest - rest.mean(0))).T
    return weight, rest.mean(0) - weight @ mean


def _stepped(shared: Head, change: tuple[Tensor, Tensor], step: float) -> Head:
    weight, bias = (
        old.double() + step * new
        for old, new in zip((shared.weight, shared.bias), change, strict=True)
    )
    return replace(shared, weight=weight.float(), bias=bias.float())

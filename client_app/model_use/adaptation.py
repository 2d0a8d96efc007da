"""A model of the site's own from the shared one: its scores moved, scaled, or corrected on own records,
as far as that lowers the loss of records that were not seen. The same for every target.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsurrogate.common.errors import ConfigError, DataError, SealError, SurrogateError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.models.class_metrics import bootstrap_weights, means_of
from fedsurrogate.common.models.classifiers import Classifier, target_of_model
from fedsurrogate.common.signed_models.signed_model import SignedModel, digest_of
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.labels import LABELS, Labels
from fedsurrogate.common.targets.metrics import checked_target, facts_of
from fedsurrogate.common.targets.number import NUMBER
from fedsurrogate.common.targets.target import Facts
from fedsurrogate.common.targets.time import TIME, Time

from ..node_config import NodeConfig
from .held_out import HeldOut
from .store import models_folder


@dataclass(frozen=True)
class Adapted(Classifier):
    """Scores of a shared model times slopes, plus linear ones of the features.

    Attributes:
        shared: the shared model.
        slope: of its scores, (o,), or (1,) for all of them.
        weight: of features as the shared model takes them, (o, k).
        bias: (o,).
        target: what the scores mean where they are not of classes, as JSON; empty for classes.
    """

    shared: Classifier
    slope: Tensor
    weight: Tensor
    bias: Tensor
    target: str = ""

    @property
    def header(self) -> Header:  # type: ignore[override]
        """The header of the shared model."""
        return self.shared.header

    @property
    def dimension(self) -> int:
        """Dimension of the features."""
        return self.shared.dimension

    @property
    def own(self) -> dict[str, Tensor]:
        """The site's own part."""
        return {"slope": self.slope, "weight": self.weight, "bias": self.bias}

    def arrays(self) -> dict[str, Tensor]:
        """Tensors of the shared model, and of the site's own part."""
        return {f"shared.{name}": each for name, each in self.shared.arrays().items()} | self.own

    def prepare(self, features: Tensor) -> Tensor:
        """Features in the form that the shared model needs."""
        return self.shared.prepare(features)

    def scores(self, features: Tensor) -> Tensor:
        """Scores (n, o)."""
        version = (self.slope.double(), self.weight.double(), self.bias.double())
        x, scores = self.prepare(features).double(), self.shared.scores(features).double()
        return _changed(version, x, scores)


def adapted_file(node: NodeConfig, model: SignedModel) -> Path:
    """The file of a site's own version of a model."""
    return models_folder(node) / f"{model.manifest.name}.adapted.safetensors"


def store_adapted(node: NodeConfig, model: SignedModel, own: Adapted, how: str) -> Path:
    """Store the site's own version of a model.

    It holds what was learned from the site's records, and must stay there.

    Args:
        node: the site's settings.
        model: the shared one.
        own: the site's version of it.
        how: it was chosen, in words.

    Returns:
        The file.
    """
    from safetensors.torch import save

    tensors = {name: tensor.contiguous() for name, tensor in own.own.items()}
    metadata = {"how": how, "of": model.manifest.tensors, "target": own.target}
    file = adapted_file(node, model)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(file, save(tensors, metadata | {"digest": _digest(tensors, metadata)}))
    return file


def adapted_classifier(node: NodeConfig | None, model: SignedModel) -> Adapted | None:
    """The site's own version of a model.

    Args:
        node: the site's settings; None without any.
        model: the shared one.

    Returns:
        The version; None if the site has none.

    Raises:
        SealError: for a changed file, or one of an earlier version.
    """
    from safetensors import SafetensorError, safe_open

    if node is None or not (file := adapted_file(node, model)).is_file():
        return None
    try:
        with safe_open(file, "pt") as content:
            metadata = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        if (
            metadata.pop("digest") != _digest(tensors, metadata)
            or metadata["of"] != model.manifest.tensors
        ):
            raise ValueError("its digest does not fit")
        target = checked_target(metadata["target"], model.classifier.header.classes)
        return Adapted(model.classifier, **tensors, target=target)
    except SurrogateError as error:
        raise SealError(f"{file}: {error}; remove it, and run `site adapt` again") from None
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise SealError(
            f"{file} was changed, is damaged or of an earlier version ({error}); remove it, and run "
            "`site adapt` again"
        ) from None


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    return digest_of(tensors) + json.dumps(sorted(metadata.items()))


FOLDS, FEWEST, DRAWS = 5, 20, 2000
# Weights of the shared model in a correction, as multiples of the mean square of a feature.
PENALTIES = (0.001, 0.01, 0.1, 1.0, 10.0)
# Deviations of an offset and of the logarithm of a slope, as they are expected before records are
# seen. They keep both finite where all records of a label are alike.
OFFSET, SLOPE, STEPS = 3.0, 1.0, 100
# Largest gradient at which a fit that is only compared with others ends.
ROUGHLY = 1e-3
SHARED, MOVED, SCALED = "shared", "moved", "scaled"
CORRECTED, OWN = "corrected by a ridge", "own head"
# The loss of each record, (n,), from scores (n, o) and what is known of the records, (n, ...).
Loss = Callable[[Tensor, Tensor], Tensor]
# Slopes (o,) or (1,) times the scores, weights (o, d) of features, and biases (o,), that are added.
Version = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Judgement:
    """A candidate on records that its training did not see.

    Attributes:
        name: of the candidate.
        accuracy: share of right decisions; None for other targets than classes.
        loss: mean negative log-likelihood; of numbers squared error, as a share of their variance.
        gain: by how much that is below the shared model's.
        low: lower limit of the gain's 95 % interval.
        high: upper limit of the gain's 95 % interval.
    """

    name: str
    accuracy: float | None
    loss: float
    gain: float
    low: float
    high: float


@dataclass(frozen=True)
class Adaptation:
    """All candidates, and the chosen one.

    Attributes:
        judged: the candidates.
        chosen: name of the chosen one.
        own: the chosen model; None if the shared model stays.
        reason: of the choice, in words.
    """

    judged: tuple[Judgement, ...]
    chosen: str
    own: Adapted | None
    reason: str


@dataclass(frozen=True)
class _Seen:
    """Records on which a version is fitted: features (n, d) as the model takes them, its scores (n, o)
    in units in which an offset is about one, and their losses. Of classes one slope is for all scores.
    The dimension is that of the features before they were turned into the directions of the records.
    """

    x: Tensor
    scores: Tensor
    losses: Callable[[Tensor], Tensor]
    slopes: int
    dimension: int


def adapt(shared: Classifier, held: HeldOut, seed: int = 0) -> Adaptation:
    """Judge versions of a model by cross-validation over whole patients, and choose one.

    Moved: an offset is added to the scores. Scaled: they are multiplied as well, by a number above
    zero, so that no ranking is turned around. Corrected: weights that a ridge keeps small are added
    too. Own head: such weights alone, without the shared model. The loss of a record is minus its log
    likelihood: of its class, of its annotated labels, or of its time by the hazards of the model's
    bins; of numbers the squared error. A version replaces the shared model only if its loss is significantly
    lower, and its accuracy is not lower.

    Args:
        shared: the shared model.
        held: the site's labelled records.
        seed: of folds and bootstrap.

    Returns:
        The candidates. A chosen model of labels has the site's prevalence as that it has learned, and
        one of numbers the deviation of its errors in cross-validation.

    Raises:
        ConfigError: for a model of another target.
        DataError: for too few records.

    Source: offset and slope: Cox 1958; van Houwelingen 2000.
    """
    facts = facts_of(target_of_model(shared))
    known, losses_of, unit = _problem(facts, shared.header.classes, held)
    folds, whole = _folds(held, seed), torch.ones(len(known), dtype=torch.bool)
    with torch.no_grad():
        x, scores = shared.prepare(held.features).double(), shared.scores(held.features).double()
    scores, dimension, basis, centre = scores / unit, x.shape[1], None, x.mean(0)
    if len(x) < dimension:
        # The records' own directions hold all weights that a ridge can have, in far fewer numbers.
        basis = torch.linalg.qr((x - centre).T).Q
        x = (x - centre) @ basis

    def seen(rows: Tensor) -> _Seen:
        return _Seen(
            x[rows],
            scores[rows],
            lambda own: losses_of(own, known[rows]),
            scores.shape[1] if facts else 1,
            dimension,
        )

    fits: dict[str, Callable[[_Seen], Version]] = {
        MOVED: lambda own: _least(own, scaled=False),
        SCALED: _least,
        CORRECTED: lambda own: _corrected(own, seed),
        OWN: lambda own: _alone(own, seed),
    }
    unseen = {SHARED: scores} | {name: torch.zeros_like(scores) for name in fits}
    for number in range(FOLDS):
        rows = folds == number
        for name, fit in fits.items():
            unseen[name][rows] = _changed(fit(seen(~rows)), x[rows], scores[rows])
    losses = {name: losses_of(each, known).numpy() for name, each in unseen.items()}
    weights = bootstrap_weights(len(known), held.patients, DRAWS, seed)
    judged, better = list[Judgement](), list[Judgement]()
    for name, own in losses.items():
        gains = losses[SHARED] - own
        # Several candidates are tried, so each must pass a stricter test than its interval.
        levels = [0.025, 0.975, 0.025 / len(losses)]
        low, high, least = np.quantile(means_of(gains, weights), levels).tolist()
        right = None if facts else float((unseen[name].argmax(1) == known).double().mean())
        judged.append(Judgement(name, right, float(own.mean()), float(gains.mean()), low, high))
        if least > 0 and (right or 0.0) >= (judged[0].accuracy or 0.0):
            better.append(judged[-1])
    if not better:
        reason = "no candidate is significantly better than the shared model"
        return Adaptation(tuple(judged), SHARED, None, reason)
    chosen = min(better, key=lambda each: each.loss)
    slope, weight, bias = fits[chosen.name](seen(whole))
    weight, bias = unit[:, None] * weight, unit * bias
    if basis is not None:
        weight = weight @ basis.T
        bias = bias - weight @ centre
    errors = unit * (known - unseen[chosen.name]) if facts.get("name") == NUMBER.name else scores
    learned = _learned_here(facts, shared.header.classes, held.values, errors)
    target = json.dumps(learned) if facts else ""
    version = Adapted(shared, slope.float(), weight.float(), bias.float(), target)
    what, unit_of_it = "likelihood is higher", "a record"
    if facts.get("name") == NUMBER.name:
        what, unit_of_it = "squared error is lower", "of the variance"
    reason = f"its {what} than the shared model's, which is significant, by {chosen.gain:.3f} {unit_of_it}"
    return Adaptation(tuple(judged), chosen.name, version, reason)


def _changed(version: Version, x: Tensor, scores: Tensor) -> Tensor:
    """Scores (n, o) of a version, from features (n, d) and scores (n, o)."""
    slope, weight, bias = version
    return slope * scores + x @ weight.T + bias


def _problem(facts: Facts, outputs: tuple[str, ...], held: HeldOut) -> tuple[Tensor, Loss, Tensor]:
    """What is known of records, (n, ...); the loss of scores; and the unit of each score, (o,)."""
    kind, ones = facts.get("name", ""), torch.ones(len(outputs), dtype=torch.float64)
    if kind not in ("", LABELS.name, NUMBER.name, TIME.name):
        raise ConfigError(
            "an adaptation is for models of classes, numbers, labels and times; this one answers "
            f"{', '.join(outputs)[:200]}"
        )
    if not kind:
        count = len(set(held.labels.tolist()))
        if len(held.labels) < FEWEST or count < 2:
            raise DataError(
                f"{len(held.labels)} records of {count} classes are too few to adapt a model; "
                f"{FEWEST} records of two classes are needed"
            )
        return held.labels, lambda scores, y: cross_entropy(scores, y, reduction="none"), ones
    values = held.values
    there = 0 if values is None else int((~values.isnan()).any(1).sum())
    if values is None or there < FEWEST:
        raise DataError(
            f"{there} records with values are too few to adapt a model; {FEWEST} needed"
        )
    columns = tuple(facts["columns"])
    if kind == TIME.name:
        if (events := int((values[:, 1] == 1).sum())) < FOLDS:
            raise DataError(f"{events} records with an event are too few; {FOLDS} are needed")
        time = Time(columns, tuple(map(float, facts["edges"])))
        losses = time.objective().losses
        return time.code(values), lambda scores, y: losses(_hazards(facts, scores), y), ones
    own = values[:, [columns.index(name) for name in outputs]].double()
    if kind == LABELS.name:
        labels = Labels(outputs)
        return labels.code(own), labels.objective().losses, ones
    places = [columns.index(name) for name in outputs]
    low, high = torch.tensor(facts["ranges"], dtype=torch.float64)[places].T
    own = own.clamp(low, high)
    unit = own.var(0, unbiased=False).clamp_min(1e-12).sqrt()
    return own / unit, lambda scores, y: (scores - y).square().mean(1), unit


def _hazards(facts: Facts, scores: Tensor) -> Tensor:
    """Log odds of the event in each bin."""
    if "levels" in facts:
        return torch.tensor(facts["levels"], dtype=torch.float64) + scores
    hazard = torch.tensor(facts["hazard"], dtype=torch.float64).clamp_min(1e-9)
    whole = (hazard * scores.clamp(-30, 30).exp()).clamp_min(1e-12)
    # log(e^h - 1), for any h.
    return whole + (-(-whole).expm1()).log()


def _folds(held: HeldOut, seed: int) -> Tensor:
    """The fold (n,) of each record: classes are spread, patients stay whole."""
    from sklearn.model_selection import StratifiedGroupKFold

    groups = np.arange(len(held.labels))
    if held.patients is not None:
        groups = np.unique(held.patients, return_inverse=True)[1]
    if (units := len(np.unique(groups))) < FOLDS:
        raise DataError(f"records of {units} patients are too few; {FOLDS} are needed")
    splitter = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    folds = torch.zeros(len(groups), dtype=torch.int64)
    with warnings.catch_warnings():
        # A class with fewer records than folds is not in each fold, which is allowed here.
        warnings.simplefilter("ignore")
        for number, (_, rows) in enumerate(splitter.split(groups, held.labels, groups)):
            folds[rows] = number
    return folds


def _least(
    own: _Seen,
    penalty: float | None = None,
    weights: Tensor | None = None,
    scaled: bool = True,
    tolerance: float = 1e-6,
) -> Version:
    """The version with the least loss of records with these weights (n,), and its priors; weights of
    features are added with a penalty alone.
    """
    (count, columns), outputs = own.x.shape, own.scores.shape[1]
    weights = torch.full((count,), 1 / count, dtype=torch.float64) if weights is None else weights
    centre, middle = weights @ own.x, weights @ own.scores
    apart, scores = own.x - centre, own.scores - middle
    strength = (penalty or 0.0) * float(weights @ apart.square().sum(1)) / own.dimension
    offset, slope, change = (
        torch.zeros(shape, dtype=torch.float64)
        for shape in ((outputs,), (own.slopes,), (outputs, columns))
    )
    moving = [offset, *([slope] if scaled else []), *([change] if penalty else [])]

    def closure() -> Tensor:
        steps.zero_grad()
        made = slope.exp() * scores + middle + offset
        prior = ((offset / OFFSET).square().sum() + (slope / SLOPE).square().sum()) / count
        if penalty:
            made, prior = made + apart @ change.T, prior + strength * change.square().sum()
        loss: Tensor = weights @ own.losses(made) + prior / 2
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for each in moving:
        each.requires_grad_(True)
    steps = torch.optim.LBFGS(
        moving, max_iter=STEPS, tolerance_grad=tolerance, line_search_fn="strong_wolfe"
    )
    steps.step(closure)  # type: ignore[no-untyped-call]
    offset, slope, change = offset.detach(), slope.detach().exp(), change.detach()
    return (slope, change, middle + offset - slope * middle - change @ centre)


def _corrected(own: _Seen, seed: int) -> Version:
    """With the penalty that is best on a third of these records."""
    kept = torch.from_numpy(np.random.default_rng(seed).permutation(len(own.x)) % 3 > 0)
    fitted, rest = (each.double() / each.sum() for each in (kept, ~kept))

    def loss(penalty: float) -> float:
        # Roughly, because it only compares penalties.
        version = _least(own, penalty, fitted, tolerance=ROUGHLY)
        return float(rest @ own.losses(_changed(version, own.x, own.scores)))

    return _least(own, min(PENALTIES, key=loss))


def _alone(own: _Seen, seed: int) -> Version:
    """Without the shared scores: from their mean, which is the same for all records."""
    middle = own.scores.mean(0)
    slope, weight, bias = _corrected(replace(own, scores=middle.expand_as(own.scores)), seed)
    return 0 * slope, weight, bias + slope * middle


def _learned_here(
    facts: Facts, outputs: tuple[str, ...], values: Tensor | None, errors: Tensor
) -> Facts:
    """Facts with the prevalence of labels at this site, which the offsets now assume, or with the
    deviation of errors (n, o) of numbers.
    """
    if facts.get("name") == NUMBER.name:
        return {**facts, "deviation": errors.square().mean(0).sqrt().tolist()}
    if facts.get("name") != LABELS.name or values is None:
        return facts
    shares = dict(zip(outputs, facts.get("prevalence", []), strict=False))
    for name in outputs:
        own = values[:, list(facts["columns"]).index(name)]
        known = own[~own.isnan()]
        # A label that is annotated nowhere here stays as it was.
        if len(known) or name not in shares:
            shares[name] = (float(known.sum()) + 0.5) / (len(known) + 1)
    return {**facts, "prevalence": [shares[name] for name in outputs]}

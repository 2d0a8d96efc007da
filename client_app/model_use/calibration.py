"""What a site decides about a model: temperature, thresholds, prevalence, and when the model abstains;
what the model then answers; and what a person wishes it to decide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from fedsurrogate.common.errors import ConfigError, DataError, SealError, StateError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.models.class_metrics import DRAWS, FEWEST
from fedsurrogate.common.models.classifiers import Classifier, alone, scores_alone, target_of_model
from fedsurrogate.common.signed_models.gaussians import Gaussians
from fedsurrogate.common.signed_models.signed_model import SignedModel, digest_of
from fedsurrogate.common.targets.labels import LABELS
from fedsurrogate.common.targets.metrics import answers_of, facts_of

from ..datasets.dataset import stratified_split
from ..node_config import NodeConfig
from .store import models_folder

if TYPE_CHECKING:
    from .held_out import HeldOut

Probabilities = NDArray[np.float64]
Score = Literal["relative", "mahalanobis"]
# In the order in which Gaussians give them.
SCORES: tuple[Score, ...] = ("mahalanobis", "relative")
ABSTAIN = "abstain"
# Shares are kept this far from zero and one for their log odds.
LEAST_SHARE = 1e-6
PRESENT = " present"
# The prevalence is that of the calibrating records.
HERE = "here"


@dataclass(frozen=True)
class Calibration:
    """A site's own settings of a model.

    Attributes:
        temperature: logits are divided by it.
        positive: class that the threshold is for; empty for none.
        threshold: a record is of class `positive` if its probability is at least this, otherwise of
            the most probable other class; without a threshold the most probable class decides.
        score: out-of-distribution score by which the model abstains.
        abstain_above: the model abstains where the score exceeds this number; None: never.
        note: how the values were chosen.
        thresholds: of a model of labels, by label: the smallest probability that counts as present.
        prevalence: of a model of labels, by label: the share of positive records at this site, for
            which probabilities are; that of the model for others.

    Example:
        >>> calibration = Calibration(positive="ill", threshold=0.2).checked(("well", "ill"))
        >>> chances = calibration.probabilities(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
        >>> chances.round(2).tolist()
        [[0.73, 0.27], [0.95, 0.05]]
        >>> calibration.decisions(chances, ("well", "ill")).tolist()
        [1, 0]
    """

    temperature: float = 1.0
    positive: str = ""
    threshold: float | None = None
    score: Score = "relative"
    abstain_above: float | None = None
    note: str = ""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    prevalence: Mapping[str, float] = field(default_factory=dict)

    def checked(self, classes: tuple[str, ...]) -> Self:
        """This calibration, for a model of these classes. Raises ConfigError."""
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise ConfigError(f"threshold = {self.threshold:g}: must be above 0 and below 1")
        for key in ("thresholds", "prevalence"):
            for name, value in getattr(self, key).items():
                if name not in classes or not 0 < value < 1:
                    raise ConfigError(
                        f"{key}: {name!r} = {value:g}; the model's labels are {', '.join(classes)}, "
                        "and a value must be above 0 and below 1"
                    )
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"temperature = {self.temperature:g}: must be above 0")
        if self.score not in SCORES:
            raise ConfigError(f"score = {self.score!r}: must be 'relative' or 'mahalanobis'")
        positive = self.positive or (classes[1] if len(classes) == 2 else "")
        if positive and positive not in classes:
            raise ConfigError(
                f"positive = {positive!r}: the model's classes are {', '.join(classes)}"
            )
        if self.threshold is not None and not positive:
            raise ConfigError(
                f"threshold = {self.threshold:g}: name the class that it is for with --positive"
            )
        return replace(self, positive=positive)

    def chosen(self, **choices: Any) -> Self:
        """This calibration with what a person chose.

        Args:
            choices: values of attributes; None is no choice.

        Raises:
            ConfigError: for a score without its limit.
        """
        given = {key: value for key, value in choices.items() if value is not None}
        score = given.get("score", self.score)
        if score != self.score and self.abstain_above is not None and "abstain_above" not in given:
            raise ConfigError(
                f"score = {score!r}: the stored number of abstain-above is for {self.score!r}; "
                "give --abstain-above as well"
            )
        return replace(self, **given)

    def probabilities(self, scores: Tensor) -> Probabilities:
        """Class probabilities (n, C) of logits (n, C); of each record alone."""
        logits = alone(scores.double().cpu() / self.temperature)
        chances: Probabilities = torch.cat([row.softmax(1) for row in logits]).numpy()
        return chances

    def decisions(
        self, probabilities: Probabilities, classes: tuple[str, ...]
    ) -> NDArray[np.int64]:
        """The decided class of each record.

        Args:
            probabilities: of the classes, (n, C).
            classes: names of C classes.

        Returns:
            Indices of classes, (n,).
        """
        if self.threshold is None:
            return np.asarray(probabilities.argmax(1), dtype=np.int64)
        index = classes.index(self.positive)
        others = probabilities.copy()
        others[:, index] = -1
        decided = np.where(probabilities[:, index] >= self.threshold, index, others.argmax(1))
        return np.asarray(decided, dtype=np.int64)


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """The temperature that maximises the likelihood of labels.

    Args:
        scores: logits (n, C).
        labels: indices of classes, (n,).

    Source: Guo et al. 2017, section 4.2.
    """
    from scipy.optimize import minimize_scalar

    logits = scores.double()

    def loss(log_temperature: float) -> float:
        return float(
            torch.nn.functional.cross_entropy(logits / float(np.exp(log_temperature)), labels)
        )

    optimum = minimize_scalar(loss, bounds=(-4.0, 4.0), method="bounded")
    return float(np.exp(optimum.x))


def threshold_for(
    probability: NDArray[np.float64],
    positive: NDArray[np.bool_],
    sensitivity: float = 0.0,
    specificity: float = 0.0,
) -> float:
    """The largest threshold whose sensitivity on these records is at least the wished one; or the
    smallest one whose specificity is.

    Args:
        probability: of the positive class, (n,).
        positive: whether a record is of this class, (n,).
        sensitivity: the wished one, in (0, 1]; 0 for a wished specificity.
        specificity: the wished one, in (0, 1].

    Raises:
        ConfigError: without a record that the wish is about.

    Example:
        >>> chances, truth = np.array([0.9, 0.6, 0.4, 0.1]), np.array([True, False, True, False])
        >>> threshold_for(chances, truth, 0.5), threshold_for(chances, truth, 1.0)
        (0.9, 0.4)
        >>> threshold_for(chances, truth, specificity=0.5)
        0.4
    """
    name, wish, own = "specificity", specificity, probability[~positive]
    if sensitivity:
        name, wish, own = "sensitivity", sensitivity, probability[positive]
    if not len(own):
        raise ConfigError(
            f"no record of the {'positive' if sensitivity else 'negative'} class, so no threshold "
            f"gives a {name}; choose another class with --positive, or give such records with "
            "--data-dir"
        )
    shares = (len(own) - np.searchsorted(np.sort(own), probability)) / len(own)
    reached, allowed = probability[shares >= wish], probability[shares <= 1 - wish + 1e-12]
    found = reached.max() if sensitivity else allowed.min(initial=np.inf)
    return float(np.clip(found, 1e-6, 1 - 1e-6))


def abstain_limit(scores: Tensor, share: float) -> float:
    """The out-of-distribution score that one more record like these rarely exceeds.

    The limit is the ceil((n + 1) (1 - share))-th smallest score.

    Args:
        scores: of records that neither the model nor its Gaussians have seen, (n,).
        share: largest probability with which one more record exceeds the limit, in (0, 1).

    Raises:
        ConfigError: for another share, or too few records.

    Source: split conformal prediction, Papadopoulos et al. 2002.

    Example:
        >>> abstain_limit(torch.arange(19.0), 0.1)
        17.0
    """
    if not 0 < share < 1:
        raise ConfigError(f"abstain = {share:g}: must be above 0 and below 1")
    place = math.ceil((len(scores) + 1) * (1 - share) - 1e-9)
    if place > len(scores):
        least = math.ceil(1 / share - 1e-9) - 1
        raise ConfigError(
            f"abstain = {share:g}: needs {least} records to choose the limit, not {len(scores)}; "
            "set a larger share"
        )
    return float(scores.sort().values[place - 1])


def is_of_labels(classifier: Classifier) -> bool:
    """Whether a model answers labels."""
    return facts_of(target_of_model(classifier)).get("name") == LABELS.name


def decided_answers(
    target: str, outputs: tuple[str, ...], scores: Tensor, calibration: Calibration
) -> dict[str, Tensor]:
    """What a model says of each record, by the prevalence and thresholds of a site.

    Args:
        target: facts about it, as the model carries them.
        outputs: names of the scores.
        scores: (n, o).
        calibration: of the site.

    Returns:
        Columns by name, (n,) each, float64: what the model answers, and 1 or 0 for each label with a
        threshold.
    """
    answers = answers_of(target, outputs, at_prevalence(target, outputs, scores, calibration))
    if facts_of(target).get("name") != LABELS.name:
        return answers
    chosen = dict(calibration.thresholds)
    if calibration.threshold is not None:
        chosen[calibration.positive] = calibration.threshold
    present = {
        f"{name}{PRESENT}": (answers[name] >= chosen[name]).double()
        for name in outputs
        if name in chosen
    }
    return answers | present


def at_prevalence(
    target: str, outputs: tuple[str, ...], scores: Tensor, calibration: Calibration
) -> Tensor:
    """Log odds of labels for the prevalence of a site.

    Args:
        target: facts about it, as the model carries them.
        outputs: names of the scores.
        scores: log odds, (n, o).
        calibration: of the site; labels that its prevalence does not name stay as they are.

    Returns:
        (n, o), float64.

    Raises:
        ConfigError: for a model that says nothing of its prevalence.
    """
    if not calibration.prevalence:
        return scores.double()
    shares = facts_of(target).get("prevalence")
    if not isinstance(shares, list) or len(shares) != len(outputs):
        raise ConfigError("prevalence: the model does not say which it has learned")
    named = zip(outputs, shares, strict=True)
    own = [calibration.prevalence.get(name, share) for name, share in named]
    both = torch.tensor([shares, own], dtype=torch.float64)
    odds = torch.logit(both.clamp(LEAST_SHARE, 1 - LEAST_SHARE))
    return scores.double() + odds[1] - odds[0]


def calibration_file(node: NodeConfig, name: str) -> Path:
    """The file of a kept model's calibration."""
    return models_folder(node) / f"{name}.calibration.json"


def read_calibration(node: NodeConfig | None, model: SignedModel) -> Calibration:
    """The stored calibration of a model; the default without one.

    Args:
        node: the site's settings; None without any.
        model: the shared one.

    Raises:
        StateError: for a damaged file.
    """
    if node is None:
        return Calibration()
    file = calibration_file(node, model.manifest.name)
    try:
        content = json.loads(file.read_text())
        if content.pop("tensors") != model.manifest.tensors:
            return Calibration()
        content.pop("gaussians", None)
        # The first knows the names of its parts, the second their types.
        return TypeAdapter(Calibration).validate_python(asdict(Calibration(**content)))
    except FileNotFoundError:
        return Calibration()
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise StateError(
            f"{file} cannot be read ({type(error).__name__}); remove it, and calibrate again"
        ) from None


def store_calibration(
    node: NodeConfig,
    model: SignedModel,
    calibration: Calibration,
    gaussians: Gaussians | None = None,
) -> Path:
    """Store a calibration.

    Args:
        node: the site's settings.
        model: the shared one.
        calibration: of this model.
        gaussians: of the site's own records, for a model that has none.

    Returns:
        The file.
    """
    from safetensors.torch import save

    file = calibration_file(node, model.manifest.name)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    content: dict[str, Any] = asdict(calibration) | {"tensors": model.manifest.tensors}
    if gaussians is not None:
        tensors = {name: tensor.contiguous() for name, tensor in gaussians.tensors().items()}
        replace_file(_gaussians_file(file), save(tensors))
        content["gaussians"] = digest_of(tensors)
    replace_file(file, (json.dumps(content, indent=2) + "\n").encode())
    return file


def own_gaussians(node: NodeConfig | None, model: SignedModel) -> Gaussians | None:
    """The model's Gaussians, or those that this site has fitted for it on its own records.

    Args:
        node: the site's settings; None without any.
        model: the shared one.

    Returns:
        The Gaussians; None without any.

    Raises:
        SealError: if the site's own file was changed.
    """
    if model.gaussians is not None or node is None:
        return model.gaussians
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = calibration_file(node, model.manifest.name)
    try:
        content = json.loads(file.read_text())
        if content.get("tensors") != model.manifest.tensors or "gaussians" not in content:
            return None
        tensors = load_file(_gaussians_file(file))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    # RuntimeError, TypeError: torch cannot represent a side of zero next to a huge one.
    except (SafetensorError, RuntimeError, TypeError):
        tensors = {}
    if not tensors or digest_of(tensors) != content["gaussians"]:
        raise SealError(f"{_gaussians_file(file)} was changed; run `site evaluate --store` again")
    return Gaussians.of(tensors)


def _gaussians_file(file: Path) -> Path:
    return file.with_name(file.name.replace(".calibration.json", ".gaussians.safetensors"))


@dataclass(frozen=True)
class Wish:
    """What a person wishes.

    Attributes:
        temperature: fit one.
        sensitivity: of the positive class, or of each label, for which a threshold is chosen; 0 for
            none.
        specificity: of each label, for which a threshold is chosen; 0 for none.
        prevalence: share of positive records here, as "label=share,label=share"; HERE for that of
            half of the records; empty for that of the model.
        abstain: share of such records without a decision; 0 for none.
        score: by which the model abstains; None: as the calibration says.
        draws: of the bootstrap.
        seed: of the split and the bootstrap.

    Raises:
        ConfigError: for wishes that do not agree.
    """

    temperature: bool = False
    sensitivity: float = 0.0
    specificity: float = 0.0
    prevalence: str = ""
    abstain: float = 0.0
    score: Score | None = None
    draws: int = DRAWS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sensitivity and self.specificity:
            raise ConfigError("--sensitivity and --specificity: one threshold has one of them")
        for name in ("sensitivity", "specificity"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"--{name} {getattr(self, name):g}: must be above 0, at most 1")

    def check(self, classifier: Classifier, of_classes: Mapping[str, object]) -> None:
        """Refuse what a model cannot have.

        Args:
            classifier: the model.
            of_classes: what a person also wishes that only models of classes have, by option.

        Raises:
            ConfigError: for such a wish.
        """
        if not is_of_labels(classifier) and (self.specificity or self.prevalence):
            raise ConfigError(
                "--specificity and --prevalence are for models of labels, and this is none; leave "
                "them out"
            )
        if target_of_model(classifier) and self.sensitivity and not is_of_labels(classifier):
            raise ConfigError(
                "--sensitivity is for models of classes and labels, and this is none; leave it out"
            )
        check_of_classes(classifier, of_classes)
        if self.score is not None and not self.abstain:
            raise ConfigError(f"--score {self.score}: is the score for --abstain; give both")

    def chooses(self, held: HeldOut) -> NDArray[np.bool_] | None:
        """The half (n,) of the records, whole patients where these are known, that choose and are not
        judged: metrics on the records that chose a threshold would be too good. None where nothing
        is chosen.
        """
        chosen = self.temperature or self.sensitivity or self.specificity or self.abstain
        if not (chosen or self.prevalence == HERE):
            return None
        first = stratified_split(held.labels, 0.5, self.seed, held.patients).numpy()
        return np.asarray(first, dtype=bool)


def check_of_classes(classifier: Classifier, given: Mapping[str, object]) -> None:
    """Refuse options that only models of classes have.

    Args:
        classifier: the model.
        given: by option, something true where a person gave it.

    Raises:
        ConfigError: for a model of another target with such an option.
    """
    named = [option for option, value in given.items() if value]
    if target_of_model(classifier) and named:
        raise ConfigError(
            f"{' and '.join(named)}: for models of classes only, and this one has another target; "
            "leave it out"
        )


def calibrated_classes(
    calibration: Calibration, wish: Wish, scores: Tensor, labels: Tensor, classes: tuple[str, ...]
) -> Calibration:
    """Choose temperature and threshold.

    Args:
        calibration: that the site has.
        wish: what to choose anew.
        scores: logits of the records that choose, (n, C).
        labels: their classes, (n,).
        classes: names of C classes.

    Raises:
        ConfigError: for a wish that does not fit.
    """
    notes = []
    if wish.temperature:
        calibration = replace(calibration, temperature=fit_temperature(scores, labels))
        notes.append(f"temperature from {len(labels)} records")
    if wish.sensitivity:
        if not calibration.positive:
            raise ConfigError("--sensitivity: name the class that it is for with --positive")
        index = classes.index(calibration.positive)
        chance, own = calibration.probabilities(scores)[:, index], labels.numpy() == index
        threshold = threshold_for(chance, own, wish.sensitivity)
        calibration = replace(calibration, threshold=threshold)
        notes.append(
            f"threshold for a sensitivity of {wish.sensitivity:g} from {own.sum()} records"
        )
    return replace(calibration, note="; ".join(notes) or calibration.note).checked(classes)


def calibrated_labels(
    classifier: Classifier, held: HeldOut, calibration: Calibration, wish: Wish
) -> tuple[Calibration, HeldOut]:
    """Choose prevalence and thresholds of each label. A label with few positive or negative records
    among those that choose keeps what it had.

    Args:
        classifier: of a target; only one of labels has anything to choose.
        held: the records.
        calibration: that the site has.
        wish: what to choose anew.

    Returns:
        The calibration, and the records that did not choose it.

    Raises:
        ConfigError: for a wish that does not fit.
        DataError: for too few records.
    """
    outputs, target = classifier.header.classes, target_of_model(classifier)
    if not is_of_labels(classifier):
        return calibration, held
    if wish.prevalence and wish.prevalence != HERE:
        shares = shares_in(wish.prevalence, outputs)
        calibration = _at(classifier, calibration, shares, "prevalence given by a person")
    if (first := wish.chooses(held)) is None:
        return calibration, held
    if held.values is None:
        raise DataError("the held-out records have no values of the model's target")
    columns = facts_of(target)["columns"]
    truth = held.values[first][:, [columns.index(name) for name in outputs]].numpy()
    sizes = [(truth == value).sum(0) for value in (0, 1)]
    own = {
        name: truth[:, at]
        for at, name in enumerate(outputs)
        if min(sizes[0][at], sizes[1][at]) >= FEWEST
    }
    if not own:
        raise DataError(
            f"{len(held.values)} held-out records are too few to calibrate with one half and judge "
            f"with the other; a label needs {FEWEST} that are present, and as many absent, in a half"
        )
    made = []
    if wish.prevalence == HERE:
        shares = {
            name: float((np.nansum(each) + 0.5) / ((~np.isnan(each)).sum() + 1))
            for name, each in own.items()
        }
        calibration = _at(classifier, calibration, shares)
        made.append("prevalence")
    thresholds, nothing = dict(calibration.thresholds), ""
    if wish.sensitivity or wish.specificity:
        kind, wanted = (
            ("sensitivity", wish.sensitivity)
            if wish.sensitivity
            else ("specificity", wish.specificity)
        )
        made.append(f"thresholds for a {kind} of {wanted:g}")
        scores = scores_alone(classifier, held.features[first])
        answers = decided_answers(target, outputs, scores, calibration)
        for name, each in own.items():
            chance, known = answers[name].numpy()[~np.isnan(each)], each[~np.isnan(each)] == 1
            thresholds[name] = threshold_for(chance, known, wish.sensitivity, wish.specificity)
            present = chance >= thresholds[name]
            if present.all() or not present.any():
                which = "every record" if present.all() else "no record"
                nothing += f"; by this threshold {which} has {name}: its probabilities do not tell records apart"
    less = ", ".join(name for name in outputs if name not in own)
    note = f"{' and '.join(made)} from {len(truth)} records"
    note += (f"; not of {less}, which have few" if less else "") + nothing
    return replace(calibration, thresholds=thresholds, note=note), taken(
        held, ~torch.from_numpy(first)
    )


def shares_in(text: str, labels: Sequence[str]) -> dict[str, float]:
    """The shares in a text such as "edema=0.1,mass=0.02".

    Raises:
        ConfigError: for another text, label or share.

    Example:
        >>> shares_in("edema=0.1, mass=0.02", ["edema", "mass"])
        {'edema': 0.1, 'mass': 0.02}
    """
    found = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, number = part.rpartition("=")
        name = name.strip()
        try:
            share = float(number)
        except ValueError:
            share = -1.0
        if not (equals and 0 < share < 1):
            raise ConfigError(
                f"--prevalence {part[:60]!r}: write label=share, with a share between 0 and 1, or "
                f"{HERE!r}"
            )
        if name not in labels:
            raise ConfigError(
                f"--prevalence: the model has no label {name[:60]!r}; it has {', '.join(labels)}"
            )
        found[name] = share
    return found


def _at(
    classifier: Classifier, calibration: Calibration, shares: Mapping[str, float], note: str = ""
) -> Calibration:
    """The calibration at another prevalence. Its thresholds move with the probabilities, so that
    they decide as before.
    """
    moved = replace(calibration, prevalence=dict(shares), note=note)
    outputs, target = classifier.header.classes, target_of_model(classifier)
    nothing = torch.zeros(1, len(outputs), dtype=torch.float64)
    shifts = at_prevalence(target, outputs, nothing, moved) - at_prevalence(
        target, outputs, nothing, calibration
    )
    odds = {name: float(shift) for name, shift in zip(outputs, shifts[0], strict=True)}
    thresholds = {
        name: float(torch.sigmoid(torch.tensor(value).double().logit() + odds[name]))
        for name, value in calibration.thresholds.items()
    }
    return replace(moved, thresholds=thresholds)


def taken(held: HeldOut, rows: Tensor) -> HeldOut:
    """Some of the records.

    Args:
        held: the records.
        rows: which ones, (n,), bool.
    """
    at = rows.nonzero().flatten().tolist()
    return replace(
        held,
        features=held.features[rows],
        labels=held.labels[rows],
        patients=None if held.patients is None else tuple(held.patients[i] for i in at),
        groups={name: [values[i] for i in at] for name, values in held.groups.items()},
        values=None if held.values is None else held.values[rows],
    )

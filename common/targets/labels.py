"""Labels, such as findings in an X-ray: each present, absent, or not annotated in a record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.target import label_sets
from fedsurrogate.common.targets.objective import LearningRates, Objective, TrainedHead
from fedsurrogate.common.targets.target import (
    Facts,
    Kind,
    Target,
    TargetSum,
    sums_of_counts,
)

# A second derivative is 1/4 at most, so steps may be four times as long as for numbers.
RATES = LearningRates(4.0, 1.2, 12.0)
# Sites that must share in an exact sum, besides those that may collude.
LEAST_ANNOTATORS = 2


@dataclass(frozen=True)
class Labels(Target):
    """Labels, of which a record has any number.

    The code has two rows a label: records with it, and records without it. A record that is not
    annotated for a label is in neither.

    Attributes:
        columns: of the L labels.
        sets: the labels that each site annotates, in the order of its settings; none where all
            sites annotate all.

    Example:
        >>> labels = Labels(("edema", "fracture"))
        >>> labels.code(torch.tensor([[1.0, float("nan")]])).tolist()
        [[1.0, 0.0, 0.0, 0.0]]
    """

    columns: tuple[str, ...]
    sets: tuple[tuple[str, tuple[str, ...]], ...] = ()
    name = "labels"
    gaps = True

    @property
    def rows(self) -> tuple[str, ...]:
        """Two rows a label."""
        return tuple(f"{each}: {there}" for each in self.columns for there in ("present", "absent"))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The labels."""
        return self.columns

    @property
    def public(self) -> dict[str, object]:
        """Names, and who annotates which."""
        sets = {site: list(labels) for site, labels in self.sets}
        return {"name": self.name, "columns": list(self.columns)} | ({"sets": sets} if sets else {})

    def annotators(self, label: str) -> int:
        """Number of sites that annotate a label, as far as settings say."""
        return sum(label in labels for _, labels in self.sets)

    def fewest(self) -> tuple[str, int]:
        """The label that fewest sites annotate, and their number."""
        return min(
            ((name, self.annotators(name)) for name in self.columns), key=lambda each: each[1]
        )

    def statistics(self, private: bool) -> tuple[TargetSum, ...]:
        """Sums of the code t, of t z' and of z z'; without noise also of 1 and z.

        A record is in one row of each label for which it is annotated, so |t| <= sqrt(L). With
        noise, the public centre stands for the mean of the features.
        """
        return sums_of_counts(math.sqrt(len(self.columns)), private)

    def code(self, values: Tensor) -> Tensor:
        """(n, 2 L), ones and zeros."""
        there = torch.stack([values == 1, values == 0], 2).double()
        return there.flatten(1)

    def faults(self, values: Tensor) -> Mapping[str, Tensor]:
        """Values other than 1 and 0."""
        wrong = ~(values.isnan() | (values == 0) | (values == 1)).all(1)
        return {"a label that is not 1, 0 or empty": wrong}

    def large_enough(self, code: Tensor, least: int, summed: bool) -> tuple[Tensor, str]:
        """The code without labels of which few records are present, absent, or not annotated.

        The sums of few records show their features; and where all but few are annotated, the
        difference from the sum of all records does.
        """
        sizes = code.sum(0)
        parts = torch.stack([sizes[0::2], sizes[1::2], len(code) - sizes[0::2] - sizes[1::2]])
        annotated = parts[:2].sum(0) > 0
        small = annotated & ((parts[:2] < least).any(0) | ((parts[2] > 0) & (parts[2] < least)))
        if not small.any():
            return code, ""
        names = [name for name, few in zip(self.columns, small.tolist(), strict=True) if few]
        if not (annotated & ~small).any() and not summed:
            raise DataError(
                f"no label has {least} records that are present, and as many that are absent; the "
                "policy's smallest-class asks for that many in sums without noise"
            )
        kept = ~small.repeat_interleave(2)
        why = f"left out of what this site sends, with fewer than {least} records: "
        return code * kept, why + ", ".join(map(repr, names))

    def objective(self) -> Objective:
        """Binary cross-entropy of the labels for which a record is annotated, without weights for
        rare labels, so that probabilities stay those of the records.
        """
        return Objective(len(self.columns), _losses, RATES, self._answering)

    def _answering(self, model: Mapping[str, Tensor]) -> TrainedHead:
        return TrainedHead(self.columns, model["weight"], model["bias"], {})

    def groups(self, values: Tensor) -> Tensor:
        """Present, absent or unknown, of the first label."""
        return torch.where(values[:, 0].isnan(), 2, (values[:, 0] == 1).long()).long()


def _losses(outputs: Tensor, code: Tensor) -> Tensor:
    """The gradient of a label is its probability less its value, and zero where not annotated."""
    there, absent = code[:, 0::2].to(outputs), code[:, 1::2].to(outputs)
    softplus = torch.nn.functional.softplus
    return (there * softplus(-outputs) + absent * softplus(outputs)).sum(1)


def _make(settings: Settings) -> Target:
    if not settings.label_columns:
        raise ConfigError(
            "target = 'labels' needs label-columns, the names of all labels of the run"
        )
    sets = label_sets(settings.label_sets)
    target = Labels(settings.label_columns, tuple(sets.items()))
    for site, labels in sets.items():
        if others := [name for name in labels if name not in target.columns]:
            raise ConfigError(
                f"label-sets: site {site!r} annotates {others[0]!r}, which is not in label-columns"
            )
    if settings.secure_sum and not settings.epsilon:
        _check_annotators(target, settings.colluding)
    return target


def _check_annotators(target: Labels, colluding: float) -> None:
    """Raise ConfigError for a label of which an exact sum would show the part of one site: a site
    that does not annotate it adds nothing.
    """
    if not target.sets:
        raise ConfigError(
            "secure-sum = true with target = 'labels' needs label-sets, which say who annotates "
            "what, or epsilon: the sum of a label that one site alone annotates is its own"
        )
    name, sites = target.fewest()
    needed = LEAST_ANNOTATORS + math.floor(colluding * len(target.sets))
    if sites < needed:
        raise ConfigError(
            f"label {name!r} is annotated by {sites} sites; a secure sum without noise needs "
            f"{needed} (colluding = {colluding:.3g}), so that no sum is that of one site; leave "
            "the label out, or set epsilon"
        )


def _answers(facts: Facts, outputs: tuple[str, ...], scores: Tensor) -> dict[str, Tensor]:
    """The probability of each label."""
    return dict(zip(outputs, scores.sigmoid().unbind(1), strict=True))


def _measured(scores: Tensor, true: Tensor) -> dict[str, float]:
    known = ~true.isnan()
    scores, true = scores[known], true[known]
    ranks = _ranks(scores)
    positive = true == 1
    count, others = float(positive.sum()), float((~positive).sum())
    return {
        "records": float(len(true)),
        "positive": count,
        "brier": float((scores.sigmoid() - true).square().sum()),
        "pairs": count * others,
        "concordant": float(ranks[positive].sum()) - count * (count + 1) / 2,
    }


def _ranks(scores: Tensor) -> Tensor:
    """Ranks from one; equal scores have their mean rank."""
    _, group, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
    last = sizes.cumsum(0).double()
    ranks: Tensor = (last - (sizes.double() - 1) / 2)[group]
    return ranks


def _metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Positive records, Brier score, and the area under the ROC curve."""
    found = {"positive": sums["positive"], "brier": sums["brier"] / sums["records"]}
    pairs = sums["pairs"]
    return found | ({"auroc": sums["concordant"] / pairs} if pairs > 0 else {})


LABELS = Kind(
    "labels",
    ("label_columns", "label_sets"),
    _make,
    _answers,
    _measured,
    _metrics,
    score="auroc",
    columns=("label_columns", "label"),
)

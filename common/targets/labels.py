"""Labels, such as findings in an X-ray: each present, absent, or not annotated in a record."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ..errors import ConfigError, DataError
from ..settings import Settings
from ..settings.heads import label_sets
from ..terms import Term
from .target import (
    LEAST_TOGETHER,
    Answering,
    Facts,
    Kind,
    LearningRates,
    Objective,
    Target,
    sums_of_counts,
)

# Of the squared norm of a capped record, the part of its label set. Measured with the shares below in
# benchmarks/targets_labels_runs.py.
SET_PART = 0.2
CAPPED_SHARES = (0.06, 0.62, 0.32)
# Moments of more label sets make secure aggregation too large: each is as long as the one of all records.
MOST_MOMENTS = 4
CODES = {
    "capped": "capped, with less noise, because label-sets say who annotates what",
    "unknown": "exact, because no label-sets say who annotates what; with them it is capped, with "
    "less noise",
}
MOMENTS = {
    "own": "own: each label has the second moment of the sites that annotate it, as their messages hold it",
    "own in a sum": "own: each label has the second moment of the sites that annotate it; the sum has "
    "one for each label set",
    "one set": "shared: all sites annotate the same labels",
    "many sets": f"shared: the sum would have more than {MOST_MOMENTS} moments, one for each label "
    "set",
    "noise": "shared: noise in a moment for each label set would be larger",
}
# A second derivative is 1/4 at most, so steps may be four times as long as for numbers.
RATES = LearningRates(4.0, 1.2, 12.0)


@dataclass(frozen=True)
class Labels(Target):
    """Labels, of which a record has any number.

    The exact code has two rows a label: records with it, and records without it. A record that is
    not annotated for a label is in neither.

    The capped code has one row a label, for records with it, and one row a label set, for records
    that are annotated for all of it. A record has its largest set, and the labels of it that are
    present, scaled to norm one together. Others are in no row.

    Attributes:
        columns: of the L labels.
        sets: the labels that each site annotates, in the order of its settings; none where all
            sites annotate all.
        capped: whether the code is the capped one.
        own: whether labels have the second moment of the sites that annotate them, not that of all.
        summed: whether the coordinator sees only the sum over all sites.
        chosen: the code and the moment, in words, and why.

    Example:
        >>> labels = Labels(("edema", "fracture"))
        >>> labels.code(torch.tensor([[1.0, float("nan")]])).tolist()
        [[1.0, 0.0, 0.0, 0.0]]
        >>> capped = Labels(("edema", "fracture"), capped=True)
        >>> values = torch.tensor([[1.0, 1.0], [1.0, float("nan")]])
        >>> capped.code(values).round(decimals=3).tolist()
        [[0.707, 0.707, 0.5], [0.0, 0.0, 0.0]]
    """

    columns: tuple[str, ...]
    sets: tuple[tuple[str, tuple[str, ...]], ...] = ()
    capped: bool = False
    own: bool = False
    summed: bool = False
    chosen: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    name = "multilabel"
    compared = "multilabel"
    gaps = True

    @property
    def rows(self) -> tuple[str, ...]:
        """Two rows a label; or one, and one a label set."""
        if self.capped:
            sets = range(1, len(self.label_sets) + 1)
            return (
                *(f"{each}: present" for each in self.columns),
                *(f"annotated for set {number}" for number in sets),
            )
        return tuple(f"{each}: {there}" for each in self.columns for there in ("present", "absent"))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The labels."""
        return self.columns

    @property
    def public(self) -> dict[str, object]:
        """Names, who annotates which, and another code than the exact one."""
        found: dict[str, object] = {"name": self.name, "columns": list(self.columns)}
        if self.sets:
            found["sets"] = {site: list(labels) for site, labels in self.sets}
        if self.capped:
            found["code"] = "capped"
        if self.blocks:
            found["moments"] = "of label sets"
        return found

    @property
    def blocks(self) -> int:  # type: ignore[override]
        """One block of sites for each label set, in secure aggregation with own moments."""
        return len(self.label_sets) if self.own and self.summed else 0

    @property
    def choices(self) -> dict[str, str]:
        """The code under privacy, and the moment, and why."""
        return dict(self.chosen)

    @cached_property
    def label_sets(self) -> tuple[tuple[str, ...], ...]:
        """The S different sets of labels that sites annotate, each in the order of the columns."""
        if not self.sets:
            return (self.columns,)
        ordered = (self._ordered(labels) for _, labels in self.sets)
        return tuple(dict.fromkeys(ordered))

    @cached_property
    def members(self) -> Tensor:
        """Which labels each set has, (S, L), bool."""
        rows = [[name in labels for name in self.columns] for labels in self.label_sets]
        return torch.tensor(rows)

    @property
    def set_entry(self) -> float:
        """What a record of a label set adds to the row of the set, in the capped code. The square
        is SET_PART of that of the whole record.
        """
        return math.sqrt(SET_PART / (1 - SET_PART))

    def fewest(self, sites: Collection[str] | None = None) -> tuple[str, int]:
        """What fewest sites annotate: a label, or a whole set; and their number.

        Sums over the annotators of each label, and over all sites, can be subtracted from each
        other. Whatever the difference, sites that annotate the same labels are in it together; so
        it is of as many sites as have the rarest set, at least. A label that none of these sites
        annotates adds nothing.
        """
        own = [labels for site, labels in self.sets if sites is None or site in sites]
        kinds = Counter(", ".join(self._ordered(labels)) for labels in own)
        by_label = {name: sum(name in labels for labels in own) for name in self.columns}
        found = by_label | kinds
        if sites is not None:
            found = {name: count for name, count in found.items() if count} or by_label
        return min(found.items(), key=lambda each: each[1])

    def statistics(self, private: bool) -> tuple[Term, ...]:
        """Sums of the code t, of t z' and of z z'; without noise also of 1 and z.

        In the exact code a record is in one row of each label for which it is annotated, so
        |t| <= sqrt(L). With noise, the public mean stands for the mean of the features.
        """
        if self.capped:
            return sums_of_counts(math.hypot(1, self.set_entry), private, CAPPED_SHARES)
        return sums_of_counts(math.sqrt(len(self.columns)), private, blocks=bool(self.blocks))

    def code(self, values: Tensor) -> Tensor:
        """(n, 2 L), ones and zeros; or (n, L + S)."""
        if self.capped:
            return self._capped(values.double())
        there = torch.stack([values == 1, values == 0], 2).double()
        return there.flatten(1)

    def counted(self, code: Tensor) -> float:
        """The records that are annotated: for most labels, or for a whole set."""
        if self.capped:
            return float(code[len(self.columns) :].sum()) / self.set_entry
        return float((code[0::2] + code[1::2]).max())

    def known(self, code: Tensor) -> tuple[bool, ...]:
        """The labels for which a site has annotated records."""
        return tuple((code[0::2] + code[1::2] > 0).tolist()) if self.own else ()

    def known_in_blocks(self) -> tuple[tuple[bool, ...], ...]:
        """The labels of each set."""
        return tuple(tuple(row) for row in self.members.tolist())

    def block(self, site: str) -> int:
        """The label set of a site."""
        return self.label_sets.index(self._ordered(dict(self.sets)[site])) if self.blocks else 0

    def faults(self, values: Tensor) -> Mapping[str, Tensor]:
        """Values other than 1 and 0."""
        wrong = ~(values.isnan() | (values == 0) | (values == 1)).all(1)
        return {"a label that is not 1, 0 or empty": wrong}

    def warnings(self, values: Tensor) -> list[str]:
        """Records that the capped code leaves out."""
        if not self.capped:
            return []
        left = int((self._set_of(values) < 0).sum())
        if not left:
            return []
        return [
            f"{left} of {len(values)} records are not annotated for all labels of any set in "
            "label-sets, so no label is learned from them under privacy"
        ]

    def of_site(self, values: Tensor, site: str) -> Tensor:
        """The annotations of the labels that settings say this site annotates; all others are none
        of the run's, and would change whose sums a difference shows.
        """
        if not self.sets:
            return values
        own = dict(self.sets).get(site)
        if own is None:
            raise ConfigError(f"label-sets do not name site {site!r}; name all sites, or none")
        kept = torch.tensor([name in own for name in self.columns])
        return values.masked_fill(~kept, torch.nan)

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
                f"no label has {least} records that are present, and as many that are absent, which "
                "the policy's smallest-class asks of sums without noise; annotate more records, set "
                "epsilon, or lower smallest-class"
            )
        kept = ~small.repeat_interleave(2)
        why = f"left out of what this site sends, with fewer than {least} records: "
        return code * kept, why + ", ".join(map(repr, names))

    def objective(self) -> Objective:
        """Binary cross-entropy of the labels for which a record is annotated, without weights for
        rare labels, so that probabilities stay those of the records.
        """
        return Objective(len(self.columns), _losses, RATES, self._answering)

    def for_training(self) -> Labels:
        """The exact code, and no moments."""
        return replace(self, capped=False, own=False, chosen=())

    def _answering(self, model: Mapping[str, Tensor]) -> Answering:
        return Answering(self.columns, model["weight"], model["bias"])

    def groups(self, values: Tensor) -> Tensor:
        """Present, absent or unknown, of the first label."""
        return torch.where(values[:, 0].isnan(), 2, (values[:, 0] == 1).long()).long()

    def _ordered(self, labels: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name in self.columns if name in labels)

    def _set_of(self, values: Tensor) -> Tensor:
        """The largest set for all of which a record is annotated, (n,); -1 for none. It depends on
        the record alone, so that no record changes what another one adds.
        """
        members = self.members.double()
        sizes = members.sum(1)
        whole = (~values.isnan()).double() @ members.T == sizes
        largest = torch.where(whole, sizes, 0.0).max(1)
        return torch.where(largest.values > 0, largest.indices, -1)

    def _capped(self, values: Tensor) -> Tensor:
        place = self._set_of(values)
        used = (place >= 0)[:, None]
        sets = torch.nn.functional.one_hot(place.clamp_min(0), len(self.members)).double() * used
        present = ((values == 1) & self.members[place.clamp_min(0)] & used).double()
        scaled = present / present.norm(dim=1, keepdim=True).clamp_min(1)
        return torch.cat([scaled, self.set_entry * sets], 1)


def _losses(outputs: Tensor, code: Tensor) -> Tensor:
    """The gradient of a label is its probability less its value, and zero where not annotated."""
    there, absent = code[:, 0::2].to(outputs), code[:, 1::2].to(outputs)
    softplus = torch.nn.functional.softplus
    return (there * softplus(-outputs) + absent * softplus(outputs)).sum(1)


def _make(settings: Settings) -> Target:
    if not settings.label_columns:
        raise ConfigError(
            "task = 'multilabel' needs label-columns, the names of all labels of the run"
        )
    sets = label_sets(settings.label_sets)
    for site, labels in sets.items():
        if others := [name for name in labels if name not in settings.label_columns]:
            raise ConfigError(
                f"label-sets: site {site!r} annotates {others[0]!r}, which is not in label-columns"
            )
    plain = Labels(settings.label_columns, tuple(sets.items()))
    target = _with_moment(
        _coded(plain) if settings.epsilon else plain,
        bool(settings.epsilon),
        settings.secure_aggregation,
    )
    if settings.secure_aggregation and not settings.epsilon:
        _check_annotators(target, settings.colluding)
    return target


def _coded(target: Labels) -> Labels:
    """With the code under privacy."""
    why = ("label code", CODES["capped" if target.sets else "unknown"])
    return replace(target, capped=bool(target.sets), chosen=(*target.chosen, why))


def _with_moment(target: Labels, private: bool, summed: bool) -> Labels:
    """With the moment of the sites that annotate a label, where it costs no noise and few numbers."""
    sets = len(target.label_sets)
    few = "one set" if sets == 1 else "own in a sum" if sets <= MOST_MOMENTS else "many sets"
    why = "noise" if private else few if summed else "own"
    chosen = (*target.chosen, ("label moment", MOMENTS[why]))
    return replace(target, own=why in ("own", "own in a sum"), summed=summed, chosen=chosen)


def _check_annotators(target: Labels, colluding: float) -> None:
    """Raise ConfigError for labels of which exact sums, or their differences, would show the part of
    one site.
    """
    if not target.sets:
        raise ConfigError(
            "secure-aggregation = true with task = 'multilabel' needs label-sets, which say who annotates "
            "what, or epsilon: the sum of a label that one site alone annotates is its own"
        )
    name, sites = target.fewest()
    needed = LEAST_TOGETHER + math.floor(colluding * len(target.sets))
    if sites < needed:
        raise ConfigError(
            f"exactly {name!r} is annotated by {sites} sites; secure aggregation without noise needs "
            f"{needed} with the same labels (colluding = {colluding:.3g}), so that no sum of a "
            "label, and no difference of two, is that of one site; name in label-sets only the "
            "labels that as many sites have, which then send no others, or set epsilon"
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


def _chance(metrics: Mapping[str, float], z: float) -> float:
    """By Mann & Whitney 1947."""
    positive, records = metrics["positive"], metrics["records"]
    return 0.5 + z * math.sqrt((records + 1) / (12 * positive * (records - positive)))


LABELS = Kind(
    "multilabel",
    ("label_columns", "label_sets"),
    _make,
    _answers,
    _measured,
    _metrics,
    score="auroc",
    chance=_chance,
    columns=("label_columns", "label"),
)

"""Labels, such as findings in an X-ray: each present, absent, or not annotated in a record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import DataError
from common.targets.target import CODE, RECORDS, SQUARES, SUMS, TOTALS, Target, TargetSum


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
        bound = math.sqrt(len(self.columns))
        coded = (
            TargetSum(CODE, "C", 0, bound, 0.03, whole=True),
            TargetSum(SUMS, "C d", 1, bound, 0.55),
            TargetSum(SQUARES, "T", 2, 1.0, 0.42),
        )
        if private:
            return coded
        return (
            TargetSum(RECORDS, "1", 0, 1.0, 0.0, whole=True),
            TargetSum(TOTALS, "d", 1, 1.0, 0.0),
            *coded,
        )

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

    def groups(self, values: Tensor) -> Tensor:
        """Present, absent or unknown, of the first label."""
        return torch.where(values[:, 0].isnan(), 2, (values[:, 0] == 1).long()).long()

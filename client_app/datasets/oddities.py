"""What a person should look at in the records of a source, for the data report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedsurrogate.common.data_report import Loss
from fedsurrogate.common.identity import likely_one, likely_one_remarks, rounded

# Classes that a remark names.
MOST_NAMED = 5


def loss_of_other_classes(others: Counter[str]) -> tuple[Loss, ...]:
    """The loss of records whose class is not in the run; nothing without any.

    Args:
        others: number of records by class.
    """
    if not others:
        return ()
    shown = [f"{name!r} ({count})" for name, count in others.most_common(MOST_NAMED)]
    more = ", ..." if len(others) > MOST_NAMED else ""
    count = others.total()
    return (Loss(f"{count} records are of no class of the run: {', '.join(shown)}{more}", count),)


def oddities(
    labels: Tensor,
    classes: tuple[str, ...],
    is_train: Tensor,
    patients: Sequence[str] | None,
    names: Iterable[str],
) -> list[str]:
    """Remarks on classes and patients.

    Args:
        labels: of records, (n,), indices into the classes.
        classes: of the run.
        is_train: (n,) bool.
        patients: of each record, if known.
        names: of all classes in the files.
    """
    odd = likely_one_remarks({*names, *classes})
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    there = [name for name, count in zip(classes, counts, strict=True) if count]
    if len(there) == 1 and len(classes) > 1:
        odd.append(f"all records are of one class, {there[0]!r}")
    if absent := [name for name in classes if name not in there]:
        more = ", ..." if len(absent) > MOST_NAMED else ""
        odd.append(f"no record of {', '.join(map(repr, absent[:MOST_NAMED]))}{more}")
    if patients is not None:
        sides = [{patients[i] for i in part.nonzero().flatten()} for part in (is_train, ~is_train)]
        if shared := len(sides[0] & sides[1]):
            odd.append(f"{shared} patients have records in both training and test")
        if short := sum(map(rounded, set(patients))):
            odd.append(
                f"{short} patient IDs are numbers in the short form of spreadsheets, such as 1.2E+11: "
                "several patients may have become one; export them as text"
            )
        if alike := likely_one(patients):
            odd.append(
                f"{len(alike)} pairs or more of patient IDs differ only by case, blanks or zeros in "
                "front"
            )
    return odd

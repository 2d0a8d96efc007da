"""How well a model of classes answers on the test records of a simulation, as a message, metrics.json
and the report have it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter

from ..errors import SurrogateError
from ..identity import distinct_names
from .class_measures import (
    CURVES,
    DRAWS,
    ClassReport,
    Judged,
    Measure,
    curves_of,
    drawn_classes,
    report,
)

# Name of the report among the values of a message, and most characters of its text.
QUALITY, LONGEST = "quality", 2**22
# More classes have averages only: a matrix of them cannot be read.
MOST_CLASSES, MOST_CURVES, POINTS = 100, 10, 100
# Numbers that a bootstrap of all classes computes at most, and samples at least.
ROOM, FEWEST_DRAWS = 20_000_000, 200
DIGITS = 6

# The coordinates of its points; of a reliability curve also the records of each.
Curve = tuple[list[float], list[float]] | tuple[list[float], list[float], list[int]]


@dataclass(frozen=True)
class ModelQuality:
    """Measures of a model on test records, as scikit-learn defines them, each with a 95 % interval.

    Attributes:
        classes: names of C classes.
        records: number of records that are judged.
        unknown: number of records of classes that the model does not know; they are not judged.
        units: number of patients that the intervals resample; 0 if single records.
        majority: accuracy of always giving the largest class.
        averages: by name, over all classes that have a record.
        per_class: measures of each class; empty where there are more than a hundred.
        confusion: (C, C), records by true class (rows) and decision (columns); empty likewise.
        left_out: classes without a record, of which nothing can be measured.
        curves: of the first classes, or of the rarer of two: ROC, precision and recall, reliability.
    """

    classes: tuple[str, ...]
    records: int
    unknown: int
    units: int
    majority: float
    averages: Mapping[str, Measure]
    per_class: tuple[ClassReport, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    left_out: tuple[str, ...] = ()
    curves: Mapping[str, Mapping[str, Curve | None]] | None = None

    def facts(self) -> dict[str, Any]:
        """As JSON values, with six digits."""
        found: dict[str, Any] = _rounded(asdict(self))
        return found


def quality_of(
    scores: torch.Tensor,
    labels: torch.Tensor,
    classes: tuple[str, ...],
    patients: Sequence[str] | None = None,
) -> ModelQuality | None:
    """Judge scores of test records.

    Args:
        scores: logits (n, C).
        labels: indices of the model's classes, (n,); negative for a class that it does not know.
        classes: names of C classes.
        patients: of each record, (n,); None if unknown.

    Returns:
        The measures; None without a record of a known class, or with a score that is not finite.

    Example:
        >>> scores = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> found = quality_of(scores, torch.tensor([0, 1, 1]), ("well", "ill"))
        >>> found.confusion, round(found.averages["accuracy"].value, 2), round(found.majority, 2)
        (((1, 0), (1, 1)), 0.67, 0.67)
    """
    known = labels >= 0
    if not known.any() or not scores[known].isfinite().all():
        return None
    chances: NDArray[np.float64] = scores[known].double().softmax(1).cpu().numpy()
    rows = known.nonzero().flatten().tolist()
    judged = Judged(
        labels[known].cpu().numpy(),
        chances,
        chances.argmax(1),
        None if patients is None else [patients[row] for row in rows],
    )
    count, few = len(rows), len(classes) <= MOST_CLASSES
    draws = min(DRAWS, max(FEWEST_DRAWS, ROOM // (count * len(classes))))
    found = report(judged, classes, draws)
    sizes = np.bincount(judged.labels, minlength=len(classes)).tolist()
    drawn = drawn_classes(sizes)[:MOST_CURVES]
    return ModelQuality(
        classes,
        count,
        int((~known).sum()),
        found.units,
        max(sizes) / count,
        found.averages,
        found.per_class if few else (),
        tuple(map(tuple, found.confusion.tolist())) if few else (),
        found.left_out,
        {
            classes[index]: _thinned(curves_of(judged.labels == index, chances[:, index]))
            for index in drawn
        },
    )


def packed_quality(found: ModelQuality) -> str:
    """A report as text for a message."""
    return json.dumps(found.facts(), separators=(",", ":"))


def unpacked_quality(text: str) -> ModelQuality:
    """The report in a message or in metrics.json.

    Args:
        text: of `packed_quality`, or JSON of `facts`.

    Raises:
        SurrogateError: for another text.
    """
    try:
        if len(text) > LONGEST:
            raise ValueError(f"{len(text)} characters, {LONGEST} at most")
        found = TypeAdapter(ModelQuality).validate_python(json.loads(text, parse_constant=_refused))
        count = len(distinct_names(found.classes, "class"))
        if found.confusion and {len(found.confusion), *map(len, found.confusion)} != {count}:
            raise ValueError("a confusion matrix of other classes")
        if any(curves.keys() - set(CURVES) for curves in (found.curves or {}).values()):
            raise ValueError("an unknown curve")
    except (ValueError, RecursionError) as error:
        raise SurrogateError(f"measures that cannot be read ({str(error)[:100]})") from None
    return found


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _thinned(curves: Mapping[str, Any]) -> dict[str, Curve | None]:
    """Curves with at most a hundred points each, the ends among them."""
    thin: dict[str, Curve | None] = dict.fromkeys(curves)
    for name, curve in curves.items():
        if curve is not None:
            places = np.unique(np.linspace(0, len(curve[0]) - 1, POINTS).round().astype(int))
            x, y, *sizes = ([axis[place] for place in places] for axis in curve)
            thin[name] = (x, y, sizes[0]) if sizes else (x, y)
    return thin


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value

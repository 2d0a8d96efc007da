"""Numbers in the sites' reports, each checked against its bounds."""

from __future__ import annotations

import json
import math
from typing import Any, cast

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.model_quality import QUALITY, ModelQuality, unpacked_quality
from fedsurrogate.common.targets.measures import LONGEST, MEASURES, is_measure
from fedsurrogate.common.wire.records import Info

DOWNSTREAM = "downstream."
# A site's scores of a generator and their upper bounds: shares, and distances between embeddings of
# norm one.
DOWNSTREAM_LIMITS = {
    f"{kind}-{head}": 1.0
    for kind in ("accuracy", "balanced")
    for head in ("local", "synthetic", "mixed")
}
DOWNSTREAM_LIMITS |= {"share": 1.0, "sliced": 4.0, "sinkhorn": 4.0}


class RefusedError(SurrogateError):
    """A site has refused what was asked.

    Args:
        text: the reason.
        info: what the site reports, not checked.
    """

    def __init__(self, text: str, info: Info) -> None:
        super().__init__(text)
        self.info = info


def whole_number(info: Info, key: str) -> int:
    """A reported count; 0 if invalid or missing.

    Args:
        info: what a site reports, not checked.
        key: of the number in it.

    Example:
        >>> whole_number({"tested": 12}, "tested"), whole_number({"tested": -1}, "tested")
        (12, 0)
    """
    value = info.get(key)
    return value if isinstance(value, int) and 0 <= value < 2**40 else 0


def share_in(info: Info, key: str) -> float | None:
    """A reported accuracy; None if invalid or missing.

    Args:
        info: what a site reports, not checked.
        key: of the number in it.

    Example:
        >>> share_in({"accuracy": 0.9}, "accuracy"), share_in({"accuracy": 1.5}, "accuracy")
        (0.9, None)
    """
    value = info.get(key)
    return value if isinstance(value, float) and 0 <= value <= 1 else None


def numbers_in(info: Info, key: str) -> list[Any]:
    """A reported list of finite numbers; empty if invalid or missing.

    Args:
        info: what a site reports, not checked.
        key: of the list in it.
    """
    value = info.get(key)
    numbers = isinstance(value, list) and all(
        isinstance(v, int | float) and math.isfinite(v) for v in value
    )
    return cast(list[Any], value) if numbers else []


def downstream_in(info: Info) -> dict[str, float]:
    """The valid reported scores of a generator at a site."""
    scores = {name: info.get(DOWNSTREAM + name) for name in DOWNSTREAM_LIMITS}
    return {
        name: v
        for name, v in scores.items()
        if isinstance(v, float) and 0 <= v <= DOWNSTREAM_LIMITS[name]
    }


def measures_in(info: Info) -> dict[str, float]:
    """The valid reported sums that measure a model of another target than classes; empty if there
    are none.
    """
    try:
        found = json.loads(str(info.get(MEASURES, "{}"))[:LONGEST])
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict) or not all(
        isinstance(value, int | float) and math.isfinite(value) for value in found.values()
    ):
        return {}
    return {str(name): float(value) for name, value in found.items() if is_measure(name)}


def seconds_in(info: Info, key: str) -> float | None:
    """A reported duration in seconds; None if invalid or missing.

    Args:
        info: what a site reports, not checked.
        key: of the duration in it, without "-seconds".
    """
    value = info.get(f"{key}-seconds")
    return value if isinstance(value, float) and 0 <= value < math.inf else None


def quality_in(info: Info) -> ModelQuality | None:
    """What a simulated site reports of the model on all test records; None if it is invalid or missing.

    Args:
        info: what a site reports, not checked.
    """
    try:
        return unpacked_quality(str(info[QUALITY])) if QUALITY in info else None
    except SurrogateError:
        return None

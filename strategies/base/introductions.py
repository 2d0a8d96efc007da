"""Before a run of several steps: who is there, with which backbone, and which classes there are."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field

from common.errors import SurrogateError
from common.limits import MOST_CLASSES
from common.surrogates.surrogates import in_class_order
from common.wire.records import Info
from common.wire.validation import is_name

LARGEST_DIMENSION = 2**24


@dataclass
class Group:
    """The sites of one run that fit together: node numbers and keys by name, and what they have in common."""

    fingerprint: str = ""
    dimension: int = 0
    classes: tuple[str, ...] = ()
    nodes: dict[str, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Introduction:
    """What one site says of itself."""

    name: str
    fingerprint: str
    dimension: int
    classes: tuple[str, ...]
    key: str
    simulated: bool


def introduction(name: str, info: Info) -> Introduction:
    """Read what a site says. Raises SurrogateError when that is no usable answer."""
    fingerprint, dimension, key = info.get("fingerprint"), info.get("dimension"), info.get("key", "")
    try:
        classes = json.loads(str(info.get("classes", "[]")))
    except (ValueError, RecursionError):
        classes = None
    if not (is_name(fingerprint) and isinstance(dimension, int) and 0 < dimension <= LARGEST_DIMENSION):
        raise SurrogateError("an introduction without backbone and dimension")
    named = isinstance(classes, list) and len(classes) <= MOST_CLASSES and all(map(is_name, classes))
    if not (named and isinstance(key, str) and re.fullmatch(r"([0-9a-f]{128})?", key)):
        raise SurrogateError("an introduction whose classes or key cannot be read")
    return Introduction(name, fingerprint, dimension, tuple(classes), key, info.get("simulated") is True)


def settle(said: dict[int, Introduction], wanted: tuple[str, ...], fingerprint: str) -> tuple[Group, dict[int, str]]:
    """The largest group that fits together, and why each other site does not.

    wanted, fingerprint: what the run's settings say; empty for what most sites have, and for the classes of all.
    """
    fitting = [each for each in said.values() if each.fingerprint == (fingerprint or each.fingerprint)]
    kinds = Counter((each.fingerprint, each.dimension) for each in fitting)
    if not kinds:
        reason = f"no site has the run's backbone {fingerprint[:16]}"
        return Group(), dict.fromkeys(said, reason)
    (print_, dimension), _ = max(kinds.items(), key=lambda item: (item[1], item[0]))
    group, misfits, names = Group(print_, dimension), {}, set[str]()
    for node, each in said.items():
        if (each.fingerprint, each.dimension) != (print_, dimension):
            misfits[node] = (
                f"backbone fingerprint {each.fingerprint[:16]} of dimension {each.dimension}; the other sites have "
                f"{print_[:16]} of {dimension}"
            )
            continue
        group.nodes[each.name] = node
        group.keys[each.name] = each.key
        names |= set(each.classes)
    group.classes = wanted or in_class_order(names)
    return group, misfits

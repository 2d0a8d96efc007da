"""Which sites fit together: introductions before a run of several steps (name, backbone, classes),
and a run's backbone.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedsurrogate.common.backbones.column_names import listed, shown
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.identity import distinct_names, write_other_truths
from fedsurrogate.common.limits import LARGEST_DIMENSION, MOST_CLASSES
from fedsurrogate.common.surrogates.columns import Frame, common_frame
from fedsurrogate.common.surrogates.surrogates import in_class_order
from fedsurrogate.common.wire.records import Info
from fedsurrogate.common.wire.validation import is_fingerprint, is_name


@dataclass
class Group:
    """The sites of one run that fit together.

    Attributes:
        fingerprint: of the shared backbone.
        dimension: of its features.
        classes: of the run, in order.
        nodes: node ids by name.
        keys: by name.
        frame: common frame of the columns of their features; empty without one.
    """

    fingerprint: str = ""
    dimension: int = 0
    classes: tuple[str, ...] = ()
    nodes: dict[str, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    frame: bytes = b""


@dataclass(frozen=True)
class Introduction:
    """One site's report about itself.

    Attributes:
        name: of the site.
        fingerprint: of its backbone.
        dimension: of the features.
        classes: of its records.
        key: hexadecimal; empty without one.
        simulated: whether the site is part of a simulation.
        frame: of the columns of its features, in bytes; empty if they need none.
    """

    name: str
    fingerprint: str
    dimension: int
    classes: tuple[str, ...]
    key: str
    simulated: bool
    frame: bytes = b""


def introduction(name: str, info: Info) -> Introduction:
    """Parse a site's introduction.

    Args:
        name: of the site.
        info: what it reports.

    Raises:
        SurrogateError: when the introduction is unusable.
    """
    fingerprint, dimension, key = (
        info.get("fingerprint"),
        info.get("dimension"),
        info.get("key", ""),
    )
    try:
        classes = json.loads(str(info.get("classes", "[]")))
    except (ValueError, RecursionError):
        classes = None
    if not (
        is_fingerprint(fingerprint)
        and isinstance(dimension, int)
        and 0 < dimension <= LARGEST_DIMENSION
    ):
        raise SurrogateError("the introduction has no valid backbone and dimension")
    named = (
        isinstance(classes, list) and len(classes) <= MOST_CLASSES and all(map(is_name, classes))
    )
    if not (named and isinstance(key, str) and re.fullmatch(r"[0-9a-f]{0,1024}", key)):
        raise SurrogateError("the introduction has classes or a key that cannot be read")
    try:
        frame = base64.b64decode(str(info.get("frame", "")), validate=True)
    except ValueError:
        raise SurrogateError("the introduction has a frame that cannot be read") from None
    if frame:
        Frame.of(frame).check(dimension)
    names = distinct_names(classes, "class")
    return Introduction(
        name, fingerprint, dimension, names, key, info.get("simulated") is True, frame
    )


def settle(
    introduced: dict[int, Introduction], wanted: tuple[str, ...], fingerprint: str
) -> tuple[Group, dict[int, str]]:
    """The largest group of sites with one backbone.

    Args:
        introduced: the sites' introductions by node.
        wanted: classes of the settings; empty for those of all sites.
        fingerprint: of the settings' backbone; empty for the most common one.

    Returns:
        The group, and for every other site the reason why it does not fit.

    Example:
        >>> north = Introduction("north", "f" * 64, 8, ("a", "b"), "", False)
        >>> south = Introduction("south", "f" * 64, 8, ("b", "c"), "", False)
        >>> west = Introduction("west", "0" * 64, 4, ("a",), "", False)
        >>> group, others = settle({1: north, 2: south, 3: west}, (), "")
        >>> group.nodes, group.classes, list(others)
        ({'north': 1, 'south': 2}, ('a', 'b', 'c'), [3])
    """
    fitting = [
        each
        for each in introduced.values()
        if each.fingerprint == (fingerprint or each.fingerprint)
    ]
    kinds = Counter((each.fingerprint, each.dimension) for each in fitting)
    if not kinds:
        reason = f"no site has the run's backbone {shown(fingerprint)}"
        return Group(), dict.fromkeys(introduced, reason)
    (print_, dimension), _ = max(kinds.items(), key=lambda item: (item[1], item[0]))
    group, others, names = Group(print_, dimension), dict[int, str](), set[str]()
    fit = {
        n: e for n, e in introduced.items() if (e.fingerprint, e.dimension) == (print_, dimension)
    }
    unlike = {} if wanted else other_truths({node: each.classes for node, each in fit.items()})
    for node, each in introduced.items():
        if node in unlike:
            others[node] = unlike[node]
            continue
        if node not in fit:
            others[node] = (
                f"backbone fingerprint {shown(each.fingerprint)} of dimension {each.dimension}; the "
                f"other sites have {shown(print_)} of {dimension}"
            )
            continue
        group.nodes[each.name] = node
        group.keys[each.name] = each.key
        names |= set(each.classes)
    group.classes = wanted or in_class_order(names)
    group.frame = common_frame([introduced[node].frame for node in group.nodes.values()])
    return group, others


def other_truths(classes: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """The nodes that say yes and no in another way than most: True and False beside 1 and 0.

    Args:
        classes: of each site, by node; the settings name none.

    Returns:
        For each of these nodes, why.

    Example:
        >>> list(other_truths({1: ("0", "1"), 2: ("False", "True"), 3: ("0", "1")}))
        [2]
    """
    kinds = Counter(tuple(sorted(own)) for own in classes.values())
    if not kinds:
        return {}
    # A list of both says more than one of a site that has one class.
    most = max(kinds, key=lambda kind: (kinds[kind], len(kind), kind))
    return {
        node: (
            f"its classes are {listed(own)}, and those of other sites {listed(most)}: likely the same "
            "in other words; write the same names at all sites, or set classes in the run"
        )
        for node, own in classes.items()
        if write_other_truths(own, most)
    }


# Fingerprint of the backbone, dimension of the features, and the classes if all sites must have the
# same.
Kind = tuple[str, int, tuple[str, ...]]


def misfits(kinds: Mapping[int, Kind], records: Mapping[int, int]) -> dict[int, str]:
    """The nodes whose surrogate is not of the most common kind.

    Args:
        kinds: of the surrogates, by node. Ties go to the kind with more records, then to the last in
            order, so that who answers first decides nothing.
        records: behind the surrogates, by node.

    Returns:
        For each of these nodes, why.
    """
    if not kinds:
        return {}
    sites, total, unfit = Counter(kinds.values()), Counter[Kind](), dict[int, str]()
    for node, kind in kinds.items():
        total[kind] += records[node]
    fingerprint, dimension, classes = max(sites, key=lambda kind: (sites[kind], total[kind], kind))
    for node, (own_fingerprint, own_dimension, own_classes) in kinds.items():
        if own_fingerprint != fingerprint:
            unfit[node] = (
                f"backbone fingerprint {shown(own_fingerprint)} differs from the other sites' "
                f"{shown(fingerprint)}"
            )
        elif own_dimension != dimension:
            unfit[node] = f"features of dimension {own_dimension}; the other sites have {dimension}"
        elif own_classes != classes:
            unfit[node] = (
                "noisy sums of other classes than at the other sites, or in another order; set "
                "classes in the run"
            )
    return unfit

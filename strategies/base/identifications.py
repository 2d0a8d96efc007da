"""What sites report about themselves before a run, and which of them fit together."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fedsurrogate.common.backbones.backbone_names import columns_in, listed, shown
from fedsurrogate.common.errors import LARGEST_DIMENSION, MOST_CLASSES, RunError, SurrogateError
from fedsurrogate.common.identity import distinct_names, write_other_truths
from fedsurrogate.common.surrogates.mixtures import Frame, common_frame
from fedsurrogate.common.surrogates.surrogates import in_class_order
from fedsurrogate.common.wire.records import Info
from fedsurrogate.common.wire.tensors import is_fingerprint, is_name


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
class Identification:
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


def identification(name: str, info: Info) -> Identification:
    """Parse a site's identification.

    Args:
        name: of the site.
        info: what it reports.

    Raises:
        SurrogateError: when the identification is unusable.
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
        raise SurrogateError("the identification has no valid backbone and dimension")
    named = (
        isinstance(classes, list) and len(classes) <= MOST_CLASSES and all(map(is_name, classes))
    )
    if not (named and isinstance(key, str) and re.fullmatch(r"[0-9a-f]{0,1024}", key)):
        raise SurrogateError("the identification has classes or a key that cannot be read")
    try:
        frame = base64.b64decode(str(info.get("frame", "")), validate=True)
    except ValueError:
        raise SurrogateError("the identification has a frame that cannot be read") from None
    if frame:
        Frame.of(frame).check(dimension)
    names = distinct_names(classes, "class")
    return Identification(
        name, fingerprint, dimension, names, key, info.get("simulated") is True, frame
    )


K = TypeVar("K")


def kind_of_most(
    kinds: Mapping[str, K], describe: Callable[[K], str], remedy: str, all_alike: bool = False
) -> K:
    """The kind that most sites have.

    Args:
        kinds: of each site, by its name; not empty.
        describe: names a kind.
        remedy: what to do where it is not clear who is wrong.
        all_alike: whether all must have one kind.

    Raises:
        RunError: when several kinds have equally many sites, or sites of one run must be alike and
            are not. It names all kinds and their sites, and blames none.
    """
    (kind, most), *others = Counter(kinds.values()).most_common()
    if others and (all_alike or others[0][1] == most):
        found = "; ".join(
            f"{describe(each)} at {', '.join(sorted(name for name in kinds if kinds[name] == each))}"
            for each in Counter(kinds.values())
        )
        raise RunError(f"the sites differ, and who is wrong cannot be told: {found}; {remedy}")
    return kind


def settle(
    identified: Mapping[int, Identification],
    wanted: tuple[str, ...],
    fingerprint: str,
    private: bool = False,
) -> tuple[Group, dict[int, str]]:
    """The largest group of sites with one backbone.

    Args:
        identified: the sites' identifications by node.
        wanted: classes of the settings; empty for those of all sites.
        fingerprint: of the settings' backbone; empty for the most common one.
        private: whether sites pay for the run, so that without a fingerprint all must have the same
            backbone.

    Returns:
        The group, and for every other site the reason why it does not fit.

    Raises:
        RunError: see `kind_of_most`.

    Example:
        >>> north = Identification("north", "f" * 64, 8, ("a", "b"), "", False)
        >>> south = Identification("south", "f" * 64, 8, ("b", "c"), "", False)
        >>> west = Identification("west", "0" * 64, 4, ("a",), "", False)
        >>> group, others = settle({1: north, 2: south, 3: west}, (), "")
        >>> group.nodes, group.classes, list(others)
        ({'north': 1, 'south': 2}, ('a', 'b', 'c'), [3])
    """
    kinds = {
        each.name: (each.fingerprint, each.dimension)
        for each in identified.values()
        if each.fingerprint == (fingerprint or each.fingerprint)
    }
    if not kinds:
        reason = f"no site has the run's backbone {shown(fingerprint)}"
        return Group(), dict.fromkeys(identified, reason)
    remedy = f"{REMEDY}; nothing is charged" if private else REMEDY
    print_, dimension = kind_of_most(kinds, _backbone, remedy, private)
    group, others, names = Group(print_, dimension), dict[int, str](), set[str]()
    fit = {
        n: e for n, e in identified.items() if (e.fingerprint, e.dimension) == (print_, dimension)
    }
    unlike = {} if wanted else other_truths({each.name: each.classes for each in fit.values()})
    for node, each in identified.items():
        if each.name in unlike:
            others[node] = unlike[each.name]
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
    group.frame = common_frame([identified[node].frame for node in group.nodes.values()])
    return group, others


REMEDY = (
    "give all sites the same weights, image-size and features, or set fingerprint in the run to the "
    "right one of these, which leaves the others out"
)


def _backbone(kind: tuple[str, int]) -> str:
    """Its fingerprint as the setting wants it, unless columns make it long."""
    print_, dimension = kind
    return f"fingerprint {shown(print_) if columns_in(print_) else print_} of dimension {dimension}"


def other_truths(classes: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The sites that say yes and no in another way than most: True and False beside 1 and 0.

    Args:
        classes: of each site, by its name; the settings name none.

    Returns:
        For each of these sites, why.

    Raises:
        RunError: when as many say it in one way as in another.

    Example:
        >>> list(other_truths({"a": ("0", "1"), "b": ("False", "True"), "c": ("0", "1")}))
        ['b']
    """
    own_kinds = {name: tuple(sorted(own)) for name, own in classes.items()}
    kinds = Counter(own_kinds.values())
    if not kinds:
        return {}
    # A list of both says more than one of a site that has one class.
    most = max(kinds, key=lambda kind: (kinds[kind], len(kind), kind))
    others = {
        name: kind
        for name, kind in own_kinds.items()
        if kind != most and write_other_truths(kind, most)
    }
    why = "likely the same in other words; write the same names at all sites, or set classes in the run"
    rivals = {most, *(kind for kind in others.values() if kinds[kind] == kinds[most])}
    tied = {name: kind for name, kind in own_kinds.items() if kind in rivals}
    kind_of_most(tied, lambda kind: f"classes {listed(kind)}", why)
    return {
        name: f"its classes are {listed(own)}, and those of other sites {listed(most)}: {why}"
        for name, own in others.items()
    }


# Fingerprint of the backbone, dimension of the features, and the classes if all sites must have the
# same.
Kind = tuple[str, int, tuple[str, ...]]


def misfits(kinds: Mapping[str, Kind]) -> dict[str, str]:
    """The sites whose surrogate is not of the kind that most sites have.

    Args:
        kinds: of the surrogates, by the name of the site.

    Returns:
        For each of these sites, why.

    Raises:
        RunError: see `kind_of_most`.
    """
    if not kinds:
        return {}

    def describe(kind: Kind) -> str:
        return _backbone(kind[:2]) + (f", classes {listed(kind[2])}" if kind[2] else "")

    fingerprint, dimension, classes = kind_of_most(kinds, describe, REMEDY)
    unfit = {}
    for name, (own_fingerprint, own_dimension, own_classes) in kinds.items():
        if own_fingerprint != fingerprint:
            unfit[name] = (
                f"backbone fingerprint {shown(own_fingerprint)} differs from the other sites' "
                f"{shown(fingerprint)}"
            )
        elif own_dimension != dimension:
            unfit[name] = f"features of dimension {own_dimension}; the other sites have {dimension}"
        elif own_classes != classes:
            unfit[name] = (
                "noisy sums of other classes than at the other sites, or in another order; set "
                "classes in the run"
            )
    return unfit

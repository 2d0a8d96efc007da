"""The registry of methods: each method has one description here. No other module compares names of
methods.

A new method needs one `Method` in a file of this folder and its name in `METHODS`; and a function
at the coordinator, or a class in `strategies/`, if no existing one serves.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from ..errors import ConfigError
from ..settings import Settings
from ..settings.base import check_method, short
from ..targets.target import Target
from . import heads
from .counting import KINDS_OF_COUNTS
from .fedpft import FEDPFT, KD
from .method import Method, Plan, with_secure_aggregation
from .synthetic_records import SYNTHETIC_RECORDS
from .training import GENERATORS, TRAINED

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        *(FEDPFT, *SYNTHETIC_RECORDS, KD, *GENERATORS),
        *(heads.LOCAL, heads.ENSEMBLE, heads.HIGHEST, heads.AVERAGE),
        *TRAINED,
    )
}
# method = "fedpft" with fedpft.topology = "chain".
FEDPFT_CHAIN = replace(
    FEDPFT, paper="Beitollahi et al. 2024, section 4.2", reads=("fedpft", "head"), learns=()
)


def method_of(settings: Settings) -> Method:
    """The description of a run's method, or of what it counts. Raises ConfigError for a name that
    is not here.
    """
    method = method_named(settings.method)
    if settings.counting.kind in KINDS_OF_COUNTS:
        return KINDS_OF_COUNTS[settings.counting.kind]
    chain = (
        method is FEDPFT and settings.fedpft.topology == "chain" and not settings.secure_aggregation
    )
    return FEDPFT_CHAIN if chain else method


def plan_of(method: Method, settings: Settings, target: Target | None = None) -> Plan:
    """What a method does under the settings of a run, in secure aggregation if the run is one.

    Args:
        method: of the run.
        settings: of the run.
        target: of the run; None for classes.

    Raises:
        ConfigError: for a method that learns classes only, and another target.
    """
    if target is None:
        plan = method.plan(settings)
    elif method.coded is not None:
        plan = method.coded(settings, target)
    elif method.trains is not None:
        plan = method.trains(method.plan(settings), settings.fedavg, target)
    else:
        *names, last = (repr(each.name) for each in METHODS.values() if each.coded or each.trains)
        raise ConfigError(
            f"task = {target.name!r}, but method = {method.name!r} learns classes only; use "
            f"{', '.join(names)} or {last}"
        )
    if settings.secure_aggregation and plan.combination.from_sums:
        return with_secure_aggregation(method.name, plan, settings)
    if settings.epsilon and plan.kind == "one-shot" and not plan.counts:
        # Sites that do not fit together learn so before any of them is charged.
        return replace(plan, messages=replace(plan.messages, identifies=True))
    return plan


def method_named(name: str) -> Method:
    """The description of a method. Raises ConfigError for a name that is not here."""
    check_method(name)
    if name not in METHODS:
        # The sender of the settings chooses the name: looking for similar ones takes time.
        close = get_close_matches(name[:40], METHODS, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"method = {short(name)}: {known()}{meant}")
    return METHODS[name]


def known() -> str:
    """The list of method names for an error message."""
    *names, last = map(repr, METHODS)
    return f"must be {', '.join(names)} or {last}"

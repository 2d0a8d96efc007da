"""The run card: the sites that are in a run's result, the sites that are not, and the share of
missing data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedsurrogate.server_app.runs.missing_classes import MissingClasses

if TYPE_CHECKING:
    from fedsurrogate.strategies.base.outcome import Site

# The card is red if at least this share of all records is missing.
MUCH = 0.1
UNKNOWN = MissingClasses()

# Harm of a site, a share of records, from which a line says it.
WORTH_A_LINE = 0.01


def run_card(
    sites: Collection[Site],
    expected: int,
    absent: Sequence[str] = (),
    names: str = "",
    missing: MissingClasses = UNKNOWN,
    at_chance: bool = False,
) -> dict[str, Any]:
    """The run card: site names under used, late, rejected and dropped, with reasons, and the share
    of missing data.

    Args:
        sites: of the run, as far as they have connected.
        expected: number of sites in the settings, 0 for any.
        absent: names of registered sites that have not connected.
        names: "registered" if the names belong to registered keys, else "claimed".
        missing: classes of which no site has a record.
        at_chance: whether the model may be no better than chance.

    Returns:
        The content of "card" in metrics.json. missing_share: of all records. A site that has not
        reported its number of records, or never connected, is counted like the largest site that
        has. capped: the share of its weight that a site keeps. suspects: why these sites are
        left out. effects: by site, what a fifth of the others lose by it, such as a share of their records,
        the share of its own that it gains by being there, and the share of its weight that is kept.
        without_records: classes of which no site has a record; records_by_class: whether that is known
        from "exact" or "noisy" counts, or "unknown". at_chance: as given. state:
        "green" when no record and no class is missing and the model is better than chance, "red" when a
        tenth of the records or more is missing, else "amber".
    """
    reported = [site.records for site in sites if site.records]
    largest = max(reported, default=1)
    used = sum(site.records or largest for site in sites if site.fate == "used")
    never_came = max(0, expected - len(sites))
    lost = never_came * largest + sum(
        site.records or largest for site in sites if site.fate != "used"
    )
    share = lost / max(1, used + lost)
    return {
        "state": "red"
        if share >= MUCH
        else "amber"
        if lost or missing.names or at_chance
        else "green",
        "missing_share": round(share, 4),
        "invited": len(sites),
        "never_came": never_came,
        "absent": list(absent),
        "names": names,
        "used": sorted(site.name for site in sites if site.fate == "used"),
        "late": {site.name: site.reason for site in sites if site.late},
        "rejected": {site.name: site.reason for site in sites if site.fate == "rejected"},
        "dropped": {
            site.name: site.reason for site in sites if site.fate == "dropped" and not site.late
        },
        "records": {site.name: site.records for site in sites if site.records},
        "capped": {site.name: round(site.kept_share, 6) for site in sites if site.kept_share < 1},
        "suspects": {site.name: site.suspect for site in sites if site.suspect},
        "effects": {site.name: site.effect.rounded() for site in sites if site.effect is not None},
        "without_records": list(missing.names),
        "records_by_class": missing.known,
        "at_chance": at_chance,
    }


def missing_line(card: Mapping[str, Any]) -> str:
    """The share of missing records, the sites they belong to, classes without records, and whether
    the model may be no better than chance, in one line.

    Args:
        card: the run card of `run_card`.

    Returns:
        The line.

    Example:
        >>> card = {"rejected": {"north": "no key"}, "dropped": {}, "late": {}}
        >>> missing_line(card | {"never_came": 1, "missing_share": 0.25})
        'about 25% of all records are missing: north, 1 that never connected'
        >>> card |= {"rejected": {}, "without_records": ["rare"], "records_by_class": "noisy"}
        >>> missing_line(card | {"never_came": 0, "missing_share": 0.0})
        'perhaps no site has a record of rare'
    """
    parts = []
    names = sorted({**card["rejected"], **card["dropped"], **card["late"]})
    if card["never_came"]:
        absent = f" (not connected: {', '.join(card['absent'])})" if card.get("absent") else ""
        names.append(f"{card['never_came']} that never connected{absent}")
    if names:
        parts.append(
            f"about {card['missing_share']:.0%} of all records are missing: {', '.join(names)}"
        )
    if without := card.get("without_records"):
        perhaps = "perhaps " if card["records_by_class"] == "noisy" else ""
        parts.append(f"{perhaps}no site has a record of {', '.join(without)}")
    if card.get("at_chance"):
        parts.append("the model may be no better than chance; the report has its measures")
    return "; ".join(parts)


def effect_lines(card: Mapping[str, Any]) -> list[str]:
    """What the defence did to whom, and what each site changes, a line for each site that harms others
    by a point or more, or that keeps less than its weight.

    Args:
        card: the run card of `run_card`.

    Example:
        >>> card = {"effects": {"photo": {"harm": 0.019, "gain": 0.23, "kept": 1.0}}, "suspects": {}}
        >>> effect_lines(card)
        ['photo: kept; costs the others 1.9 points, gains 23.0 on its own records']
    """
    lines = []
    for name, effect in card.get("effects", {}).items():
        if effect["harm"] < WORTH_A_LINE and effect["kept"] == 1:
            continue
        if name in card["suspects"]:
            lines.append(
                f"{name}: left out, costs the others {100 * effect['harm']:.1f} points; "
                "`coordinator relearn RUN --defence none` puts it back"
            )
            continue
        kept = "kept" if effect["kept"] == 1 else f"kept with {effect['kept']:.0%} of its weight"
        lines.append(
            f"{name}: {kept}; costs the others {100 * effect['harm']:.1f} points, gains "
            f"{100 * effect['gain']:.1f} on its own records"
        )
    return lines

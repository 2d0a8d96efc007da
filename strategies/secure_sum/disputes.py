"""Disputes in a secure sum: a site says that it cannot use what another one has sent. Whom to leave
out, and why.

Only the two know the key between them, so nobody can check who is right: the sender may have sent
false shares, or the reader may say so falsely, and a message names both. At least one end of each
dispute is at fault, so the site with most disputes is left out first: one bad site in several
disputes is then the only one that is left out. If two sites have no other dispute, the one that
complains is left out, because the sum does not hold its vector yet: a false complaint costs the
liar, and a bad sender can shut out one reader in a run, but not a second one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from fedsurrogate.common.secure_sum.keys import quoted
from fedsurrogate.common.wire.records import DISPUTED

What = Literal["keys", "shares"]
# For each kind, what is said of the site that complains, and of the one that it is about.
TEXTS: tuple[tuple[What, str, str], ...] = (
    (
        "keys",
        "it says that the key of {} is not the one in its peers",
        "by their own report it is not in the peers of {}",
    ),
    (
        "shares",
        "it says that it cannot use the shares of {}",
        "its shares cannot be used, by the report of {}",
    ),
)


@dataclass(frozen=True)
class Dispute:
    """A site says that it cannot use what another one has sent.

    Attributes:
        by: the site that complains.
        about: the site that it complains about.
        what: of that site cannot be used: "keys" or "shares".
    """

    by: str
    about: str
    what: What


def disputes_in(
    info: Mapping[str, object], by: str, members: Collection[str], what: What
) -> set[Dispute]:
    """The disputes that a site's refusal names.

    Args:
        info: the refusal, not checked.
        by: the site.
        members: names in the key list.
        what: the site could refuse in this step.

    Returns:
        The disputes; none if the refusal names no other site of the sum.
    """
    places, names = info.get(DISPUTED), sorted(members)
    if not isinstance(places, list) or len(places) > len(names):
        return set()
    known = [each for each in places if isinstance(each, int) and 0 <= each < len(names)]
    return {Dispute(by, names[each], what) for each in known if names[each] != by}


def left_out(disputes: Collection[Dispute]) -> set[str]:
    """The sites without which no dispute is left.

    Args:
        disputes: of all sites.

    Example:
        One site in several disputes is the only one that is left out. Of a pair, the one that
        complains is.

        >>> disputes = [Dispute("north", "west", "shares"), Dispute("south", "west", "shares")]
        >>> sorted(left_out(disputes))
        ['west']
        >>> sorted(left_out(disputes[:1]))
        ['north']
    """
    left, out = set(disputes), set[str]()
    while left:
        counts = Counter(
            name for pair in {frozenset((each.by, each.about)) for each in left} for name in pair
        )
        complaining = {each.by for each in left}
        worst = max(counts, key=lambda name: (counts[name], name in complaining, name))
        out.add(worst)
        left = {each for each in left if worst not in (each.by, each.about)}
    return out


def why(name: str, disputes: Collection[Dispute], colluding: int) -> str:
    """What is known of the disputes of a site, as text.

    Args:
        name: of the site.
        disputes: of all sites.
        colluding: how many sites may be dishonest by the settings.
    """
    reasons = []
    for what, own, others in TEXTS:
        about = sorted(each.about for each in disputes if each.by == name and each.what == what)
        by = sorted(each.by for each in disputes if each.about == name and each.what == what)
        reasons += [own.format(quoted(about))] if about else []
        reasons += [others.format(quoted(by))] if by else []
        if what == "keys" and (about or by):
            reasons.append("`site key` prints the line that the file of peers needs")
        elif len(by) > colluding > 0:
            reasons.append(
                f"more sites than may collude ({colluding}) report it, so its shares were false"
            )
        elif about or by:
            reasons.append("either side may be at fault: the shares were false, or the report is")
    return "; ".join(reasons)

"""The steps of secure aggregation at the coordinator: requests to all its sites, their replies, lost sites and
disputes. In a dispute a site says that it cannot use what another one has sent: whom to leave out, and why.

Only the two know the key between them, so nobody can check who is right: the sender may have sent
false shares, or the reader may say so falsely, and a message names both. At least one end of each
dispute is at fault, so the site with most disputes is left out first: one bad site in several
disputes is then the only one that is left out. If two sites have no other dispute, the one that
complains is left out, because the sum does not hold its vector yet: a false complaint costs the
liar, and a bad sender can shut out one reader in a run, but not a second one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedsurrogate.common.errors import RunError, SealError, SurrogateError
from fedsurrogate.common.privacy.mechanism import DISTRIBUTED_SUMS
from fedsurrogate.common.secure_aggregation.rules import SumRules, context_of
from fedsurrogate.common.secure_aggregation.secrets import (
    Member,
    check_distinct,
    check_member,
    quoted,
)
from fedsurrogate.common.wire import surrogate_proto
from fedsurrogate.common.wire.records import DISPUTED, Info, to_record

from ..base.collection import Collection
from ..base.federation import Federation
from ..base.outcome import RefusedError

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
    info: Mapping[str, object], by: str, members: Iterable[str], what: What
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


def left_out(disputes: Iterable[Dispute]) -> set[str]:
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


def why(name: str, disputes: frozenset[Dispute], colluding: int) -> str:
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
            reasons.append("`site offline key` prints the line that the file of peers needs")
        elif len(by) > colluding > 0:
            reasons.append(
                f"more sites than may collude ({colluding}) report it, so its shares were false"
            )
        elif about or by:
            reasons.append("either side may be at fault: the shares were false, or the report is")
    return "; ".join(reasons)


T = TypeVar("T")


class Steps(Federation):
    """One step after the other, each with a deadline. A site that does not reply, or cannot go on,
    is lost.
    """

    _grid: Grid
    _sum: str
    _rules: SumRules
    _members: dict[str, Member]
    # Node ids by name, and why sites are lost in this sum.
    _nodes: dict[str, int]
    _lost: dict[str, str]
    # Of all sums of the run.
    _disputes: frozenset[Dispute] = frozenset()
    # Sites that too many others do not know, so that a sum began again without them.
    _unknown: frozenset[str] = frozenset()
    # Sites that wait for a decision about their disputes.
    _waiting: frozenset[str] = frozenset()

    @property
    def _context(self) -> bytes:
        return context_of(self.config, self._sum)

    def _values(self) -> Info:
        return {"run": self.config.digest, "sum": self._sum}

    def _key_list(self, keys: Mapping[str, str]) -> dict[str, Member]:
        """The sites with valid keys that no dispute excludes. One that repeats another's key, or
        has none, is rejected.
        """
        members: dict[str, Member] = {}
        for name in sorted(keys.keys() - self._unknown - self._untrusted()):
            try:
                member = surrogate_proto.unpack_member(bytes.fromhex(keys[name]))
                if member.site != name:
                    raise SurrogateError("keys of another site")
                check_member(member, self._context)
                check_distinct([*members.values(), member])
                members[name] = member
            except (ValueError, SealError, SurrogateError) as error:
                self._reject(
                    self._nodes[name],
                    f"its keys for the secure aggregation cannot be used: {error}",
                )
        return members

    def _untrusted(self) -> set[str]:
        """The sites to leave out for their shares in any sum of the run: one that shuts out a
        reader in each round has more disputes than any of these. Sites that do not know a key are
        lost in each sum, and do not count against its owner.
        """
        return left_out({each for each in self._disputes if each.what == "shares"})

    def _request(self, kind: str, name: str, payload: bytes) -> Message:
        return self._message(
            kind, self._nodes[name], to_record(payload, {**self._values(), "bytes": len(payload)})
        )

    def _ask(
        self,
        kind: str,
        payloads: Mapping[str, bytes],
        lost: str,
        read: Callable[[str, bytes, Info], T],
        what: What | None = None,
    ) -> dict[str, T]:
        """The replies of sites to one step. lost: what is recorded of a site that does not reply.
        what: see `_collect`.
        """
        messages = [
            self._request(f"{MessageType.QUERY}.{kind}", name, payload)
            for name, payload in payloads.items()
        ]
        return self._collect(
            Collection(self._grid, messages, self.deadline), list(payloads), lost, read, what
        )

    def _collect(
        self,
        replies: Iterable[Message],
        asked: list[str],
        lost: str,
        read: Callable[[str, bytes, Info], T],
        what: What | None = None,
    ) -> dict[str, T]:
        """The replies of `asked` as `read`. what: the step in which a site may refuse what other
        sites have sent.
        """
        contents: dict[str, T] = {}
        names = {node: name for name, node in self._nodes.items()}
        for reply in replies:
            node = self._node(reply)
            name = names[node]
            try:
                payload, info = self._read(reply, self.outcome.sites[node])
                if payload is None:
                    raise SurrogateError("a reply without content")
                contents[name] = read(name, payload, info)
                self._lost.pop(name, None)
            except (SurrogateError, SealError) as error:
                self._lost[name] = f"{lost}: {error}"
                refused = error.info if isinstance(error, RefusedError) else {}
                if what and (new := disputes_in(refused, name, self._members, what)):
                    self._disputes |= new
                    self._waiting |= {name}
                else:
                    self._reject(node, self._lost[name])
        for name in asked:
            if name not in contents and name not in self._lost:
                self._lost[name] = self.outcome.sites[self._nodes[name]].reason = lost
                self.recorder.event("dropped", site=name, reason=lost)
        return contents

    def _decide(self, out: frozenset[str] | set[str], lost: str) -> None:
        """Decide all open disputes: reject the sites `out`. The others that wait are not lost."""
        for name in sorted(out):
            reason = f"{lost}: {why(name, self._disputes, self._rules.colluding)}"
            if self._lost.get(name) != reason:
                self._lost[name] = reason
                self._reject(self._nodes[name], reason)
        for name in self._waiting - out:
            del self._lost[name]
        self._waiting = frozenset()

    @property
    def _remedy(self) -> str:
        distributed, again = (
            self.config.plan.mechanism_name == DISTRIBUTED_SUMS,
            "run again without the site that is at fault",
        )
        return (
            again
            if distributed
            else f"{again}; a hospital that has sent its masked vector then needs `site "
            "ledger forget`"
        )

    def _enough(self, there: int, needed: int, what: str) -> None:
        """Raise RunError, which names the lost sites, when fewer than `needed` sites are left."""
        if there >= needed:
            return
        lost = "".join(f"; {name}: {why}" for name, why in sorted(self._lost.items()))
        remedy = f"; {self._remedy}" if self._disputes else ""
        raise RunError(
            f"the secure aggregation cannot be completed: {there} of {self._rules.members} sites {what}, "
            f"{needed} are needed (see dropouts and colluding); nothing was revealed{lost}{remedy}"
        )

"""The steps of a secure sum at the coordinator: requests to all its sites, their replies, lost
sites and disputes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedsurrogate.common.errors import RunError, SealError, SurrogateError
from fedsurrogate.common.privacy.mechanism import JOINT_SUMS
from fedsurrogate.common.secure_sum.keys import Member, check_distinct, check_member
from fedsurrogate.common.secure_sum.of_run import context_of
from fedsurrogate.common.secure_sum.rules import SumRules
from fedsurrogate.common.wire import sum_proto
from fedsurrogate.common.wire.records import Info, to_record
from fedsurrogate.strategies.base.collection import Collection
from fedsurrogate.strategies.base.federation import Federation
from fedsurrogate.strategies.base.reported import RefusedError
from fedsurrogate.strategies.secure_sum.disputes import Dispute, What, disputes_in, left_out, why

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
                member = sum_proto.unpack_member(bytes.fromhex(keys[name]))
                if member.site != name:
                    raise SurrogateError("keys of another site")
                check_member(member, self._context)
                check_distinct([*members.values(), member])
                members[name] = member
            except (ValueError, SealError, SurrogateError) as error:
                self._reject(
                    self._nodes[name], f"its keys for the secure sum cannot be used: {error}"
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
        joint, again = (
            self.config.plan.mechanism_name == JOINT_SUMS,
            "run again without the site that is at fault",
        )
        return (
            again
            if joint
            else f"{again}; a hospital that has sent its masked vector then needs `site "
            "forget-sums`"
        )

    def _enough(self, there: int, needed: int, what: str) -> None:
        """Raise RunError, which names the lost sites, when fewer than `needed` sites are left."""
        if there >= needed:
            return
        lost = "".join(f"; {name}: {why}" for name, why in sorted(self._lost.items()))
        remedy = f"; {self._remedy}" if self._disputes else ""
        raise RunError(
            f"the secure sum cannot be completed: {there} of {self._rules.members} sites {what}, "
            f"{needed} are needed (see dropouts, colluding and secure-sum-threshold); nothing was "
            f"revealed{lost}{remedy}"
        )

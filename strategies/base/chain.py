"""A chain of sites: each site receives, through the coordinator, the chain message that the previous site
made.
"""

from __future__ import annotations

import json
import random
import secrets
import time
from abc import abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.surrogates.surrogates import Reply
from fedsurrogate.common.wire.records import Info, to_record
from fedsurrogate.common.wire.tensors import Expectation, check_reply

from ..flower import Settings, check_no_settings, classifier_arrays, metrics_of
from .collection import Collection, Recorder
from .federation import Federation
from .identifications import Group
from .outcome import NO_REPLY, seconds_in, share_in
from .training import read_kept

STATE, RELAY = "chain.json", "relay.bin"


@dataclass
class Walk:
    """Progress of a chain.

    Attributes:
        order: names of the sites, in the order of the chain.
        done: sites whose relay was accepted, in order.
        skipped: sites that had their turn without one.
        sender: the site that made the latest chain message.
        sender_key: its key.
        sent_hop: its chain step.
        run: the digest of the run's settings.
        relay: the latest chain message (base64), which may be sealed.
        lineage: an id shared by this run and the runs that resume it.
        hops: facts about each chain step: the site, bytes, seconds, and the accuracy of its head.
    """

    order: list[str]
    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    sender: str = ""
    sender_key: str = ""
    sent_hop: int = 0
    run: str = ""
    relay: str = ""
    lineage: str = field(default_factory=lambda: secrets.token_hex(8))
    hops: list[dict[str, str | float]] = field(default_factory=list)

    @property
    def left(self) -> list[str]:
        """Sites that have not had their turn, in order."""
        return [name for name in self.order if name not in self.done and name not in self.skipped]

    @property
    def hop(self) -> int:
        """The number of the next chain step, from 1."""
        return len(self.done) + len(self.skipped) + 1


class Chain(Federation):
    """Ask site after site, in `fedpft.order` or a random order. A site that does not reply is
    skipped and recorded.
    """

    # The sealed chain message before the current one, with its sender, the sender's key and the chain step.
    _earlier: tuple[bytes | None, str, str, int] | None = None

    def __init__(
        self, config: Settings = None, recorder: Recorder | None = None, device: str = ""
    ) -> None:
        super().__init__(config, recorder, device)
        # Sites that could not use the current chain message.
        self._failed: list[str] = []
        self._walk: Walk | None = None
        # For the next site; None for the first one.
        self._relay: bytes | None = None
        self._asked = self._learned = False
        self._started = self._hop_started = 0.0

    def run(self, grid: Grid, deadline: float = 0.0) -> float | None:
        """Run the chain.

        Args:
            grid: through which the sites are asked.
            deadline: seconds to wait for each of them; 0 for that of the settings.

        Returns:
            The accuracy over all sites' own test splits; None without a model, or if no site
            reported it.

        Raises:
            RunError: for an order of unknown sites, a missed quorum, or when no site replied.
        """
        self.deadline = deadline or self.config.settings.deadline
        self.summary()
        hop = 0
        while not self._learned:
            hop += 1
            messages = self.configure_train(hop, self.initial, ConfigRecord(), grid)
            self._finish_round(
                hop, self.aggregate_train(hop, Collection(grid, messages, self.deadline))
            )
        overall = None if self.outcome.model is None else self.evaluate(grid, self.deadline)
        hops = self.outcome.hops
        if hops and isinstance(accuracy := hops[-1].get("accuracy"), float):
            # Accuracy of the last site's own head, even when the head stays at the site.
            self.outcome.accuracy.setdefault("last_site", accuracy)
        return overall

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The request to the next site, with the chain message. One round is one chain step.

        Args:
            server_round: not used.
            arrays: not used: no model is sent.
            config: of Flower, which must have no settings.
            grid: through which the sites are asked.

        Raises:
            RunError: when no site is connected, or for an order of unknown sites.
        """
        check_no_settings(config, "train_config")
        self._grid = grid
        if self._walk is None:
            self._group = self.identify(grid, self.deadline)
            self._walk, self._relay = self._begin(self._group)
            self.outcome.hops = self._walk.hops
            self._started = time.perf_counter()
        self._asked, self._hop_started = bool(self._walk.left), time.perf_counter()
        return [self._request_message(self._walk, self._relay)] if self._asked else []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Accept a site's chain message, or skip the site. After the last site there is a model, unless
        chain messages are sealed.

        Args:
            server_round: not used.
            replies: of the site that was asked.

        Returns:
            The arrays of the model, None while there is none; and the metrics of the step.

        Raises:
            RunError: when too few sites have replied.
        """
        walk = self._walk
        if walk is None or self._learned:
            return None, None
        if self._asked:
            self._asked = False
            self._hop(walk, replies)
            # In one file: a kill between two writes could leave a chain message with a site that the state
            # lists as not asked.
            walk.relay = b64encode(self._relay or b"").decode()
            self.recorder.keep(STATE, json.dumps(vars(walk)).encode())
            self.recorder.keep(RELAY, self._relay or b"")
        if not walk.left:
            self._finish(walk)
        model, seconds = self.outcome.model, time.perf_counter() - self._started
        sent = {"used": len(walk.done), "bytes_up": self.outcome.bytes_up}
        metrics = metrics_of({**sent, "seconds": seconds})
        return None if model is None else classifier_arrays(model), metrics

    def _finish(self, walk: Walk) -> None:
        """After the last chain step, learn the head: the last site's own, or under privacy one from the
        noisy sums. Sealed chain messages give none.
        """
        self._learned = True
        self.outcome.seconds["chain"] = time.perf_counter() - self._started
        self._check_quorum(len(walk.done))
        assert self._relay is not None  # the quorum is at least one site
        if self.config.settings.fedpft.seal:
            why = "heads stay at the sites; the coordinator cannot read the sealed chain messages"
            self.recorder.event("sealed", reason=why)
        else:
            self.learn_from(self._grid, self._group, walk, self._relay, self.deadline)

    def _begin(self, group: Group) -> tuple[Walk, bytes | None]:
        if self.config.settings.resume:
            try:
                walk = Walk(**json.loads(read_kept(self.config.settings.resume, STATE)))
            except (TypeError, ValueError, RecursionError) as error:
                raise RunError(
                    f"resume = {self.config.settings.resume!r}: {STATE} is damaged "
                    f"({type(error).__name__})"
                ) from None
            if walk.run != self.config.digest:
                raise RunError(
                    f"resume = {self.config.settings.resume!r} is of a run with other settings, or of another "
                    "version"
                )
            # Skipped sites get another chance at the end of the chain.
            walk.order, walk.skipped = [*walk.done, *walk.left, *walk.skipped], []
            self.recorder.event("resumed", hops=len(walk.done))
            for name in walk.done:
                if name in group.nodes:
                    self.outcome.sites[group.nodes[name]].use()
            relay = b64decode(walk.relay) or None
        else:
            walk, relay = Walk(self._order(group), run=self.config.digest), None
        for name in walk.left:
            if name not in group.nodes:
                self._skip(walk, name, "not connected")
        return walk, relay

    def _order(self, group: Group) -> list[str]:
        named = sorted(group.nodes, key=lambda name: (len(name), name))
        if not self.config.settings.fedpft.order:
            random.Random(self.config.settings.seed).shuffle(named)
            return named
        invited = {site.name for site in self.outcome.sites.values()}
        if not set(self.config.settings.fedpft.order) & invited:
            there = ", ".join(sorted(invited))
            raise RunError(
                f"fedpft.order names none of the connected sites; use these names: {there}"
            )
        for name in named:
            if name not in self.config.settings.fedpft.order:
                self.recorder.event("left-out", site=name, reason="not in fedpft.order")
                self.outcome.sites[group.nodes[name]].reason = "not in fedpft.order"
        return list(self.config.settings.fedpft.order)

    def _hop(self, walk: Walk, replies: Iterable[Message]) -> None:
        """Accept the next site's chain message. When the site does not reply, the current chain message stays."""
        name, hop = walk.left[0], walk.hop
        answer = self._answer(name, self._relay, replies)
        if (
            isinstance(answer, SurrogateError)
            and self._earlier is not None
            and (self._failed or len(walk.left) == 1)
        ):
            answer = self._without_last(walk, answer)
        if isinstance(answer, SurrogateError):
            walk.skipped.append(name)
            self._failed.append(name)
            self._reject(self._group.nodes[name], str(answer), hop)
        elif answer is None:
            self._skip(walk, name, NO_REPLY)
        else:
            self._failed = []
            if self.config.settings.fedpft.seal:
                self._earlier = (self._relay, walk.sender, walk.sender_key, walk.sent_hop)
            self._passed_on(walk, name, hop, *answer)
            self._relay = answer[0]

    def _without_last(
        self, walk: Walk, failure: SurrogateError
    ) -> tuple[bytes, Info] | SurrogateError | None:
        """The reply of a site to the earlier chain message, when more than one site failed on the latest
        chain message.

        Only sites can read a sealed chain message. If this site can use the earlier chain message, the site that
        made the latest one is rejected, and the sites that failed on it are asked again. Otherwise
        this site itself failed.
        """
        assert self._earlier is not None
        name, last = walk.left[0], walk.done[-1]
        before = replace(walk, skipped=list(walk.skipped), order=list(walk.order))
        earlier, walk.sender, walk.sender_key, walk.sent_hop = self._earlier
        others = [each for each in walk.order if each not in self._failed]
        place = others.index(name) + 1
        walk.order = [*others[:place], *self._failed, *others[place:]]
        walk.skipped = [each for each in walk.skipped if each not in self._failed]
        asked = [self._request_message(walk, earlier, before.hop)]
        answer = self._answer(name, earlier, Collection(self._grid, asked, self.deadline))
        if not isinstance(answer, tuple):
            vars(walk).update(vars(before))
            return failure
        self._earlier, self._failed = None, []
        walk.done.remove(last)
        walk.skipped.append(last)
        walk.hops.pop()
        self._reject(
            self._group.nodes[last],
            f"other sites cannot use its chain message, but can use the one before it: {failure}",
        )
        self._relay = earlier
        return answer

    def _request_message(self, walk: Walk, relay: bytes | None, hop: int = 0) -> Message:
        """The request to the next site."""
        group = self._group
        info: Info = {"run": self.config.digest, "hop": hop or walk.hop, "lineage": walk.lineage}
        info["classes"] = json.dumps(group.classes)
        if self.config.settings.fedpft.seal:
            later = walk.left[1:]
            keys = {each: group.keys[each] for each in later if each in group.keys} | {
                walk.sender: walk.sender_key
            }
            info |= {
                "keys": json.dumps(keys),
                "readers": ",".join(later),
                "sender": walk.sender,
                "sent-hop": walk.sent_hop,
            }
        if relay is not None:
            info["bytes"] = len(relay)
        return self._message(MessageType.TRAIN, group.nodes[walk.left[0]], to_record(relay, info))

    def _answer(
        self, name: str, relay: bytes | None, replies: Iterable[Message]
    ) -> tuple[bytes, Info] | SurrogateError | None:
        """The next site's chain message and report, or the error that makes them unusable, or None without
        a reply.
        """
        site = self.outcome.sites[self._group.nodes[name]]
        for reply in replies:
            try:
                payload, info = self._read(reply, site)
                if payload is None:
                    raise SurrogateError("a reply without a chain message")
                if not self.config.settings.fedpft.seal:
                    self._check(payload, relay, name)
            except SurrogateError as error:
                return error
            return payload, info
        return None

    def _passed_on(self, walk: Walk, name: str, hop: int, payload: bytes, info: Info) -> None:
        site = self.outcome.sites[self._group.nodes[name]]
        site.use()
        site.simulated = info.get("simulated") is True
        walk.done.append(name)
        walk.sender, walk.sender_key, walk.sent_hop = name, self._group.keys[name], hop
        step: dict[str, str | float] = {
            "site": name,
            "bytes": len(payload),
            "seconds": round(time.perf_counter() - self._hop_started, 3),
        }
        if (accuracy := share_in(info, "accuracy.model")) is not None:
            step["accuracy"] = accuracy
        walk.hops.append(step)
        facts = {
            "bytes": site.bytes_up,
            "payload": len(payload),
            "seconds": seconds_in(info, "fit"),
        }
        self.recorder.event("replied", site=name, hop=hop, accuracy=step.get("accuracy"), **facts)

    def _skip(self, walk: Walk, name: str, reason: str) -> None:
        walk.skipped.append(name)
        self.recorder.event("dropped", site=name, reason=f"skipped in the chain: {reason}")

    def _check(self, payload: bytes, relay: bytes | None, name: str) -> None:
        """Raise SurrogateError unless the next site can use this site's chain message."""
        group, own = self._group, self.config.settings
        classes = own.classes if own.epsilon else group.classes
        place = Expectation.of(self.config, classes, group.fingerprint, group.dimension)
        last = self.last_reply(payload, relay, place, group)
        check_reply(last, self.config.plan.messages, place)
        if last.header.site != name:
            raise SurrogateError(
                f"the chain message names another site as its sender: {last.header.site[:64]!r}"
            )

    @abstractmethod
    def last_reply(
        self, payload: bytes, relay: bytes | None, place: Expectation, group: Group
    ) -> Reply:
        """Check an unsealed chain message.

        Args:
            payload: the chain message as the site extended it.
            relay: as the site received it; None for the first site.
            place: what is expected of what the site added.
            group: the sites of the run.

        Returns:
            What its last site added.

        Raises:
            SurrogateError: for a chain message that is not as it must be.
        """

    @abstractmethod
    def learn_from(
        self, grid: Grid, group: Group, walk: Walk, relay: bytes, deadline: float
    ) -> None:
        """Learn a head from the last site's unsealed chain message.

        Args:
            grid: through which sites can be asked.
            group: the sites of the run.
            walk: progress of the chain, which has ended.
            relay: of the last site.
            deadline: seconds to wait for a reply.
        """

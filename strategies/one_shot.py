"""Heads that sites train alone: collected once and combined, or left where they are (`local`)."""

from __future__ import annotations

import time
from collections.abc import Iterable

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from common.checks import Expectation, check_header
from common.config import run_digest
from common.errors import SurrogateError
from common.model_frames import unpack_parameters
from common.parameters import Parameters, check_update
from common.wire import Info, to_record
from strategies.collect import Collection, check_quorum
from strategies.combining import combine
from strategies.defence import defend_updates
from strategies.federation import COMPARE, Federation
from strategies.outcome import NO_REPLY, Site
from strategies.reported import seconds_told, share_told


class OneShot(Federation):
    """One head from every site, combined as the method says."""

    def summary(self) -> None:
        """Record what is about to happen."""
        self.recorder.event("configured", method=self.config.method, **self.config.baseline.model_dump())

    def run(self, grid: Grid, deadline: float = 0.0) -> float | None:
        """Ask for heads, combine them, take the model back. Raises RunError when the quorum is missed."""
        deadline = deadline or self.config.deadline
        self.summary()
        group = self.introduce(grid, deadline)
        told: Info = {"run": run_digest(self.config)}
        nodes = list(group.nodes.values())
        updates: list[Parameters] = []
        for reply in Collection(grid, [self._message(MessageType.TRAIN, n, to_record(None, told)) for n in nodes], deadline):
            if (update := self._head(reply, group.fingerprint, group.dimension, group.classes)) is not None:
                updates.append(update)
        for site in self.outcome.sites.values():
            if site.fate == "dropped":
                self.recorder.event("dropped", site=site.name, reason=NO_REPLY)
        check_quorum(len(updates), len(self.outcome.sites), self.config.sites, self.config.quorum)
        updates.sort(key=lambda update: (len(update.header.site), update.header.site))
        started = time.perf_counter()
        defended = defend_updates(updates, self.config)
        self._heed(defended)
        check_quorum(self.outcome.count("used"), len(self.outcome.sites), self.config.sites, self.config.quorum)
        self.outcome.model = combine(defended.kept, self.config, group.classes)
        self.outcome.seconds["learn"] = time.perf_counter() - started
        return self.evaluate(grid, deadline)

    def _head(self, reply: Message, fingerprint: str, dimension: int, classes: tuple[str, ...]) -> Parameters | None:
        node = self._node(reply)
        site, config = self.outcome.sites[node], self.config
        try:
            payload, info = self._read(reply, site)
            if payload is None:
                raise SurrogateError("a reply without a head")
            # A head, and perhaps mean and deviation of the features.
            head = unpack_parameters(payload, most=len(classes) * (dimension + 1) + 2 * dimension)
            check_header(head.header, Expectation.of(config, classes, fingerprint))
            count = len(head.header.classes)
            shapes: dict[str, tuple[int, ...]] = {"weight": (count, dimension), "bias": (count,)}
            if config.method in ("fedbe", "fedkt"):
                shapes |= {"mean": (dimension,), "deviation": (dimension,)}
            check_update(head, shapes, 1, private=False)
            if head.header.site != site.name:
                raise SurrogateError(f"a head in the name of {head.header.site[:64]!r}, which is another site")
        except SurrogateError as error:
            self._reject(node, str(error))
            return None
        site.fate, site.reason, site.simulated = "used", "", info.get("simulated") is True
        site.records = head.records
        facts = {"bytes": site.bytes_up, "payload": len(payload), "seconds": seconds_told(info, "fit")}
        self.recorder.event("replied", site=site.name, **facts)
        return head


class Local(Federation):
    """No federation: every site trains a head and judges it. Nothing but numbers leaves."""

    def run(self, grid: Grid, deadline: float = 0.0) -> float | None:
        """Ask every site how good its own head is. The run's accuracy is the mean over sites, on all test data."""
        deadline = deadline or self.config.deadline
        self.recorder.event("configured", method=self.config.method)
        group = self.introduce(grid, deadline)
        for node in group.nodes.values():
            self.outcome.sites[node].fate, self.outcome.sites[node].reason = "used", ""
        accuracy = self._judge(Collection(grid, self._broadcast(), deadline))
        if self._simulated():
            asked = [Message(to_record(None, {"brief": True}), node, COMPARE) for node in group.nodes.values()]
            found = list(self._accuracies(Collection(grid, asked, deadline)))
            if found:
                self.outcome.accuracy["model"] = sum(found) / len(found)
        return accuracy

    def _broadcast(self) -> Iterable[Message]:
        """Nothing is taken to the sites but the question."""
        used = [node for node, site in self.outcome.sites.items() if site.fate == "used"]
        return [
            self._message(MessageType.EVALUATE, node, to_record(None, {"run": run_digest(self.config)})) for node in used
        ]

    def _accuracies(self, replies: Iterable[Message]) -> Iterable[float]:
        for reply in replies:
            try:
                accuracy = share_told(self._read(reply, Site(name=""))[1], "accuracy.model")
            except SurrogateError as error:
                self.recorder.event("comparison-failed", reason=str(error))
                continue
            if accuracy is not None:
                yield accuracy

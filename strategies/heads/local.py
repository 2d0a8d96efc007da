"""No federation: every site trains a head of its own, which stays there (`local`)."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from common.config.run_config import run_digest
from common.errors import SurrogateError
from common.wire.records import to_record
from strategies.base.collection import Collection
from strategies.base.federation import COMPARE, Federation
from strategies.base.outcome import Site
from strategies.base.reported import share_told


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

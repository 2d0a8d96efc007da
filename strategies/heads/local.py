"""Baseline without federation (`local`): every site trains its own head, which stays at the site."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.wire.records import to_record
from fedsurrogate.strategies.base.collection import Collection
from fedsurrogate.strategies.base.federation import COMPARE, Federation
from fedsurrogate.strategies.base.outcome import Site
from fedsurrogate.strategies.base.reported import share_in
from fedsurrogate.strategies.flower.records import check_no_settings


class Local(Federation):
    """No federation: every site trains a head and evaluates it. Only the accuracy leaves the site.

    Example:
        In a ServerApp, `strategy.run(grid)` runs it with all connected sites.

        >>> strategy = Local({"method": "local"})
        >>> strategy.config.plan.kind, [each.name for each in strategy.config.plan.messages.sends]
        ('alone', [])
    """

    def run(self, grid: Grid, deadline: float = 0.0) -> float | None:
        """Ask every site for the accuracy of its own head.

        Args:
            grid: through which the sites are asked.
            deadline: seconds to wait for their replies; 0 for that of the settings.

        Returns:
            The run's accuracy: the mean over sites, on all test data.
        """
        self.deadline = deadline or self.config.settings.deadline
        self.recorder.event("configured", method=self.config.settings.method)
        self._introduced(grid)
        accuracy = self._judge(Collection(grid, self._broadcast(), self.deadline))
        if self._simulated():
            nodes = [node for node, site in self.outcome.sites.items() if site.fate == "used"]
            asked = [Message(to_record(None, {"brief": True}), node, COMPARE) for node in nodes]
            accuracies = list(self._accuracies(Collection(grid, asked, self.deadline)))
            if accuracies:
                self.outcome.accuracy["model"] = sum(accuracies) / len(accuracies)
        return accuracy

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No messages: a site trains when it gets the evaluation request."""
        check_no_settings(config, "train_config")
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """No result: heads stay at the sites."""
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Requests to every site for the accuracy of its own head.

        Args:
            server_round: not used.
            arrays: not used.
            config: of Flower, which must have no settings.
            grid: through which the sites are asked.

        Raises:
            RunError: when no site is connected.
        """
        check_no_settings(config, "evaluate_config")
        self._introduced(grid)
        return self._broadcast()

    def _introduced(self, grid: Grid) -> None:
        """Select the sites that fit together. Sites introduce themselves only once."""
        if self.outcome.sites:
            return
        for node in self.introduce(grid, self.deadline).nodes.values():
            self.outcome.sites[node].fate, self.outcome.sites[node].reason = "used", ""

    def _broadcast(self) -> Iterable[Message]:
        """Requests without a payload for the used sites."""
        used = [node for node, site in self.outcome.sites.items() if site.fate == "used"]
        return [
            self._message(MessageType.EVALUATE, node, to_record(None, {"run": self.config.digest}))
            for node in used
        ]

    def _accuracies(self, replies: Iterable[Message]) -> Iterable[float]:
        for reply in replies:
            try:
                accuracy = share_in(self._read(reply, Site(name=""))[1], "accuracy.model")
            except SurrogateError as error:
                self.recorder.event("comparison-failed", reason=str(error))
                continue
            if accuracy is not None:
                yield accuracy

"""The Flower strategy interface: `start` runs a federation and returns Flower's `Result`."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.run import Run
from fedsurrogate.strategies.base.collection import Recorder
from fedsurrogate.strategies.base.outcome import Outcome
from fedsurrogate.strategies.flower.records import check_no_settings, metrics_of

log = logging.getLogger("flwr")


class Judge(Protocol):
    """A function that evaluates the model at the coordinator after a round."""

    def __call__(self, server_round: int, arrays: ArrayRecord, /) -> MetricRecord | None:
        """Metrics of the arrays after a round.

        Args:
            server_round: number of the round; round 0 is before the first round.
            arrays: of the model.
        """


class FlowerStrategy(Strategy):
    """Base class with Flower's `start`, its arguments and its `Result`.

    Differs from Flower's loop: replies are checked as they arrive, a site that fails or is late
    does not stop the run, sites evaluate the model once, at the end, and a run can be resumed. The
    run itself calls the four methods `configure_...` and `aggregate_...`, so Flower's own loop over
    them learns the same model.

    Attributes:
        config: of the run.
        recorder: stores the run's events.
        outcome: all results that a run folder is written from.
        result: results so far.
        initial: initial arrays of training; empty for those of the seed.
        last_round: the round after which training ends; 0 for that of the settings.
    """

    config: Run
    recorder: Recorder
    outcome: Outcome

    def __init__(self) -> None:
        self.result = Result()
        self.initial = ArrayRecord()
        self.last_round = 0
        self._judge_model: Judge | None = None

    @abstractmethod
    def run(self, grid: Grid, deadline: float = 0.0) -> float | None:
        """Run the federation.

        Args:
            grid: through which the sites are asked.
            deadline: seconds to wait for replies; 0 for that of the settings.

        Returns:
            The accuracy over all sites' own test splits, if sites reported it.
        """

    @abstractmethod
    def _broadcast(self) -> Iterable[Message]:
        """The messages with the model for the used sites."""

    @abstractmethod
    def _judge(self, replies: Iterable[Message]) -> float | None:
        """Record each site's accuracy; return the accuracy over all sites together."""

    def summary(self) -> None:
        """Record the settings at the start of the run."""
        shown = self.config.method.shown
        settings = getattr(self.config.settings, shown).model_dump() if shown else {}
        self.recorder.event("configured", method=self.config.settings.method, **settings)
        log.info(
            "\t└──> %s, settings %s: %s", self.config.method.title, self.config.digest, settings
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages with the model for every used site, which evaluates it on its own test split.

        Args:
            server_round: not used.
            arrays: not used: the strategy's own model is sent, at 16 bits.
            config: of Flower, which must have no settings.
            grid: not used.

        Returns:
            The messages; none without a model.

        Raises:
            ConfigError: for settings in `config`.
        """
        check_no_settings(config, "evaluate_config")
        return [] if self.outcome.model is None else list(self._broadcast())

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The accuracy over all sites' own test splits.

        Args:
            server_round: not used.
            replies: of the sites. Invalid ones are left out.
        """
        self._judge(replies)
        return self.evaluated()

    def evaluated(self) -> MetricRecord | None:
        """Accuracy on the sites' own test splits, and in a simulation on all test data; None if
        there is neither.
        """
        sites = self.outcome.sites.values()
        tested, correct = sum(site.tested for site in sites), sum(site.correct for site in sites)
        facts: dict[str, object] = {
            f"accuracy.{name}": share for name, share in self.outcome.accuracy.items()
        }
        if tested:
            facts |= {"accuracy": correct / tested, "correct": correct, "tested": tested}
        return metrics_of(facts) if facts else None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the federation.

        Args:
            grid: through which the sites are asked.
            initial_arrays: an initial model with the same names and shapes; empty or None for the
                one of the seed. One-round methods send no model and use none.
            num_rounds: at most the number in the settings, because the sites' noise depends on it;
                None for all rounds.
            timeout: seconds to wait for replies; None for `deadline` of the settings.
            train_config: must be empty, because sites take their settings from the run-config.
            evaluate_config: must be empty, for the same reason.
            evaluate_fn: called with the arrays before the first round and after each round.

        Returns:
            The model's arrays, and the metrics of every round.

        Raises:
            ConfigError: for an argument that cannot be used.
            RunError: when too few sites can be used.
        """
        check_no_settings(train_config, "train_config")
        check_no_settings(evaluate_config, "evaluate_config")
        if timeout is not None and timeout <= 0:
            raise ConfigError(f"timeout = {timeout:g}: must be above 0 seconds")
        self.initial = ArrayRecord() if initial_arrays is None else initial_arrays
        if self.initial and self.config.settings.resume:
            raise ConfigError(
                f"initial_arrays and resume = {self.config.settings.resume!r}, whose checkpoint "
                "has a model; use only one of them"
            )
        self.last_round = self._checked_rounds(num_rounds)
        self._judge_model = evaluate_fn
        self.result = Result(arrays=self.initial)
        self._judge_round(0)
        self.run(grid, timeout or 0.0)
        if (metrics := self.evaluated()) is not None:
            self.result.evaluate_metrics_clientapp[
                max(self.result.train_metrics_clientapp, default=1)
            ] = metrics
        log.info("%s", self.result)
        return self.result

    def _checked_rounds(self, number: int | None) -> int:
        if number is None:
            return 0
        if number < 1:
            raise ConfigError(f"num_rounds = {number}: must be at least 1")
        most, training = self.config.planned_rounds, self.config.plan.training
        if self.config.plan.kind == "rounds" and number > most:
            named = f"{training.section}.rounds = " if not training.rounds else ""
            raise ConfigError(
                f"num_rounds = {number}: at most {named}{most}, which the sites also use"
                + (f"; set {training.section}.rounds" if named else "")
            )
        return number

    def _finish_round(
        self, number: int, aggregated: tuple[ArrayRecord | None, MetricRecord | None]
    ) -> None:
        """Add a round's arrays and metrics to the result."""
        arrays, metrics = aggregated
        if metrics is not None:
            self.result.train_metrics_clientapp[number] = metrics
        if arrays is not None:
            self.result.arrays = arrays
            self._judge_round(number)

    def _judge_round(self, number: int) -> None:
        if self._judge_model is None:
            return
        if (metrics := self._judge_model(number, self.result.arrays)) is not None:
            self.result.evaluate_metrics_serverapp[number] = metrics

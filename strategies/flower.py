"""The Flower strategy interface: `start` runs a federation and returns Flower's `Result`."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar

from .base.collection import Recorder
from .base.outcome import Outcome

# The key under which Flower's strategies put the round number into every request.
ROUND_KEY = "server-round"


def arrays_of(tensors: Tensors) -> ArrayRecord:
    """Tensors as 32-bit arrays with the same names.

    Args:
        tensors: by name, of any shape.
    """
    arrays = {
        name: tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        for name, tensor in tensors.items()
    }
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def classifier_arrays(model: Classifier) -> ArrayRecord:
    """The arrays of a classifier.

    Args:
        model: any kind of classifier.

    Returns:
        A linear head has `weight` (C, d) and `bias` (C,). If it needs clipped features, it also has
        `clip` (), and if these are centred first, `centre` (d,). An ensemble of M heads has
        `weight` (M, C, d) and `bias` (M, C). A network has its own parameters.
    """
    tensors = model.arrays()
    if isinstance(model, Head) and model.clip is not None:
        tensors["clip"] = torch.tensor(model.clip)
    return arrays_of(tensors)


def tensors_like(model: Tensors, arrays: ArrayRecord) -> dict[str, Tensor]:
    """The arrays of a model as 32-bit tensors.

    Args:
        model: with the names and shapes that the arrays must have.
        arrays: of the model; may be empty.

    Returns:
        The arrays as tensors; `model` if there are none.

    Raises:
        ConfigError: for other names or shapes, or values that are not finite.

    Example:
        >>> model = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
        >>> arrays = arrays_of({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
        >>> tensors_like(model, arrays)["bias"].tolist()
        [1.0, 1.0]
        >>> tensors_like(model, ArrayRecord())["bias"].tolist()
        [0.0, 0.0]
    """
    if not arrays:
        return dict(model)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.items()}
    given = {name: tuple(array.shape) for name, array in arrays.items()}
    if given != wanted:
        wrong = ", ".join(
            f"{name} {shape}" for name, shape in sorted(given.items() ^ wanted.items())[:4]
        )
        raise ConfigError(
            f"arrays with other names or shapes than the model: {wrong}; leave the arrays out, or "
            "pass those of a Result"
        )
    tensors = {
        name: torch.from_numpy(array.numpy().copy()).to(torch.float32)
        for name, array in arrays.items()
    }
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise ConfigError(
            "arrays with values that are not finite; leave the arrays out, or pass those of a "
            "Result"
        )
    return tensors


def metrics_of(facts: Mapping[str, object]) -> MetricRecord:
    """The numeric facts as a MetricRecord.

    Args:
        facts: by name; those that are no numbers are left out.
    """
    return MetricRecord(
        {name: value for name, value in facts.items() if type(value) in (int, float)}  # type: ignore[misc]
    )


def check_no_settings(config: ConfigRecord | None, name: str) -> None:
    """Check that a message has no settings: a site takes its settings only from the run-config.

    Args:
        config: of the message.
        name: of the argument that it was, for the error.

    Raises:
        ConfigError: for settings in the message.
    """
    if extra := sorted(set(config or ()) - {ROUND_KEY}):
        raise ConfigError(
            f"{name} has {', '.join(extra)[:200]}: sites take no settings from a message; set them "
            "in the app's run-config"
        )


Settings = Run | Mapping[str, Scalar] | None


def settings_of(strategy: type, given: Settings) -> Run:
    """The configuration of a run with a strategy.

    Args:
        strategy: its class.
        given: a parsed configuration, Flower's flat run-config, or None. Without `method`, the
            settings are for the first method in the registry that the strategy runs.

    Raises:
        ConfigError: for invalid settings, or a method that another strategy runs.
    """
    if isinstance(given, Run):
        config = given
    else:
        own = [
            name
            for name, method in METHODS.items()
            if issubclass(strategy, load(method.usual.combination.strategy))
        ]
        config = parse_run({**({"method": own[0]} if own else {}), **(given or {})})
    runs: type = load(config.plan.combination.strategy)
    # A chain's surrogates are learned from again as those of a star.
    again: type = load(config.method.usual.combination.strategy)
    if not issubclass(strategy, (runs, again) if config.plan.kind == "chain" else runs):
        raise ConfigError(
            f"method = {config.settings.method!r} is run by {runs.__name__}, not by "
            f"{strategy.__name__}"
        )
    return config


# Meaning of the error codes that Flower sends instead of a site's reply.
MEANINGS = {
    1: "the site's app could not be loaded",
    2: "the site's app failed",
    3: "the site's reply is not complete, as after a lost connection, or cannot be read",
    4: "the site's reply no longer exists",
    5: "the site's SuperNode was stopped, or its connection was lost",
    8: "the site's app was ended, or did not respond for a minute",
}
# Ray ends a worker before memory runs out (OutOfMemoryError), or Linux does (the others).
KILLED = (
    "OutOfMemoryError",
    "ActorDiedError",
    "ActorUnavailableError",
    "RayActorError",
    "WorkerCrashedError",
)
# The server above all workers has ended, and they with it.
SERVER_ENDED = ("node has crashed", "NodeDiedError", "node died", "LocalRayletDiedError")
REMEDY = (
    "simulate fewer sites at the same time, such as `coordinator simulate --parallel 1`, or "
    "one by one with --engine local"
)
LONGEST = 500


def no_reply(code: int, reason: str | None) -> str:
    """The reason why a site did not reply.

    Args:
        code: Flower's error code.
        reason: the text of a simulated site's exception; None for a real site, whose text may
            contain a path, so that only the code is kept.

    Example:
        >>> no_reply(2, None)
        "the site's app failed (Flower error code 2)"
    """
    why = f"{MEANINGS.get(code, 'the site did not answer')} (Flower error code {code})"
    return why if reason is None else worker_failure(why, reason)


def worker_failure(why: str, reason: str | None) -> str:
    """The reason why a simulated site did not reply.

    Args:
        why: Flower's meaning of it.
        reason: the text of its exception.
    """
    reason = reason or ""
    if any(words in reason for words in SERVER_ENDED):
        return (
            "the server of Ray, which runs the simulated sites, has ended: killed for lack of "
            f"memory, or too slow on a busy machine; {REMEDY}"
        )
    if any(name in reason for name in KILLED):
        return (
            "the process of this simulated site was killed, most likely for lack of memory; "
            f"{REMEDY}"
        )
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return f"{why}: {lines[-1][:LONGEST]}" if lines else why


log = logging.getLogger("flwr")


# Evaluates the model at the coordinator: metrics of its arrays after a round, of which 0 is before the first.
Judge = Callable[[int, ArrayRecord], MetricRecord | None]


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
        evaluate_fn: Judge | None = None,
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

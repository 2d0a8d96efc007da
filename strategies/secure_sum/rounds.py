"""Training in rounds, each of which is one secure sum with new keys: the coordinator sees only the
mean update.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedsurrogate.common.backbones.column_names import shown
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.methods.method import load
from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.privacy.mechanism import JOINT_SUMS
from fedsurrogate.common.secure_sum.keys import Member
from fedsurrogate.common.secure_sum.words import Words
from fedsurrogate.common.wire.records import Info
from fedsurrogate.strategies.base.collection import Collection
from fedsurrogate.strategies.base.introductions import Group
from fedsurrogate.strategies.base.rounds import CHECKPOINT
from fedsurrogate.strategies.base.training import Training, read_kept
from fedsurrogate.strategies.flower.records import arrays_of, metrics_of, tensors_like
from fedsurrogate.strategies.secure_sum.strategy import SecureSum


class SecureRounds(SecureSum):
    """Rounds of training. In each one, sites make new keys and sum their updates, or their
    gradients with joint noise. Those with joint noise can be continued.
    """

    _training: Training | None = None
    # Rounds of an earlier run that were charged and did not end. The budget has no more for them.
    _charged_in_vain = 0
    _bytes_before = 0
    # The sites of the first sum. Without joint noise they refuse a sum with others, such as one
    # that comes back.
    _first: frozenset[str] = frozenset()

    def run(self, grid: Grid, deadline: float = 0.0) -> float | None:
        """Run all rounds, and evaluate the model.

        Args:
            grid: through which the sites are asked.
            deadline: seconds to wait in each step; 0 for that of the settings.

        Returns:
            The accuracy over all sites' own test splits; None if no site reported it.

        Raises:
            RunError: when too few sites are left in any round.
        """
        self.deadline = deadline or self.config.settings.deadline
        self.summary()
        started = time.perf_counter()
        self._resume()
        while not self._over():
            number = self._number
            try:
                messages = self.configure_train(number, ArrayRecord(), ConfigRecord(), grid)
                done = self.aggregate_train(number, Collection(grid, messages, self.deadline))
            except RunError as error:
                raise RunError(f"round {number}: {error}") from None
            self._finish_round(number, done)
        self.outcome.seconds["learn"] = time.perf_counter() - started
        return self.evaluate(grid, self.deadline)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Collect keys and shares of a new sum.

        Args:
            server_round: not used.
            arrays: the model to send; empty for the strategy's own.
            config: of Flower, which must have no settings.
            grid: through which the sites are asked.

        Returns:
            The requests for masked updates; none after the last round.
        """
        self._resume()
        if self._over():
            return []
        if self._training is None:
            self.initial = arrays or self.initial
        else:
            self._training.model = tensors_like(self._training.model, arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Complete the round's sum, and update the model.

        Args:
            server_round: not used.
            replies: with masked updates.

        Returns:
            The arrays of the model, and the metrics of the round; None after the last round.

        Raises:
            RunError: when too few sites are left.
        """
        if self._over():
            return None, None
        super().aggregate_train(server_round, replies)
        assert self._training is not None
        return arrays_of(self._training.model), metrics_of(self._training.history[-1])

    def classifier(self, training: Training) -> Classifier:
        """The classifier made of the model after any round."""
        return training.classifier()

    def invite(self, grid: Grid, deadline: float, number: int | None = None) -> list[int]:
        """The connected nodes. Only the first round waits for all expected sites.

        Args:
            grid: that they are connected to.
            deadline: seconds to wait for them.
            number: of the round; None for the current one.
        """
        return super().invite(
            grid, deadline, number or (self._number if self._number > 1 else None)
        )

    @property
    def _number(self) -> int:
        """The number of the current round, from one."""
        return 1 if self._training is None else self._training.round + 1

    def _over(self) -> bool:
        paid = self.config.rounds - self._charged_in_vain
        return self._number > min(self.last_round or self.config.planned_rounds, paid)

    def _resume(self) -> None:
        """Load what an earlier run has reached, if this one continues it."""
        if self._training is not None or not (folder := self.config.settings.resume):
            return
        self._training = Training.load(self.config, read_kept(folder, CHECKPOINT), CHECKPOINT)
        self._charged_in_vain = self._training.asked - self._training.round
        self.outcome.rounds = self._training.history
        self._bytes_before = sum(int(each["bytes_up"] or 0) for each in self._training.history[-1:])
        self.outcome.earlier = self.config.mechanism
        self.recorder.event("resumed", round=self._training.round)
        if self._over() and not self._training.round:
            raise RunError(
                f"resume = {folder!r}: no round of it has ended, and the budget is charged for all; "
                "start a new run, without resume"
            )
        self._check_resumed(self._training)
        self.outcome.model = self.classifier(self._training)

    def _check_resumed(self, training: Training) -> None:
        """Raise RunError where a run cannot go on after the rounds that it was charged for."""
        mechanism = self.config.mechanism
        if training.round or mechanism is None:
            return
        # What a round takes of the budget.
        first, later = (
            each.count / each.noise_multiplier**2 for each in map(mechanism.event, (1, 2))
        )
        if first > later:
            raise RunError(
                "the first round of this run was charged and did not end, and it costs more than a "
                "later one, so the budget does not pay for it twice; start a new run, without resume"
            )

    def _values(self) -> Info:
        values = super()._values() | {"round": self._number}
        if self._training is None:
            return values
        # Every site of a round is in its sum, or the run ends.
        return values | {"lineage": self._training.lineage, "confirmed": self._training.round}

    def _key_list(self, keys: Mapping[str, str]) -> dict[str, Member]:
        return super()._key_list(
            {name: key for name, key in keys.items() if name in (self._first or keys)}
        )

    def _agreed_payload(self, group: Group) -> tuple[bytes, int]:
        """The round's model. With another one for a single site, the mean update would show that
        site's.
        """
        if self._training is None:
            frame = self.config.public_frame(group.dimension)
            self._training = Training.begin(
                self.config, group.classes, group.fingerprint, group.dimension, frame
            )
            self._training.model = tensors_like(self._training.model, self.initial)
        training = self._training
        if (training.fingerprint, training.inputs) != (group.fingerprint, group.dimension):
            raise RunError(
                f"the sites have another backbone ({shown(group.fingerprint)}) than in the first "
                "round"
            )
        # Saved before any request, so that no later run takes a charged round for a free one.
        training.asked = self._number + self._charged_in_vain
        self._keep()
        return training.payload(), group.dimension

    def _learn(self, summed: list[str], numbers: Words) -> None:
        training = self._training
        assert training is not None
        total, facts = self._total(summed, numbers)
        if self.config.plan.mechanism_name != JOINT_SUMS:
            self._first = self._first or frozenset(summed)
        load(self.config.plan.combination.from_sums)(total, training, summed)
        self.outcome.model, self.outcome.learning = self.classifier(training), facts
        sent = self._bytes_before + sum(site.bytes_up for site in self.outcome.sites.values())
        entry: dict[str, object] = {
            "round": training.round,
            "accuracy": self._accuracy(self._grid),
            "bytes_up": sent,
        }
        entry["used"] = len(summed)
        if self.config.mechanism is not None:
            # With the rounds that were charged and did not end.
            entry["epsilon"] = self.config.mechanism.epsilon_after(training.asked)
        training.history.append(entry)
        self.outcome.rounds = training.history
        self._keep()
        self.recorder.event("round", **entry)

    def _keep(self) -> None:
        """Keep what a later run can continue: with joint noise, each round is a sum of its own."""
        if self._training is not None and self.config.plan.mechanism_name == JOINT_SUMS:
            self.recorder.keep(CHECKPOINT, self._training.save())

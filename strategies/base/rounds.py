"""Base of all methods that train in rounds (FedAvg and others): the coordinator saves a checkpoint
after each round.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection as Container
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Generic, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from fedsurrogate.common.backbones.backbone_names import shown
from fedsurrogate.common.errors import PUBLIC_SENTENCES, RunError, SurrogateError
from fedsurrogate.common.models.parameters import Parameters, check_update, length_of
from fedsurrogate.common.privacy.mechanism import check_stated
from fedsurrogate.common.surrogates.surrogates import Synthetic
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.common.wire.records import Info, to_record
from fedsurrogate.common.wire.tensors import Expectation, check_reply

from ..flower import Settings, arrays_of, check_no_settings, metrics_of, tensors_like
from .collection import Collection, Recorder, has_quorum
from .federation import Federation
from .identifications import identification
from .outcome import NO_REPLY, Defended, Suspect, seconds_in
from .training import Training, read_kept

CHECKPOINT = "checkpoint.safetensors"
# Timed parts of a FedLAP site's work.
PARTS = ("real-gradients", "image-steps", "radius-search")


# The type of a reply. This class itself reads only `header` and `claim`.
R = TypeVar("R", Parameters, Synthetic)


class Rounds(Federation, Generic[R]):
    """Rounds of training: sites receive the model and send replies. A site that fails in one round
    is asked again.

    Subclasses define what a valid reply is, and how replies update the model.
    """

    def __init__(
        self, config: Settings = None, recorder: Recorder | None = None, device: str = ""
    ) -> None:
        super().__init__(config, recorder, device)
        self._training: Training | None = None
        # In the current round, the nodes with a request and the nodes that did not report a name;
        # None between rounds.
        self._asked: tuple[list[int], set[int]] | None = None
        self._grid: Grid | None = None
        self._started = 0.0

    @abstractmethod
    def parse(self, payload: bytes, training: Training) -> R:
        """Parse one site's reply.

        Args:
            payload: its bytes.
            training: before the round.

        Raises:
            SurrogateError: for bytes that are no reply.
        """

    def check(self, reply: R, training: Training) -> None:
        """What the method requires beyond the run's header and its schema.

        Args:
            reply: of a site.
            training: before the round.

        Raises:
            SurrogateError: for a reply that does not have it.
        """

    def shapes(self, training: Training) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors in a reply of parameters to the next round."""
        return training.shapes()

    def read(self, payload: bytes, training: Training) -> R:
        """Parse and check one site's reply: header, schema, and what else the method requires.

        Args:
            payload: its bytes.
            training: before the round.

        Raises:
            SurrogateError: for a reply that is not as it must be.
        """
        reply = self.parse(payload, training)
        if reply.header.frame != training.frame:
            raise SurrogateError("the reply is in another frame of the columns than the model")
        expected = Expectation.of(
            self.config, training.classes, training.fingerprint, training.inputs
        )
        check_reply(reply, self.config.plan.messages, expected, first=not training.round)
        if isinstance(reply, Parameters):
            check_update(
                reply, self.shapes(training), training.round + 1, bool(self.config.settings.epsilon)
            )
        self.check(reply, training)
        return reply

    @abstractmethod
    def defend(self, training: Training, replies: Sequence[R]) -> Defended[R]:
        """The defence against hostile sites, before `absorb`.

        Args:
            training: before the round; not changed.
            replies: checked replies, sorted by site.
        """

    @abstractmethod
    def absorb(self, training: Training, replies: Sequence[R]) -> dict[str, object]:
        """Update the model with one round's replies and finish the round.

        Args:
            training: before the round; changed.
            replies: that the defence keeps, sorted by site.

        Returns:
            Facts for the round's event.
        """

    def facts(self, reply: R) -> dict[str, object]:
        """Facts about a reply for the events, in addition to its size and time."""
        return {}

    def records(self, reply: R) -> int:
        """Number of records behind a reply; 0 if not reported."""
        return reply.records

    def run(self, grid: Grid, deadline: float = 0.0) -> float | None:
        """Run all remaining rounds.

        Args:
            grid: through which the sites are asked.
            deadline: seconds to wait for replies in a round; 0 for that of the settings.

        Returns:
            The accuracy over all sites' own test splits; None if no site reported it.

        Raises:
            RunError: when a quorum is missed; the run can then be resumed.
        """
        self.deadline = deadline or self.config.settings.deadline
        self.summary()
        training = self._begun(grid)
        training.model = tensors_like(training.model, self.initial)
        while not self._over(training.round, training.asked):
            number = training.round + 1
            messages = self.configure_train(number, ArrayRecord(), ConfigRecord(), grid)
            self._finish_round(
                number, self.aggregate_train(number, Collection(grid, messages, self.deadline))
            )
        self.outcome.model = self.classifier(training)
        self.outcome.seconds["learn"] = time.perf_counter() - self._started
        return self.evaluate(grid, self.deadline)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of the next round: the model for every connected site. Before the first
        round, sites identify themselves.

        Args:
            server_round: not used.
            arrays: the model to send; empty for the strategy's own.
            config: of Flower, which must have no settings.
            grid: through which the sites are asked.

        Returns:
            The messages; none after the last possible round.

        Raises:
            RunError: when no site is connected.
            ConfigError: for arrays that do not fit.
        """
        check_no_settings(config, "train_config")
        self._grid, training = grid, self._begun(grid)
        training.model = tensors_like(training.model, arrays)
        if self._over(training.round, training.asked):
            return []
        asked, mute = self._present(grid, training, self.deadline)
        training.asked += bool(asked)
        # Saved before any request: if this process dies, the record of charged rounds must survive.
        self.recorder.keep(CHECKPOINT, training.save())
        self._asked = (asked, mute)
        return self._request_messages(training, asked)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies of a round as they arrive, and update the model.

        Args:
            server_round: not used.
            replies: of the sites.

        Returns:
            The arrays of the model, and the metrics of the round; None where privacy budgets end
            the run, or without a round in progress.

        Raises:
            RunError: when the valid replies are too few.
        """
        if self._asked is None or self._training is None or self._grid is None:
            return None, None
        training, (asked, mute), self._asked = self._training, self._asked, None
        facts = self._round(training, asked, mute, replies)
        if facts is None:
            return None, None
        training.history.append(facts | {"seconds": round(time.perf_counter() - self._started, 3)})
        self.recorder.keep(CHECKPOINT, training.save())
        self.recorder.event("round", **facts)
        return arrays_of(training.model), metrics_of(training.history[-1])

    def _begun(self, grid: Grid) -> Training:
        """The state of the training, created on first use."""
        if self._training is None:
            self._training = self._begin(grid, self.deadline)
            self.outcome.rounds = self._training.history
            self._started = time.perf_counter()
            self._bytes_before = sum(
                entry["bytes_up"] or 0 for entry in self._training.history[-1:]
            )
        return self._training

    def _over(self, done: int, asked: int) -> bool:
        """Whether no round remains: all are done, or the privacy budget allows no more."""
        rounds, affordable = self.config.planned_rounds, self.config.rounds
        if self.outcome.stopped or done >= (self.last_round or rounds):
            return True
        if self.config.settings.epsilon and asked >= affordable:
            paid = f"{done} are done, {asked} are charged"
            self._stop(
                f"epsilon = {self.config.settings.epsilon:g} allows {affordable} of {rounds} "
                f"rounds; {paid}"
            )
        return bool(self.outcome.stopped)

    def _begin(self, grid: Grid, deadline: float) -> Training:
        """A new model for the backbone and classes of the connected sites, or the checkpoint of an
        earlier run.
        """
        group = self.identify(grid, deadline)
        if self.config.settings.resume:
            training = Training.load(
                self.config, read_kept(self.config.settings.resume, CHECKPOINT), CHECKPOINT
            )
            if training.fingerprint != group.fingerprint:
                raise RunError(
                    f"the checkpoint is for backbone {shown(training.fingerprint)}, but the sites "
                    "have another one"
                )
            self.recorder.event("resumed", round=training.round)
            self.outcome.earlier = self.config.mechanism
            return training
        frame = self.config.public_frame(group.dimension)
        if not frame and self.config.frames:
            frame = group.frame
        return Training.begin(self.config, group.classes, group.fingerprint, group.dimension, frame)

    def _round(
        self, training: Training, asked: Sequence[int], mute: set[int], answers: Iterable[Message]
    ) -> dict[str, object] | None:
        """Update the model with the replies; return the facts of the round, or None when privacy
        budgets end the run.
        """
        number, sites = training.round + 1, self.outcome.sites
        replies, silent = self._replies(training, asked, answers)
        silent |= mute
        try:
            self._check_quorum(len(replies), len(asked) + len(mute))
        except RunError as error:
            if training.round and self._only_budgets_are_missing(asked, silent, len(replies)):
                self._stop(f"round {number}: {error}, and sites' privacy budgets do not allow more")
                for site in sites.values():
                    if site.name in training.confirmed:
                        site.use()
                return None
            raise RunError(f"round {number}: {error}") from None
        # The order of arrival must not matter: floating-point sums depend on the order.
        replies.sort(key=lambda reply: (len(reply.header.site), reply.header.site))
        defended = self.defend(training, replies)
        self._apply_defence(defended, number)
        step = self._absorbed(training, defended.kept)
        self.outcome.model = self.classifier(training)
        assert self._grid is not None  # through which the sites were asked
        return self._entry(training.round, training.asked, len(replies), self._grid) | step

    def _absorbed(self, training: Training, replies: Sequence[R]) -> dict[str, object]:
        """Update the model so that every site accepts it; return the facts of the round.

        Replies that break the model are left out, and their sites named: the longest first, and
        never half of them or more, because then it is not known who is wrong. If that does not help,
        the model stays as it was.
        """
        before, left = replace(training, confirmed=dict(training.confirmed)), list(replies)
        broken, found = list[Suspect](), ""
        for _ in range(1 + (len(replies) - 1) // 2):
            facts = self.absorb(training, left)
            if not (found := training.unsendable()):
                self._apply_defence(Defended(left, suspects=broken), training.round)
                return facts
            vars(training).update(vars(before) | {"confirmed": dict(before.confirmed)})
            longest = max(left, key=lambda reply: length_of(reply.tables))
            left.remove(longest)
            reason = f"with its reply the model cannot be sent: {found}"
            broken.append(Suspect(longest.header.site, "far", 1.0, reason))
        self.recorder.event("model-kept", reason=found, round=training.round + 1)
        training.finish_round(())
        return {}

    def _request_messages(self, training: Training, asked: Sequence[int]) -> list[Message]:
        """The requests of a round: the model, and for each site its last confirmed round."""
        number, payload = training.round + 1, training.payload()
        values: Info = {
            "run": self.config.digest,
            "round": number,
            "lineage": training.lineage,
            "bytes": len(payload),
        }

        confirmed = {
            node: training.confirmed.get(self.outcome.sites[node].name, 0) for node in asked
        }
        records = {
            node: to_record(payload, values | {"confirmed": last})
            for node, last in confirmed.items()
        }
        return [self._message(MessageType.TRAIN, node, record) for node, record in records.items()]

    def _replies(
        self, training: Training, asked: Sequence[int], answers: Iterable[Message]
    ) -> tuple[list[R], set[int]]:
        """The valid replies of a round, and the nodes without a reply."""
        replies: list[R] = []
        silent = set(asked)
        for reply in answers:
            silent.discard(self._node(reply))
            if (read := self._reply(reply, training)) is not None:
                replies.append(read)
        self._miss(silent, training.round + 1)
        return replies, silent

    def _miss(self, silent: Container[int], number: int) -> None:
        """Record the nodes without a reply as dropped."""
        for node, site in self.outcome.sites.items():
            if node in silent:
                site.fate, site.reason = "dropped", NO_REPLY
                self.recorder.event("dropped", site=site.name, reason=NO_REPLY, round=number)

    def _present(
        self, grid: Grid, training: Training, deadline: float
    ) -> tuple[list[int], set[int]]:
        """The nodes for the next round, and the nodes that did not report a name.

        A node that is new, or returned with a new id, must report its name first: the name gives
        its last confirmed round.
        """
        sites, number = self.outcome.sites, training.round + 1
        nodes = self.invite(grid, deadline, number)
        for node, site in sites.items():
            if node not in self._connected and site.fate == "used":
                site.fate, site.reason = "dropped", f"gone before round {number}"
                self.recorder.event("dropped", site=site.name, reason=site.reason, round=number)
        mute = {node for node in nodes if not (sites[node].heard or sites[node].barred)}
        for reply in Collection(grid, map(self.hello, list(mute)), deadline) if mute else ():
            mute.discard(self._node(reply))
            self._meet(reply, training)
        self._miss(mute, number)
        known = [node for node in nodes if sites[node].heard and not sites[node].barred]
        return known, mute

    def _meet(self, reply: Message, training: Training) -> None:
        """Read the identification of a site that joined during the run."""
        node, number = self._node(reply), training.round + 1
        site = self.outcome.sites[node]
        try:
            _, info = self._read(reply, site)
            own = identification(site.name, info)
            if not site.heard:
                raise SurrogateError(
                    f"the site reports the name {str(info.get('site'))[:64]!r}, which is another "
                    "site's"
                )
            if (own.fingerprint, own.dimension) != (training.fingerprint, training.inputs):
                site.barred = True
                raise SurrogateError(
                    f"backbone {shown(own.fingerprint)} of dimension {own.dimension}, not the run's"
                )
        except SurrogateError as error:
            self._reject(node, str(error), number)
            return
        site.simulated = own.simulated
        self.recorder.event("joined", site=site.name, round=number)

    def _only_budgets_are_missing(
        self, asked: Sequence[int], silent: Container[int], used: int
    ) -> bool:
        """Whether a private round missed its quorum only because sites refused it for lack of
        budget.
        """
        sites, config = self.outcome.sites, self.config
        refused = [
            node
            for node in asked
            if node not in silent and sites[node].reason.startswith(PUBLIC_SENTENCES["budget"])
        ]
        return bool(config.settings.epsilon and refused) and has_quorum(
            used + len(refused), len(asked), config.settings.site_count, config.settings.quorum
        )

    def _stop(self, reason: str) -> None:
        self.outcome.stopped = reason
        self.recorder.event("stopped", reason=reason)

    def _reply(self, reply: Message, training: Training) -> R | None:
        """One site's checked reply. None when it is rejected; the site is asked again in the next
        round.
        """
        node = self._node(reply)
        site = self.outcome.sites[node]
        number = training.round + 1
        try:
            payload, info = self._read(reply, site)
            if payload is None:
                raise SurrogateError("a reply without a payload")
            read = self.read(payload, training)
            check_stated(read.claim, self.config.mechanism)
            if read.header.site != site.name:
                raise SurrogateError(
                    f"the reply names another site as its sender: {read.header.site[:64]!r}"
                )
        except SurrogateError as error:
            self._reject(node, str(error), number)
            return None
        site.use()
        site.simulated, site.claim = info.get("simulated") is True, read.claim
        parts = {name: seconds for name in PARTS if (seconds := seconds_in(info, name)) is not None}
        site.records = self.records(read) or site.records
        facts = {
            "payload": len(payload),
            "seconds": seconds_in(info, "fit"),
            "parts": parts or None,
        } | self.facts(read)
        self.recorder.event("replied", site=site.name, round=number, bytes=site.bytes_up, **facts)
        return read


class RoundsOfParameters(Rounds[Parameters]):
    """Rounds in which sites send tensors by name, of the shapes of `shapes`."""

    def parse(self, payload: bytes, training: Training) -> Parameters:
        """Parse a reply; more numbers than these shapes have are never unpacked. Raises
        SurrogateError.
        """
        return unpack_parameters(payload, most=sum(map(prod, self.shapes(training).values())))

"""A run whose coordinator sees only the sum over sites: four steps after the identifications, each with a
deadline. Training in rounds is one such sum in each round, with new keys.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from fedsurrogate.common.backbones.backbone_names import shown
from fedsurrogate.common.errors import FedSurrogateError, RunError, SurrogateError
from fedsurrogate.common.methods.method import WITHHELD, load
from fedsurrogate.common.privacy.mechanism import DISTRIBUTED_SUMS, Mechanism, check_stated
from fedsurrogate.common.secure_aggregation import protocol
from fedsurrogate.common.secure_aggregation.rules import (
    local_epsilon,
    numbers_of,
    rules_of,
    shapes_of,
)
from fedsurrogate.common.secure_aggregation.secrets import (
    Dealt,
    Member,
    Words,
    check_dealt,
    list_digest,
    words,
)
from fedsurrogate.common.security.sealing import verify
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire import surrogate_proto
from fedsurrogate.common.wire.records import Info, to_record
from fedsurrogate.common.wire.surrogate_proto import centre_digest

from ..base.collection import Collection
from ..base.federation import HELLO
from ..base.identifications import Group
from ..base.outcome import Learned
from ..base.rounds import CHECKPOINT
from ..base.training import Training, read_kept
from ..flower import arrays_of, check_no_settings, classifier_arrays, metrics_of, tensors_like
from ..pooling.class_means import map_with_words
from ..pooling.site_weights import Total
from .steps import Steps, left_out

TOTAL_FILE = "sum.pb"


class SecureAggregation(Steps):
    """One secure aggregation, from which the method of the run learns. Its members are the sites that
    announce keys.
    """

    _header: Header
    _map = PublicMap()
    _subtracted = ""
    _projection = ""

    def hello(self, node: int) -> Message:
        """The request for a site's identification, with its keys for this sum."""
        return self._message(HELLO, node, to_record(None, self._values()))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Collect keys and shares.

        Args:
            server_round: not used.
            arrays: not used: no model of the caller is sent.
            config: of Flower, which must have no settings.
            grid: through which the sites are asked.

        Returns:
            The requests for masked vectors.

        Raises:
            RunError: when too few sites are left.
        """
        check_no_settings(config, "train_config")
        self._grid, self._lost = grid, {}
        self._prepare()
        return [self._delivery(name) for name in self._dealt]

    def _prepare(self) -> None:
        """Collect keys and shares of a new sum. Raises RunError when too few sites are left.

        If too few sites accept the key list, they begin again without those that they do not
        accept: nothing is charged yet.
        """
        self._masked: dict[str, Words] = {}
        self._claims: dict[str, Mechanism | None] = {}
        self._spares: dict[str, bytes] = {}
        lost = "lost after its keys"
        while True:
            self._begin()
            listed = surrogate_proto.pack_members(
                self._members.values(), surrogate_proto.map_digest(self._public)
            )
            self._dealt = self._ask(
                "sum_shares", dict.fromkeys(self._members, listed), lost, self._shares, "keys"
            )
            if len(self._dealt) >= self._rules.least or not self._waiting:
                break
            disputes = {
                each for each in self._disputes if each.what == "keys" and each.by in self._waiting
            }
            unknown = left_out(disputes) & self._members.keys()
            self._unknown |= unknown
            self._decide(unknown, lost)
        self._decide(self._waiting, lost)
        self._enough(len(self._dealt), self._rules.least, "have shared their secrets")
        self._check_quorum(len(self._dealt), what="have shared their secrets")
        self._delivered = dict.fromkeys(self._dealt, frozenset(self._dealt))

    def _begin(self) -> None:
        """Collect the keys of a new sum. Raises RunError when too few sites are left."""
        self._sum = secrets.token_hex(16)
        self._pinned: dict[str, bool] = {}
        group = self.identify(self._grid, self.deadline)
        self._nodes, classes = dict(group.nodes), group.classes
        self._header = Header(
            self.config.settings.method,
            self.config.digest,
            "coordinator",
            group.fingerprint,
            classes,
        )
        self._public, dimension = self._agreed_payload(group)
        self._shapes = shapes_of(self.config.plan, len(classes), dimension, self._number)
        self._members = self._key_list(group.keys)
        self._digest = list_digest(
            list(self._members.values()), self._context + surrogate_proto.map_digest(self._public)
        )
        self._rules = rules_of(self.config.settings, len(self._members))
        try:
            self._rules.check()
            given, claim = (self.config.plan, self.config.settings), self.config.mechanism
            self._numbers = numbers_of(*given, len(self._members), self._number)
            # Also of the next round, which may have other sums, before this one is charged.
            for number in (self._number, self._number + 1):
                if claim is not None and claim.name == DISTRIBUTED_SUMS:
                    numbers = numbers_of(*given, len(self._members), number)
                    shapes = shapes_of(self.config.plan, len(classes), dimension, number)
                    # The sites would refuse noise that does not fit into the modulus, without a
                    # reason.
                    protocol.site_variances(claim, numbers, shapes, self._rules)
        except FedSurrogateError as error:
            lost = "".join(f"; {name}: {reason}" for name, reason in sorted(self._lost.items()))
            raise RunError(f"{error}{lost}") from None

    def _delivery(self, name: str) -> Message:
        dealt = [self._dealt[sender] for sender in self._dealt if sender in self._delivered[name]]
        return self._request(
            MessageType.TRAIN, name, surrogate_proto.pack_delivery(dealt, name, self._public)
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Complete the sum, and learn from it.

        Args:
            server_round: not used.
            replies: with masked vectors.

        Returns:
            The arrays of the model, None without one; and the metrics of the run.

        Raises:
            RunError: when too few sites are left.
        """
        lost = "lost after its shares"
        self._collect(replies, list(self._dealt), lost, self._vector, "shares")
        while again := self._without_disputes(lost):
            messages = [self._delivery(name) for name in again]
            self._collect(
                Collection(self._grid, messages, self.deadline), again, lost, self._vector, "shares"
            )
        self._enough(len(self._masked), self._rules.least, "have sent their masked vectors")
        summed = sorted(self._masked)
        listed = dict.fromkeys(summed, surrogate_proto.pack_list(summed))
        signatures = self._ask(
            "sum_list", listed, "lost after its masked vector, which is in the sum", self._signature
        )
        self._enough(len(signatures), self._rules.threshold, "have signed the list of summed sites")
        signed = dict.fromkeys(signatures, surrogate_proto.pack_list(summed, signatures))
        why = "lost before the end; its masked vector is in the sum"
        revealed = self._ask("sum_open", signed, why, self._revealed)
        self._enough(len(revealed), self._rules.threshold, "have replied to the end")
        try:
            numbers = protocol.unmask(
                self._masked, self._dealt, self._members, revealed, self._rules, self._delivered
            )
        except SurrogateError as error:
            raise RunError(
                f"the secure aggregation cannot be completed: {error}; {self._remedy}"
            ) from None
        for name in summed:
            site = self.outcome.sites[self._nodes[name]]
            site.use()
            site.claim = self._claims[name]
            self.recorder.event("replied", site=name, bytes=site.bytes_up)
        self._learn(summed, numbers)
        facts = {"bytes_up": self.outcome.bytes_up, "used": len(summed)}
        model = self.outcome.model
        return None if model is None else classifier_arrays(model), metrics_of(facts)

    def _without_disputes(self, lost: str) -> list[str]:
        """Leave sites out until no dispute about shares is left; return those that are asked for
        their vectors again.

        These have sent no vector, and were charged for none. They will not mask with sites whose
        shares they cannot use. If others did, enough of them must have shares that take such masks
        out. If too few sites are left, all begin again, or the sites that complain are lost where
        another one that stays has sent its vector.
        """
        waiting = self._waiting
        if not waiting:
            return []
        out = self._untrusted() & self._dealt.keys()
        again = waiting - out
        unread = {
            name: {each.about for each in self._disputes if each.by == name} for name in again
        }
        delivered = self._delivered | {name: self._delivered[name] - unread[name] for name in again}
        summed = self._masked.keys() - out | again
        readers = [
            sum(name in delivered[each] for each in summed) for name in self._dealt.keys() - summed
        ]
        if len(summed) < self._rules.least or any(
            0 < count < self._rules.threshold for count in readers
        ):
            if not self._masked.keys() - out:
                self._decide(out, lost)
                self._prepare()
                return sorted(self._dealt)
            out, again = set(waiting), frozenset()
        self._decide(out, lost)
        self._masked = {name: vector for name, vector in self._masked.items() if name not in out}
        self._delivered = delivered
        return sorted(again)

    def _agreed_payload(self, group: Group) -> tuple[bytes, int]:
        """What all sites must receive alike before they compute their vectors, and the dimension of
        the features then.
        """
        self._map, self._projection = map_with_words(self.config, group.dimension)
        digest = centre_digest(self._map.centre)
        self._subtracted = self.config.plan.subtracted(group.dimension, digest)
        try:
            dimension = self._map.apply(torch.zeros(1, group.dimension)).shape[1]
        except SurrogateError as error:
            raise RunError(
                f"features.projection or fedpft.public does not fit the sites: {error}"
            ) from None
        return surrogate_proto.pack_map(self._map), dimension

    def _learn(self, summed: list[str], numbers: Words) -> None:
        total, facts = self._total(summed, numbers)
        started = time.perf_counter()
        learned: Learned = load(self.config.plan.combination.from_sums)(total, self.config)
        self._keep_learned(learned, started, facts)

    def _total(self, summed: list[str], numbers: Words) -> tuple[Total, dict[str, str | float]]:
        """The sum as real numbers, and facts about it. Raises RunError when it is of too few sites."""
        config, claim = self.config, self._claims[summed[0]]
        self.recorder.keep(
            TOTAL_FILE, surrogate_proto.pack_total(self._header, summed, numbers, claim)
        )
        rules, sigmas = self._rules, {}
        if claim is not None and claim.name == DISTRIBUTED_SUMS:
            given = (self._numbers, self._shapes, rules)
            for site, seed in self._spares.items():
                # A claim may differ from that of other sites in its last digits, and every number
                # from a seed with it.
                own = self._claims[site]
                assert own is not None
                spare = protocol.spare_of(own, *given, seed)
                if spare:
                    numbers = numbers - words(
                        np.concatenate([spare[name] for name in self._shapes])
                    )
            sigmas = protocol.noise_of_sum(claim, *given, len(summed), len(self._spares))
        self._check_quorum(len(summed))
        tensors, at = {}, 0
        for name, shape in self._shapes.items():
            count = prod(shape)
            tensors[name] = self._numbers[name].decode(numbers[at : at + count]).reshape(shape)
            at += count
        if tensors.pop(WITHHELD.name, torch.zeros(1)).any():
            raise RunError(
                "a site has withheld the secure aggregation, which is random now; nothing shows which one. "
                "Its own log says why: its data have changed since an earlier sum, or its numbers "
                "are beyond secure-aggregation-range, secure-aggregation-records or, for columns of a table, far beyond "
                "features.ranges (for other settings, each hospital needs `site ledger forget`)"
            )
        keys = (
            "pinned by every site"
            if all(self._pinned[name] for name in summed)
            else "sent by the coordinator"
        )
        facts: dict[str, str | float] = {
            "secure-aggregation-of": len(summed),
            "members": rules.members,
            "colluding": rules.colluding,
            "least": rules.least,
            "keys": keys,
        }
        if self._projection:
            facts["projection"] = self._projection
        if sigmas:
            facts["local-epsilon"] = local_epsilon(config.settings.epsilon, config.mechanism, rules)
        facts |= {f"noise-{name}": sigma for name, sigma in sigmas.items()}
        steps = {name: self._numbers[name].step for name in tensors}
        most = {name: len(summed) * step / 2 for name, step in steps.items()}
        usual = {name: math.sqrt(len(summed) / 12) * step for name, step in steps.items()}
        return Total(self._header, tensors, sigmas, claim, self._map, most, usual), facts

    @property
    def _number(self) -> int:
        """The number of the current round, from one."""
        return 1

    def _shares(self, name: str, payload: bytes, info: Info) -> Dealt:
        dealt = surrogate_proto.unpack_dealt(payload)
        check_dealt(dealt)
        if (
            dealt.site != name
            or dealt.content.keys() != self._members.keys()
            or dealt.digest != self._digest
        ):
            raise SurrogateError("shares that are not for the sites of this sum")
        self._pinned[name] = info.get("pinned") is True
        self.recorder.event("shared", site=name, bytes=len(payload))
        return dealt

    def _vector(self, name: str, payload: bytes, info: Info) -> None:
        header, numbers, claim = surrogate_proto.unpack_masked(
            payload, sum(map(prod, self._shapes.values()))
        )
        if header != replace(self._header, site=name):
            raise SurrogateError("a masked vector of another run, backbone, site or other classes")
        check_stated(claim, self.config.mechanism_for("record", self._subtracted))
        site = self.outcome.sites[self._nodes[name]]
        site.simulated = info.get("simulated") is True
        self._masked[name], self._claims[name] = numbers, claim
        self.recorder.event("masked", site=name, bytes=len(payload))

    def _signature(self, name: str, payload: bytes, info: Info) -> bytes:
        verify(
            protocol.signed_list(self._digest, sorted(self._masked)),
            payload,
            self._members[name].public,
            protocol.PURPOSE,
        )
        return payload

    def _revealed(self, name: str, payload: bytes, info: Info) -> protocol.Shares:
        shares = surrogate_proto.unpack_revealed(payload)
        protocol.check_revealed(
            name,
            shares,
            {each: self._dealt[each] for each in self._delivered[name]},
            list(self._masked),
        )
        # A false seed adds noise, as a site could have done before.
        if (
            spare := surrogate_proto.unpack_spare(payload)
        ) and self._masked.keys() == self._members.keys():
            self._spares[name] = spare
        return shares


class SecureRounds(SecureAggregation):
    """Rounds of training. In each one, sites make new keys and sum their updates, or their
    gradients with distributed noise. Those with distributed noise can be continued.
    """

    _training: Training | None = None
    # Rounds of an earlier run that were charged and did not end. The budget has no more for them.
    _charged_in_vain = 0
    # The sites of the first sum. Without distributed noise they refuse a sum with others, such as one
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
        if self.config.plan.mechanism_name != DISTRIBUTED_SUMS:
            self._first = self._first or frozenset(summed)
        load(self.config.plan.combination.from_sums)(total, training, summed)
        self.outcome.model, self.outcome.learning = self.classifier(training), facts
        entry = self._entry(training.round, training.asked, len(summed), self._grid)
        training.history.append(entry)
        self.outcome.rounds = training.history
        self._keep()
        self.recorder.event("round", **entry)

    def _keep(self) -> None:
        """Keep what a later run can continue: with distributed noise, each round is a sum of its own."""
        if self._training is not None and self.config.plan.mechanism_name == DISTRIBUTED_SUMS:
            self.recorder.keep(CHECKPOINT, self._training.save())

"""Base of one-round methods: every site sends once. Replies are stored: a model can be learned
again without sites.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.privacy.mechanism import check_stated
from fedsurrogate.common.surrogates.mixtures import Frame, common_frame
from fedsurrogate.common.surrogates.surrogates import Reply
from fedsurrogate.common.wire.records import Info, pack_public_mean, to_record
from fedsurrogate.common.wire.surrogate_proto import centre_digest
from fedsurrogate.common.wire.tensors import Expectation, check_reply

from ..flower import Settings, check_no_settings, classifier_arrays, metrics_of
from .collection import Collection, Recorder
from .federation import Federation
from .identifications import Group, misfits, other_truths
from .outcome import Defended, Learned, Site, due_centre, seconds_in

CENTRE_FILE = "centre.pb"
NAME = f"{MessageType.QUERY}.name"
NAME_SECONDS = 120.0


S = TypeVar("S", bound=Reply)


class OneShot(Federation, Generic[S]):
    """A run of one round. Subclasses parse the surrogates, and learn from them.

    Args:
        config: the settings, or Flower's flat run-config.
        recorder: stores the run's events and surrogates; by default nothing is stored.
        device: where the model is learned; by default the device of the settings.
        centre: the public mean that sites subtract first, (d,); None without one.
    """

    def __init__(
        self,
        config: Settings = None,
        recorder: Recorder | None = None,
        device: str = "",
        centre: Tensor | None = None,
    ) -> None:
        super().__init__(config, recorder, device)
        self._received: dict[int, S] = {}
        self._done = False
        self._centre = centre
        # The sites that have identified themselves and fit together; None where none are asked to.
        self._group: Group | None = None

    @abstractmethod
    def parse(self, payload: bytes) -> S:
        """Parse a site's surrogate. Raises SurrogateError."""

    def check(self, sent: S) -> None:
        """What the method requires beyond the run's header and its schema. Raises SurrogateError."""

    def unpack(self, payload: bytes) -> S:
        """Parse and check a site's surrogate: header, schema, what else the method requires, and
        the privacy claim.

        Args:
            payload: its bytes.

        Raises:
            SurrogateError: for a surrogate that is not as it must be.
        """
        sent = self.parse(payload)
        if sent.header.frame:
            Frame.of(sent.header.frame).check(self.dimension(sent))
        if self.config.hides_sites and sent.header.frame != self.config.public_frame(
            self.dimension(sent)
        ):
            raise SurrogateError("numbers in a frame of columns that the settings do not give")
        check_reply(sent, self.config.plan.messages, self.expectation())
        self.check(sent)
        digest = centre_digest(self._centre)
        subtracted = due_centre(self.config, sent.claim, self.dimension(sent), digest)
        check_stated(sent.claim, self.config.mechanism_for("record", subtracted))
        return sent

    @abstractmethod
    def dimension(self, sent: S) -> int:
        """Dimension of the features behind a surrogate."""

    @abstractmethod
    def records(self, sent: S) -> int:
        """Number of records that a surrogate represents."""

    @abstractmethod
    def learn(self, sent: Sequence[S], classes: Sequence[str]) -> Learned:
        """Learn a model.

        Args:
            sent: checked surrogates that fit together, sorted by site; from `in_one_frame`.
            classes: of the model; all that occur if empty.

        Raises:
            RunError: where no model can be learned.
        """

    @abstractmethod
    def defend(self, sent: Sequence[S], classes: tuple[str, ...]) -> Defended[S]:
        """The defence against hostile sites that `learn` applies first.

        Args:
            sent: as in `learn`.
            classes: of the run.
        """

    @abstractmethod
    def restricted(self, sent: S, classes: Sequence[str]) -> S | None:
        """The part of a surrogate for some classes.

        Args:
            sent: a checked surrogate.
            classes: to keep.

        Returns:
            The part; None where the surrogate has none of them.
        """

    def kept(self, sent: S, stored: Callable[[], bytes]) -> S:
        """What stays in memory of an accepted surrogate.

        Args:
            sent: the surrogate.
            stored: reads its bytes again.
        """
        return sent

    def moved(self, sent: S, frame: bytes) -> S:
        """A surrogate in another frame of columns; as it is for a method whose messages have none.

        Args:
            sent: a checked surrogate.
            frame: that it is to have; empty for features as they are.
        """
        return sent

    def in_one_frame(self, sent: Sequence[S]) -> list[S]:
        """All surrogates in the common frame of their columns, before anything compares them."""
        frame = common_frame([each.header.frame for each in sent])
        return [each if each.header.frame == frame else self.moved(each, frame) for each in sent]

    def facts(self, sent: S) -> dict[str, object]:
        """Facts about a surrogate for the events."""
        return {}

    def shared_classes(self, sent: S) -> tuple[str, ...]:
        """The classes in order, if all sites must have the same classes; otherwise empty."""
        return ()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Requests for a surrogate to every connected site.

        Args:
            server_round: not used.
            arrays: not used: no model is sent.
            config: of Flower, which must have no settings.
            grid: through which the sites are asked.

        Raises:
            RunError: when no site is connected.
        """
        check_no_settings(config, "train_config")
        return [] if self._done else self._request_messages(grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check every surrogate, and learn from the accepted ones.

        Args:
            server_round: not used.
            replies: of the sites.

        Returns:
            The arrays of the model, and the metrics of the round; None after the first call, and for
            counts, whose result is a file.

        Raises:
            RunError: when the accepted surrogates are too few.
        """
        if self._done:
            return None, None
        self._done = True
        for reply in replies:
            self._receive(reply)
        self._conclude()
        model, outcome = self.outcome.model, self.outcome
        if model is None:  # The run only counts.
            return None, None
        sent = {"bytes_up": outcome.bytes_up, "used": outcome.count("used")}
        return classifier_arrays(model), metrics_of({**sent, "seconds": outcome.seconds["learn"]})

    def learn_from(self, stored: Sequence[tuple[str, tuple[str, bytes] | SurrogateError]]) -> None:
        """Learn from stored surrogates, without a grid.

        Args:
            stored: pairs of a source (such as a file name) and either the site's verified name with
                the canonical bytes, or the error that refuses them. For each site, the first valid
                surrogate counts.

        Raises:
            RunError: when too few remain.
        """
        self.summary()
        self.recorder.event("invited", sites=len(stored))
        self._agreed()
        taken = set[str]()
        for number, (source, content) in enumerate(stored, 1):
            site = self.outcome.sites[number] = Site(name=source)
            if isinstance(content, SurrogateError):
                self._reject(number, str(content))
                continue
            name, payload = content
            if name in taken:
                self._reject(number, f"a second surrogate of site {name!r}")
                continue
            site.name, site.bytes_up = name, len(payload)
            self._take(number, payload, {})
            if site.fate == "used":
                taken.add(name)
        self._conclude()

    def receive_late(self, grace: float) -> bool:
        """Store surrogates that arrive after the deadline.

        Args:
            grace: seconds to wait from now.

        Returns:
            Whether one did.
        """
        if self._collection is None or not self._collection.unanswered:
            return False
        if grace:
            self.recorder.event(
                "waiting", reason="for sites that missed the deadline", seconds=grace
            )
        came = False
        for reply in self._collection.prolonged(grace):
            self._receive(reply, late=True)
            came = True
        return came

    def _request_messages(self, grid: Grid) -> Iterable[Message]:
        """The requests for surrogates, one for every connected site; in a run with identifications, for
        every site that fits.
        """
        payload, values = self._agreed(), Info(run=self.config.digest)
        if payload is not None:
            values["bytes"] = len(payload)
        if self.config.plan.messages.identifies:
            self._group = self.identify(grid, self.deadline)
            nodes = list(self._group.nodes.values())
        else:
            nodes = self._named(grid, self.invite(grid, self.deadline))
        return [
            self._message(MessageType.TRAIN, node, to_record(payload, values)) for node in nodes
        ]

    def _agreed(self) -> bytes | None:
        """What every site is sent: the public mean, if there is one. A copy stays in the run folder."""
        payload = pack_public_mean(self._centre)
        if payload is not None:
            self.recorder.keep(CENTRE_FILE, payload)
        return payload

    def _named(self, grid: Grid, nodes: list[int]) -> list[int]:
        """The nodes whose site can get the request. If receipts are kept, an unknown node without a
        registered name must first report its name.

        The name is needed to show the site the latest receipts of its ledger. A node without a name
        is left out.
        """
        sites = self.outcome.sites
        unknown = {
            n
            for n in nodes
            if self.receipts and not (sites[n].registered or self.receipts.has_node(n))
        }
        asked = [
            self._message(NAME, node, to_record(None, {"run": self.config.digest}))
            for node in unknown
        ]
        for reply in Collection(grid, asked, min(self.deadline, NAME_SECONDS)) if asked else ():
            unknown.remove(node := self._node(reply))
            # An error here shows again in the reply to the surrogate request.
            with suppress(SurrogateError):
                self._read(reply, self.outcome.sites[node])
        for node in unknown:
            self.outcome.sites[
                node
            ].reason = f"did not report its name within {NAME_SECONDS:g} seconds"
        return [node for node in nodes if node not in unknown]

    def _conclude(self) -> None:
        """Select the surrogates that fit together, and learn from them. Raises RunError."""
        sent = self._usable()
        started = time.perf_counter()
        learned = self.learn(sent, self.config.settings.classes)
        self._apply_defence(learned.defended)
        self._check_quorum(self.outcome.count("used"))
        self._keep_learned(learned, started)

    def _usable(self) -> list[S]:
        """The surrogates that fit together, in an order that does not depend on arrival. Records
        who dropped out; raises RunError when too few are left.
        """
        self._settle_backbone()
        asked = None if self._group is None else set(self._group.nodes.values())
        for node, site in self.outcome.sites.items():
            if site.fate == "dropped" and (asked is None or node in asked):
                self.recorder.event("dropped", site=site.name, reason=site.reason)
        self._check_quorum(self.outcome.count("used"))
        self._settle_frame()
        return in_order(self._received.values())

    def _settle_frame(self) -> None:
        """Bring all surrogates into one frame; reject those of columns that no other site has."""
        moved = dict(
            zip(self._received, self.in_one_frame(list(self._received.values())), strict=True)
        )
        for node, sent in moved.items():
            # A covariance in a file was checked before.
            tables = (each for each in sent.tables.values() if isinstance(each, Tensor))
            if not all(each.isfinite().all() for each in tables):
                self._reject(node, "columns of scales that the other sites' are far from")
            else:
                self._received[node] = sent
        self._check_quorum(self.outcome.count("used"))

    def _receive(self, reply: Message, late: bool = False) -> None:
        """Read one reply; accept its surrogate, or reject it with a reason."""
        node = self._node(reply)
        before = self.outcome.sites[node].name
        try:
            payload, info = self._read(reply, self.outcome.sites[node])
            if payload is None:
                raise SurrogateError("a reply without a surrogate")
        except SurrogateError as error:
            self._reject(node, str(error))
            return
        self._take(node, payload, info, before if late else "")

    def _take(self, node: int, payload: bytes, info: Info, late: str = "") -> None:
        """Check a site's surrogate; accept it, or reject it with a reason.

        late: the site's recorded name, when the surrogate arrives after the deadline; otherwise
        empty.
        """
        site = self.outcome.sites[node]
        try:
            sent = self.unpack(payload)
            name = sent.header.site
            if name != site.name:
                raise SurrogateError(
                    f"the surrogate names another site as its sender: {name[:64]!r}"
                )
        except SurrogateError as error:
            self._reject(node, str(error))
            return
        stored = self.recorder.surrogate(name, payload)
        facts = {
            "bytes": site.bytes_up,
            **self.facts(sent),
            "seconds": seconds_in(info, "fit"),
            "payload": len(payload),
        }
        site.records, site.late = self.records(sent), bool(late)
        if late:
            site.reason = "replied after the deadline; its surrogate is kept for refit"
            self.recorder.event("late", site=name, before=late, reason=site.reason, **facts)
            return
        self.recorder.event("replied", site=name, **facts)
        site.use()
        site.simulated, site.claim = info.get("simulated") is True, sent.claim
        self._received[node] = self.kept(sent, stored)
        for key in ("extract", "fit"):
            if (spent := seconds_in(info, key)) is not None:
                self.outcome.seconds[key] = max(spent, self.outcome.seconds.get(key, 0.0))

    def _reject(self, node: int, reason: str, number: int | None = None) -> None:
        if self._received.pop(node, None) is not None:
            self.recorder.discard(self.outcome.sites[node].name)
        super()._reject(node, reason, number)

    def expectation(self) -> Expectation:
        """Required properties of a surrogate. A late one must fit the model that was learned
        without it.
        """
        config, model, group = self.config, self.outcome.model, self._group
        fingerprint, dimension = config.backbone_fingerprint, 0
        if group is not None:
            fingerprint, dimension = group.fingerprint, group.dimension
        if model is not None:
            fingerprint, dimension = model.header.fingerprint, model.dimension
        return Expectation.of(config, config.settings.classes, fingerprint, dimension)

    def _settle_backbone(self) -> None:
        """Reject sites with another backbone than the run's: that of the settings, else the most
        common one. Raises RunError where no one is.
        """
        received = {
            self.outcome.sites[node].name: (node, sent) for node, sent in self._received.items()
        }
        kinds = {
            name: (sent.header.fingerprint, self.dimension(sent), self.shared_classes(sent))
            for name, (_, sent) in received.items()
        }
        unfit = misfits(kinds)
        if not self.config.settings.classes:
            unfit |= other_truths(
                {
                    name: sent.header.classes
                    for name, (_, sent) in received.items()
                    if name not in unfit
                }
            )
        for name, reason in unfit.items():
            self._reject(received[name][0], reason)


def in_order(sent: Iterable[S]) -> list[S]:
    """Sort by site name, so that the order of arrival has no effect."""
    return sorted(sent, key=lambda each: (len(each.header.site), each.header.site))

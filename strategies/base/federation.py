"""Base class of all runs: sends requests to sites, reads their replies and identifications, and sends
the learned model back.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedsurrogate.common.backbones.backbone_names import shown
from fedsurrogate.common.data_report import DATA, reports_from
from fedsurrogate.common.errors import (
    PUBLIC_SENTENCES,
    SITE_NAME,
    FedSurrogateError,
    RunError,
    SurrogateError,
)
from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.models.devices import pick_device
from fedsurrogate.common.signed_models.signed_model import (
    SUFFIX,
    SignedModel,
    save_signed_model,
    signed_values,
)
from fedsurrogate.common.targets.metrics import metrics_of
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier
from fedsurrogate.common.wire.records import Info, check_form, from_record, record_bytes, to_record
from fedsurrogate.common.wire.tensors import VERSION, check_class_number

from ..flower import FlowerStrategy, Settings, no_reply, settings_of
from .collection import Collection, Recorder, Unrecorded, check_quorum, connected_nodes
from .identifications import Group, Identification, identification, settle
from .outcome import (
    NO_REPLY,
    Defended,
    Learned,
    Outcome,
    Receipts,
    RefusedError,
    Registered,
    Site,
    addressed,
    admit,
    check_name,
    downstream_in,
    metric_values_in,
    nameless,
    numbers_in,
    quality_in,
    share_in,
    whole_number,
)
from .training import Training

COMPARE = f"{MessageType.QUERY}.compare"
HELLO = f"{MessageType.QUERY}.hello"
PICTURE_POINTS = 1500


class Federation(FlowerStrategy):
    """A run over a grid of sites. Subclasses define the requests, and learn a model from the
    replies.

    Args:
        config: the settings, or Flower's flat run-config.
        recorder: stores the run's events; by default nothing is stored.
        device: where the model is learned; by default the device of the settings.

    Attributes:
        registered: the table of registered sites; without it a site's name is the one it reports.
    """

    registered: Registered | None = None
    # Whether all sites run on this machine, with the run's own data: then there is nothing to hide,
    # and their reasons are shown. The coordinator's process knows this from its engine, never from
    # a reply.
    simulated = False
    # Signs the learned model for the sites, which keep it; None in a simulation, whose sites keep
    # nothing.
    signer: Callable[[Outcome], SignedModel] | None = None

    def __init__(
        self, config: Settings = None, recorder: Recorder | None = None, device: str = ""
    ) -> None:
        super().__init__()
        self.config = settings_of(type(self), config)
        self.recorder: Recorder = Unrecorded() if recorder is None else recorder
        self.device = device or pick_device(self.config.settings.device)
        own = self.config.settings
        self.deadline = own.deadline
        self.outcome = Outcome()
        self.receipts = Receipts(own.output_dir, own.resume, self.recorder)
        # Messages without a known id, which Flower gives them when it sends them; and the nodes of
        # those with one.
        self._sent: list[Message] = []
        self._receivers: dict[str, int] = {}
        # What sites had sent in the rounds of a run that this one continues.
        self._bytes_before = 0
        # The replies of the one round.
        self._collection: Collection | None = None
        # Connected nodes. No other site may take the name of one of them, unless that one was
        # rejected.
        self._connected: set[int] = set()
        self._named_nodes: dict[str, int] = {}  # The last node that took a name.

    def run(self, grid: Grid, deadline: float = 0.0) -> float | None:
        """Run the one round.

        Methods of several rounds or chain steps have their own loop.

        Args:
            grid: through which the sites are asked.
            deadline: seconds to wait for replies; 0 for that of the settings.

        Returns:
            The accuracy over all sites' own test splits; None if no site reported it.

        Raises:
            RunError: when there is no site, or too few are left.
        """
        self.deadline = deadline or self.config.settings.deadline
        self.summary()
        started = time.perf_counter()
        messages = self.configure_train(1, self.initial, ConfigRecord(), grid)
        self._collection = Collection(grid, messages, self.deadline)
        self._finish_round(1, self.aggregate_train(1, self._collection))
        spent = self.outcome.seconds
        spent["wait"] = max(0.0, time.perf_counter() - started - sum(spent.values()))
        return self.evaluate(grid, self.deadline)

    def receive_late(self, grace: float) -> bool:
        """Accept replies that arrive after the deadline.

        This base class accepts none: a finished round cannot use them.

        Args:
            grace: seconds after the deadline.

        Returns:
            Whether any did.
        """
        return False

    def identify(self, grid: Grid, deadline: float) -> Group:
        """Ask every connected site for its identification, and select the sites that fit together.

        Args:
            grid: through which the sites are asked.
            deadline: seconds to wait for them.

        Raises:
            RunError: when too few sites fit together, it cannot be told which do, or none reports its
                classes.
        """
        nodes, identified = self.invite(grid, deadline), dict[int, Identification]()
        for reply in Collection(grid, map(self.hello, nodes), deadline):
            node = self._node(reply)
            site = self.outcome.sites[node]
            try:
                _, info = self._read(reply, site)
                identified[node] = identification(site.name, info)
            except SurrogateError as error:
                self._reject(node, str(error))
                continue
            own = identified[node]
            site.simulated = own.simulated
            self.recorder.event(
                "identified",
                site=site.name,
                version=site.version,
                fingerprint=shown(own.fingerprint),
                dimension=own.dimension,
                classes=len(own.classes),
            )
        group, misfits = settle(
            identified,
            self.config.settings.classes,
            self.config.backbone_fingerprint,
            self.config.private,
        )
        for node, reason in misfits.items():
            self.outcome.sites[node].barred = True
            self._reject(node, reason)
        for node, site in self.outcome.sites.items():
            if node not in identified and site.fate == "dropped":
                self.recorder.event("dropped", site=site.name, reason=NO_REPLY)
        self._check_quorum(len(group.nodes), len(nodes), besides=group.nodes.values())
        if not group.classes:
            raise RunError("no site reports its classes; set classes in the run's settings")
        check_class_number(group.classes)
        return group

    def _check_quorum(
        self,
        used: int,
        invited: int = 0,
        what: str = "can be used",
        besides: Container[int] = (),
    ) -> None:
        """Check that enough sites can be used. Raises RunError.

        invited: number of invited sites; 0 for all that have been connected. what: see
        `check_quorum`. besides: nodes that can be used, and have sent nothing yet.
        """
        own, sites = self.config.settings, len(self.outcome.sites)
        reasons = self.outcome.reasons(besides)
        check_quorum(used, invited or sites, own.site_count, own.quorum, what, reasons)

    def invite(self, grid: Grid, deadline: float, number: int | None = None) -> list[int]:
        """The connected nodes that may take part.

        Args:
            grid: that they are connected to.
            deadline: seconds to wait for them.
            number: of the round; None at the start of a run, which waits for all expected sites.

        Raises:
            RunError: when too few sites are connected.
        """
        config, names = self.config, None if self.registered is None else self._asked_names
        if number is None:
            self._check_names()
        wanted = (
            (config.settings.site_count, config.settings.quorum) if number is None else (0, 0.0)
        )
        nodes = connected_nodes(grid, *wanted, deadline, self.recorder, names)
        if self.registered is not None and config.settings.site_names:
            others = self.registered.names().keys() - self._asked_names().keys()
            nodes = [node for node in nodes if node not in others]
        allowed = admit(
            self.outcome, self.recorder, nodes, None if names is None else names(), number
        )
        self._connected = set(allowed)
        if number is None:
            self.outcome.names = "claimed" if names is None else "registered"
            for node in allowed if names is not None else ():
                self.recorder.event("invited", site=self.outcome.sites[node].name)
            self.recorder.event("invited", sites=len(allowed), names=self.outcome.names)
            for reason in self.config.gaps(len(allowed)):
                self.recorder.event("note", reason=reason)
        return allowed

    def _asked_names(self) -> dict[int, str]:
        """The registered sites that the run asks, by node: those that the settings name, or all."""
        assert self.registered is not None
        wanted = self.config.settings.site_names
        names = self.registered.names()
        return {node: name for node, name in names.items() if not wanted or name in wanted}

    def _check_names(self) -> None:
        """Raise RunError where it cannot be known before a site is asked whether the run names it."""
        wanted = set(self.config.settings.site_names)
        if wanted and self.registered is None:
            raise RunError(
                f"sites = {','.join(sorted(wanted))!r} names sites, and without a table of registered "
                "sites nobody knows a site's name before it is asked; register their keys "
                "(`coordinator sites accept`), or give the number of sites"
            )
        if self.registered is not None and (
            unknown := wanted - {*self.registered.names().values()}
        ):
            known = ", ".join(sorted(self.registered.names().values()))
            raise RunError(
                f"sites names {', '.join(sorted(unknown))}, and no such site is registered; those that "
                f"are: {known}"
            )

    def hello(self, node: int) -> Message:
        """The request for a site's identification."""
        return self._message(HELLO, node, to_record(None, {"run": self.config.digest}))

    def evaluate(self, grid: Grid, deadline: float) -> float | None:
        """Send the model to the sites for evaluation. In a simulation, one site also evaluates it
        on all test data.

        Args:
            grid: through which the sites are asked.
            deadline: seconds to wait for them.

        Returns:
            The accuracy over all sites' own test splits; None if no site reported it.
        """
        started = time.perf_counter()
        accuracy = self._judge(Collection(grid, self._broadcast(), deadline))
        self._compare(grid, deadline)
        self.outcome.seconds["evaluate"] = time.perf_counter() - started
        return accuracy

    def _broadcast(self) -> Iterable[Message]:
        """Messages with the result for every site whose surrogate was used."""
        payload, info = self._evaluated_by_sites()
        values = info if payload is None else info | {"bytes": len(payload)}
        return [
            self._message(MessageType.EVALUATE, node, to_record(payload, values))
            for node in self.outcome.used
        ]

    def _evaluated_by_sites(self) -> tuple[bytes | None, Info]:
        """What sites evaluate: the payload, and values next to it."""
        return self._payload(), self._signed()

    def _signed(self) -> Info:
        """What lets a site keep the model as a signed file. A model that cannot be signed is still
        evaluated.
        """
        if self.signer is None:
            return {}
        try:
            signed = self.signer(self.outcome)
            self.recorder.keep(f"model{SUFFIX}", save_signed_model(signed))
        except (FedSurrogateError, OSError, ValueError, RuntimeError) as error:
            self.recorder.event("model-not-signed", reason=str(error))
            return {}
        return signed_values(signed)

    def _judge(self, replies: Iterable[Message]) -> float | None:
        """Record each site's accuracy on its own test split; return the accuracy over all these
        splits together.
        """
        silent = {node: self.outcome.sites[node].name for node in self.outcome.used}
        for node in silent:
            self.outcome.sites[node].correct = self.outcome.sites[node].tested = 0
        for reply in replies:
            node = self._node(reply)
            site = self.outcome.sites[node]
            del silent[node]
            try:
                _, info = self._read(reply, site)
                correct, tested = whole_number(info, "correct"), whole_number(info, "tested")
                if correct > tested:
                    raise SurrogateError(
                        f"{correct} correct predictions reported for only {tested} test records"
                    )
            except SurrogateError as error:
                self.recorder.event("evaluation-failed", site=site.name, reason=str(error))
                continue
            site.correct, site.tested, site.downstream = correct, tested, downstream_in(info)
            site.measured = metric_values_in(info)
            if site.measured:
                metric_values = metrics_of(site.measured)
                self.recorder.event(
                    "evaluated", site=site.name, tested=tested, metric_values=metric_values
                )
            elif site.tested:
                self.recorder.event(
                    "evaluated",
                    site=site.name,
                    accuracy=site.correct / site.tested,
                    tested=site.tested,
                )
        for name in silent.values():
            self.recorder.event("evaluation-failed", site=name, reason=NO_REPLY)
        tested = sum(site.tested for site in self.outcome.sites.values())
        correct = sum(site.correct for site in self.outcome.sites.values())
        return correct / tested if tested and self.config.target is None else None

    def _message(self, kind: str, node: int, record: RecordDict) -> Message:
        site = self.outcome.sites[node]
        self.receipts.show(record, site.name, node)
        if site.registered:
            record = addressed(record, site.name)
        site.bytes_down += record_bytes(record)
        # Flower derives a message's id from its content, and accepts a reply from any sender that
        # knows this id and the node's id. The random group id makes the message id unpredictable.
        message = Message(record, node, kind, group_id=secrets.token_hex(16))
        self._sent.append(message)
        return message

    def _node(self, reply: Message) -> int:
        """The node of a reply, found by its request: an error reply from the SuperLink has the
        SuperLink's node id.
        """
        wanted = reply.metadata.reply_to_message_id
        if wanted not in self._receivers:
            self._receivers |= {
                m.metadata.message_id: m.metadata.dst_node_id
                for m in self._sent
                if m.metadata.message_id
            }
            self._sent = [m for m in self._sent if not m.metadata.message_id]
        return self._receivers[wanted]

    def _read(self, reply: Message, site: Site) -> tuple[bytes | None, Info]:
        """Payload and report of a reply. Raises SurrogateError when the site failed or the reply is
        too large.
        """
        if reply.has_error():
            raise SurrogateError(
                no_reply(reply.error.code, reply.error.reason if self.simulated else None)
            )
        check_form(reply.content)
        site.bytes_up += record_bytes(reply.content)
        payload, info = from_record(reply.content, self.config.settings.max_payload_mib * 2**20)
        if site.registered:
            check_name(site, info)
        elif self.registered is None:
            self._name(site, info.get("site"))
        if VERSION.fullmatch(version := str(info.get("version", ""))):
            site.version = version
        if (status := info.get("status")) != "ok":
            sentence = PUBLIC_SENTENCES.get(str(status), PUBLIC_SENTENCES["internal"])
            raise RefusedError(
                f"{sentence}: {info['reason']}"
                if self.simulated and info.get("reason")
                else sentence,
                info,
            )
        self.receipts.take(site.name if site.node else "", site.node, info.get("receipt"))
        return payload, info

    def _name(self, site: Site, name: object) -> None:
        """Set a site's name to the one it reports, once. A name of a connected site that was not
        rejected is refused.
        """
        if site.fate == "used" or not (isinstance(name, str) and SITE_NAME.fullmatch(name)):
            return
        other = self.outcome.sites.get(self._named_nodes.get(name, site.node), site)
        if other is not site and other.name == name:
            gone = other.node not in self._connected
            if not (gone or other.fate == "rejected"):
                return
            other.name, other.heard = nameless(other.node), False
            if gone:  # The same site has returned with a new node id.
                site.bytes_up, site.bytes_down = (
                    site.bytes_up + other.bytes_up,
                    site.bytes_down + other.bytes_down,
                )
                del self.outcome.sites[other.node]
        site.name, site.heard, self._named_nodes[name] = name, True, site.node

    def _reject(self, node: int, reason: str, number: int | None = None) -> None:
        site = self.outcome.sites[node]
        site.fate, site.reason = "rejected", reason
        self.recorder.event(
            "rejected", site=site.name, reason=reason, bytes=site.bytes_up, round=number
        )

    def _apply_defence(self, defended: Defended[Any], number: int | None = None) -> None:
        """Record the sites with a capped weight or a bounded change, what each site changes, and the
        sites that are left out, whose surrogates stay stored.
        """
        nodes = {site.name: node for node, site in self.outcome.sites.items()}
        for name, share in defended.capped.items():
            if name in nodes and self.outcome.sites[nodes[name]].kept_share != share:
                self.outcome.sites[nodes[name]].kept_share = share
                self.recorder.event("capped", site=name, kept=round(share, 6), round=number)
        if defended.bounded:
            kept = {name: float(f"{share:.3g}") for name, share in defended.bounded.items()}
            self.recorder.event("bounded", kept=kept, round=number)
        for name, effect in defended.effects.items():
            self.outcome.sites[nodes[name]].effect = effect
        if defended.effects:
            rounded = {name: each.rounded() for name, each in defended.effects.items()}
            self.recorder.event("effects", sites=rounded, round=number)
        for suspect in defended.suspects:
            self.outcome.sites[nodes[suspect.site]].suspect = suspect.reason
            facts = {
                "kind": suspect.kind,
                "score": round(suspect.score, 3),
                "reason": suspect.reason,
                "round": number,
            }
            self.recorder.event("suspect", site=suspect.site, **facts)
            Federation._reject(self, nodes[suspect.site], f"suspect: {suspect.reason}", number)

    def _keep_learned(
        self, learned: Learned, started: float, facts: Mapping[str, str | float] | None = None
    ) -> None:
        """Record what was learned since `started`, with more facts about the learning."""
        outcome = self.outcome
        outcome.learned, outcome.model = learned.source, learned.model
        outcome.learning = {**learned.facts, **(facts or {})}
        outcome.seconds["learn"] = time.perf_counter() - started
        classes, seconds = len(learned.model.header.classes), outcome.seconds["learn"]
        self.recorder.event("learned", **outcome.learning, seconds=seconds, classes=classes)

    def _payload(self) -> bytes:
        assert self.outcome.model is not None  # a subclass has learned it or raised
        return pack_classifier(self.outcome.model)

    def _simulated(self) -> bool:
        """Whether the run is a simulation. All used sites must report so: one site alone could lie."""
        used = self.outcome.used
        return bool(used) and all(self.outcome.sites[node].simulated for node in used)

    def _compare(self, grid: Grid, deadline: float) -> None:
        """In a simulation, ask one site to evaluate the model, and baselines if requested, on the
        whole test split.
        """
        if not self._simulated():
            return
        try:
            info = self._judged(grid, deadline, {})
        except SurrogateError as error:
            self.recorder.event("comparison-failed", reason=str(error))
            return
        for key in info:
            if (accuracy := share_in(info, key)) is not None and key.startswith("accuracy."):
                self.outcome.accuracy[key.removeprefix("accuracy.")] = accuracy
            elif key.startswith("bytes."):
                self.outcome.compare_bytes[key.removeprefix("bytes.")] = whole_number(info, key)
        self.outcome.measured = metric_values_in(info)
        self.outcome.quality = quality_in(info)
        self.outcome.data = [each.facts() for each in reports_from(str(info.get(DATA, "")))]
        if self.outcome.measured:
            self.recorder.event("compared", metric_values=metrics_of(self.outcome.measured))
            return
        self._picture(info)
        self.recorder.event("compared", **self.outcome.accuracy)

    def _accuracy(self, grid: Grid) -> float | None:
        """Accuracy of the current model on all test data; None outside simulations, without a reply,
        or for another target than classes.
        """
        if not self._simulated() or self.config.target is not None:
            return None
        try:
            return share_in(self._judged(grid, self.deadline, {"brief": True}), "accuracy.model")
        except SurrogateError as error:
            self.recorder.event("comparison-failed", reason=str(error))
            return None

    def classifier(self, training: Training) -> Classifier:
        """The classifier made of the model after any round, of a run in rounds."""
        return training.classifier()

    def _entry(self, round: int, asked: int, used: int, grid: Grid) -> dict[str, object]:
        """The facts of a round that has just ended, after so many that were charged, and of which so many
        sites were used.
        """
        facts: dict[str, object] = {
            "round": round,
            "accuracy": self._accuracy(grid),
            "bytes_up": self._bytes_before + self.outcome.bytes_up,
            "used": used,
        }
        if self.config.mechanism is not None:
            # With the rounds that were charged and did not end.
            facts["epsilon"] = self.config.mechanism.epsilon_after(asked)
        return facts

    def _judged(self, grid: Grid, deadline: float, values: Info) -> Info:
        """One simulated site's evaluation of the model on the whole test split. Raises
        SurrogateError.
        """
        node = self.outcome.used[0]
        payload = self._payload()
        message = Message(to_record(payload, values | {"bytes": len(payload)}), node, COMPARE)
        for reply in Collection(grid, [message], deadline):
            return self._read(reply, Site(name=""))[1]
        raise SurrogateError(NO_REPLY)

    def _picture(self, info: Info) -> None:
        """Points of the real test data and of the synthetic training data, projected onto the
        model's plane.
        """
        points = self.outcome.points
        model = unpack_classifier(self._payload())
        if (plane := model.plane()) is None:
            return
        if self.outcome.learned is not None:
            features, labels = self.outcome.learned(self.config.settings.seed, PICTURE_POINTS)
            flat = (features @ plane).T.tolist()
            points["synthetic"] = {"x": flat[0], "y": flat[1], "label": labels.tolist()}
        points["real"] = {name: numbers_in(info, f"points.{name}") for name in ("x", "y", "label")}

"""FedPFT at the coordinator: one round that collects mixtures, learns a head from them and takes it back to the sites."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from common.checks import SITE_NAME, Expectation, check_surrogate
from common.claims import check_claim
from common.config import RunConfig, run_digest
from common.errors import PUBLIC_SENTENCES, SurrogateError
from common.frames import centre_digest
from common.surrogates import AnySurrogate, SumsSurrogate
from common.wire import Info, from_record, pack_head, pack_question, record_bytes, to_record, unpack_head, unpack_surrogate
from strategies.collect import Collection, Recorder, check_quorum, connected_nodes
from strategies.learning import learn
from strategies.outcome import NO_REPLY, Outcome, Points, Site
from strategies.public import read_centre

COMPARE = f"{MessageType.QUERY}.compare"
PICTURE_POINTS = 1500
CENTRE_FILE = "centre.pb"


class FedPFT(Strategy):
    """One-shot parametric feature transfer (Beitollahi et al. 2024, algorithm 1)."""

    def __init__(self, config: RunConfig, recorder: Recorder, device: str = "cpu") -> None:
        self.config = config
        self.recorder = recorder
        self.device = device
        self.outcome = Outcome()
        self._surrogates: dict[int, AnySurrogate] = {}
        self._sent: list[Message] = []
        self._centre = read_centre(config.fedpft.public)

    def summary(self) -> None:
        """Record what is about to happen."""
        self.recorder.event("configured", method="fedpft", **self.config.fedpft.model_dump())

    def start(  # type: ignore[override]
        self, grid: Grid, initial_arrays: ArrayRecord | None = None, num_rounds: int = 1, timeout: float = 0.0
    ) -> Result:
        """Run the one round. Raises RunError when there is no site or the quorum is missed.

        Differs from Flower's loop: replies are checked as they arrive, and late ones are still kept for `relearn`.
        """
        deadline = timeout or self.config.deadline
        arrays, settings = initial_arrays or ArrayRecord(), ConfigRecord()
        self.summary()
        started = time.perf_counter()
        asked = Collection(grid, self.configure_train(1, arrays, settings, grid), deadline)
        self.aggregate_train(1, asked)
        spent = self.outcome.seconds
        spent["wait"] = max(0.0, time.perf_counter() - started - sum(spent.values()))
        started = time.perf_counter()
        broadcast = Collection(grid, self.configure_evaluate(1, arrays, settings, grid), deadline)
        metrics = self.aggregate_evaluate(1, broadcast)
        self._compare(grid, deadline)
        self.outcome.seconds["evaluate"] = time.perf_counter() - started
        for reply in asked.arrived():
            self._receive(reply, late=True)
        return Result(evaluate_metrics_clientapp={1: metrics} if metrics else {})

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask every connected site for its surrogate."""
        nodes = connected_nodes(grid, self.config.sites, self.config.deadline)
        self.outcome.sites = {node: Site(name=f"node {node}") for node in nodes}
        self.recorder.event("invited", sites=len(nodes))
        question, told = pack_question(self._centre), Info(run=run_digest(self.config))
        if question is not None:
            self.recorder.keep(CENTRE_FILE, question)
            told["bytes"] = len(question)
        return [self._message(MessageType.TRAIN, node, to_record(question, told)) for node in nodes]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check every surrogate, settle which fit together, and learn the head. Raises RunError."""
        for reply in replies:
            self._receive(reply)
        self._settle_backbone()
        outcome, config = self.outcome, self.config
        for site in outcome.sites.values():
            if site.fate == "dropped":
                self.recorder.event("dropped", site=site.name, reason=site.reason)
        check_quorum(outcome.count("used"), len(outcome.sites), config.sites, config.quorum)
        outcome.surrogates = sorted(self._surrogates.values(), key=lambda s: (len(s.header.site), s.header.site))
        started = time.perf_counter()
        outcome.learned = learn(outcome.surrogates, config, self.device, config.classes, self._centre)
        outcome.head = outcome.learned.head
        outcome.seconds["learn"] = time.perf_counter() - started
        self.recorder.event("learned", seconds=outcome.seconds["learn"], classes=len(outcome.head.header.classes))
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Take the head to every site whose surrogate was used."""
        payload = self._head_payload()
        used = [node for node, site in self.outcome.sites.items() if site.fate == "used"]
        return [self._message(MessageType.EVALUATE, node, to_record(payload, {"bytes": len(payload)})) for node in used]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Take in each site's accuracy on its own test split; return the accuracy over all of these together."""
        silent = [node for node, site in self.outcome.sites.items() if site.fate == "used"]
        for reply in replies:
            node = self._node(reply)
            site = self.outcome.sites[node]
            silent.remove(node)
            try:
                _, info = self._read(reply, site)
                correct, tested = _whole(info, "correct"), _whole(info, "tested")
                if correct > tested:
                    raise SurrogateError(f"{correct} right answers on {tested} records")
            except SurrogateError as error:
                self.recorder.event("evaluation-failed", site=site.name, reason=str(error))
                continue
            site.correct, site.tested = correct, tested
            if site.tested:
                self.recorder.event("evaluated", site=site.name, accuracy=site.correct / site.tested, tested=site.tested)
        for node in silent:
            self.recorder.event("evaluation-failed", site=self.outcome.sites[node].name, reason=NO_REPLY)
        tested = sum(site.tested for site in self.outcome.sites.values())
        correct = sum(site.correct for site in self.outcome.sites.values())
        return MetricRecord({"accuracy": correct / tested}) if tested else None

    def _message(self, kind: str, node: int, record: RecordDict) -> Message:
        self.outcome.sites[node].bytes_down += record_bytes(record)
        message = Message(record, node, kind)
        self._sent.append(message)
        return message

    def _node(self, reply: Message) -> int:
        """The node a reply comes from. Errors made by the SuperLink carry its own id, so the question is what counts."""
        return next(
            m.metadata.dst_node_id for m in self._sent if m.metadata.message_id == reply.metadata.reply_to_message_id
        )

    def _read(self, reply: Message, site: Site) -> tuple[bytes | None, Info]:
        """Payload and numbers of a reply. Raises SurrogateError when the site failed or sent too much."""
        if reply.has_error():
            # Flower puts the text of an exception here, which may hold a path; only the number is kept.
            raise SurrogateError(f"the site's app did not answer (Flower error code {reply.error.code})")
        try:
            site.bytes_up += record_bytes(reply.content)
        except (IndexError, ValueError):
            # Flower's counters break on empty values; an honest site sends none.
            raise SurrogateError("a reply with empty values, which cannot be counted") from None
        payload, info = from_record(reply.content, self.config.max_payload_mib * 2**20)
        self._name(site, info.get("site"))
        if (status := info.get("status")) != "ok":
            raise SurrogateError(PUBLIC_SENTENCES.get(str(status), PUBLIC_SENTENCES["internal"]))
        return payload, info

    def _name(self, site: Site, name: object) -> None:
        """Call a site what it calls itself, once and for all, unless a site that was not rejected has that name already."""
        if site.fate == "used" or not (isinstance(name, str) and SITE_NAME.fullmatch(name)):
            return
        others = {node: other for node, other in self.outcome.sites.items() if other is not site and other.name == name}
        if all(other.fate == "rejected" for other in others.values()):
            site.name = name
            for node, other in others.items():
                other.name = f"node {node}"

    def _receive(self, reply: Message, late: bool = False) -> None:
        """Check one surrogate and keep it, or refuse it with a reason."""
        node = self._node(reply)
        site = self.outcome.sites[node]
        try:
            payload, info = self._read(reply, site)
            if payload is None:
                raise SurrogateError("a reply without a surrogate")
            surrogate = unpack_surrogate(payload)
            check_surrogate(surrogate, self._expectation())
            check_claim(surrogate.claim, self.config, centre_digest(self._centre))
            name = surrogate.header.site
            if name != site.name:
                raise SurrogateError(f"a surrogate in the name of {name[:64]!r}, which is another site")
        except SurrogateError as error:
            self._reject(node, str(error))
            return
        self.recorder.surrogate(name, payload)
        counts = dict(zip(surrogate.header.classes, surrogate.counts, strict=True))
        facts = {"bytes": site.bytes_up, "counts": counts, "seconds": _seconds(info, "fit"), "payload": len(payload)}
        self.recorder.event("late" if late else "replied", site=name, **facts)
        if late:
            site.reason = "replied after the deadline; its surrogate is kept for relearn"
            return
        site.fate, site.reason, site.simulated = "used", "", info.get("simulated") is True
        self._surrogates[node] = surrogate
        for key in ("extract", "fit"):
            if (spent := _seconds(info, key)) is not None:
                self.outcome.seconds[key] = max(spent, self.outcome.seconds.get(key, 0.0))

    def _reject(self, node: int, reason: str) -> None:
        site = self.outcome.sites[node]
        site.fate, site.reason = "rejected", reason
        if self._surrogates.pop(node, None) is not None:
            self.recorder.discard(site.name)
        self.recorder.event("rejected", site=site.name, reason=reason, bytes=site.bytes_up)

    def _expectation(self) -> Expectation:
        """What a surrogate must look like; a late one must fit the head that was learned without it."""
        config, head = self.config, self.outcome.head
        return Expectation(
            method=config.method,
            run=run_digest(config),
            family="spherical" if config.mechanism == "dp-em" else config.fedpft.covariance,
            components=config.fedpft.components,
            rank=config.fedpft.rank,
            classes=config.classes,
            fingerprint=head.header.fingerprint if head else config.fingerprint,
            dimension=head.weight.shape[1] if head else 0,
        )

    def _settle_backbone(self) -> None:
        """One run has one backbone. Without a `fingerprint` in the settings it is the one most sites have."""
        kinds = {
            node: (s.header.fingerprint, s.dimension, s.header.classes if isinstance(s, SumsSurrogate) else ())
            for node, s in self._surrogates.items()
        }
        if not kinds:
            return
        records: Counter[tuple[str, int, tuple[str, ...]]] = Counter()
        for node, kind in kinds.items():
            records[kind] += sum(self._surrogates[node].counts)
        sites = Counter(kinds.values())
        fingerprint, dimension, classes = max(sites, key=lambda kind: (sites[kind], records[kind]))
        for node, (own_fingerprint, own_dimension, own_classes) in kinds.items():
            if own_fingerprint != fingerprint:
                reason = f"backbone fingerprint {own_fingerprint[:16]} differs from the other sites' {fingerprint[:16]}"
            elif own_dimension != dimension:
                reason = f"features of dimension {own_dimension}; the other sites have {dimension}"
            elif own_classes != classes:
                reason = "noisy sums of other classes than the other sites', or in another order; name classes in the run"
            else:
                continue
            self._reject(node, reason)

    def _head_payload(self) -> bytes:
        assert self.outcome.head is not None  # aggregate_train has learned it or raised
        return pack_head(self.outcome.head)

    def _compare(self, grid: Grid, deadline: float) -> None:
        """In a simulation, ask one site to judge the head on the whole test split, beside baselines when wanted."""
        used = {node: site for node, site in self.outcome.sites.items() if site.fate == "used"}
        # In a deployment one site could claim to be simulated; all of them would have to.
        if not all(site.simulated for site in used.values()):
            return
        node = next(iter(used))
        payload = self._head_payload()
        message = Message(to_record(payload, {"bytes": len(payload)}), node, COMPARE)
        for reply in Collection(grid, [message], deadline):
            try:
                _, info = self._read(reply, Site(name=""))
            except SurrogateError as error:
                self.recorder.event("comparison-failed", reason=str(error))
                return
            for key, value in info.items():
                if key.startswith("accuracy.") and isinstance(value, float) and math.isfinite(value):
                    self.outcome.accuracy[key.removeprefix("accuracy.")] = value
                elif key.startswith("bytes.") and isinstance(value, int):
                    self.outcome.compare_bytes[key.removeprefix("bytes.")] = value
            self._picture(payload, info)
            self.recorder.event("compared", **self.outcome.accuracy)
            return
        self.recorder.event("comparison-failed", reason=NO_REPLY)

    def _picture(self, payload: bytes, info: Info) -> None:
        head = unpack_head(payload)
        assert self.outcome.learned is not None  # aggregate_train has learned it or raised
        features, labels = self.outcome.learned.sample(self.config.seed, PICTURE_POINTS)
        flat = (features @ head.plane()).T.tolist()
        self.outcome.points["synthetic"] = Points(flat[0], flat[1], labels.tolist())
        x, y = (cast(list[float], info.get(f"points.{axis}", [])) for axis in ("x", "y"))
        self.outcome.points["real"] = Points(x, y, cast(list[int], info.get("points.label", [])))


def _whole(info: Info, key: str) -> int:
    value = info.get(key)
    return value if isinstance(value, int) and 0 <= value < 2**40 else 0


def _seconds(info: Info, key: str) -> float | None:
    value = info.get(f"{key}-seconds")
    return value if isinstance(value, float) and 0 <= value < math.inf else None

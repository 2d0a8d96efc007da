"""The local grid with optional faults, and runs over it."""

from __future__ import annotations

import itertools
import json
import logging
import re
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedsurrogate.client_app.clientapp import app as client_app
from fedsurrogate.client_app.governance.gate import open_ledger
from fedsurrogate.client_app.governance.policy import confirm_policy, policy_of
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.settings.base import flatten
from fedsurrogate.common.wire.records import INFO, PAYLOAD, record_bytes
from fedsurrogate.server_app.deployment.local_engine import FIRST_NODE, LocalGrid
from fedsurrogate.server_app.serverapp import app as server_app

Scalar = str | int | float | bool
NodeConfig = dict[str, Scalar]
Json = dict[str, Any]

ROOT = Path(__file__).parents[1]
# Every run of Flower has its own id.
RUN_IDS = itertools.count(1000)
# Features of bundled data, for all tests of a process.
CACHE = tempfile.TemporaryDirectory(prefix="features-")
# Little training, for tests that need no good head.
FAST: dict[str, Any] = {"head.min-steps": 20, "head.epochs": 1}
POLL = "fedsurrogate.strategies.base.collection.POLL_SECONDS"
DRAWN = "fedsurrogate.server_app.serverapp.write_report"
JUDGED = "fedsurrogate.client_app.methods.evaluation.quality_of"
# Part of paths that must not leave a site.
SECRET = "geheim7f3a"


@dataclass(frozen=True)
class Fault:
    """Faults of one node. Default: none.

    offline: never replies. late: the reply is held back until a message of this type has been
    pushed to some node. pulls: the reply is held back for so many pulls. crash: the ClientApp
    raises this; `kind` limits faults to one message type. payload changes the bytes of the reply
    (announcing the new size), reply changes the whole record.
    """

    offline: bool = False
    late: str = ""
    pulls: int = 0
    crash: Exception | None = None
    payload: Callable[[bytes], bytes] | None = None
    reply: Callable[[RecordDict], None] | None = None
    kind: str = "train"


class InProcessGrid(LocalGrid):
    """The local grid with faults. `sent` and `received` are the messages that crossed the wire."""

    def __init__(
        self,
        node_configs: Sequence[NodeConfig],
        faults: Mapping[int, Fault] | None = None,
        run_id: int = 77,
    ) -> None:
        super().__init__(client_app, node_configs, run_id)
        self.faults = {FIRST_NODE + index: fault for index, fault in (faults or {}).items()}
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self._pulls: Counter[str] = Counter()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        names = list(message_ids)
        self._pulls.update(names)
        arrived = list(super().pull_messages(names))
        self.received += arrived
        return arrived

    def counted(self, node: int, kinds: Sequence[str] = ("train", "evaluate")) -> tuple[int, int]:
        """Bytes sent up from and down to the node of this index, in messages of these types."""
        number = FIRST_NODE + node
        up = (m for m in self.received if m.metadata.src_node_id == number and m.has_content())
        down = (m for m in self.sent if m.metadata.dst_node_id == number)
        totals = [
            sum(record_bytes(m.content) for m in way if m.metadata.message_type in kinds)
            for way in (up, down)
        ]
        return totals[0], totals[1]

    def replies(self, node: int, kind: str = "train") -> list[Message]:
        """Replies of the node of this index to messages of one type."""
        of = FIRST_NODE + node
        return [
            m
            for m in self.received
            if (m.metadata.src_node_id, m.metadata.message_type) == (of, kind)
        ]

    def asked(self, kind: str) -> list[int]:
        """Indices of the nodes that were sent messages of this type."""
        return [
            m.metadata.dst_node_id - FIRST_NODE
            for m in self.sent
            if m.metadata.message_type == kind
        ]

    def _deliver(self, message: Message) -> None:
        if not self._fault(message).offline:
            super()._deliver(message)

    def _answer(self, message: Message, context: Context) -> Message:
        fault = self._fault(message)
        if fault.crash is not None:
            raise fault.crash
        reply = super()._answer(message, context)
        _tamper(reply.content, fault)
        return reply

    def _fault(self, message: Message) -> Fault:
        fault = self.faults.get(message.metadata.dst_node_id, Fault())
        return fault if fault.kind == message.metadata.message_type else Fault()

    def _may_arrive(self, message_id: str) -> bool:
        reply = self._waiting[message_id]
        fault = self.faults.get(reply.metadata.src_node_id, Fault())
        if fault.kind != reply.metadata.message_type:
            return True
        held = bool(fault.late) and not self.asked(fault.late)
        return not held and self._pulls[message_id] > fault.pulls

    def _transported(self, message: Message, way: str) -> Message:
        if way == "down":
            assert message.metadata.reply_to_message_id == ""
            assert message.metadata.ttl > 0
            self.sent.append(message)
        return super()._transported(message, way)


def object_bytes(messages: Iterable[Message]) -> int:
    """What all objects of these messages took on the wire, Flower's own frames included."""
    return sum(
        len(item.deflate())
        for message in messages
        for item in get_all_nested_objects(message).values()
    )


def replace_payload(record: RecordDict, payload: bytes, announced: int | None = None) -> None:
    """Replace the bytes of a reply; without `announced` their true size is announced."""
    record[PAYLOAD] = ArrayRecord(
        {PAYLOAD: Array("uint8", (len(payload),), "fedsurrogate.protobuf", payload)}
    )
    info = record.config_records[INFO]
    info["bytes"] = len(payload) if announced is None else announced
    record[INFO] = ConfigRecord(dict(info))


def _tamper(record: RecordDict, fault: Fault) -> None:
    if fault.payload is not None and PAYLOAD in record:
        replace_payload(record, fault.payload(record.array_records[PAYLOAD][PAYLOAD].data))
    if fault.reply is not None:
        fault.reply(record)


def sites(count: int, **config: Scalar) -> list[NodeConfig]:
    """Node-configs of `count` sites that share the run's data, as in Flower's simulation."""
    extra = {key.replace("_", "-"): value for key, value in config.items()}
    return [{"partition-id": index, "num-partitions": count} | extra for index in range(count)]


def with_each(faults: Iterable[Fault]) -> InProcessGrid:
    """Three honest sites, and after them one with each fault, `faulty-0` and so on, which have the
    records of the second.
    """
    honest, each = sites(3), dict(enumerate(faults, 3))
    faulty = [honest[1] | {"site": f"faulty-{index - 3}"} for index in each]
    return InProcessGrid([*honest, *faulty], each)


def default_run_config() -> dict[str, Scalar]:
    """The run-config of every app without overrides: the defaults of pyproject.toml, flat."""
    return dict(_defaults())


@cache
def _defaults() -> dict[str, Scalar]:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    return flatten(tables["config"])


def confirm(config: NodeConfig) -> None:
    """Confirm a site's policy as it is now, as a person does with `site policy`."""
    node = parse_node_config(config)
    confirm_policy(node, policy_of(node))


def open_new(config: NodeConfig) -> None:
    """Open the ledger of a site's own data, as a person does once; do nothing if it is open, or
    cannot be opened.
    """
    with suppress(FedSurrogateError, OSError, ValueError):
        open_ledger(parse_node_config(config))


def run_federation(
    tmp_path: Path,
    nodes: Sequence[NodeConfig] | InProcessGrid,
    *,
    report: bool = False,
    opened: bool = True,
    **run_config: Any,
) -> Path:
    """Run the ServerApp over an in-process grid, and return its run folder; raises what the
    ServerApp raises.

    run_config: overrides with dots or dashes in their names (`**{"fedpft.rank": 4}`); underscores
    replace dashes. Each site keeps its log and its cache under `tmp_path`, next to the run folders.
    A site with its own data may release without privacy unless its node-config names a policy. Its
    ledger is opened first; `opened=False` skips that. Features of bundled data are kept for all
    tests of the process. `report=True` judges the model by all metrics, with intervals, and draws the
    report: both take longer than the run.
    """
    grid = nodes if isinstance(nodes, InProcessGrid) else InProcessGrid(nodes, run_id=next(RUN_IDS))
    lenient = tmp_path / "lenient-policy.toml"
    tmp_path.mkdir(parents=True, exist_ok=True)
    lenient.write_text(
        "without-dp = true\nsmallest-class = 1\nexact-sums-at-models = true\n"
        "exact-runs-may-differ = true\n"
    )
    for config in grid.node_configs.values():
        if config.get("data"):
            config.setdefault("policy", str(lenient))
        config.setdefault("state-dir", str(tmp_path / "site-state"))
        config.setdefault(
            "cache-dir", str(tmp_path / "site-cache" if config.get("data") else CACHE.name)
        )
        if opened:
            open_new(config)
    overrides = {key.replace("_", "-"): value for key, value in run_config.items()}
    grid.run_config = (
        default_run_config() | {"output-dir": str(tmp_path / "runs"), "device": "cpu"} | overrides
    )
    output = Path(str(grid.run_config["output-dir"]))
    before = run_folders(output)
    context = Context(grid.run.run_id, SUPERLINK_NODE_ID, {}, RecordDict(), dict(grid.run_config))
    # In one process, a reply that is not there does not come while this process sleeps.
    changed: dict[str, Any] = {POLL: 0.01}
    if not report:
        changed |= {DRAWN: lambda *_: None, JUDGED: lambda *_: None}
    try:
        with ExitStack() as changes:
            for name, value in changed.items():
                changes.enter_context(patch(name, value))
            server_app(grid, context)
    finally:
        _close_site_logs()
    return next(folder for folder in run_folders(output) if folder not in before)


def _close_site_logs() -> None:
    """Close the logs: one process runs all sites of all tests, and none may write into another's
    log.
    """
    log = logging.getLogger("fedsurrogate.site")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def run_folders(output: Path) -> list[Path]:
    """The run folders in an `output-dir`, which also holds receipts."""
    return sorted(manifest.parent for manifest in output.glob("*/manifest.json"))


def metrics_of(folder: Path) -> Json:
    text = (folder / "metrics.json").read_text()
    assert not re.search(r"\b(NaN|Infinity)\b", text), "JSON for strict readers only"
    return json.loads(text)


def events_of(folder: Path) -> list[Json]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def surrogates_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "surrogates").iterdir()}


def files_with(word: str, folder: Path) -> list[Path]:
    return [
        path for path in folder.rglob("*") if path.is_file() and word.encode() in path.read_bytes()
    ]


def outcome(folder: Path, site: str, event: str) -> str:
    """The reason of the one event of this kind; the other two sites were used and the run finished."""
    metrics = metrics_of(folder)
    assert metrics["status"] == "ok"
    assert metrics["sites"] == {"invited": 3, "used": 2, "rejected": 0, "dropped": 0} | {event: 1}
    assert (folder / "model.safetensors").exists()
    (found,) = (e for e in events_of(folder) if e["event"] == event)
    assert found["site"] == site
    assert len(metrics["bytes"]["up_per_site"]) == 3
    assert sum(metrics["bytes"]["up_per_site"].values()) == metrics["bytes"]["up"]
    return str(found["reason"])

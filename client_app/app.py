"""A site's ClientApp: message -> gate -> method -> reply. No maths in here; only numbers, codes and surrogates leave."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from logging.handlers import RotatingFileHandler

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.compare import compare
from client_app.gate import open_gate
from client_app.release import entry, prepare
from client_app.settings import NodeConfig, parse_node_config
from client_app.site import load_site, site_name
from common.config import RunConfig, parse_run_config, run_digest
from common.errors import FedSurrogateError, SurrogateError
from common.surrogates import Head
from common.wire import Info, from_record, to_record, unpack_head, unpack_question

LARGEST_HEAD = 2**30

Answer = tuple[bytes | None, Info]
Work = Callable[[Message, Context, RunConfig, NodeConfig, str], Answer]

log = logging.getLogger("fedsurrogate.site")
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Make this site's surrogate."""
    return _answer(message, context, _surrogate)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Judge the head on this site's own test split."""
    return _answer(message, context, _evaluation)


@app.query("compare")
def query(message: Message, context: Context) -> Message:
    """In a simulation, judge the head on all test data, beside baselines."""
    return _answer(message, context, _comparison)


def _surrogate(message: Message, context: Context, run: RunConfig, node: NodeConfig, site: str) -> Answer:
    question, info = from_record(message.content, LARGEST_HEAD)
    if info.get("run") != run_digest(run):
        raise SurrogateError(f"asked for run {info.get('run')!r}, but these settings are run {run_digest(run)!r}")
    gate = open_gate(node, run, str(context.run_id))
    prepared = prepare(run, node, site, gate, str(context.run_id), unpack_question(question))
    told: Info = {"simulated": prepared.found.simulated}
    if not run.epsilon or prepared.found.simulated:
        # How long the work took tells how many records there are; under differential privacy nothing exact leaves.
        told |= {"fit-seconds": prepared.fit_seconds, "extract-seconds": prepared.found.seconds}
    gate.let_out(prepared.release)
    return prepared.payload, told


def _evaluation(message: Message, context: Context, run: RunConfig, node: NodeConfig, site: str) -> Answer:
    head = _head(message, run)
    found = load_site(run, node)
    if found.fingerprint != head.header.fingerprint:
        raise SurrogateError(f"a head for backbone {head.header.fingerprint!r}, this site has {found.fingerprint!r}")
    correct, tested = head.accuracy(found.test.features, found.classes, found.test.labels)
    log.info("the head of run %s is right for %d of %d test records here", head.header.run, correct, tested)
    told: Info = {"correct": correct, "tested": tested}
    if not found.simulated:
        gate = open_gate(node, run, str(context.run_id))
        if not gate.exact_numbers_may_leave(run):
            return None, {}
        numbers = json.dumps(told).encode()
        gate.let_out(entry(run, str(context.run_id), numbers, None, {}))
    return None, told


def _comparison(message: Message, context: Context, run: RunConfig, node: NodeConfig, site: str) -> Answer:
    return None, compare(_head(message, run), run, node)


def _head(message: Message, run: RunConfig) -> Head:
    payload, _ = from_record(message.content, LARGEST_HEAD)
    if payload is None:
        raise SurrogateError("a message without a head")
    head = unpack_head(payload)
    if head.header.run != run_digest(run):
        raise SurrogateError(f"a head of run {head.header.run!r}, but these settings are run {run_digest(run)!r}")
    return head


def _answer(message: Message, context: Context, work: Work) -> Message:
    """Do the work; on any failure tell the coordinator a code, and keep the detail in this site's own log."""
    payload: bytes | None = None
    info: Info = {"status": "internal"}
    site = ""
    try:
        node = parse_node_config(context.node_config)
        _open_log(node)
        site = site_name(node, context.node_id)
        payload, answer = work(message, context, parse_run_config(context.run_config), node, site)
        info = {"status": "ok"} | answer
    except FedSurrogateError as error:
        log.error("%s: %s", error.code, error)
        info["status"] = error.code
    except Exception:
        log.exception("unexpected failure")
    if payload is not None:
        info["bytes"] = len(payload)
    return Message(to_record(payload, info | {"site": site}), reply_to=message)


def _open_log(node: NodeConfig) -> None:
    """The site's own log: a rotating file in its state folder, beside what the console shows."""
    node.state.mkdir(parents=True, exist_ok=True)
    path = node.state / "site.log"
    if not any(isinstance(h, RotatingFileHandler) and h.baseFilename == str(path.absolute()) for h in log.handlers):
        handler = RotatingFileHandler(path, maxBytes=5_000_000, backupCount=5)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)

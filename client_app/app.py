"""A site's ClientApp: message -> method -> reply. No maths in here; only numbers, codes and surrogates leave."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from logging.handlers import RotatingFileHandler

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app import fedpft
from client_app.compare import compare
from client_app.settings import NodeConfig, parse_node_config
from client_app.site import load_site, site_device, site_name
from common.config import RunConfig, parse_run_config, run_digest
from common.errors import FedSurrogateError, SurrogateError
from common.surrogates import Head
from common.wire import Info, from_record, pack_surrogate, to_record, unpack_head

METHODS = {"fedpft": fedpft.make_surrogate}
LARGEST_HEAD = 2**30

Answer = tuple[bytes | None, Info]
Work = Callable[[Message, RunConfig, NodeConfig, str], Answer]

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


def _surrogate(message: Message, run: RunConfig, node: NodeConfig, site: str) -> Answer:
    _, info = from_record(message.content, LARGEST_HEAD)
    if info.get("run") != run_digest(run):
        raise SurrogateError(f"asked for run {info.get('run')!r}, but these settings are run {run_digest(run)!r}")
    found = load_site(run, node)
    started = time.perf_counter()
    surrogate = METHODS[run.method](
        found.train.features.to(site_device(run, node)),
        found.train.labels,
        found.classes,
        found.fingerprint,
        site,
        run,
        node.max_components,
        node.max_rank,
    )
    spent: Info = {"fit-seconds": time.perf_counter() - started, "extract-seconds": found.seconds}
    return pack_surrogate(surrogate), spent | {"simulated": found.simulated}


def _evaluation(message: Message, run: RunConfig, node: NodeConfig, site: str) -> Answer:
    head = _head(message, run)
    found = load_site(run, node)
    if found.fingerprint != head.header.fingerprint:
        raise SurrogateError(f"a head for backbone {head.header.fingerprint!r}, this site has {found.fingerprint!r}")
    correct, tested = head.accuracy(found.test.features, found.classes, found.test.labels)
    return None, {"correct": correct, "tested": tested}


def _comparison(message: Message, run: RunConfig, node: NodeConfig, site: str) -> Answer:
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
        payload, answer = work(message, parse_run_config(context.run_config), node, site)
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

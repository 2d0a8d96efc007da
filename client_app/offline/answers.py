"""Answers of a site without a network connection to the coordinator, as signed files: the bundle for a
request to all sites, and the reply to one message of a run.

A reply is what the site would send over the network, after the same checks and charges. It is
kept in the state folder: a person who asks again gets the same file, and nothing is charged again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedsurrogate.common.errors import (
    ConfigError,
    DataError,
    LedgerError,
    PolicyError,
    StateError,
    told_as,
)
from fedsurrogate.common.files import replace_file, stage_file
from fedsurrogate.common.message_files import (
    LARGEST_FILE,
    MessageReply,
    MessageRequest,
    digest,
    pack_reply,
    unpack_reply,
    unpack_request,
)
from fedsurrogate.common.security.documents import Request, read_at_most, read_request
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.wire.records import from_record, pack_bundle, to_record

from ..audit.output import check_attacks
from ..clientapp import WORK_OF
from ..governance.budget import Release
from ..governance.gate import open_gate
from ..governance.ledger import Ledger, own_ledger
from ..governance.release import charge_and_release, prepare
from ..methods.job import SiteRequest
from ..node_config import NodeConfig
from ..requests import LARGEST_MODEL, answer
from .keys import coordinator_key, key_name, private_key


def release_to(file: Path, request_file: Path, node: NodeConfig) -> Release:
    """Make the requested surrogate, charge it to the ledger, and write it as a signed bundle.

    Checked before any work: the request is signed with the coordinator's key in the node-config,
    has not expired, and was not answered yet. The surrogate is the same as over the network. It is
    written in full before the charge and renamed after it, so no charged surrogate is lost.

    Args:
        file: the bundle to write.
        request_file: of the coordinator.
        node: the site's settings.

    Returns:
        The entry in the ledger.

    Raises:
        FedSurrogateError: and then nothing has left.
    """
    site = key_name(node)
    if file.exists():
        raise ConfigError(
            f"{str(file)!r} exists; a bundle is never replaced, because its release is in the "
            "ledger"
        )
    request = read_request(request_file, coordinator_key(node))
    run = request.run()
    flower_run = f"bundle-{request.id}"
    gate = open_gate(node, run.settings.data, flower_run)
    before = gate.check_receipts(request.receipts.get(site, ""))
    _check_first_answer(gate.ledger, request, flower_run)
    asked = SiteRequest(run, node, site, flower_run=flower_run, payload=request.centre)
    prepared = prepare(asked, gate)
    if failure := prepared.failure.text:
        # Over the network the site would reply with noise; here a person reads this error and can
        # correct the records.
        raise DataError(f"the records cannot be used ({failure}); nothing was charged")
    check_attacks(run, node, gate.policy)
    facts, key = _facts(prepared.release), private_key(node, site)
    with told_as(LedgerError, f"{str(file)!r} cannot be written", "nothing was charged"):
        staged = stage_file(file, pack_bundle(request, site, prepared.made.payload, facts, key))
    charge_and_release(gate, prepared.release, {file: staged}, prepared.made.guard)
    if receipt := gate.new_receipt(before):
        # The receipt exists only after the charge. If it cannot be written, the bundle is valid
        # without it.
        with suppress(OSError):
            again = pack_bundle(request, site, prepared.made.payload, facts | receipt, key)
            replace_file(file, again)
    return prepared.release


def _check_first_answer(ledger: Ledger, request: Request, flower_run: str) -> None:
    """Raise PolicyError for an answered request: a second answer has new noise and would be charged
    again.
    """
    if flower_run in ledger.answered():
        own = (each for each in ledger.entries() if each["flower_run"] == flower_run)
        when = [f" on {each['time'][:10]}" for each in own]
        raise PolicyError(
            f"request {request.id} was answered{''.join(when[:1])}; a second answer would spend "
            "the budget again. Send the bundle that was written then; if it is lost, ask the "
            "coordinator for a new request"
        )


def _facts(release: Release) -> dict[str, Any]:
    """The ledger's entry without `facts`, whose clip fractions and similar numbers are exact, and
    without `selection`, which has the site's own names.
    """
    return {
        key: value
        for key, value in asdict(release).items()
        if key not in ("facts", "flower_run", "rounds", "selection")
    }


# Every file of another kind begins otherwise: the first field of a message file is its manifest.
MAGIC = b"\x0a"


def is_message(file: Path) -> bool:
    """Whether a file may be a request of `coordinator offline exchange`, not one of `coordinator offline request`.
    Raises ConfigError.
    """
    return read_at_most(file, LARGEST_FILE).startswith(MAGIC)


def reply_to(file: Path, request_file: Path, node: NodeConfig) -> str:
    """Write the reply to a request file.

    Checked before any work: the request is signed with the coordinator's key in the node-config, is
    for this site, and has not expired.

    Args:
        file: the reply to write.
        request_file: of the coordinator.
        node: the site's settings.

    Returns:
        A line that says what was written.

    Raises:
        FedSurrogateError: for a request that the site refuses or cannot answer.
    """
    site = key_name(node)
    if file.exists():
        raise ConfigError(
            f"{str(file)!r} exists, and a reply is never replaced; choose another file"
        )
    public = coordinator_key(node)
    content = read_at_most(request_file, LARGEST_FILE)
    request = unpack_request(content, public)
    if request.site != site:
        raise ConfigError(f"{request_file} is for site {request.site!r}, and this is {site!r}")
    key, kept = private_key(node, site), node.state / "replies" / request.id
    with FileLock(f"{kept}.lock"):
        again = kept.exists()
        if not again:
            if request.expired():
                raise ConfigError(
                    f"{request_file} expired on {request.expires}; ask the coordinator to run again"
                )
            _begin(kept.with_suffix(".begun"), node, request)
            reply = pack_reply(_answered(request, digest(content), node, site), key)
            try:
                replace_file(kept, reply)
            except OSError as error:
                # Charged already: the reply must not be lost with its copy.
                _put(file, reply)
                raise StateError(
                    f"{file} is written; its copy {str(kept)!r} is not ({error.strerror}): keep it"
                ) from None
        elif unpack_reply(kept.read_bytes(), public_key(key)).request != digest(content):
            raise StateError(
                f"another request with the id of {request_file} was answered; ask the coordinator "
                "to run again"
            )
    _put(file, kept.read_bytes())
    what = (
        "the reply that was made before; nothing is charged again"
        if again
        else f"reply to step {request.kind!r}"
    )
    return f"{file}: {what}; `site ledger show` shows what has been charged"


def _begin(mark: Path, node: NodeConfig, request: MessageRequest) -> None:
    """Record that an answer begins. Raises StateError where an earlier one was charged, and its
    reply was lost.
    """
    ledger = own_ledger(node)
    entries = [] if ledger is None else ledger.entries()
    charged = sum(each.get("flower_run") == request.flower_run for each in entries)
    if mark.exists() and charged > int(mark.read_bytes()):
        raise StateError(
            f"request {request.id[:12]} was answered and charged, and its reply is lost; a second "
            "answer would spend the budget again. If no file has the reply, ask the coordinator "
            "to run again"
        )
    _put(mark, str(charged).encode())


def _answered(request: MessageRequest, asked: str, node: NodeConfig, site: str) -> MessageReply:
    work = WORK_OF.get(request.kind, "")
    if not work or work == "comparison":
        raise ConfigError(
            f"a request of kind {request.kind[:40]!r}, which this site does not answer"
        )
    try:
        record = to_record(request.payload, request.info)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"values that no message over the network may have ({str(error)[:120]})"
        ) from None
    answered = answer(work, record, request.settings, request.flower_run, node, site)
    payload, info = from_record(answered, LARGEST_MODEL)
    return MessageReply(request.id, asked, site, info, payload)


def _put(file: Path, content: bytes) -> None:
    todo = "free the disk, and repeat the command"
    with told_as(StateError, f"{str(file)!r} cannot be written", todo):
        # Under an unpredictable name: a link on the stick must not lead the reply to another file.
        replace_file(file, content)

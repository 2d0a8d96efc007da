"""Answer one message of a run from a file, for a site without a network connection to the
coordinator.

The reply is what the site would send over the network, after the same checks and charges. It is
kept in the state folder: a person who asks again gets the same file, and nothing is charged again.
"""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

from fedsurrogate.client_app.governance.own_ledger import own_ledger
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.offline.keys import coordinator_key, key_name, private_key
from fedsurrogate.client_app.requests import LARGEST_MODEL, WORK, answer
from fedsurrogate.common.errors import ConfigError, StateError
from fedsurrogate.common.exchange.message_files import (
    LARGEST_FILE,
    MessageReply,
    MessageRequest,
    digest,
    pack_reply,
    unpack_reply,
    unpack_request,
)
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.security.documents import read_at_most
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.wire.records import from_record, to_record

# Every file of another kind begins otherwise: the first field of a message file is its manifest.
MAGIC = b"\x0a"
KINDS = {"train": "surrogate", "evaluate": "evaluation", "query.hello": "introduction"}


def is_message(file: Path) -> bool:
    """Whether a file may be a request of `coordinator exchange`, not one of `coordinator request`.
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
    return f"{file}: {what}; `site ledger` shows what has been charged"


def _begin(mark: Path, node: NodeConfig, request: MessageRequest) -> None:
    """Record that an answer begins. Raises StateError where an earlier one was charged, and its
    reply was lost.
    """
    ledger = own_ledger(node)
    charged = (
        0
        if ledger is None
        else sum(e.get("flower_run") == request.flower_run for e in ledger.entries())
    )
    if mark.exists() and charged > int(mark.read_bytes()):
        raise StateError(
            f"request {request.id[:12]} was answered and charged, and its reply is lost; a second "
            "answer would spend the budget again. If no file has the reply, ask the coordinator "
            "to run again"
        )
    _put(mark, str(charged).encode())


def _answered(request: MessageRequest, asked: str, node: NodeConfig, site: str) -> MessageReply:
    work = KINDS.get(request.kind, request.kind.removeprefix("query.").replace("_", "-"))
    if work not in WORK or work == "comparison":
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
    try:
        # Under an unpredictable name: a link on the stick must not lead the reply to another file.
        replace_file(file, content)
    except OSError as error:
        raise StateError(
            f"{str(file)!r} cannot be written ({error.strerror}); free the disk, and repeat the "
            "command"
        ) from None

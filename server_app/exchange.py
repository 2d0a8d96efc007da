"""Runs whose messages are carried as files, for sites without a network connection: a Flower `Grid` that
writes each message as a signed file and reads its reply from another.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from flwr.app import Message

from fedsurrogate.common.errors import ConfigError, SealError, SurrogateError
from fedsurrogate.common.exchange.message_files import (
    LARGEST_FILE,
    LARGEST_MANIFEST,
    MessageReply,
    MessageRequest,
    digest,
    pack_request,
    unpack_reply,
)
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.flower import flower
from fedsurrogate.common.limits import SITE_NAME
from fedsurrogate.common.methods.logistic_rounds import LOGISTIC
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.registrations import TABLE, Registration, write_table
from fedsurrogate.common.security.sealing import read_keys
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.common.wire.records import from_record, to_record
from fedsurrogate.server_app.deployment.local_engine import folder_after
from fedsurrogate.server_app.deployment.local_grid import FIRST_NODE, LocalGrid
from fedsurrogate.server_app.deployment.request_key import VARIABLE, read_request_key
from fedsurrogate.server_app.federate import federate
from fedsurrogate.server_app.lifecycle.before_start import with_map_digest
from fedsurrogate.server_app.offline import asked_of
from fedsurrogate.strategies.base.registered import Registered

# Seconds without a change after which a file is no longer being copied.
SETTLED = 5.0
REQUEST, REPLY, REFUSED, LOST = ".request", ".reply", ".refused", ".lost"


@dataclass(frozen=True)
class Exchange:
    """What all messages of a run share.

    Attributes:
        folder: of the files.
        keys: public keys by site.
        settings: of the run, flat.
        private: the coordinator's key.
        days: how long sites may answer one step.
        run_id: the number of the run.
        largest: bytes of a reply file.

    Example:
        >>> Exchange(Path("messages"), {"south": b"", "north": b""}, {}, b"", 7, 1).nodes()
        {1001: 'north', 1002: 'south'}
    """

    folder: Path
    keys: Mapping[str, bytes]
    settings: Mapping[str, Scalar]
    private: bytes
    days: int
    run_id: int
    largest: int = LARGEST_FILE

    def nodes(self) -> dict[int, str]:
        """Site names by node id."""
        return {FIRST_NODE + index: name for index, name in enumerate(sorted(self.keys))}


class FileGrid(LocalGrid):
    """Sites that answer by files. `02-north.request` is the second message to north; its reply is
    `02-north.reply`.

    A person carries both. An empty file `02-north.lost` in place of a reply tells that none will
    come. A reply that cannot be used is renamed to `02-north.refused`, and another may replace it.

    Args:
        exchange: what all messages of the run share.
        show: prints a line for the person.
    """

    def __init__(self, exchange: Exchange, show: Callable[[str], None]) -> None:
        super().__init__(_no_app, [{} for _ in exchange.keys], exchange.run_id)
        self._exchange, self._show = exchange, show
        self._step = 0
        # By message: the message, the stem of its files, and the digest of the request file.
        self._asked: dict[str, tuple[Message, str, str]] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Write messages as files."""
        self._step += 1
        written = super().push_messages(messages)
        names = [f"{self._asked[each][1]}{REQUEST}" for each in written]
        if names:
            self._show(
                f"step {self._step}: carry to their sites, from {self._exchange.folder}: "
                f"{', '.join(names)}"
            )
        return written

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to these messages that lie in the folder."""
        replies = []
        for name in list(message_ids):
            if name in self._asked and (reply := self._reply(name)) is not None:
                del self._asked[name]
                replies.append(reply)
        return replies

    def _deliver(self, message: Message) -> None:
        site = self._exchange.nodes()[message.metadata.dst_node_id]
        payload, info = from_record(message.content, LARGEST_FILE)
        name, kind = message.metadata.message_id, message.metadata.message_type
        expires = f"{datetime.now(UTC).date() + timedelta(self._exchange.days):%Y-%m-%d}"
        request = MessageRequest(
            name,
            str(self._run.run_id),
            site,
            kind,
            dict(self._exchange.settings),
            info,
            expires,
            payload,
        )
        content, stem = pack_request(request, self._exchange.private), f"{self._step:02d}-{site}"
        file = self._exchange.folder / f"{stem}{REQUEST}"
        replace_file(file, content)
        self._asked[name] = message, stem, digest(content)

    def _reply(self, name: str) -> Message | None:
        message, stem, request = self._asked[name]
        if (self._exchange.folder / f"{stem}{LOST}").exists():
            return flower().failed_reply(
                message, "unavailable", "a person has marked this site as lost"
            )
        file = self._exchange.folder / f"{stem}{REPLY}"
        if not file.exists():
            return None
        site = self._exchange.nodes()[message.metadata.dst_node_id]
        try:
            reply = self._checked(file, site, name, request)
            return Message(to_record(reply.payload, reply.info), reply_to=message)
        except (SurrogateError, SealError, OSError, ValueError, TypeError) as error:
            refused = file.with_suffix(REFUSED)
            try:
                if abs(time.time() - file.lstat().st_mtime) < SETTLED:
                    return None
                if file.is_dir() and refused.exists():
                    refused = refused.with_name(f"{refused.name}.{secrets.token_hex(4)}")
                file.replace(refused)
            except OSError:
                return None
            self._show(
                f"{file.name} cannot be used ({error}); it is {refused.name} now, and this run "
                "waits for another"
            )
            return None

    def _checked(self, file: Path, site: str, name: str, request: str) -> MessageReply:
        if not file.is_file() or file.stat().st_size > self._exchange.largest:
            raise SurrogateError(
                f"no file, or larger than the limit of {self._exchange.largest} bytes"
            )
        with file.open("rb") as stream:
            content = stream.read(self._exchange.largest)
        reply = unpack_reply(content, self._exchange.keys[site])
        if (reply.site, reply.id, reply.request) != (site, name, request):
            raise SurrogateError(f"it answers another request, or is of site {reply.site[:64]!r}")
        return reply


def _no_app(message: Message, context: object) -> Message:
    raise NotImplementedError("sites of this grid answer by files")


DAY = 24 * 3600.0


def run_by_files(
    settings: Mapping[str, Scalar],
    signing: Path,
    keys_file: Path,
    out: Path,
    days: int,
    show: Callable[[str], None],
) -> Path:
    """Run a federation whose messages are files.

    Args:
        settings: of the run, flat.
        signing: the folder with the coordinator's key.
        keys_file: the sites' public keys; these sites are asked, each under its name there.
        out: a new or empty folder, for the messages.
        days: how long sites may answer one step.
        show: prints a line for the person who carries the files.

    Returns:
        The run folder.

    Raises:
        ConfigError: before anything is written.
        RunError: the run fails, or left no folder.
        Interrupted: by a signal; with the run folder.
    """
    keys = read_keys(keys_file)
    # Names become names of files, and some file systems do not tell capitals apart.
    if (
        not keys
        or not all(map(SITE_NAME.fullmatch, keys))
        or len({name.casefold() for name in keys}) < len(keys)
    ):
        raise ConfigError(
            f"{str(keys_file)!r} needs a line of `site key` for each site, with a name of its own"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{str(out)!r} is not empty; each run needs a folder of its own for its messages"
        )
    # Sites must know their number too: what a private run sends depends on it.
    approved = with_map_digest(settings)
    settings = {"sites": len(keys), **_in_one_sum(approved, show)}
    config = parse_run({"deadline": days * DAY, **settings})
    if "approval" in approved and parse_run(approved).full_digest != config.full_digest:
        raise ConfigError(
            f"approval: what sites send follows from their number, here {len(keys)}, and the approved "
            f"settings do not name it; propose the run again with sites = {len(keys)}"
        )
    private = read_request_key(signing)
    run_id = secrets.randbits(62)
    largest = config.settings.max_payload_mib * 2**20 + LARGEST_MANIFEST
    exchange = Exchange(out, keys, asked_of(settings), private, days, run_id, largest)
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    table = {name: Registration("", node) for node, name in exchange.nodes().items()}
    # The table is not in `out`, which others may write to.
    with tempfile.TemporaryDirectory() as aside, _signing(signing):
        write_table(Path(aside) / TABLE, table)
        output = Path(config.settings.output_dir).expanduser().absolute()
        registered, grid = Registered(Path(aside) / TABLE), FileGrid(exchange, show)
        return folder_after(lambda: federate(config, grid, run_id, registered), output, run_id)


def _in_one_sum(
    settings: Mapping[str, Scalar], show: Callable[[str], None]
) -> Mapping[str, Scalar]:
    """Settings of a run whose head is one sum's, if they leave that open: a person carries the files of
    each step of each round. Approved settings stay as they are. A line says which head it is.
    """
    chosen = parse_run(settings)
    if chosen.settings.head.solver != LOGISTIC or not chosen.settings.secure_sum:
        return settings
    if settings.get("head.solver") == LOGISTIC or "approval" in settings:
        show(
            f"the head is found in {chosen.rounds} rounds, each with files of its own; "
            "fedpft.covariance = 'gram' takes one"
        )
        return settings
    show(
        f"the head is that of one sum (fedpft.covariance = 'gram'); head.solver = {LOGISTIC!r} is "
        f"mostly more accurate, and takes {chosen.rounds} sums, each with its own files"
    )
    return {**settings, "fedpft.covariance": "gram"}


@contextmanager
def _signing(folder: Path) -> Iterator[None]:
    """Sign the models of runs with the key in this folder, unless the environment names another."""
    own = VARIABLE not in os.environ
    if own:
        os.environ[VARIABLE] = str(folder.absolute())
    try:
        yield
    finally:
        if own:
            del os.environ[VARIABLE]

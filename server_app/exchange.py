"""Runs whose messages are files (offline exchange), for sites without a network connection: a Flower `Grid` that
writes each message as a signed file and reads its reply from another.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flwr.app import Message

from fedsurrogate.common.errors import (
    SITE_NAME,
    ConfigError,
    FedSurrogateError,
    RunError,
    SurrogateError,
)
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.flower import flower
from fedsurrogate.common.message_files import (
    LARGEST_FILE,
    LARGEST_MANIFEST,
    MessageReply,
    MessageRequest,
    digest,
    pack_request,
    unpack_reply,
)
from fedsurrogate.common.methods.logistic_rounds import LOGISTIC
from fedsurrogate.common.models.devices import pick_device
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.documents import Request, read_at_most, read_request
from fedsurrogate.common.security.registrations import TABLE, Registration, write_table
from fedsurrogate.common.security.sealing import read_keys
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.signed_models.signed_model import is_run_folder, settings_of_run
from fedsurrogate.common.wire import records
from fedsurrogate.strategies import OneShot, stored_strategy
from fedsurrogate.strategies.base.collection import Unrecorded
from fedsurrogate.strategies.base.outcome import Registered, stored_receipts
from fedsurrogate.strategies.pooling.class_means import read_centre

from .deployment.local_engine import FIRST_NODE, LocalGrid, folder_after
from .deployment.request_key import VARIABLE, read_request_key
from .lifecycle.before_start import with_map_digest
from .runs.writer import RunWriter
from .serverapp import federate, finished

PUBLIC = "fedpft.public"
# Settings that matter only on the coordinator's machine, or name a file there.
AT_HOME = (
    *("output-dir", "resume", "data-dir", "weights-path", "device", PUBLIC),
    *("deadline", "grace", "compare"),
)

HERE = ("output-dir", "device", "quorum", "sites")

Content = tuple[str, bytes] | SurrogateError


def asked_of(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The settings that sites are told in a file: those that matter there.

    Args:
        settings: of the run, flat.

    Example:
        >>> asked_of({"epsilon": 1.0, "device": "cpu", "fedpft.public": "/home/ann/photos.safetensors"})
        {'epsilon': 1.0, 'fedpft.public': 'photos.safetensors'}
    """
    asked = {key: value for key, value in settings.items() if key not in AT_HOME}
    if public := settings.get(PUBLIC):
        # What sites send depends on whether there is such a file, not on where.
        asked[PUBLIC] = Path(str(public)).name
    return asked


def make_request(
    settings: Mapping[str, Scalar], file: Path, private: bytes, days: int = 0
) -> Request:
    """Write a request for a run, signed with the coordinator's key.

    Args:
        settings: of the run, flat.
        file: to write; it must not exist.
        private: the coordinator's key.
        days: after which the request expires; 0: never.

    Returns:
        The request.

    Raises:
        ConfigError: the file exists, or for a run that sites cannot take part in by file.
    """
    if file.exists():
        raise ConfigError(
            f"{str(file)!r} exists, and sites may have replied to it already; choose another file"
        )
    settings = with_map_digest(settings)
    config = parse_run(settings)
    centre = records.pack_public_mean(read_centre(config.settings.fedpft.public, config.power))
    request = Request.fresh(
        asked_of(settings), centre, days, stored_receipts(config.settings.output_dir)
    )
    file.write_bytes(request.signed(private))
    return request


def learn_from_files(
    request_file: Path,
    bundles: Sequence[Path],
    keys_file: Path | None,
    local: Mapping[str, Scalar],
    run_folders: Sequence[Path] = (),
    unsigned: Sequence[Path] = (),
) -> Path:
    """Learn one head from the files with which sites replied to a request.

    The caller vouches for files of `run_folders` and `unsigned`. Each site counts once, and signed
    files come first. A refused file is listed in the run folder, and the others are used.

    Args:
        request_file: the request, as `make_request` wrote it.
        bundles: used only if a key in `keys_file` signed them for this request.
        keys_file: the sites' public keys; None for none.
        local: settings of this machine, such as output-dir.
        run_folders: of runs whose surrogates arrived over an authenticated network.
        unsigned: single surrogates (*.pb).

    Returns:
        The run folder.

    Raises:
        ConfigError: before anything is written.
        RunError: too few files are left; the run folder is complete.
    """
    request = read_request(request_file, None)
    request.run()
    if wrong := sorted(set(local) - set(HERE)):
        raise ConfigError(
            f"{wrong[0]} is fixed by the request; only {', '.join(HERE)} can be set here"
        )
    keys = read_keys(keys_file) if keys_file is not None else {}
    receipts: dict[str, object] = {}
    config = parse_run({**request.flat(), **local})
    read = [(str(file), _signed(file, request, keys, receipts)) for file in bundles]
    # Earlier versions gave the same settings another digest.
    named = [bundle.manifest.get("run") for _, bundle in read if isinstance(bundle, records.Bundle)]
    stored = [settings_of_run(each) for each in run_folders if is_run_folder(each)]
    named += [each.digest for each in stored if each.full_digest == config.full_digest]
    config = replace(config, stored_as=str(named[0]) if named else "")
    kind, centre = stored_strategy(config), records.unpack_public_mean(request.centre)
    reader = kind(config, Unrecorded(), "cpu", centre)
    contents: list[tuple[str, Content]] = [
        (file, (each.site, each.payload) if isinstance(each, records.Bundle) else each)
        for file, each in read
    ]
    contents += [(str(file), _unsigned(file, file.stem, reader)) for file in _inside(run_folders)]
    contents += [(str(file), _unsigned(file, "", reader)) for file in unsigned]
    if not contents:
        raise ConfigError("no files to learn from; name bundles, run folders or surrogates")
    folder = RunWriter(config, 0)
    strategy = kind(config, folder, pick_device(config.settings.device), centre)
    try:
        with finished(folder, strategy):
            for site, receipt in receipts.items():
                with suppress(SurrogateError):
                    strategy.receipts.take(site, 0, receipt)
            strategy.learn_from(contents)
    except RunError as error:
        refused = [
            f"{site.name}: {site.reason}"
            for site in strategy.outcome.sites.values()
            if site.fate == "rejected"
        ]
        raise RunError("; ".join([str(error), *refused, f"see {folder.path}"])) from None
    return folder.path


def _inside(run_folders: Sequence[Path]) -> Iterator[Path]:
    for folder in run_folders:
        inside = sorted((folder / "surrogates").glob("*.pb"))
        if not inside:
            raise ConfigError(f"{folder} is not a run folder with surrogates")
        yield from inside


def _signed(
    file: Path, request: Request, keys: Mapping[str, bytes], receipts: dict[str, object]
) -> records.Bundle | SurrogateError:
    """A site's bundle, or the error for which it is refused.

    Adds the bundle's receipt of the site's ledger to `receipts`.
    """
    if file.is_dir():
        return SurrogateError(
            "a folder without a site's signature; add a run folder with --unsigned"
        )
    if file.suffix == ".pb":
        return SurrogateError("a surrogate without a site's signature; add it with --unsigned")
    try:
        bundle = records.unpack_bundle(_read(file), request, keys)
    except SurrogateError as error:
        return error
    ledger = bundle.manifest.get("ledger")
    receipts[bundle.site] = ledger.get("receipt") if isinstance(ledger, dict) else None
    return bundle


def _unsigned(file: Path, site: str, reader: OneShot[Any]) -> Content:
    """The site and the bytes of an unsigned surrogate. site: the name under which a run folder
    stores it, "" without one.
    """
    try:
        content = _read(file)
        name = reader.unpack(content).header.site
    except SurrogateError as error:
        return error
    if site and name != site:
        return SurrogateError(
            f"a surrogate with the site name {name[:64]!r}, but the run folder stores it under "
            f"{site[:64]!r}"
        )
    return name, content


def _read(file: Path) -> bytes:
    """Read a file. Raises SurrogateError if it is too large or unreadable, ConfigError if it does
    not exist.
    """
    if not file.exists():
        raise ConfigError(f"there is no file {str(file)!r}")
    try:
        return read_at_most(file, records.LARGEST_BUNDLE)
    except ConfigError as error:
        raise SurrogateError(str(error)) from None


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
        payload, info = records.from_record(message.content, LARGEST_FILE)
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
            return Message(records.to_record(reply.payload, reply.info), reply_to=message)
        except (FedSurrogateError, OSError, ValueError, TypeError) as error:
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
        content = read_at_most(file, self._exchange.largest)
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
            f"{str(keys_file)!r} needs a line of `site offline key` for each site, with a name of its own"
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
    if chosen.settings.head.solver != LOGISTIC or not chosen.settings.secure_aggregation:
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

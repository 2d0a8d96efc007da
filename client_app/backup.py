"""A backup of a site in one file: ledger, keys, models, policy and settings; and its restoration into
an empty state folder.

It holds no image, no features and no check log: the check log shows that a restored ledger is older than
what has left. What the site then refuses, and what a person decides, is that of any older ledger
(governance/ledger.py).
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from fedsurrogate.common.errors import ConfigError, LedgerError
from fedsurrogate.common.files import create_file, replacing
from fedsurrogate.common.settings.base import parse_overrides

from .governance.ledger import CheckLog, Ledger, own_ledger
from .governance.policy import IN_FORCE, LIMITS_FILE, policy_of
from .kit import read_kit
from .node_config import NodeConfig, parse_node_config

FORMAT, SETTINGS = 1, "settings.json"
# Of the state folder. Files between rounds, stored replies and logs are none of it: a run that goes on
# then ends with the code `state`.
IN_STATE = (
    *("audit.key", "decisions.json", "disclosures", "generators", "held", "keys", "ledgers", "models"),
    *("peers.toml", IN_FORCE, "sums"),
)  # fmt: skip
IN_KIT = (".env", "*.yml", "site.sbatch", "README.md", "certificates/*", "policy/*")
PIECE = 2**20


def write_backup(file: Path, kit: Path | None, settings: dict[str, Any]) -> int:
    """Write a backup that only its owner can read.

    Args:
        file: to write; it must not exist.
        kit: the folder of the site's kit; None for a site without one.
        settings: of the site, flat.

    Returns:
        Number of files in it.

    Raises:
        ConfigError: the file exists.
        LedgerError: a ledger cannot be trusted.
    """
    if file.exists():
        raise ConfigError(f"{str(file)!r} exists; name another file")
    node = parse_node_config(settings)
    about = {"format": FORMAT, "kit": str(kit.resolve()) if kit else "", "settings": settings}
    names = dict(_files(node, kit))
    with (
        replacing(file, mode=0o600) as temporary,
        tarfile.open(temporary, mode="w:gz") as archive,
    ):
        _add(archive, SETTINGS, json.dumps(about, indent=1).encode())
        for name, source in sorted(names.items()):
            if isinstance(source, bytes):
                _add(archive, name, source)
            else:
                archive.add(source.resolve(), name, recursive=False)
    return len(names)


def _files(node: NodeConfig, kit: Path | None) -> Iterator[tuple[str, bytes | Path]]:
    """Names in the archive and what they hold, a ledger as it is between two releases."""
    yield from _found(node.state, "state", IN_STATE)
    for ledger in _ledgers(node):
        if not ledger.path.exists():
            ledger.check()  # It was lost: its check log knows more.
        for each, content in ledger.copied().items():
            yield f"state/ledgers/{each}", content
    if kit is not None:
        yield from _found(kit, "kit", IN_KIT)
    elif node.policy:
        policy = Path(node.policy).expanduser()
        names = {policy.name, LIMITS_FILE, policy_of(node).approvers}
        yield from _found(policy.parent, "policy", names)


def _found(place: Path, folder: str, patterns: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Files of these names, and all files in folders of these names."""
    for found in (each for pattern in patterns for each in sorted(place.glob(pattern))):
        for each in found.rglob("*") if found.is_dir() else (found,):
            if each.is_file() and each.suffix != ".lock":
                yield f"{folder}/{each.relative_to(place).as_posix()}", each


def _ledgers(node: NodeConfig) -> list[Ledger]:
    """All ledgers of a hospital's own data: those in the state folder, and that of the data that the
    settings name if it was ever opened.
    """
    folder = node.state / "ledgers"
    names = {each.stem for each in folder.glob("*.jsonl")}
    if (own := own_ledger(node)) is not None and not own.is_new:
        names.add(own.dataset)
    logs = {name: CheckLog(node.check_log, name, node.state) for name in sorted(names)}
    return [Ledger(folder, name, log) for name, log in logs.items()]


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def restore_backup(
    file: Path, kit: Path | None
) -> tuple[NodeConfig, list[Path], list[Path], list[str]]:
    """Restore a backup into an empty state folder, and hold its ledgers against their check logs.

    Files of the kit, and of the policy, that are there stay as they are.

    Args:
        file: the backup.
        kit: the folder of the kit, to make if it is missing; None for where the site was.

    Returns:
        The settings of the restored site; the files that were written; those that were there already,
        outside the state folder, and stayed as they were; and why nothing leaves until a person has
        decided, one for each ledger, empty where all agree with their check logs.

    Raises:
        ConfigError: and the state folder is as it was: the backup cannot be read, the state folder has
            files of a site, or the ledger is of other data than those of the settings.
        OSError: a file cannot be read or written.
    """
    with _opened(file) as archive:
        about = _checked(archive, file)
        if kit is None and about["kit"]:
            kit = Path(about["kit"])
        if kit is not None and not about["kit"]:
            raise ConfigError(
                f"{str(file)!r} is of a site without a kit; leave {str(kit)!r} out, and it is restored to "
                "where it was"
            )
        written: list[Path] = []
        kept: list[Path] = []
        if kit is not None:
            _put(archive, "kit", kit, written, kept)
            node = parse_node_config(parse_overrides([read_kit(kit).node_config()]))
        else:
            node = parse_node_config(about["settings"])
            if node.policy:
                _put(archive, "policy", Path(node.policy).expanduser().parent, written, kept)
        if there := [found for each in IN_STATE for found in node.state.glob(each)]:
            raise ConfigError(
                f"{str(there[0])!r} exists, and a backup is restored into an empty state folder only: what "
                "is there may be newer; move the folder away if it is lost"
            )
        prefix = "state/ledgers/"
        inside = {
            each.removeprefix(prefix).removesuffix(".jsonl")
            for each in archive.getnames()
            if each.startswith(prefix) and each.endswith(".jsonl")
        }
        own = own_ledger(node)
        if inside and (own is None or own.dataset not in inside):
            raise ConfigError(
                f"{str(file)!r} has no ledger of data = {node.data!r} in {node.data_dir!r}, and another "
                "path or kind would begin a new budget; mount the data where they were "
                f"({about['settings'].get('data-dir', '')!r})"
            )
        _put(archive, "state", node.state, written, kept)
    refusals = []
    for ledger in _ledgers(node):
        try:
            ledger.check()
        except LedgerError as error:
            refusals.append(str(error))
    return node, written, kept, refusals


def _checked(archive: tarfile.TarFile, file: Path) -> dict[str, Any]:
    """What the backup says of itself, after a look at the names of its files."""
    try:
        for member in archive:
            folder, _, inner = member.name.partition("/")
            allowed = {"state": IN_STATE, "kit": IN_KIT, "policy": ("*",)}.get(folder, ())
            path = PurePosixPath(inner)
            known = any(path.match(each) or path.parts[:1] == (each,) for each in allowed)
            if not member.isreg() or ".." in path.parts or not (known or member.name == SETTINGS):
                raise ConfigError(f"{str(file)!r}: {member.name[:80]!r} is nothing of a backup")
        about = json.loads(_content(archive, archive.getmember(SETTINGS)).read())
        if about["format"] != FORMAT:
            raise ConfigError(
                f"{str(file)!r} has format {about['format']}, and this version reads {FORMAT}; restore it "
                "with the version that wrote it"
            )
        return {"kit": str(about["kit"]), "settings": dict(about["settings"])}
    except (
        tarfile.TarError,
        EOFError,
        zlib.error,
        OSError,
        KeyError,
        ValueError,
        TypeError,
    ) as error:
        raise _damaged(file, error) from None


def _put(
    archive: tarfile.TarFile, folder: str, place: Path, written: list[Path], kept: list[Path]
) -> None:
    """Write the files of one folder of the archive; those that are there stay."""
    for member in archive.getmembers():
        if member.name.startswith(f"{folder}/"):
            target = place / member.name.partition("/")[2]
            made = create_file(target, _content(archive, member).read())
            (written if made else kept).append(target)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    found = archive.extractfile(member)
    assert found is not None  # It is a regular file.
    return found


@contextmanager
def _opened(file: Path) -> Iterator[tarfile.TarFile]:
    try:
        # To the end, where its checksum is: a part of an archive may be one, too.
        with gzip.open(file) as whole:
            while whole.read(PIECE):
                pass
        with tarfile.open(file, mode="r:gz") as archive:
            yield archive
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{str(file)!r} is no whole backup of a site ({error}); take another one")

"""Offline exchange: the coordinator signs a request, and learns from the files with which sites
reply to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import ConfigError, RunError, SurrogateError
from fedsurrogate.common.models.devices import pick_device
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.documents import read_at_most
from fedsurrogate.common.security.sealing import read_keys
from fedsurrogate.common.security.signed_requests import Request, read_request
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.common.signed_models.run_folders import is_run_folder, settings_of_run
from fedsurrogate.common.wire.bundles import LARGEST_BUNDLE, Bundle, unpack_bundle
from fedsurrogate.common.wire.records import pack_question, unpack_question
from fedsurrogate.server_app.federate import finished
from fedsurrogate.server_app.lifecycle.before_start import with_map_digest
from fedsurrogate.server_app.runs.writer import RunWriter
from fedsurrogate.strategies import OneShot, stored_strategy
from fedsurrogate.strategies.base.collection import Unrecorded
from fedsurrogate.strategies.base.receipts import stored_receipts
from fedsurrogate.strategies.pooling.public_projection import read_centre

PUBLIC = "fedpft.public"
# Settings that matter only on the coordinator's machine, or name a file there.
AT_HOME = (
    "output-dir",
    "resume",
    "data-dir",
    "weights-path",
    "device",
    PUBLIC,
    "deadline",
    "grace",
    "compare",
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
    centre = pack_question(read_centre(config.settings.fedpft.public, config.power))
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
    named = [bundle.manifest.get("run") for _, bundle in read if isinstance(bundle, Bundle)]
    stored = [settings_of_run(each) for each in run_folders if is_run_folder(each)]
    named += [each.digest for each in stored if each.full_digest == config.full_digest]
    config = replace(config, stored_as=str(named[0]) if named else "")
    kind, centre = stored_strategy(config), unpack_question(request.centre)
    reader = kind(config, Unrecorded(), "cpu", centre)
    contents: list[tuple[str, Content]] = [
        (file, (each.site, each.payload) if isinstance(each, Bundle) else each)
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
) -> Bundle | SurrogateError:
    """A site's bundle, or the error for which it is refused.

    Adds the bundle's receipt of the site's ledger to `receipts`.
    """
    if file.is_dir():
        return SurrogateError(
            "a folder without a site's signature; add a run folder with --trust-run-folder"
        )
    if file.suffix == ".pb":
        return SurrogateError("a surrogate without a site's signature; add it with --unsigned")
    try:
        bundle = unpack_bundle(_read(file), request, keys)
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
        return read_at_most(file, LARGEST_BUNDLE)
    except ConfigError as error:
        raise SurrogateError(str(error)) from None

"""Run a federation whose messages are carried as files."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.exchange.message_files import LARGEST_MANIFEST
from fedsurrogate.common.limits import SITE_NAME
from fedsurrogate.common.methods.logistic_rounds import LOGISTIC
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.registrations import TABLE, Registration, write_table
from fedsurrogate.common.security.sealing import read_keys
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.server_app.deployment.local_engine import folder_after
from fedsurrogate.server_app.deployment.request_key import VARIABLE, read_request_key
from fedsurrogate.server_app.exchange.file_grid import Exchange, FileGrid
from fedsurrogate.server_app.federate import federate
from fedsurrogate.server_app.lifecycle.before_start import with_map_digest
from fedsurrogate.server_app.offline import asked_of
from fedsurrogate.strategies.base.registered import Registered

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

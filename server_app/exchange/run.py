"""Run a federation whose messages are carried as files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from common.config.flat_settings import Scalar
from common.config.run_config import parse_run_config
from common.errors import ConfigError, RunError
from common.security.sealing import read_keys
from common.wire.validation import SITE_NAME
from server_app.deployment.request_key import VARIABLE, read_request_key
from server_app.deployment.submit import find_folder
from server_app.exchange.file_grid import Exchange, FileGrid
from server_app.federate import federate
from server_app.offline import AT_HOME
from strategies.base.registered import TABLE, Registered, Registration, write_table

DAY = 24 * 3600.0


def run_by_files(
    settings: Mapping[str, Scalar], signing: Path, keys_file: Path, out: Path, days: int, show: Callable[[str], None]
) -> Path:
    """Run a federation; return the run folder. Messages are files in `out`, a new or empty folder.

    signing: the folder with the coordinator's key. keys_file: the sites' public keys; these sites are asked, each under its
    name there. days: how long sites may answer one step. Raises ConfigError before anything is written, and RunError.
    """
    keys = read_keys(keys_file)
    if not keys or not all(map(SITE_NAME.fullmatch, keys)):
        raise ConfigError(f"{str(keys_file)!r} needs a line of `site key` for each site, with the site's name")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{str(out)!r} is not empty; each run needs a folder of its own for its messages")
    config = parse_run_config({"deadline": days * DAY, "sites": len(keys), **settings})
    private = read_request_key(signing)
    os.environ.setdefault(VARIABLE, str(signing.absolute()))
    run_id = secrets.randbits(62)
    asked = {key: value for key, value in settings.items() if key not in AT_HOME}
    expires = f"{datetime.now(UTC).date() + timedelta(days):%Y-%m-%d}"
    exchange = Exchange(out, keys, asked, private, expires, run_id)
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    table = {name: Registration("", node) for node, name in exchange.nodes().items()}
    write_table(out / TABLE, table)
    federate(config, FileGrid(exchange, show), run_id, Registered(out / TABLE))
    folder = find_folder(Path(config.output_dir).expanduser().absolute(), str(run_id))
    if folder is None:
        raise RunError(f"the run left no folder in {config.output_dir}")
    return folder

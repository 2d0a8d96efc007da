"""Records that private runs do not use until a person has looked.

An error that no listed cause explains (client_app/datasets/whole_site.py) is a defect of this
program, and it may depend on a single record. Neither answer to it is private: a refusal shows it
for nothing, and a release without records changes by more than one record. So it may show once, and
no coordinator may make it show again: from then on, private runs get what a site without records
would release, until a person deletes the file that `why_held` names.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path

from fedsurrogate.client_app.governance.ledger import dataset_id
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import LedgerError
from fedsurrogate.common.files import replace_file, stage_file

# Larger than what `hold` writes.
ROOM = 4096
log = logging.getLogger("fedsurrogate.site")


def hold(node: NodeConfig, failure: str) -> None:
    """Let no private run use the records from now on.

    Args:
        node: the site's settings.
        failure: that nothing explains.
    """
    file = _file(node)
    try:
        replace_file(file, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {failure}\n")
    except OSError as error:
        log.critical("%s cannot be written (%s): THE RECORDS STAY IN USE", file, error)
        return
    log.critical(
        "NO CAUSE IN THE LIST EXPLAINS THIS FAILURE (%s), so it may be about a single record. "
        "Private runs use no record from now on. Report it, correct the cause, then delete '%s'",
        failure,
        file,
    )


def check_room(node: NodeConfig) -> None:
    """Refuse a private run, before records are looked at, where a failure could not be held.

    Otherwise a defect that one record triggers would show in every run: on a full disk, or in a
    folder that cannot be written.

    Args:
        node: the site's settings.

    Raises:
        LedgerError: whatever the records are.
    """
    file = _file(node)
    try:
        stage_file(file, bytes(ROOM), durable=False).unlink()
    except OSError as error:
        raise LedgerError(
            f"'{file}' could not be written ({error}), so the records could not be held after a "
            "failure that may be about one of them; make room, and let this user write there"
        ) from None


def why_held(node: NodeConfig) -> str:
    """Why private runs use no record, and what ends this; empty if they do.

    Args:
        node: the site's settings.
    """
    file = _file(node)
    if not file.exists():
        return ""
    failure = file.read_text(errors="replace").strip()
    return (
        f"held since {failure}; nothing explains this failure, so it may be about a single record: "
        f"correct the cause, then delete '{file}'"
    )


def _file(node: NodeConfig) -> Path:
    return node.state / "held" / f"{dataset_id(node.data, node.data_dir)}.txt"

"""The `coordinator audit-log` command: what the coordinator's commands have done, and whether the
record is whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsurrogate.common.command_line import console, stderr_console


def audit_log(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="The folder that `coordinator certs` has made; else FEDSURROGATE_AUDIT_LOG."
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Print only whether the log is whole.")
    ] = False,
    holds: Annotated[
        str,
        typer.Option(
            metavar="DIGEST", help="A digest noted earlier: fail if lines up to it were cut off."
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the lines as they are, for a collector.")
    ] = False,
) -> None:
    """Show who started, stopped, accepted, revoked or exported what, and check the chain of lines.

    Each line holds the digest of the line before. Note the last digest elsewhere, and give it to
    --holds later: only that shows that no lines were cut off at the end. Exits with 1 for a log
    that was changed. Lines whose time is before that of the line before are named.
    """
    import json

    from rich.table import Table

    from fedsurrogate.common.errors import ConfigError, RunError
    from fedsurrogate.common.escapes import for_terminal
    from fedsurrogate.server_app.deployment.audit_log import VARIABLE, audit_file, entries

    file = audit_file(folder)
    if file is None:
        raise ConfigError(f"name the folder of `coordinator certs`, or set {VARIABLE}")
    last, held, number, time, earlier = "", False, 0, "", list[str]()
    table = Table("", "when (UTC)", "who", "what", "facts")
    for entry, last in entries(file):
        number += 1
        held = held or (bool(holds) and last == holds.strip().lower())
        if entry["time"] < time:
            earlier.append(str(number))
        time = entry["time"]
        if as_json:
            print(json.dumps(entry, sort_keys=True))
        facts = ", ".join(f"{name} {value}" for name, value in entry["facts"].items())
        who = entry["account"] + (f", key {entry['key'][-8:]}" if entry["key"] else "")
        row = (
            str(entry["number"]),
            entry["time"][:19].replace("T", " "),
            who,
            entry["action"],
            facts,
        )
        table.add_row(*map(for_terminal, row))
    if holds and not held:
        raise RunError(
            f"{file}: no line has the digest {holds[:16]}...; lines were cut off, or it is of "
            "another log"
        )
    if earlier:
        stderr_console().print(
            f"dated before the line before them: {', '.join(earlier[:20])}; the clock of the machine "
            "was set back, so their times are not to be relied on, and their order is",
            soft_wrap=True,
        )
    if as_json:
        return
    if not verify:
        console.print(table)
    console.print(
        f"{number} entries, whole; note the last digest elsewhere, for --holds: {last}",
        soft_wrap=True,
    )

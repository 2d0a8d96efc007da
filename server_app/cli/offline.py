"""The `coordinator key`, `request`, `learn` and `exchange` commands: for sites without a network
connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsurrogate.common.command_line import RunSettings, console, stderr_console
from fedsurrogate.server_app.cli.certs import show_kit
from fedsurrogate.server_app.cli.proposals import ProposalFile, settings_of
from fedsurrogate.server_app.cli.settings import MetricsAsJson
from fedsurrogate.server_app.deployment import SERVER_DAYS

if TYPE_CHECKING:
    from fedsurrogate.common.settings.base import Scalar

Folder = Annotated[
    Path,
    typer.Argument(help="The folder of `coordinator certs`; it holds the key, coordinator.key."),
]


def key(folder: Folder) -> None:
    """Show the public key that verifies this coordinator's requests: the sites' setting
    coordinator-key.

    This command or `coordinator certs` makes the private key when it is missing. It stays in the
    folder.
    """
    from fedsurrogate.server_app.deployment.request_key import make_request_key, request_public_key

    make_request_key(folder)
    print(request_public_key(folder))


def request(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="The file to write, for all sites.")],
    run_config: RunSettings = None,
    days: Annotated[
        int,
        typer.Option(min=0, max=3650, help="Days until the request expires; 0: it never expires."),
    ] = 90,
    proposal: ProposalFile = None,
) -> None:
    """Write a signed request for sites without a network connection; `site release` replies with a
    bundle.
    """
    from fedsurrogate.common.settings.base import parse_overrides
    from fedsurrogate.server_app.deployment.request_key import read_request_key
    from fedsurrogate.server_app.exchange import make_request

    settings = {**settings_of(proposal), **parse_overrides(run_config or [])}
    _check_and_note(folder, "request", settings)
    made = make_request(settings, out, read_request_key(folder), days)
    until = f", valid until {made.expires}" if made.expires else ""
    console.print(f"request {made.id}{until}: {out}", soft_wrap=True)


def learn(
    request: Annotated[Path, typer.Argument(help="The request file that the sites have received.")],
    bundles: Annotated[
        list[Path] | None, typer.Argument(help="Bundles; used only if a key in --keys signed them.")
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="File with the sites' public keys, one per line, as `site key` prints them."
        ),
    ] = None,
    trust_run_folder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            help="A run whose unsigned surrogates are used too; may be given several times.",
        ),
    ] = None,
    unsigned: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="An unsigned surrogate (.pb) that is used too; may be given several times.",
        ),
    ] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option(
            "-c",
            "--run-config",
            metavar="'key=value ...'",
            help="For this machine: output-dir, device, quorum, sites.",
        ),
    ] = None,
    as_json: MetricsAsJson = False,
) -> None:
    """Learn a head from the files with which sites replied to a request. Refused files are listed;
    the others are used.

    Only files signed by a listed key are used, unless you vouch for them: --trust-run-folder names
    a run whose surrogates arrived over your authenticated network, --unsigned a single surrogate.
    """
    from fedsurrogate.common.settings.base import parse_overrides
    from fedsurrogate.server_app.exchange import learn_from_files
    from fedsurrogate.server_app.report.quality_view import privacy_line
    from fedsurrogate.server_app.runs.reader import read_run

    local = parse_overrides(run_config or [])
    folder = learn_from_files(
        request, bundles or (), keys, local, trust_run_folder or (), unsigned or ()
    )
    run = read_run(folder)
    if as_json:
        print(json.dumps(run.metrics, indent=2))
        return
    for site in run.sites:
        console.print(
            f"{site.status:<10}{site.name}  {'; '.join(why for _, why in site.troubles)}".rstrip(),
            soft_wrap=True,
        )
    console.print(f"privacy {privacy_line(run.metrics)}", soft_wrap=True)
    console.print(str(folder), soft_wrap=True)


def exchange(
    folder: Folder,
    keys: Annotated[
        Path,
        typer.Option(help="File with the public keys of all sites, as `site key` prints them."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="A new folder, for the files of all messages.")
    ],
    run_config: RunSettings = None,
    days: Annotated[
        int, typer.Option(min=1, max=365, help="Days that sites have to answer one step.")
    ] = 30,
    proposal: ProposalFile = None,
    as_json: MetricsAsJson = False,
) -> None:
    """Run a federation whose messages are carried as files: every method, also in rounds, and
    secure sums.

    Each step writes one file a site, OUT/02-north.request. At the site, `site release
    02-north.request --out 02-north.reply` answers it. The command waits for the replies in OUT, and
    keeps running until the end. An empty file 02-north.lost tells that no reply will come.
    """
    from fedsurrogate.common.settings.base import parse_overrides
    from fedsurrogate.server_app.cli.control import show_result
    from fedsurrogate.server_app.exchange import run_by_files
    from fedsurrogate.server_app.lifecycle.resume import Interrupted, goodbye, interruptible

    def show(line: str) -> None:
        console.print(line, soft_wrap=True)

    overrides = {**settings_of(proposal), **parse_overrides(run_config or [])}
    _check_and_note(folder, "start", overrides)
    try:
        with interruptible():
            made = run_by_files(overrides, folder, keys, out, days, show)
    except Interrupted as stop:
        # Each run needs a folder of its own for its messages.
        fresh = next(
            name for n in count(2) if not (name := out.with_name(f"{out.name}-{n}")).exists()
        )
        words = ["--keys", str(keys), "--out", str(fresh), "--days", str(days)]
        if proposal is not None:
            words += ["--proposal", str(proposal)]
        own = {key: value for key, value in overrides.items() if key != "approval"}
        for line in goodbye(stop, ["coordinator", "exchange", str(folder), *words], own):
            show(line)
        raise typer.Exit(stop.exit_code) from None
    show_result(made, made.parent, as_json, True)


def _check_and_note(folder: Path, action: str, settings: Mapping[str, Scalar]) -> None:
    """Check that enough people have signed what sites are about to be asked, and note it."""
    from fedsurrogate.server_app.cli.proposals import check_run_signed
    from fedsurrogate.server_app.deployment.audit_log import note
    from fedsurrogate.server_app.deployment.submit import facts_of_run

    check_run_signed(settings, folder / "ca.crt")
    note(folder, action, facts_of_run(settings))


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


MEANS = {
    "new": "the federation does not know this site yet",
    "renewal": "the federation knows this site with this key; its certificate is made anew",
    "other key": "THE FEDERATION KNOWS THIS SITE WITH ANOTHER KEY, which this one would replace",
}


def enrol(
    folder: Annotated[Path, typer.Argument(help="The folder that `coordinator certs` has made.")],
    request: Annotated[Path, typer.Argument(help="The file of `site enrol` from the hospital.")],
    accept: Annotated[
        str,
        typer.Option(
            metavar="FINGERPRINT",
            help="Accept it: the fingerprint that the hospital has read out, such as by telephone.",
        ),
    ] = "",
    coordinator: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Pack the site's kit, too: where it reaches you."),
    ] = "",
    image: Annotated[
        str, typer.Option(help="Name of the container image at the site.")
    ] = "fedsurrogate",
    out: Annotated[
        Path | None, typer.Option(help="The kit to write; default: SITE.tar.gz.")
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, max=3650, help="Days for which the site's key is accepted.")
    ] = SERVER_DAYS,
) -> None:
    """Show who asks to take part, and accept it: a key that was made at the hospital, and never
    leaves it.

    Without --accept nothing changes. Compare the fingerprint with the hospital on another way than
    the request came. Then `coordinator register` lets the site in. The same command renews a site
    whose time ends.
    """
    from fedsurrogate.common.escapes import for_rows
    from fedsurrogate.common.security.documents import in_groups
    from fedsurrogate.server_app.deployment.audit_log import note
    from fedsurrogate.server_app.deployment.certificates import valid_until
    from fedsurrogate.server_app.deployment.enrolment import accept as accept_request
    from fedsurrogate.server_app.deployment.enrolment import (
        check_typed,
        request_in,
        standing,
    )

    asks, content = request_in(request)
    means = MEANS[standing(folder, asks)]
    if accept:
        check_typed(asks, accept)
        facts = {"site": asks.site, "hospital": asks.hospital, "fingerprint": asks.fingerprint()}
        note(folder, "accept", facts)
        accept_request(folder, asks, content, days)
    rows = {
        "site": asks.site,
        "hospital": asks.hospital,
        "contact": asks.contact,
        "fingerprint": in_groups(asks.fingerprint()),
        "": means if not accept else f"accepted until {valid_until(folder / 'sites' / asks.site)}",
    }
    for name, value in rows.items():
        # The last one is ours.
        width = console.width if name else len(value) + 20
        console.print(for_rows(f"{name:<13}", value, width), soft_wrap=True, markup=False)
    if not accept:
        console.print(
            "call the hospital; if it reads out the same fingerprint: coordinator enrol "
            f"{folder} {request} --accept FINGERPRINT --coordinator HOST:PORT",
            soft_wrap=True,
        )
        return
    if coordinator:
        show_kit(folder, asks.site, coordinator, image, out)
    console.print(f"let it in: coordinator register {folder}", soft_wrap=True)

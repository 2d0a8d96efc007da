"""The `coordinator init` command, `sites certs`, `kit` and `accept`, and `approval log`:
certificates and keys by which
coordinator and sites trust each other, and the record of what was done.
"""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsurrogate.common.command_line import Json, console, print_table, stderr_console
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.escapes import for_rows, for_terminal

from ..deployment import SERVER_DAYS
from .control import Authority, Control, register

REMEDIES = {
    "authority": "a federation has one authority: make another folder, and new kits for all sites",
    "server": "sign the coordinator's certificate again: coordinator sites certs {folder} --renew",
    "site": "ask {name} to run `site enrol` again, then: coordinator sites accept {name}.csr --folder {folder}",
}


def certs(
    folder: Path,
    host: list[str] | None = None,
    site: list[str] | None = None,
    renew: Annotated[bool, typer.Option("--renew")] = False,
    new_key: Annotated[bool, typer.Option("--new-key")] = False,
    days: Annotated[int, typer.Option(min=1, max=3650)] = SERVER_DAYS,
    as_json: Json = False,
) -> None:
    """Make the certificates and keys of a federation, or show when they expire.

    Makes only missing files. A site gets the folder FOLDER/sites/NAME, and nothing else. Exits with
    1 when a certificate has expired.

    Args:
        folder: The folder for the certificates and keys. Keep it private.
        host: A host name or address at which sites reach the coordinator; may be given several
            times.
        site: A site to make a key for; may be given several times.
        renew: Sign the coordinator's certificate again; sites need nothing new.
        new_key: Make a new key for every --site, in place of its lost, stolen or revoked one.
        days: Days for which a new certificate of the coordinator is valid.
    """
    from rich.table import Column

    from ..deployment.audit_log import note
    from ..deployment.certificates import credentials, drop_site_keys, issue

    if new_key and not site:
        raise typer.BadParameter(
            "needs --site, the site that gets a new key", param_hint="--new-key"
        )
    if host or site or renew:
        asked = {"hosts": host or [], "sites": site or [], "renew": renew, "new_key": new_key}
        note(folder, "certify", asked)
    if new_key:
        drop_site_keys(folder, site or [])
    issue(folder, host or (), site or (), renew, days)
    now = datetime.datetime.now(datetime.UTC)
    states = [(credential, credential.state(now)) for credential in credentials(folder)]
    if as_json:
        rows = [
            {
                "kind": credential.kind,
                "name": credential.name,
                "file": str(credential.file),
                "fingerprint": credential.fingerprint,
                "expires": credential.expires and credential.expires.isoformat(timespec="seconds"),
                "state": state,
            }
            for credential, state in states
        ]
        print(json.dumps(rows, indent=2))
    else:
        shown = []
        for each, state in states:
            until = f"{each.expires:%Y-%m-%d}" if each.expires else ""
            file = str(each.file.relative_to(folder))
            shown.append((each.kind, each.name, file, until, state))
        ends = Column("valid until", no_wrap=True)
        columns = ("", "for", "file", ends, Column(no_wrap=True))
        print_table(columns, shown, title=str(folder))
        for credential, state in states:
            if state != "ok":
                remedy = REMEDIES[credential.kind].format(folder=folder, name=credential.name)
                console.print(remedy, style="yellow")
    if any(state == "expired" for _, state in states):
        raise typer.Exit(1)


def kit(
    folder: Path,
    site: str,
    coordinator: Annotated[str, typer.Option(metavar="HOST:PORT")],
    image: str = "fedsurrogate",
    out: Path | None = None,
) -> None:
    """Pack the kit of a hospital into one archive: certificates, key, compose file, settings,
    policy template, a guide.

    If `coordinator sites certs` made the site's private key, the kit holds it: send it only over a
    channel that you trust. The kit of a site that enrolled holds no secret.

    Args:
        folder: The folder that `coordinator sites certs` has made.
        site: The site that gets the kit; the folder must hold its key.
        coordinator: Where the site reaches the coordinator.
        image: Name of the container image at the site.
        out: The archive to write; default: SITE.tar.gz.
    """
    show_kit(folder, site, coordinator, image, out)


def show_kit(
    folder: Path, site: str, coordinator: str, image: str, out: Path | None, again: bool = False
) -> None:
    """Pack a kit, and print what it holds. Arguments as for `kit`; `again`: in place of an earlier one."""
    from ..deployment.kit import SITE_KEY, pack_kit

    file = out or Path(f"{site}.tar.gz")
    if again and out is None:
        file.unlink(missing_ok=True)
    names = pack_kit(folder, site, coordinator, image, file)
    for name in names:
        console.print(f"  {name}")
    secret = f"certificates/{SITE_KEY}" in names
    console.print(
        f"{file}; it holds the private key of {site}: send it only over a channel that you trust"
        if secret
        else f"{file}; it holds no secret"
    )


MEANS = {
    "new": "the federation does not know this site yet",
    "renewal": "the federation knows this site with this key; its certificate is made anew",
    "other key": "THE FEDERATION KNOWS THIS SITE WITH ANOTHER KEY, which this one would replace",
}


def init(
    folder: Path,
    host: list[str] | None = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 9092,
) -> None:
    """Make the folder of a federation: certificates and settings.

    It holds certificates and keys, the policy and settings that hospitals get, and settings and compose
    file of this machine. What is there stays as it is. In this folder, `coordinator superlink`, `sites
    accept` and `run` need no address and no certificate.

    Example: coordinator init federation/ --host fl.example.org

    Args:
        folder: The folder of the federation. Keep it private.
        host: A host name or address at which sites reach this machine; may be given several times;
            else it is asked.
        port: The only port that sites reach.
    """
    from ..deployment.audit_log import note
    from ..deployment.federation import CERTIFICATES, SETTINGS, make_federation, settings_of

    if not host and not sys.stdin.isatty():
        raise typer.BadParameter("name this machine, as hospitals reach it", param_hint="--host")
    host = host or [typer.prompt("Host name or address at which hospitals reach this machine")]
    note(
        folder / CERTIFICATES,
        "certify",
        {"hosts": host, "sites": [], "renew": False, "new_key": False},
    )
    made = make_federation(folder, host, port)
    for file in made:
        console.print(f"  {file}")
    if (there := folder / SETTINGS) not in made:
        console.print(
            f"{there} was there and stays, with COORDINATOR={settings_of(folder)['COORDINATOR']}. To move: edit "
            "COORDINATOR and FLEET_PORT there, `coordinator sites certs --renew` with a new --host, and start "
            "the SuperLink again; hospitals edit COORDINATOR in their .env",
            style="yellow",
        )
    console.print(
        f"  {folder / CERTIFICATES}: certificates and keys; keep a copy of it on another machine\n"
        f"start it: cd {shlex.quote(str(folder))} && coordinator superlink, or docker compose up -d\n"
        "let a hospital in: coordinator sites accept REQUEST"
    )


def accept(
    request: Path,
    fingerprint: str = "",
    folder: Path = Path(),
    coordinator: Annotated[str, typer.Option(metavar="HOST:PORT")] = "",
    out: Path | None = None,
    days: Annotated[int, typer.Option(min=1, max=3650)] = SERVER_DAYS,
    control: Control = "",
    root_certificates: Authority = None,
) -> None:
    """Show who asks to take part, and accept it: pack the site's kit, and let it in.

    The key was made at the hospital, and never leaves it. Without the fingerprint nothing changes:
    compare it with the hospital over another channel, such as by telephone. The same command renews a site
    whose certificate ends.

    Example: coordinator sites accept north.csr

    Args:
        request: The file of `site enrol` from the hospital.
        fingerprint: What the hospital has read out, such as by telephone; else it is asked.
        folder: The folder of `coordinator init`, or of `coordinator sites certs`.
        coordinator: Where the site reaches you; default: as `init` has it.
        out: The kit to write; default: SITE.tar.gz.
        days: Days for which the site's key is accepted.
    """
    from fedsurrogate.common.security.documents import in_groups

    from ..deployment.addresses import connect
    from ..deployment.audit_log import note
    from ..deployment.certificates import valid_until
    from ..deployment.enrolment import accept as accept_request
    from ..deployment.enrolment import check_typed, request_in, standing
    from ..deployment.federation import certificates_of, settings_of
    from ..deployment.kit import check_free
    from ..deployment.submit import registration

    credentials, settings = certificates_of(folder), settings_of(folder)
    asks, content = request_in(request)
    if out is not None:
        check_free(out)
    if fingerprint:
        check_typed(asks, fingerprint)
    asked = not fingerprint and sys.stdin.isatty()
    rows = {
        "site": asks.site,
        "hospital": asks.hospital,
        "contact": asks.contact,
        # Where a person types it, it must come from the hospital, not from this screen.
        "fingerprint": "" if asked else in_groups(asks.fingerprint()),
        "": MEANS[standing(credentials, asks)],
    }
    for name, value in rows.items():
        # The last one is ours.
        width = console.width if name else len(value) + 20
        if value:
            console.print(for_rows(f"{name:<13}", value, width), markup=False)
    if asked:
        fingerprint = typer.prompt("Call the hospital. What fingerprint does it read out")
        check_typed(asks, fingerprint)
    if not fingerprint:
        console.print("nothing has changed; call the hospital, and give --fingerprint")
        return
    facts = {"site": asks.site, "hospital": asks.hospital, "fingerprint": asks.fingerprint()}
    note(credentials, "accept", facts)
    accept_request(credentials, asks, content, days)
    console.print(f"accepted until {valid_until(credentials / 'sites' / asks.site)}")
    if address := coordinator or settings.get("COORDINATOR", ""):
        image = settings.get("IMAGE") or "fedsurrogate"
        show_kit(credentials, asks.site, address, image, out, again=True)
    try:
        connect(control, seconds=5)
    except OSError:
        later = registration(credentials, control, root_certificates)
        console.print(f"no SuperLink answers at {control}; let it in when it runs: {later}")
    else:
        register(credentials, control, root_certificates)


def audit_log(
    folder: Annotated[Path | None, typer.Argument()] = None,
    verify: Annotated[bool, typer.Option("--verify")] = False,
    holds: Annotated[str, typer.Option(metavar="DIGEST")] = "",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Show who started, stopped, accepted, revoked or exported what, and check the chain of lines.

    Each line holds the digest of the line before. Note the last digest elsewhere, and give it to
    --holds later: only that shows that no lines were cut off at the end. Exits with 1 for a log
    that was changed. Lines whose time is before that of the line before are named.

    Args:
        folder: The folder that `coordinator sites certs` has made; else FEDSURROGATE_AUDIT_LOG.
        verify: Print only whether the log is whole.
        holds: A digest noted earlier: fail if lines up to it were cut off.
        as_json: Print the lines as they are, for a collector.
    """
    from ..deployment.audit_log import VARIABLE, audit_file, entries

    file = audit_file(folder)
    if file is None:
        raise ConfigError(f"name the folder of `coordinator sites certs`, or set {VARIABLE}")
    last, held, number, time, earlier = "", False, 0, "", list[str]()
    rows = []
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
        rows.append(map(for_terminal, row))
    if holds and not held:
        raise RunError(
            f"{file}: no line has the digest {holds[:16]}...; lines were cut off, or it is of "
            "another log"
        )
    if earlier:
        stderr_console().print(
            f"dated before the line before them: {', '.join(earlier[:20])}; the clock of the machine "
            "was set back, so their times are not to be relied on, and their order is"
        )
    if as_json:
        return
    if not verify:
        print_table(("", "when (UTC)", "who", "what", "facts"), rows)
    console.print(f"{number} entries, whole; note the last digest elsewhere, for --holds: {last}")

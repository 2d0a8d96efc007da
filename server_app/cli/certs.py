"""The `coordinator certs` command: certificates and keys by which coordinator and sites trust each
other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedsurrogate.common.command_line import Json, console
from fedsurrogate.server_app.deployment import SERVER_DAYS

REMEDIES = {
    "authority": "a federation has one authority: make another folder, and new kits for all sites",
    "server": "sign the coordinator's certificate again: coordinator certs {folder} --renew",
    "site": "ask {name} to run `site enrol` again, then: coordinator enrol {folder} {name}.csr",
}


def certs(
    folder: Annotated[
        Path, typer.Argument(help="The folder for the certificates and keys. Keep it private.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A host name or address at which sites reach the coordinator; may be given "
            "several times."
        ),
    ] = None,
    site: Annotated[
        list[str] | None, typer.Option(help="A site to make a key for; may be given several times.")
    ] = None,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew", help="Sign the coordinator's certificate again; sites need nothing new."
        ),
    ] = False,
    new_key: Annotated[
        bool,
        typer.Option(
            "--new-key",
            help="Make a new key for every --site, in place of its lost, stolen or revoked one.",
        ),
    ] = False,
    days: Annotated[
        int,
        typer.Option(
            min=1, max=3650, help="Days for which a new certificate of the coordinator is valid."
        ),
    ] = SERVER_DAYS,
    as_json: Json = False,
) -> None:
    """Make the certificates and keys of a federation, or show when they expire.

    Makes only missing files. A site gets the folder FOLDER/sites/NAME, and nothing else. Exits with
    1 when a certificate has expired.
    """
    import datetime

    from rich.table import Column, Table

    from fedsurrogate.server_app.deployment.audit_log import note
    from fedsurrogate.server_app.deployment.certificates import drop_site_keys, issue, papers

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
    states = [(paper, paper.state(now)) for paper in papers(folder)]
    if as_json:
        rows = [
            {
                "kind": paper.kind,
                "name": paper.name,
                "file": str(paper.file),
                "fingerprint": paper.fingerprint,
                "expires": paper.expires and paper.expires.isoformat(timespec="seconds"),
                "state": state,
            }
            for paper, state in states
        ]
        print(json.dumps(rows, indent=2))
    else:
        table = Table(
            "",
            "for",
            "file",
            Column("valid until", no_wrap=True),
            Column(no_wrap=True),
            title=str(folder),
        )
        for paper, state in states:
            until = f"{paper.expires:%Y-%m-%d}" if paper.expires else ""
            table.add_row(paper.kind, paper.name, str(paper.file.relative_to(folder)), until, state)
        console.print(table)
        for paper, state in states:
            if state != "ok":
                remedy = REMEDIES[paper.kind].format(folder=folder, name=paper.name)
                console.print(remedy, style="yellow", soft_wrap=True)
    if any(state == "expired" for _, state in states):
        raise typer.Exit(1)


def kit(
    folder: Annotated[Path, typer.Argument(help="The folder that `coordinator certs` has made.")],
    site: Annotated[
        str, typer.Argument(help="The site that gets the kit; the folder must hold its key.")
    ],
    coordinator: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the site reaches the coordinator.")
    ],
    image: Annotated[
        str, typer.Option(help="Name of the container image at the site.")
    ] = "fedsurrogate",
    out: Annotated[
        Path | None, typer.Option(help="The archive to write; default: SITE.tar.gz.")
    ] = None,
) -> None:
    """Pack the kit of a hospital into one archive: certificates, key, compose file, settings,
    policy template, a guide.

    If `coordinator certs` made the site's private key, the kit holds it: send it only over a
    channel that you trust. The kit of a site that enrolled holds no secret.
    """
    show_kit(folder, site, coordinator, image, out)


def show_kit(folder: Path, site: str, coordinator: str, image: str, out: Path | None) -> None:
    """Pack a kit, and print what it holds. Arguments as for `kit`."""
    from fedsurrogate.server_app.deployment.kit import SITE_KEY, pack_kit

    file = out or Path(f"{site}.tar.gz")
    names = pack_kit(folder, site, coordinator, image, file)
    for name in names:
        console.print(f"  {name}", soft_wrap=True)
    secret = f"papers/{SITE_KEY}" in names
    console.print(
        f"{file}; it holds the private key of {site}: send it only over a channel that you trust"
        if secret
        else f"{file}; it holds no secret",
        soft_wrap=True,
    )

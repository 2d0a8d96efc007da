"""The `coordinator enrol` command: a hospital that has made its own key takes part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsurrogate.common.command_line import console
from fedsurrogate.server_app.cli.kit import show_kit
from fedsurrogate.server_app.deployment import SERVER_DAYS

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
    from fedsurrogate.common.security.fingerprints import in_groups
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

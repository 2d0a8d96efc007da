"""The `site enrol` command: a site's own key, and the request to take part with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsurrogate.common.command_line import console


def enrol(
    name: Annotated[
        str, typer.Argument(metavar="SITE", help="This site's name in the federation.")
    ],
    hospital: Annotated[str, typer.Option(help="The hospital's name, in words.")],
    contact: Annotated[str, typer.Option(help="An e-mail address, for the coordinator.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The site's folder, into which its kit is unpacked; default: ./SITE."),
    ] = None,
) -> None:
    """Make this site's key, which stays here, and a request for the coordinator, which holds no
    secret.

    A key that is there is kept: the command also renews a site whose time ends. The coordinator
    compares the fingerprint with you, such as by telephone, and sends back a kit.

    Example: site enrol north --hospital 'St. Mary' --contact it@mary.example
    """
    from fedsurrogate.common.errors import ConfigError
    from fedsurrogate.common.files import replace_file
    from fedsurrogate.common.security import enrolment
    from fedsurrogate.common.security.fingerprints import in_groups

    enrolment.check_site_name(name)
    folder = out or Path(name)
    papers, request = folder / "papers", folder / f"{name}.csr"
    try:
        enrolment.new_node_key(papers, name)
        key = enrolment.read_node_key(papers / enrolment.KEY)
        content = enrolment.new_request(name, hospital, contact, key)
        replace_file(request, content, mode=enrolment.READABLE)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror})") from None
    lines = {
        papers / enrolment.KEY: "stays here; make a copy of it, and show it to no one",
        papers / enrolment.PUBLIC: "its public half",
        request: "for the coordinator; it holds no secret",
    }
    for file, words in lines.items():
        console.print(f"  {file}: {words}", soft_wrap=True, markup=False)
    console.print(
        f"fingerprint  {in_groups(enrolment.read_request(content).fingerprint())}\n"
        "read it out when the coordinator calls; then unpack the kit next to this folder:\n"
        f"  tar xzf {name}.tar.gz           the first time\n"
        f"  tar xzf {name}.tar.gz {name}/papers    to renew: settings and policy stay as they are",
        soft_wrap=True,
    )

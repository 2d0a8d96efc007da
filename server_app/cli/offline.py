"""The `coordinator key`, `request` and `learn` commands: for sites without a network connection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from common.command_line import RunSettings, console
from common.config.flat_settings import parse_overrides
from server_app.cli.options import MetricsAsJson

Folder = Annotated[Path, typer.Argument(help="The folder of `coordinator certs`; the key lies in its coordinator.key.")]


def key(folder: Folder) -> None:
    """Show the public key under which sites know this coordinator's requests: their coordinator-key.

    The private half is made when first needed, by this command or `coordinator certs`, and stays in the folder.
    """
    from server_app.deployment.request_key import make_request_key, request_public_key

    make_request_key(folder)
    print(request_public_key(folder))


def request(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="The file to write, for all sites.")],
    run_config: RunSettings = None,
    days: Annotated[int, typer.Option(min=0, max=3650, help="Days for which sites answer it; 0: no end.")] = 90,
) -> None:
    """Write a signed request for sites without a network connection; `site release` answers it with a bundle."""
    from server_app.deployment.request_key import read_request_key
    from server_app.offline import make_request

    made = make_request(parse_overrides(run_config or []), out, read_request_key(folder), days)
    until = f", to be answered until {made.expires}" if made.expires else ""
    console.print(f"request {made.id}{until}: {out}", soft_wrap=True)


def learn(
    request: Annotated[Path, typer.Argument(help="The request that the sites have answered.")],
    bundles: Annotated[list[Path] | None, typer.Argument(help="Bundles; each counts if a key of --keys signed it.")] = None,
    keys: Annotated[
        Path | None, typer.Option(help="The sites' public keys, a line each, as `site key` prints them.")
    ] = None,
    trust_run_folder: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="A run whose unsigned surrogates count as well; may be given several times."),
    ] = None,
    unsigned: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A surrogate (.pb) that counts unsigned; may be given several times."),
    ] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option(
            "-c", "--run-config", metavar="'key=value ...'", help="Of this machine: output-dir, device, quorum, sites."
        ),
    ] = None,
    as_json: MetricsAsJson = False,
) -> None:
    """Learn a head from files that sites have answered a request with. What is refused is named, and the others count.

    Only what a listed key has signed counts, unless you vouch for it: name a run whose surrogates came over your
    authenticated network with --trust-run-folder, a single surrogate with --unsigned.
    """
    from server_app.offline import learn_from_files
    from server_app.report.privacy_view import privacy_line
    from server_app.runs.run_view import read_run

    local = parse_overrides(run_config or [])
    folder = learn_from_files(request, bundles or (), keys, local, trust_run_folder or (), unsigned or ())
    run = read_run(folder)
    if as_json:
        print(json.dumps(run.metrics, indent=2))
        return
    for site in run.sites:
        console.print(f"{site.status:<10}{site.name}  {'; '.join(why for _, why in site.troubles)}".rstrip(), soft_wrap=True)
    console.print(f"privacy {privacy_line(run.metrics)}", soft_wrap=True)
    console.print(str(folder), soft_wrap=True)

"""The `coordinator request` and `coordinator learn` commands: for sites without a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from common.config import parse_overrides
from server_app.options import MetricsAsJson, Overrides

console = Console(highlight=False, markup=False, emoji=False)


def request(
    out: Annotated[Path, typer.Option(help="The file to write, for all sites.")], run_config: Overrides = None
) -> None:
    """Write a request that people carry to sites without a line; `site release` answers it with a bundle."""
    from server_app.carried import make_request

    made = make_request(parse_overrides(run_config or []), out)
    console.print(f"request {made.id}: {out}", soft_wrap=True)


def learn(
    request: Annotated[Path, typer.Argument(help="The request that the sites have answered.")],
    files: Annotated[list[Path], typer.Argument(help="Bundles, surrogates that came over a network (.pb), or run folders.")],
    keys: Annotated[
        Path | None, typer.Option(help="The sites' public keys, a line each, as `site key` prints them.")
    ] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option(
            "-c", "--run-config", metavar="'key=value ...'", help="Of this machine: output-dir, device, quorum, sites."
        ),
    ] = None,
    as_json: MetricsAsJson = False,
) -> None:
    """Learn a head from files that sites have answered a request with. What is refused is named, and the others count."""
    from server_app.carried import learn_from_files
    from server_app.privacy_view import privacy_line
    from server_app.run_view import read_run

    folder = learn_from_files(request, files, keys, parse_overrides(run_config or []))
    run = read_run(folder)
    if as_json:
        print(json.dumps(run.metrics, indent=2))
        return
    for site in run.sites:
        console.print(f"{site.status:<10}{site.name}  {'; '.join(why for _, why in site.troubles)}".rstrip(), soft_wrap=True)
    console.print(f"privacy {privacy_line(run.metrics)}", soft_wrap=True)
    console.print(str(folder), soft_wrap=True)

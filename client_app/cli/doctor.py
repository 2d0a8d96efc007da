"""The `site doctor` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsurrogate.client_app.cli.options import MaybeNode, node_of
from fedsurrogate.common.command_line import Json, RunSettings, console, print_error, run_config_of

if TYPE_CHECKING:
    from fedsurrogate.client_app.diagnostics.findings import Finding
    from fedsurrogate.client_app.node_config import NodeConfig
    from fedsurrogate.common.run import Run

# Exit code of wrong usage, as for a wrong option.
USAGE = 2
NEEDED = """nothing to examine; give at least one of these:
  --node-config 'key=value ...'   this site's settings, to check its data, policy, ledger and backbone
                                  (or the variable FEDSURROGATE_NODE_CONFIG; `site settings` explains them)
  --superlink HOST:PORT           the coordinator, to check the connection
  --run-config 'key=value ...'    the settings of a run, to check whether this site can take part"""
STYLES = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red"}


def doctor(
    node_config: MaybeNode = None,
    run_config: RunSettings = None,
    superlink: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="The coordinator; without it only this machine is checked."
        ),
    ] = "",
    root_certificates: Annotated[
        Path | None, typer.Option(help="ca.crt of the site kit, to authenticate the coordinator.")
    ] = None,
    auth_supernode_private_key: Annotated[
        Path | None, typer.Option(help="site.key of the site kit, to authenticate this site.")
    ] = None,
    fingerprint: Annotated[
        str, typer.Option(help="Fingerprint of the coordinator's backbone.")
    ] = "",
    link_only: Annotated[
        bool, typer.Option("--link-only", help="Check the connection only, as a health check.")
    ] = False,
    runtime: Annotated[
        str,
        typer.Option(
            metavar="unix:/PATH",
            help="The socket of `site node`: check also whether `site app` uses this policy; with "
            "--link-only, whether it has found the data.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Check this machine and its connection to the coordinator before a run: PASS, WARN or FAIL,
    and what to do.

    Takes the same options as `site join`. Without any, it asks on a terminal what to examine;
    elsewhere it lists what it needs. Nothing is changed, nothing leaves. Exits with 1 if a check
    fails, with 2 if there is nothing to examine.
    """
    from dataclasses import asdict
    from itertools import chain

    from rich.text import Text

    from fedsurrogate.client_app.diagnostics.connection_checks import check_link
    from fedsurrogate.client_app.diagnostics.findings import Link
    from fedsurrogate.client_app.processes.app_report import check_app
    from fedsurrogate.client_app.processes.joining import check_data

    if link_only and not superlink:
        raise typer.BadParameter("needs --superlink, the coordinator", param_hint="--link-only")
    if not (node_config or run_config or superlink or runtime):
        if sys.stdin.isatty() and not as_json:
            node_config, superlink = _ask()
        if not (node_config or superlink):
            print_error(NEEDED)
            raise typer.Exit(USAGE)
    run, node = run_config_of(run_config), node_of(node_config or [])
    link = (
        Link.parse(superlink, root_certificates, auth_supernode_private_key) if superlink else None
    )
    findings = []
    for each in chain(
        [check_data(runtime) if link_only else check_app(runtime, node)] if runtime else [],
        check_link(link) if link else [],
        [] if link_only else _check_site(run, node, fingerprint, bool(run_config)),
    ):
        findings.append(each)
        if not as_json:
            line = Text.assemble((each.state, STYLES[each.state]), f"  {each.what:<16}{each.found}")
            console.print(line, soft_wrap=True)
            if each.remedy:
                console.print(f"{'':<22}{each.remedy}", style="italic", soft_wrap=True)
    if as_json:
        print(json.dumps([asdict(each) for each in findings], indent=2))
    if any(each.state == "FAIL" for each in findings):
        raise typer.Exit(1)


def _check_site(run: Run, node: NodeConfig, fingerprint: str, run_named: bool) -> Iterator[Finding]:
    # Imported here: the health check of the link, once a minute, must not load torch.
    from fedsurrogate.client_app.diagnostics.node_checks import check_isolation
    from fedsurrogate.client_app.diagnostics.site_checks import check_site

    yield check_isolation()
    yield from check_site(run, node, fingerprint, run_named)


def _ask() -> tuple[list[str], str]:
    """Ask for this site's settings, or a file that holds them, and for the coordinator. Empty
    answers leave a part out.
    """
    typer.echo("What shall be examined? An empty answer leaves a part out.")
    settings = typer.prompt(
        "Settings of this site (key=value ...), or a file with them", default="", show_default=False
    )
    superlink = typer.prompt("Coordinator (HOST:PORT)", default="", show_default=False)
    return settings_in(settings.strip()), superlink.strip()


def settings_in(text: str) -> list[str]:
    """The settings in a text, or in the file that it names.

    Args:
        text: key=value ..., or the name of a file: TOML, or lines of key=value.

    Raises:
        OSError: for a file that cannot be read.

    Example:
        >>> settings_in('site="north" data="digits"')
        ['site="north" data="digits"']
    """
    import tomllib

    if not text or "=" in text:
        return [text] if text else []
    content = Path(text).expanduser().read_text("utf-8-sig", errors="replace")
    try:
        return [
            f"{key}={json.dumps(value, ensure_ascii=False)}"
            for key, value in tomllib.loads(content).items()
        ]
    except tomllib.TOMLDecodeError:
        return [
            line
            for line in content.splitlines()
            if line.strip() and not line.lstrip().startswith("#")
        ]

"""The `site doctor` and `metrics` commands: checks of a site, and its figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from fedsurrogate.common.command_line import (
    LISTEN,
    Exposed,
    Json,
    Listen,
    RunSettings,
    WatchedCertificates,
    console,
    host_and_port,
    print_error,
    run_config_of,
    stderr_console,
    wait_for_interrupt,
)
from fedsurrogate.common.errors import ConfigError

from .join import UNOPENED, opened
from .options import KitFolder, MaybeNode, RootCertificates, SiteKey, node_of, print_json

if TYPE_CHECKING:
    from fedsurrogate.common.run import Run

    from ..diagnostics.findings import Finding
    from ..diagnostics.site_checks import SiteCollector
    from ..node_config import NodeConfig


# Exit code of wrong usage, as for a wrong option.
USAGE = 2
NEEDED = """nothing to examine; give at least one of these:
  --node-config 'key=value ...'   this site's settings, to check its data, policy, ledger and backbone
                                  (or the variable FEDSURROGATE_NODE_CONFIG; `site settings` explains them)
  --superlink HOST:PORT           the coordinator, to check the connection
  --run-config 'key=value ...'    the settings of a run, to check whether this site can take part"""
STYLES = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red"}


def doctor(
    kit: KitFolder = None,
    node_config: MaybeNode = None,
    run_config: RunSettings = None,
    superlink: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="The coordinator; without it only this machine is checked."
        ),
    ] = "",
    root_certificates: RootCertificates = None,
    auth_supernode_private_key: SiteKey = None,
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
    """Check this machine and its connection before a run.

    Takes the folder of a kit, or the same options as `site join`. Without any, it lists what
    it needs. Nothing is changed, nothing leaves. Exits with 1 if a check fails, with 2 if there is
    nothing to examine, with 3 if only the ledger fails, because nobody has opened it.
    """
    from dataclasses import asdict
    from itertools import chain

    from ..diagnostics.connection_checks import check_link
    from ..diagnostics.findings import Link
    from ..processes.app_report import check_app
    from ..processes.supervisor import check_data

    if kit is not None:
        unpacked = opened(kit)
        node_config = [unpacked.node_config()]
        superlink, root_certificates, auth_supernode_private_key = unpacked.link
    if link_only and not superlink:
        raise typer.BadParameter("needs --superlink, the coordinator", param_hint="--link-only")
    if not (node_config or run_config or superlink or runtime):
        print_error(NEEDED)
        raise typer.Exit(USAGE)
    node = node_of(node_config or [])
    # Slides are bags in every run.
    usual = ["features.bag='mean'"] if node.data == "slides" else None
    run = run_config_of(run_config or usual)
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
            _show(each)
    if as_json:
        print_json([asdict(each) for each in findings])
    if failed := {each.what for each in findings if each.state == "FAIL"}:
        raise typer.Exit(UNOPENED if failed == {"ledger"} and _is_unopened(node) else 1)


def _show(finding: Finding) -> None:
    from rich.text import Text

    state = (finding.state, STYLES[finding.state])
    console.print(Text.assemble(state, f"  {finding.what:<16}{finding.found}"), soft_wrap=True)
    if finding.remedy:
        console.print(f"{'':<22}{finding.remedy}", style="italic")


def _is_unopened(node: NodeConfig) -> bool:
    from ..governance.ledger import own_ledger

    return (ledger := own_ledger(node)) is not None and ledger.is_new


def _check_site(run: Run, node: NodeConfig, fingerprint: str, run_named: bool) -> Iterator[Finding]:
    # Imported here: the health check of the link, once a minute, must not load torch.
    from ..diagnostics.site_checks import check_isolation, check_site

    yield check_isolation()
    yield from check_site(run, node, fingerprint, run_named)


def metrics(
    node_config: MaybeNode = None,
    runtime: Annotated[
        str,
        typer.Option(
            metavar="unix:/PATH",
            help="The socket of `site node`: the running `site app` then gives the figures.",
        ),
    ] = "",
    certificate: WatchedCertificates = None,
    listen: Listen = LISTEN,
    exposed: Exposed = False,
) -> None:
    """Serve this site to Prometheus, at http://HOST:PORT/metrics, until interrupted.

    Shows budget, ledger, data, disks and certificates. With --runtime it reads nothing of the site
    itself, so it may have a network and needs no folder but that of the socket. Otherwise it reads
    the ledger of the node-config. Needs the extra `monitor`.
    """
    from fedsurrogate.common.metrics_page import MachineCollector, is_loopback, serve_page

    from ..diagnostics.site_checks import USER

    machine, (host, port) = MachineCollector(certificate or (), {}), host_and_port(listen)
    with (
        _of_site(runtime, node_config) as site,
        serve_page((site, machine), host, port, exposed, USER) as url,
    ):
        console.print(f"{url} reports this site; Ctrl-C ends it")
        if not is_loopback(host):
            warning = "other machines can read this site's budget and the state of its data"
            allow = "allow only your monitoring to reach this port"
            stderr_console().print(f"warning: {warning}: {allow}", style="yellow")
        wait_for_interrupt()


@contextmanager
def _of_site(runtime: str, node_config: list[str] | None) -> Iterator[SiteCollector]:
    """The collector of the app at this address, or of this node-config."""
    from ..diagnostics.site_checks import SiteCollector
    from ..processes.app_report import ask, watching

    if runtime:
        yield SiteCollector(lambda: ask(runtime), of_app=True)
        return
    if node_config is None:
        raise ConfigError(
            "nothing to report: name the socket of a running site with --runtime unix:/PATH, or the "
            "site's settings with --node-config"
        )
    with watching(node_of(node_config)) as reporter:
        yield SiteCollector(reporter.report, of_app=False)

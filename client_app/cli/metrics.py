"""The `site metrics` command: this site for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from fedsurrogate.client_app.cli.options import MaybeNode, node_of
from fedsurrogate.common.command_line import (
    Exposed,
    ListenHost,
    ListenPort,
    WatchedCertificates,
    console,
    stderr_console,
    wait_for_interrupt,
)
from fedsurrogate.common.errors import ConfigError

if TYPE_CHECKING:
    from fedsurrogate.client_app.diagnostics.site_metrics import SiteCollector


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
    port: ListenPort = 9464,
    host: ListenHost = "127.0.0.1",
    exposed: Exposed = False,
) -> None:
    """Serve this site to Prometheus, at http://HOST:PORT/metrics, until interrupted: budget, ledger,
    data, disks, certificates.

    With --runtime it reads nothing of the site itself, so it may have a network and needs no folder
    but that of the socket. Otherwise it reads the ledger of the node-config. Needs the extra
    `monitor`.
    """
    from fedsurrogate.client_app.diagnostics.site_metrics import USER
    from fedsurrogate.common.metrics_page import MachineCollector, is_loopback, serve_page

    machine = MachineCollector(certificate or (), {})
    with (
        _of_site(runtime, node_config) as site,
        serve_page((site, machine), host, port, exposed, USER) as url,
    ):
        console.print(f"{url} reports this site; Ctrl-C ends it", soft_wrap=True)
        if not is_loopback(host):
            warning = "other machines can read this site's budget and the state of its data"
            allow = "allow only your monitoring to reach this port"
            stderr_console().print(f"warning: {warning}: {allow}", style="yellow", soft_wrap=True)
        wait_for_interrupt()


@contextmanager
def _of_site(runtime: str, node_config: list[str] | None) -> Iterator[SiteCollector]:
    """The collector of the app at this address, or of this node-config."""
    from fedsurrogate.client_app.diagnostics.site_metrics import SiteCollector
    from fedsurrogate.client_app.processes.app_report import ask, watching

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

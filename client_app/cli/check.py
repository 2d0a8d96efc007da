"""The `site check` command: what a run would send from this site, what it costs, whether the gate lets
it; and attacks on it. And `site doctor` and `metrics`: checks of the site, and its figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
from .options import KitFolder, MaybeNode, Node, RootCertificates, SiteKey, node_of, print_json

if TYPE_CHECKING:
    from fedsurrogate.common.run import Run

    from ..audit.release_audit import ReleaseAudit
    from ..diagnostics.connection_checks import Finding
    from ..diagnostics.site_checks import SiteCollector
    from ..node_config import NodeConfig


def check(
    node_config: Node,
    run_config: RunSettings = None,
    proposal: Path | None = None,
    attack: Annotated[bool, typer.Option("--attack")] = False,
    sheet: Annotated[bool, typer.Option("--sheet")] = False,
    seconds: Annotated[
        float | None, typer.Option(show_default="60; with --sheet no longer")
    ] = None,
    out: Annotated[Path | None, typer.Option(show_default="audit")] = None,
    as_json: Json = False,
) -> None:
    """Show what a run would send from here, what it costs, and whether the gate lets it.

    Nothing leaves and nothing is charged. Of a run of one round it makes the release, and shows
    its noise. Exits with
    1 if the gate would refuse the run, or if the records cannot be used and only noise would leave.

    With --attack it makes the release again and again from halves of the records, and lets an
    attacker who knows every
    record guess which were used. It then exits with 1 if the attack beats the run's epsilon, or a
    limit of the policy.

    Example: site check -c 'epsilon=1 delta=1e-5 classes=no,yes image-size=28'

    Args:
        proposal: The run of the coordinator's file of `coordinator approval propose`.
        attack: Attack the release: does it show which records were used?
        sheet: Write a disclosure sheet: what leaves, to whom, its claim, and what attacks find. It
            lies in the state folder, and the ledger's entry of the release has its address.
        seconds: Attack for this long, at least eight releases.
        out: With --attack: folder for audit.html and audit.json.
    """
    node = node_of(node_config)
    if proposal is not None:
        from fedsurrogate.common.security.documents import read_proposal

        if run_config:
            raise ConfigError("--proposal has the settings of its run; leave --run-config out")
        run = read_proposal(proposal).proposal.run()
    else:
        run = run_config_of(run_config)
    if not attack and out is not None:
        raise ConfigError("--out is for --attack; a disclosure sheet lies in the state folder")
    if not (attack or sheet) and seconds is not None:
        raise ConfigError("--seconds is for --attack and --sheet; leave it out")
    if attack and sheet:
        raise ConfigError("give --attack or --sheet; the sheet has attacks, too")
    if sheet:
        _write_sheet(run, node, seconds or 0.0, as_json)
    elif attack:
        _attack(run, node, out or Path("audit"), 60.0 if seconds is None else seconds, as_json)
    else:
        _show_release(run, node, as_json)


def _show_release(run: Run, node: NodeConfig, as_json: bool) -> None:
    from ..audit.disclosure import check_run

    facts = check_run(run, node)
    if as_json:
        print_json(facts)
    else:
        from rich.table import Column, Table

        table = Table("what would leave", Column("nothing has left", overflow="fold"))
        for key, value in facts.items():
            if text := _text(value):
                table.add_row(key.replace("_", " "), text)
        console.print(table)
    if facts["refusal"]:
        print_error(facts["refusal"])
        raise typer.Exit(1)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {number:.6g}" for key, number in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def _attack(run: Run, node: NodeConfig, out: Path, seconds: float, as_json: bool) -> None:
    from rich.progress import Progress

    from ..audit.output import limit_broken, pictures_of, write_audit
    from ..audit.release_audit import audit_release
    from ..governance.policy import policy_of

    with Progress(console=console, transient=True, disable=as_json) as bar:
        task = bar.add_task("releases", total=None)

        def show(done: int, most: int) -> None:
            bar.update(task, completed=done, total=most)

        result = audit_release(run, node, seconds, progress=show)
    pictures = pictures_of(run, node, [each.row for each in result.standing_out])
    facts, page = write_audit(result, out, pictures)
    broken = limit_broken(result, policy_of(node))
    if as_json:
        refusal = {"page": str(page), "refusal": broken or None}
        print_json(refusal | json.loads(facts.read_text()))
    else:
        _print_audit(result, page)
    if broken:
        print_error(broken)
        raise typer.Exit(1)


def _print_audit(result: ReleaseAudit, page: Path) -> None:
    from rich.table import Table

    attack, nearest = result.attack, result.nearest
    table = Table("attack", "value", "95 % interval")
    table.title = f"{result.releases} releases, {result.records} records"
    for name, each in (
        ("AUC (0.5 is a guess)", attack),
        *((f"AUC, {name}", other) for name, other in result.others.items()),
    ):
        table.add_row(name, f"{each.auc:.3f}", f"{each.low:.3f} to {each.high:.3f}")
    table.add_row("found at 1 % false alarms", f"{100 * attack.rate_at_one_percent:.1f} %")
    table.add_row("found at 0.1 % false alarms", f"{100 * attack.rate_at_one_in_thousand:.2f} %")
    if result.epsilon:
        table.add_row(f"largest AUC at epsilon {result.epsilon:g}", f"{result.allowed:.3f}")
    if nearest is not None:
        table.add_row("means that are nearly a record", f"{100 * nearest.copies:.1f} %")
    console.print(table)
    if nearest is not None and nearest.classes:
        text = f"a mean is nearly a record: class {', '.join(nearest.classes)}"
        console.print(text, style="yellow")
    if count := result.standing_out_count:
        console.print(f"{count} records stand out; the page names them", style="yellow")
    console.print(str(page))


def _write_sheet(run: Run, node: NodeConfig, seconds: float, as_json: bool) -> None:
    from ..audit.disclosure import disclose

    content, facts, page = disclose(run, node, seconds)
    if as_json:
        print_json({"file": str(facts), "page": str(page)} | content)
    else:
        console.print(str(page))
        console.print(f"address in the ledger: {facts.parent.name}/{facts.stem}")


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
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT")] = "",
    root_certificates: RootCertificates = None,
    auth_supernode_private_key: SiteKey = None,
    fingerprint: str = "",
    link_only: Annotated[bool, typer.Option("--link-only")] = False,
    runtime: Annotated[str, typer.Option(metavar="unix:/PATH")] = "",
    as_json: Json = False,
) -> None:
    """Check this machine and its connection before a run.

    Takes the folder of a kit, or the same options as `site join`. Without any, it lists what
    it needs. Nothing is changed, nothing leaves. Exits with 1 if a check fails, with 2 if there is
    nothing to examine, with 3 if only the ledger fails, because nobody has opened it.

    Args:
        superlink: The coordinator; without it only this machine is checked.
        fingerprint: Fingerprint of the coordinator's backbone.
        link_only: Check the connection only, as a health check.
        runtime: The socket of `site node`: check also whether `site app` uses this policy; with
            --link-only, whether it has found the data.
    """
    from dataclasses import asdict
    from itertools import chain

    from ..diagnostics.connection_checks import Link, check_link
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
    runtime: Annotated[str, typer.Option(metavar="unix:/PATH")] = "",
    certificate: WatchedCertificates = None,
    listen: Listen = LISTEN,
    exposed: Exposed = False,
) -> None:
    """Serve this site to Prometheus, at http://HOST:PORT/metrics, until interrupted.

    Shows budget, ledger, data, disks and certificates. With --runtime it reads nothing of the site
    itself, so it may have a network and needs no folder but that of the socket. Otherwise it reads
    the ledger of the node-config. Needs the extra `monitor`.

    Args:
        runtime: The socket of `site node`: the running `site app` then gives the figures.
    """
    from fedsurrogate.common.flower.environment import is_loopback
    from fedsurrogate.common.metrics_page import MachineCollector, serve_page

    from ..diagnostics.site_checks import USER

    machine, (host, port) = MachineCollector(certificate or (), {}), host_and_port(listen)
    with (
        _of_site(runtime, node_config) as site,
        serve_page((site, machine), host, port, exposed, USER) as url,
    ):
        console.print(f"{url} reports this site; Ctrl-C ends it")
        if not is_loopback(f"[{host}]:"):
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

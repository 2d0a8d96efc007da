"""The `site check` command: what a run would send from this site, what it costs, whether the gate lets
it; and attacks on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsurrogate.common.command_line import (
    Json,
    RunSettings,
    console,
    print_error,
    run_config_of,
)
from fedsurrogate.common.errors import ConfigError

from .options import Node, node_of, print_json

if TYPE_CHECKING:
    from fedsurrogate.common.run import Run

    from ..audit.release_audit import ReleaseAudit
    from ..node_config import NodeConfig


def check(
    node_config: Node,
    run_config: RunSettings = None,
    proposal: Annotated[
        Path | None,
        typer.Option(help="The run of the coordinator's file of `coordinator approval propose`."),
    ] = None,
    attack: Annotated[
        bool,
        typer.Option("--attack", help="Attack the release: does it show which records were used?"),
    ] = False,
    sheet: Annotated[
        bool,
        typer.Option(
            "--sheet",
            help="Write a disclosure sheet: what leaves, to whom, its claim, and what attacks find. "
            "It lies in the state folder, and the ledger's entry of the release has its address.",
        ),
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Attack for this long, at least eight releases.",
            show_default="60; with --sheet no longer",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --attack: folder for audit.html and audit.json.", show_default="audit"
        ),
    ] = None,
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
        _show(run, node, as_json)


def _show(run: Run, node: NodeConfig, as_json: bool) -> None:
    from ..offline.run_check import check_run

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
        return ", ".join(f"{key} {number:.4g}" for key, number in value.items())
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

"""The commands `site audit` and `site disclose`: attacks on this site's own release, and a sheet
about it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedsurrogate.client_app.cli.options import Node, node_of
from fedsurrogate.common.command_line import Json, RunSettings, console, print_error, run_config_of


def audit(
    node_config: Node,
    run_config: RunSettings = None,
    out: Annotated[Path, typer.Option(help="Folder for audit.html and audit.json.")] = Path(
        "audit"
    ),
    seconds: Annotated[
        float, typer.Option(help="Make further releases for this long, at least eight.")
    ] = 60.0,
    as_json: Json = False,
) -> None:
    """Attack the release of a run with these settings: does it show which records were used?

    Makes the release again and again from halves of the records, and lets an attacker who knows
    every record guess which were used. Exits with 1 if the attack beats the run's epsilon, or a
    limit of the policy.

    Example: site audit -c 'fedpft.components=10' --out audit
    """
    from rich.progress import Progress
    from rich.table import Table

    from fedsurrogate.client_app.audit.output import limit_broken, pictures_of, write_audit
    from fedsurrogate.client_app.audit.release_audit import audit_release
    from fedsurrogate.client_app.governance.policy import policy_of

    run, node = run_config_of(run_config), node_of(node_config)
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
        print(json.dumps(refusal | json.loads(facts.read_text()), indent=2))
    else:
        attack, nearest = result.attack, result.nearest
        table = Table("attack", "value", "95 % interval")
        table.title = f"{result.releases} releases, {result.records} records"
        for name, each in (
            ("AUC (0.5 is a guess)", attack),
            *((f"AUC, {name}", other) for name, other in result.others.items()),
        ):
            table.add_row(name, f"{each.auc:.3f}", f"{each.low:.3f} to {each.high:.3f}")
        table.add_row("found at 1 % false alarms", f"{100 * attack.rate_at_one_percent:.1f} %")
        table.add_row(
            "found at 0.1 % false alarms", f"{100 * attack.rate_at_one_in_thousand:.2f} %"
        )
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
        console.print(str(page), soft_wrap=True)
    if broken:
        print_error(broken)
        raise typer.Exit(1)


def disclose(
    node_config: Node,
    run_config: RunSettings = None,
    seconds: Annotated[
        float, typer.Option(help="Attack for this long, at least eight releases.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Write a disclosure sheet for a run: what leaves, to whom, its claim, and what attacks find.

    The sheet lies in the state folder. The ledger's entry of the release has its address. It gives
    no verdict.

    Example: site disclose -c 'fedpft.components=10'
    """
    from fedsurrogate.client_app.audit.disclosure import disclose as write

    node = node_of(node_config)
    content, facts, page = write(run_config_of(run_config), node, seconds)
    if as_json:
        print(json.dumps({"file": str(facts), "page": str(page)} | content, indent=2))
    else:
        console.print(str(page), soft_wrap=True)
        console.print(f"address in the ledger: {facts.parent.name}/{facts.stem}", soft_wrap=True)

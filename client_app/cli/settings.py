"""The commands `site settings`, `site policy check` and `site forget-sums`: what a site decides for
itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedsurrogate.client_app.cli.options import (
    LISTS_ALL,
    MaybeNode,
    Node,
    complete_node_keys,
    node_of,
)
from fedsurrogate.common.command_line import Json, console


def settings(
    key: Annotated[
        str,
        typer.Argument(
            metavar="[KEY]", help="A setting, such as data-dir.", autocompletion=complete_node_keys
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Explain the settings of a site, the node-config: meaning, default, range and unit.

    Example: site settings data-dir
    """
    from dataclasses import asdict

    from fedsurrogate.client_app.node_config import NodeConfig
    from fedsurrogate.common.help import model_descriptions
    from fedsurrogate.common.settings_tables import setting_tables

    rows = model_descriptions(NodeConfig, key, LISTS_ALL)
    if as_json:
        shown = [{k: v for k, v in asdict(row).items() if k != "methods"} for row in rows]
        typer.echo(json.dumps(shown, indent=2))
        return
    for table in setting_tables(rows, key):
        console.print(table)


def policy_check(
    file: Annotated[
        Path | None, typer.Argument(help="A policy file; without one, that of the node-config.")
    ] = None,
    node_config: MaybeNode = None,
    as_json: Json = False,
) -> None:
    """Check a policy file, or the default policy, and show its settings. Exits with 1 if the file
    is wrong.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table
    from rich.text import Text

    from fedsurrogate.client_app.governance.policy import DEFAULT, Policy, load_policy

    if file is None and node_config and (named := node_of(node_config).policy):
        file = Path(named)
    policy = load_policy(str(file)) if file else DEFAULT
    values = policy.model_dump(by_alias=True)
    if as_json:
        print(json.dumps(values, indent=2))
        return
    width = max(14, console.width // 5)
    narrow = (Column(name, overflow="fold", max_width=width) for name in ("value", "default"))
    meaning = Column("meaning", overflow="fold")
    table = Table(Column("key", no_wrap=True), *narrow, meaning, box=SIMPLE_HEAD)
    for name, field in Policy.model_fields.items():
        value, default = getattr(policy, name), getattr(DEFAULT, name)
        shown = Text(_shown(value), style="" if value == default else "bold")
        table.add_row(name.replace("_", "-"), shown, _shown(default), field.description or "")
    console.print(table)
    if file:
        console.print(f"{file} is fine", style="green", soft_wrap=True)
    else:
        console.print("these values hold at a site without a policy file")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value
    # As TOML: large limits stay readable, and can be copied into a policy.
    return f"{value:_}" if isinstance(value, int) else f"{value:g}"


def forget_sums(
    node_config: Node,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            prompt="Several exact sums with different sites may together show this hospital's own "
            "part, and exact runs over different records single ones. Forget",
            help="Accept that further sums and runs without noise, together with earlier ones, may show "
            "this hospital's own part, or single records.",
        ),
    ],
) -> None:
    """Forget with which sites this hospital has taken part in secure sums without joint noise, and
    which records its runs without noise have selected.

    The next such sum may be with other sites, or over changed data, and the next run without noise may
    select other records. The old record is kept under another name; the ledger notes the decision.
    """
    from fedsurrogate.client_app.secure_sum.same_sites import forget

    if not yes:
        raise typer.Abort
    kept = forget(node_of(node_config))
    console.print(
        f"forgotten; the record is kept in {kept}" if kept else "nothing to forget", soft_wrap=True
    )

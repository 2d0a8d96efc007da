"""Options that several `site` commands share."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from client_app.node_config import NodeConfig, parse_node_config
from common.config.flat_settings import parse_overrides

# Patterns, paths and reasons are shown as they are: "[a-z]" is no markup in them.
console = Console(highlight=False, markup=False, emoji=False)

_NODE = typer.Option(
    "--node-config",
    metavar="'key=value ...'",
    help="What this site decides for itself: name, data, policy, folders; the same text for every command.",
    envvar="FEDSURROGATE_NODE_CONFIG",
)
Node = Annotated[list[str], _NODE]
MaybeNode = Annotated[list[str] | None, _NODE]
Run = Annotated[
    list[str] | None,
    typer.Option("-c", "--run-config", metavar="'key=value ...'", help="Settings of the run; strings in quotes."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def node_of(texts: list[str]) -> NodeConfig:
    """Parse a node-config as it is given on the command line."""
    return parse_node_config(parse_overrides(texts))

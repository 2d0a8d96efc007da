"""Options of `site` commands only, and what a shell completes in them; others are in
`fedsurrogate.common.command_line`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer

from fedsurrogate.common.errors import ConfigError

from ..processes.own_account import SETTINGS

if TYPE_CHECKING:
    from ..node_config import NodeConfig

LISTS_ALL = "site settings"


def complete_node_keys(incomplete: str) -> list[tuple[str, str]]:
    """Settings of a site, and their meaning."""
    from fedsurrogate.common.help import model_descriptions

    from ..node_config import NodeConfig

    rows = model_descriptions(NodeConfig, "", LISTS_ALL)
    return [(row.key, row.text) for row in rows if row.key.startswith(incomplete)]


def complete_node_settings(incomplete: str) -> list[tuple[str, str]]:
    """Keys of a site's settings: of the last setting in the text."""
    before, _, begun = incomplete.rpartition(" ")
    start = f"{before} " if before else ""
    return [(f"{start}{key}=", text) for key, text in complete_node_keys(begun)]


class WholeText(click.types.StringParamType):
    """Settings, or the folder of a kit that has them. The environment gives one text: click would
    divide it at its blanks, also inside quotes, as in the path of a folder.
    """

    envvar_list_splitter = "\0"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """The settings, as one text."""
        text = str(super().convert(value, param, ctx))
        if "=" in text or not Path(text or "-").is_dir():
            return text
        from ..kit import read_kit

        return read_kit(Path(text)).node_config()


_NODE = typer.Option(
    "--node-config",
    metavar="KIT|'key=value ...'",
    help="This site's own settings: the folder of its kit, their text, or a file of them (TOML).",
    envvar=SETTINGS,
    click_type=WholeText(),
    autocompletion=complete_node_settings,
)
Node = Annotated[list[str], _NODE]
MaybeNode = Annotated[list[str] | None, _NODE]
KitFolder = Annotated[
    Path | None,
    typer.Argument(metavar="[KIT]", help="The folder into which this site's kit was unpacked."),
]

RootCertificates = Annotated[
    Path | None, typer.Option(help="ca.crt of the site kit, to authenticate the coordinator.")
]
SiteKey = Annotated[
    Path | None, typer.Option(help="site.key of the site kit, to authenticate this site.")
]
ConfirmPolicy = Annotated[
    bool,
    typer.Option("--yes", help="Ask nothing: a policy that allows more than before is confirmed."),
]


def node_of(texts: list[str]) -> NodeConfig:
    """Parse a node-config from the command line."""
    from fedsurrogate.common.settings.base import parse_overrides

    from ..node_config import parse_node_config

    return parse_node_config(parse_overrides(texts))


def check_writable(*files: Path | None) -> None:
    """Raise ConfigError, before any work, for an output file whose folder does not exist."""
    for file in files:
        if file is not None and not file.expanduser().absolute().parent.is_dir():
            raise ConfigError(
                f"{str(file)!r}: there is no folder {str(file.parent)!r}; create it first"
            )


def print_json(facts: object) -> None:
    """Print what a command has found, for other programs."""
    print(json.dumps(facts, indent=2))


def one_text(texts: list[str]) -> str:
    """A node-config from the command line as one text, for another process."""
    from fedsurrogate.common.settings.base import parse_overrides, settings_text

    return settings_text(parse_overrides(texts))

"""Reference pages, written from the code: settings, policy, commands, presets, Python interface."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Collection, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.main import get_command

from fedsurrogate.common.help import Description, meanings
from fedsurrogate.common.settings import Section, kebab

ROOT = Path(__file__).parents[2]
BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
# Commands that take the address of a SuperLink.
OF_A_DEPLOYMENT = "*Of a deployment: it talks to a SuperLink, to which hospitals are connected.*"
PLUMBING = (
    "\n*Units, compose files and charts start it, or a page names it; `--help` does not list it.*\n"
)
WORDS = {str: "text", int: "integer", float: "number", bool: "true or false"}


def pages() -> dict[str, str]:
    """Every generated page by its address in the site."""
    return {
        "reference/settings.md": settings_page(),
        "reference/node-config.md": node_page(),
        "reference/policy.md": policy_page(),
        "reference/commands.md": commands_page(),
        "reference/presets.md": presets_page(),
        "reference/python.md": python_page(),
    }


def cell(text: object) -> str:
    """A text that fits into a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def values_of(annotation: Any) -> str:
    """What a value may be, from its type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f'`"{value}"`' for value in arguments)
    if origin is typing.Annotated:
        return values_of(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return ", ".join(values_of(each) for each in arguments if each is not type(None))
    if origin is tuple:
        return "names, separated by commas"
    return WORDS.get(annotation, "text")


def range_of(field: FieldInfo) -> str:
    """Type and range of a setting."""
    found = [values_of(field.annotation)]
    for name, words in BOUNDS.items():
        found += [
            words.format(number(limit))
            for each in field.metadata
            if (limit := getattr(each, name, None)) is not None
        ]
    return ", ".join(found)


def number(value: float) -> str:
    """A limit: integers in full."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def default_of(value: object) -> str:
    """A default, as a user would type it."""
    if value is PydanticUndefined or value in ("", ()):
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f'`"{",".join(value)}"`'
    if isinstance(value, float):
        return f"`{value if len(repr(value)) < 9 else round(value, 6)}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def table(model: type[Section], without: Collection[str] = ()) -> str:
    """A table of all settings of a model, apart from some."""
    found, rows = meanings(model), ["| key | values | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name in without:
            continue
        cells = (
            kebab(name),
            cell(range_of(field)),
            cell(default_of(field.default)),
            cell(found[name]),
        )
        rows.append("| `{}` | {} | {} | {} |".format(*cells))
    return "\n".join(rows)


def settings_page() -> str:
    """Settings of a run, by section."""
    from fedsurrogate.common.help import descriptions

    text = """# Settings of a run

A run takes these settings as `-c 'key=value key=value'`; texts stand in double quotes: `-c 'method="fedpft" epsilon=1.0'`.
An unknown key, a wrong type or a value out of range is refused in one line before anything starts. The same list, with
defaults, is in `pyproject.toml` under `[tool.flwr.app.config]`. This page is written from the models in `common/settings/`.
Counts, times and sizes name their unit; shares, rates, norms and multiples have none.
"""
    for section, group in groupby(descriptions(), lambda row: row.section):
        rows = list(group)
        whole = {name for row in rows for name in row.methods}
        text += f"\n## {f'Section `{section}.`' if section else 'All methods'}\n\n"
        text += f"For {_names(whole)}.\n\n" if section else ""
        text += settings_table(rows, whole)
    return text


def settings_table(rows: Iterable[Description], methods: set[str]) -> str:
    """A table of settings, narrow enough for a phone. methods: those that need no mention."""
    lines = [
        f"| `{row.key}` | {default_of(row.default)} | {cell(_meaning(row, methods))} |"
        for row in rows
    ]
    head = (
        '<div class="settings" markdown>\n\n| key | default | meaning and values |\n|---|---|---|\n'
    )
    return head + "\n".join(lines) + "\n\n</div>\n"


def _meaning(row: Description, whole: set[str]) -> str:
    """What a setting means, its values, and the methods of its section that it is for, if not all
    are.
    """
    given, left = set(row.methods), whole - set(row.methods)
    values = "one of the [methods](../methods/index.md)" if row.key == "method" else row.range
    text = f"{row.text} ({values}{', ' if row.unit else ''}{row.unit})"
    if not left:
        return text
    return (
        f"{text} Not for {_names(left)}."
        if len(left) < len(given)
        else f"{text} Only for {_names(given)}."
    )


def _names(methods: Iterable[str]) -> str:
    """Names of methods in the order of the registry; all of them as two words."""
    from fedsurrogate.common.methods import METHODS

    found = set(methods)
    return (
        "all methods"
        if found >= METHODS.keys()
        else ", ".join(f"`{name}`" for name in METHODS if name in found)
    )


def node_page() -> str:
    """Settings that a site decides for itself."""
    from fedsurrogate.client_app.node_config import NodeConfig
    from fedsurrogate.common.help import model_descriptions

    rows = model_descriptions(NodeConfig, "", "site settings")
    settings = settings_table(rows, {name for row in rows for name in row.methods})
    return f"""# Settings of a site

A hospital gives these settings as `--node-config 'key=value ...'` to every `site` command, or in the variable
`FEDSURROGATE_NODE_CONFIG`. The coordinator can neither see nor change them, and it cannot name a file at a site.
`state-dir` holds the site's log, its ledgers, its key, its own head of a chain, its synthetic images, its encoders, and the
generators that it has helped to train. Without a `policy`, only private runs of epsilon 1 at most are answered.
A smaller `max-components` or `max-rank` makes the surrogate smaller, for a connection of low bandwidth.

`site settings [KEY] [--json]` prints this list.

{settings}
"""


def policy_page() -> str:
    """Keys of the policy file."""
    from fedsurrogate.client_app.governance.policy import Policy
    from fedsurrogate.client_app.governance.work_limits import WorkLimits

    return f"""# Policy of a site

The policy is a TOML file at the site; the node-config names it (`policy="/etc/fedsurrogate/policy.toml"`). The defaults hold
without a file. `site policy FILE` checks a file and prints its values.
[Gate and ledger](../privacy/gate-and-ledger.md) explains how it is used.

{table(Policy, set(WorkLimits.model_fields))}

## Limits of work

In `limits.toml` next to the policy. Their defaults fit; the file may be missing.

{table(WorkLimits)}
"""


def commands_page() -> str:
    """Help of every command."""
    import fedsurrogate.client_app.cli.main
    import fedsurrogate.server_app.cli.main

    text = """# Commands

`coordinator` is for the coordinator's machine and for simulations; `site` is for a hospital. Every command has
`-h`, `--help` and `--version`. `--install-completion` makes the shell complete commands, settings, methods, presets and
run folders. The exit code is 0 only if the command did what was asked. This page is written from the commands themselves.
"""
    for name, app in (
        ("coordinator", fedsurrogate.server_app.cli.main.app),
        ("site", fedsurrogate.client_app.cli.main.app),
    ):
        text += f"\n## {name}\n"
        text += "".join(_command(path, found) for path, found in _commands(get_command(app), name))
    return text


def _commands(found: click.Command, path: str) -> list[tuple[str, click.Command]]:
    if not isinstance(found, click.Group):
        return [(path, found)]
    return [
        each
        for name in found.commands
        for each in _commands(found.commands[name], f"{path} {name}")
    ]


def _command(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path)
    lead, _, example = inspect.cleandoc(command.help or "").partition("Example: ")
    text = f"\n### {path}\n\n{lead}\n" + PLUMBING * command.hidden
    if {"--control", "--superlink"} & {name for each in command.params for name in each.opts}:
        text += f"\n{OF_A_DEPLOYMENT}\n"
    if example:
        text += f"\n```sh\n{example.strip()}\n```\n"
    rows = []
    for parameter in command.get_params(context):
        if parameter.name in ("help", "version"):
            continue
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        if isinstance(parameter, click.Argument):
            names = f"`{(parameter.metavar or parameter.name or '').upper()}`"
        shown = getattr(parameter, "show_default", False)
        empty = parameter.default in (None, "", False) or callable(parameter.default) or not shown
        need = "required" if parameter.required else "" if empty else f"`{parameter.default}`"
        rows.append(f"| {names} | {need} | {cell(getattr(parameter, 'help', '') or '')} |")
    return text + (
        "\n| option | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    )


def presets_page() -> str:
    """Presets and their settings."""
    from fedsurrogate.server_app.runs.presets import preset_notes, preset_settings, presets

    text = """# Presets

A preset is a named set of settings: `coordinator simulate -c NAME`. Settings that follow win over it.
`coordinator settings --preset all` lists all of them and
`coordinator settings --preset NAME` prints one, for `flwr run --run-config`.
"""
    for name in presets():
        shown = " ".join(f"`{key}={toml(value)}`" for key, value in preset_settings(name).items())
        note, *differs = preset_notes(name)
        listed = "".join(f"- {each}\n" for each in differs)
        text += f"\n## {name}\n\n{note}\n\n{listed}\n{shown}\n"
    return text


def toml(value: object) -> str:
    """A value as a user types it."""
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )


def python_page() -> str:
    """The public Python interface, from docstrings."""
    text = "# Python interface\n\n"
    if (ROOT / "fedsurrogate" / "__init__.py").exists():
        text += "::: fedsurrogate\n    options:\n      show_root_heading: false\n"
    else:
        text += (
            "This version has no package `fedsurrogate` for Python yet. Its parts can be "
            "imported as they are.\n"
        )
    return (
        text
        + """
## Strategies for your own ServerApp

[Use the strategies in your own app](../tutorials/own-server-app.md) shows them at work.

::: fedsurrogate.strategies.base.federation.Federation

::: fedsurrogate.strategies.fedpft.strategy.FedPFT

::: fedsurrogate.strategies.fedlap.FedLAP

::: fedsurrogate.strategies.dpcvae.DPCVAE
"""
    )

"""Tables that explain settings on a terminal: for `coordinator settings` and `site settings`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from fedsurrogate.common.help import Description
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.settings.flat import Scalar


def setting_tables(
    rows: Sequence[Description], key: str, one_method: bool = False
) -> Iterator[Table]:
    """A table with all facts of the setting `key`, or else one for each section. one_method:
    methods are not named.
    """
    if [row.key for row in rows] == [key]:
        yield _one(rows[0])
        return
    for section, group in groupby(rows, lambda row: row.section):
        yield _section(section, list(group), one_method)


def _one(row: Description) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in (
        *(
            ("setting", row.key),
            ("meaning", row.text),
            ("kind", row.kind),
            ("default", _shown(row.default)),
        ),
        *(("range", row.range), ("unit", row.unit), ("methods", _names(row.methods))),
    ):
        if text:
            table.add_row(name, text)
    return table


def _section(section: str, rows: Sequence[Description], one_method: bool) -> Table:
    """The settings of one section; long texts are folded, so that nothing is cut at 80 columns.

    The title names the methods of most rows, or of any. A row names its own if they differ.
    """
    methods, count = Counter(row.methods for row in rows).most_common(1)[0]
    if 2 * count <= len(rows):
        methods = tuple(method for method in METHODS if any(method in row.methods for row in rows))
    title = (
        f"section {section}"
        if section
        else "settings of every run"
        if methods
        else "settings of a site"
    )
    table = Table(
        Column("setting", no_wrap=True),
        Column("default", overflow="fold"),
        Column("meaning (range)", overflow="fold"),
        title=title if one_method or not methods else f"{title}: {_names(methods)}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for row in rows:
        unit = f", {row.unit}" if row.unit else ""
        text = f"{row.text} ({row.range}{unit})"
        if not one_method and row.methods != methods:
            text += f" For {_names(row.methods)}."
        table.add_row(row.key, _shown(row.default), text)
    return table


def _shown(default: Scalar) -> str:
    """A value as it is written in a run-config."""
    return json.dumps(default)


def _names(methods: Sequence[str]) -> str:
    return "all methods" if len(methods) == len(METHODS) else ", ".join(methods)

"""Descriptions and tables of all settings of a run or a site, read from the models and the
registry: for help and documentation.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any, TypeVar, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from .errors import ConfigError
from .escapes import documented
from .methods import FEDPFT_CHAIN, METHODS, method_named
from .methods.counting import KINDS_OF_COUNTS
from .methods.method import Method, Plan
from .renamed import SETTINGS
from .settings import SECURE_AGGREGATION_KEYS, FedPFTSettings, Section, Settings, kebab
from .settings.base import Only, Range, Scalar, Unit

T = TypeVar("T")
KINDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    tuple: "names separated by commas",
}
# All methods with their usual plans, and FedPFT along a chain.
PLANS: tuple[tuple[Method, Plan], ...] = (
    *((method, method.usual) for method in METHODS.values()),
    (
        FEDPFT_CHAIN,
        FEDPFT_CHAIN.plan(FEDPFT_CHAIN.fill(Settings(fedpft=FedPFTSettings(topology="chain")))),
    ),
)
# Keys that only some methods use, by what the registry says of them; in all sections that have such
# a key.
NEEDS: Mapping[str, Callable[[Method, Plan], bool]] = {
    **dict.fromkeys(
        ("epsilon", "delta", "clip", "sample-rate", "noise-multiplier"),
        lambda method, plan: method.private,
    ),
    "defence": lambda method, plan: plan.defences.available != ("none",),
    **dict.fromkeys(
        ("secure-aggregation", *SECURE_AGGREGATION_KEYS), lambda method, plan: method.summable
    ),
    "grace": lambda method, plan: plan.kind == "one-shot",
    "resume": lambda method, plan: plan.kind in ("chain", "rounds"),
}


@dataclass(frozen=True)
class Description:
    """One setting. default: as in a run-config. unit: empty if there is none.

    methods: names of those that use it; empty for a setting of a site.
    """

    key: str
    text: str
    kind: str
    default: Scalar
    range: str
    unit: str
    methods: tuple[str, ...]

    @property
    def section(self) -> str:
        """The part of the key before the dot; empty for settings of every run."""
        return self.key.rpartition(".")[0]


def descriptions(key: str = "", method: str = "") -> tuple[Description, ...]:
    """The settings in the order of the run-config: all, one key, or one section; and only those
    that a method uses.

    Raises ConfigError for an unknown method, or an unknown key with the names close to it.
    """
    rows = tuple(_describe("", Settings))
    if method:
        method_named(method)
    return tuple(
        row
        for row in _chosen(rows, key, "coordinator settings")
        if not method or method in row.methods
    )


def without_effect(method: Method, given: Mapping[str, Any]) -> list[str]:
    """Settings that were given and that a run's method does not use, a sentence each.

    Args:
        method: of the run, or what it counts.
        given: all settings of the run, flat.

    Example:
        >>> from fedsurrogate.common.run import parse_run
        >>> run = parse_run({"method": "average", "fedavg.keep": 0.25})
        >>> without_effect(run.method, run.settings.flat())
        ["fedavg.keep = 0.25 has no effect: method = 'average' does not use it, but dsfl does"]
    """
    return [
        f"{row.key} = {given[row.key]!r} has no effect: method = {given['method']!r} does not "
        f"use it, but {' and '.join(row.methods[:3])} {'do' if len(row.methods) > 1 else 'does'}"
        for row in descriptions()
        if row.section and given[row.key] != row.default and not _uses(method, row)
    ]


def _uses(method: Method, row: Description) -> bool:
    # What counts, and no method, uses all of its section.
    return row.section in method.sections and (
        method.name not in METHODS or not row.methods or method.name in row.methods
    )


def model_descriptions(model: type[Section], key: str, command: str) -> tuple[Description, ...]:
    """The settings of a model that holds no settings of methods: all, or one key.

    command: the command that lists them. Raises ConfigError for an unknown key.
    """
    return _chosen(tuple(replace(row, methods=()) for row in _describe("", model)), key, command)


def _chosen(rows: tuple[Description, ...], key: str, command: str) -> tuple[Description, ...]:
    if key and not any(key in (row.key, row.section) for row in rows):
        if new := SETTINGS.get(key):
            raise ConfigError(f"{key} is now {new}; `{command} {new}` describes it")
        raise ConfigError(f"unknown key {key!r}{_suggestion(key, rows, command)}")
    return tuple(row for row in rows if key in ("", row.key, row.section))


def _describe(section: str, model: type[Section]) -> Iterator[Description]:
    """The keys of a model. Those of every run come first, as in pyproject.toml."""
    nested: list[tuple[str, type[Section]]] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            nested.append((name, field.annotation))
            continue
        default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        yield Description(
            key=f"{section}.{kebab(name)}" if section else kebab(name),
            text=meanings(model)[name],
            kind=KINDS.get(type(field.default), ""),
            default=default,
            range=_range(field),
            unit="".join(each.name for each in _noted(field, Unit)),
            methods=tuple(_methods(section, name, field)),
        )
    for name, each in nested:
        yield from _describe(name, each)


@cache
def meanings(model: type[Section]) -> dict[str, str]:
    """What each field means: its description, or the text in the docstring of the model or of one that it
    extends.
    """
    docs = [inspect.cleandoc(each.__doc__ or "") for each in reversed(model.__mro__)]
    found = {name: text for doc in docs for name, text in documented(doc, "Attributes")[1].items()}
    described = ((name, each.description) for name, each in model.model_fields.items())
    return found | {name: text for name, text in described if text}


def _methods(section: str, name: str, field: FieldInfo) -> Iterable[str]:
    """The methods that use a key, in the order of the registry."""
    if section == "counting":
        return iter(KINDS_OF_COUNTS)
    uses = NEEDS.get(kebab(name))
    only = [method for each in _noted(field, Only) for method in each.methods]
    if section == "fedpft" and any(name in plan.allows for _, plan in PLANS):
        users = [(method, plan) for method, plan in PLANS if name in plan.allows]
    else:
        users = [
            (method, plan) for method, plan in PLANS if not section or section in method.sections
        ]
    names = {
        method.name
        for method, plan in users
        if (not uses or uses(method, plan)) and (not only or method.name in only)
    }
    return (name for name in METHODS if name in names)


def _range(field: FieldInfo) -> str:
    """The allowed values in words."""
    if field is Settings.model_fields["method"]:
        return ", ".join(METHODS)
    if checked := list(_noted(field, Range)):
        return checked[-1].text
    if choices := list(_choices(field.annotation)):
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    whole = isinstance(field.default, int)
    low = [_number(each.ge) for each in _noted(field, Ge)] + [
        f"above {_number(each.gt)}" for each in _noted(field, Gt)
    ]
    high = [_number(each.le) for each in _noted(field, Le)]
    high += [
        _number(each.lt - 1) if whole else f"below {_number(each.lt)}"  # type: ignore[operator]
        for each in _noted(field, Lt)
    ]
    match low, high:
        case [str(least)], [str(most)]:
            return f"{least} to {most}"
        case [str(least)], []:
            return least if least.startswith("above") else f"at least {least}"
        case [], [str(most)]:
            return f"at most {most}"
    return KINDS[type(field.default)]


def _noted(field: FieldInfo, kind: type[T]) -> Iterator[T]:
    return (each for each in field.metadata if isinstance(each, kind))


def _choices(annotation: Any) -> Iterator[str]:
    """The strings of a Literal, or of a union of them."""
    for each in get_args(annotation):
        if isinstance(each, str):
            yield each or "empty"
        else:
            yield from _choices(each)


def _number(value: Any) -> str:
    whole = value == int(value) and abs(value) < 1e15
    return f"{value:.0f}" if whole else f"{value:g}"


def _suggestion(key: str, rows: Iterable[Description], command: str) -> str:
    """The keys whose name, or whose name without its section, is closest."""
    keys = [row.key for row in rows]
    close = difflib.get_close_matches(key, keys, n=3, cutoff=0.75)
    names = difflib.get_close_matches(key, {each.rpartition(".")[2] for each in keys}, n=1)
    close += [each for each in keys if each.rpartition(".")[2] in names and each not in close]
    return (
        f"; did you mean {' or '.join(map(repr, close))}?" if close else f"; `{command}` lists all"
    )


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

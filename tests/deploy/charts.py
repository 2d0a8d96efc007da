"""Renders the chart in deploy/helm: with `helm` where it is installed, else with a part of its
language.

That part is `if`, `range`, `define`, `include`, variables, and the functions below. Anything else
raises an error.
"""

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from tests.children import ran
from tests.deploy.test_compose import DEPLOY

CHART = DEPLOY / "helm"
ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
Scope = dict[str, Any]


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with changes, table by table."""
    found = dict(deepcopy(dict(values)))
    for key, value in changes.items():
        found[key] = merged(found.get(key, {}), value) if isinstance(value, Mapping) else value
    return found


def values(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The chart's values with changes."""
    return merged(yaml.safe_load((CHART / "values.yaml").read_text()), changes)


def rendered(changes: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """All objects of a release named "north"."""
    if (helm := shutil.which("helm")) is not None:
        file = folder / "changes.json"
        file.write_text(json.dumps(changes))
        command = [helm, "template", "north", str(CHART), "--values", str(file)]
        text = ran(command, check=True).stdout
    else:
        text = Renderer(values(changes)).all()
    return [each for each in yaml.safe_load_all(text) if each]


class Renderer:
    """A small Go template engine."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        self._dot: Scope = {
            "Values": found,
            "Release": {"Name": "north", "Service": "Helm"},
            "Chart": {"AppVersion": chart["appVersion"], "Name": chart["name"]},
        }
        self._named: dict[str, list[Any]] = {}
        self._run(_parsed((CHART / "templates" / "_helpers.tpl").read_text()), self._dot, {})

    def all(self) -> str:
        """Every template of the chart."""
        texts = [path.read_text() for path in sorted((CHART / "templates").glob("*.yaml"))]
        return "\n---\n".join(
            self._run(_parsed(text), self._dot, {"$": self._dot}) for text in texts
        )

    def _run(self, nodes: list[Any], dot: Any, names: Scope) -> str:
        return "".join(
            node if isinstance(node, str) else self._act(node, dot, names) for node in nodes
        )

    def _act(self, node: tuple[str, list[Any], list[Any]], dot: Any, names: Scope) -> str:
        text, body, otherwise = node
        word, _, rest = text.partition(" ")
        if word == "define":
            self._named[json.loads(rest)] = body
            return ""
        if word == "if":
            return self._run(body if self._value(rest, dot, names) else otherwise, dot, names)
        if word == "range":
            variable, _, source = rest.partition(":=")
            items = self._value(source.strip(), dot, names)
            return "".join(self._run(body, dot, names | {variable.strip(): item}) for item in items)
        if ":=" in text:
            variable, _, source = text.partition(":=")
            names[variable.strip()] = self._value(source.strip(), dot, names)
            return ""
        found = self._value(text, dot, names)
        return (
            "" if found is None else str(found).lower() if isinstance(found, bool) else str(found)
        )

    def _value(self, text: str, dot: Any, names: Scope) -> Any:
        found: Any = None
        for place, part in enumerate(text.split(" | ")):
            function, *words = shlex.split(part, posix=False)
            arguments = [self._word(word, dot, names) for word in words] + (
                [found] if place else []
            )
            found = self._call(function, arguments, dot, names)
        return found

    def _call(self, function: str, arguments: list[Any], dot: Any, names: Scope) -> Any:
        match function:
            case "include":
                return self._run(self._named[arguments[0]], arguments[1], {"$": self._dot})
            case "toYaml":
                return yaml.safe_dump(arguments[0], default_flow_style=False).rstrip("\n")
            case "nindent":
                return "\n" + "\n".join(
                    " " * arguments[0] + line for line in str(arguments[1]).splitlines()
                )
            case "quote":
                return json.dumps(str(arguments[0]), ensure_ascii=False)
            case "trim":
                return str(arguments[0]).strip()
            case "default":
                return arguments[1] or arguments[0]
            case "eq":
                return arguments[0] == arguments[1]
            case "list":
                return arguments
            case "index":
                return arguments[0][arguments[1]]
        assert not arguments, function
        return self._word(function, dot, names)

    def _word(self, word: str, dot: Any, names: Scope) -> Any:
        if word.startswith('"') or word.isdecimal():
            return json.loads(word)
        start, *path = word.split(".")
        found = dot if not start else names[start]
        for key in filter(None, path):
            found = found[key]
        return found


def _parsed(text: str) -> list[Any]:
    """Texts, and (action, its body, its else) for actions."""
    stack: list[tuple[str, list[Any], list[Any]]] = [("", [], [])]
    at, into, cut = 0, 1, False
    places = [into]
    for found in ACTION.finditer(text):
        before = text[at : found.start()]
        before = before.lstrip() if cut else before
        before = before.rstrip() if found[1] else before
        stack[-1][places[-1]].append(before)  # type: ignore[union-attr]
        at, cut, action = found.end(), bool(found[3]), found[2]
        word = action.split(" ")[0]
        if word in ("if", "range", "define"):
            node = (action, list[Any](), list[Any]())
            stack[-1][places[-1]].append(node)  # type: ignore[union-attr]
            stack.append(node)
            places.append(1)
        elif word == "else":
            places[-1] = 2
        elif word == "end":
            stack.pop()
            places.pop()
        else:
            stack[-1][places[-1]].append((action, [], []))  # type: ignore[union-attr]
    rest = text[at:]
    stack[0][1].append(rest.lstrip() if cut else rest)
    assert len(stack) == 1, "an action has no end"
    return stack[0][1]

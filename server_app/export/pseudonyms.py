"""A copy of a run folder for other people: sites have pseudonyms, and no path of a machine is left."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.runs.json_files import read_json
from fedsurrogate.server_app.runs.json_values import as_list, as_table, at

EVENTS, REPORT = "events.jsonl", "report.html"
# JSON files of a run folder; the first two always exist.
CONTENT = ("manifest.json", "metrics.json", "projection.json", "evaluation.json")
# Settings that hold paths, which can be relative.
PATH_SETTINGS = frozenset(
    {
        "data-dir",
        "weights-path",
        "output-dir",
        "resume",
        "fedpft.public",
        "counting.model",
        "public",
        "model-path",
    }
)
# A class can have the name of a site.
OF_CLASSES = frozenset({"classes", "counts", "dropped_classes"})
# In the data report: sentences about records, which give the names of files and patients.
OF_RECORDS = frozenset({"why", "odd"})
EXAMPLE = re.compile(r",? such as [^;]*")
NAMED = re.compile(r"'[^']*'")
# In quotes, a path may have spaces.
QUOTED = re.compile(r"(['\"])(?:~|[A-Za-z]:)?[\\/][^'\"]*\1")
# An absolute path of Linux, macOS or Windows, or one below a home folder; not the end of a URL, nor
# "and/or".
ABSOLUTE = re.compile(r"(?<![\w/:.~])(?:~|[A-Za-z]:(?=[\\/]))?(?:[\\/][^\s\\/'\"<>,;:()]+)+[\\/]?")
REMOVED = "(path)"


def write_pseudonymous(run: Path, folder: Path) -> None:
    """Write the JSON files, events and report of a run, without names of sites and without paths.
    The report is drawn again, without what it takes from stored surrogates.

    Args:
        run: the run folder.
        folder: for the copies; it exists.

    Raises:
        RunError: `run` is not a run folder.
    """
    events = _events(run)
    hide = _Hider(pseudonyms(read_json(run, "metrics.json"), events))
    for name in CONTENT:
        if (run / name).is_file():
            (folder / name).write_text(
                json.dumps(hide.value(read_json(run, name)), indent=2) + "\n"
            )
    lines = "".join(json.dumps(hide.value(each)) + "\n" for each in events)
    (folder / EVENTS).write_text(lines)
    write_report(folder)


def pseudonyms(metrics: Mapping[str, object], events: list[dict[str, object]]) -> dict[str, str]:
    """A pseudonym for each site's name, in the order of arrival. Numbers, as in a simulation, stay.

    Args:
        metrics: content of metrics.json.
        events: of the run, in their order.

    Returns:
        "site-1" and so on, by name.

    Example:
        >>> pseudonyms({}, [{"site": "north"}, {"site": "3"}, {"site": "south"}])
        {'north': 'site-1', 'south': 'site-2'}
    """
    names_in_order: dict[str, None] = {}
    for event in events:
        names = [event.get("site"), event.get("before"), *as_list(event.get("sites"))]
        names_in_order |= dict.fromkeys(name for name in names if isinstance(name, str))
    card = as_table(metrics.get("card"))
    for key in ("used", "absent"):
        names_in_order |= dict.fromkeys(map(str, as_list(card.get(key))))
    tables = [
        card.get(key) for key in ("late", "rejected", "dropped", "records", "capped", "suspects")
    ]
    tables += [
        at(metrics, *keys)
        for keys in (("bytes", "up_per_site"), ("privacy", "per_site"), ("accuracy", "per_site"))
    ]
    for table in tables:
        names_in_order |= dict.fromkeys(as_table(table))
    hidden = (name for name in names_in_order if name and not name.isdecimal())
    return {name: f"site-{number}" for number, name in enumerate(hidden, 1)}


class _Hider:
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        # The longest first: one name can be the beginning of another.
        every = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w.-])(?:{every})(?![\w-]|\.\w)") if every else None

    def value(self, content: object, key: str = "") -> object:
        """JSON content without names of sites and without paths; key: under which it stands."""
        if isinstance(content, dict):
            kept = key in OF_CLASSES
            return {
                name if kept else self._text(name): self.value(each, name)
                for name, each in content.items()
            }
        if isinstance(content, list):
            return [self.value(each, key) for each in content]
        if isinstance(content, str) and content and key in PATH_SETTINGS:
            return REMOVED
        if isinstance(content, str) and key in OF_RECORDS:
            content = NAMED.sub("(name)", EXAMPLE.sub("", content))
        return (
            self._text(content) if isinstance(content, str) and key not in OF_CLASSES else content
        )

    def _text(self, text: str) -> str:
        text = ABSOLUTE.sub(REMOVED, QUOTED.sub(rf"\1{REMOVED}\1", text))
        return (
            text
            if self._pattern is None
            else self._pattern.sub(lambda match: self._names[match[0]], text)
        )


def _events(run: Path) -> list[dict[str, object]]:
    events = []
    for line in (run / EVENTS).read_text().splitlines() if (run / EVENTS).is_file() else ():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events

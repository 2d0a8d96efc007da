"""Draws a dashboard from the answers of Prometheus, where no Grafana is: the same places, queries, names,
units and colours of thresholds, so that a person sees what an operator would.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedsurrogate.common.number_format import human_bytes

Series = dict[str, Any]
Ask = Callable[[str], list[Series]]
AskRange = Callable[[str], list[Series]]
ROW = 0.42


def draw(board: Path, ask: Ask, ask_range: AskRange, out: Path) -> dict[str, int]:
    """Draw a dashboard.

    Args:
        board: its JSON file.
        ask: the series of a query now.
        ask_range: the series of a query in the last minutes.
        out: the PNG to write.

    Returns:
        Number of series in each panel, or of rows in a table, by its title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    content = json.loads(board.read_text())
    rows = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in content["panels"])
    height = (rows + 1) * ROW
    figure = Figure((18, height), facecolor="#f4f5f5")
    FigureCanvasAgg(figure)
    figure.text(
        0.005, 1 - 0.5 * ROW / height, content["title"], size=15, weight="bold", va="center"
    )
    counts = {}
    for panel in content["panels"]:
        place = panel["gridPos"]
        top = (place["y"] + 1) * ROW / height
        axes = figure.add_axes(
            (
                place["x"] / 24 + 0.005,
                1 - top - place["h"] * ROW / height + 0.008,
                place["w"] / 24 - 0.01,
                place["h"] * ROW / height - 0.016,
            )
        )
        axes.set_title(panel["title"], size=9, loc="left", weight="bold", pad=-12, x=0.01)
        axes.set_facecolor("white")
        asks = ask_range if panel["type"] == "timeseries" else ask
        answers = [(target, asks(target["expr"])) for target in panel["targets"]]
        found = [(target, each) for target, series in answers for each in series]
        counts[panel["title"]] = len(found)
        if not found:
            _blank(axes)
            word = panel["fieldConfig"]["defaults"].get("noValue", "No data")
            axes.text(0.5, 0.45, word, ha="center", color="#888888", transform=axes.transAxes)
        elif panel["type"] == "timeseries":
            _lines(axes, panel, found)
        elif panel["type"] == "table":
            rows = table(panel, [series for _, series in answers])
            counts[panel["title"]] = len(rows)
            _rows(axes, rows)
        else:
            _values(axes, panel, found)
    figure.savefig(out, dpi=75)
    return counts


def table(panel: dict[str, Any], answers: list[list[Series]]) -> list[dict[str, str]]:
    """The rows that Grafana makes of the answers by the panel's transformations: `merge` joins rows
    without a column that differs, `organize` leaves columns out and names others.
    """
    known = {each["id"]: each["options"] for each in panel.get("transformations", ())}
    several = len(answers) > 1
    rows: list[dict[str, Any]] = []
    for number, series in enumerate(answers):
        column = f"Value #{chr(ord('A') + number)}" if several else "Value"
        for each in series:
            new = {**each["metric"], column: float(each["value"][1])}
            fits = (
                row for row in rows if "merge" in known and all(row.get(k, new[k]) == new[k] for k in new)
            )  # fmt: skip
            if (row := next(fits, None)) is None:
                rows.append(new)
            else:
                row |= new
    options = known.get("organize", {})
    hidden, names = options.get("excludeByName", {}), options.get("renameByName", {})
    units = {
        override["matcher"]["options"]: override["properties"][0]["value"]
        for override in panel["fieldConfig"]["overrides"]
    }
    return [
        {
            (name := names.get(key, key)): value
            if isinstance(value, str)
            else _text(panel, value, units.get(name))
            for key, value in row.items()
            if not hidden.get(key)
        }
        for row in rows
    ]


def _rows(axes: Any, rows: list[dict[str, str]]) -> None:
    _blank(axes)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for across, column in enumerate(columns):
        x = 0.02 + 0.96 * across / len(columns)
        axes.text(x, 0.75, column, size=8, weight="bold")
        for down, row in enumerate(rows[:7]):
            axes.text(x, 0.62 - 0.1 * down, row.get(column, "")[:36], size=8)


def _blank(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])


def _values(axes: Any, panel: dict[str, Any], found: list[tuple[dict[str, Any], Series]]) -> None:
    """The value of each series in a line, in the colour of its threshold; a single one has no name."""
    _blank(axes)
    large = panel["type"] in ("stat", "gauge") and len(found) <= 2
    most = 2 if large else 9
    for number, (target, each) in enumerate(found[:most]):
        value = float(each["value"][1])
        text, colour = _text(panel, value), _colour(panel, value)
        y = 0.72 - (number + 0.5) * 0.66 / max(1, min(len(found), most))
        name = _name(target, each["metric"])
        if large:
            axes.text(0.5, y, text, ha="center", va="center", color=colour, size=17, weight="bold")
            if len(found) > 1:
                axes.text(0.02, y, name[:16], va="center", size=7, color="#555555")
            continue
        axes.text(0.02, y, name[:60], va="center", size=8)
        axes.text(0.98, y, text, ha="right", va="center", color=colour, size=9, weight="bold")


def _lines(axes: Any, panel: dict[str, Any], found: list[tuple[dict[str, Any], Series]]) -> None:
    """Each series over time, with the axis from the panel's minimum and in its unit."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for target, each in found[:12]:
        times, values = zip(*each["values"], strict=True)
        moments = [datetime.fromtimestamp(time, UTC) for time in times]
        name = _name(target, each["metric"])[:40]
        axes.plot(moments, [float(value) for value in values], ".-", label=name)
    axes.margins(y=0.3)
    own = panel["fieldConfig"]["defaults"]
    axes.set_ylim(own.get("min"), own.get("max"))
    whole = own.get("decimals") == 0
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=whole))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _text(panel, value)))
    axes.tick_params(labelsize=7, direction="in", pad=-12)
    axes.tick_params(axis="y", pad=-4)
    for label in axes.get_yticklabels():
        label.set_horizontalalignment("left")
    axes.legend(fontsize=7, loc="upper right")


def _name(target: dict[str, Any], labels: dict[str, str]) -> str:
    """As Grafana fills in the legend."""
    legend = target.get("legendFormat") or "{{__name__}}"
    if target.get("format") == "table" or legend == "__auto":
        own = {k: v for k, v in labels.items() if k not in ("instance", "job")}
        return ", ".join(f"{key}={value}" for key, value in sorted(own.items()))
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), legend)


def _text(panel: dict[str, Any], value: float, unit: str | None = None) -> str:
    """A value as its unit shows it, or the word that stands for it."""
    own = panel["fieldConfig"]["defaults"]
    for mapping in own.get("mappings", ()):
        word = mapping.get("options", {}).get(f"{value:g}")
        if word:
            return str(word["text"])
    if math.isnan(value):
        return "NaN"
    unit = unit or own.get("unit", "short")
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "dateTimeAsIso":
        return f"{datetime.fromtimestamp(value / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    if unit == "bytes":
        return human_bytes(int(value))
    return f"{value:.4g}{' ' + unit if unit in ('s', 'd') else ''}"


def _colour(panel: dict[str, Any], value: float) -> str:
    """Of the highest threshold that a value has reached."""
    known = {"green": "#299c46", "orange": "#e08400", "red": "#c4162a", "blue": "#1f60c4"}
    steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", ())
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return known.get(reached[-1], "#333333") if reached else "#333333"

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
        Number of series in each panel, by its title.
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
        over_time = panel["type"] == "timeseries"
        found = [
            (target, each)
            for target in panel["targets"]
            for each in (ask_range if over_time else ask)(target["expr"])
        ]
        counts[panel["title"]] = len(found)
        axes.set_title(panel["title"], size=9, loc="left", weight="bold", pad=-12, x=0.01)
        axes.set_facecolor("white")
        if over_time:
            _lines(axes, panel, found)
        else:
            _values(axes, panel, found)
    figure.savefig(out, dpi=75)
    return counts


def _values(axes: Any, panel: dict[str, Any], found: list[tuple[dict[str, Any], Series]]) -> None:
    """The value of each series in a line, in the colour of its threshold."""
    axes.set_xticks([])
    axes.set_yticks([])
    if not found:
        axes.text(0.5, 0.45, "No data", ha="center", color="#888888", size=10)
    large = panel["type"] == "stat" and len(found) <= 2
    most = 2 if large else 9
    for number, (target, each) in enumerate(found[:most]):
        value = float(each["value"][1])
        text, colour = _text(panel, value), _colour(panel, value)
        y = 0.72 - (number + 0.5) * 0.66 / max(1, min(len(found), most))
        name = _name(target, each["metric"])
        if large:
            axes.text(0.5, y, text, ha="center", va="center", color=colour, size=17, weight="bold")
            axes.text(0.02, y, name[:16], va="center", size=7, color="#555555")
            continue
        axes.text(0.02, y, name[:60], va="center", size=8)
        axes.text(0.98, y, text, ha="right", va="center", color=colour, size=9, weight="bold")


def _lines(axes: Any, panel: dict[str, Any], found: list[tuple[dict[str, Any], Series]]) -> None:
    for target, each in found[:12]:
        times, values = zip(*each["values"], strict=True)
        moments = [datetime.fromtimestamp(time, UTC) for time in times]
        axes.plot(
            moments,
            [float(value) for value in values],
            ".-",
            label=_name(target, each["metric"])[:40],
        )
    axes.margins(y=0.3)
    axes.tick_params(labelsize=7, direction="in", pad=-12)
    axes.tick_params(axis="y", pad=-4)
    for label in axes.get_yticklabels():
        label.set_horizontalalignment("left")
    axes.locator_params(axis="y", nbins=4)
    if found:
        axes.legend(fontsize=7, loc="lower right")
    else:
        axes.text(0.5, 0.45, "No data", ha="center", color="#888888", transform=axes.transAxes)


def _name(target: dict[str, Any], labels: dict[str, str]) -> str:
    """As Grafana fills in the legend."""
    legend = target.get("legendFormat") or "{{__name__}}"
    if target.get("format") == "table" or legend == "__auto":
        own = {k: v for k, v in labels.items() if k not in ("instance", "job")}
        return ", ".join(f"{key}={value}" for key, value in sorted(own.items()))
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), legend)


def _text(panel: dict[str, Any], value: float) -> str:
    """A value as its unit shows it, or the word that stands for it."""
    own = panel["fieldConfig"]["defaults"]
    for mapping in own.get("mappings", ()):
        word = mapping.get("options", {}).get(f"{value:g}")
        if word:
            return str(word["text"])
    if math.isnan(value):
        return "NaN"
    unit = own.get("unit", "short")
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "bytes":
        return human_bytes(int(value))
    return f"{value:.4g}{' ' + unit if unit in ('s', 'd') else ''}"


def _colour(panel: dict[str, Any], value: float) -> str:
    """Of the highest threshold that a value has reached."""
    known = {"green": "#299c46", "orange": "#e08400", "red": "#c4162a", "blue": "#1f60c4"}
    steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", ())
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return known.get(reached[-1], "#333333") if reached else "#333333"

"""Plot of a run with several steps: accuracy after every round, or along a chain of sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedsurrogate.common.number_format import human_bytes, percent, shorten
from fedsurrogate.common.pages.svg import (
    BLUE,
    FAINT,
    GREEN,
    ORANGE,
    PURPLE,
    QUIET,
    accuracy_range,
    bytes_axis,
    make_axes,
    percent_axis,
    render,
)
from fedsurrogate.server_app.runs.json_values import as_list, as_number, as_table
from fedsurrogate.server_app.runs.reader import RunFolder

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, QUIET)
NAMED_STEPS = 8


@dataclass(frozen=True)
class AccuracyStep:
    """Accuracy after one step.

    Attributes:
        name: of the step: the number of a round, or the name of a site in a chain.
        accuracy: in [0, 1].
        bytes: sent up until then; None: unknown.
    """

    name: str
    accuracy: float
    bytes: float | None


def steps(run: RunFolder) -> tuple[str, list[AccuracyStep]]:
    """The name of a run's steps, and the steps with a known accuracy."""
    hops = [as_table(hop) for hop in as_list(run.metrics.get("hops"))]
    if hops:
        total, measured = 0.0, []
        for hop in hops:
            total += as_number(hop.get("bytes")) or 0.0
            if (accuracy := as_number(hop.get("accuracy"))) is not None:
                measured.append(AccuracyStep(str(hop.get("site", "")), accuracy, total))
        return "site in the chain", measured
    rounds = [as_table(entry) for entry in as_list(run.metrics.get("rounds"))]
    known = []
    for entry in rounds:
        accuracy, number = as_number(entry.get("accuracy")), as_number(entry.get("round"))
        if accuracy is not None and number is not None:
            known.append(AccuracyStep(f"{number:.0f}", accuracy, as_number(entry.get("bytes_up"))))
    if len(rounds) == 1 and known and known[0].bytes is None:
        # A method that sends once: its only step has all bytes of the run.
        known = [replace(known[0], bytes=run.number("bytes", "up"))]
    return "round", known


def curves(runs: Mapping[str, Sequence[AccuracyStep]]) -> tuple[str, str]:
    """Draw the accuracy of several runs over rounds and over bytes sent up.

    A run of one step is a diamond at its accuracy and bytes, with a thin line to compare the others
    with.

    Args:
        runs: the steps of each run, by its name; the first run is this one.

    Returns:
        The picture over rounds and the picture over bytes, each as an SVG string.
    """
    most = max(max(float(step.name) for step in steps_) for steps_ in runs.values())
    sizes = [step.bytes for steps_ in runs.values() for step in steps_ if step.bytes]

    def draw_over(name: str) -> Callable[[Any], None]:
        def draw(figure: Any) -> None:
            axes = make_axes(figure, left=0.72, right=0.2, top=0.15, bottom=0.5)
            if name == "round":
                axes.set_xlim(0.5, max(most, 1.5) + 0.5)
            else:
                bytes_axis(axes, sizes)
            for index, (label, steps_) in enumerate(runs.items()):
                drawn = [step for step in steps_ if name == "round" or step.bytes]
                xs = [
                    float(step.name) if name == "round" else float(step.bytes or 0.0)
                    for step in drawn
                ]
                ys = [step.accuracy for step in drawn]
                once, colour = len(steps_) == 1, COLOURS[index % len(COLOURS)]
                axes.plot(
                    xs,
                    ys,
                    color=colour,
                    lw=2 if index == 0 else 1.3,
                    marker="D" if once else "o",
                    ms=7 if once else 4,
                    label=label,
                    ls="none" if once else "-",
                )
                if once and drawn:
                    axes.axhline(ys[0], color=colour, lw=0.8, ls=(0, (4, 3)), alpha=0.7)
            axes.set_ylim(
                *accuracy_range([step.accuracy for steps_ in runs.values() for step in steps_])
            )
            percent_axis(axes.yaxis)
            axes.grid(axis="y", color=FAINT)
            if name == "round":
                axes.xaxis.get_major_locator().set_params(integer=True)
                axes.set_xlabel("round")
                axes.legend(frameon=False, fontsize=8.5, loc="lower right")
            else:
                axes.set_xlabel("sent up by all sites together (log scale)")
            axes.set_ylabel("accuracy")

        return draw

    return render("curves-rounds", 2.8, draw_over("round")), render(
        "curves-bytes", 2.8, draw_over("bytes")
    )


def progress(what: str, series: Sequence[AccuracyStep], reference: float | None) -> str:
    """Draw accuracy over steps.

    Args:
        what: name of the steps, for the axis.
        series: the steps, in order.
        reference: the accuracy of the pooled head in [0, 1], drawn as a dashed line; None
            without one.

    Returns:
        The picture as an SVG string.
    """

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=0.72, right=0.5, top=0.25, bottom=0.7)
        values = [step.accuracy for step in series]
        axes.plot(
            range(len(series)),
            values,
            color=BLUE,
            lw=2,
            marker="o",
            ms=6 if len(series) <= 40 else 0,
        )
        low, high = accuracy_range(values + ([] if reference is None else [reference]))
        axes.set_ylim(low, high)
        axes.set_xlim(-0.4, len(series) - 0.6)
        axes.grid(axis="y", color=FAINT)
        percent_axis(axes.yaxis)
        every = -(-len(series) // NAMED_STEPS)
        shown = [i for i in range(len(series)) if (len(series) - 1 - i) % every == 0]
        labels = []
        for i in shown:
            size = series[i].bytes
            labels.append(
                shorten(series[i].name, 12) + ("" if size is None else f"\n{human_bytes(size)}")
            )
        axes.set_xticks(shown, labels)
        axes.set_xlabel(f"{what}, and bytes sent up until then")
        axes.set_ylabel("accuracy")
        axes.annotate(
            percent(values[-1]),
            (len(series) - 1, values[-1]),
            (0, 8),
            textcoords="offset points",
            ha="center",
            color=BLUE,
        )
        if reference is not None:
            axes.axhline(reference, color=QUIET, lw=1, ls=(0, (4, 3)))
            axes.text(-0.35, reference, "pooled head", va="bottom", color=QUIET, fontsize=8.5)

    return render("progress", 3.2, draw)

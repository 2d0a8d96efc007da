"""How well a model of labels, numbers or times answers, as the report shows it."""

from __future__ import annotations

from dataclasses import dataclass

from fedsurrogate.common.targets.measures import IN_WORDS
from fedsurrogate.common.targets.registry import TARGETS
from fedsurrogate.server_app.runs.json_values import as_numbers, as_table
from fedsurrogate.server_app.runs.reader import RunFolder


@dataclass(frozen=True)
class MeasuresView:
    """A table of measures, and the one that says most.

    Attributes:
        names: of the columns, in words.
        rows: whose test records, which answer, and a text for each column.
        score: the measure that says most, in words, such as "a mean AUROC of 0.912 over 3 answers";
            empty if it is not known.
        choices: what a target chose, and why.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[str, str, tuple[str, ...]], ...]
    score: str
    choices: tuple[str, ...] = ()


def measures_view(run: RunFolder) -> MeasuresView | None:
    """The measures of a run; None for a run of classes, or one that measured nothing.

    Args:
        run: whose metrics have them.
    """
    found = as_table(run.metrics.get("measures"))
    places = {"all sites": as_table(found.get("all"))}
    places |= {name: as_table(own) for name, own in as_table(found.get("per_site")).items()}
    rows = [
        (place, output, as_numbers(as_table(own)))
        for place, outputs in places.items()
        for output, own in outputs.items()
    ]
    if not rows:
        return None
    names = tuple(dict.fromkeys(name for _, _, own in rows for name in own))
    table = tuple(
        (place, output, tuple(_text(own.get(name)) for name in names))
        for place, output, own in rows
    )
    kind = TARGETS.get(str(as_table(run.manifest.get("config")).get("target")))
    together = [own for place, _, own in rows if place == "all sites"]
    return MeasuresView(
        tuple(IN_WORDS.get(name, name) for name in names),
        table,
        ""
        if kind is None
        else _score(kind.score, [own[kind.score] for own in together if kind.score in own]),
        _choices(run),
    )


def _choices(run: RunFolder) -> tuple[str, ...]:
    learning = as_table(run.metrics.get("learning"))
    found = ((key, learning.get(key)) for key in ("label code", "label moment"))
    return tuple(f"{key}: {value}" for key, value in found if isinstance(value, str))


def _text(value: float | None) -> str:
    """A measure; a hyphen where the test records do not determine it."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value.is_integer() else f"{value:.3g}"


def _score(name: str, values: list[float]) -> str:
    if not values:
        return ""
    mean, words = sum(values) / len(values), IN_WORDS.get(name, name)
    if len(values) == 1:
        return f"{words} {mean:.3f}"
    return f"a mean {words} of {mean:.3f} over {len(values)} answers"

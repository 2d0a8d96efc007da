"""Write report.html from a run folder: one file, no network, plots first. Missing or broken parts
get a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsurrogate.common.escapes import for_html, human_bytes, human_seconds, percent
from fedsurrogate.common.files import READABLE, replace_file
from fedsurrogate.common.pages.svg import (
    BLUE,
    NAMED_SITES,
    ORANGE,
    page_head,
    render_page,
    trusted,
    undrawn,
)
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.base import flatten

from ..runs.reader import TROUBLES, RunFolder, read_run
from ..runs.scores import AUROC, leading, scores_of
from ..runs.state import Json, as_list, as_number, as_numbers, as_table, natural_order
from .counts_view import CountsView, counts_views
from .images_view import images_view
from .plots import rows as plots
from .plots.rows import Series, accuracy_over, draw_rows, radii, sheets, steps
from .quality_view import metrics_view, privacy_view, quality_view
from .tables import (
    compared,
    comparison_table,
    csv_link,
    data_of,
    layout,
    of_other_records,
    tables_of,
    warnings_of,
    write_tables,
)

# Flower packs no file of an app whose name ends in .html or .j2, so the names of the templates end
# in .md.
TEMPLATES = Path(__file__).parent / "templates"
PICTURES = {
    "outcomes": "accuracy against communication cost",
    "accuracy": "accuracy at each site",
    "counts": "classes at each site",
}
PHASES = {
    "extract": "extracting features",
    "fit": "fitting surrogates",
    "wait": "messages and waiting",
    "learn": "learning the model",
    "chain": "along the chain",
    "evaluate": "evaluating the model",
}
STARTING, REST = "starting the processes", "everything else"
FATES = ("used", "late", "rejected", "dropped")
NAMED_IN_BANNER = 24
BASELINES = {
    "centralized": "centralized head",
    "ensemble": "ensemble of heads",
    "average": "average of heads",
}


def write_report(run_dir: Path, beside: Sequence[Path] = ()) -> Path:
    """Write `report.html` into a run folder. The same folder always gives the same bytes.

    Args:
        run_dir: the run folder.
        beside: other runs; their accuracy is drawn next to this run's, by round and by bytes.

    Returns:
        The path of the report.

    Raises:
        RunError: `run_dir` is not a run folder, or a run to compare has no accuracy on all test
            data.
    """
    run = read_run(run_dir)
    others = [(other.resolve().name, read_run(other)) for other in beside]
    filters = {"bytes": human_bytes, "seconds": human_seconds, "percent": percent}
    values = _page(run, run_dir.resolve(), others)
    html = render_page("page.html.j2.md", values, TEMPLATES, filters)
    path = run_dir / "report.html"
    # Whole, or not at all.
    replace_file(path, html, mode=READABLE, durable=False)
    return path


def write_csv(run_dir: Path, folder: Path, beside: Sequence[Path] = ()) -> list[Path]:
    """Write every table of a run's report to a CSV file.

    Args:
        run_dir: the run folder.
        folder: for the files; it is created.
        beside: other runs; with them there is a table that compares the runs.

    Returns:
        The files.

    Raises:
        RunError: `run_dir` is not a run folder, or a run to compare has no accuracy on all test
            data.
        OSError: a file cannot be written.
    """
    run = read_run(run_dir)
    tables = _tables(run)
    if beside:
        named = [(each.resolve().name, read_run(each)) for each in (run_dir, *beside)]
        tables["comparison"] = comparison_table(compared(named))
    return write_tables(tables, folder)


def _tables(run: RunFolder) -> dict[str, list[Sequence[object]]]:
    changed, unchanged = _settings(run.config)
    rows = sorted([*changed, *((key, value, value) for key, value in unchanged)])
    return tables_of(run, privacy_view(run), rows)


def _page(run: RunFolder, folder: Path, beside: Sequence[tuple[str, RunFolder]]) -> Json:
    pictures, privacy = _pictures(run), privacy_view(run)
    if drawn_sheets := sheets(folder):
        pictures["sheets"] = tuple(svg for _, svg in drawn_sheets)
    if drawn_radii := radii(run):
        pictures["radii"] = (drawn_radii,)
    counts = counts_views(folder)
    pictures |= {each.kind: each.pictures for each in counts if each.pictures}
    evaluated = any(each.kind == "evaluation" for each in counts)
    tables, warned, images = _tables(run), warnings_of(run, evaluated), images_view(folder)
    warned += images["warnings"] if images else []
    if beside:
        drawn_runs = compared(runs := [(folder.name, run), *beside])
        pictures["curves"] = accuracy_over(drawn_runs), accuracy_over(drawn_runs, by_bytes=True)
        tables["comparison"] = comparison_table(drawn_runs)
        warned += of_other_records(runs)
    unseen = undrawn()
    if unseen:
        pictures = {}
    changed, unchanged = _settings(run.config)
    private = {row["name"] for row in privacy["rows"]}
    measured = sorted(
        (s for s in run.sites if s.accuracy is not None), key=lambda site: site.accuracy or 0.0
    )
    return {
        "run": run,
        "folder": folder.name,
        "head": trusted(page_head(for_html(f"{run.method} · {folder.name}"))),
        "sheet_rounds": [f"Round {number}" for number, _ in drawn_sheets],
        "pictures": {key: [trusted(svg) for svg in svgs] for key, svgs in pictures.items()},
        "layout": layout(pictures),
        "times": _times(run),
        "tables": {name: csv_link(rows) for name, rows in tables.items()},
        "metric_values": (metric_values := metrics_view(run)),
        "quality": quality_view(run),
        "auroc_first": scores[AUROC]
        if not metric_values and leading(scores := scores_of(run.metrics)) == AUROC
        else None,
        "warnings": warned,
        "data": data_of(run),
        "counts": counts,
        "images": images,
        "counting": (counting := _counting(run, counts)),
        "without_pictures": unseen,
        "undrawn": []
        if counting or unseen or metric_values
        else [what for key, what in PICTURES.items() if key not in pictures],
        "lowest": measured[:3] if len(measured) > NAMED_SITES else [],
        "troubles": _troubles(run),
        "card": _card(run),
        "sites": sorted(run.sites, key=lambda site: not site.troubles),
        "sources": run.sources,
        "changed": changed,
        "unchanged": unchanged,
        "versions": sorted(as_table(run.manifest.get("versions")).items()),
        "unprotected": _who(
            [s.name for s in run.sites if s.status in ("used", "replied") and s.name not in private]
        ),
        "privacy": privacy,
    }


def _counting(run: RunFolder, counts: Sequence[CountsView]) -> str:
    """The heading of a run that counted records instead of learning; empty for others."""
    kind = flatten(run.config).get("counting.kind", "none")
    if kind == "none" or run.failure is not None:
        return ""
    titles = [each.title for each in counts if each.kind == kind]
    return titles[0] if titles else "Counts of records at the sites"


def _card(run: RunFolder) -> Json:
    """Number of sites by fate, and the share of missing data; empty if the run has not recorded
    them.
    """
    card = as_table(run.metrics.get("card"))
    share, invited, never_came = (
        run.number("card", key) for key in ("missing_share", "invited", "never_came")
    )
    if share is None or invited is None or never_came is None:
        return {}
    fates = {fate: len(as_list(card.get(fate)) or as_table(card.get(fate))) for fate in FATES}
    facts = {
        "state": card.get("state"),
        "missing_share": share,
        "invited": int(invited),
        "never_came": int(never_came),
    }
    absent = [str(name) for name in as_list(card.get("absent"))]
    facts |= {"nameless": max(0, int(never_came) - len(absent)), "names": card.get("names")}
    capped = {
        str(name): share for name, share in as_numbers(card.get("capped")).items() if 0 < share < 1
    }
    return (
        facts
        | fates
        | {"capped": sorted(capped.items()), "suspects": sorted(as_table(card.get("suspects")))}
        | {
            "without_records": [str(name) for name in as_list(card.get("without_records"))],
            "records_by_class": card.get("records_by_class"),
        }
    )


def _troubles(run: RunFolder) -> list[tuple[str, str, str]]:
    """Return (sites, problem, reason); sites with the same problem and reason share an entry."""
    groups: dict[tuple[str, str], list[str]] = {}
    for site in run.sites:
        for trouble in site.troubles:
            groups.setdefault(trouble, []).append(site.name)
    ordered = sorted(groups.items(), key=lambda group: (TROUBLES.index(group[0][0]), group[0][1]))
    lines = [(_who(names), what, why) for (what, why), names in ordered]
    for what in ("rejected", "dropped"):
        named = {name for (kind, _), names in ordered if kind == what for name in names}
        nameless = (run.number("sites", what) or 0) - len(named)
        if nameless > 0:
            lines.append(
                (f"{nameless:.0f} more", what, "events.jsonl has no site name and no reason")
            )
    return lines


def _who(names: Sequence[str]) -> str:
    """Return site names as one phrase. A long list is cut and refers to the table."""
    shown = ", ".join(names[:NAMED_IN_BANNER])
    more = (
        f" and {len(names) - NAMED_IN_BANNER} more (see Sites)"
        if len(names) > NAMED_IN_BANNER
        else ""
    )
    numbers = (
        ("site " if len(names) == 1 else "sites ")
        if names and all(name.isdecimal() for name in names)
        else ""
    )
    return numbers + shown + more


def _pictures(run: RunFolder) -> dict[str, tuple[str, ...]]:
    """Draw every picture for which the run has numbers."""
    pictures: dict[str, tuple[str, ...]] = {}
    per_site = list(run.numbers("accuracy", "per_site").values())
    model = run.number("accuracy", "model")
    outcomes = [
        (name, (accuracy, run.number("bytes", "compare", key)))
        for key, name in BASELINES.items()
        if (accuracy := run.number("accuracy", key)) is not None
    ]
    if run.accuracy is not None:
        outcomes.insert(0, ("this run", (run.accuracy, run.number("bytes", "up"))))
    if outcomes:
        ends = (min(per_site), max(per_site)) if per_site and model is None else None
        pictures["outcomes"] = (plots.accuracy_against_bytes(dict(outcomes), ends),)
    what, taken = steps(run)
    if len(taken) > 1:
        centralized = run.number("accuracy", "centralized")
        pictures["progress"] = (accuracy_over({"this run": taken}, what, centralized),)
    rows = list(run.sites)
    if len(rows) > NAMED_SITES:
        rows.sort(key=lambda site: -1.0 if site.accuracy is None else site.accuracy, reverse=True)
    names = [site.label for site in rows]
    if per_site:
        whose = "global model" if model is not None else "mean of sites"
        line = (f"{whose} {percent(run.accuracy)}", run.accuracy) if run.accuracy else None
        notes = [
            ("not measured" if site.status == "used" else site.status)
            if site.accuracy is None
            else percent(site.accuracy) + ("" if site.tested is None else f" of {site.tested:,.0f}")
            for site in rows
        ]
        pictures["accuracy"] = (
            draw_rows(
                "accuracy",
                names,
                [Series([site.accuracy for site in rows], BLUE)],
                ("site", "accuracy on the site's own test data"),
                shares=True,
                notes=notes,
                line=line,
            ),
        )
    classes = run.classes
    if classes and any(site.counts for site in rows):
        counts = np.array(
            [[site.counts.get(c, 0.0 if site.counts else np.nan) for c in classes] for site in rows]
        )
        pictures["counts"] = (plots.class_counts(names, classes, counts),)
    real, synthetic = (_points(run.projection.get(key)) for key in ("real", "synthetic"))
    if real is not None and synthetic is not None:
        named = [str(c) for c in as_list(run.projection.get("classes"))]
        pictures["features"] = plots.features(real, synthetic, named or classes)
    return pictures | _effects(run)


def _effects(run: RunFolder) -> dict[str, tuple[str, ...]]:
    """What each site costs the others, and what it gains itself; none if no effect is measured."""
    card = as_table(run.metrics.get("card"))
    measured = {name: as_numbers(row) for name, row in as_table(card.get("effects")).items()}
    measured = {name: row for name, row in measured.items() if {"harm", "gain"} <= row.keys()}
    largest = {name: max(row["harm"], row["gain"]) for name, row in measured.items()}
    if not any(value for row in measured.values() for value in (row["harm"], row["gain"])):
        return {}
    # Of many sites, those that change most.
    most = sorted(measured, key=lambda name: -largest[name])[:NAMED_SITES]
    sites = sorted(most, key=natural_order)
    series = [
        Series([measured[site][key] for site in sites], colour, name)
        for key, colour, name in (
            ("harm", ORANGE, "costs the others"),
            ("gain", BLUE, "gains itself"),
        )
    ]
    return {"effects": (draw_rows("effects", sites, series, ("site", "points"), shares=True),)}


def _times(run: RunFolder) -> list[tuple[str, float, float]]:
    """What took how many seconds, and which share of all, longest first."""
    seconds = {
        PHASES.get(name, name): value for name, value in run.numbers("seconds").items() if value > 0
    }
    total, command = seconds.pop("total", 0.0), seconds.pop("command", 0.0)
    if not seconds:
        return []
    rest = total - sum(seconds.values())
    if command - total > 0.01 * command:
        seconds[STARTING] = command - total
    if rest > 0.01 * total:
        seconds[REST] = rest
    every = sum(seconds.values())
    return [
        (name, each, each / every) for name, each in sorted(seconds.items(), key=lambda x: -x[1])
    ]


def _points(value: Any) -> plots.Points | None:
    """Two coordinates and the class of each point, (n, 3); None without points."""
    table = as_table(value)
    columns = [as_list(table.get(key)) for key in ("x", "y", "label")]
    rows = [
        (x, y, int(label))
        for x, y, label in zip(
            *([as_number(value) for value in column] for column in columns), strict=False
        )
        if x is not None and y is not None and label is not None and label >= 0
    ]
    return np.array(rows, dtype=np.float64) if rows else None


def _settings(config: Json) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Return the settings that differ from their default (key, value, default), and the others
    (key, value).
    """
    defaults = flatten(Settings().model_dump(by_alias=True))
    flat = dict(sorted(flatten(config).items()))
    if flat.get("task", defaults["task"]) != defaults["task"]:
        # Nobody set them: they are the rows of the target's code.
        flat.pop("classes", None)
    changed = [
        (k, str(v), str(defaults.get(k, "unknown to this version")))
        for k, v in flat.items()
        if v != defaults.get(k)
    ]
    return changed, [(k, str(v)) for k, v in flat.items() if v == defaults.get(k)]

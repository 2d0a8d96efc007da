"""What a report shows of the images at each site that a survey counted: their histograms, and warnings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.files import read_json

from ..runs.state import Json, as_list, as_number, as_numbers, as_table, at, clean

# A cell that no site fills by more than so many standard deviations of its noise is no row.
SEEN = 3.0
MORE, LESS, NOTHING = "▲", "▼", "-"


# A site's part of its images in a cell of a histogram: in words, and as a share for its colour.
Cell = tuple[str, float]


def images_view(folder: Path) -> Json | None:
    """The images of survey.json in a run folder; None without them.

    Args:
        folder: of the run.

    Returns:
        histograms: in the order of the settings, each with its title and unit, the names of sites, rows
        of the name of a cell and each site's part, and words below the table, which may be empty.
        warnings: sentences, each of which names a site. words: how these numbers are to be read.
    """
    try:
        content = clean(read_json(folder, "survey.json"))
    except RunError:
        return None
    images = as_table(content.get("images"))
    noise, histograms = as_numbers(images.get("noise")), as_table(images.get("histograms"))
    if not histograms:
        return None
    warnings = [
        f"Site {each.get('site')}: {each.get('why')}. Look at some of them before a run."
        for each in map(as_table, as_list(images.get("warnings")))
    ]
    return {
        "histograms": [_histogram(as_table(each), noise) for each in histograms.values()],
        "warnings": warnings,
        "words": _words(content, as_numbers(images.get("budget"))),
    }


def _words(content: Json, budget: Mapping[str, float]) -> list[str]:
    found = [
        "Parts of each site's images, in percent. "
        f"{MORE} and {LESS} mark a part that is larger or smaller than that of all other sites together, "
        "by a tenth of the images or more, and by more than noise and chance explain."
    ]
    if budget and (epsilon := as_number(at(content, "privacy", "epsilon"))):
        split = ", ".join(f"{share:.0%} for {name}" for name, share in budget.items())
        found.append(
            f"All counts are one release: epsilon {epsilon:g} was charged once at each site, and its "
            f"noise is split: {split}. A record, or a patient, adds at most one to each histogram."
        )
    return found


def _histogram(content: Json, noise: Mapping[str, float]) -> Json:
    names = [str(each) for each in as_list(content.get("cells"))]
    per_site, totals = as_table(content.get("per_site")), as_numbers(content.get("totals"))
    sites = {str(site): _counts(each, len(names)) for site, each in per_site.items()}
    hidden = {str(site) for site in as_list(content.get("hidden"))}
    shown = {site: counts for site, counts in sites.items() if site not in hidden}
    differing = as_table(content.get("differing"))
    cells = [
        cell
        for cell in range(len(names))
        if any(counts[cell] > SEEN * noise.get(site, 0.0) for site, counts in shown.items())
    ]
    rows = [
        (
            names[cell],
            [
                _cell(site, counts[cell], totals, as_table(differing.get(site)).get(names[cell]))
                if site in shown
                else (NOTHING, 0.0)
                for site, counts in sites.items()
            ],
        )
        for cell in cells
    ]
    title, unit = str(content.get("title", "")), str(content.get("unit", ""))
    words = f"Hidden by the noise: {', '.join(sorted(hidden))}." if hidden else ""
    named = f"{title} ({unit})" if unit else title
    return {"title": named, "sites": [*sites], "rows": rows, "words": words}


def _counts(values: object, length: int) -> list[float]:
    numbers = [as_number(each) or 0.0 for each in as_list(values)][:length]
    return numbers + [0.0] * (length - len(numbers))


def _cell(site: str, count: float, totals: Mapping[str, float], differs: object) -> Cell:
    share = min(1.0, max(0.0, count / max(1.0, totals.get(site, 0.0))))
    mark = "" if differs is None else f" {MORE if (as_number(differs) or 0.0) > 0 else LESS}"
    return f"{share:.0%}{mark}", share

"""Warnings about a result that a reader could take for better than it is."""

from __future__ import annotations

import json

from fedsurrogate.common.data_report import DataReport, reports_from
from fedsurrogate.common.identity import likely_one_remarks
from fedsurrogate.common.number_format import percent
from fedsurrogate.common.privacy.budget_remarks import budget_remarks
from fedsurrogate.server_app.report.quality_view import recorded_quality
from fedsurrogate.server_app.runs.chance import at_chance, largest_share, may_be_chance
from fedsurrogate.server_app.runs.json_values import as_list, as_number, as_numbers, as_table
from fedsurrogate.server_app.runs.missing_classes import missing_classes
from fedsurrogate.server_app.runs.reader import RunFolder

NAMED = 12


def warnings_of(run: RunFolder) -> list[str]:
    """One sentence for each warning, from what the run has recorded."""
    warnings = (
        _missing_classes(run),
        _no_better_than_chance(run),
        _unread(run),
        _odd(run),
        *_budget(run),
    )
    return [warning for warning in warnings if warning] if run.failure is None else []


def _missing_classes(run: RunFolder) -> str:
    """Warn about classes of which no site has a record, or whose noisy counts are no more than noise.
    It names no site.
    """
    per_site = as_table(as_table(run.metrics.get("privacy")).get("per_site"))
    counts = [
        (site.counts, as_numbers(as_table(per_site.get(site.name)).get("noise")).get("counts"))
        for site in run.sites
    ]
    missing = missing_classes(_wanted(run), counts, bool(run.metrics.get("privacy")))
    if not missing.names:
        return ""
    if missing.known == "noisy":
        return (
            f"Perhaps no site has a record of {', '.join(map(repr, missing.names[:NAMED]))}: the noisy "
            f"counts of all sites together are no more than noise (below {missing.bound:.0f}); check "
            "how the sites write the names of the classes."
        )
    shown = ", ".join(missing.names[:NAMED]) + (
        f" and {len(missing.names) - NAMED} more" if len(missing.names) > NAMED else ""
    )
    if len(missing.names) == 1:
        return f"No site has a record of class {shown}: the model cannot recognise it."
    return f"No site has a record of classes {shown}: the model cannot recognise them."


def _wanted(run: RunFolder) -> list[str]:
    """The classes of the model, and those that the settings list besides."""
    listed = as_table(run.manifest.get("config")).get("classes")
    names = listed.split(",") if isinstance(listed, str) and listed else []
    return list(dict.fromkeys([*run.classes, *names]))


def data_of(run: RunFolder) -> list[DataReport]:
    """The data reports of a simulation."""
    return reports_from(json.dumps(as_list(run.metrics.get("data"))))


def _unread(run: RunFolder) -> str:
    """Warn about images that only the run itself could find broken."""
    unread = [
        loss.why
        for report in data_of(run)
        for loss in report.left_out
        if "cannot be read" in loss.why
    ]
    return f"Left out: {'; '.join(unread)}." if unread else ""


def _odd(run: RunFolder) -> str:
    """Warn about what is odd in the data, such as patients in both training and test."""
    # Another warning has classes without a record.
    odd = [remark for report in data_of(run) for remark in report.odd]
    odd += likely_one_remarks(run.classes)
    odd = [remark for remark in dict.fromkeys(odd) if not remark.startswith("no record of")]
    return f"Odd in the data: {'; '.join(odd)}." if odd else ""


def _budget(run: RunFolder) -> list[str]:
    """Warn about a budget that promises little: the records of sites are as their noisy counts say."""
    config = as_table(run.manifest.get("config"))
    epsilon, delta = (as_number(config.get(key)) or 0.0 for key in ("epsilon", "delta"))
    known = [round(sum(site.counts.values())) for site in run.sites if site.counts]
    fewest = min((count for count in known if count > 0), default=0)
    return [f"{each[:1].upper()}{each[1:]}." for each in budget_remarks(epsilon, delta, fewest)]


def _no_better_than_chance(run: RunFolder) -> str:
    """Warn about a model that may tell nothing apart: neither the interval of its AUROC nor that of
    its balanced accuracy is above chance.
    """
    if (quality := recorded_quality(run)) is None:
        return _no_better_than_the_largest_class(run)
    if not (found := at_chance(quality)):
        return ""
    limits = " and ".join(
        f"that of its {name} is {each.low:.3f} to {each.high:.3f}, where chance has {chance:.3f}"
        for name, chance, each in found
    ).replace("that of", "the 95 % interval of", 1)
    epsilon = run.number("privacy", "epsilon")
    advice = "check data, labels, backbone and the method's settings"
    if epsilon:
        advice = (
            f"epsilon = {epsilon:g} needs more records of each class, or a larger epsilon; classes that "
            "differ in the level or the scale of few columns need features.ranges; "
            "without privacy see if it learns"
        )
    return f"The model may be no better than chance: {limits}. If it should be better, {advice}."


def _no_better_than_the_largest_class(run: RunFolder) -> str:
    """For a run that measured accuracy alone, which does not show whether a model tells apart."""
    own = as_table(run.metrics.get("accuracy"))
    counts = [site.counts for site in run.sites]
    majority = largest_share(own, counts)
    if run.accuracy is None or majority is None or not may_be_chance(None, own, counts):
        return ""
    return (
        f"The accuracy, {percent(run.accuracy)}, is not above that of always giving the largest class, "
        f"{percent(majority)}. Accuracy alone does not show whether the model tells classes apart, and "
        "this run measured nothing else: evaluate the model, which measures its AUROC."
    )

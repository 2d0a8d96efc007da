"""Data for the report's privacy section, from metrics.json; missing values are left out."""

from __future__ import annotations

import math

from fedsurrogate.server_app.runs.json_values import (
    Json,
    as_list,
    as_number,
    as_numbers,
    as_table,
    at,
    natural_order,
)
from fedsurrogate.server_app.runs.reader import RunFolder

STATISTICS = {"counts": "class sizes", "sums": "class sums", "squares": "second moments"}
MECHANISMS = {
    "sums": "noisy class sums",
    "secure-sums": "noise in a secure sum",
    "counts": "noise on counts",
    "dp-em": "noisy EM (DP-EM)",
    "theorem-4.1": "FedPFT theorem 4.1",
}


def privacy_view(run: RunFolder) -> Json:
    """All values that the privacy section of the page shows."""
    privacy = as_table(at(run.metrics, "privacy"))
    per_site = as_table(privacy.get("per_site"))
    rows = [_row(name, as_table(per_site[name])) for name in sorted(per_site, key=natural_order)]
    epsilon, delta = as_number(privacy.get("epsilon")), as_number(privacy.get("delta"))
    units = {row["unit"] for row in rows if row["unit"]} or {"record"}
    config = as_table(run.manifest.get("config"))
    return {
        "private": epsilon is not None or bool(rows),
        "epsilon": epsilon,
        "seed": config.get("noise-seed") or 0,
        "delta": delta,
        "one_in": round(1 / delta) if delta else None,
        "factor": math.exp(min(epsilon, 700.0)) if epsilon is not None else None,
        "certainty": 1 / (1 + math.exp(-epsilon)) if epsilon is not None and epsilon >= 0 else None,
        "units": sorted(units),
        "relation": str(privacy.get("relation") or "add or remove one record"),
        "covers": str(privacy.get("covers") or ""),
        "not_covered": [str(item) for item in as_list(privacy.get("not_covered"))],
        "dropped": [str(name) for name in as_list(privacy.get("dropped_classes"))],
        # One, and several, of what a run with this target learns.
        "learns": ("label", "labels") if config.get("target") == "labels" else ("class", "classes"),
        "rows": rows,
        "statistics": [
            (key, text)
            for key, text in STATISTICS.items()
            if any(key in row["noise"] for row in rows)
        ],
        "signals": [
            (key, text)
            for key, text in STATISTICS.items()
            if any(key in row["signal"] for row in rows)
        ],
        "tight": any(row["tight"] is not None for row in rows),
        "sum": _sum_sentences(run.metrics),
        "asked": as_number(config.get("epsilon")) or None,
    }


def _sum_sentences(metrics: Json) -> list[str]:
    """Who could see what in a secure sum, in plain words; empty for other runs. metrics: content of
    metrics.json.
    """
    learning = as_table(metrics.get("learning"))
    count, members = as_number(learning.get("secure-sum-of")), as_number(learning.get("members"))
    if count is None or members is None:
        return []
    colluding, least = (
        as_number(learning.get("colluding")) or 0,
        as_number(learning.get("least")) or 0,
    )
    sentences = [
        f"The coordinator saw only the secure sum of {count:.0f} of {members:.0f} sites, at least "
        f"{least:.0f} by the sites' own check, and no site's part of it. What only one site has, "
        "such as a class, is in the sum as that site has it.",
    ]
    if learning.get("keys") == "pinned by every site":
        sentences.append(
            "Every site knew the keys of the others (peers), so the coordinator could not make up "
            "sites."
        )
    else:
        sentences.append(
            "The keys were sent by the coordinator, which could have made up sites. Sites that set "
            "peers exclude this."
        )
    if (local := as_number(learning.get("local-epsilon"))) is not None:
        sentences.append(
            "The guarantee holds while the number of sites that tell the coordinator their noise is "
            f"at most {colluding:.0f} (central privacy through secure summation). Without this "
            f"assumption, a site's own noise alone gives ε = {local:.3g}."
        )
    elif as_table(metrics.get("privacy")):
        sentences.append(
            "Each site's part has the noise of its own training steps, so its guarantee rests on "
            "no other site."
        )
    else:
        sentences.append(
            "The sum has no noise: it may show something about single records, above all in small "
            "classes."
        )
    return sentences


def privacy_line(metrics: Json) -> str:
    """Privacy guarantee in one line: "sums, epsilon 4, delta 1e-05, for one record"; "none" without
    a guarantee.

    Example:
        >>> sites = {"north": {"unit": "record"}}
        >>> privacy = {"mechanism": "sums", "epsilon": 4.0, "delta": 1e-5, "per_site": sites}
        >>> privacy_line({"privacy": privacy})
        'sums, epsilon 4, delta 1e-05, for one record'
    """
    privacy = as_table(metrics.get("privacy"))
    parts = [str(privacy["mechanism"])] if privacy.get("mechanism") else []
    parts += [
        f"{key} {number:g}"
        for key in ("epsilon", "delta")
        if (number := as_number(privacy.get(key))) is not None
    ]
    units = {
        str(site["unit"])
        for site in as_table(privacy.get("per_site")).values()
        if as_table(site).get("unit")
    }
    return ", ".join(parts + [f"for one {' or '.join(sorted(units))}"] * bool(units)) or "none"


def _row(name: str, site: Json) -> Json:
    mechanism = str(site.get("mechanism") or "")
    return {
        "name": name,
        "unit": str(site.get("unit") or ""),
        "epsilon": as_number(site.get("epsilon")),
        "delta": as_number(site.get("delta")),
        "tight": as_number(site.get("epsilon_tight")),
        "mechanism": MECHANISMS.get(mechanism, mechanism),
        "multiplier": as_number(site.get("noise_multiplier")),
        "noise": as_numbers(site.get("noise")),
        "signal": as_numbers(site.get("signal_to_noise")),
    }

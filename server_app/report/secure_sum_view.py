"""Sentences of the report about a secure sum: who could see what, and under which assumptions."""

from __future__ import annotations

from server_app.runs.json_values import Json, as_number, as_table


def sum_sentences(metrics: Json) -> list[str]:
    """Who could see what in a secure sum, in plain words; empty for other runs. metrics: content of metrics.json."""
    found = as_table(metrics.get("learning"))
    count, members = as_number(found.get("secure-sum-of")), as_number(found.get("members"))
    if count is None or members is None:
        return []
    colluding, least = as_number(found.get("colluding")) or 0, as_number(found.get("least")) or 0
    sentences = [
        f"The coordinator saw only the secure sum of {count:.0f} of {members:.0f} sites, at least {least:.0f} by the sites' "
        "own check, and no site's part of it. What only one site has, such as a class, is in the sum as that site has it.",
    ]
    if found.get("keys") == "pinned by every site":
        sentences.append("Every site knew the keys of the others (peers), so the coordinator could not make up sites.")
    else:
        sentences.append(
            "The keys were sent by the coordinator, which could have made up sites. Sites that set peers exclude this."
        )
    if (local := as_number(found.get("local-epsilon"))) is not None:
        sentences.append(
            f"The guarantee holds while at most {colluding:.0f} sites tell the coordinator their noise (central privacy "
            f"through secure summation). Without this assumption, a site's own noise alone gives ε = {local:.3g}."
        )
    elif as_table(metrics.get("privacy")):
        sentences.append(
            "Each site's part has the noise of its own training steps, so its guarantee rests on no other site."
        )
    else:
        sentences.append("The sum has no noise: it may show something about single records, above all in small classes.")
    return sentences
